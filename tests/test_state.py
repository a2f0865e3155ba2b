"""Owns the checks of saved states: round trips, and the refusal of what does not fit."""

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.errors import StateError
from raylance.orders.order import Settled
from raylance.planning.resume import make_state
from raylance.planning.state import (
    FORMAT,
    State,
    check_state,
    pack_shards,
    parse_state,
    read_state,
    write_state,
)
from raylance.settings import Delivery, Feed
from raylance.source.rows import table_rows
from raylance.source.selection import Selection, Source
from raylance.store import Shared
from tests.test_order import cases

STATE = State(
    uri="a.lance",
    branch=None,
    version=3,
    identity="i",
    filter="x > 1",
    split=None,
    rows=100,
    fingerprint="f",
    seed=0,
    columns=["image", "label"],
    decode=[],
    transform=None,
    order={"name": "window", "shard_rows": 10, "window_shards": 2, "lanes": 4},
    epoch=1,
    position=40,
    completed_shards=pack_shards(np.array([True, True, False, True])),
    components={},
    global_batch_size=20,
    world_size=2,
)


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    write_state(STATE.to_dict(), tmp_path)
    assert parse_state(read_state(tmp_path)) == STATE


def unpack_shards(packed: Mapping[str, Any]) -> np.ndarray:
    """Inverts `pack_shards`, by what its docstring says."""
    if "bitmap" in packed:
        bits = np.frombuffer(zlib.decompress(base64.b64decode(packed["bitmap"])), dtype=np.uint8)
        return np.unpackbits(bits, count=packed["shards"]).astype(np.bool_)
    done = np.zeros(packed["shards"], dtype=np.bool_)
    for first, end in packed["ranges"]:
        done[first:end] = True
    return done


@given(done=st.lists(st.booleans(), max_size=200))
def test_shards_round_trip(done: list[bool]) -> None:
    packed = json.loads(json.dumps(pack_shards(np.array(done, dtype=np.bool_))))
    assert unpack_shards(packed).tolist() == done
    assert (packed["shards"], packed["complete"]) == (len(done), sum(done))


def test_many_scattered_shards_become_a_bitmap() -> None:
    done = np.arange(1_000_003) % 3 == 0
    packed = pack_shards(done)
    assert "bitmap" in packed
    assert len(json.dumps(packed)) < 20_000
    np.testing.assert_array_equal(unpack_shards(packed), done)


AUTO = {"name": "window", "shard_rows": "auto", "window_shards": "auto", "lanes": "auto"}


def test_another_batch_world_or_auto_is_accepted() -> None:
    check_state(STATE, dataclasses.replace(STATE, global_batch_size=7, world_size=5, epoch=0, position=0))
    check_state(STATE, dataclasses.replace(STATE, order=AUTO))
    check_state(dataclasses.replace(STATE, order=AUTO), STATE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uri": "b.lance"}, "uri: saved 'a.lance', now 'b.lance'"),
        ({"version": 4}, "version: saved 3, now 4"),
        ({"filter": None}, "filter: saved 'x > 1', now None"),
        ({"rows": 99}, "rows: saved 100, now 99"),
        ({"fingerprint": "g"}, "fingerprint: saved 'f', now 'g'"),
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"order": {**STATE.order, "lanes": 8}}, "order.lanes: saved 4, now 8"),
        ({"order": {"name": "row", "shard_rows": 10}}, "order.name: saved 'window', now 'row'"),
    ],
)
def test_what_differs_is_shown_side_by_side(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        check_state(STATE, dataclasses.replace(STATE, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}.*up to {FORMAT}.*Upgrade raylance"),
        ({"format": None}, "no raylance state"),
        ({"position": -1}, "damaged.*position -1"),
        ({"epoch": -1}, "damaged"),
        ({"position": "12"}, "damaged"),
        ({"colour": 1}, "unknown \\['colour'\\]"),
    ],
)
def test_newer_or_damaged_states(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        parse_state(STATE.to_dict() | change)


def test_truncated_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="not written by raylance.report"):
        read_state(tmp_path)
    write_state(STATE.to_dict(), tmp_path)
    path = tmp_path / "raylance_state.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(StateError, match="truncated.*earlier checkpoint"):
        read_state(tmp_path)
    path.write_text("[]")
    with pytest.raises(StateError, match="holds a list"):
        read_state(tmp_path)


@given(order=cases(), batch=st.integers(1, 60))
def test_states_of_every_order_round_trip_at_every_step(order: Settled, batch: int) -> None:
    """What is written is what is read; what was settled stays; and the state of a loaded state is that state."""
    source = Source(uri="a.lance", version=1)
    selection = Selection.whole(order.rows)
    rows = table_rows(source, Shared("selection", selection, 0), ["id"], row_bytes=8.0)
    feed = Feed(source=rows, delivers=["id"])
    delivery = Delivery(
        filter=None,
        split=None,
        rows=order.rows,
        fingerprint=selection.fingerprint,
        order=order.settings,
        tables=order.tables,
        seed=0,
        remainder="ragged",
        masks_bad_rows=False,
    )
    place = {"epoch": 2, "global_batch_size": batch, "world_size": 3}
    for position in range(0, order.epoch_rows + 1, batch):
        state = make_state(feed.origin, delivery, position=position, **place)
        saved = parse_state(json.loads(json.dumps(state.to_dict())))
        check_state(saved, make_state(feed.origin, delivery, position=0, **place))
        adopted = dataclasses.replace(delivery, order=order.settings.adopt(saved.order))
        assert make_state(feed.origin, adopted, position=saved.position, **place).to_dict() == state.to_dict()
