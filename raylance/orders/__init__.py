"""The orders of an epoch, which map positions to selected rows by NumPy alone."""
