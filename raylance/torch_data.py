"""Owns the public name `raylance.torch_data`; all of it lies in `raylance.integrations.torch_data`."""

from raylance.integrations.torch_data import IterableDataset, Loader, MapDataset, RowSampler, find_place

__all__ = ["IterableDataset", "Loader", "MapDataset", "RowSampler", "find_place"]
