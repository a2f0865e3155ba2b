"""Owns the making of batches: assembly, conversion, move to the device; never decides which rows a batch has."""
