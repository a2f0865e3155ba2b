"""Owns what each rank gets in each step, and where a run stands; NumPy alone, never reads data."""
