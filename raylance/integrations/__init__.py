"""The integration with Ray Train and torch: DataConfig, checkpoints, torch_data."""
