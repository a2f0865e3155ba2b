"""Owns the datasets and the sampler of `raylance.torch_data`, for torch's DataLoader; never starts Ray or an actor."""
