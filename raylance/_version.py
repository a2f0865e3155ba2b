"""Owns the version of raylance, which pyproject.toml reads from here; never imports anything."""

__version__ = "0.11.0"
