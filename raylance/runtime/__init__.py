"""Owns the execution of one rank's work, which the dispatcher decides and a runtime does; never knows orders."""
