"""Owns what `raylance.torch_data` gives: raylance under torch's DataLoader; never starts Ray or an actor."""
