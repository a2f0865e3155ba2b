"""Owns the orders of an epoch, from position to selected row, by NumPy alone; never reads data or knows ranks."""
