"""Owns who does the work of a rank, and when: the dispatcher decides, a runtime does; never knows orders."""
