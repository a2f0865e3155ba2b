"""Owns decoding and the user's transform, between reading and batches; never reads storage or knows a plan."""
