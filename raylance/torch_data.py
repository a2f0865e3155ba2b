"""Owns raylance under `torch.utils.data.DataLoader`, for training without Ray; never starts Ray or an actor.

Two styles, with the batches of `raylance.RankLoader`: `MapDataset` and its `RowSampler`, or `IterableDataset`. `Loader`
is a DataLoader for either, and counts what it hands out: what workers prefetch is not consumed. With a plain DataLoader
that is the caller's: `set_epoch()` before each epoch, and `consumed()` for each batch. torchdata's StatefulDataLoader
keeps the position of each worker in a state of its own, and needs `set_epoch()` alone.
"""

from raylance.environment.process import find_place
from raylance.integrations.torch_data.iterable import IterableDataset
from raylance.integrations.torch_data.loader import Loader
from raylance.integrations.torch_data.map_style import MapDataset, RowSampler

__all__ = ["IterableDataset", "Loader", "MapDataset", "RowSampler", "find_place"]
