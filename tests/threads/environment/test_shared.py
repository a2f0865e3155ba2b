"""What is large and shared: one copy a run, however many ranks there are, and none that cannot be had again."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance

ROWS = 400_000  # of which each table has more than a reference is worth


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    rows = np.arange(ROWS)
    columns = {"id": rows, "label": rows % 7, "weight": 1.0 + rows % 3}
    return write_dataset(pa.table(columns))


LARGE: dict[str, Callable[[], dict[str, Any]]] = {
    "selection": lambda: {"filter": "id % 2 = 1"},
    "weights of a column": lambda: {"order": raylance.Weighted(weights="weight")},
    "weights of an array": lambda: {"order": raylance.Weighted(weights=1.0 + np.arange(ROWS) % 3)},
    "class members": lambda: {"order": raylance.ClassBalanced(column="label")},
}


def first_ids(loader: raylance.RankLoader) -> list[int]:
    return next(iter(loader.batches(global_batch_size=64)))["id"].tolist()


@pytest.mark.parametrize("name", LARGE)
def test_a_handle_is_pickled_without_ray(uri: str, name: str) -> None:
    dataset = raylance.dataset(uri, columns=["id"], **LARGE[name]())
    copy = pickle.loads(pickle.dumps(dataset))
    assert first_ids(copy.loader()) == first_ids(dataset.loader())
