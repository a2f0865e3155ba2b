"""Which chunks are held, and what becomes of one whose loads fail, without a dispatcher."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.dispatch.account import Account
from raylance.dispatch.chunk_order import ChunkOrder
from raylance.dispatch.load_ahead import ChunkTable
from raylance.dispatch.messages import Load
from raylance.orders.order import Resolved
from raylance.orders.shuffles import Sequential
from raylance.planning.plan import Chunk
from raylance.planning.step_size import REMAINDERS, Remainder
from tests.helpers.dispatch import FAULT
from tests.helpers.orders import cases, resolve
from tests.helpers.plans import make_plan
from tests.simulation.schedule import make_plan as simulated_plan


def account_of(reader_bytes: int) -> Account:
    return Account(raw_bytes=1, decoded_bytes=0, inflight_bytes=1 << 20, reader_bytes=reader_bytes)


def chunk_order(reader_bytes: int, *, decodes: bool = False, gives_away: bool = False) -> ChunkOrder:
    account = account_of(reader_bytes)
    return ChunkOrder(account, decodes=decodes, gives_away=gives_away, loads_next_epoch=True)


def check_that_none_is_missing(order: ChunkOrder) -> None:
    """Each chunk begins where the one before ends, or with the next epoch."""
    plan, rank = order.planned
    for before, after in itertools.pairwise(order.held):
        if before.chunk.epoch == after.chunk.epoch:
            assert after.first == before.first + before.rows
        else:
            rest = plan.next_chunk(before.chunk)
            assert rest is None or not plan.chunk_size(rest, rank)
            assert (after.chunk.epoch, after.first) == (before.chunk.epoch + 1, 0)


@given(
    order=cases(),
    batch=st.integers(1, 40),
    world=st.integers(1, 4),
    remainder=st.sampled_from(REMAINDERS),
    reader_bytes=st.integers(4, 300),
    decodes=st.booleans(),
    gives_away=st.booleans(),
    data=st.data(),
)
def test_chunks_follow_one_another_whatever_was_left_taken_or_halved(
    order: Resolved,
    batch: int,
    world: int,
    remainder: Remainder,
    reader_bytes: int,
    decodes: bool,
    gives_away: bool,
    data: st.DataObject,
) -> None:
    plan = make_plan(order, min(batch, order.epoch_rows), world, remainder)
    rank = data.draw(st.integers(0, world - 1))
    chunks = chunk_order(reader_bytes, decodes=decodes, gives_away=gives_away)
    for _ in range(6):
        near = data.draw(st.sampled_from([held.chunk for held in chunks.held] or [Chunk(epoch=0, position=0, steps=1)]))
        step = near.position // plan.global_batch_size + data.draw(st.integers(-4, 4))
        epoch, position = near.epoch, min(max(0, step), max(0, plan.steps(0) - 1)) * plan.global_batch_size
        chunks.begin(plan, rank, epoch, position)
        check_that_none_is_missing(chunks)
        if chunks.held:
            assert chunks.held[0].has(epoch, plan.line(0, position, rank)), "the first one has the first row"
        for chunk in itertools.islice(chunks.chunks(epoch, position), data.draw(st.integers(1, 6))):
            line = plan.first_line(chunk, rank)
            assert not plan.chunk_size(chunk, rank) or any(each.has(epoch, line) for each in chunks.held)
        for held in list(itertools.islice(chunks.all(), data.draw(st.integers(0, 5)))):
            what = data.draw(st.sampled_from(["halved", "gathered", ""]))
            if what == "halved" and held.rows > 1:
                chunks.halve(held)
            elif what == "gathered":
                held.taken_rows = data.draw(st.integers(0, held.rows))
            check_that_none_is_missing(chunks)
        of_pass = [held for held in chunks.held if held.chunk.epoch == epoch]
        for held in data.draw(st.lists(st.sampled_from(of_pass), unique_by=id)) if of_pass else ():
            chunks.held.remove(held)  # it was used, maybe before the chunk of another reader that comes first


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_gets_the_rows_from_its_step_on_although_a_chunk_that_is_held_begins_later(rank: int) -> None:
    """Steps of a cost may have no row of a rank, so that the chunk with the first row may begin many steps later."""
    plan = simulated_plan(4, 24, 1, 2, "pad", 1000)
    steps = list(plan.starts(0, 0, plan.steps(0)))
    for before, position in itertools.combinations(steps, 2):
        chunks = chunk_order(2)
        chunks.begin(plan, rank, 0, before)
        _ = list(itertools.islice(chunks.chunks(0, before), 3)), list(itertools.islice(chunks.all(), 3))
        while chunks.held and chunks.held[0].first + chunks.held[0].rows <= plan.line(0, position, rank):
            chunks.held.popleft()  # it was used
        chunks.begin(plan, rank, 0, position)
        found = [plan.chunk_rows(chunk, rank).tolist() for chunk in chunks.chunks(0, position)]
        wanted = [plan.positions(0, at, *plan.rank_slice(0, at, rank)) for at in steps if at >= position]
        assert list(itertools.chain(*found)) == plan.select(0, np.concatenate(wanted)).tolist()


def test_a_chunk_whose_loads_meet_faults_is_loaded_after_pauses_and_at_last_fails() -> None:
    plan = make_plan(resolve(Sequential(), 8), 4, 1, "drop")
    table, calls, now = ChunkTable(account_of(1 << 20), decodes=False, gives_away=False), itertools.count(), 0.0
    item, pauses = next(plan.items(0, 0, 0, 4, chunks=table.begin(plan, 0, 0, 0))), []
    while (held := table.place_of(item)) is None:
        table.load([0], lambda _: next(calls), now)
        loads = [each for each in table.take_commands() if isinstance(each, Load) and each.chunk.epoch == 0]
        assert len(loads) == 1
        table.faulted(loads[0].call, FAULT, now)
        pauses.append(table.deadline(now) - now)
        now += pauses[-1]
    assert (held.trouble.error, held.trouble.faults) == (FAULT, 4)
    assert pauses[:3] == [0.2, 1.0, 5.0]
    assert len(pauses) == 4


@given(
    order=cases(),
    batch=st.integers(1, 20),
    world=st.integers(1, 3),
    remainder=st.sampled_from(REMAINDERS),
    item_rows=st.integers(1, 60),
    data=st.data(),
)
def test_an_item_is_cut_after_any_of_its_rows(
    order: Resolved, batch: int, world: int, remainder: Remainder, item_rows: int, data: st.DataObject
) -> None:
    plan = make_plan(order, min(batch, order.epoch_rows), world, remainder)
    items = list(itertools.islice(plan.items(data.draw(st.integers(0, world - 1)), 0, 0, item_rows), 8))
    for item in items:
        if item.rows > 1:
            rows = data.draw(st.integers(1, item.rows - 1))
            parts = plan.cut_at(item, rows)
            ends = list(itertools.accumulate(part.rows for part in parts))
            assert rows in ends
            assert len(parts) <= 4
            assert sum(part.steps for part in parts) in (item.steps, item.steps + 1), "one step is cut at most"
            positions = np.concatenate([plan.item_positions(part) for part in parts])
            assert positions.tolist() == plan.item_positions(item).tolist()
