"""Owns what a checkpoint says of a loader, and the check of a saved state against a loader; never touches tensors.

JSON, the same on every rank, no pickle. A state is two integers, (epoch, position), and the facts that make them
meaningful: which rows, in which order.
"""

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raylance.errors import StateError
from raylance.permutation import BoolArray

FORMAT = 1
FILE_NAME = "raylance_state.json"
_MAX_RANGES = 1024
# Each of these must be equal, or the saved position would mean other rows.
_MUST_MATCH = ("uri", "version", "filter", "split", "rows", "fingerprint", "seed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The consumed position of a loader and what it refers to.

    Attributes:
        uri: Dataset; like the next three by component in a mixture.
        version: Pinned version.
        filter: Filter, or None.
        split: Split, as its repr, or None.
        rows: Rows of the selection.
        fingerprint: Hash of the selected row offsets.
        seed: Seed of order and augmentation.
        order: Parameters of the order; "auto" where nothing was iterated yet.
        epoch: Epoch.
        position: Rows of the epoch's order consumed by all ranks together.
        completed_shards: IDs of shards wholly in the consumed prefix, as `pack_shards` writes them.
        components: In a mixture, where each dataset stands, by name; for information.
        global_batch_size: For information: the next run may use another.
        world_size: For information: the next run may use another.
    """

    uri: Any
    version: Any
    filter: Any
    split: Any
    rows: int
    fingerprint: str
    seed: int
    order: Mapping[str, Any]
    epoch: int
    position: int
    completed_shards: Mapping[str, Any]
    components: Mapping[str, Any]
    global_batch_size: int | None
    world_size: int

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON-able values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


def parse_state(saved: Mapping[str, Any]) -> State:
    """Reads a state of this format.

    Raises:
        StateError: If the format is newer or the fields are not a state's.
    """
    found = saved.get("format")
    if not isinstance(found, int):
        raise StateError(f"this is no raylance state: its format number is {found!r}. Pass what state_dict() returned.")
    if found > FORMAT:
        raise StateError(
            f"the state has format {found}, this raylance reads up to {FORMAT}: it was written by a newer raylance. "
            "Upgrade raylance, or start a new run."
        )
    fields = {field.name for field in dataclasses.fields(State)}
    given = {key: value for key, value in saved.items() if key != "format"}
    if set(given) != fields:
        missing, unknown = sorted(fields - set(given)), sorted(set(given) - fields)
        raise StateError(f"the state is damaged: missing {missing}, unknown {unknown}. Use an earlier checkpoint.")
    state = State(**given)
    numbers = (state.epoch, state.position, state.rows, state.seed)
    if not all(isinstance(number, int) for number in numbers) or state.position < 0 or state.epoch < 0:
        raise StateError(
            f"the state is damaged: epoch {state.epoch}, position {state.position}. Use an earlier checkpoint."
        )
    return state


def check_state(saved: State, current: State) -> None:
    """Refuses a saved state that means other rows than the loader's own.

    Fields of the current order that are "auto" accept whatever was saved: the saved values are reused.

    Raises:
        StateError: With every differing field, both values side by side.
    """
    differing = [
        difference
        for name in (*_MUST_MATCH, "order")
        for difference in _differences(name, getattr(saved, name), getattr(current, name))
    ]
    if differing:
        table = "\n".join(f"  {name}: saved {old!r}, now {new!r}" for name, old, new in differing)
        raise StateError(
            f"the checkpoint belongs to other data or another order, so its position would mean other rows:\n{table}\n"
            "Build the dataset with the saved values (version=… pins the version), or start under a new run name."
        )


def _differences(name: str, saved: Any, current: Any) -> list[tuple[str, Any, Any]]:
    """Differing values by dotted name, dicts compared key by key; "auto" agrees with everything."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        keys = sorted(set(saved) | set(current))
        return [found for key in keys for found in _differences(f"{name}.{key}", saved.get(key), current.get(key))]
    settled = saved is not None and current is not None and "auto" in (saved, current)
    return [] if saved == current or settled else [(name, saved, current)]


def write_state(state: Mapping[str, Any], directory: str | Path) -> None:
    """Writes `raylance_state.json` into a checkpoint directory."""
    Path(directory, FILE_NAME).write_text(json.dumps(state, indent=1) + "\n")


def read_state(directory: str | Path) -> dict[str, Any]:
    """Reads `raylance_state.json` from a checkpoint directory.

    Raises:
        StateError: If it is missing or truncated.
    """
    path = Path(directory, FILE_NAME)
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise StateError(
            f"the checkpoint has no {FILE_NAME}, so it does not say which rows were seen: it was not written by "
            "raylance.report(). Report with raylance.report(metrics, loader, state=…), or start under a new run name."
        ) from error
    except ValueError as error:
        raise StateError(f"{path} is truncated or damaged ({error}). Use an earlier checkpoint.") from error
    if not isinstance(loaded, dict):
        raise StateError(f"{path} holds a {type(loaded).__name__}, not a state. Use an earlier checkpoint.")
    return loaded


def pack_shards(done: BoolArray) -> dict[str, Any]:
    """Packs the IDs of complete shards as half-open ranges, or as a compressed bitmap when there are many.

    Args:
        done: bool, indexed by shard ID.

    Returns:
        {"shards": n, "complete": k, "ranges": [[first, end], …]} or the same with "bitmap", base64 of zlib of bits,
        the lowest ID in the highest bit.
    """
    edges = np.flatnonzero(np.diff(np.r_[False, done, False].astype(np.int8)))
    packed: dict[str, Any] = {"shards": len(done), "complete": int(done.sum())}
    if len(edges) <= 2 * _MAX_RANGES:
        return packed | {"ranges": edges.reshape(-1, 2).tolist()}
    return packed | {"bitmap": base64.b64encode(zlib.compress(np.packbits(done).tobytes())).decode()}


def unpack_shards(packed: Mapping[str, Any]) -> BoolArray:
    """Inverts `pack_shards`.

    Returns:
        bool, indexed by shard ID.
    """
    if "bitmap" in packed:
        bits = np.frombuffer(zlib.decompress(base64.b64decode(packed["bitmap"])), dtype=np.uint8)
        return np.unpackbits(bits, count=packed["shards"]).astype(np.bool_)
    done = np.zeros(packed["shards"], dtype=np.bool_)
    for first, end in packed["ranges"]:
        done[first:end] = True
    return done
