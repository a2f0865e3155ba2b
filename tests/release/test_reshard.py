"""Shares that change, through Ray."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest

import raylance
from tests.helpers.shares import ROWS, play


@pytest.fixture
def data(write_dataset: Callable[..., str]) -> Iterator[raylance.Dataset]:
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 4, dtype=np.float32)), 4)
    uri = write_dataset(pa.table({"id": np.arange(ROWS), "x": values}), max_rows_per_file=130)
    with raylance.dataset(uri, order=raylance.WindowShuffle(shard_rows=10, window_shards=4, lanes=4), seed=2) as handle:
        yield handle


@pytest.mark.usefixtures("ray_session")
def test_shares_change_through_ray_and_helpers_stay(data: raylance.Dataset) -> None:
    play(data, 7, "ragged")
