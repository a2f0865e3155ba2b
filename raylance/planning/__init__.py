"""The rows of each rank in each step, and the position of a run, by NumPy alone."""
