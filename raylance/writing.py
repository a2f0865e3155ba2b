"""Writes columns into datasets, computed values or those of a table, and datasets of Ray Data as Lance datasets."""

from typing import TYPE_CHECKING, Any

from raylance.source.provenance import Provenance
from raylance.source.write_back import add_column, read_values, write_column, write_values

if TYPE_CHECKING:
    from raylance.api.ray_data import from_ray_dataset

__all__ = ["Provenance", "add_column", "from_ray_dataset", "read_values", "write_column", "write_values"]


def __getattr__(name: str) -> Any:
    if name != "from_ray_dataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from raylance.api.ray_data import from_ray_dataset  # loads Ray Data

    return from_ray_dataset
