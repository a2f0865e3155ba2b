"""Owns the integration with Ray Train and torch: DataConfig, checkpoints, torch_data; never reads or decodes rows."""
