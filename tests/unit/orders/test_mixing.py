"""Mixtures: quotas, components in their own order, exactly once, resume."""

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.api.dataset import spec_of
from raylance.orders import mixture
from raylance.orders.mixture import Component, MixOrder, quotas
from raylance.orders.order import Facts, Resolved
from raylance.orders.sampling import Weighted
from raylance.orders.shuffles import RowShuffle, WindowShuffle
from raylance.testing import SampleRows
from raylance.torch_data import IterableDataset
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
        standing = order.settings.standings(position)[part.name]
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
        {name: standing["rows"] for name, standing in order.settings.standings(position).items()}
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


WEIGHTS = st.lists(st.floats(1e-9, 1) | st.integers(1, 1000) | st.floats(0.1, 1), min_size=1, max_size=40)


@given(weights=WEIGHTS, data=st.data())
def test_every_prefix_has_the_shares_of_the_weights(weights: list[float], data: st.DataObject) -> None:
    """Shares were off by up to 2.2 %, and no stretch was found for some weights. Far positions, too, in both ways."""
    parts = [(RowShuffle(shard_rows=1), 10, quota) for quota in quotas(weights)]
    order = mix_of(2**62, *parts, spread="tree")
    position = data.draw(st.integers(0, 5000) | st.integers(0, 2**62))
    counts = [standing["rows"] for standing in order.standings(position).values()]
    assert sum(counts) == position
    for count, (_, _, quota) in zip(counts, parts, strict=True):
        wanted = Fraction(position * quota, sum(order.quotas))
        assert abs(count - wanted) <= 1 + len(weights).bit_length() / 2
    if position > 5000:
        return
    shares = np.array([float(weight) for weight in weights]) / float(sum(map(Fraction, weights)))
    assert np.abs(np.array(counts) - position * shares).max() <= 2 + len(weights).bit_length() / 2


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


def with_draws(stop: str | int, epoch_rows: int) -> MixOrder:
    """Two positions of three drawn from five rows, one of a shuffle of four; the draws ask for an epoch of so many."""
    order, tables = Weighted(weights=np.arange(1.0, 6.0), rows_per_epoch=epoch_rows).bind(SampleRows(count=5))
    parts = (
        Component(name="drawn", order=order, seed=1, rows=5, quota=2, tables=tables),
        Component(name="plain", order=RowShuffle(shard_rows=3), seed=2, rows=4, quota=1),
    )
    return MixOrder(components=parts, stop=stop, chunk_positions=6)


@pytest.mark.parametrize("draws", [1, 3, 12])
def test_an_epoch_of_draws_in_a_mixture_is_as_long_as_its_order_asks(draws: int) -> None:
    own = with_draws(1, draws).components[0]
    for stop, wanted in (("first_exhausted", min(draws, 9)), ("all_exhausted", max(draws, 7)), (100, 67)):
        order = with_draws(stop, draws).resolve(Facts(rows=9, seed=0))
        for epoch in (0, 2):
            rows = np.array(every_row(order, epoch))
            drawn = rows[rows < 5].tolist()
            assert len(drawn) == wanted
            turns = -(-(order.epoch_rows + 1) // draws)  # that an epoch of the mixture may have of the component
            for turn, low in enumerate(range(0, wanted, draws)):
                alone = every_row(own.resolve(Facts(rows=5, seed=0)), epoch * turns + turn)
                assert drawn[low : low + draws] == alone[: wanted - low]
    assert "epoch_rows" not in with_draws(9, 5).resolve(Facts(rows=9, seed=0)).params()["components"]["drawn"]


# Frozen: what raylance 0.7.0 delivers of `with_draws(stop, 3)`, which takes five rows for an epoch of the draws.
BEFORE_0_8 = {
    "first_exhausted": [[0, 6, 3, 2, 8, 3, 3, 5], [1, 6, 2, 0, 8, 2, 3, 5]],
    "all_exhausted": [[0, 6, 3, 2, 8, 3, 3, 5, 2, 4, 7], [4, 6, 2, 4, 8, 4, 2, 5, 3, 3, 7]],
}


@pytest.mark.parametrize("stop", BEFORE_0_8)
def test_a_run_that_began_with_other_epochs_of_draws_keeps_them(stop: str) -> None:
    order = with_draws(stop, 3)
    saved = order.resolve(Facts(rows=9, seed=0)).params()
    assert saved["components"]["drawn"].pop("epoch_rows") == 3
    assert order.params()["components"]["drawn"]["epoch_rows"] == "auto"
    adopted = order.adopt(saved)
    again = adopted.resolve(Facts(rows=9, seed=0))
    assert [every_row(again, epoch) for epoch in (0, 1)] == BEFORE_0_8[stop]
    assert again.params() == saved, "what it writes is read as it was"


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


def table(first: int, rows: int) -> pa.Table:
    return pa.table({"id": np.arange(first, first + rows), "half": np.arange(rows, dtype=np.float32)})


@pytest.fixture(scope="module")
def parts(write_dataset: Callable[..., str]) -> dict[str, Any]:
    large = raylance.dataset(write_dataset(table(0, 400)), filter="id % 2 = 0", order="window", seed=4)
    small = raylance.dataset(write_dataset(table(1000, 90)), order="row", seed=5)
    return {"large": (large, 0.75), "small": (small, 0.25)}


def test_a_mixture_streams_and_resumes(parts: dict[str, Any]) -> None:
    mixed = raylance.mix(parts, stop="all_exhausted", remainder="ragged")
    assert len(mixed) == 290
    with mixed.loader() as loader:
        whole = list(loader.iter_batches(global_batch_size=40, with_row_offset=True))
    ids = np.concatenate([batch["id"] for batch in whole])
    assert set(ids.tolist()) == {*range(0, 400, 2), *range(1000, 1090)}
    component = np.concatenate([batch["_component"] for batch in whole])
    np.testing.assert_array_equal(component, ids >= 1000)
    offsets = np.concatenate([batch["_rowoffset"] for batch in whole])
    np.testing.assert_array_equal(offsets, np.where(ids >= 1000, ids - 1000, ids))
    with mixed.loader() as loader:
        first = [batch["id"] for batch in itertools.islice(loader.iter_batches(global_batch_size=40), 3)]
        state = loader.state_dict()
    assert state["components"]["large"] == {"rows": 90, "passes": 0, "position": 90}
    assert state["components"]["small"] == {"rows": 30, "passes": 0, "position": 30}
    with raylance.mix(parts, stop="all_exhausted", remainder="ragged").loader() as loader:
        loader.load_state_dict(state)
        rest = [batch["id"] for batch in loader.iter_batches(global_batch_size=40)]
    np.testing.assert_array_equal(np.concatenate(first + rest), ids)


def test_the_plan_of_a_mixture_says_what_becomes_of_each_datasets_rows(parts: dict[str, Any]) -> None:
    """By source, against what is delivered."""
    uri = spec_of(parts["small"][0]).read.source.uri
    drawn = raylance.dataset(uri, order=raylance.Weighted(weights="half", rows_per_epoch=30))
    for stop, remainder in (("first_exhausted", "drop"), ("all_exhausted", "ragged"), (700, "pad")):
        mixed = raylance.mix({**parts, "drawn": (drawn, 0.5)}, stop=stop, remainder=remainder)
        summary = mixed.plan(global_batch_size=64)
        batches = list(mixed.iter_batches(global_batch_size=64, with_row_offset=True))
        component, offset = (
            np.concatenate([batch[name] for batch in batches]) for name in ("_component", "_rowoffset")
        )
        if remainder == "pad":
            valid = np.concatenate([batch["_valid"] for batch in batches])
            component, offset = component[valid], offset[valid]
        for place, (name, source) in enumerate(summary.sources.items()):
            mine = offset[component == place]
            assert (source.rows, source.delivered) == (len(parts[name][0]) if name in parts else 90, len(mine))
            if name != "drawn":
                assert source.used == len(np.unique(mine)) == source.rows - source.left_out
                assert source.repeated == len(mine) - source.used
        assert sum(source.delivered for source in summary.sources.values()) == len(offset)


def test_bad_mixtures(parts: dict[str, Any], write_dataset: Callable[..., str]) -> None:
    large = parts["large"][0]
    other = raylance.dataset(write_dataset(pa.table({"id": ["a", "b"]})))
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, "no dataset"),
        ([(large, 1)], {}, r"takes a dict, and got list: give a dict of name to .dataset, weight."),
        ({"a": large}, {}, r"'a' is raylance.dataset.*; give .dataset, weight."),
        ({"a": (large, 1, 2)}, {}, r"'a' is .*; give .dataset, weight."),
        ({"a": (5, 1)}, {}, "'a' has the dataset 5; give what raylance.dataset returns"),
        ({"": (large, 1)}, {}, "a dataset is named ''"),
        ({1: (large, 1)}, {}, "a dataset is named 1"),
        ({"a": (large, "1")}, {}, "weight of 'a' is '1'"),
        ({"a": (large, True)}, {}, "weight of 'a' is True"),
        ({"a": (large, float("nan"))}, {}, "weight of 'a' is nan"),
        ({"a": (large, 1)}, {"stop": 2**63}, r"stop=9223372036854775808: .*less than 2\*\*63"),
        ({"a": (large, 0)}, {}, "weight of 'a' is 0"),
        ({"a": (large, -1.0)}, {}, "weight of 'a' is -1.0"),
        ({"a": (large, 1), "b": (other, 1)}, {}, "'b' delivers id: string.*one schema"),
        ({"a": (large, 1)}, {"remainder": "wrap"}, "remainder='wrap'"),
        ({"a": (raylance.mix(parts), 1)}, {}, "is a mixture itself"),
    ]
    for given_parts, options, message in cases:
        with pytest.raises(raylance.ConfigError, match=message):
            raylance.mix(given_parts, **options)


GOLDEN_SEEDS = [16391082371309026713, 1384234292565451594, 12541704517497926162, 16119218604280180747]


def test_transforms_in_mixtures_see_the_offsets_of_the_dataset(write_dataset: Callable[..., str]) -> None:
    def copy_offsets(batch: dict[str, Any]) -> dict[str, Any]:
        return {"seen": batch["_rowoffset"].copy(), "seed": batch["_seed"].copy()}

    datasets = [raylance.dataset(write_dataset(table(first, 40)), transform=copy_offsets) for first in (0, 1000)]
    mixed = raylance.mix({"a": (datasets[0], 1), "b": (datasets[1], 1)}, stop="all_exhausted", remainder="ragged")
    batches = list(IterableDataset(mixed, global_batch_size=20, dist_info=(0, 1), with_row_offset=True))
    seen, offsets, component, seeds = (
        np.concatenate([batch[name] for batch in batches]) for name in ("seen", "_rowoffset", "_component", "seed")
    )
    np.testing.assert_array_equal(seen, offsets)
    assert offsets.max() == 39
    order = np.lexsort((offsets, component))
    # Frozen, as test_order.GOLDEN is: seeds are made of the offset and the component.
    assert seeds[order[[0, 39, 40, 79]]].tolist() == GOLDEN_SEEDS
    head = mixed.head(80)
    assert head["seen"].tolist() == head["_rowoffset"].tolist() == [*range(40)] * 2
