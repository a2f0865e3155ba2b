"""Owns the promises of mixtures: quotas, components in their own order, exactly once, resume."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.mixing import Component, MixOrder, quotas
from raylance.order import RowShuffle
from tests.test_order import mixtures
from tests.test_plan import global_batches, make_plan


def total(order: MixOrder) -> int:
    return sum(part.rows for part in order.components)


@given(order=mixtures(), epoch=st.integers(0, 3))
def test_components_keep_their_own_order_and_repeat_only_as_stop_allows(order: MixOrder, epoch: int) -> None:
    n, length = total(order), order.epoch_rows(total(order))
    rows = order.rows(np.arange(length), n, 0, epoch)
    base, passes = 0, []
    for part in order.components:
        own = rows[(rows >= base) & (rows < base + part.rows)] - base
        for start in range(0, len(own), part.rows):
            turn = own[start : start + part.rows].tolist()
            assert len(set(turn)) == len(turn), "a row comes again before all others came"
        whole = len(own) // part.rows
        passes.append(whole + (len(own) % part.rows > 0))
        base += part.rows
    if order.stop == "first_exhausted":
        assert max(passes) <= 1
        more = order.rows(np.array([length]), n, 0, epoch)
        assert more[0] in rows, "one more position would repeat a row"
    elif order.stop == "all_exhausted":
        assert set(rows.tolist()) == set(range(n))
        assert len(set(rows[:-1].tolist())) < n, "the epoch ends as soon as all were seen"


@given(order=mixtures(), batch=st.integers(1, 30), worlds=st.lists(st.integers(1, 5), min_size=2, max_size=2))
def test_same_global_batches_for_every_world_size(order: MixOrder, batch: int, worlds: list[int]) -> None:
    n = total(order)
    first, second = (global_batches(make_plan(order, n, batch, world, "ragged"), 1, 0) for world in worlds)
    assert first == second
    delivered = [row for rows in first for row in rows]
    assert sorted(delivered) == sorted(order.rows(np.arange(order.epoch_rows(n)), n, 3, 1).tolist())


@given(order=mixtures(), data=st.data())
def test_seeking_equals_replaying_and_standings_count(order: MixOrder, data: st.DataObject) -> None:
    n, length = total(order), order.epoch_rows(total(order))
    rows = order.rows(np.arange(length), n, 0, 2)
    position = data.draw(st.integers(0, length))
    np.testing.assert_array_equal(order.rows(np.arange(position, length), n, 0, 2), rows[position:])
    base = 0
    for part in order.components:
        standing = order.standings(position)[part.name]
        consumed = ((rows[:position] >= base) & (rows[:position] < base + part.rows)).sum()
        assert standing["rows"] == consumed == standing["passes"] * part.rows + standing["position"]
        base += part.rows


def test_quotas() -> None:
    assert quotas([0.7, 0.3]) == [7, 3]
    assert quotas([1, 1, 1]) == [1, 1, 1]
    assert quotas([2, 4]) == [1, 2]
    assert sum(quotas([0.123456, 0.876544])) == 1000
    assert min(quotas([1e-9, 1])) == 1


def test_every_stretch_keeps_the_quotas() -> None:
    parts = tuple(
        Component(name=name, order=RowShuffle(shard_rows=1), seed=0, rows=700, quota=quota)
        for name, quota in (("a", 7), ("b", 3))
    )
    order = MixOrder(components=parts, stop="all_exhausted", chunk_positions=10)
    from_b = order.rows(np.arange(500), 1400, 0, 0) >= 700
    for start in range(490):
        assert 2 <= from_b[start : start + 10].sum() <= 4


def table(first: int, rows: int) -> pa.Table:
    return pa.table({"id": np.arange(first, first + rows), "half": np.arange(rows, dtype=np.float32)})


@pytest.fixture(scope="module")
def parts(write_dataset: Callable[..., str]) -> dict[str, Any]:
    large = raylance.dataset(write_dataset(table(0, 400)), filter="id % 2 = 0", order="window", seed=4)
    small = raylance.dataset(write_dataset(table(1000, 90)), order="row", seed=5)
    return {"large": (large, 0.75), "small": (small, 0.25)}


@pytest.mark.usefixtures("ray_session")
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
        first = [batch["id"] for _, batch in zip(range(3), loader.iter_batches(global_batch_size=40), strict=False)]
        state = loader.state_dict()
    assert state["components"]["large"] == {"rows": 90, "passes": 0, "position": 90}
    assert state["components"]["small"] == {"rows": 30, "passes": 0, "position": 30}
    ranks = []
    for rank in range(2):
        with raylance.mix(parts, stop="all_exhausted", remainder="ragged").loader(rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            ranks.append([batch["id"] for batch in loader.iter_batches(global_batch_size=40)])
    rest = [np.concatenate(pair) for pair in zip(*ranks, strict=True)]
    np.testing.assert_array_equal(np.concatenate(first + rest), ids)


def test_a_checkpoint_of_another_mixture_is_refused(parts: dict[str, Any]) -> None:
    state = raylance.mix(parts).state_dict()
    other = raylance.mix({"large": (parts["large"][0], 0.5), "small": (parts["small"][0], 0.5)})
    with pytest.raises(raylance.StateError, match="order.components.large.quota: saved 3, now 1"):
        other.load_state_dict(state)


def test_bad_mixtures(parts: dict[str, Any], write_dataset: Callable[..., str]) -> None:
    large = parts["large"][0]
    other = raylance.dataset(write_dataset(pa.table({"id": ["a", "b"]})))
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, "no dataset"),
        ({"a": (large, 0)}, {}, "weight of 'a' is 0"),
        ({"a": (large, -1.0)}, {}, "weight of 'a' is -1.0"),
        ({"a": (large, 1), "b": (other, 1)}, {}, "'b' delivers id: string.*one schema"),
        ({"a": (large, 1)}, {"stop": "never"}, "stop='never'"),
        ({"a": (large, 1)}, {"stop": 0}, "stop=0"),
        ({"a": (large, 1)}, {"remainder": "wrap"}, "remainder='wrap'"),
        ({"a": (raylance.mix(parts), 1)}, {}, "is a mixture itself"),
    ]
    for given_parts, options, message in cases:
        with pytest.raises(raylance.ConfigError, match=message):
            raylance.mix(given_parts, **options)
