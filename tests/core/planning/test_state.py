"""Saved states: round trips, and the refusal of what does not fit."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.descriptions import describe
from raylance.errors import StateError
from raylance.orders import permutation, shuffles
from raylance.orders.order import Facts, Order, Resolved
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle
from raylance.planning.cursor import Cursor
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.shards import list_shards, read_shards
from raylance.planning.state import FORMAT, State, check_state, parse_state, read_state, write_state
from tests.helpers.orders import cases
from tests.helpers.states import DELIVERY, ORIGIN, as_of_format_4, signed

STATE = State(
    **ORIGIN,
    rows=100,
    fingerprint="f",
    seed=0,
    order={"name": "window", "shard_rows": 10, "window_shards": 2, "lanes": 4},
    epoch=1,
    position=40,
    window_bytes=512 << 20,
    step=2,
    global_step=7,
    completed_shards={"shards": 10, "complete": 3, "places": [[0, 2], [3, 4]]},
    components={},
    global_batch_size=20,
    dp_size=2,
)

AUTO = {"name": "window", "shard_rows": "auto", "window_shards": "auto", "lanes": "auto"}


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    write_state(STATE.to_dict(), tmp_path)
    assert parse_state(read_state(tmp_path)) == STATE


EPOCH = WindowShuffle(shard_rows=10, window_shards=2, lanes=4).resolve(Facts(rows=100, seed=0)).epoch(1)


@given(case=cases(), data=st.data())
def test_the_list_of_complete_shards_is_read_as_it_was_written(case: Resolved, data: st.DataObject) -> None:
    epoch, position = case.epoch(2), data.draw(st.integers(0, case.epoch_rows))
    listed = json.loads(json.dumps(list_shards(epoch, position)))
    done = read_shards(listed, epoch)
    if done is None:
        assert listed["on_request"]
        assert epoch.completed_places(position) is None
    else:
        assert done.tolist() == epoch.completed_shards(position).tolist()
        assert (listed["shards"], listed["complete"]) == (len(done), done.sum())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": 11}, "11 shards, the order has 10"),
        ({"complete": 3}, "3 complete shards, the list names 2"),
        ({"places": [[0, 11]]}, "damaged"),
        ({"places": 5}, "damaged"),
        ({"places": [["a", "b"]]}, "damaged"),
    ],
)
def test_a_damaged_list_of_shards_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        read_shards({"shards": 10, "complete": 2, "places": [[0, 2]]} | change, EPOCH)


MANY = [
    WindowShuffle(),
    ShardShuffle(),
    Sequential(),
    RowShuffle(),
    WindowShuffle(shard_rows=1, window_shards=16, lanes=32),
    WindowShuffle(shard_rows=100, window_shards=100_000, lanes=8),
    WindowShuffle(shard_rows=7, window_shards=2, lanes=5000),
    WindowShuffle(shard_rows=7, window_shards=2, lanes=100_000),
    WindowShuffle(shard_rows=1 << 40, window_shards=1 << 40, lanes=8),
]


@pytest.mark.parametrize("order", MANY, ids=repr)
def test_a_state_of_ten_billion_rows_is_small(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """What grows with the rows is left to a request. The work is counted: positions whose rows are computed."""
    asked: list[int] = []
    real = permutation.permute

    def counting(values: Any, *arguments: Any) -> Any:
        asked.append(np.size(values))
        return real(values, *arguments)

    monkeypatch.setattr(shuffles, "permute", counting)
    rows = 10**10
    for row_bytes in (8.0, 3000.0):
        facts = Facts(rows=rows, seed=0, row_bytes=row_bytes, global_batch_size=256)
        delivery = dataclasses.replace(DELIVERY, rows=rows, order=order.resolve(facts).settings)
        for position in (256, rows // 3 // 256 * 256, rows - 256, rows):
            asked.clear()
            state = at(position, delivery).to_dict()
            assert len(json.dumps(state, indent=1)) < 64_000
            assert sum(asked) < 200_000


def test_another_batch_world_or_auto_is_accepted() -> None:
    check_state(STATE, dataclasses.replace(STATE, global_batch_size=7, dp_size=5, epoch=0, position=0))
    check_state(STATE, dataclasses.replace(STATE, order=AUTO))
    check_state(dataclasses.replace(STATE, order=AUTO), STATE)
    check_state(dataclasses.replace(STATE, order=AUTO | {"lanes": 1}), dataclasses.replace(STATE, order=AUTO))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uri": "b.lance", "identity": "j"}, "identity: saved 'i', now 'j'"),
        ({"uri": "b.lance", "identity": ""}, "uri: saved 'a.lance', now 'b.lance'"),
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


def test_a_state_of_the_format_before_is_read() -> None:
    assert parse_state(as_of_format_4(STATE.to_dict())) == STATE


@pytest.mark.parametrize("name", ["branch", "step", "checksum"])
def test_a_state_that_lacks_a_field_is_damaged(name: str) -> None:
    with pytest.raises(StateError, match=rf"missing \['{name}'\]"):
        parse_state({key: value for key, value in STATE.to_dict().items() if key != name})


@pytest.mark.parametrize(
    "change",
    [{"order": {**STATE.order, "lanes": 5}}, {"order": AUTO}, {"window_bytes": 1}, {"checksum": "0" * 16}],
    ids=str,
)
def test_an_order_that_was_edited_is_refused(change: dict[str, Any]) -> None:
    """A loader whose order is "auto" takes over what is saved: other lanes were another order, in silence."""
    with pytest.raises(StateError, match=r"changed after it was written.*checksum"):
        parse_state(STATE.to_dict() | change)
    moved = parse_state(STATE.to_dict() | {"uri": "elsewhere", "epoch": 3, "position": 60})
    assert (moved.uri, moved.epoch, moved.position) == ("elsewhere", 3, 60), "these are checked for themselves"


@pytest.mark.parametrize("state", [None, [1], "state", {}, {"format": 0}, {"format": True}])
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(StateError, match="not a raylance state"):
        parse_state(state)


@dataclasses.dataclass(frozen=True)
class Crop:
    size: tuple[int, int]
    scorer: Any = None
    cache: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)

    def apply(self) -> None: ...


SORTED = {"partial": "builtins.sorted", "args": [[1]], "keywords": {"key": "builtins.len"}}


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (Crop((2, 3), functools.partial(sorted, [1], key=len)), {"class": "Crop", "size": [2, 3], "scorer": SORTED}),
        ({1: (2.5, None, True), "of": [Crop]}, {"1": [2.5, None, True], "of": ["tests.core.planning.test_state.Crop"]}),
        (Crop.apply, "tests.core.planning.test_state.Crop.apply"),
        (np.float32(1), 1.0),
        (Path("a"), "pathlib.PosixPath"),
    ],
    ids=["settings", "mapping", "function", "number", "object"],
)
def test_settings_are_described_by_names(value: Any, described: Any) -> None:
    assert json.loads(json.dumps(describe(value))) == described


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}.*up to {FORMAT}.*Upgrade raylance"),
        ({"format": 3}, "format 3.*reads 4 to 6.*before 0.8 wrote it.*Load it by raylance 0.9"),
        ({"format": None}, "not a raylance state"),
        ({"position": -1}, "damaged.*position -1"),
        ({"epoch": -1}, "damaged"),
        ({"position": "12"}, "damaged"),
        ({"epoch": 2**70}, "damaged: epoch 1180591620717411303424"),
        ({"position": 2**63}, "damaged: position"),
        ({"step": -1}, "damaged: step -1"),
        ({"global_step": True}, "damaged: global_step True"),
        ({"window_bytes": 0}, "damaged: window_bytes 0"),
        ({"seed": 0.5}, "damaged: seed 0.5"),
        ({"dp_size": "x"}, "damaged: dp_size 'x'"),
        ({"dp_size": 0}, "damaged: dp_size 0"),
        ({"completed_shards": "x"}, "damaged: its completed_shards is 'x'"),
        ({"components": None}, "damaged: its components is None"),
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
    with pytest.raises(StateError, match="truncated"):
        read_state(tmp_path)
    path.write_text("[]")
    with pytest.raises(StateError, match="holds a list"):
        read_state(tmp_path)


def at(position: int, delivery: DeliverySpec = DELIVERY, batch: int | None = 20) -> State:
    cursor = Cursor(ORIGIN, delivery)
    cursor.epoch, cursor.position, cursor.step, cursor.global_step = 1, position, 2, 7
    return cursor.state(batch, 2)


def load(saved: dict[str, Any], delivery: DeliverySpec) -> tuple[DeliverySpec, State]:
    cursor = Cursor(ORIGIN, delivery)
    return (cursor.load(saved), cursor.delivery_spec)[::-1]


def test_what_a_state_says() -> None:
    listed = list_shards(EPOCH, 90)
    assert 0 < listed["complete"] < 10
    assert at(90) == dataclasses.replace(STATE, position=90, completed_shards=listed)
    auto = dataclasses.replace(DELIVERY, order=WindowShuffle())
    assert at(90, auto) == dataclasses.replace(STATE, position=90, completed_shards={}, order=AUTO)


@pytest.mark.parametrize("of_format", [dict, as_of_format_4])
@pytest.mark.parametrize(
    ("position", "wanted"), [(40, (1, 40, 2, 7)), (90, (1, 90, 2, 7)), (100, (2, 0, 0, 7))], ids=str
)
def test_where_a_run_continues(of_format: Any, position: int, wanted: tuple[int, ...]) -> None:
    current = dataclasses.replace(DELIVERY, order=WindowShuffle())
    delivery, state = load(of_format(at(position).to_dict()), current)
    assert delivery == dataclasses.replace(current, order=DELIVERY.order, window_bytes=512 << 20)
    assert (state.epoch, state.position, state.step, state.global_step) == wanted


def test_saved_window_bytes_win(caplog: pytest.LogCaptureFixture) -> None:
    """What is saved before the first batch has no sizes yet, and the same will follow."""
    auto = dataclasses.replace(DELIVERY, order=WindowShuffle(), window_bytes=1 << 20)
    saved = at(0, auto).to_dict()
    assert load(saved, dataclasses.replace(auto, window_bytes=None))[0] == auto
    assert not caplog.records
    assert load(saved, dataclasses.replace(auto, window_bytes=2 << 20))[0] == auto
    assert [record.args for record in caplog.records] == [(1 << 20, 2 << 20)]


@pytest.mark.parametrize("size", ["lanes", "shard_rows", "window_shards"])
def test_sizes_that_no_order_has_are_damage(size: str) -> None:
    current = dataclasses.replace(DELIVERY, order=WindowShuffle())
    saved = signed(at(40).to_dict() | {"order": STATE.order | {size: 2**62}})
    with pytest.raises(StateError, match=rf"damaged: WindowShuffle\({size}=4611686018427387904\): must be .* at most"):
        load(saved, current)


def test_a_position_after_the_end_is_damage() -> None:
    with pytest.raises(StateError, match="position 101 of an epoch of 100"):
        load(at(100).to_dict() | {"position": 101}, DELIVERY)


@given(order=cases(), batch=st.integers(1, 60))
def test_states_of_every_order_round_trip_at_every_step(order: Resolved, batch: int) -> None:
    """What is written is what is read; what was resolved stays; and the state of a loaded state is that state."""
    delivery = dataclasses.replace(DELIVERY, order=order.settings, tables=order.tables, rows=order.rows)
    saving, loading = Cursor(ORIGIN, delivery), Cursor(ORIGIN, delivery)
    saving.epoch = 2
    for saving.position in range(0, order.epoch_rows + 1, batch):
        state = saving.state(batch, 3).to_dict()
        loading.load(json.loads(json.dumps(state)))
        if saving.position == order.epoch_rows:
            assert (loading.epoch, loading.position) == (3, 0)
        else:
            assert loading.state(batch, 3).to_dict() == state
