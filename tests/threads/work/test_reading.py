"""What readers promise: the rows of the plan in their order, however cut, lost and loaded, within the limit."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.decode.arrays import to_numpy
from raylance.dispatch.messages import Load
from raylance.errors import DatasetError
from raylance.orders.order import Resolved
from raylance.orders.shuffles import Sequential, WindowShuffle
from raylance.planning.planned_rows import PlannedRows
from raylance.planning.step_size import REMAINDERS, Remainder
from raylance.samples.windows import Episodes, Windows, WindowTable
from raylance.settings import Options
from raylance.work.blocks import BlockColumns
from raylance.work.read_work import ReadWork
from tests.helpers.in_memory import InMemory, table_of
from tests.helpers.orders import cases, resolve
from tests.helpers.plans import make_plan
from tests.helpers.reading import Reading, Spec


@given(
    order=cases(),
    batch=st.integers(1, 40),
    world=st.integers(1, 4),
    remainder=st.sampled_from(REMAINDERS),
    item_rows=st.integers(1, 60),
    limit=st.integers(200, 4000),
    guess=st.sampled_from([1.0, 10.0, 300.0]),
    readers=st.integers(1, 3),
    decodes=st.booleans(),
    windows=st.sampled_from([None, None, (0, 1, 2), (-3, 0, 4)]),
    by_block=st.booleans(),
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
    readers: int,
    decodes: bool,
    windows: tuple[int, ...] | None,
    by_block: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    """Two epochs, a jump as after a break, items that are asked for again, and readers that are lost."""
    if remainder == "drop":
        batch = min(batch, order.epoch_rows)
    plan = make_plan(order, batch, world, remainder)
    rank = data.draw(st.integers(0, world - 1))
    sizes = np.random.default_rng(seed).choice([1, 20, 150], order.rows, p=[0.8, 0.15, 0.05]).tolist()
    table, samples, step = table_of(sizes), None, 2
    if windows is not None:  # samples of several rows, of episodes of 7; the limit holds one
        ends = np.minimum(np.arange(7, order.rows + 7, 7), order.rows)
        of_rows = Windows(episode="e", offsets={"row": windows})
        samples = WindowTable(windows=of_rows, episodes=Episodes(ends=ends), offsets={"row": windows})
        step, limit = 1, limit + 2000
        table = table.append_column("row", pa.array(np.arange(order.rows)))
    sources = [InMemory(table, guess, step, samples) for _ in range(readers)]
    apart = BlockColumns(sent=["row"], sample_bytes=8 * len(windows)) if by_block and windows is not None else None
    reading = Reading(plan, sources, limit, decodes=decodes, by_block=apart)
    jump = data.draw(st.integers(0, max(0, plan.steps(0) - 1))) * batch
    for epoch, position in ((0, 0), (0, jump), (1, 0)):
        items = []
        for item in reading.begin(rank, epoch, position, item_rows):
            items.append(item)
            event = data.draw(st.sampled_from(["", "", "", "again", "lost"]))
            if event == "lost":
                reading.lose(data.draw(st.integers(0, readers - 1)))
            for asked in [item, *(items[-3:] if event == "again" else [])]:
                rows = plan.select(asked.epoch, plan.item_positions(asked))
                found = reading.gather(asked, loads=data.draw(st.integers(0, 3)))
                assert found["_rowoffset"].to_pylist() == (rows * step).tolist()
                if windows is not None:
                    first = rows // 7 * 7
                    last = np.minimum(first + 6, order.rows - 1)
                    wanted = np.clip(rows[:, None] + np.array(windows), first[:, None], last[:, None])
                    assert found["row"].to_pylist() == wanted.tolist()
                assert [len(value.as_buffer()) for value in found["data"]] == [sizes[row] for row in rows]
    assert reading.peak_bytes <= limit


def window_plan(rows: int, shard_rows: int = 8) -> Any:
    return make_plan(resolve(WindowShuffle(shard_rows=shard_rows, window_shards=2, lanes=4), rows), 16, 1)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_each_row_is_loaded_once_and_readers_share_the_work(readers: int) -> None:
    sources = [InMemory(table_of([100] * 512), 112) for _ in range(readers)]
    reading = Reading(window_plan(512), sources, 4 * 64 * 112)
    for epoch in range(3):
        for item in reading.begin(0, epoch, 0, 16):
            reading.gather(item)
    reads = [source.reads for source in sources]
    assert 3 * 512 <= sum(reads) <= 3 * 512 + 2 * readers * 64, "and what is loaded of the epoch that does not come"
    assert max(reads) - min(reads) <= 3 * 64


def test_the_next_chunk_is_loaded_as_one_is_used_if_decoders_need_the_cores() -> None:
    """Not all at once when a chunk ends, and all of it before it is asked for."""
    plan = make_plan(resolve(WindowShuffle(shard_rows=500, window_shards=1, lanes=4), 4000), 100, 1)
    source = InMemory(table_of([10] * 4000), 22)
    reading, reads = Reading(plan, [source], 6 * 2000 * 22, decodes=True), []
    for item in reading.begin(0, 0, 0, 100):
        reading.gather(item)
        reading.load()
        reads.append(source.reads)
    assert reads[0] < 2000 + 800
    assert reads[0] < reads[4] < reads[8] <= 4000 + 100
    assert reads[12] >= 4000, "and all of it long before it is asked for"


@pytest.mark.parametrize("decodes", [True, False])
def test_the_first_chunk_of_a_pass_is_small_and_later_ones_grow(decodes: bool) -> None:
    """So that the first batch comes early. No row is read twice for it; and what is loaded ahead is loaded whole."""
    rows, source = 2048 * 8, InMemory(table_of([1000] * 2048 * 8), 1012)
    reading = Reading(window_plan(rows, 2048 * 2), [source], 2 * rows * 1012, decodes=decodes)
    first, *_ = items = list(reading.begin(0, 0, 0, 16))
    reading.gather(first, loads=0)
    assert source.reads <= rows // 16
    for item in items[1:]:
        reading.gather(item)
    sizes = [len(list(of_chunk)) for _, of_chunk in itertools.groupby(items, lambda item: item.chunk)]
    assert sizes[0] == min(sizes)
    assert sizes[: len(sizes) // 2] == sorted(sizes[: len(sizes) // 2])
    assert len({item.chunk for item in reading.begin(0, 1, 0, 16)}) == 1
    assert source.reads <= 2 * rows


def test_a_row_that_exceeds_the_limit_is_refused_by_name_and_what_lies_before_it_comes() -> None:
    sizes = [10] * 40
    sizes[23] = 5000
    plan = make_plan(resolve(Sequential(shard_rows=8, window_shards=1), 40), 4, 1)
    reading = Reading(plan, [InMemory(table_of(sizes))], 2000)
    items = list(reading.begin(0, 0, 0, 1))
    for item in items[:23]:
        assert reading.gather(item)["_rowoffset"].to_pylist() == [2 * item.position + 2 * item.low]
    for _ in range(2):
        with pytest.raises(DatasetError, match="offset 46 of 'memory'.*2,000"):
            reading.gather(items[23])
    for item in items[24:]:
        reading.gather(item)


def test_an_error_of_reading_is_not_kept() -> None:
    plan = make_plan(resolve(Sequential(shard_rows=8, window_shards=1), 64), 4, 1)
    source = InMemory(table_of([50] * 64), 62)
    reading = Reading(plan, [source], 1000)
    items = list(reading.begin(0, 0, 0, 4))
    reading.gather(items[0])
    source.fails = 100
    with pytest.raises(DatasetError, match="storage says no"):
        for item in items[1:]:
            reading.gather(item)
    source.fails = 0
    for item in reading.begin(0, 0, items[1].position, 4):
        rows = plan.select(0, plan.item_positions(item))
        assert reading.gather(item)["_rowoffset"].to_pylist() == (2 * rows).tolist()


def test_items_with_more_bytes_than_allowed_are_not_given() -> None:
    plan = make_plan(resolve(Sequential(shard_rows=8, window_shards=1), 64), 16, 1)
    reading = Reading(plan, [InMemory(table_of([1000 if row == 3 else 10 for row in range(64)]))], 1 << 20)
    item, *_ = reading.begin(0, 0, 0, 16)
    assert reading.gather(item, 500).num_rows == 0
    assert 1000 <= reading.receipts[-1].too_large_bytes <= 16 * 1030
    assert [reading.gather(part, 500).num_rows for part in plan.cut(item, 4)] == [0, 4, 4, 4]
    assert reading.gather(plan.cut(item, 4)[0], 2000).num_rows == 4


def vectors(rows: int, width: int) -> InMemory:
    """Row r has the value r, `width` times."""
    values = pa.array(np.repeat(np.arange(rows, dtype=np.float32), width))
    return InMemory(pa.table({"x": pa.FixedSizeListArray.from_arrays(values, width)}), 4.0 * width + 8)


@given(order=cases(), batch=st.integers(1, 40), limit=st.integers(200, 20_000), decodes=st.booleans(), data=st.data())
def test_who_keeps_and_overwrites_what_was_gathered_changes_no_other_row(
    order: Resolved, batch: int, limit: int, decodes: bool, data: st.DataObject
) -> None:
    """Batches are views, which a model may change in place; and a pass may begin again before what it has taken."""
    batch = min(batch, order.epoch_rows)
    plan = make_plan(order, batch, 1)
    reading, kept = Reading(plan, [vectors(order.rows, 3)], limit, decodes=decodes, gives_away=True), []
    again = data.draw(st.integers(0, plan.steps(0) - 1)) * batch
    for epoch, position, most in ((0, 0, again + 3 * batch), (0, again, 1 << 40), (1, 0, 1 << 40)):
        for item in reading.begin(0, epoch, position, data.draw(st.integers(1, 60))):
            if item.position > most:
                break
            found = to_numpy(reading.gather(item))
            rows = plan.select(epoch, plan.item_positions(item))
            np.testing.assert_array_equal(found["x"], np.repeat(rows, 3).reshape(-1, 3))
            found["x"][:] = -1 - len(kept)
            kept.append(found["x"])
    assert all((array == -1 - number).all() for number, array in enumerate(kept))


def test_one_batch_kept_of_each_chunk_keeps_no_more_chunks_than_two() -> None:
    """Views of the others would keep them all: 16 windows of 2 MiB."""
    plan = make_plan(resolve(WindowShuffle(shard_rows=128, window_shards=1, lanes=4), 8192), 64, 1)
    limit = 2 * 512 * 4096 * 4 // 3  # two windows fit
    reading, kept, lent = Reading(plan, [vectors(8192, 1024)], limit, gives_away=True), [], []
    lender = reading.work[0]._lender
    for item in reading.begin(0, 0, 0, 64):
        table = reading.gather(item)
        if item.position % 512 == 64:
            kept.append((table["x"], plan.select(0, plan.item_positions(item))))
        del table
        lent.append(lender.lent_bytes)
    assert len(kept) == 16
    for column, rows in kept:
        assert column.combine_chunks().flatten().to_numpy()[::1024].tolist() == rows.tolist()
    assert max(lent) <= 2 * limit
    del kept, column
    assert lender.lent_bytes <= limit


class LateReader(InMemory):
    """Prepares each table twice: at once, and when the test calls `late`, as a read does that returns too late."""

    def __init__(self, feed: InMemory) -> None:
        super().__init__(feed.table, feed.likely_row_bytes)
        self.late: list[Callable[[], object]] = []

    def read_pieces(self, offsets: Any, prepare: Any, add: Any, *wanted: Any) -> None:
        def prepare_twice(*arguments: Any) -> object:
            self.late.append(lambda: prepare(*arguments))
            return prepare(*arguments)

        super().read_pieces(offsets, prepare_twice, add, *wanted)


def test_a_read_that_comes_late_writes_to_nothing_that_was_handed_out() -> None:
    source = LateReader(vectors(256, 3))
    reading = Reading(window_plan(256), [source], 1 << 20, gives_away=True)
    kept = [to_numpy(reading.gather(item))["x"] for item in reading.begin(0, 0, 0, 16)]
    for array in kept:
        array[:] = -1
    for each in source.late:
        each()
    assert all((array == -1).all() for array in kept)


class Meeting(InMemory):
    """Its reads wait until two of them run."""

    def __init__(self, table: pa.Table, read_bytes: float) -> None:
        super().__init__(table, read_bytes)
        self.barrier = threading.Barrier(2)

    def read(self, offsets: np.ndarray) -> pa.Table:
        self.barrier.wait(30)
        return super().read(offsets)


def test_loads_of_one_chunk_may_run_at_once_and_end_in_any_order() -> None:
    """Also with a column that is kept in the order of storage."""
    rows = 64
    plan = make_plan(resolve(WindowShuffle(shard_rows=16, window_shards=2, lanes=2), rows), rows, 1)
    table = pa.table({"id": np.arange(rows), "text": [str(row) for row in range(rows)]})
    reading = Reading(plan, [Meeting(table, 30.0)], 1 << 20)
    (item,) = reading.begin(0, 0, 0, rows)
    chunk, work = item.chunk, reading.work[0]
    loads = [Load(call, 0, 7, 0, chunk, first, rows // 2, 1 << 20) for call, first in enumerate((rows // 2, 0))]
    threads = [threading.Thread(target=work.load, args=(reading.planned, load)) for load in loads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, _ = work.load(reading.planned, Load(2, 0, 7, 0, chunk, rows, 0, 0))
    assert (found.rows, found.stored_rows) == (rows, rows)
    gathered = work._from_chunk(reading.planned, item, 7, 1 << 20, found.receipt)
    assert gathered["id"].to_pylist() == plan.select(0, plan.item_positions(item)).tolist()
    assert gathered["text"].to_pylist() == [str(row) for row in gathered["id"].to_pylist()]


def test_a_closed_reader_begins_no_load() -> None:
    plan, memory = make_plan(resolve(Sequential(), 8), 4, 1, "drop"), InMemory(table_of([1] * 8))
    work = ReadWork(Spec(memory), Options())  # type: ignore[arg-type]
    work.close()
    load = Load(1, 0, 0, 0, next(plan.chunks(0, 0)), 0, 8, 1 << 20, ())
    assert work.load(PlannedRows(plan), load)[0].rows == 0
    assert not memory.reads
