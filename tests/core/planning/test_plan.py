"""The pure plan: exactly once, equal steps, the same global batches for every world size."""

import dataclasses
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.orders.order import Facts, Resolved
from raylance.orders.shuffles import RowShuffle, WindowShuffle
from raylance.planning.step_size import REMAINDERS, Remainder
from raylance.planning.summary import summarise
from tests.helpers.orders import cases, every_row, resolve
from tests.helpers.plans import Batches, check_items, global_batches, make_plan


@given(
    order=cases(),
    batch=st.integers(1, 50),
    world=st.integers(1, 4),
    item_rows=st.integers(1, 100),
    remainder=st.sampled_from(REMAINDERS),
    data=st.data(),
)
def test_the_rows_of_an_item_are_those_of_its_chunk(
    order: Resolved, batch: int, world: int, item_rows: int, remainder: Remainder, data: st.DataObject
) -> None:
    """However chunks are cut; whether their rows were computed before, or not; cut items, too."""
    if remainder == "drop":
        batch = min(batch, order.epoch_rows)
    plan = make_plan(order, batch, world, remainder)
    rank, position = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, order.epoch_rows // batch)) * batch
    check_items(plan, rank, position, item_rows, data)


@pytest.mark.promise("P1", "P2", "P3")
@given(
    order=cases(),
    batch=st.integers(1, 50),
    worlds=st.lists(st.integers(1, 9), min_size=2, max_size=3),
    item_rows=st.lists(st.integers(1, 100), min_size=3, max_size=3),
    remainder=st.sampled_from(REMAINDERS),
    data=st.data(),
)
def test_promises(
    order: Resolved, batch: int, worlds: list[int], item_rows: list[int], remainder: Remainder, data: st.DataObject
) -> None:
    positions = order.epoch_rows
    if remainder == "drop":
        batch = min(batch, positions)
    position = data.draw(st.integers(0, positions))
    replayed = every_row(order, 1)
    first: Batches | None = None
    for world, rows_per_item in zip(worlds, item_rows, strict=False):
        plan = make_plan(order, batch, world, remainder)
        batches = global_batches(plan, 1, position, rows_per_item)
        first = batches if first is None else first
        assert batches == first, "the global batches depend on the world size"
    assert first is not None
    delivered = [row for rows in first for row in rows]
    left = replayed[position:]
    tail = len(left) % batch
    if remainder == "ragged":
        assert sorted(delivered) == sorted(left)
    elif remainder == "drop":
        assert sorted(delivered) == sorted(left[: len(left) - tail])
    else:
        assert set(left) <= set(delivered)
        assert len(delivered) == (len(left) + batch - tail if tail else len(left))


@pytest.mark.promise("P5")
@given(
    order=cases(),
    seed=st.integers(),
    epoch=st.integers(0, 5),
    runs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=6),
)
def test_stop_and_resume_with_other_world_and_batch_sizes(
    order: Resolved, seed: int, epoch: int, runs: list[tuple[int, int, int]]
) -> None:
    """Runs of (global batch, world size, steps before the stop), and a last one to the end of the epoch."""
    order, position, delivered = dataclasses.replace(order, seed=seed), 0, []
    wanted = every_row(order, epoch)
    for batch, world, steps in runs:
        plan = make_plan(order, batch, world)
        for rows in global_batches(plan, epoch, position)[:steps]:
            delivered += rows
            position = plan.after(0, position)
        assert sorted(delivered) == sorted(wanted[:position])
    for rows in global_batches(make_plan(order, 5, 2), epoch, position):
        delivered += rows
    assert sorted(delivered) == sorted(wanted)


@pytest.mark.promise("P2")
@given(order=cases(), batch=st.integers(1, 50), world=st.integers(1, 12))
def test_shares_differ_by_one_row_at_most(order: Resolved, batch: int, world: int) -> None:
    plan = make_plan(order, batch, world, "pad")
    slices = [plan.rank_slice(0, 0, rank) for rank in range(world)]
    assert slices[0][0] == 0
    assert slices[-1][1] == batch
    assert plan.steps(0) == -(-plan.epoch_rows // batch)
    assert all(slices[rank][1] == slices[rank + 1][0] for rank in range(world - 1))
    lengths = [high - low for low, high in slices]
    assert max(lengths) - min(lengths) <= 1


@given(
    order=cases(),
    batch=st.integers(1, 50),
    world=st.integers(1, 5),
    workers=st.integers(1, 6),
    item_rows=st.integers(1, 100),
    remainder=st.sampled_from(REMAINDERS),
    data=st.data(),
)
def test_workers_steps_interleaved_are_the_plans_own(
    order: Resolved, batch: int, world: int, workers: int, item_rows: int, remainder: Remainder, data: st.DataObject
) -> None:
    """What k workers of a rank do with a plan of every k-th step each, as torch's DataLoader takes their batches."""
    if remainder == "drop":
        batch = min(batch, order.epoch_rows)
    plan = make_plan(order, batch, world, remainder)
    start = data.draw(st.integers(0, order.epoch_rows))
    shares = []
    for worker in range(workers):
        share, at = dataclasses.replace(plan, every=workers), start + worker * batch
        shares.append(global_batches(share, 1, at, item_rows))
        for left in range(len(shares[-1]), 0, -1):
            assert share.steps(0, at) == left
            at = share.after(0, at)
        assert share.steps(0, at) == 0
    taken = [rows for turn in itertools.zip_longest(*shares) for rows in turn if rows is not None]
    assert taken == global_batches(plan, 1, start, item_rows)


@given(order=cases(), batch=st.integers(1, 50), world=st.integers(1, 5), data=st.data())
def test_steps_are_arranged_by_lane_wherever_they_begin(
    order: Resolved, batch: int, world: int, data: st.DataObject
) -> None:
    plan, lanes = make_plan(order, batch, world, "pad"), order.lane_count
    at = data.draw(st.integers(0, order.epoch_rows))
    arranged = [plan.positions(0, at, *plan.rank_slice(0, at, rank)) for rank in range(world)]
    assert all(positions.dtype == np.int64 for positions in arranged)
    wanted = sorted(range(at, at + batch), key=lambda position: (position % lanes, position // lanes))
    assert np.concatenate(arranged).tolist() == wanted


def test_padding_repeats_the_first_rows() -> None:
    order = resolve(RowShuffle(shard_rows=4), 10)
    plan = make_plan(order, 4, 1, "pad")
    last = plan.positions(0, 8, 0, 4)
    assert last.tolist() == [8, 9, 10, 11]
    assert plan.select(0, last).tolist()[2:] == every_row(order)[:2]


@given(order=cases(), batch=st.integers(1, 50), every=st.integers(1, 3), item_rows=st.integers(1, 100), data=st.data())
def test_items_are_of_the_size_that_is_aimed_at_and_can_be_cut(
    order: Resolved, batch: int, every: int, item_rows: int, data: st.DataObject
) -> None:
    plan = dataclasses.replace(make_plan(order, batch, 2), every=every)
    for item in plan.items(1, 2, 0, item_rows):
        begin = item.chunk.position
        unit = begin // plan.chunk_positions
        assert (begin + (item.chunk.steps - 1) * (plan.every * plan.global_batch_size)) // plan.chunk_positions == unit
        end = begin + item.chunk.steps * (plan.every * plan.global_batch_size)
        assert end // plan.chunk_positions > unit or end >= plan.epoch_rows
        assert item.rows <= item_rows
        parts = data.draw(st.integers(0, 5))
        cut = plan.cut(item, parts)
        assert 1 <= len(cut) <= max(1, parts)
        assert len(cut) == min(max(1, parts), max(item.steps if item.steps > 1 else item.rows, 1))
        pieces = [plan.item_positions(part) for part in cut]
        np.testing.assert_array_equal(np.concatenate(pieces), plan.item_positions(item))


def test_items_join_small_steps_and_cut_large_ones() -> None:
    def cuts(batch: int, rank: int = 0, **sizes: int) -> list[tuple[int, int, int, int]]:
        plan = dataclasses.replace(make_plan(resolve(RowShuffle(), 100), batch, rank + 1), chunk_positions=64)
        return [(item.position, item.steps, item.low, item.high) for item in plan.items(rank, 0, 0, **sizes)]

    assert cuts(10, item_rows=30) == [(0, 3, 0, 30), (30, 3, 0, 30), (60, 1, 0, 10), (70, 3, 0, 30)]
    assert cuts(10, item_rows=29)[:2] == [(0, 2, 0, 20), (20, 2, 0, 20)]
    assert cuts(10, item_rows=90, max_steps=5)[:3] == [(0, 5, 0, 50), (50, 2, 0, 20), (70, 3, 0, 30)]
    assert cuts(40, item_rows=16)[:4] == [(0, 1, 0, 13), (0, 1, 13, 26), (0, 1, 26, 40), (40, 1, 0, 13)]
    assert cuts(80, rank=1, item_rows=16)[:3] == [(0, 1, 0, 13), (0, 1, 13, 26), (0, 1, 26, 40)]
    assert cuts(20, rank=1, item_rows=30)[:2] == [(0, 3, 0, 30), (60, 1, 0, 10)]
    assert cuts(40, item_rows=20)[:2] == [(0, 1, 0, 20), (0, 1, 20, 40)]
    assert cuts(2, item_rows=1)[:2] == [(0, 1, 0, 1), (0, 1, 1, 2)]
    assert cuts(40, item_rows=90) == [(0, 2, 0, 80), (80, 1, 0, 20)]
    assert [steps for _, steps, _, _ in cuts(1, item_rows=90)] == [64, 36]


def test_items_grow_from_the_first_step_on_and_shrink_to_steps_at_the_end() -> None:
    plan = dataclasses.replace(make_plan(resolve(RowShuffle(), 1000), 10, 1), chunk_positions=1000)
    rows = [item.rows for item in plan.items(0, 0, 0, item_rows=100, first_rows=5)]
    assert sum(rows) == 1000
    most = rows.index(max(rows))
    assert rows[:2] == [5, 5]
    assert rows[:most] == sorted(rows[:most])
    assert rows[most:][::-1] == sorted(rows[most:])
    assert max(rows) > 50
    assert rows[-1] == 10, "a step is not divided, as each item costs time"


def test_items_grow_over_epochs_that_follow_each_other() -> None:
    plan = dataclasses.replace(make_plan(resolve(RowShuffle(), 200), 10, 1), chunk_positions=1000)
    chunks = [chunk for epoch in range(6) for chunk in plan.chunks(epoch, 0)]
    items = list(plan.items(0, 0, 0, item_rows=100, first_rows=5, chunks=chunks, spans_epochs=True))
    by_epoch = [[item.rows for item in items if item.epoch == epoch] for epoch in range(6)]
    assert [sum(rows) for rows in by_epoch] == [200] * 6
    assert by_epoch[0][:2] == [5, 5]
    assert by_epoch[0][:-1] == sorted(by_epoch[0][:-1]), "the last one has what is left"
    assert by_epoch[5] == [100, 100]


def test_items_after_a_last_step_of_few_rows_are_not_as_small() -> None:
    plan = dataclasses.replace(make_plan(resolve(RowShuffle(), 201), 10, 1), chunk_positions=1000, remainder="ragged")
    chunks = [*plan.chunks(0, 200), *plan.chunks(1, 0)]
    items = list(plan.items(0, 0, 200, item_rows=100, first_rows=1, chunks=chunks, spans_epochs=True))
    assert [item.rows for item in items][:2] == [1, 10]


@pytest.mark.promise("P5")
@pytest.mark.parametrize("position", [0, 5 * 10**9, 10**10 - 4096])
def test_a_step_costs_the_same_anywhere_in_ten_billion_rows(position: int) -> None:
    """O(rows of the step): no array grows with the dataset, and no loop runs over it."""
    order = WindowShuffle(shard_rows=4096, window_shards=8, lanes=32)
    plan = make_plan(order.resolve(Facts(rows=10**10, seed=3)), 4096, 8)
    tracemalloc.start()
    rows = plan.select(3, plan.positions(0, position, *plan.rank_slice(0, position, 5)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(rows.tolist())) == 512
    assert peak < 50e6


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "global_batch_size=0"),
        ({"world": 0}, "dp_size=0"),
        ({"rows": 0}, "rows=0"),
        ({"batch": 101, "remainder": "drop"}, "100 rows and the global batch 101.*ragged"),
        ({"remainder": "keep"}, "remainder='keep'.*'drop'"),
    ],
)
def test_bad_plans(change: dict[str, object], message: str) -> None:
    arguments = {"rows": 100, "batch": 10, "world": 1} | change
    order = RowShuffle(shard_rows=4).resolve(Facts(rows=arguments.pop("rows"), seed=3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        make_plan(order, **arguments)  # type: ignore[arg-type]


def test_summary_says_what_is_dropped_and_repeated() -> None:
    order = resolve(WindowShuffle(shard_rows=10, window_shards=2, lanes=4), 1003)
    dropped = summarise(make_plan(order, 20, 2, "drop"), row_bytes=1000, reads="range")
    assert (dropped.steps, dropped.rows_dropped, dropped.rows_repeated, dropped.shards) == (50, 3, 0, 101)
    padded = summarise(make_plan(order, 20, 2, "pad"), row_bytes=1000, reads="range")
    assert (padded.steps, padded.rows_dropped, padded.rows_repeated) == (51, 0, 17)
    assert padded.window_bytes == 4 * 20 // 2 * 1000
    assert padded.held_bytes == 2 * padded.window_bytes, "the one in use and the next"
    for text in ("1,003 rows", "101 shards", "4 lanes", "50 steps", "3 rows dropped", "MiB a window"):
        assert text in repr(dropped)
