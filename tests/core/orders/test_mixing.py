"""Mixtures: quotas, components in their own order, exactly once, resume."""

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.orders import mixture
from raylance.orders.mixture import Component, MixOrder, quotas
from raylance.orders.order import Facts, Resolved
from raylance.orders.sampling import Weighted
from raylance.orders.shuffles import RowShuffle, WindowShuffle
from raylance.testing import SampleRows
from tests.helpers.orders import every_row, mix_of, mixtures


def parts_of(order: Resolved) -> tuple[Component, ...]:
    assert isinstance(order.settings, MixOrder)
    return order.settings.components


@given(order=mixtures(draws=False), epoch=st.integers(0, 3))
def test_components_keep_their_own_order_and_repeat_only_as_stop_allows(order: Resolved, epoch: int) -> None:
    rows, stop = order.epoch(epoch).rows(np.arange(order.epoch_rows)), order.params()["stop"]
    base, passes = 0, []
    for part in parts_of(order):
        own = rows[(rows >= base) & (rows < base + part.rows)] - base
        for start in range(0, len(own), part.rows):
            turn = own[start : start + part.rows].tolist()
            assert len(set(turn)) == len(turn), "a row comes again before all others came"
        whole = len(own) // part.rows
        passes.append(whole + (len(own) % part.rows > 0))
        base += part.rows
    if stop == "first_exhausted":
        assert max(passes) <= 1
        more = order.epoch(epoch).rows(np.array([order.epoch_rows]))
        assert more[0] in rows, "one more position would repeat a row"
    elif stop == "all_exhausted":
        assert set(rows.tolist()) == set(range(order.rows))
        assert len(set(rows[:-1].tolist())) < order.rows, "the epoch ends as soon as all were seen"


@given(order=mixtures(), data=st.data())
def test_seeking_equals_replaying_and_standings_count(order: Resolved, data: st.DataObject) -> None:
    rows, length = np.array(every_row(order, 2)), order.epoch_rows
    position = data.draw(st.integers(0, length))
    np.testing.assert_array_equal(order.epoch(2).rows(np.arange(position, length)), rows[position:])
    base = 0
    for part in parts_of(order):
        standing = order.settings.standings(0, position)[part.name]
        consumed = ((rows[:position] >= base) & (rows[:position] < base + part.rows)).sum()
        assert standing["rows"] == consumed == standing["passes"] * part.epoch_rows + standing["position"]
        base += part.rows


@given(order=mixtures(), epoch=st.integers(0, 3), most=st.sampled_from([1, 5, 4096]), data=st.data())
def test_rows_that_are_asked_together_are_those_of_each_component_alone(
    order: Resolved, epoch: int, most: int, data: st.DataObject
) -> None:
    """Positions in any order, of many epochs of components at once and of few."""
    mixed, wanted, base = order.epoch(epoch), np.full(order.epoch_rows, -1), 0
    names = np.array(every_component(order))
    for part, own in zip(parts_of(order), order.parts, strict=True):  # type: ignore[attr-defined]
        mine = np.flatnonzero(names == part.name)
        turns = -(-(order.epoch_rows + 1) // own.epoch_rows)
        for turn, low in enumerate(range(0, len(mine), own.epoch_rows)):
            those = mine[low : low + own.epoch_rows]
            wanted[those] = base + own.epoch(epoch * turns + turn).rows(np.arange(len(those)))
        base += part.rows
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mixture, "_MOST_TOGETHER", most)
        for _ in range(4):
            asked = np.array(data.draw(st.lists(st.integers(0, order.epoch_rows - 1), max_size=40)), dtype=np.int64)
            np.testing.assert_array_equal(mixed.rows(asked), wanted[asked])
        np.testing.assert_array_equal(mixed.rows(np.arange(order.epoch_rows)), wanted)


def every_component(order: Resolved) -> list[str]:
    """Names by position, counted by standings alone."""
    counts = [
        {name: standing["rows"] for name, standing in order.settings.standings(0, position).items()}
        for position in range(order.epoch_rows + 1)
    ]
    return [next(name for name in after if after[name] > before[name]) for before, after in itertools.pairwise(counts)]


def test_shares_are_exact_if_they_can_be() -> None:
    assert quotas([0.7, 0.3]) == [7, 3]
    assert quotas([1, 1, 1]) == [1, 1, 1]
    assert quotas([2, 4]) == [1, 2]
    assert quotas([0.112, 0.407, 0.0011]) == [1120, 4070, 11]
    assert quotas([0.0135, 0.9865]) == [27, 1973]
    assert quotas([np.float64(1e308)] * 3) == [1, 1, 1]
    assert quotas([1e308, 1.5e308]) == [2, 3]
    assert quotas([np.float32(0.7), np.float16(0.3)]) == [7, 3]
    assert quotas([np.int64(2), np.uint8(4)]) == [1, 2]
    assert quotas([Fraction(10**400, 3), Fraction(2 * 10**400, 3)]) == [1, 2], "more than a float holds"
    assert quotas([1e-300, 1e308, 1e308]) == [1, 2**30 - 2, 2**30 - 2]
    third = quotas([1 / 3, 1 / 7, 1 / np.pi])
    assert sum(third) <= 2**31
    assert np.array(third) / sum(third) == pytest.approx(np.array([1 / 3, 1 / 7, 1 / np.pi]) / (10 / 21 + 1 / np.pi))


# Frozen, as test_order.GOLDEN is: by epoch.
GOLDEN_MIXED = {
    0: [1, 7, 0, 3, 5, 4, 2, 6, 2, 3, 6, 4, 0, 5, 1, 2, 7, 1, 3],
    1: [2, 5, 3, 4, 6, 0, 1, 7, 4, 3, 5, 0, 1, 7, 2, 0, 6, 2, 4],
    3: [1, 7, 2, 3, 5, 0, 4, 6, 2, 4, 7, 1, 3, 5, 0, 1, 6, 3, 0],
}


@pytest.mark.parametrize("epoch", GOLDEN_MIXED)
def test_golden_mixture(epoch: int) -> None:
    window = WindowShuffle(shard_rows=2, window_shards=1, lanes=1)
    order = mix_of(19, (RowShuffle(shard_rows=3), 5, 2), (window, 3, 1), chunk_positions=6)
    assert every_row(order.resolve(Facts(rows=8, seed=0)), epoch) == GOLDEN_MIXED[epoch]


def test_a_mixture_takes_saved_sizes_over() -> None:
    auto = mix_of("all_exhausted", (WindowShuffle(shard_rows=4), 100, 3), (RowShuffle(), 50, 1))
    resolved = auto.resolve(Facts(rows=150, seed=0, row_bytes=1e6, global_batch_size=8)).settings
    window, row = {"name": "window", "shard_rows": 4, "window_shards": 3, "lanes": 8}, {"name": "row", "shard_rows": 4}
    a, b = {"quota": 3, "rows": 100, "seed": 1, "order": window}, {"quota": 1, "rows": 50, "seed": 2, "order": row}
    saved = {"name": "mix", "stop": "all_exhausted", "chunk_positions": 128, "components": {"a": a, "b": b}}
    assert resolved.params() == saved
    assert not auto.is_resolved
    assert auto.adopt(saved) == resolved
    assert dataclasses.replace(auto, chunk_positions=7).adopt(saved) == dataclasses.replace(resolved, chunk_positions=7)


def test_what_is_explicit_of_a_mixture_stays() -> None:
    weights = np.array([0.0, 1, 2, 3])
    order, tables = Weighted(weights=weights).bind(SampleRows(count=4))
    part = Component(name="drawn", order=order, seed=6, rows=4, quota=1, tables=tables)
    facts = Facts(rows=4, seed=5, row_bytes=1e9, window_bytes=1)
    mixed = MixOrder(components=(part,), stop=1, chunk_positions=7).resolve(facts)
    assert (mixed.seed, mixed.epoch_rows, mixed.read_positions, mixed.params()["chunk_positions"]) == (5, 1, 7, 7)
    own = order.resolve(Facts(rows=4, seed=6, tables=tables))
    assert mixed.epoch(0).rows(np.arange(4)).tolist() == every_row(own)
    least = dataclasses.replace(mixed.settings, chunk_positions="auto")
    assert least.resolve(facts).read_positions == 1


def test_a_component_may_have_the_largest_windows() -> None:
    """They are larger than 64 bits can count."""
    order = WindowShuffle(shard_rows=1 << 40, window_shards=1 << 40, lanes=2)
    alone = every_row(order.resolve(Facts(rows=20, seed=1)))
    assert every_row(mix_of("all_exhausted", (order, 20, 1)).resolve(Facts(rows=20, seed=5))) == alone
