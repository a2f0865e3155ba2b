"""Memory that is lent, kept by the C library, and copied beyond what Arrow does."""

import platform
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raylance.memory.arrow import take_rows
from raylance.memory.lending import Lender


def test_glibc_takes_the_settings_for_freed_memory() -> None:
    """In a process of its own, which keeps them."""
    code = "from raylance.memory.malloc import keep_freed_memory; print(keep_freed_memory())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(platform.libc_ver()[0] == "glibc")


def test_a_short_loan_takes_the_smallest_memory_that_is_not_far_too_large() -> None:
    lender = Lender(100 << 20)
    loans = [lender.lend(mebibytes << 20) for mebibytes in (16, 8, 32)]
    del loans[:]
    assert sorted(len(spare) >> 20 for spare in lender._spare.values()) == [8, 16, 32]
    short = lender.lend(5 << 20)
    assert lender.lent_bytes == 8 << 20
    assert (len(short), len(lender.lend(1 << 20))) == (8 << 20, 1 << 20), "a small column leaves large memory alone"
    lender.most_bytes = 25 << 20
    del short
    assert sum(map(len, lender._spare.values())) <= 25 << 20, "what came back first is dropped"


@pytest.mark.slow  # more than 2 GiB, several times
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
