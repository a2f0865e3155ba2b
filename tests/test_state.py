"""Owns the checks of saved states: round trips, and the refusal of what does not fit."""

import base64
import dataclasses
import functools
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
from raylance.orders.shuffles import WindowShuffle
from raylance.planning.plan import Remainder
from raylance.planning.resume import Delivery, load_state, make_state
from raylance.planning.state import (
    FORMAT,
    UNKNOWN,
    State,
    check_state,
    describe,
    pack_shards,
    parse_state,
    read_state,
    write_state,
)
from raylance.settings import Feed
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
    codecs={},
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
    for ranges, kind in ((1024, "ranges"), (1025, "bitmap")):
        assert kind in pack_shards(np.arange(2 * ranges) % 2 == 0)
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
    check_state(dataclasses.replace(STATE, order=AUTO | {"lanes": 1}), dataclasses.replace(STATE, order=AUTO))


def test_components_are_told_apart_by_their_place() -> None:
    parts = {"a": {"quota": 1}, "b": {"quota": 2}}
    mixed, turned = (
        dataclasses.replace(STATE, order={"name": "mix", "components": dict(items)})
        for items in (parts.items(), reversed(parts.items()))
    )
    check_state(mixed, mixed)
    check_state(STATE, dataclasses.replace(STATE, order=dict(reversed(STATE.order.items()))))
    with pytest.raises(StateError, match=r"order.components: saved \['a', 'b'\], now \['b', 'a'\]"):
        check_state(mixed, turned)
    other = dataclasses.replace(STATE, order={"name": "mix", "components": {"a": {"quota": 1}, "c": {"quota": 2}}})
    with pytest.raises(StateError, match=r"order.components.c: saved None, now \{'quota': 2\}"):
        check_state(mixed, other)


def test_what_is_made_of_the_rows_may_change_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    check_state(STATE, STATE)
    assert not caplog.records
    check_state(STATE, dataclasses.replace(STATE, columns=["image"], transform="of.mine"))
    told = "  columns: saved ['image', 'label'], now ['image']\n  transform: saved None, now 'of.mine'"
    assert [record.args for record in caplog.records] == [(told,)]
    assert "same rows, but they are made into batches otherwise" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uri": "b.lance"}, "uri: saved 'a.lance', now 'b.lance'"),
        ({"uri": {"a": "a.lance"}}, "uri: saved 'a.lance', now {'a': 'a.lance'}"),
        ({"version": 4}, "version: saved 3, now 4"),
        ({"filter": None}, "filter: saved 'x > 1', now None"),
        ({"rows": 99}, "rows: saved 100, now 99"),
        ({"fingerprint": "g"}, "fingerprint: saved 'f', now 'g'"),
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"order": {**STATE.order, "lanes": 8}}, "order.lanes: saved 4, now 8"),
        ({"order": {"name": "row", "shard_rows": 10}}, "order.name: saved 'window', now 'row'"),
        ({"order": {"name": "row", "shard_rows": 10}}, "order.lanes: saved 4, now None"),
    ],
)
def test_what_differs_is_shown_side_by_side(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        check_state(STATE, dataclasses.replace(STATE, **change))


def test_all_that_differs_is_shown_a_line_each() -> None:
    with pytest.raises(StateError) as caught:
        check_state(STATE, dataclasses.replace(STATE, version=4, order={**STATE.order, "lanes": 8}))
    assert "\n  version: saved 3, now 4\n  order.lanes: saved 4, now 8\n" in str(caught.value)


SINCE_FORMAT_2 = ["branch", "identity", "columns", "decode", "transform"]


def test_a_state_of_format_1_agrees_with_everything_that_it_did_not_say(caplog: pytest.LogCaptureFixture) -> None:
    old = {key: value for key, value in STATE.to_dict().items() if key not in [*SINCE_FORMAT_2, "codecs"]} | {
        "format": 1
    }
    saved = parse_state(old)
    assert saved == dataclasses.replace(STATE, **dict.fromkeys([*SINCE_FORMAT_2, "codecs"], UNKNOWN))
    check_state(saved, STATE)
    assert [record.args for record in caplog.records] == [("branch, identity, columns, decode, transform",)]
    assert "earlier raylance, which did not record branch, identity" in caplog.text
    with pytest.raises(StateError, match=r"missing \['branch'\]"):
        parse_state({key: value for key, value in STATE.to_dict().items() if key != "branch"})


def test_what_a_state_may_say() -> None:
    for change in ({"seed": -1}, {"global_batch_size": None}, {"epoch": 0, "position": 0, "rows": 0}):
        assert parse_state(STATE.to_dict() | change) == dataclasses.replace(STATE, **change)


@pytest.mark.parametrize("state", [None, [1], "state", {}, {"format": 0}, {"format": True}])
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(StateError, match="no raylance state"):
        parse_state(state)


@dataclasses.dataclass(frozen=True)
class Crop:
    size: tuple[int, int]
    scorer: Any = None
    cache: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)

    def apply(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            Crop((2, 3), functools.partial(sorted, [1], key=len)),
            {
                "class": "Crop",
                "size": [2, 3],
                "scorer": {"partial": "builtins.sorted", "args": [[1]], "keywords": {"key": "builtins.len"}},
            },
        ),
        ({1: (2.5, None, True), "of": [Crop]}, {"1": [2.5, None, True], "of": ["tests.test_state.Crop"]}),
        (Crop.apply, "tests.test_state.Crop.apply"),
        (np.float32(1), "numpy.float32"),
        (Path("a"), "pathlib.PosixPath"),
    ],
    ids=["settings", "mapping", "function", "number", "object"],
)
def test_settings_are_described_by_names(value: Any, told: Any) -> None:
    assert json.loads(json.dumps(describe(value))) == told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}.*up to {FORMAT}.*Upgrade raylance"),
        ({"format": None}, "no raylance state"),
        ({"position": -1}, "damaged.*position -1"),
        ({"epoch": -1}, "damaged"),
        ({"position": "12"}, "damaged"),
        ({"global_batch_size": 0}, "damaged: global batch 0"),
        ({"order": "row"}, "damaged: its order is 'row'"),
        ({"colour": 1}, "unknown \\['colour'\\]"),
    ],
)
def test_newer_or_damaged_states(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        parse_state(STATE.to_dict() | change)


def test_truncated_and_absent_files(tmp_path: Path) -> None:
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
SETTLED = WindowShuffle(shard_rows=10, window_shards=2, lanes=4)
DELIVERY = Delivery(
    filter="x > 1",
    split=None,
    rows=100,
    fingerprint="f",
    order=SETTLED,
    seed=0,
    remainder="drop",
    masks_bad_rows=False,
)


def at(position: int, delivery: Delivery = DELIVERY, batch: int | None = 20) -> State:
    return make_state(ORIGIN, delivery, epoch=1, position=position, global_batch_size=batch, world_size=2)


def test_what_a_state_says() -> None:
    done = SETTLED.settle(DELIVERY.facts).epoch(1).completed_shards(90)
    assert 0 < done.sum() < 10
    assert at(90) == dataclasses.replace(STATE, position=90, completed_shards=pack_shards(done))
    split = dataclasses.replace(DELIVERY, order=WindowShuffle(), split="half")
    assert at(90, split) == dataclasses.replace(STATE, position=90, completed_shards={}, order=AUTO, split="half")


@pytest.mark.parametrize(
    ("version", "remainder", "position", "batch", "wanted"),
    [
        (2, "drop", 40, 20, (1, 40)),
        (2, "drop", 90, 20, (1, 90)),
        (2, "drop", 100, 20, (2, 0)),
        (1, "drop", 90, 20, (2, 0)),
        (1, "drop", 80, 20, (1, 80)),
        (1, "drop", 100, 20, (2, 0)),
        (1, "drop", 90, None, (1, 90)),
        (1, "drop", 0, 200, (1, 0)),
        (1, "ragged", 90, 20, (1, 90)),
    ],
)
def test_where_a_run_goes_on(
    version: int,
    remainder: Remainder,
    position: int,
    batch: int | None,
    wanted: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Format 1 stood behind the last step of an epoch that leaves rows out, where format 2 is in the next epoch."""
    current = dataclasses.replace(DELIVERY, order=WindowShuffle(), remainder=remainder)
    delivery, state = load_state(at(position, batch=batch).to_dict() | {"format": version}, at(0, current), current)
    assert delivery == dataclasses.replace(current, order=SETTLED)
    assert (state.epoch, state.position) == wanted
    told = [record.args for record in caplog.records if "earlier raylance stands" in record.getMessage()]
    assert told == ([(10, 1, 20, 2)] if version == 1 and wanted == (2, 0) and position == 90 else [])


def test_a_position_behind_the_end_is_damage() -> None:
    with pytest.raises(StateError, match="position 101 of an epoch of 100"):
        load_state(at(100).to_dict() | {"position": 101}, at(0), DELIVERY)


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
