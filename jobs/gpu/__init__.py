"""Owns the checks and figures of raylance on a GPU; never asserts a speed."""
