"""The execution of the work that the dispatcher decides, for one rank, by helpers."""
