"""Owns the objects that users hold: datasets, mixtures and loaders; never reads or decodes rows itself."""
