"""Which rank gets which rows: the same global batches, equal counts, costs about equal, few rows moved."""

import dataclasses
import itertools
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.orders.order import Resolved
from raylance.orders.shuffles import WindowShuffle
from raylance.planning.balance import Balance, slice_bounds
from raylance.planning.step_costs import cost_figures
from raylance.planning.step_size import REMAINDERS, CostLimit
from tests.helpers.orders import cases, resolve
from tests.helpers.plans import check_items, global_batches, lognormal, make_plan, rank_batches, sizes

balances = st.builds(
    Balance,
    by=st.sampled_from(["cost", "squared"]),
    most_moved=st.sampled_from([0, 0.1, 0.3, 1]),
    equal_rows=st.booleans(),
)
costs_of_rows = st.lists(st.integers(0, 1000) | st.sampled_from([0, 7, 7, 10**6]), min_size=1, max_size=80)


@pytest.mark.promise("P1", "P2", "P3")
@given(order=cases(), size=sizes, balance=balances, worlds=st.lists(st.integers(1, 8), min_size=2, max_size=2))
def test_a_balance_changes_which_rank_gets_a_row_and_nothing_else(
    order: Resolved, size: int | CostLimit, balance: Balance, worlds: list[int]
) -> None:
    plain = [sorted(rows) for rows in global_batches(make_plan(order, size, 1), 1, 0)]
    for world in worlds:
        plan = make_plan(order, size, world, balance=balance)
        assert [sorted(rows) for rows in global_batches(plan, 1, 0)] == plain
        for at in itertools.islice(plan.starts(1, 0, plan.steps(1)), 8):
            own = [set(plan.positions(1, at, *plan.rank_slice(1, at, rank)).tolist()) for rank in range(world)]
            plain_ = [plan.by_lane.rank_slice(1, at, rank) for rank in range(world)]
            before = [set(plan.by_lane.positions(1, at, *each).tolist()) for each in plain_]
            moved = sum(len(found - other) for found, other in zip(own, before, strict=True))
            assert moved <= balance.most_moved * plan.step_size(1, at)
            assert all(own) == all(before), "a rank lost all its rows"
            if balance.equal_rows:
                assert [*map(len, own)] == [*map(len, before)]


@pytest.mark.promise("P1", "P5")
@given(order=cases(), size=sizes, balance=balances, world=st.integers(1, 5), every=st.integers(1, 3), data=st.data())
def test_the_rows_of_an_item_are_those_of_its_chunk(
    order: Resolved, size: int | CostLimit, balance: Balance, world: int, every: int, data: st.DataObject
) -> None:
    """From any position; however chunks are cut; cut items, too."""
    plan = dataclasses.replace(
        make_plan(order, size, world, data.draw(st.sampled_from(REMAINDERS[1:])), balance),
        chunk_positions=data.draw(st.integers(1, 100)),
        every=1 if isinstance(size, CostLimit) else every,
    )
    rank, position = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, order.epoch_rows))
    item_rows = data.draw(st.integers(1, 100))
    check_items(plan, rank, position, item_rows, data)
    assert len(rank_batches(plan, rank, 1, position, item_rows)) == plan.steps(1, position)
    chunks = [each for each in plan.chunks(1, position) if plan.chunk_size(each, rank)]
    lines = [(first := plan.first_line(each, rank), first + plan.chunk_size(each, rank)) for each in chunks]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(lines)), "lines do not ascend"


@pytest.mark.promise("P1", "P3")
@pytest.mark.parametrize("chunk_positions", [11, 23])
def test_a_pass_may_begin_anywhere_in_a_step(chunk_positions: int) -> None:
    """As if a run went on with another budget: the step that is cut may have begun before the chunk of its rest."""
    order = resolve(WindowShuffle(shard_rows=32, window_shards=1, lanes=2), 135)
    made = make_plan(order, CostLimit(cost=264), 4, "pad", Balance(equal_rows=False))
    plan = dataclasses.replace(made, chunk_positions=chunk_positions)
    whole = [sorted(plan.select(1, np.arange(at, at + plan.step_size(1, at)))) for at in plan.starts(1, 0, 99)]
    for position in range(plan.epoch_rows):
        steps = [sorted(rows) for rows in global_batches(plan, 1, position, item_rows=5)]
        first = plan.select(1, np.arange(position, position + plan.step_size(1, position)))
        later = plan.steps(1, position) - 1
        assert steps == [sorted(first), *whole[plan.steps(1) - later : plan.steps(1)]]


@given(
    costs=costs_of_rows, dp_size=st.integers(1, 9), by=st.sampled_from(["cost", "squared"]), equal_rows=st.booleans()
)
def test_no_move_between_the_dearest_and_the_cheapest_rank_is_left(
    costs: list[int], dp_size: int, by: Literal["cost", "squared"], equal_rows: bool
) -> None:
    """Against brute force: every pair of rows of the two ranks is tried, and every row that one could give."""
    weights = np.array(costs, dtype=np.float64) ** (2 if by == "squared" else 1)
    found = Balance(by=by, most_moved=1, equal_rows=equal_rows).arrange(np.array(costs, dtype=np.int64), dp_size)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(costs)))
    even = [range(*bounds) for bounds in slice_bounds(len(costs), dp_size)]
    loads = np.array([weights[own].sum() for own in found])
    before = np.array([weights[list(own)].sum() for own in even])
    assert loads.max() <= before.max() * (1 + 1e-9)
    moved = sum(len(set(own.tolist()) - set(was)) for own, was in zip(found, even, strict=True))
    if loads.max() <= 1.007 * max(loads.mean(), weights.max()) or moved + 2 > len(costs):
        return
    most, least = found[int(loads.argmax())], found[int(loads.argmin())]
    gap = loads.max() - loads.min()
    changes = [weights[give] - weights[get] for give, get in itertools.product(most, least)]
    if not equal_rows and len(most) > 1:
        changes += weights[most].tolist()
    assert not any(1e-6 * gap < change < gap * (1 - 1e-6) for change in changes), "this would make them more alike"


@given(
    costs=st.lists(st.tuples(st.integers(0, 1000), st.sampled_from([0, 0, 3, 40, 900])), min_size=1, max_size=60),
    dp_size=st.integers(1, 9),
    equal_rows=st.booleans(),
    most_moved=st.sampled_from([0.2, 1.0]),
)
def test_of_two_costs_the_larger_load_of_a_rank_is_least(
    costs: list[tuple[int, int]], dp_size: int, equal_rows: bool, most_moved: float
) -> None:
    """Against brute force: no swap of the rank with the largest load is left that helps."""
    both = np.array(costs, dtype=np.int64)
    found = Balance(most_moved=most_moved, equal_rows=equal_rows).arrange(both, dp_size)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(both)))
    even = [range(*bounds) for bounds in slice_bounds(len(both), dp_size)]
    least = np.maximum(1, np.maximum(both.sum(axis=0) / dp_size, both.max(axis=0)))  # no rank has less than a row
    loads, before = (np.array([both[list(own)].sum(axis=0) for own in each]) / least for each in (found, even))
    assert loads.max() <= before.max() * (1 + 1e-9)
    moved = sum(len(set(own.tolist()) - set(was)) for own, was in zip(found, even, strict=True))
    assert moved <= most_moved * len(both)
    assert not equal_rows or [*map(len, found)] == [*map(len, even)]
    if loads.max() <= 1.007 or most_moved < 1 or moved + 2 > len(both):
        return
    worst = int(loads.max(axis=1).argmax())
    for other in range(dp_size):
        for give, get in itertools.product(found[worst], found[other]) if other != worst else ():
            change = (both[give] - both[get]) / least
            after = max((loads[worst] - change).max(), (loads[other] + change).max())
            assert after > loads.max() * (1 - 1e-6), "this swap would help"


@pytest.mark.parametrize("images", [1, 4, 8])
def test_tokens_are_equal_where_patches_cannot_be(images: int) -> None:
    """Few images in a step of 8 ranks; and squared costs of other scales."""
    rng, ratios, squared = np.random.default_rng(0), [], []
    for _ in range(20):
        tokens, patches = np.clip(rng.lognormal(6, 1, 128), 32, 8192).astype(np.int64), np.zeros(128, dtype=np.int64)
        patches[rng.integers(0, 128, images)] = rng.integers(100, 2000, images)
        found = Balance(most_moved=1).arrange(np.stack([tokens, patches], axis=1), 8)
        loads = np.array([tokens[own].sum() for own in found])
        ratios.append(loads.max() / loads.mean())
        found = Balance(most_moved=1, by="squared").arrange(np.stack([tokens, tokens * 100_000], axis=1), 8)
        paid = np.array([(tokens[own] ** 2).sum() for own in found])
        squared.append(paid.max() / max(paid.mean(), (tokens**2).max()))
    assert np.quantile(ratios, 0.9) < 1.02
    assert np.quantile(squared, 0.9) < 1.1


@pytest.mark.parametrize(("ranks", "most_moved", "most"), [(8, 1.0, 1.01), (64, 1.0, 1.01), (64, 0.3, 1.03)])
def test_tokens_and_patches_are_equal_together(ranks: int, most_moved: float, most: float) -> None:
    """Rows of text with 0 to 12 images: tokens lognormal(6, 1), 40 % without an image; 16 rows a rank."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(40):
        n = 16 * ranks
        images = np.where(rng.random(n) < 0.4, 0, np.minimum(rng.geometric(0.45, n), 12))
        each = np.clip(rng.lognormal(6.5, 0.8, int(images.sum())), 64, 16_384)
        patches = np.bincount(np.repeat(np.arange(n), images), each, n)
        costs = np.stack([np.clip(rng.lognormal(6, 1, n), 32, 8192), patches], axis=1).astype(np.int64)
        found = Balance(most_moved=most_moved).arrange(costs, ranks)
        loads = np.array([costs[own].sum(axis=0) for own in found])
        ratios.append(loads.max(axis=0) / loads.mean(axis=0))
    assert (np.quantile(ratios, 0.9, axis=0) <= most).all()


@pytest.mark.parametrize("equal_rows", [True, False])
def test_costs_without_padding_are_equal_within_one_percent(equal_rows: bool) -> None:
    lengths, ranks = lognormal(64_000), 8
    rows = lengths.reshape(-1, 16 * ranks)[:500].astype(np.int64)
    ratios = []
    for costs in rows:
        of_ranks = [costs[own].sum() for own in Balance(most_moved=0.25, equal_rows=equal_rows).arrange(costs, ranks)]
        ratios.append(max(of_ranks) / np.mean(of_ranks))
    assert np.quantile(ratios, 0.9) < 1.01


def test_with_few_rows_ranks_of_unequal_numbers_are_more_alike() -> None:
    """Three rows a rank: with as many on each, the rank of a giant row cannot be matched."""
    rows, ranks = lognormal(9_600).reshape(-1, 24).astype(np.int64), 8
    ratios = dict[bool, list[float]]()
    for equal_rows, costs in itertools.product([True, False], rows):
        found = Balance(most_moved=1, equal_rows=equal_rows).arrange(costs, ranks)
        of_ranks = [costs[own].sum() for own in found]
        ratios.setdefault(equal_rows, []).append(max(of_ranks) / np.mean(of_ranks))
    assert np.mean(ratios[False]) < np.mean(ratios[True])


@pytest.mark.parametrize("equal_rows", [True, False])
def test_figures_are_those_of_a_plain_loop(equal_rows: bool) -> None:
    order, world = resolve(WindowShuffle(shard_rows=5, window_shards=3, lanes=4), 200), 3
    plan = make_plan(order, 20, world, balance=Balance(equal_rows=equal_rows))
    found = cost_figures(plan, epoch=1, sample_steps=10)
    assert found is not None
    paid, summed, cost, moved = [], [], 0, 0
    for at in range(0, 200, 20):
        slices = [plan.positions(1, at, *plan.rank_slice(1, at, rank)) for rank in range(world)]
        costs = [order.costs(plan.select(1, own))[:, 0] for own in slices]
        paid.append([len(own) * int(own.max()) for own in costs])
        summed.append([int(own.sum()) for own in costs])
        cost += sum(summed[-1])
        plain = [plan.by_lane.positions(1, at, *plan.by_lane.rank_slice(1, at, rank)) for rank in range(world)]
        moved += sum(len(np.setdiff1d(own, was)) for own, was in zip(slices, plain, strict=True))
    assert (found.rows, found.cost, found.moved) == (20, cost / 10, moved / 200)
    assert found.padding == pytest.approx(1 - cost / sum(map(sum, paid)))
    for got, of in ((found.padded, paid), (found.summed, summed)):
        assert got == pytest.approx(np.quantile([max(ranks) / np.mean(ranks) for ranks in of], [0.5, 0.9]))


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    "settings_", [{"by": "rows"}, {"most_moved": 1.5}, {"most_moved": True}, {"most_moved": "0.1"}, {"equal_rows": 1}]
)
def test_settings_that_cannot_be(settings_: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings_))):
        Balance(**settings_)  # type: ignore[arg-type]
