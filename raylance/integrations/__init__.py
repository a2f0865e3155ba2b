"""Owns the ways into Ray Train and torch: DataConfig, checkpoints, torch_data; never reads or decodes itself."""
