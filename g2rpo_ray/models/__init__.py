"""What denoises, encodes and decodes: loading, the policy, LoRA, VAE, text; a folder a family."""
