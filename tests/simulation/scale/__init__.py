"""Owns how raylance behaves on many ranks: simulated by what was measured, and compared with real runs."""
