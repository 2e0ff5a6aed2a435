"""What denoises, encodes and decodes: policy, loading, LoRA, kernels, weights and their sums."""
