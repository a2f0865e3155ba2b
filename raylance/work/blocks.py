"""Wide columns of windows, whose rows a reader sends once for each load, so that the trainer makes samples of them."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raylance.memory.arrow import copy_values, dense_array, one_array, raw_bytes, take_rows, width_of
from raylance.memory.lending import Bytes, Lend
from raylance.orders.permutation import Int64Array
from raylance.read_spec import ReadSpec

_WIDE_BYTES = 1 << 10  # least bytes of a value; the index that an item has instead takes 8


def columns_by_block(read_spec: ReadSpec) -> dict[str, int]:
    """Returns the columns that readers may send by block, with the bytes that a sample has of each: columns of several
    rows a sample whose values are wide, have one size, and are neither decoded nor transformed in helpers. Neighbouring
    samples share rows, so blocks have fewer bytes than samples.
    """
    samples, decoding = read_spec.source.load_samples(), read_spec.in_helpers
    if samples is None or read_spec.schema is None or (decoding is not None and decoding.transform is not None):
        return {}
    decoded, counts = decoding.columns if decoding is not None else [], samples.columns
    return {
        field.name: nbytes
        for field in read_spec.schema
        if counts.get(field.name, 1) > 1
        and field.name not in decoded
        and (nbytes := width_of(field.type)) >= _WIDE_BYTES * counts[field.name]
    }


class Block(NamedTuple):
    """Consecutive stored rows of a chunk, from number `first` on, as far as one load has brought them."""

    first: int
    table: pa.Table


class BlockRows:
    """The rows of a chunk that have come in blocks; blocks may overlap."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        rows = max((block.first + block.table.num_rows for block in blocks), default=0)
        self._pieces: list[pa.RecordBatch] = []
        self._raws: dict[str, list[Bytes | None]] = {}  # by column: the bytes of its pieces
        self._piece_of, self._row_of = np.full(rows, -1), np.empty(rows, dtype=np.int64)  # by number of the stored row
        for block in blocks:
            at = block.first
            for piece in block.table.to_batches():
                end = at + piece.num_rows
                self._piece_of[at:end], self._row_of[at:end] = len(self._pieces), np.arange(end - at)
                self._pieces.append(piece)
                at = end

    def fill_in(self, items: pa.Table, lend: Lend) -> pa.Table:
        """Replaces numbers of stored rows by these rows, in the columns that blocks have.

        Args:
            items: In each such column, lists of k numbers.
            lend: Gives the memory of the values.

        Raises:
            IndexError: If a row has not come.
        """
        for name in self._pieces[0].schema.names if self._pieces else ():
            lists = items[name].combine_chunks()
            numbers = lists.flatten().to_numpy()
            pieces, rows = self._piece_of[numbers], self._row_of[numbers]
            if (pieces < 0).any():
                raise IndexError(f"stored row {numbers[pieces < 0][0]} of the column {name!r} has not come")
            values = self._take(name, pieces, rows, lend)
            made = pa.FixedSizeListArray.from_arrays(values, lists.type.list_size)
            items = items.set_column(items.column_names.index(name), name, made)
        return items

    def _take(self, name: str, pieces: Int64Array, rows: Int64Array, lend: Lend) -> pa.Array:
        if name not in self._raws:
            self._raws[name] = [raw_bytes(piece[name]) for piece in self._pieces]
        kind, sources = self._pieces[0].schema.field(name).type, [raw for raw in self._raws[name] if raw is not None]
        if len(sources) < len(self._pieces):  # a value is null
            columns = [piece[name] for piece in self._pieces]
            starts = np.cumsum([0, *map(len, columns)])
            taken = take_rows(pa.table([pa.chunked_array(columns)], [name]), starts[pieces] + rows)
            return one_array(taken.column(0))
        width = width_of(kind)
        data = lend(len(rows) * width)[: len(rows) * width]
        cuts = [0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), len(rows)]
        for begin, end in itertools.pairwise(cuts):
            if begin < end:
                copy_values(sources[pieces[begin]], width, rows[begin:end], data[begin * width : end * width])
        return dense_array(kind, len(rows), pa.py_buffer(data))
