"""Owns `mix()`, which makes one handle of several; never reads, and never starts an actor."""

import dataclasses
import math
from collections.abc import Mapping

from raylance._dataset.dataset import Dataset
from raylance.columns import dataset_names
from raylance.errors import ConfigError
from raylance.orders.mixture import Component, MixOrder, quotas
from raylance.planning.plan import REMAINDERS, Remainder
from raylance.settings import Delivery, Feed
from raylance.source.mixture import mix_rows


def mix(
    parts: Mapping[str, tuple[Dataset, float]],
    *,
    stop: str | int = "first_exhausted",
    remainder: Remainder = "drop",
) -> Dataset:
    """Mixes datasets by weight, each in its own order.

    Every stretch of up to 1,000 positions holds each dataset's exact quota, so every global batch is close to the
    weights. Weights that no such stretch keeps are rounded to a thousandth; for one that is less than that, a stretch
    has up to 1,000,000 positions. Batches carry the row offsets of their own dataset, and under `_component` its place
    among the names, with `with_row_offset=True`.

    Args:
        parts: By name: the dataset, and its weight, a positive number.
        stop: "first_exhausted" ends an epoch before any dataset would repeat a row; "all_exhausted" when every dataset
            was seen whole, the shorter ones more than once; a number after so many rows.
        remainder: What becomes of the rows behind the last whole step.

    Returns:
        A handle as `raylance.dataset` returns it. Its checkpoints say where each dataset stands.

    Raises:
        ConfigError: For no datasets, a weight that is not positive or too small to be kept, datasets of unlike columns
            or decoding, or a `stop` that is none.
    """
    if not parts:
        raise ConfigError("mix() got no dataset: give a dict of name to (dataset, weight).")
    if remainder not in REMAINDERS:
        raise ConfigError(f"remainder={remainder!r}: must be one of {', '.join(map(repr, REMAINDERS))}.")
    first = next(iter(parts))
    for name, (dataset, weight) in parts.items():
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"mix(): the weight of {name!r} is {weight!r}; give a positive number, or leave it out.")
        _check_alike(name, dataset, first, parts[first][0])
    feeds, deliveries = zip(*(dataset.opened for dataset, _ in parts.values()), strict=True)
    shares = quotas([weight for _, weight in parts.values()])
    components = tuple(
        Component(
            name=name, order=delivery.order, seed=delivery.seed, rows=delivery.rows, quota=quota, tables=delivery.tables
        )
        for name, delivery, quota in zip(parts, deliveries, shares, strict=True)
    )
    rows = mix_rows({name: feed.source for name, feed in zip(parts, feeds, strict=True)})
    feed = Feed(
        source=rows,
        delivers=feeds[0].delivers,
        decoding=feeds[0].decoding and dataclasses.replace(feeds[0].decoding, datasets=dataset_names(rows.uri)),
        list_lengths={
            name: length if all(feed.list_lengths.get(name) == length for feed in feeds) else None
            for name, length in feeds[0].list_lengths.items()
        },
    )
    selection = rows.load_selection()
    delivery = Delivery(
        filter={name: delivery.filter for name, delivery in zip(parts, deliveries, strict=True)},
        split={name: delivery.split for name, delivery in zip(parts, deliveries, strict=True)},
        rows=selection.rows,
        fingerprint=selection.fingerprint,
        order=MixOrder(components=components, stop=stop),
        seed=deliveries[0].seed,
        remainder=remainder,
        masks_bad_rows=deliveries[0].masks_bad_rows,
    )
    return Dataset(feed, delivery)


def _check_alike(name: str, dataset: Dataset, first_name: str, first: Dataset) -> None:
    """Refuses a dataset whose rows make no batch with those of the first."""
    (feed, delivery), (first_feed, first_spec) = dataset.opened, first.opened
    if not dataset.schema.equals(first.schema, check_metadata=False):
        raise ConfigError(
            f"mix(): {name!r} delivers {_fields(dataset)}, {first_name!r} delivers {_fields(first)}; a "
            "batch needs one schema. Choose columns=, decode= and transform= so that they agree."
        )
    if delivery.masks_bad_rows != first_spec.masks_bad_rows:
        raise ConfigError(f"mix(): {name!r} and {first_name!r} have unlike on_bad_row=; use the same for all.")
    if _decoding(feed) != _decoding(first_feed):
        raise ConfigError(
            f"mix(): {name!r} and {first_name!r} have unlike decode= or transform=; use the same for all."
        )
    if isinstance(delivery.order, MixOrder):
        raise ConfigError(f"mix(): {name!r} is a mixture itself; mix all datasets in one call.")


def _fields(dataset: Dataset) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in dataset.schema)


def _decoding(feed: Feed) -> object:
    return None if feed.decoding is None else (feed.decoding.decoders, feed.decoding.transform)
