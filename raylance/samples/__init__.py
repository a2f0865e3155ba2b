"""The stored rows that make up each sample, by NumPy alone."""
