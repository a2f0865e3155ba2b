"""Owns the side-by-side measurement of raylance and its peers; `command` is where it starts."""
