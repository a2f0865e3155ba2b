"""Steps of a cost: each row once, the same global batches on any world, within the budget, for any order."""

import dataclasses
import itertools
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raylance.orders.buckets import Buckets
from raylance.orders.order import Facts, Resolved
from raylance.orders.shuffles import WindowShuffle
from raylance.planning.cutting import cut_costs
from raylance.planning.step_size import REMAINDERS, CostLimit, Remainder
from tests.helpers.orders import cases, every_row
from tests.helpers.plans import (
    Batches,
    budgets,
    check_items,
    fits,
    global_batches,
    limits_of,
    lognormal,
    make_plan,
    sizes,
)


@pytest.mark.promise("P1", "P2", "P3")
@given(
    order=cases(),
    budget=budgets,
    worlds=st.lists(st.integers(1, 8), min_size=2, max_size=3),
    item_rows=st.lists(st.integers(1, 100), min_size=3, max_size=3),
    remainder=st.sampled_from(REMAINDERS),
    data=st.data(),
)
def test_promises(
    order: Resolved,
    budget: CostLimit,
    worlds: list[int],
    item_rows: list[int],
    remainder: Remainder,
    data: st.DataObject,
) -> None:
    position = data.draw(st.integers(0, order.epoch_rows))
    left, first = every_row(order, 1)[position:], list[Batches]()
    for world, rows_per_item in zip(worlds, item_rows, strict=False):
        plan = make_plan(order, budget, world, remainder)
        first.append(global_batches(plan, 1, position, rows_per_item))
        slices = [plan.rank_slice(1, position, rank) for rank in range(world)] if first[0] else [(0, 0)]
        assert max(high - low for low, high in slices) - min(high - low for low, high in slices) <= 1
    assert all(batches == first[0] for batches in first), "the global batches depend on the world size"
    delivered = list(itertools.chain(*first[0]))
    dropped = len(left) - len(delivered)
    assert 0 <= dropped < (order.lane_count if remainder == "drop" else 1)
    assert sorted(delivered) == sorted(left[: len(left) - dropped])
    limits = limits_of(order, budget)
    assert all(fits(order, limits, rows) or len(rows) == 1 for rows in first[0])


@pytest.mark.promise("P5")
@given(
    order=cases(),
    seed=st.integers(),
    epoch=st.integers(0, 5),
    runs=st.lists(st.tuples(sizes, st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=6),
)
def test_stop_and_resume_with_another_world_or_budget_or_a_number_of_rows(
    order: Resolved, seed: int, epoch: int, runs: list[tuple[int | CostLimit, int, int]]
) -> None:
    order, position, delivered = dataclasses.replace(order, seed=seed), 0, []
    wanted = every_row(order, epoch)
    for size, world, steps in runs:
        plan = make_plan(order, size, world)
        for rows in global_batches(plan, epoch, position)[:steps]:
            delivered += rows
            position = plan.after(epoch, position)
        assert sorted(delivered) == sorted(wanted[:position])
    for rows in global_batches(make_plan(order, CostLimit(cost=500), 2), epoch, position):
        delivered += rows
    assert sorted(delivered) == sorted(wanted)


@given(order=cases(), budget=budgets, world=st.integers(1, 4), item_rows=st.integers(1, 100), data=st.data())
def test_the_rows_of_an_item_are_those_of_its_chunk(
    order: Resolved, budget: CostLimit, world: int, item_rows: int, data: st.DataObject
) -> None:
    """However chunks are cut; whether their rows were computed before, or not; cut items, too."""
    plan = dataclasses.replace(make_plan(order, budget, world), chunk_positions=data.draw(st.integers(1, 100)))
    rank, position = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, order.epoch_rows))
    check_items(plan, rank, position, item_rows, data)


def cut(costs: np.ndarray, budget: CostLimit) -> np.ndarray:
    return cut_costs(costs[:, None], budget.of(["cost"]))


@example(costs=[0, 0, 0, 0], budget=CostLimit(cost=1))  # rows that cost nothing, one a step
@example(costs=[0, 0, 0, 9, 9], budget=CostLimit(cost=3))
@given(costs=st.lists(st.integers(0, 200), min_size=1, max_size=200), budget=budgets)
def test_as_few_steps_as_can_be_or_a_few_more(costs: list[int], budget: CostLimit) -> None:
    starts = cut(np.array(costs, dtype=np.int64), budget).tolist()
    assert starts[0] == 0
    assert starts[-1] == len(costs)
    fewest, at = 0, 0
    while at < len(costs):  # brute force: as many rows as fit, one after the other
        end = at + 1
        while end < len(costs) and end - at < (budget.max_rows or len(costs)):
            paid = costs[at : end + 1]
            if (len(paid) * max(paid) if budget.padded else sum(paid)) > budget.cost:
                break
            end += 1
        at, fewest = end, fewest + 1
    assert fewest <= len(starts) - 1 <= fewest + 2 + fewest // 8


@given(
    costs=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300), st.integers(0, 5)), min_size=1, max_size=200),
    limits=st.tuples(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 40)),
    order=st.permutations(["a", "b", "c"]),
)
def test_steps_do_not_depend_on_the_order_of_costs(
    costs: list[tuple[int, int, int]], limits: tuple[int, int, int], order: list[str]
) -> None:
    names, columns = ["a", "b", "c"], np.array(costs, dtype=np.int32).T
    plans = [
        make_plan(
            WindowShuffle(shard_rows=50).resolve(
                Facts(rows=len(costs), seed=0, tables={f"cost.{name}": columns[names.index(name)] for name in each})
            ),
            CostLimit(cost=dict(zip(each, (limits[names.index(name)] for name in each), strict=True)), padded=[]),
            2,
        )
        for each in (names, order)
    ]
    first, second = (global_batches(plan, 0, 0) for plan in plans)
    assert first == second
    assert all(fits(plans[0].order, cast("CostLimit", plans[0].budget), rows) or len(rows) == 1 for rows in first)


def test_buckets_of_lengths_leave_little_padding_and_ranks_pay_alike() -> None:
    lengths, ranks = lognormal(200_000), 8
    facts = Facts(
        rows=len(lengths), seed=0, tables={"cost": lengths}, global_batch_size=8, global_batch_cost={"cost": 32_768}
    )
    order = Buckets(shard_rows=1024, window_shards=16).resolve(facts)
    plan, real, paid, ratios, position = make_plan(order, CostLimit(cost=32_768), ranks), 0, 0, [], 0
    while not plan.is_over(0, position):
        slices = [plan.positions(0, position, *plan.rank_slice(0, position, rank)) for rank in range(ranks)]
        costs = [lengths[plan.select(0, own)] for own in slices]
        of_ranks = [len(own) * int(own.max()) for own in costs]
        real, paid = real + sum(int(own.sum()) for own in costs), paid + sum(of_ranks)
        ratios.append(max(of_ranks) / np.mean(of_ranks))
        position = plan.after(0, position)
    assert position == len(lengths), "nothing is dropped"
    assert 1 - real / paid < 0.05
    assert np.quantile(ratios, 0.9) < 1.05


def test_a_shuffle_by_cost_reads_the_same_windows() -> None:
    """Buckets change the order inside the windows of the lanes, so no rank reads rows of another lane or window."""
    lengths = lognormal(5_000)
    sizes = {"shard_rows": 50, "window_shards": 4, "lanes": 8}
    facts = Facts(rows=len(lengths), seed=0, tables={"cost": lengths}, global_batch_size=8)
    by_cost, plain = (kind(**sizes).resolve(facts).epoch(1) for kind in (Buckets, WindowShuffle))
    span = 50 * 4 * 8
    for begin in range(0, 3 * span, span):
        for lane in range(8):
            positions = np.arange(begin, begin + span, dtype=np.int64)[lane::8]
            assert sorted(by_cost.rows(positions).tolist()) == sorted(plain.rows(positions).tolist())


def test_a_giant_among_small_rows_costs_no_time() -> None:
    """No number of equal steps fits; trying them all would take minutes."""
    costs = np.where(np.arange(100_000) == 500, 2**31 - 1, 5)
    starts = cut(costs, CostLimit(cost=7, padded=False))
    assert np.diff(starts).max() == 1
    starts = cut(np.full(100_000, 5), CostLimit(cost=7, padded=False))
    assert np.diff(starts).max() == 1
