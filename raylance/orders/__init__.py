"""Owns the orders of an epoch, which map positions to selected rows by NumPy alone; never reads data or knows ranks."""
