"""The contract that every order keeps, as properties; and the frozen orders."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.orders.mixture import MixOrder
from raylance.orders.order import Facts, Order, Resolved
from raylance.orders.registry import make_order
from raylance.orders.sampling import ClassBalanced, Weighted
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle, auto_lanes
from raylance.testing import check_order
from tests.helpers.orders import SHUFFLES, cases, every_row, mix_of, resolve, sample


@given(case=cases(), seed=st.integers(), epoch=st.integers(0, 9))
def test_every_row_exactly_once_or_as_many_draws_as_asked(case: Resolved, seed: int, epoch: int) -> None:
    rows = every_row(dataclasses.replace(case, seed=seed), epoch)
    if case.repeats:
        assert len(rows) == case.epoch_rows
        assert set(rows) <= set(range(case.rows))
    else:
        assert sorted(rows) == list(range(case.rows))


@given(case=cases(SHUFFLES), data=st.data())
def test_completed_shards_are_those_whose_rows_are_all_consumed(case: Resolved, data: st.DataObject) -> None:
    position, n = data.draw(st.integers(0, case.rows)), case.rows
    consumed = set(every_row(case, 1)[:position])
    ends = [min(low + case.shard_rows, n) for low in range(0, n, case.shard_rows)]
    if case.settings.shard_rows == "fragment":
        ends = sample(n).fragment_ends().tolist()
    wanted = [consumed.issuperset(range(low, end)) for low, end in zip([0, *ends[:-1]], ends, strict=True)]
    epoch = case.epoch(1)
    assert epoch.completed_shards(position).tolist() == wanted
    places = epoch.completed_places(position)
    if places is not None:
        listed = np.zeros(case.shard_count, dtype=np.bool_)
        for first, end in places.tolist():
            assert first < end
            listed[epoch.shard_ids(np.arange(first, end))] = True
        assert listed.tolist() == wanted, "so few places are always searched"


@pytest.mark.parametrize("position", [2, 999, 3000, 7997])
def test_complete_shards_where_the_search_ends_early(position: int) -> None:
    """Windows of more rows than are looked at together, of many small shards and of few large ones."""
    for shard_rows, window_shards in ((2, 2000), (1000, 4)):
        order = resolve(WindowShuffle(shard_rows=shard_rows, window_shards=window_shards, lanes=2), 9000)
        consumed = np.bincount(order.shards_of(np.array(every_row(order, 1)[:position])), minlength=order.shard_count)
        assert order.epoch(1).completed_shards(position).tolist() == (consumed == shard_rows).tolist()


@settings(max_examples=10)
@given(case=cases())
def test_everything_that_is_asked_of_an_order_of_ones_own(case: Resolved) -> None:
    """Seeking, complete shards, saved parameters and the rest, of every kind and any sizes."""
    check_order(case.settings, rows=(case.rows,), columns=sample(case.rows).columns, other_process=False)


@pytest.mark.parametrize("name", ["window", "shard", "row"])
def test_epochs_and_seeds_differ(name: str) -> None:
    orders = [resolve(make_order(name), 500, seed, row_bytes=100, global_batch_size=20) for seed in (0, 1)]
    assert len({tuple(every_row(order, epoch)) for order in orders for epoch in (0, 1)}) == 4


def test_shard_shuffle_keeps_rows_of_a_shard_together() -> None:
    order = ShardShuffle(shard_rows=10, lanes=1)
    assert sum(np.diff(every_row(resolve(order, 95))) != 1) <= 9


def test_window_shuffle_mixes_only_inside_its_windows() -> None:
    order = resolve(WindowShuffle(shard_rows=10, window_shards=3, lanes=2), 300).epoch(0)
    unshuffled = resolve(ShardShuffle(shard_rows=10, window_shards=3, lanes=2), 300).epoch(0)
    for lane in range(2):
        positions = np.arange(lane, 300, 2)
        ours, base = order.rows(positions), unshuffled.rows(positions)
        for start in range(0, 150, 30):
            window = slice(start, start + 30)
            assert sorted(ours[window]) == sorted(base[window])
            assert ours[window].tolist() != base[window].tolist()


# Frozen: a change here makes every checkpoint that exists resume on other rows. See test_permutation.GOLDEN.
GOLDEN: list[tuple[Order, list[int]]] = [
    (
        WindowShuffle(shard_rows=4, window_shards=2, lanes=2),
        [15, 3, 14, 9, 13, 0, 12, 18, 4, 8, 7, 2, 5, 10, 6, 1, 16, 11, 17],
    ),
    (
        ShardShuffle(shard_rows=4, window_shards=2, lanes=2),
        [12, 18, 13, 0, 14, 1, 15, 2, 4, 3, 5, 8, 6, 9, 7, 10, 16, 11, 17],
    ),
    (Sequential(shard_rows=4), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]),
    (RowShuffle(shard_rows=4), [0, 10, 3, 12, 9, 18, 15, 6, 14, 13, 16, 4, 17, 2, 1, 5, 7, 11, 8]),
]


@pytest.mark.parametrize(("order", "wanted"), GOLDEN, ids=lambda value: getattr(value, "name", ""))
def test_golden_orders(order: Order, wanted: list[int]) -> None:
    assert every_row(resolve(order, 19, seed=0)) == wanted


def lanes(batch: int, mebibytes: int, row_bytes: float, run_rows: int = 1, rows: int = 10**6) -> int:
    facts = Facts(rows=rows, seed=0, row_bytes=row_bytes, run_rows=run_rows, global_batch_size=batch)
    return auto_lanes(dataclasses.replace(facts, window_bytes=mebibytes << 20))


def test_auto_lanes() -> None:
    sizes = (256, 96, 100, 7, 37, 33, 4096, 1)
    assert [lanes(size, 512, 3072) for size in sizes] == [32, 32, 25, 7, 1, 11, 32, 1]
    assert [lanes(96, mebibytes, 3072) for mebibytes in (512, 255, 128, 64, 32, 1)] == [32, 24, 16, 8, 4, 4]
    assert lanes(96, 64, 1 << 20) == 32, "large rows are read one by one, and lose nothing"
    assert [lanes(64, 512, 150_000, run) for run in (1, 16, 100, 240, 2000)] == [32, 32, 16, 4, 4]
    assert lanes(64, 512, 27_000, 240, rows=3600) == 4, "few rows"


def test_shards_of_rows_that_cost_less_one_after_the_other() -> None:
    facts = Facts(rows=10**6, seed=0, row_bytes=27_000, global_batch_size=64)
    found = [WindowShuffle().resolve(dataclasses.replace(facts, run_rows=run)).shard_rows for run in (1, 240, 2000)]
    assert 100 < found[0] < 160
    assert 230 <= found[1] <= 260
    assert found[2] >= 1900


# Frozen as the orders are, since sizes decide batches: rows, bytes of one, global batch, MiB of windows; then of a
# window shuffle rows of a shard, shards of a window and lanes; of a row shuffle rows of a shard; of a mixture positions
# that are read together, and of its first component rows of a shard and shards of a window. Before 0.11.0, windows of
# less than 256 MiB had more lanes.
GOLDEN_SIZES = [
    ((1, 1.0, 1, 512), (1, 1, 1), 1, (3, 1, 1)),
    ((10, 0.5, 1, 1), (3, 4, 1), 3, (20, 2, 3)),
    ((10, 8.0, 7, 1), (1, 7, 1), 3, (3, 1, 1)),
    ((1000, 8.0, 256, 512), (8, 4, 32), 250, (1706, 8, 4)),  # (1600, 1, 15) before 0.4.0: shards of one row
    ((10_000_000, 42000.0, 4096, 512), (64, 2, 32), 99, (5851, 64, 1)),  # steps of more rows than a shard has
    ((10_000_000, 42000.0, 8192, 512), (64, 2, 32), 99, (5851, 64, 1)),  # and than a window has room for
    ((10_000_000, 42000.0, 4192, 512), (99, 2, 32), 99, (5280, 99, 1)),
    ((1281167, 110000.0, 256, 512), (32, 2, 32), 38, (1706, 32, 1)),
    ((1000000, 3072.0, 1024, 512), (1344, 2, 32), 1365, (71680, 1344, 1)),
    ((1000000, 3072.0, 100, 64), (1360, 1, 5), 1365, (10666, 800, 1)),
    ((1000000000, 1.0, 4096, 512), (4194304, 2, 32), 4194304, (223696213, 4194304, 1)),
    ((50000, 600000.0, 66, 32), (1, 1, 22), 6, (27, 1, 1)),
    ((333, 2000000.0, 12, 16), (1, 1, 12), 2, (4, 1, 1)),
]


@pytest.mark.parametrize(("given", "window", "row", "mixture"), GOLDEN_SIZES, ids=lambda value: str(value))
def test_golden_sizes(
    given: tuple[int, float, int, int], window: tuple[int, ...], row: int, mixture: tuple[int, ...]
) -> None:
    rows, row_bytes, batch, mebibytes = given
    facts = Facts(rows=rows, seed=0, row_bytes=row_bytes, global_batch_size=batch, window_bytes=mebibytes << 20)
    order = WindowShuffle().resolve(facts)
    assert order.settings == WindowShuffle(shard_rows=window[0], window_shards=window[1], lanes=window[2])
    assert (order.shard_rows, order.lane_count) == (window[0], window[2])
    assert order.read_positions == window[0] * window[1] * window[2]
    assert RowShuffle().resolve(facts).shard_rows == row
    parts = [(WindowShuffle(), max(1, rows // 2), quota) for quota in (3, 7)]
    settings = mix_of("all_exhausted", *parts).resolve(facts).settings
    assert isinstance(settings, MixOrder)
    first = settings.components[0].order
    assert isinstance(first, WindowShuffle)
    assert (settings.chunk_positions, first.shard_rows, first.window_shards) == mixture


def test_windows_of_fragments_are_sized_by_their_mean() -> None:
    order = resolve(WindowShuffle(shard_rows="fragment"), 360, row_bytes=100, window_bytes=20_000)
    fragments = len(sample(360).fragment_ends())
    assert order.shard_rows == -(-360 // fragments)
    assert order.params()["shard_rows"] == "fragment"
    assert order.params()["window_shards"] == 10_000 // (order.shard_rows * 100)


@given(
    rows=st.integers(1, 10**7),
    row_bytes=st.floats(1, 1e6),
    batch=st.integers(1, 4096),
    limit=st.integers(1 << 20, 1 << 30),
)
def test_auto_keeps_the_memory_limit(rows: int, row_bytes: float, batch: int, limit: int) -> None:
    facts = Facts(rows=rows, seed=0, row_bytes=row_bytes, global_batch_size=batch, window_bytes=limit)
    order = WindowShuffle().resolve(facts)
    assert batch % order.lane_count == 0
    assert order.read_positions is not None
    held = 2 * order.read_positions * row_bytes
    smallest = 2 * order.lane_count * row_bytes  # shards of one row: nothing smaller can be read
    assert held <= max(limit, smallest)
    assert order.settings.resolve(facts) == order


def test_explicit_values_are_kept() -> None:
    order = WindowShuffle(shard_rows=77, window_shards=3, lanes=5)
    resolved = order.resolve(Facts(rows=10**6, seed=0, row_bytes=100, global_batch_size=64, window_bytes=1 << 20))
    assert resolved.settings == order
    assert (resolved.shard_rows, resolved.lane_count, resolved.read_positions) == (77, 5, 5 * 3 * 77)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (WindowShuffle, "shard_rows", 0),
        (WindowShuffle, "lanes", -1),
        (WindowShuffle, "window_shards", 1.5),
        (WindowShuffle, "lanes", True),
        (functools.partial(Weighted, weights="w"), "rows_per_epoch", 0),
        (functools.partial(ClassBalanced, column="c"), "batch_rows", 0),
        (functools.partial(ClassBalanced, column="c"), "classes_per_batch", 0),
    ],
)
def test_wrong_parameters(make: Callable[..., Order], name: str, value: Any) -> None:
    auto = "" if name == "classes_per_batch" else '"auto" or '
    with pytest.raises(ConfigError, match=rf"{name}={value}\): must be {auto}.*an integer of at least 1"):
        make(**{name: value})


def test_saved_sizes_are_taken_over_where_none_are_given() -> None:
    resolved = resolve(WindowShuffle(), 1000, row_bytes=1e4, global_batch_size=20).settings
    saved = resolved.params()
    assert saved == {"name": "window", "shard_rows": 13, "window_shards": 4, "lanes": 20}
    assert resolved.is_resolved
    assert WindowShuffle().adopt(saved) == resolved
    assert WindowShuffle(lanes=3).adopt(saved) == dataclasses.replace(resolved, lanes=3)


def test_unknown_orders() -> None:
    with pytest.raises(ConfigError, match=r"'windwo' is unknown.*'window'"):
        make_order("windwo")
