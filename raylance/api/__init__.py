"""The objects that users hold: datasets, mixtures and loaders."""
