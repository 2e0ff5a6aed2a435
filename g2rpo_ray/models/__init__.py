"""What denoises, encodes and decodes: loading, the FLUX policy, LoRA, VAE, text encoders."""
