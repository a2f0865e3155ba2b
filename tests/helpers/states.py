"""Owns what states of tests are made of, and states as older versions of raylance would have written them."""

from collections.abc import Mapping
from typing import Any

from raylance.orders.shuffles import WindowShuffle
from raylance.planning.delivery_spec import DeliverySpec

ORIGIN = {
    "uri": "a.lance",
    "branch": None,
    "version": 3,
    "identity": "i",
    "columns": ["image", "label"],
    "decode": [],
    "transform": None,
    "codecs": {},
}
DELIVERY = DeliverySpec(
    uri="a.lance",
    row_bytes=8.0,
    filter="x > 1",
    split=None,
    rows=100,
    fingerprint="f",
    order=WindowShuffle(shard_rows=10, window_shards=2, lanes=4),
    seed=0,
    remainder="drop",
    masks_bad_rows=False,
)

SINCE_FORMAT = {
    2: ["branch", "identity", "columns", "decode", "transform"],
    3: ["codecs"],
    4: ["window_bytes", "step", "global_step", "checksum"],
}
"""Fields of a state by the format that brought them."""


def as_of_format(number: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as an older raylance would have written it."""
    later = {name for since, names in SINCE_FORMAT.items() if since > number for name in names}
    names = {"dp_size": "world_size"} if number < 5 else {}
    return {names.get(name, name): value for name, value in state.items() if name not in later} | {"format": number}
