"""Owns the way from files and tables to a Lance dataset that raylance can train on; `command` is where it starts."""
