"""Owns `mix()`, which makes one handle of several; never reads, and never starts an actor."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from raylance.api.dataset import Dataset
from raylance.arguments import check_integer
from raylance.columns import dataset_names
from raylance.errors import ConfigError
from raylance.orders.mixture import Component, MixOrder, quotas
from raylance.planning.plan import REMAINDERS, Remainder
from raylance.settings import DeliverySpec, ReadSpec
from raylance.source.mixture import mix_rows


def mix(
    parts: Mapping[str, tuple[Dataset, float]],
    *,
    stop: str | int = "first_exhausted",
    window_bytes: int | None = None,
    remainder: Remainder = "drop",
) -> Dataset:
    """Mixes datasets by weight, each in its own order.

    Every stretch of up to 1,000 positions holds each dataset's quota, so every global batch is close to it. Weights
    that such a stretch allows are kept exactly; others are rounded to a thousandth of all rows, which is much of a rare
    dataset's: 0.0135 becomes 0.014. Where a weight is less than that, a stretch has up to 1,000,000 positions, and
    keeps each weight within 1 % or so. `plan()` shows the shares that they came to. Batches carry the row offsets of
    their own dataset, and under `_component` its place among the names, with `with_row_offset=True`.

    Args:
        parts: By name: the dataset, and its weight, a positive number.
        stop: "first_exhausted" ends an epoch before any dataset would repeat a row; "all_exhausted" when every dataset
            was seen whole, the shorter ones more than once; a number after so many rows.
        window_bytes: As `raylance.dataset` takes it, for all datasets together: each has its share. They are given
            without one.
        remainder: What becomes of the rows behind the last whole step.

    Returns:
        A handle as `raylance.dataset` returns it. Its checkpoints say where each dataset stands.

    Raises:
        ConfigError: For no datasets, a weight that is not positive or too small to be kept, datasets of unlike columns
            or decoding, or a `stop` that is none.
    """
    _check_parts(parts)
    if remainder not in REMAINDERS:
        raise ConfigError(f"remainder={remainder!r}: must be one of {', '.join(map(repr, REMAINDERS))}.")
    window_bytes = None if window_bytes is None else check_integer("mix(): window_bytes", window_bytes, 1)
    first, schemas = next(iter(parts)), {name: dataset.schema for name, (dataset, _) in parts.items()}
    for name, (dataset, _) in parts.items():
        _check_alike(name, dataset, schemas[name], first, parts[first][0], schemas[first])
    feeds, deliveries = zip(*(dataset.opened for dataset, _ in parts.values()), strict=True)
    shares = quotas([weight for _, weight in parts.values()])
    components = tuple(
        Component(
            name=name, order=delivery.order, seed=delivery.seed, rows=delivery.rows, quota=quota, tables=delivery.tables
        )
        for name, delivery, quota in zip(parts, deliveries, shares, strict=True)
    )
    rows = mix_rows({name: feed.source for name, feed in zip(parts, feeds, strict=True)})
    feed = ReadSpec(
        source=rows,
        delivers=feeds[0].delivers,
        decoding=feeds[0].decoding and dataclasses.replace(feeds[0].decoding, datasets=dataset_names(rows.uri)),
        list_lengths={
            name: length if all(feed.list_lengths.get(name) == length for feed in feeds) else None
            for name, length in feeds[0].list_lengths.items()
        },
        list_dtypes=feeds[0].list_dtypes,
    )
    selection = rows.load_selection()
    delivery = DeliverySpec(
        filter={name: delivery.filter for name, delivery in zip(parts, deliveries, strict=True)},
        split={name: delivery.split for name, delivery in zip(parts, deliveries, strict=True)},
        rows=selection.rows,
        fingerprint=selection.fingerprint,
        order=MixOrder(components=components, stop=stop),
        seed=deliveries[0].seed,
        remainder=remainder,
        masks_bad_rows=deliveries[0].masks_bad_rows,
        window_bytes=window_bytes,
    )
    return Dataset(feed, delivery)


def _check_parts(parts: Any) -> None:
    """Refuses what is no dict of name to (dataset, weight)."""
    if not isinstance(parts, Mapping) or not parts:
        found = f"takes a dict, and got {type(parts).__name__}" if parts else "got no dataset"
        raise ConfigError(f"mix() {found}: give a dict of name to (dataset, weight).")
    for name, part in parts.items():
        if not (isinstance(name, str) and name):
            raise ConfigError(f"mix(): a dataset is named {name!r}; give it a name that checkpoints can hold, a str.")
        if isinstance(part, Dataset) or not (isinstance(part, tuple | list) and len(part) == 2):
            raise ConfigError(f"mix(): {name!r} is {part!r}; give (dataset, weight), such as (dataset, 0.5).")
        dataset, weight = part
        if not isinstance(dataset, Dataset):
            raise ConfigError(f"mix(): {name!r} has the dataset {dataset!r}; give what raylance.dataset returns.")
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not (is_number and 0 < weight < math.inf):
            raise ConfigError(f"mix(): the weight of {name!r} is {weight!r}; give a positive number, or leave it out.")


def _check_alike(
    name: str, dataset: Dataset, schema: pa.Schema, first_name: str, first: Dataset, first_schema: pa.Schema
) -> None:
    """Refuses a dataset whose rows make no batch with those of the first."""
    (feed, delivery), (first_feed, first_spec) = dataset.opened, first.opened
    if not schema.equals(first_schema, check_metadata=False):
        raise ConfigError(
            f"mix(): {name!r} delivers {_fields(schema)}, {first_name!r} delivers {_fields(first_schema)}; a "
            "batch needs one schema. Choose columns=, decode= and transform= so that they agree."
        )
    if delivery.masks_bad_rows != first_spec.masks_bad_rows:
        raise ConfigError(f"mix(): {name!r} and {first_name!r} have unlike on_bad_row=; use the same for all.")
    if delivery.window_bytes is not None:
        raise ConfigError(
            f"mix(): {name!r} has window_bytes={delivery.window_bytes:,} of its own, and the datasets of a mixture "
            "share the memory of one loader. Pass window_bytes= to mix() instead."
        )
    if delivery.masks_bad_rows and _max_bad_rows(feed) != _max_bad_rows(first_feed):
        raise ConfigError(
            f"mix(): {name!r} has max_bad_rows={_max_bad_rows(feed)!r}, {first_name!r} has "
            f"{_max_bad_rows(first_feed)!r}; a rank counts the rows of all together, so use the same for all."
        )
    if _decoding(feed) != _decoding(first_feed):
        raise ConfigError(
            f"mix(): {name!r} and {first_name!r} have unlike decode= or transform=; use the same for all."
        )
    if isinstance(delivery.order, MixOrder):
        raise ConfigError(f"mix(): {name!r} is a mixture itself; mix all datasets in one call.")


def _fields(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _decoding(feed: ReadSpec) -> object:
    return None if feed.decoding is None else (feed.decoding.decoders, feed.decoding.transform)


def _max_bad_rows(feed: ReadSpec) -> object:
    return feed.decoding and feed.decoding.max_bad_rows
