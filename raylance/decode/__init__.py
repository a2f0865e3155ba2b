"""Decoding and the user's transform, between reading and batches."""
