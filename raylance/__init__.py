"""Owns the public names of raylance, loaded on first use: `import raylance` loads neither Ray nor torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylance.batches import Batches
    from raylance.errors import (
        BadRowError,
        ConfigError,
        CoverageError,
        DatasetError,
        HelperError,
        PlacementError,
        RaylanceError,
        StateError,
    )
    from raylance.handle import Dataset
    from raylance.images import CenterCrop, Image, RandomResizedCrop
    from raylance.lanes import Sequential, ShardShuffle, WindowShuffle
    from raylance.loader import RankLoader
    from raylance.mixture import mix
    from raylance.opening import dataset
    from raylance.order import RowShuffle
    from raylance.packing import PackTokens
    from raylance.permutation import row_rng
    from raylance.sampling import ClassBalanced, Weighted
    from raylance.spec import Options
    from raylance.split import FractionSplit, RangeSplit, ValueSplit
    from raylance.train import DataConfig, report, restore

__version__ = "0.2.0"

_MODULES = {
    "handle": ("Dataset",),
    "opening": ("dataset",),  # not dataset.py: the module would take the place of the function
    "errors": (
        "BadRowError",
        "ConfigError",
        "CoverageError",
        "DatasetError",
        "HelperError",
        "PlacementError",
        "RaylanceError",
        "StateError",
    ),
    "images": ("CenterCrop", "Image", "RandomResizedCrop"),
    "batches": ("Batches",),
    "loader": ("RankLoader",),
    "lanes": ("Sequential", "ShardShuffle", "WindowShuffle"),
    "mixture": ("mix",),
    "order": ("RowShuffle",),
    "packing": ("PackTokens",),
    "permutation": ("row_rng",),
    "sampling": ("ClassBalanced", "Weighted"),
    "spec": ("Options",),
    "split": ("FractionSplit", "RangeSplit", "ValueSplit"),
    "train": ("DataConfig", "report", "restore"),
}
_OWNERS = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "BadRowError",
    "Batches",
    "CenterCrop",
    "ClassBalanced",
    "ConfigError",
    "CoverageError",
    "DataConfig",
    "Dataset",
    "DatasetError",
    "FractionSplit",
    "HelperError",
    "Image",
    "Options",
    "PackTokens",
    "PlacementError",
    "RandomResizedCrop",
    "RangeSplit",
    "RankLoader",
    "RaylanceError",
    "RowShuffle",
    "Sequential",
    "ShardShuffle",
    "StateError",
    "ValueSplit",
    "Weighted",
    "WindowShuffle",
    "dataset",
    "mix",
    "report",
    "restore",
    "row_rng",
]


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module 'raylance' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"raylance.{_OWNERS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
