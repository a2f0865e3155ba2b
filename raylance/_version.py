"""The version of raylance, which pyproject.toml reads from here."""

__version__ = "0.12.0"
