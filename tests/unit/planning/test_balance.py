"""Which rank gets which rows: the same global batches, equal counts, costs about equal, few rows moved."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.orders.order import Resolved
from raylance.orders.shuffles import WindowShuffle
from raylance.planning.balance import Balance, cost_figures, slice_bounds
from raylance.planning.plan import Plan
from raylance.planning.steps import Budget
from tests.helpers.orders import cases, resolve
from tests.helpers.plans import global_batches, lognormal, make_plan, sizes

balances = st.builds(Balance, by=st.sampled_from(["cost", "squared"]), most_moved=st.sampled_from([0, 0.1, 0.3, 1]))
costs_of_rows = st.lists(st.integers(0, 1000) | st.sampled_from([0, 7, 7, 10**6]), min_size=1, max_size=80)


def balanced(order: Resolved, size: int | Budget, world: int, balance: Balance | None) -> Plan:
    plan = make_plan(order, size, world)
    return plan if balance is None else plan.__class__(**{**plan.__getstate__(), "balance": balance})


@pytest.mark.promise("P1", "P2", "P3")
@given(order=cases(), size=sizes, balance=balances, worlds=st.lists(st.integers(1, 8), min_size=2, max_size=2))
@settings(max_examples=40)
def test_a_balance_changes_which_rank_gets_a_row_and_nothing_else(
    order: Resolved, size: int | Budget, balance: Balance, worlds: list[int]
) -> None:
    plain = [sorted(rows) for rows in global_batches(make_plan(order, size, 1), 1, 0)]
    for world in worlds:
        plan = balanced(order, size, world, balance)
        assert [sorted(rows) for rows in global_batches(plan, 1, 0)] == plain
        for at in itertools.islice(plan.starts(1, 0, plan.steps(1)), 8):
            found = plan.positions(1, at, 0, plan.step_size(1, at))
            moved = (found != plan.by_lane.positions(1, at, 0, plan.step_size(1, at))).sum()
            assert moved <= balance.most_moved * len(found)


@given(costs=costs_of_rows, dp_size=st.integers(1, 9), by=st.sampled_from(["cost", "squared"]))
def test_no_swap_of_the_dearest_and_the_cheapest_rank_is_left(costs: list[int], dp_size: int, by: str) -> None:
    """Against brute force: every pair of rows of the two ranks is tried."""
    weights = np.array(costs, dtype=np.float64) ** (2 if by == "squared" else 1)
    order = Balance(by=by, most_moved=1).arrange(np.array(costs, dtype=np.int64), dp_size)  # type: ignore[arg-type]
    assert sorted(order.tolist()) == list(range(len(costs)))
    bounds = slice_bounds(len(costs), dp_size)
    loads = np.array([weights[order[low:high]].sum() for low, high in bounds])
    before = np.array([weights[low:high].sum() for low, high in bounds])
    assert loads.max() <= before.max() * (1 + 1e-9)
    swaps_left = len(costs) // 2 > (order != np.arange(len(costs))).sum()
    if loads.max() <= 1.003 * loads.mean() or not swaps_left:
        return
    most, least = bounds[int(loads.argmax())], bounds[int(loads.argmin())]
    gap = loads.max() - loads.min()
    for give, get in itertools.product(order[slice(*most)], order[slice(*least)]):
        change = weights[give] - weights[get]
        assert not 1e-6 * gap < change < gap * (1 - 1e-6), "this swap would make them more alike"


def test_costs_without_padding_are_equal_within_one_percent() -> None:
    lengths, ranks = lognormal(64_000), 8
    rows = lengths.reshape(-1, 16 * ranks)[:500].astype(np.int64)
    ratios = []
    for costs in rows:
        order = Balance(most_moved=0.25).arrange(costs, ranks)
        of_ranks = costs[order].reshape(ranks, 16).sum(axis=1)
        ratios.append(of_ranks.max() / of_ranks.mean())
    assert np.quantile(ratios, 0.9) < 1.01


def test_figures_are_those_of_a_plain_loop() -> None:
    order, world = resolve(WindowShuffle(shard_rows=5, window_shards=3, lanes=4), 200), 3
    plan = balanced(order, 20, world, Balance())
    found = cost_figures(plan, epoch=1, sample_steps=10)
    assert found is not None
    paid, summed, cost, moved = [], [], 0, 0
    for at in range(0, 200, 20):
        slices = [plan.positions(1, at, *plan.rank_slice(1, at, rank)) for rank in range(world)]
        costs = [order.costs(plan.select(1, own)) for own in slices]
        paid.append([len(own) * int(own.max()) for own in costs])
        summed.append([int(own.sum()) for own in costs])
        cost += sum(summed[-1])
        plain = plan.by_lane.positions(1, at, 0, 20)
        moved += int((np.concatenate(slices) != plain).sum())
    assert (found.rows, found.cost, found.moved) == (20, cost / 10, moved / 200)
    assert found.padding == pytest.approx(1 - cost / sum(map(sum, paid)))
    for got, of in ((found.padded, paid), (found.summed, summed)):
        assert got == pytest.approx(np.quantile([max(ranks) / np.mean(ranks) for ranks in of], [0.5, 0.9]))


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    "settings_", [{"by": "rows"}, {"most_moved": 1.5}, {"most_moved": True}, {"most_moved": "0.1"}]
)
def test_settings_that_cannot_be(settings_: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings_))):
        Balance(**settings_)  # type: ignore[arg-type]
