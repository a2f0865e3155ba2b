"""Owns the version of raylance, which pyproject.toml takes from here; imports nothing."""

__version__ = "0.10.0"
