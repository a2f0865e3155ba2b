"""Owns the rows of each rank in each step, and the position of a run, with NumPy alone; never reads data."""
