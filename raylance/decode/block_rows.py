"""Rows that several samples share, decoded by block, and the samples that are made of them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raylance.columns import VALID
from raylance.memory.arrow import (
    copy_values,
    dense_array,
    one_array,
    raw_bytes,
    take_rows,
    width_of,
    without_nulls,
)
from raylance.memory.lending import Bytes, Lend
from raylance.orders.permutation import BoolArray, Int64Array


class LoadedRows(NamedTuple):
    """Consecutive stored rows of a chunk, from number `first` on, as far as one load has brought them."""

    first: int
    table: pa.Table


class BlockRows:
    """The rows of a chunk that have come in blocks; blocks may overlap."""

    def __init__(
        self,
        blocks: Iterable[LoadedRows],
        made: Mapping[str, Sequence[str]] = MappingProxyType({}),
        memory: Mapping[str, Bytes] = MappingProxyType({}),
    ) -> None:
        """Takes all blocks of a chunk, and `BlockColumns.decoded` if they were decoded; and the `memory` of those
        columns of which it has all values, in the order of stored rows.
        """
        whole, self._memory = list(blocks), memory
        rows = max((block.first + block.table.num_rows for block in whole), default=0)
        self._made, self._pieces = made, list[dict[str, pa.Array]]()
        self._kinds = {field.name: field.type for block in whole[:1] for field in block.table.schema}
        self._raws: dict[str, list[Bytes | None]] = {}  # by column: the bytes of its pieces
        self._piece_of, self._row_of = np.full(rows, -1), np.empty(rows, dtype=np.int64)  # by number of the stored row
        self._bad: dict[str, BoolArray] = {}  # of decoded columns: which stored rows are bad
        for block in whole:
            at = block.first
            for piece in block.table.to_batches():
                end = at + piece.num_rows
                self._piece_of[at:end], self._row_of[at:end] = len(self._pieces), np.arange(end - at)
                self._pieces.append({name: piece[name] for name in piece.schema.names})
                if made:
                    self._take_nulls(at, self._pieces[-1])
                at = end

    def _take_nulls(self, at: int, piece: dict[str, pa.Array]) -> None:
        """Notes which decoded values are null, and replaces them by the zeros that lie in their place."""
        for name, values in piece.items():
            if values.null_count:
                bad = self._bad.setdefault(name, np.zeros(len(self._piece_of), dtype=np.bool_))
                bad[at : at + len(values)] = ~values.is_valid().to_numpy(zero_copy_only=False)
                piece[name] = without_nulls(values)

    def fill_in(self, items: pa.Table, lend: Lend) -> pa.Table:
        """Replaces numbers of stored rows by these rows, in the columns that blocks have.

        Args:
            items: In each such column, a number, or lists of k numbers.
            lend: Gives the memory of the values.

        Returns:
            The items. If blocks were decoded, with the decoded columns, and with `_valid`, False if a value of the
            sample is bad; such a sample has zeros in the column of that value.

        Raises:
            IndexError: If a row has not come.
        """
        valid, columns = np.ones(items.num_rows, dtype=np.bool_), dict[str, pa.ChunkedArray | pa.Array]()
        by_number = self._made or self._kinds
        for column, values in zip(items.column_names, items.columns, strict=True):
            if column not in by_number:
                columns[column] = values
                continue
            lists = values.combine_chunks()
            count = lists.type.list_size if pa.types.is_fixed_size_list(lists.type) else None
            numbers = (lists if count is None else lists.flatten()).to_numpy()
            if (missing := self._piece_of[numbers] < 0).any():
                raise IndexError(f"stored row {numbers[missing][0]} of the column {column!r} has not come")
            if not self._made:
                taken = self._take(column, numbers, lend)
                columns[column] = taken if count is None else pa.FixedSizeListArray.from_arrays(taken, count)
            for name in self._made.get(column, ()):
                data, kind = self._take_bytes(name, numbers, lend), self._kinds[name]
                if name in self._bad and (bad := self._bad[name][numbers].reshape(len(lists), -1).any(axis=1)).any():
                    data.reshape(len(bad), -1)[bad] = 0
                    valid &= ~bad
                columns[name] = dense_array(of_several(kind, count), len(lists), pa.py_buffer(data))
        return pa.table(columns | ({VALID: valid} if self._made else {}))

    def _take(self, name: str, numbers: Int64Array, lend: Lend) -> pa.Array:
        kind = self._kinds[name]
        if any(piece[name].null_count for piece in self._pieces):
            columns = [piece[name] for piece in self._pieces]
            starts = np.cumsum([0, *map(len, columns)])
            places = starts[self._piece_of[numbers]] + self._row_of[numbers]
            return one_array(take_rows(pa.table([pa.chunked_array(columns)], [name]), places).column(0))
        return dense_array(kind, len(numbers), pa.py_buffer(self._take_bytes(name, numbers, lend)))

    def _take_bytes(self, name: str, numbers: Int64Array, lend: Lend) -> Bytes:
        """Copies the values of a column without nulls, by the numbers of their stored rows."""
        width = width_of(self._kinds[name])
        data = lend(len(numbers) * width)[: len(numbers) * width]
        if (memory := self._memory.get(name)) is not None:
            copy_values(memory, width, numbers, data)  # one call, as each waits for the GIL
            return data
        if name not in self._raws:
            self._raws[name] = [raw_bytes(piece[name]) for piece in self._pieces]
        sources = [raw for raw in self._raws[name] if raw is not None]
        pieces, rows = self._piece_of[numbers], self._row_of[numbers]
        cuts = [0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), len(rows)]
        for begin, end in itertools.pairwise(cuts):
            if begin < end:
                copy_values(sources[pieces[begin]], width, rows[begin:end], data[begin * width : end * width])
        return data


def of_several(kind: pa.DataType, count: int | None) -> pa.DataType:
    """Returns the type of `count` decoded values, as decoders make it that decode samples; of one for None."""
    if count is None:
        return kind
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.fixed_shape_tensor(kind.value_type, (count, *kind.shape))
    return pa.fixed_shape_tensor(kind, (count,)) if pa.types.is_primitive(kind) else pa.list_(kind, count)
