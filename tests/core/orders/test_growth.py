"""The order of a dataset that has got more rows: each once an epoch, and what lies before a growth stays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.orders.course import deal_whole
from raylance.orders.growth import Growth, as_recorded, grow
from raylance.orders.order import Facts, Order, Resolved
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle

ORDERS: tuple[Order, ...] = (
    RowShuffle(shard_rows=3),
    WindowShuffle(shard_rows=3, window_shards=2, lanes=2),
    ShardShuffle(shard_rows=4, window_shards=1, lanes=2),
    Sequential(shard_rows=5),
)


@st.composite
def growths(draw: st.DrawFn) -> tuple[Order, list[tuple[tuple[int, int], int]], int]:
    """An order; places, each with the rows before it, that lie in their epochs; and the rows at last."""
    order, rows, found, place = draw(st.sampled_from(ORDERS)), draw(st.integers(1, 30)), [], (0, 0)
    for _ in range(draw(st.integers(1, 4))):
        epoch = place[0] + draw(st.integers(0, 2))
        low = place[1] if epoch == place[0] else 0
        place = epoch, draw(st.integers(min(low, rows), rows))
        found.append((place, rows))
        rows += draw(st.integers(0, 25))
    return order, found, rows


def resolved(order: Order, places: list[tuple[tuple[int, int], int]], rows: int) -> Resolved:
    for (epoch, position), before in places:
        growth = Growth(epoch=epoch, position=position, rows=before, fingerprint="f", version=1, identity="i")
        order = grow(order, growth)
    return order.resolve(Facts(rows=rows, seed=7))


@given(case=growths(), data=st.data())
def test_each_row_comes_once_an_epoch_from_when_it_is_there(
    case: tuple[Order, list[tuple[tuple[int, int], int]], int], data: st.DataObject
) -> None:
    order, places, rows = case
    grown, sizes = resolved(order, places, rows), [*(before for _, before in places), rows]
    for epoch in data.draw(st.permutations(range(places[-1][0][0] + 2))):
        found = grown.epoch(epoch)
        count = sum(place[0] <= epoch for place, _ in places)
        assert found.epoch_rows == sizes[count]
        got = found.rows(np.arange(found.epoch_rows))
        assert sorted(got.tolist()) == list(range(sizes[count]))
        asked = np.array(data.draw(st.lists(st.integers(0, found.epoch_rows - 1), max_size=20)), dtype=np.int64)
        assert found.rows(asked).tolist() == got[asked].tolist()
        for number, ((of, position), before) in enumerate(places):
            if of == epoch:  # the rows that are there come before those that are not
                assert got[:position].max(initial=-1) < before
                earlier = (
                    resolved(order, places[:number], before) if number else order.resolve(Facts(rows=before, seed=7))
                )
                old = earlier.epoch(epoch).rows(np.arange(min(position, earlier.epoch(epoch).epoch_rows)))
                assert old.tolist() == got[: len(old)].tolist()
    assert grown.alike_from <= places[-1][0][0] + 1
    assert grown.epoch(grown.alike_from + 3).epoch_rows == rows == grown.epoch_rows


@given(case=growths())
def test_what_a_checkpoint_holds_is_read_as_it_was_written(
    case: tuple[Order, list[tuple[tuple[int, int], int]], int],
) -> None:
    order, places, rows = case
    grown = resolved(order, places, rows).settings
    assert as_recorded(order, grown.params()).adopt(grown.params()) == grown
    assert grown.is_resolved


def test_new_rows_come_evenly_among_those_that_are_left() -> None:
    grown = resolved(RowShuffle(shard_rows=1), [((0, 40), 100)], 130)
    new = grown.epoch(0).rows(np.arange(40, 130)) >= 100
    counts = np.cumsum(new)
    np.testing.assert_allclose(counts, np.arange(1, 91) / 3, atol=1)


def test_damaged_growths_are_refused() -> None:
    order = RowShuffle(shard_rows=1)
    params = resolved(order, [((0, 4), 10), ((0, 6), 12)], 15).params()
    for wrong in (
        {},
        {"growths": []},
        {"growths": params["growths"][::-1]},
        {"growths": [{"epoch": 1}]},
        {"growths": 3},
    ):
        with pytest.raises(ConfigError):
            as_recorded(order, {"name": "grown", "of": order.params()} | wrong)


def test_more_rows_than_can_be_dealt_are_refused() -> None:
    with pytest.raises(ConfigError):
        deal_whole((2**31, 1))
