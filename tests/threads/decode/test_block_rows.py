"""Samples of rows that came in blocks are those of the rows themselves."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.decode.block_rows import BlockRows, LoadedRows
from raylance.memory.lending import fresh_memory

KINDS: list[pa.DataType] = [
    pa.list_(pa.float32(), 3),
    pa.binary(5),
    pa.int16(),
    pa.fixed_shape_tensor(pa.uint8(), [2, 3]),
    pa.list_(pa.list_(pa.int32(), 2), 2),
]


def column(kind: pa.DataType, rows: int, nulls: bool) -> pa.Array:
    width = kind.storage_type.list_size if isinstance(kind, pa.BaseExtensionType) else 4
    if pa.types.is_fixed_size_binary(kind):
        return pa.array([None if nulls and row % 5 == 2 else b"%05d" % row for row in range(rows)], kind)
    if pa.types.is_primitive(kind):
        return pa.array([None if nulls and row % 5 == 2 else row for row in range(rows)], kind)
    if isinstance(kind, pa.BaseExtensionType):
        lists = [None if nulls and row % 5 == 2 else [row % 250] * width for row in range(rows)]
        return pa.ExtensionArray.from_storage(kind, pa.array(lists, kind.storage_type))
    is_nested = pa.types.is_fixed_size_list(kind.value_type)
    lists = [[[row, 1], [2, -row]] if is_nested else [row, 0.5, -row] for row in range(rows)]
    return pa.array([None if nulls and row % 5 == 2 else value for row, value in enumerate(lists)], kind)


@given(
    kind=st.sampled_from(KINDS),
    nulls=st.booleans(),
    rows=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    overlap=st.integers(0, 3),
    pieces=st.integers(1, 4),
    samples=st.integers(0, 9),
    count=st.integers(1, 4),
    data=st.data(),
)
def test_samples_of_blocks(
    kind: pa.DataType, nulls: bool, rows: int, cuts: list[int], overlap: int, pieces: int, samples: int, count: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Blocks come in any order, may overlap, and have several pieces; values may be null."""
    whole, number = column(kind, rows, nulls), pa.array(np.arange(rows))
    bounds = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    blocks = []
    for first, last in data.draw(st.permutations(list(itertools.pairwise(bounds)))):
        end = min(rows, last + overlap)
        at = np.linspace(first, end, pieces + 1).astype(int).tolist()
        tables = [pa.table({"x": whole[low:high], "n": number[low:high]}) for low, high in itertools.pairwise(at)]
        blocks.append(LoadedRows(first, pa.concat_tables(tables)))
    wanted = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=samples * count, max_size=samples * count)))
    wanted = wanted.astype(np.int64)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(wanted), count)
    items = pa.table({"a": np.arange(samples), "x": lists, "n": lists, "z": np.arange(samples)})
    found = BlockRows(blocks).fill_in(items, fresh_memory)
    assert found.column_names == items.column_names
    assert found["n"].to_pylist() == wanted.reshape(-1, count).tolist()
    values = whole.to_pylist() if not isinstance(kind, pa.BaseExtensionType) else whole.storage.to_pylist()
    taken = found["x"].combine_chunks().values
    taken = taken.storage if isinstance(kind, pa.BaseExtensionType) else taken
    assert taken.to_pylist() == [values[row] for row in wanted.tolist()]
    assert found["a"].equals(items["a"])
    assert found["z"].equals(items["z"])


def test_a_row_that_has_not_come() -> None:
    block = LoadedRows(2, pa.table({"x": pa.array([1, 2, 3])}))
    items = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array([2, 1]), 2)})
    with pytest.raises(IndexError, match="row 1 of the column 'x'"):
        BlockRows([block]).fill_in(items, fresh_memory)
