"""Documents whose numbers of tokens are costs."""

from collections.abc import Callable

import lance
import numpy as np
import pyarrow as pa
import pytest

ROWS = 200_000


@pytest.fixture(scope="module")
def tokens(write_dataset: Callable[..., str]) -> str:
    """Documents of 0 to 40 tokens, in three fragments, with deleted rows."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 40, ROWS)
    ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
    table = pa.table(
        {
            "ids": pa.ListArray.from_arrays(pa.array(ends), pa.array(np.zeros(ends[-1], dtype=np.int8))),
            "length": lengths,
            "id": np.arange(ROWS),
            "images": pa.array(random.integers(0, 3, ROWS), pa.int8()),
            "a b": lengths / 8,
        }
    )
    uri = write_dataset(table, max_rows_per_file=70_000)
    lance.dataset(uri).delete("id % 100 = 17")
    return uri
