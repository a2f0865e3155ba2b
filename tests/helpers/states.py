"""What states of tests are made of, and states as an older version or somebody else would have written them."""

from collections.abc import Mapping
from typing import Any

from raylance.orders.shuffles import WindowShuffle
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.state import State

ORIGIN = {
    "uri": "a.lance",
    "branch": None,
    "version": 3,
    "identity": "i",
    "filter": "x > 1",
    "split": None,
    "columns": ["image", "label"],
    "decode": [],
    "transform": None,
    "codecs": {},
}
DELIVERY = DeliverySpec(
    uri="a.lance",
    row_bytes=8.0,
    rows=100,
    fingerprint="f",
    order=WindowShuffle(shard_rows=10, window_shards=2, lanes=4),
    seed=0,
    remainder="drop",
    empty_batches=False,
    masks_bad_rows=False,
)


def as_of_format_4(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as raylance 0.8 and 0.9 wrote it."""
    return {"world_size" if name == "dp_size" else name: value for name, value in state.items()} | {"format": 4}


def signed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state that was edited, with the checksum of its order as it is now."""
    return State(**{name: value for name, value in state.items() if name != "format"}).to_dict()
