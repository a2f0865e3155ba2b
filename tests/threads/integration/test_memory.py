"""Memory is bounded by configuration: by the bytes that were read, not by what rows were guessed to have, nor by the
size of a step.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import DatasetError

MIB = 1 << 20


def table(sizes: list[int]) -> pa.Table:
    """One row of so many bytes each, none like another."""
    rng = np.random.default_rng(len(sizes))
    values = pa.array([rng.bytes(size) for size in sizes], pa.binary())
    return pa.table({"id": np.arange(len(sizes)), "data": values})


def test_a_row_that_is_larger_than_all_that_may_be_held(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(table([6 * MIB if row == 50 else 1000 for row in range(100)]))
    dataset = raylance.dataset(uri, order="sequential")
    with dataset.loader(reader_bytes=4 * MIB) as loader:
        rows = []
        with pytest.raises(DatasetError, match=r"row at offset 50 .*6,29.* bytes by itself.*allows 4,194,304"):
            for batch in loader.iter_batches(global_batch_size=10, with_row_offset=True):
                rows += batch["_rowoffset"].tolist()
        assert rows == list(range(50))
        state = loader.state_dict()
    with dataset.loader() as loader:
        loader.load_state_dict(state)
        batches = loader.iter_batches(global_batch_size=10, with_row_offset=True)
        rows = [row for batch in batches for row in batch["_rowoffset"]]
        assert rows == list(range(50, 100)), "with more room, it continues"
