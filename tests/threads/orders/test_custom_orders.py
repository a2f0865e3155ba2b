"""The refusal of orders of one's own that break their promise: by their names, before they cost rows."""

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance import torch_data
from raylance.errors import ConfigError, CoverageError
from raylance.orders.order import Epoch, Order
from raylance.orders.permutation import Int64Array, permute
from tests.helpers import own_orders as own

ROWS = 1000  # that the filter selects, of 1,200


@pytest.fixture
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(1200)}))


def shuffled(epoch: Epoch, positions: Int64Array) -> Int64Array:
    return permute(positions, epoch.order.rows, epoch.key())


Custom = own.with_rows("Custom", shuffled)
Narrow = own.with_rows("Narrow", lambda *asked: shuffled(*asked).astype(np.int32))


def open_data(uri: str, order: Order, **changes: Any) -> raylance.Dataset:
    return raylance.dataset(uri, filter="id >= 100 AND id < 1100", order=order, **changes)


WRONG = [
    (own.Halved(), r"Halved gives row 0 at positions 0 and 1 of epoch 0.*repeats = True"),
    (own.Beyond(), r"Beyond\.rows_of\(\) gave row 1,?000 at position 999 of epoch 0.*rows 0 to 999"),
    (own.Floats(), r"Floats\.rows_of\(\) gave float64.*integers"),
    (own.with_rows("Short", lambda _, at: at[:-1])(), r"Short\.rows_of\(\) gave .*shape \(\d+,\)"),
    (own.with_rows("Raising", lambda _, at: np.arange(10)[at])(), r"Raising\.rows_of\(\) failed.*IndexError"),
    (own.with_rows("Nothing", lambda *_: None)(), r"Nothing\.rows_of\(\) gave .*integers"),
    (own.OtherSizes(), r"OtherSizes says that an epoch has 1,001 positions.*1,000 rows.*repeats = True"),
]


@pytest.mark.parametrize(("order", "message"), WRONG, ids=[type(order).__name__ for order, _ in WRONG])
def test_an_order_that_breaks_its_promise_is_refused_before_the_first_batch(
    uri: str, order: Order, message: str
) -> None:
    loader = open_data(uri, order).loader(runtime="threads")
    with loader, pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        next(iter(loader.iter_batches(batch_size=50)))
    assert "a defect of raylance" not in str(caught.value)
    with loader, pytest.raises(ConfigError, match=f"(?s){message}"):
        loader.prepare(batch_size=50)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        next(iter(torch_data.RowSampler(open_data(uri, order), batch_size=50)))
    mixed = raylance.mix({"a": (open_data(uri, order), 1), "b": (open_data(uri, Custom()), 1)})
    with mixed.loader(runtime="threads") as loader, pytest.raises(ConfigError, match=f"(?s){message}"):
        next(iter(loader.iter_batches(batch_size=50)))


@pytest.mark.parametrize("order", [Custom(), Narrow()])
def test_an_order_that_keeps_its_promise_delivers(uri: str, order: Order) -> None:
    with open_data(uri, order).loader(runtime="threads") as loader:
        for _ in range(2):
            batches = loader.iter_batches(batch_size=64, drop_last=True, with_row_offset=True)
            rows = [row for batch in batches for row in batch["_rowoffset"].tolist()]
            assert len(set(rows)) == len(rows) == ROWS // 64 * 64
            assert set(rows) <= set(range(100, 1100))


class Twice(own.Reversed):
    repeats: ClassVar[bool] = True

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return positions % (epoch.order.rows // 2)


@pytest.mark.parametrize("columns", [["id"], ["id", "name"]])
@pytest.mark.parametrize("order", [Twice(), raylance.Sequential()])
def test_a_row_that_comes_again_is_as_it_is_stored(
    write_dataset: Callable[..., str], order: Order, columns: list[str]
) -> None:
    """By an order that repeats rows, or as padding; the trainer overwrites each batch."""
    table = pa.table({"id": np.arange(1200), "name": [f"row {row}" for row in range(1200)]})
    handle = open_data(write_dataset(table), order, columns=columns, remainder="pad")
    seen = []
    with handle.loader(runtime="threads") as loader:
        for batch in loader.iter_batches(global_batch_size=300, with_row_offset=True):
            assert batch["id"].tolist() == batch["_rowoffset"].tolist()
            seen += batch["id"].tolist()
            batch["id"][:] = -1
    assert len(set(seen)) < len(seen) == 1200


ASKED = itertools.count()  # two threads that ask at once get unlike numbers
Impure = own.with_rows("Impure", lambda epoch, positions: permute(positions, epoch.order.rows, next(ASKED)))


def test_an_order_that_depends_on_what_was_asked_before_is_named(write_dataset: Callable[..., str]) -> None:
    """The chunk has more rows than a plan keeps: by threads, reader and comparison share the rows of smaller ones."""
    uri = write_dataset(pa.table({"id": np.arange(300_000)}))
    named = r"The order Impure most likely depends on more.*check_order"
    with (
        raylance.dataset(uri, order=Impure()).loader(runtime="threads") as loader,
        pytest.raises(CoverageError, match=named),
    ):
        list(loader.iter_batches(batch_size=10_000))


# A permutation wherever a sample of positions looks, and none in one place between.
Sly = own.with_rows("Sly", lambda _, positions: np.where(positions == 70_001, 70_003, positions))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_that_is_alone_compares_a_whole_epoch_with_the_selection(
    write_dataset: Callable[..., str], drop_last: bool
) -> None:
    uri = write_dataset(pa.table({"id": np.arange(100_000)}))
    with raylance.dataset(uri, order=Sly()).loader(runtime="threads") as loader:
        batches = loader.iter_batches(global_batch_size=9_999, drop_last=drop_last)
        with pytest.raises(CoverageError, match=r"(?s)Sly .*epoch 0.*100,000 .*repeats = True"):
            for _ in batches:
                pass
        assert loader.epoch == 0, "the epoch is not over"
    with raylance.dataset(uri, order=Custom()).loader(runtime="threads") as loader:
        first = loader.iter_batches(global_batch_size=9_999, drop_last=drop_last)
        next(first)
        assert len(list(loader.iter_batches(global_batch_size=9_999, drop_last=drop_last))) == len(first) - 1
        assert loader.epoch == 1, "in two passes"
