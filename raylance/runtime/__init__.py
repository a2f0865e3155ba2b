"""Owns the execution of the work that the dispatcher decides, for one rank, by helpers; never knows orders."""
