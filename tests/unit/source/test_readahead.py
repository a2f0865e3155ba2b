"""Owns the promises of reading ahead: the rows of the plan in their order, however they are cut, within the limit."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylance.decode.arrays import to_numpy
from raylance.errors import DatasetError
from raylance.orders.order import Resolved
from raylance.orders.shuffles import Sequential, WindowShuffle
from raylance.planning.plan import REMAINDERS, Remainder
from raylance.source.readahead import ReadAhead, TooLargeError
from tests.helpers.in_memory import InMemory, table_of
from tests.helpers.orders import cases, resolve
from tests.helpers.plans import make_plan


@settings(max_examples=30)
@given(
    order=cases(),
    batch=st.integers(1, 40),
    world=st.integers(1, 5),
    remainder=st.sampled_from(REMAINDERS),
    item_rows=st.integers(1, 60),
    limit=st.integers(200, 4000),
    guess=st.sampled_from([1.0, 10.0, 300.0]),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_every_item_has_its_rows_whatever_the_limit(
    order: Resolved,
    batch: int,
    world: int,
    remainder: Remainder,
    item_rows: int,
    limit: int,
    guess: float,
    seed: int,
    data: st.DataObject,
) -> None:
    """Two epochs, with items that are asked for again, as after a loss, and a jump, as after a break."""
    if remainder == "drop":
        batch = min(batch, order.epoch_rows)
    plan = make_plan(order, batch, world, remainder)
    rank = data.draw(st.integers(0, world - 1))
    sizes = np.random.default_rng(seed).choice([1, 20, 150], order.rows, p=[0.8, 0.15, 0.05]).tolist()
    feed = InMemory(table_of(sizes), guess)
    ahead = ReadAhead(feed, limit)  # type: ignore[arg-type]
    items = [item for epoch in range(2) for item in plan.items(rank, epoch, 0, item_rows)]
    stops = data.draw(st.dictionaries(st.integers(0, len(items) - 1), st.integers(0, len(items) - 1), max_size=4))
    for place, item in enumerate(items):
        for asked in [item, *(items[back] for stop, back in stops.items() if stop == place)]:
            rows = plan.select(asked.epoch, plan.item_positions(asked))
            found = ahead.gather("plan", plan, asked)
            assert found["_rowoffset"].to_pylist() == (rows * 2).tolist()
            assert [len(value.as_buffer()) for value in found["data"]] == [sizes[row] for row in rows]
    row_bytes = 150 + 8 + 4 + 4
    assert ahead.peak_bytes <= limit + limit / 8 + max(limit / 4, 3 * row_bytes)


def gather_all(ahead: ReadAhead, plan: object, items: list) -> list[int]:
    return [offset // 2 for item in items for offset in ahead.gather("p", plan, item)["_rowoffset"].to_pylist()]  # type: ignore[arg-type]


def test_ordinary_rows_are_read_once_and_whole_windows_ahead() -> None:
    plan = make_plan(resolve(WindowShuffle(shard_rows=8, window_shards=2, lanes=4), 256), 16, 1)
    feed = InMemory(table_of([100] * 256), 112)
    ahead = ReadAhead(feed, 4 * 64 * 112)  # type: ignore[arg-type]
    items = list(plan.items(0, 0, 0, 16))
    ahead.gather("p", plan, items[0])
    assert ahead._used is not None
    assert ahead._used.filling is not None
    ahead._used.filling.result()
    gather_all(ahead, plan, items[1:])
    assert 256 <= feed.reads <= 16 + 256 + 64, "the first item by itself, each window once, one of the next epoch"


def test_what_follows_is_read_as_a_portion_is_handed_out() -> None:
    """Not all at once when a window turns over, and all of it before it is asked for."""
    feed = InMemory(table_of([10] * 4000), 22)
    plan = make_plan(resolve(WindowShuffle(shard_rows=500, window_shards=1, lanes=4), 4000), 100, 1)
    ahead = ReadAhead(feed, 6 * 2000 * 22)  # type: ignore[arg-type]  # two windows have room
    items, later = (list(plan.items(0, epoch, 0, 100)) for epoch in (0, 1))
    reads = []
    for item in [*items, later[0]]:
        ahead.gather("plan", plan, item)
        ahead._thread.start(lambda: None).result()  # what was begun is done
        reads.append(feed.reads)
    assert reads[0] < 2000 + 800, "an eighth of the next, a block more, and the first item by itself"
    assert reads[0] < reads[4] < reads[8] < 4000 + 100 + 1
    assert reads[12] >= 4000, "and all of it long before it is asked for"
    assert reads[-1] < 8000 + 1000


def test_a_row_that_exceeds_the_limit_is_refused_by_name_and_what_lies_before_it_comes() -> None:
    sizes = [10] * 40
    sizes[23] = 5000
    plan = make_plan(resolve(Sequential(shard_rows=8, window_shards=1), 40), 4, 1)
    ahead = ReadAhead(InMemory(table_of(sizes)), 2000)  # type: ignore[arg-type]
    items = list(plan.items(0, 0, 0, 1))
    assert gather_all(ahead, plan, items[:23]) == list(range(23))
    for _ in range(2):
        with pytest.raises(DatasetError, match="offset 46 of 'memory'.* bytes by itself, max_window_bytes allows 2,0"):
            ahead.gather("p", plan, items[23])
    assert gather_all(ahead, plan, items[24:]) == list(range(24, 40))


def test_an_error_of_reading_is_not_kept() -> None:
    plan = make_plan(resolve(Sequential(shard_rows=8, window_shards=1), 64), 4, 1)
    feed = InMemory(table_of([50] * 64), 62)
    ahead = ReadAhead(feed, 1000)  # type: ignore[arg-type]
    items = list(plan.items(0, 0, 0, 4))
    assert gather_all(ahead, plan, items[:4]) == list(range(16))
    feed.fails = 3
    with pytest.raises(DatasetError, match="storage says no"):
        for _ in range(3):
            gather_all(ahead, plan, items[4:])
    feed.fails = 0
    assert gather_all(ahead, plan, items[4:]) == list(range(16, 64))


def test_what_is_larger_than_allowed_is_not_given() -> None:
    plan = make_plan(resolve(Sequential(shard_rows=8, window_shards=1), 64), 16, 1)
    ahead = ReadAhead(InMemory(table_of([1000 if row == 3 else 10 for row in range(64)])), 1 << 20)  # type: ignore[arg-type]
    (item, *_) = plan.items(0, 0, 0, 16)
    with pytest.raises(TooLargeError) as caught:
        ahead.gather("p", plan, item, 500)
    # An estimate, from as many rows as were looked at: which they are depends on what the thread has read ahead.
    assert 1000 <= caught.value.nbytes <= 16 * 1030
    parts = plan.cut(item, 4)
    assert [part.rows for part in parts] == [4, 4, 4, 4]
    assert [ahead.gather("p", plan, part, 500).num_rows for part in parts[1:]] == [4, 4, 4]


class SlowToOpen(InMemory):
    """Takes its time to make a reader, and counts them."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(table_of(sizes), 112.0)
        self.opened = 0

    def open_reader(self, retry_s: float) -> InMemory:
        self.opened += 1
        time.sleep(0.1)
        return self


def test_both_threads_read_by_one_reader() -> None:
    """The first item is read by itself while its window is read ahead: one outage must not cost two deadlines."""
    plan = make_plan(resolve(WindowShuffle(shard_rows=8, window_shards=2, lanes=4), 256), 16, 1)
    source = SlowToOpen([100] * 256)
    ahead = ReadAhead(source, 4 * 64 * 112)  # type: ignore[arg-type]
    gather_all(ahead, plan, list(plan.items(0, 0, 0, 16)))
    assert source.opened == 1


def vectors(rows: int, width: int) -> InMemory:
    """Row r has the value r, `width` times."""
    values = pa.array(np.repeat(np.arange(rows, dtype=np.float32), width))
    return InMemory(pa.table({"x": pa.FixedSizeListArray.from_arrays(values, width)}), 4.0 * width)


@given(
    order=cases(),
    batch=st.integers(1, 40),
    limit=st.integers(200, 20_000),
    at_once=st.booleans(),
    data=st.data(),
)
def test_who_keeps_and_overwrites_what_was_handed_out_changes_no_other_row(
    order: Resolved, batch: int, limit: int, at_once: bool, data: st.DataObject
) -> None:
    """Batches are views, which a model may change in place; and a pass may begin again before what it has taken."""
    batch = min(batch, order.epoch_rows)
    plan, feed = make_plan(order, batch, 1), vectors(order.rows, 3)
    ahead = ReadAhead(feed, limit, lends=True, at_once=at_once)  # type: ignore[arg-type]
    items = [item for epoch in range(2) for item in plan.items(0, epoch, 0, data.draw(st.integers(1, 60)))]
    begins = data.draw(st.dictionaries(st.integers(0, len(items) - 1), st.integers(0, len(items) - 1), max_size=3))
    kept = []
    for place, item in enumerate(items):
        for asked in [*items[min(begins.get(place, place), place) : place], item]:
            found = to_numpy(ahead.gather("plan", plan, asked))
            rows = plan.select(asked.epoch, plan.item_positions(asked))
            np.testing.assert_array_equal(found["x"], np.repeat(rows, 3).reshape(-1, 3))
            found["x"][:] = -1 - len(kept)
            kept.append(found["x"])
    assert all((array == -1 - number).all() for number, array in enumerate(kept))


def test_one_batch_kept_of_each_window_keeps_no_more_windows_than_two() -> None:
    """Views of the others would keep them all: 16 windows of 2 MiB."""
    plan = make_plan(resolve(WindowShuffle(shard_rows=128, window_shards=1, lanes=4), 8192), 64, 1)
    limit = 2 * 512 * 4096 * 4 // 3  # two windows fit
    ahead = ReadAhead(vectors(8192, 1024), limit, lends=True, at_once=True)  # type: ignore[arg-type]
    kept, lent = [], []
    for item in plan.items(0, 0, 0, 64):
        table = ahead.gather("plan", plan, item)
        if item.position % 512 == 64:
            kept.append((table["x"], plan.select(0, plan.item_positions(item))))
        del table
        lent.append(ahead._lender.lent_bytes)
    assert len(kept) == 16
    for column, rows in kept:
        assert column.combine_chunks().flatten().to_numpy()[::1024].tolist() == rows.tolist()
    assert max(lent) <= 2 * limit
    del kept, column
    assert ahead._lender.lent_bytes <= limit


class LateReader(InMemory):
    """Prepares each table twice: at once, and when the test calls `late`, as a read does that returns too late."""

    def __init__(self, feed: InMemory) -> None:
        super().__init__(feed.table, feed.likely_row_bytes)
        self.late: list[Callable[[], object]] = []

    def read_blocks(self, blocks: Any, prepare: Any, add: Any) -> None:
        def prepare_twice(*arguments: Any) -> object:
            self.late.append(lambda: prepare(*arguments))
            return prepare(*arguments)

        super().read_blocks(blocks, prepare_twice, add)


def test_a_read_that_comes_late_writes_to_nothing_that_was_handed_out() -> None:
    plan = make_plan(resolve(WindowShuffle(shard_rows=8, window_shards=2, lanes=4), 256), 16, 1)
    source = LateReader(vectors(256, 3))
    ahead = ReadAhead(source, 1 << 20, lends=True, at_once=True)  # type: ignore[arg-type]
    items = list(plan.items(0, 0, 0, 16))
    kept = [to_numpy(ahead.gather("plan", plan, item))["x"] for item in items]
    for array in kept:
        array[:] = -1
    for each in source.late:
        each()
    assert all((array == -1).all() for array in kept)
