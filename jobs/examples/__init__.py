"""One short program for each guide of Ray Train and each framework."""
