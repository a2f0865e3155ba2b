"""Owns what is read from Lance: version, selection, rows; never decides who gets which."""
