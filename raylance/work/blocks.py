"""Columns of windows that come in blocks: each stored row once for a chunk, so that samples are made of them last."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

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

if TYPE_CHECKING:
    from raylance.read_spec import ReadSpec  # loads Lance, which decode actors do without

_WIDE_BYTES = 1 << 10  # least bytes of a value; the index that an item has instead takes 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumns:
    """The columns of which readers give samples only the numbers of their rows. The rows come in blocks.

    Attributes:
        sent: Columns that are sent by block as they are stored.
        decoded: Encoded columns, each with the names of the columns that decoders make of it.
        sample_bytes: Bytes of a sample that are not in its row of numbers.
        row_bytes: Bytes of a stored row that decoding adds.
        are_for_helpers: Whether helpers need samples of the decoded columns, for a transform; else the trainer makes
            them.
        kinds: Types of the decoded columns, as samples have them.
    """

    sent: Sequence[str] = ()
    decoded: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    sample_bytes: int = 0
    row_bytes: int = 0
    are_for_helpers: bool = False
    kinds: Mapping[str, pa.DataType] = dataclasses.field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, read_spec: "ReadSpec", *, sends: bool) -> "BlockColumns":
        """Returns the columns of a loader. With `sends`, also those that are worth sending by block: of several rows a
        sample, with wide values of one size, and neither decoded nor transformed in helpers. Neighbouring samples share
        rows, so blocks have fewer bytes than samples.
        """
        samples = read_spec.source.load_samples()
        if samples is None:
            return cls()
        sizes = _wide_columns(read_spec, samples.columns) if sends else {}
        decoding = read_spec.in_helpers
        shared = None if decoding is None else decoding.of_blocks
        if decoding is None or shared is None:
            return cls(sent=tuple(sizes), sample_bytes=sum(sizes.values()))
        nbytes, counts = shared.value_bytes, samples.columns
        of_sample = sum(nbytes[each.output_name] * counts[each.column] for each in shared.decoders)
        return cls(
            sent=tuple(sizes),
            decoded=shared.names_by_column,
            sample_bytes=sum(sizes.values()) + of_sample,
            row_bytes=sum(nbytes.values()),
            are_for_helpers=decoding.transform is not None,
            kinds={each.output_name: _of_several(each.arrow_type, counts[each.column]) for each in shared.decoders},
        )

    def fill_in_none(self, items: pa.Table) -> pa.Table:
        """Returns a table of no sample with decoded columns in place of the encoded ones; see `BlockRows.fill_in`."""
        fields = list[pa.Field]()
        for field in items.schema:
            made = [pa.field(name, self.kinds[name]) for name in self.decoded.get(field.name, ())]
            fields += made or [field]
        return pa.schema([*fields, pa.field(VALID, pa.bool_())]).empty_table()

    @property
    def names(self) -> list[str]:
        """Names of the columns, as they are stored."""
        return [*self.sent, *self.decoded]

    @property
    def tables(self) -> int:
        """Number of the tables that a load gives of its rows: one of `sent`, if any, and one of `decoded`, if any."""
        return bool(self.sent) + bool(self.decoded)


def _wide_columns(read_spec: "ReadSpec", counts: Mapping[str, int]) -> dict[str, int]:
    """Returns the columns that are worth sending by block, with the bytes that a sample has of each."""
    decoding = read_spec.in_helpers
    if read_spec.schema is None or (decoding is not None and decoding.transform is not None):
        return {}
    decoded = [decoder.column for decoder in decoding.decoders] if decoding is not None else []
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

    def __init__(self, blocks: Iterable[Block], made: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        """Takes all blocks of a chunk, and `BlockColumns.decoded` if they were decoded."""
        whole = list(blocks)
        rows = max((block.first + block.table.num_rows for block in whole), default=0)
        self._made, self._pieces = made, list[dict[str, pa.Array]]()
        self._raws: dict[str, list[Bytes | None]] = {}  # by column: the bytes of its pieces
        self._piece_of, self._row_of = np.full(rows, -1), np.empty(rows, dtype=np.int64)  # by number of the stored row
        self._bad: dict[str, BoolArray] = {}  # of decoded columns: which stored rows are
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
            items: In each such column, lists of k numbers.
            lend: Gives the memory of the values.

        Returns:
            The items. If blocks were decoded, with the decoded columns, and with `_valid`, False if a value of the
            sample is bad; such a sample has zeros in the column of that value.

        Raises:
            IndexError: If a row has not come.
        """
        valid, columns = np.ones(items.num_rows, dtype=np.bool_), dict[str, pa.ChunkedArray | pa.Array]()
        by_number = self._made or (self._pieces[0] if self._pieces else ())
        for column, values in zip(items.column_names, items.columns, strict=True):
            if column not in by_number:
                columns[column] = values
                continue
            lists = values.combine_chunks()
            numbers, count = lists.flatten().to_numpy(), lists.type.list_size
            pieces, rows = self._piece_of[numbers], self._row_of[numbers]
            if (pieces < 0).any():
                raise IndexError(f"stored row {numbers[pieces < 0][0]} of the column {column!r} has not come")
            if not self._made:
                taken = self._take(column, pieces, rows, lend)
                columns[column] = pa.FixedSizeListArray.from_arrays(taken, count)
            for name in self._made.get(column, ()):
                data, kind = self._take_bytes(name, pieces, rows, lend), self._pieces[0][name].type
                if name in self._bad and (bad := self._bad[name][numbers].reshape(-1, count).any(axis=1)).any():
                    data.reshape(len(bad), -1)[bad] = 0
                    valid &= ~bad
                columns[name] = dense_array(_of_several(kind, count), len(lists), pa.py_buffer(data))
        return pa.table(columns | ({VALID: valid} if self._made else {}))

    def _take(self, name: str, pieces: Int64Array, rows: Int64Array, lend: Lend) -> pa.Array:
        kind = self._pieces[0][name].type
        if any(piece[name].null_count for piece in self._pieces):
            columns = [piece[name] for piece in self._pieces]
            starts = np.cumsum([0, *map(len, columns)])
            taken = take_rows(pa.table([pa.chunked_array(columns)], [name]), starts[pieces] + rows)
            return one_array(taken.column(0))
        return dense_array(kind, len(rows), pa.py_buffer(self._take_bytes(name, pieces, rows, lend)))

    def _take_bytes(self, name: str, pieces: Int64Array, rows: Int64Array, lend: Lend) -> Bytes:
        """Copies the values of a column without nulls."""
        if name not in self._raws:
            self._raws[name] = [raw_bytes(piece[name]) for piece in self._pieces]
        width, sources = width_of(self._pieces[0][name].type), [raw for raw in self._raws[name] if raw is not None]
        data = lend(len(rows) * width)[: len(rows) * width]
        cuts = [0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), len(rows)]
        for begin, end in itertools.pairwise(cuts):
            if begin < end:
                copy_values(sources[pieces[begin]], width, rows[begin:end], data[begin * width : end * width])
        return data


def _of_several(kind: pa.DataType, count: int) -> pa.DataType:
    """Returns the type of `count` decoded values, as decoders make it that decode samples."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.fixed_shape_tensor(kind.value_type, (count, *kind.shape))
    return pa.fixed_shape_tensor(kind, (count,)) if pa.types.is_primitive(kind) else pa.list_(kind, count)
