"""Mixtures of real datasets: their shares, plans, streams, and what they refuse."""

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
from raylance.api.dataset import opened_of
from raylance.audit import reopen
from raylance.errors import ConfigError
from raylance.orders.mixture import Component, MixOrder, quotas
from raylance.orders.order import Facts
from raylance.orders.sampling import Weighted
from raylance.orders.shuffles import RowShuffle
from raylance.testing import SampleRows
from raylance.torch_data import IterableDataset
from tests.helpers.orders import every_row, mix_of

WEIGHTS = st.lists(st.floats(1e-9, 1) | st.integers(1, 1000) | st.floats(0.1, 1), min_size=1, max_size=40)


@given(weights=WEIGHTS, data=st.data())
def test_every_prefix_has_the_shares_of_the_weights(weights: list[float], data: st.DataObject) -> None:
    """Shares were off by up to 2.2 %, and no stretch was found for some weights. Far positions, too, in both ways."""
    parts = [(RowShuffle(shard_rows=1), 10, quota) for quota in quotas(weights)]
    order = mix_of(2**62, *parts, spread="tree")
    position = data.draw(st.integers(0, 5000) | st.integers(0, 2**62))
    counts = [standing["rows"] for standing in order.standings(0, position).values()]
    assert sum(counts) == position
    for count, (_, _, quota) in zip(counts, parts, strict=True):
        wanted = Fraction(position * quota, sum(order.quotas))
        assert abs(count - wanted) <= 1 + len(weights).bit_length() / 2
    if position > 5000:
        return
    shares = np.array([float(weight) for weight in weights]) / float(sum(map(Fraction, weights)))
    assert np.abs(np.array(counts) - position * shares).max() <= 2 + len(weights).bit_length() / 2


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
    uri = opened_of(parts["small"][0]).read.source.uri
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
        ({"a": (large, 0)}, {}, "all weights are 0"),
        ({"a": (large, -1.0)}, {}, "weight of 'a' is -1.0"),
        ({"a": (large, 1), "b": (other, 1)}, {}, "'b' delivers id: string.*one schema"),
        ({"a": (large, 1)}, {"remainder": "wrap"}, "remainder='wrap'"),
        ({"a": (raylance.mix(parts, stop=100), 1)}, {}, "'a' has stop="),
        ({"a": (raylance.mix(parts), 1)}, {"weigh": "tokens"}, "tokens"),
        ({"a": (raylance.mix({"b": (large, 1)}), 1), "a/b": (large, 1)}, {}, "'a/b'"),
    ]
    for given_parts, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            raylance.mix(given_parts, **options)


def test_a_mixture_in_a_mixture_is_one_of_all_datasets(write_dataset: Callable[..., str]) -> None:
    rows = {"web": 300, "code": 200, "math": 120, "arms": 80}
    found = {
        name: raylance.dataset(
            write_dataset(table(1000 * number, count)),
            order="row",
            seed=number,
            columns=["id"],
            filter=None if name == "web" else "id % 10 < 9",
        )
        for number, (name, count) in enumerate(rows.items())
    }
    text = raylance.mix({"web": (found["web"], 2), "code": (found["code"], 1)})
    texts = raylance.mix({"text": (text, 3), "math": (found["math"], 1)})
    nested = raylance.mix({"texts": (texts, 0.8), "arms": (found["arms"], 0.2)}, stop=400)
    weights = {"web": 0.4, "code": 0.2, "math": 0.2, "arms": 0.2}
    flat = raylance.mix({name: (found[name], weight) for name, weight in weights.items()}, stop=400)
    with nested.loader() as one, flat.loader() as other:
        batches = [[batch["id"].tolist() for batch in each.iter_batches(global_batch_size=20)] for each in (one, other)]
        state = one.state_dict()
    assert batches[0] == batches[1]
    assert [*state["order"]["components"]] == ["texts/text/web", "texts/text/code", "texts/math", "arms"]
    assert state["filter"]["texts/text/code"] == "id % 10 < 9"
    with reopen(state).loader() as again, nested.loader() as moved:
        assert [batch["id"].tolist() for batch in again.iter_batches(global_batch_size=20)] == batches[0]
        moved.reweight({"texts/text/web": 0, "texts/text/code": 0, "texts/math": 0, "arms": 1})
        assert next(iter(moved.iter_batches(global_batch_size=20)))["id"].min() >= 3000


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
