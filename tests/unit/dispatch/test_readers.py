"""Owns the promises of several readers for a rank: chunks in turn, each read by one; the same batches as with one; more
only where reading is what the trainer waits for.
"""

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

import raylance
from raylance.dispatch.in_flight import Stage
from raylance.dispatch.messages import Alive, GiveUpPlacing, Lost, Place, Prefetch, Read
from raylance.dispatch.read_schedule import ReadSchedule
from raylance.dispatch.scaling import Scaler
from raylance.orders.order import Resolved
from raylance.orders.shuffles import WindowShuffle
from raylance.planning.plan import Chunk, Plan, WorkItem
from raylance.source.readahead import ReadAhead
from tests.helpers.cluster import helpers_of
from tests.helpers.dispatch import FAULT, Driver, open_pool
from tests.helpers.in_memory import InMemory, table_of
from tests.helpers.orders import cases, resolve
from tests.helpers.plans import make_plan
from tests.helpers.slow_reading import slow_loader

# ---- turns


def chunks(plan: Plan, rank: int, epochs: int) -> list[Chunk]:
    """The chunks of some epochs that have rows of a rank, as its items name them."""
    items = (item for epoch in range(epochs) for item in plan.items(rank, epoch, 0, 10) if item.rows)
    return [chunk for chunk, _ in itertools.groupby(item.chunk for item in items)]


@given(order=cases(), batch=st.integers(1, 40), world=st.integers(1, 3), readers=st.integers(1, 4), data=st.data())
def test_chunks_go_round_also_from_epoch_to_epoch(
    order: Resolved, batch: int, world: int, readers: int, data: st.DataObject
) -> None:
    plan, rank, turns = make_plan(order, batch, world), data.draw(st.integers(0, world - 1)), ReadSchedule()
    asked: dict[int, Chunk] = {}
    wanted, lag = chunks(plan, rank, 3), data.draw(st.integers(0, 2))
    for place, chunk in enumerate(wanted):
        turns.begin_at(plan, wanted[max(0, place - lag)])  # it is awaited still
        for _ in range(2):  # its first item, and another one
            reader, following, begin = turns.take(plan, rank, chunk, range(readers))
            assert reader == place % readers
            assert asked.get(reader, chunk) == chunk, "it was asked to read it, unless it is the first of all"
            asked |= dict(begin)
        assert following is not None
        asked[reader] = following
        assert len(turns.assignments) <= lag + readers + 1


@given(order=cases(), batch=st.integers(1, 40), data=st.data())
def test_a_chunk_is_read_by_the_reader_asked_as_readers_come_and_go(
    order: Resolved, batch: int, data: st.DataObject
) -> None:
    plan, turns, asked = make_plan(order, batch, 1), ReadSchedule(), dict[Chunk, int]()
    for chunk in chunks(plan, 0, 3):
        turns.begin_at(plan, chunk)
        for _ in range(2):
            running = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
            asked = {known: reader for known, reader in asked.items() if reader in running}  # who goes forgets it
            reader, following, begin = turns.take(plan, 0, chunk, running)
            assert reader in running
            assert reader == asked.get(chunk, reader)
            assert following is None or following != chunk
            asked |= {chunk: reader} | {other: number for number, other in begin}
            asked |= {} if following is None else {following: reader}


def test_a_pass_that_continues_in_the_middle_of_a_chunk_finds_its_reader() -> None:
    plan, turns = make_plan(resolve(WindowShuffle(shard_rows=8, window_shards=1, lanes=2), 96), 4, 1), ReadSchedule()
    first, second, *_ = chunks(plan, 0, 1)
    assert turns.take(plan, 0, first, [0, 1])[0] == 0
    turns.begin_at(plan, second)
    assert turns.take(plan, 0, second, [0, 1])[0] == 1
    rest = plan.chunk_at(0, second.position + plan.stride)
    assert rest is not None
    assert rest != second
    turns.begin_at(plan, rest)
    assert turns.take(plan, 0, rest, [0, 1])[0] == 1
    jump = plan.chunk_at(7, 0)
    assert jump is not None
    turns.begin_at(plan, jump)
    assert turns.take(plan, 0, jump, [0, 1])[0] == 0
    assert {turn.chunk.epoch for turn in turns.assignments} == {7}, "nobody keeps what was to come before"


# ---- reading in turn


class InTurn:
    """Readers in memory, asked as the pool has it."""

    def __init__(self, plan: Plan, sizes: list[int], limit: int, readers: int) -> None:
        self.plan, self.turns = plan, ReadSchedule()
        self.feeds = [InMemory(table_of(sizes), 30.0) for _ in range(readers)]
        self.ahead = [ReadAhead(feed, limit) for feed in self.feeds]  # type: ignore[arg-type]

    def gather(self, item: WorkItem, readers: list[int]) -> pa.Table:
        if not item.rows:
            return self.ahead[readers[0]].gather("p", self.plan, item)
        reader, following, begin = self.turns.take(self.plan, item.dp_rank, item.chunk, readers)
        found = self.ahead[reader].gather("p", self.plan, item, following=following)
        for other, chunk in begin:
            self.ahead[other].begin("p", self.plan, item.dp_rank, chunk)
        return found


@settings(max_examples=30)
@given(
    order=cases(),
    batch=st.integers(1, 40),
    world=st.integers(1, 3),
    item_rows=st.integers(1, 60),
    limit=st.integers(200, 4000),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_every_item_has_its_rows_from_any_reader_within_the_limit_of_each(
    order: Resolved, batch: int, world: int, item_rows: int, limit: int, seed: int, data: st.DataObject
) -> None:
    """Two epochs, items that are asked for again, and readers that come and go."""
    plan, rank = make_plan(order, batch, world), data.draw(st.integers(0, world - 1))
    sizes = np.random.default_rng(seed).choice([1, 20, 150], order.rows, p=[0.8, 0.15, 0.05]).tolist()
    there = InTurn(plan, sizes, limit, 3)
    items = [item for epoch in range(2) for item in plan.items(rank, epoch, 0, item_rows)]
    crowds = st.lists(st.integers(0, 2), min_size=1, unique=True)
    changes = data.draw(st.dictionaries(st.integers(0, len(items) - 1), crowds, max_size=4))
    running = data.draw(crowds)
    for place, item in enumerate(items):
        running = changes.get(place, running)
        for asked in [item, *(items[max(0, place - 2) : place] if place in changes else [])]:
            rows = plan.select(asked.epoch, plan.item_positions(asked))
            assert there.gather(asked, running)["_rowoffset"].to_pylist() == (rows * 2).tolist()
    row_bytes = 150 + 8 + 4 + 4
    assert all(one.peak_bytes <= limit + limit / 8 + max(limit / 4, 3 * row_bytes) for one in there.ahead)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_no_window_is_read_twice(readers: int) -> None:
    plan = make_plan(resolve(WindowShuffle(shard_rows=8, window_shards=2, lanes=4), 512), 16, 1)
    there = InTurn(plan, [100] * 512, 4 * 64 * 112, readers)
    for epoch in range(3):
        for item in plan.items(0, epoch, 0, 16):
            there.turns.begin_at(plan, item.chunk)
            there.gather(item, list(range(readers)))
            for portion in (portion for ahead in there.ahead for portion in (ahead._used, ahead._next)):
                if portion is not None:
                    portion.filling.result()
    read = [feed.reads for feed in there.feeds]
    # Once, but for the first item, which is read by itself, and what is read of the epoch that does not come.
    assert 3 * 512 <= sum(read) <= 3 * 512 + 16 + readers * 64
    assert max(read) - min(read) <= 3 * 64, "they share the work"


# ---- the pool


def driver_of(readers: int, decoders: int = 1, **options: Any) -> Driver:
    return Driver(open_pool(readers + decoders, decoders=decoders, readers=readers), chunk_positions=2, **options)


def test_items_of_a_chunk_go_to_its_reader_and_the_next_chunk_to_the_next() -> None:
    driver = driver_of(2, rows=8)
    reads = driver.given(Read)
    assert [(read.item.position, read.helper) for read in reads[:4]] == [(0, 0), (1, 0), (2, 2), (3, 2)]
    assert [read.following.position for read in reads[:4]] == [4, 4, 6, 6]
    assert [(p.helper, p.chunk.position) for p in driver.given(Prefetch)] == [(2, 2)], "before it is asked for any"


def test_a_reader_that_comes_later_begins_at_once() -> None:
    plan, turns = make_plan(resolve(WindowShuffle(shard_rows=8, window_shards=1, lanes=2), 96), 4, 1), ReadSchedule()
    first, second, third, fourth, *_ = chunks(plan, 0, 1)
    assert turns.take(plan, 0, first, [0]) == (0, second, [])
    assert turns.take(plan, 0, first, [0, 1]) == (0, second, [(1, third)])
    assert turns.take(plan, 0, first, [0, 1]) == (0, second, [])
    turns.begin_at(plan, second)
    assert turns.take(plan, 0, second, [0, 1]) == (0, fourth, [])


def test_the_first_reader_is_enough_to_begin_and_one_without_a_place_is_done_without() -> None:
    pool = open_pool(decoders=0, readers=2)
    assert [command.kind for command in pool.due(0.0)] == ["reader"]
    pool.alive(0, 0.0)
    assert [command.kind for command in pool.due(0.0)] == ["reader"]
    pool.late(20.0)
    assert pool.failure is None
    assert pool.wanted["reader"] == 1
    pool.resize("reader", 3, 30.0)
    pool.resize("reader", 1, 31.0)
    pool.late(60.0)
    assert pool.wanted["reader"] == 1, "that those do not come which are not wanted any more changes nothing"
    none = open_pool(decoders=0, readers=2)
    none.late(20.0)
    assert none.failure == GiveUpPlacing("reader", 2, 2)


def test_what_a_lost_reader_had_is_read_by_the_other_and_it_is_replaced() -> None:
    driver = driver_of(2, rows=8)
    driver.handle(Lost(0, FAULT))
    assert [command.kind for command in driver.given(Place)] == ["reader"]
    driver.handle(Alive(2))
    again = driver.given(Read)[-2:]
    assert [(read.item.position, read.helper) for read in again] == [(0, 2), (1, 2)]


def test_a_second_reader_that_finds_no_place_again_is_done_without() -> None:
    driver = driver_of(2)
    driver.handle(Lost(0, FAULT))
    commands = driver.handle(None, 20.0)
    assert driver.dispatcher.deadline() is not None
    assert not driver.is_over, commands


# ---- how many


def grows(scaler: Scaler, stage: Stage) -> int:
    """Readers that are wanted after a while in which the trainer waits half of the time, for a piece at a stage."""
    pool = open_pool(2)
    pool.answered(pool.send(0, 0.0), 0.0)
    for step in range(64):
        now = step * 0.2
        scaler.look(pool, now, is_awaited=False, is_read=stage is Stage.READING)
        scaler.look(pool, now + 0.1, is_awaited=True, is_read=stage is Stage.READING)
        scaler.stepped(now + 0.2)
    return scaler.wanted


def test_readers_come_only_where_it_is_reading_that_is_waited_for() -> None:
    assert grows(Scaler(1, 4, 1, "reader"), Stage.READING) == 2, "and no third, as none has come yet"
    assert grows(Scaler(1, 4, 1, "reader"), Stage.DECODING) == 1


ROWS = 720
SMALL = {"max_window_bytes": 90_000, "max_inflight_bytes": 40_000}  # many chunks, and little on its way


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    rows = np.arange(ROWS)
    return write_dataset(
        pa.table({"id": rows, "text": ["x" * 400] * ROWS, "class": rows % 5, "weight": 1.0 + rows % 3})
    )


def test_readers_come_while_the_trainer_waits_for_reading(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row comes once an epoch meanwhile, in the order that one reader has."""
    monkeypatch.setattr("raylance.dispatch.scaling._LEAST_S", 0.1)
    with slow_loader(uri, 0.0, runtime="threads", **SMALL) as loader:
        wanted = [[ids_of(batch) for batch in loader.iter_batches(global_batch_size=20)] for _ in range(2)]
    counts, deadline = [0], time.monotonic() + 120
    with slow_loader(uri, 0.0005, num_readers=(1, 3), runtime="threads", **SMALL) as loader:
        while counts[-1] < 3 and time.monotonic() < deadline:
            seen = []
            epoch = loader.epoch
            for batch in loader.iter_batches(global_batch_size=20):
                counts.append(loader.stats()["readers"])
                seen.append(ids_of(batch))
            if epoch < 2:
                assert seen == wanted[epoch]
            assert sorted(itertools.chain(*seen)) == list(range(ROWS))
    assert counts[1] == 1
    assert counts == sorted(counts), "none goes while the trainer waits"
    assert counts[-1] == 3


def ids_of(batch: dict[str, Any]) -> list[int]:
    found: list[int] = batch["id"].tolist()
    return found


# ---- the same batches


ORDERS: list[Any] = [
    "window",
    "shard",
    "row",
    "sequential",
    raylance.WindowShuffle(shard_rows=10, window_shards=2, lanes=3),
    raylance.Weighted(weights="weight"),
    raylance.ClassBalanced(column="class"),
]


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "twice": batch["id"] * 2}


def deliver(dataset: Any, world_size: int = 1, **options: Any) -> list[Any]:
    """An epoch that is broken off and continued, and the next one, of the last rank."""
    found = []
    rank = world_size - 1
    with dataset.loader(rank=rank, world_size=world_size, runtime="threads", **SMALL, **options) as loader:
        for stop in (15, 1000, 1000):
            for batch in itertools.islice(loader.iter_batches(global_batch_size=24, with_row_offset=True), stop):
                assert (batch["twice"] == 2 * batch["id"]).all()
                found.append([loader.epoch, *batch["_rowoffset"].tolist(), *batch["id"].tolist()])
    return found


@pytest.mark.parametrize(
    "order", [pytest.param(o, id=str(o), marks=[] if o == ORDERS[0] else pytest.mark.slow) for o in ORDERS]
)
def test_the_same_batches_whatever_the_readers(uri: str, order: Any) -> None:
    dataset = raylance.dataset(uri, columns=["id", "text"], order=order, transform=double, remainder="pad")
    alone = deliver(dataset, num_decoders=1)
    assert len(alone) == 2 * (ROWS // 24)
    for options in (
        {"num_readers": 2, "num_decoders": 2},
        {"num_readers": 3, "num_decoders": 0},
        {"num_readers": "auto"},
    ):
        assert deliver(dataset, **options) == alone
    assert deliver(dataset, 3, num_readers=2) == deliver(dataset, 3)


def test_the_same_batches_of_a_mixture_and_of_less_than_a_chunk(uri: str) -> None:
    parts = [raylance.dataset(uri, columns=["id"], filter=f"class {sign} 2") for sign in ("<", ">=")]
    mixed: Any = raylance.mix({str(place): (part, 0.5) for place, part in enumerate(parts)})
    few: Any = raylance.dataset(uri, columns=["id"], filter="id < 30")
    for dataset in (mixed, few):
        passes = []
        for readers in (1, 2):
            with dataset.loader(num_readers=readers, runtime="threads", max_window_bytes=20_000) as loader:
                passes.append(
                    [batch["id"].tolist() for _ in range(2) for batch in loader.iter_batches(global_batch_size=8)]
                )
                assert loader.stats()["readers"] == readers
        assert passes[0] == passes[1]


# ---- by actors


@pytest.mark.slow
def test_one_of_two_readers_that_dies_costs_no_row(ray_session: None, uri: str) -> None:
    def epoch_of(loader: raylance.RankLoader, kills: tuple[int, ...] = ()) -> list[list[int]]:
        """An epoch, in which the readers of its start are killed, one at each of some steps."""
        found: list[list[int]] = []
        readers = helpers_of(loader, "ShardActor") if kills else []
        for batch in loader.iter_batches(global_batch_size=24):
            found.append(ids_of(batch))
            if len(found) in kills:
                pid = ray.get(readers.pop().__ray_call__.remote(lambda _: os.getpid()))
                os.kill(pid, signal.SIGKILL)
        return found

    options: dict[str, Any] = {"num_decoders": 0, **SMALL}
    with slow_loader(uri, 0.0002, num_readers=2, **options) as loader:
        epochs, deadline = [epoch_of(loader)], time.monotonic() + 60
        while loader.stats()["readers"] < 2 and time.monotonic() < deadline:
            epochs.append(epoch_of(loader))
        epochs += [epoch_of(loader, (5, 20)), epoch_of(loader)]
        assert loader.stats()["helpers_replaced"] == 2
    with slow_loader(uri, 0.0, **options) as loader:
        assert [epoch_of(loader) for _ in epochs] == epochs
        assert loader.stats()["readers"] == 1


@pytest.mark.parametrize("wanted", [0, -1, 1.5, (4, 2), (0, 2), (1, 2, 3), "two", True])
def test_numbers_that_are_none_are_refused(wanted: Any) -> None:
    with pytest.raises(raylance.ConfigError, match=r"num_readers=.*1 <= min < max"):
        raylance.Options(num_readers=wanted)
    with pytest.raises(raylance.ConfigError, match="num_readers="):
        raylance.DataConfig(num_readers=wanted)


def test_the_trainer_s_config_hands_the_number_on() -> None:
    config: Any = raylance.DataConfig(num_readers=(1, 3))
    assert config._options.reader_range == (1, 3)
    assert raylance.Options(num_readers="auto").reader_range == (1, 4)
    assert raylance.Options().reader_range == (1, 1)
