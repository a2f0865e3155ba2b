"""Rows of more than one chunk."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raylance.memory.arrow import take_rows


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.list_(pa.uint8())])
@pytest.mark.parametrize("chunks", [1, 3])
def test_rows_of_more_than_one_chunk_can_hold_are_taken(kind: pa.DataType, chunks: int) -> None:
    data, ends = pa.py_buffer(bytes(800 << 20)), pa.py_buffer(np.array([0, 800 << 20], np.int32))
    if pa.types.is_list(kind):
        values = pa.Array.from_buffers(pa.uint8(), len(data), [None, data])
        value = pa.Array.from_buffers(kind, 1, [None, ends], children=[values])
    else:
        value = pa.Array.from_buffers(kind, 1, [None, ends, data])
    column = pa.chunked_array([value] * chunks)
    taken = take_rows(pa.table({"value": column}), np.array([0, chunks - 1, 0]))["value"]
    assert len(taken) == 3
    sizes = [800 << 20] * 3
    lengths = pc.list_value_length(taken) if pa.types.is_list(kind) else pc.binary_length(taken)
    assert lengths.to_pylist() == sizes
    taken.validate()
