"""Owns the training of an image classifier from a Lance dataset; `command` is where it starts."""
