"""Owns the contract that every order keeps, as properties; and the frozen orders."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.orders.mixture import Component, MixOrder
from raylance.orders.order import Facts, Order, RowShuffle
from raylance.orders.permutation import Int64Array
from raylance.orders.registry import ORDERS, make_order
from raylance.orders.sampling import ClassBalanced, Weighted
from raylance.orders.shuffles import Sequential, ShardShuffle, WindowShuffle, auto_lanes

SHUFFLES = tuple(ORDERS.values())
KINDS = (*SHUFFLES, Weighted, ClassBalanced, MixOrder)


class Selected:
    """A selection of n rows in uneven fragments, with a weight and a class of each row."""

    def __init__(self, n: int) -> None:
        self.count = n
        self.weights = np.arange(n) % 7 + (n == 1)
        self.classes = [f"class {row * row % 5}" for row in range(n)]

    def column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array([{"weight": self.weights, "class": self.classes}[name]])

    def fragment_ends(self) -> Int64Array:
        ends = np.cumsum([1, 13, 2, 40, 7, 7, 90, 1, 250])
        return np.append(ends[ends < self.count], self.count)


@st.composite
def mixtures(draw: st.DrawFn) -> MixOrder:
    """A settled mixture of one to four small datasets."""
    components = []
    for index in range(draw(st.integers(1, 4))):
        order = draw(st.sampled_from([RowShuffle(shard_rows=3), WindowShuffle(shard_rows=3, window_shards=2, lanes=2)]))
        rows, quota = draw(st.integers(1, 60)), draw(st.integers(1, 7))
        components.append(Component(name=f"part {index}", order=order, seed=index, rows=rows, quota=quota))
    stop = draw(st.sampled_from(["first_exhausted", "all_exhausted", 150]))
    return MixOrder(components=tuple(components), stop=stop, chunk_positions=draw(st.integers(1, 100)))


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[type[Order], ...] = KINDS) -> tuple[Order, int]:
    """Any order, settled, and a number of selected rows."""
    kind, n = draw(st.sampled_from(kinds)), draw(st.integers(1, 400))
    if kind is MixOrder:
        mixture = draw(mixtures())
        return mixture, sum(part.rows for part in mixture.components)
    shard_rows = draw(st.integers(1, 40))
    if kind is RowShuffle:
        order: Order = RowShuffle(shard_rows=shard_rows)
    elif kind is Weighted:
        order = Weighted(weights="weight", rows_per_epoch=draw(st.integers(1, 500)), shard_rows=1)
    elif kind is ClassBalanced:
        batch = draw(st.integers(1, 50))
        order = ClassBalanced(column="class", batch_rows=batch, rows_per_epoch=draw(st.integers(1, 500)), shard_rows=1)
        if draw(st.booleans()):
            order = dataclasses.replace(order, classes_per_batch=1)
    else:
        sizes = {"window_shards": draw(st.integers(1, 5)), "lanes": draw(st.integers(1, 9))}
        order = kind(shard_rows=draw(st.sampled_from([shard_rows, "fragment"])), **sizes)
    return order.bind(Selected(n)), n


@given(case=cases(), seed=st.integers(), epoch=st.integers(0, 9))
def test_every_row_exactly_once_or_as_many_draws_as_asked(case: tuple[Order, int], seed: int, epoch: int) -> None:
    order, n = case
    rows = order.rows(np.arange(order.epoch_rows(n)), n, seed, epoch).tolist()
    if order.repeats:
        assert len(rows) == order.epoch_rows(n)
        assert set(rows) <= set(range(n))
    else:
        assert sorted(rows) == list(range(n))


@given(case=cases(), data=st.data())
def test_seeking_equals_replaying(case: tuple[Order, int], data: st.DataObject) -> None:
    order, n = case
    replayed = order.rows(np.arange(order.epoch_rows(n)), n, 3, 1)
    wanted = np.array(data.draw(st.lists(st.integers(0, len(replayed) - 1), min_size=1, max_size=30)))
    np.testing.assert_array_equal(order.rows(wanted, n, 3, 1), replayed[wanted])


@given(case=cases(SHUFFLES), data=st.data())
def test_completed_shards_are_those_whose_rows_are_all_consumed(case: tuple[Order, int], data: st.DataObject) -> None:
    order, n = case
    position = data.draw(st.integers(0, n))
    consumed = set(order.rows(np.arange(n), n, 3, 1)[:position].tolist())
    if order.shard_rows == "fragment":
        ends = Selected(n).fragment_ends()
    else:
        size = int(order.shard_rows)
        ends = np.array([min(low + size, n) for low in range(0, n, size)])
    wanted = [consumed.issuperset(range(low, end)) for low, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert order.completed_shards(position, n, 3, 1).tolist() == wanted


@given(case=cases(SHUFFLES))
def test_saved_parameters_settle_what_is_auto(case: tuple[Order, int]) -> None:
    order, _ = case
    auto = dataclasses.replace(order, **{name: "auto" for name in order.params() if name != "name"})
    assert auto.adopt(order.params()) == order


@pytest.mark.parametrize("name", ["window", "shard", "row"])
def test_epochs_and_seeds_differ(name: str) -> None:
    facts = Facts(rows=500, row_bytes=100, global_batch_size=20, max_window_bytes=1 << 20)
    order = make_order(name).resolve(facts)
    seen = [tuple(order.rows(np.arange(500), 500, seed, epoch)) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert len(set(seen)) == 4


def test_sequential_is_storage_order() -> None:
    order = Sequential(shard_rows=7, window_shards=2)
    assert order.rows(np.arange(50), 50, 9, 9).tolist() == list(range(50))


def test_shard_shuffle_keeps_rows_of_a_shard_together() -> None:
    order = ShardShuffle(shard_rows=10, lanes=1)
    rows = order.rows(np.arange(95), 95, 0, 0)
    assert sum(np.diff(rows) != 1) <= 9


def test_window_shuffle_mixes_only_inside_its_windows() -> None:
    order = WindowShuffle(shard_rows=10, window_shards=3, lanes=2)
    unshuffled = ShardShuffle(shard_rows=10, window_shards=3, lanes=2)
    for lane in range(2):
        positions = np.arange(lane, 300, 2)
        ours, base = order.rows(positions, 300, 0, 0), unshuffled.rows(positions, 300, 0, 0)
        for start in range(0, 150, 30):
            window = slice(start, start + 30)
            assert sorted(ours[window]) == sorted(base[window])
            assert ours[window].tolist() != base[window].tolist()


# Frozen: a change here makes every checkpoint that exists resume on other rows. See test_permutation.GOLDEN.
GOLDEN: list[tuple[Order, list[int]]] = [
    (
        WindowShuffle(shard_rows=4, window_shards=2, lanes=2),
        [15, 3, 14, 9, 13, 0, 12, 18, 4, 8, 7, 2, 5, 10, 6, 1, 16, 11, 17],
    ),
    (
        ShardShuffle(shard_rows=4, window_shards=2, lanes=2),
        [12, 18, 13, 0, 14, 1, 15, 2, 4, 3, 5, 8, 6, 9, 7, 10, 16, 11, 17],
    ),
    (Sequential(shard_rows=4), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]),
    (RowShuffle(shard_rows=4), [0, 10, 3, 12, 9, 18, 15, 6, 14, 13, 16, 4, 17, 2, 1, 5, 7, 11, 8]),
]


@pytest.mark.parametrize(("order", "wanted"), GOLDEN, ids=lambda value: getattr(value, "name", ""))
def test_golden_orders(order: Order, wanted: list[int]) -> None:
    assert order.rows(np.arange(19), 19, 0, 0).tolist() == wanted


def test_auto_lanes() -> None:
    assert [auto_lanes(size) for size in (256, 96, 100, 7, 37, 4096, 1)] == [32, 32, 25, 7, 1, 32, 1]


@given(
    rows=st.integers(1, 10**7),
    row_bytes=st.floats(1, 1e6),
    batch=st.integers(1, 4096),
    limit=st.integers(1 << 20, 1 << 30),
)
def test_auto_keeps_the_memory_limit(rows: int, row_bytes: float, batch: int, limit: int) -> None:
    facts = Facts(rows=rows, row_bytes=row_bytes, global_batch_size=batch, max_window_bytes=limit)
    order = WindowShuffle().resolve(facts)
    assert batch % int(order.lanes) == 0
    held = 2 * int(order.lanes) * int(order.shard_rows) * int(order.window_shards) * row_bytes
    smallest = 2 * int(order.lanes) * row_bytes  # shards of one row: nothing smaller can be read
    assert held <= max(limit, smallest)
    assert order.resolve(facts) == order


def test_explicit_values_are_kept() -> None:
    facts = Facts(rows=10**6, row_bytes=100, global_batch_size=64, max_window_bytes=1 << 20)
    order = WindowShuffle(shard_rows=77, window_shards=3, lanes=5)
    assert order.resolve(facts) == order


@pytest.mark.parametrize("bad", [{"shard_rows": 0}, {"lanes": -1}, {"window_shards": 1.5}, {"lanes": True}])
def test_bad_parameters(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        WindowShuffle(**bad)  # type: ignore[arg-type]


def test_unknown_orders() -> None:
    with pytest.raises(ConfigError, match=r"'windwo' is unknown.*'window'"):
        make_order("windwo")
    with pytest.raises(ConfigError, match="still 'auto'"):
        WindowShuffle().rows(np.arange(3), 3, 0, 0)
