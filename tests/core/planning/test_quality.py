"""The measures of shuffle quality: what they say of good, bad and middling orders, and that they stay cheap."""

import functools
import itertools
import tracemalloc

import numpy as np
import pytest

from raylance.errors import ConfigError
from raylance.orders.order import Facts, Order
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle
from raylance.planning.plan import Plan
from raylance.planning.quality import ShuffleQuality, compare_windows, shuffle_quality
from raylance.planning.step_size import Remainder
from tests.helpers import plans

SEQUENTIAL = Sequential(shard_rows=100, window_shards=1, lanes=1)

ROWS, BATCH = 60_000, 64


def make_plan(order: Order, rows: int = ROWS, batch: int = BATCH, seed: int = 1, remainder: Remainder = "drop") -> Plan:
    return plans.make_plan(order.resolve(Facts(rows=rows, seed=seed)), batch, 1, remainder)


def window(lanes: int, window_shards: int, shard_rows: int = 200) -> WindowShuffle:
    return WindowShuffle(shard_rows=shard_rows, window_shards=window_shards, lanes=lanes)


@functools.cache
def quality(order: Order, **changes: int) -> ShuffleQuality:
    return shuffle_quality(make_plan(order, **changes), sample_steps=100)


def test_a_row_shuffle_is_ideal() -> None:
    found = quality(RowShuffle(shard_rows=100))
    for name in ("distance", "nearest", "spread", "close_pairs"):
        assert getattr(found, name).ratio == pytest.approx(1, rel=0.1), name
    assert set(found.divergences) == {"10 blocks", "100 blocks"}
    assert all(measure.ratio == pytest.approx(1, rel=0.1) for measure in found.divergences.values())
    assert abs(found.epoch_correlation) < 0.05


def test_storage_order_is_worst() -> None:
    found = quality(SEQUENTIAL)
    assert found.distance.value == 1
    assert found.nearest.value == 1
    assert found.spread.value <= 2
    assert found.close_pairs.value > 0.9
    assert found.class_divergence > 20
    # A batch of one class in ten: (1 log2(2 / 1.1) + 0.1 log2(0.2 / 1.1) + 0.9) / 2 bits.
    assert found.divergences["10 blocks"].value == pytest.approx(0.758, abs=0.01)
    assert found.epoch_correlation == pytest.approx(1)


def test_windows_lie_between_and_gain_by_lanes_and_by_shards() -> None:
    ideal, worst = quality(RowShuffle(shard_rows=100)), quality(SEQUENTIAL)
    by_lanes = [quality(window(lanes, 2)) for lanes in (1, 8, 64)]
    by_shards = [quality(window(2, shards)) for shards in (1, 8, 64)]
    for found in (by_lanes, by_shards):
        divergences = [each.class_divergence for each in found]
        assert worst.class_divergence > divergences[0] > 2 * divergences[-1]
        assert divergences[-1] > 0.8 * ideal.class_divergence
        assert all(after < 1.1 * before for before, after in itertools.pairwise(divergences))
        spreads = [each.spread.ratio for each in found]
        assert spreads == sorted(spreads)
        assert worst.spread.ratio < spreads[0]
        pairs = [each.close_pairs.ratio for each in found]
        assert pairs == sorted(pairs, reverse=True)


def test_shards_without_windows_are_clumped_however_many_lanes() -> None:
    shards = quality(ShardShuffle(shard_rows=200, window_shards=1, lanes=32))
    windows = quality(window(32, 16))
    assert shards.distance.ratio > 0.9, "consecutive rows come from different lanes"
    assert shards.nearest.ratio < 0.05 < 0.5 < windows.nearest.ratio


def test_row_shuffle_and_formulas_agree() -> None:
    found = quality(RowShuffle(shard_rows=100), rows=5000, batch=50)
    assert found.distance.ideal == pytest.approx(5001 / 3)
    pairs = [(a, b) for a in range(5000) for b in range(a + 1, min(a + 6, 5000))]
    assert found.close_pairs.ideal == pytest.approx(len(pairs) / (5000 * 4999 / 2))
    # Of B blocks, B rows drawn at random touch nearly B (1 - 1 / e).
    assert found.spread.ideal == pytest.approx(50 * (1 - np.exp(-1)), rel=0.03)


@pytest.mark.parametrize("kind", [np.int64, np.str_])
def test_labels(kind: type) -> None:
    plan = make_plan(SEQUENTIAL)
    by_class = np.sort(np.arange(ROWS) % 7).astype(kind)
    mixed = (np.arange(ROWS) % 7).astype(kind)
    assert shuffle_quality(plan, by_class).class_divergence > 20
    assert shuffle_quality(plan, mixed).class_divergence < 0.2, "a stored order can be more even than chance"
    assert set(shuffle_quality(plan, mixed).divergences) == {"7 labels"}
    shuffled = make_plan(RowShuffle(shard_rows=1))
    assert shuffle_quality(shuffled, by_class).class_divergence == pytest.approx(1, rel=0.15)


def test_other_sizes_are_compared() -> None:
    plan, labels = make_plan(window(4, 2, 10), 2000, 2), np.arange(2000) // 300
    compared = compare_windows(plan, labels)
    assert [*compared] == [1, 2, 4, 16, 64]
    assert all([*by_lanes] == [1, 2, 4] for by_lanes in compared.values())
    assert compared[2][4] == shuffle_quality(plan, labels, sample_steps=128).class_divergence
    other = make_plan(window(1, 16, 10), 2000, 2)
    assert compared[16][1] == shuffle_quality(other, labels, sample_steps=128).class_divergence
    assert compare_windows(make_plan(SEQUENTIAL)) == {}
    assert [*compare_windows(make_plan(window(1, 1, 2), 4, 8, remainder="ragged"))[1]] == [1, 2, 4], "no lane is empty"


@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("batch", [1, 128])
@pytest.mark.parametrize("order", [SEQUENTIAL, RowShuffle(shard_rows=3), window(4, 2, 2)], ids=lambda order: order.name)
def test_small_datasets(order: Order, rows: int, batch: int) -> None:
    found = shuffle_quality(make_plan(order, rows, batch, remainder="ragged"), epochs=2, sample_steps=16)
    assert 1 <= found.spread.value <= min(rows, batch)
    assert all(0 <= measure.value <= 1 for measure in found.divergences.values())
    assert order.name in repr(found)


def test_costs_do_not_grow_with_the_dataset() -> None:
    plan = make_plan(WindowShuffle(shard_rows=10_000, window_shards=4, lanes=16), rows=10**10, batch=256)
    tracemalloc.start()
    found = shuffle_quality(plan, sample_steps=32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20
    assert found.steps == 32
    assert found.class_divergence < 10


def test_wrong_arguments() -> None:
    plan = make_plan(SEQUENTIAL)
    with pytest.raises(ConfigError, match=r"\(5,\).*60000 rows"):
        shuffle_quality(plan, np.zeros(5))
    for arguments in ({"epochs": 0}, {"sample_steps": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            shuffle_quality(plan, **arguments)
