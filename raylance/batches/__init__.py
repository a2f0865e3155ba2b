"""Owns what a consumer gets: tables put together, converted, on their device; never decides which rows."""
