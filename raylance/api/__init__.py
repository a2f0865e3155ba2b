"""Owns what users hold: datasets, mixtures and loaders; never reads or decodes itself."""
