"""The datasets and the sampler of `raylance.torch_data`, for torch's DataLoader."""
