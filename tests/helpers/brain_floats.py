"""A dataset of bfloat16."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from lance.arrow import bfloat16_array

BRAIN = np.array([0.5, -1.0, 3.0, 1e30, 2.0, 65280.0], np.float32)  # which bfloat16 holds, but 1e30


@pytest.fixture
def bfloat16_uri(write_dataset: Callable[..., str]) -> str:
    numbers = bfloat16_array(BRAIN.tolist())
    columns = {
        "one": numbers.slice(1, 3),
        "vector": pa.FixedSizeListArray.from_arrays(numbers, 2),
        "list": pa.ListArray.from_arrays([0, 1, 1, 6], numbers),
        "even": pa.ListArray.from_arrays([0, 2, 4, 6], numbers),
        "name": ["a", "b", "c"],
    }
    return write_dataset(pa.table(columns))
