"""Owns the batches of a consumer: assembled, converted, moved to the device; never decides which rows they have."""
