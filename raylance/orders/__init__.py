"""Owns what an epoch's order is: position to selected row; NumPy alone, never reads data, knows no ranks."""
