"""Weighted and class-balanced orders of real datasets."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError
from raylance.orders.order import Order
from raylance.orders.sampling import ClassBalanced, Weighted
from tests.helpers.orders import every_row, resolve


def draw(order: Order, n: int) -> np.ndarray:
    return np.array(every_row(resolve(order, n, seed=0, global_batch_size=20)))


def table() -> pa.Table:
    rows = np.arange(300)
    return pa.table({"id": rows, "weight": (rows % 3).astype(np.float32), "label": [f"c{row // 250}" for row in rows]})


def test_a_checkpoint_of_other_weights_is_refused(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(table())
    state = raylance.dataset(uri, order=Weighted(weights="weight")).loader().state_dict()
    other = raylance.dataset(uri, order=Weighted(weights=np.ones(300)))
    with pytest.raises(raylance.StateError, match="order.fingerprint: saved"):
        other.loader().load_state_dict(state)


def test_a_class_without_selected_rows_is_none_through_the_loader(write_dataset: Callable[..., str]) -> None:
    """A dictionary column names classes that the filter left out; a draw of one gave the last row of another."""
    kinds = pa.array([f"c{row % 3}" for row in range(300)])
    uris = [
        write_dataset(pa.table({"id": range(300), "kind": values})) for values in (kinds, kinds.dictionary_encode())
    ]
    ids = []
    for uri in uris:
        with raylance.dataset(uri, order=ClassBalanced(column="kind"), filter="id % 3 != 0").loader() as loader:
            ids.append(np.concatenate([batch["id"] for batch in loader.iter_batches(global_batch_size=20)]))
        with pytest.raises(ConfigError, match=r"'c0'"):
            raylance.dataset(uri, order=ClassBalanced(column="kind", class_weights={"c0": 1}), filter="id % 3 != 0")
    assert ids[0].tolist() == ids[1].tolist()


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (pa.array([[1, 2], [3]]), "list<"),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), "fixed_size_list<"),
        (pa.array([{"a": 1}] * 2), "struct<"),
        (pa.array([1.0, None]), "1 nulls"),
        (pa.array(["a", None]), "1 nulls"),
    ],
)
def test_columns_of_no_classes_and_no_weights(write_dataset: Callable[..., str], column: pa.Array, why: str) -> None:
    uri = write_dataset(pa.table({"label": column}))
    for order, message in ((ClassBalanced(column="label"), why), (Weighted(weights="label"), f"{why}|not a number")):
        with pytest.raises(ConfigError, match=f"'label'.*({message})"):
            raylance.dataset(uri, order=order)
