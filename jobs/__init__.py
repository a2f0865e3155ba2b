"""Owns jobs that run by hand and under a job server; they use raylance's public names only."""
