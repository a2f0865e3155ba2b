"""Checks memory that is used again: what was copied in comes out, whatever the memory held before."""

from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raylance.memory import arrow
from raylance.memory.arrow import take_rows
from raylance.memory.lending import Lender
from raylance.work.row_memory import RowMemory
from tests.helpers.odd_values import value

TENSOR = pa.fixed_shape_tensor(pa.int16(), [2, 3], permutation=[1, 0])


IN_ONE_PIECE: dict[str, pa.DataType] = {
    "int8": pa.int8(),
    "float64": pa.float64(),
    "float16": pa.float16(),
    "time": pa.timestamp("us"),
    "fixed binary": pa.binary(3),
    "vector": pa.list_(pa.float32(), 3),
    "matrix": pa.list_(pa.list_(pa.int32(), 2), 2),
    "binary": pa.binary(),
    "large binary": pa.large_binary(),
    "string": pa.string(),
    "large string": pa.large_string(),
    "tokens": pa.list_(pa.int32()),
    "large tokens": pa.large_list(pa.int64()),
    "boxes": pa.list_(pa.list_(pa.float32(), 4)),
}

AS_THEY_COME: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "struct": pa.struct({"a": pa.int32(), "b": pa.string()}),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "lists of strings": pa.list_(pa.string()),
    "list of lists": pa.list_(pa.list_(pa.int32())),
    "null": pa.null(),
}

KINDS = IN_ONE_PIECE | AS_THEY_COME


def make_table(rows: int, seed: int, nulls: frozenset[str]) -> pa.Table:
    rng = np.random.default_rng(seed)
    columns = {}
    for name, kind in KINDS.items():
        values = [None if kind == pa.null() else value(kind, rng) for _ in range(rows)]
        if name in nulls and rows:
            values[int(rng.integers(rows))] = None
        values = [np.float16(v) if kind == pa.float16() and v is not None else v for v in values]
        columns[name] = pa.array(values, kind)
    tensors = pa.array(rng.integers(0, 99, (rows, 6)).tolist(), TENSOR.storage_type)
    columns["tensor"] = pa.ExtensionArray.from_storage(TENSOR, tensors)
    return pa.table(columns)


def between(table: pa.Table, seed: int) -> tuple[pa.Table, np.ndarray | None]:
    """A table with unwanted rows between its rows, in chunks, and the indices of its rows."""
    if not table.num_rows:
        return table, None
    places = np.cumsum(np.r_[0, np.random.default_rng(seed).integers(1, 4, table.num_rows - 1)])
    rows = np.arange(places[-1] + 1)
    nearest = np.searchsorted(places, rows)
    unwanted = make_table(len(rows), seed + 1000, frozenset())
    parts = [
        table.slice(n, 1) if p == r else unwanted.slice(r, 1)
        for r, n, p in zip(rows, nearest, places[nearest], strict=True)
    ]
    joined = pa.concat_tables(parts)
    return joined if seed % 3 else joined.combine_chunks(), places


def used_before(nbytes: int) -> np.ndarray:
    """Memory that holds something already, and is a little larger than needed."""
    return np.full(nbytes + 3, 0xEE, np.uint8)


def same(one: pa.Table, two: pa.Table) -> bool:
    return bool(one.schema == two.schema and one.to_pylist() == two.to_pylist())


@given(
    pieces=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6),
    expected=st.integers(0, 60),
    nulls=st.frozensets(st.sampled_from(sorted(KINDS)), max_size=2),
    first_null=st.integers(0, 6),
    keep=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_what_was_copied_in_comes_out(
    pieces: list[tuple[int, int, int]], expected: int, nulls: frozenset[str], first_null: int, keep: float, seed: int
) -> None:
    """Pieces that are slices of something larger, in chunks; memory was used before; cut and added to in between."""
    for turn in range(2):
        memory = RowMemory(1 << 20, expected, lend=used_before)
        tables = []
        for number, (rows, before, after) in enumerate(pieces):
            given_nulls = nulls if number >= first_null else frozenset()
            large = make_table(before + rows + after, seed + 100 * turn + number, given_nulls)
            tables.append(large.slice(before, rows))
            memory.append(pa.concat_tables([tables[-1].slice(0, rows // 2), tables[-1].slice(rows // 2)]))
        whole = pa.concat_tables(tables)
        assert memory.rows == whole.num_rows
        found = memory.table()
        assert same(found, whole)
        found.validate(full=True)
        kept = int(keep * whole.num_rows)
        memory.cut(kept)
        assert same(memory.table(), whole.slice(0, kept))
        memory.append(whole.slice(kept))
        assert same(memory.table(), whole)
        indices = np.random.default_rng(seed).permutation(whole.num_rows)
        wanted = whole.to_pylist()
        later = indices[indices >= kept]
        for least in (0, 2048):  # values are copied one by one, or by Arrow
            with patch.object(arrow, "_LARGE_VALUE_BYTES", least):
                taken = take_rows(memory.table(), indices, used_before)
                assert taken.to_pylist() == [wanted[index] for index in indices]
                taken = take_rows(memory.table().slice(kept), later - kept, used_before)  # a slice of one chunk
            taken.validate(full=True)
            assert taken.to_pylist() == [wanted[index] for index in later]
        assert take_rows(whole, indices).to_pylist() == [wanted[index] for index in indices]
        pieces_of = {name: memory.table()[name].num_chunks for name in [*IN_ONE_PIECE, "tensor"] if name not in nulls}
        assert set(pieces_of.values()) == {1}


@given(
    parts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    nulls=st.frozensets(st.sampled_from(["vector", "int8", "binary"])),
    keep=st.floats(0, 1),
    seed=st.integers(0, 9),
    most_bytes=st.sampled_from([1 << 20, 300]),
    has_others=st.booleans(),
)
@example(parts=[5, 12], nulls=frozenset(), keep=1.0, seed=1, most_bytes=1 << 20, has_others=True)
def test_rows_lie_where_they_belong(
    parts: list[int], nulls: frozenset[str], keep: float, seed: int, most_bytes: int, has_others: bool
) -> None:
    """Nulls of a later part, or too little room, leave a column out."""
    for turn in range(2):
        tables = [
            make_table(rows, seed + 100 * turn + number, nulls if number else frozenset())
            for number, rows in enumerate(parts)
        ]
        whole = pa.concat_tables(tables)
        lines = np.random.default_rng(seed).permutation(whole.num_rows) if seed else np.arange(whole.num_rows)
        memory = RowMemory(most_bytes, whole.num_rows, lines, used_before)
        firsts = np.cumsum([0, *(table.num_rows for table in tables)])
        early = np.random.default_rng(seed + 1).integers(0, len(tables), 2 * len(tables)).tolist() if seed % 2 else []
        rows = [between(table, seed + number) if has_others else (table, None) for number, table in enumerate(tables)]
        placed = {number: memory.place(int(firsts[number]), *rows[number]) for number in early}
        for number, table in enumerate(tables):
            memory.append(*placed.get(number, (table,)))
        memory.cut(kept := int(keep * whole.num_rows))
        assert same(memory.table(), whole.slice(0, kept))
        is_by_line = most_bytes > 300 and parts[0] > 0  # by the first part's size, whether all rows have room
        if kept < whole.num_rows and is_by_line:
            with pytest.raises(IndexError, match=f"{kept} of {whole.num_rows} rows"):
                memory.by_line(0, 1)
        memory.append(whole.slice(kept))
        assert same(memory.table(), whole)
        low = min(2, whole.num_rows)
        found, stored = memory.by_line(low, whole.num_rows), memory.stored()
        assert sorted([*found.column_names, *stored.column_names]) == sorted(whole.column_names)
        assert same(stored, whole.select(stored.column_names))
        wanted = whole.take(pa.array(np.argsort(lines)[low:]))
        found.validate(full=True)
        assert found.to_pylist() == wanted.select(found.column_names).to_pylist()
        if is_by_line and not nulls and not turn:
            assert {"vector", "int8", "tensor"} <= {*found.column_names}


def test_memory_has_what_the_first_rows_let_expect_and_no_more() -> None:
    table = pa.table(
        {"vector": pa.array(np.ones((1000, 4)).tolist(), pa.list_(pa.float32(), 4)), "data": [b"x" * 50] * 1000}
    )
    memory = RowMemory(1 << 20, 5000)
    for _ in range(5):
        memory.append(table)
    assert memory.capacity_bytes < 1.2 * 5000 * (16 + 50 + 4) + 100


def test_memory_is_used_again_after_its_last_view() -> None:
    lender = Lender(18 << 20)
    vectors = pa.array(np.ones(3 << 19, dtype=np.float32))
    table = pa.table({"vector": pa.FixedSizeListArray.from_arrays(vectors, 512)})

    def view() -> pa.Array:
        memory = RowMemory(1 << 30, 3072, np.arange(3072), lender.lend)
        memory.append(table)
        return memory.by_line(1000, 2000)["vector"].chunk(0)

    def address(view: pa.Array) -> int:
        return int(view.flatten().buffers()[1].address)

    first, second = view(), view()
    assert address(first) != address(second), "a view keeps what it is of"
    assert lender.lent_bytes == 12 << 20
    array, before = first.flatten().to_numpy()[5:], address(first)
    del first
    third = view()
    assert len({before, address(second), address(third)}) == 3, "an array of it, too"
    assert (array == 1).all()
    del array
    for _ in range(2):
        assert address(view()) == before
    del second, third
    assert lender.lent_bytes == 0


def test_memory_of_values_of_any_length_is_used_again() -> None:
    lender = Lender(12 << 20)
    binary = pa.table({"data": [bytes(2000)] * 1000})
    kept: list[RowMemory] = []

    def data_address() -> int:
        kept[:] = [RowMemory(1 << 30, 1000, lend=lender.lend)]
        kept[0].append(binary)
        return int(kept[0].table()["data"].chunk(0).buffers()[2].address)

    assert len({data_address() for _ in range(6)}) <= 2


def test_what_is_expected_by_a_few_large_rows_is_not_taken_for_granted() -> None:
    memory = RowMemory(10_000_000, 1 << 40)
    memory.append(pa.table({"data": [b"x" * 1_000_000] * 2, "id": [1, 2]}))
    assert memory.capacity_bytes < 12_000_000
    memory.append(pa.table({"data": [b"x"] * 100_000, "id": np.arange(100_000)}))
    assert memory.table().num_rows == 100_002


@pytest.mark.parametrize("columns", [1, 12])
def test_a_null_before_rows_that_were_copied_already_changes_none_of_them(columns: int) -> None:
    """Pieces are copied side by side, before those in front of them are appended."""
    names, rows = [f"c{number}" for number in range(columns)], 30
    lines = np.random.default_rng(0).permutation(rows)
    values = np.arange(rows, dtype=np.int64)
    whole = pa.table(
        {name: pa.array([None if row == 12 and name == "c0" else int(row) for row in values]) for name in names}
    )
    memory = RowMemory(1 << 20, rows, lines)
    pieces = [whole.slice(first, 10) for first in range(0, rows, 10)]
    placed = [memory.place(first, piece) for first, piece in zip(range(0, rows, 10), pieces, strict=True)]
    assert [each.table is None for each in placed] == [True, False, True]
    for each in placed:
        memory.append(*each)
    stored = memory.table()
    assert stored.combine_chunks() == whole.combine_chunks()
