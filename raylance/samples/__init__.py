"""Of which stored rows each sample is made; NumPy alone."""
