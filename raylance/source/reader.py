"""Reads rows by their offsets into Arrow tables, by range or by take."""

import abc
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

import lance
import lance.arrow  # registers bfloat16 with Arrow
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raylance.columns import ROW_OFFSET
from raylance.errors import DatasetError
from raylance.memory.arrow import wanted_rows
from raylance.orders.permutation import Int64Array
from raylance.source.data_files import DataFiles
from raylance.source.fields import find_field, is_blob
from raylance.source.lance_errors import LANCE_ERRORS, readable_text
from raylance.source.limits import requests_of
from raylance.source.live_rows import LiveRows
from raylance.source.reads import Reads
from raylance.source.retrying import OPENING_S, Wanted, always, patiently
from raylance.source.version import Source

T = TypeVar("T")
Prepare = Callable[[int, pa.Table, Int64Array | None], T]  # see `RowReader.read_pieces`
_Read = tuple[pa.Table, Int64Array | None]  # rows that were read, and the indices of the wanted ones, None for all
ReadMode = Literal["auto", "range", "take"]
READ_MODES: tuple[ReadMode, ...] = ("auto", "range", "take")

_RANGE_BYTES = 256 << 10  # runs of at least this many bytes are read as ranges
_RANGE_ROWS = 8  # if they also have at least this many rows: a take reads a few large rows in parallel
_DENSE = 0.5  # from this share of wanted rows on, reading all rows and dropping the rest is not slower than a take
_GAP_BYTES = 64 << 10  # gaps of up to this size are read, too
_VALUE_BYTES = 180  # a value of a take costs as much as these bytes of a range, because it decodes whole blocks
PIECE_BYTES = 4 << 20  # bytes of one read: the allocator reuses freed pieces of this size, but not much larger ones
_WIDE = 4  # with many columns, a read has up to this many times the bytes, because each column costs time in each read
_WIDE_COLUMNS = 64
_DIRECT_BYTES = _WIDE * PIECE_BYTES
_REQUESTS = 8  # reads at once from an object store, each of which takes long
_READS = 2  # reads at once from a disk: one piece is read while another is copied; more would wait for the interpreter
_NOTHING: _Read = pa.table({}), None


def stored_row_bytes(dataset: lance.LanceDataset, columns: Sequence[str]) -> float:
    """Returns the mean stored bytes of a row of these columns, over all rows: a sample may miss rare large rows.

    Raises:
        DatasetError: If the files cannot be read.
    """
    names, wanted = set(columns), set()
    fields = [(field.name(), field, False) for field in dataset.lance_schema.fields()]
    while fields:
        name, field, is_inside = fields.pop()
        if is_wanted := is_inside or name in names:
            wanted.add(field.id())
        fields += [(f"{name}.{child.name()}", child, is_wanted) for child in field.children()]
    try:
        stats = patiently(dataset.stats.data_stats, functools.partial(requests_of, dataset))  # one request per file
    except LANCE_ERRORS as error:
        raise DatasetError(
            f"the files of {dataset.uri!r}, version {dataset.version}, cannot be read ({readable_text(error)}); "
            "nothing was started. Check that they are there, whole and readable, and try again."
        ) from error
    stored = sum(int(field.bytes_on_disk) for field in stats.fields if field.id in wanted)
    rows = sum(int(fragment.physical_rows) for fragment in dataset.get_fragments())
    return stored / max(1, rows)


class RowReader(abc.ABC):
    """Reads rows by their offsets. Several threads may use one reader at once."""

    @abc.abstractmethod
    def read_into(self, offsets: Int64Array, add: Callable[[pa.Table], None], is_wanted: Wanted = always) -> None:
        """Reads the rows at `offsets`, strictly ascending, and passes them to `add` in order, in one or more tables.

        The tables have the columns of the reader, and `_rowoffset` (int64). Blob columns hold their bytes. Once
        `is_wanted`, which any thread may call, returns False, rows may be missing, and no failure is raised.

        Raises:
            DatasetError: If the dataset no longer has these rows, or its storage failed for too long. The tables
                that were read before have been passed to `add`.
        """

    def read_pieces(
        self,
        offsets: Int64Array,
        prepare: Prepare[T],
        add: Callable[[T], bool],
        is_wanted: Wanted = always,
    ) -> None:
        """Reads rows like `read_into`, and passes the result of `prepare` for each table to `add`.

        Args:
            offsets: See `read_into`.
            prepare: Takes the number of a table's first row among the offsets; the table; and the indices of the rows
                in the table, int64, strictly ascending from 0, because it may also hold rows between them; None for all
                of them. It may run in several threads at once, in any order, and again with the same rows.
            add: Takes the results of `prepare`, in order, in the calling thread; returns whether more may follow.
            is_wanted: Whether the rows are still wanted. If not, no row is added, no failure is raised, and reads that
                have not begun may never begin. Any thread may call it.

        Raises:
            DatasetError: See `read_into`.
        """
        rows, has_room = 0, True

        def keep(table: pa.Table) -> None:
            nonlocal rows, has_room
            has_room = has_room and is_wanted() and add(prepare(rows, table, None))
            rows += table.num_rows

        self.read_into(offsets, keep, is_wanted)

    def widened(self, margin: int) -> "RowReader":
        """Returns a reader that gives more bytes of video files than their indices say: from `margin` keyframes before,
        to as many frames after; of a file with fewer frames, all bytes.
        """
        return self

    @abc.abstractmethod
    def close(self) -> None:
        """Lets reads in other threads raise their next failure, and try nothing again: nobody waits for their rows."""

    def read(self, offsets: Int64Array) -> pa.Table:
        """Reads rows into one table; see `read_into`."""
        pieces: list[pa.Table] = []
        self.read_into(offsets, pieces.append)
        return pa.concat_tables(pieces)

    def read_wanted(self, offsets: Int64Array, is_wanted: Wanted) -> pa.Table | None:
        """Reads rows into one table; returns None if they are not wanted any more; see `read_into`."""
        pieces: list[pa.Table] = []
        self.read_into(offsets, pieces.append, is_wanted)
        return pa.concat_tables(pieces) if is_wanted() else None


class PieceReader(RowReader):
    """A reader whose other methods follow from `read_pieces`."""

    def read_into(self, offsets: Int64Array, add: Callable[[pa.Table], None], is_wanted: Wanted = always) -> None:
        """See `RowReader.read_into`."""

        def keep(table: pa.Table) -> bool:
            add(table)
            return True

        self.read_pieces(offsets, lambda _, table, places: wanted_rows(table, places), keep, is_wanted)

    @abc.abstractmethod
    def read_pieces(
        self,
        offsets: Int64Array,
        prepare: Prepare[T],
        add: Callable[[T], bool],
        is_wanted: Wanted = always,
    ) -> None:
        """See `RowReader.read_pieces`."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that one call reads. `first` is the number of the first row."""

    first: int
    offsets: Int64Array
    is_range: bool


def _name(pieces: Sequence[_Piece]) -> str:
    offsets = pieces[0].offsets
    return f"rows {offsets[0]} to {pieces[-1].offsets[-1]}" if len(offsets) else "columns"


@dataclasses.dataclass(slots=True, kw_only=True)
class Reader(PieceReader):
    """Reads rows of a pinned dataset, in pieces of some MiB.

    Attributes:
        pinned: The version that is opened with the first read, and again before a read is repeated. It is checked from
            time to time while reads succeed.
        columns: Columns to read; "image.bytes" is the field `bytes` of the struct `image`.
        row_bytes: Estimated bytes of a row of these columns; decides between range and take.
        dataset: The open dataset; None if the first read must open it.
        mode: "range" and "take" read all rows in that way; "auto" chooses, see `choose`.
        retry_s: Seconds for which a read is repeated if the storage fails; see `Reads`.
        missing: Whether a read is also repeated if a file is missing.
    """

    pinned: Source
    columns: Sequence[str]
    row_bytes: float
    dataset: lance.LanceDataset | None = None
    mode: ReadMode = "auto"
    retry_s: float = OPENING_S
    missing: bool = False
    _reads: Reads = dataclasses.field(init=False, repr=False)
    _files: DataFiles | None = dataclasses.field(default=None, init=False, repr=False)
    _schemas: tuple[pa.Schema, pa.Schema] | None = dataclasses.field(default=None, init=False, repr=False)
    _blobs: list[str] | None = dataclasses.field(default=None, init=False, repr=False)  # None before the first read
    _live: LiveRows | None = dataclasses.field(default=None, init=False, repr=False)
    _listing: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._reads = Reads(
            self.pinned,
            at_once=_REQUESTS if self.pinned.is_remote else _READS,
            retry_s=self.retry_s,
            missing=self.missing,
            dataset=self.dataset,
        )
        quoted = [name for name in self.columns if "`" in name]
        if quoted:  # Lance panics on such a name, quoted or not
            raise DatasetError(
                f"{self.pinned.uri!r} has a backtick in the column name {', '.join(map(repr, quoted))}, by which "
                "Lance cannot read it; nothing was started. Name other columns in columns=, or write the dataset with "
                "another name."
            )

    def read_pieces(
        self,
        offsets: Int64Array,
        prepare: Prepare[T],
        add: Callable[[T], bool],
        is_wanted: Wanted = always,
    ) -> None:
        """See `RowReader.read_pieces`."""

        def make(dataset: lance.LanceDataset, piece: _Piece) -> T | None:
            return self._make(dataset, prepare, is_wanted, piece)

        self._reads.run(self._pieces(offsets), make, add, _name, is_wanted)

    def close(self) -> None:
        """See `RowReader.close`."""
        self._reads.close()

    def _pieces(self, offsets: Int64Array) -> Iterator[_Piece]:
        """Cuts offsets into one or more pieces of about one size, one for each call."""
        pieces = min(_WIDE, max(1, len(self.columns) // _WIDE_COLUMNS))
        rows = max(1, int(pieces * PIECE_BYTES / max(self.row_bytes, 1)))
        firsts = self._range_firsts(offsets)
        is_range = len(offsets) > 0 and self._choose(offsets, firsts) == "range"
        firsts = firsts if is_range else firsts[:1]
        for first, last in itertools.pairwise([*firsts.tolist(), len(offsets)]):
            size = rows
            if is_range:  # unwanted rows between them are read, too
                share = (last - first) / int(offsets[last - 1] - offsets[first] + 1)
                size = max(1, int(rows * min(1.0, share / _DENSE)))
            size = -(-(last - first) // -(-(last - first) // size)) if last > first else 1
            for begin in range(first, max(last, first + 1), size):
                yield _Piece(begin, offsets[begin : min(begin + size, last)], is_range)

    def _make(self, dataset: lance.LanceDataset, prepare: Prepare[T], is_wanted: Wanted, piece: _Piece) -> T | None:
        """Reads and prepares a piece; returns None if nobody wants it any more."""
        if not is_wanted():
            return None
        table, places = self._read_piece(dataset, piece.offsets, piece.is_range)
        offsets = piece.offsets if places is None else piece.offsets[0] + np.arange(table.num_rows)
        return prepare(piece.first, self._with_offsets(table, offsets), places)

    def _with_offsets(self, table: pa.Table, offsets: Int64Array) -> pa.Table:
        """Adds the column `_rowoffset`. `append_column` would release the GIL six times, and wait for it each time."""
        read, with_offsets = self._schemas or (None, None)
        if read is None or not table.schema.equals(read, check_metadata=True):
            read, with_offsets = table.schema, table.schema.append(pa.field(ROW_OFFSET, pa.int64()))
            self._schemas = read, with_offsets
        column = pa.Array.from_buffers(pa.int64(), len(offsets), [None, pa.py_buffer(offsets)])
        return pa.Table.from_arrays([*table.columns, column], schema=with_offsets)

    def _read_piece(self, dataset: lance.LanceDataset, offsets: Int64Array, is_range: bool) -> _Read:
        """Returns the rows at these offsets, and those between them if these were read, too."""
        if self._blobs is None:  # found once, because each access makes Lance convert the schema
            schema = dataset.schema
            fields = [(name, find_field(schema, name)) for name in self.columns]
            self._blobs = [name for name, field in fields if field is not None and is_blob(field)]
        blobs = self._blobs
        plain = [name for name in self.columns if name not in blobs]
        whole, places = self._read_plain(dataset, offsets, plain, is_range) if plain else _NOTHING
        if blobs:
            whole, places = wanted_rows(whole, places), None
            columns = {name: whole[name] for name in plain}
            where = self._live_rows(dataset).selector(offsets)
            for name in blobs:
                found = dataset.read_blobs(name, **where, preserve_order=True) if len(offsets) else []
                columns[name] = pa.chunked_array([pa.array([value for _, value in found], pa.large_binary())])
            whole = pa.table({name: columns[name] for name in self.columns})
        rows = len(offsets) if places is None else int(places[-1]) + 1
        if whole.num_rows != rows:
            raise DatasetError(f"{rows} offsets gave {whole.num_rows} rows, and no row may be lost in silence")
        return whole, places

    def _read_plain(
        self, dataset: lance.LanceDataset, offsets: Int64Array, columns: list[str], is_range: bool
    ) -> _Read:
        if len(offsets) == 0:
            # Schema.empty_table() refuses tensors with permuted axes.
            return pa.Table.from_batches([], schema=dataset.scanner(columns=columns).projected_schema), None
        if not is_range:
            return _tidy(self._live_rows(dataset).take(offsets, columns)), None
        start, rows = int(offsets[0]), int(offsets[-1] - offsets[0]) + 1
        # A scan reads large rows, because it shows progress: a slow storage must not look like one that hangs.
        is_small = rows * self.row_bytes <= _DIRECT_BYTES
        table = self._data_files(dataset, columns).read(start, rows) if is_small else None
        if table is None:
            table = dataset.scanner(columns=columns, offset=start, limit=rows, batch_size=rows).to_table()
        return _tidy(table), None if rows == len(offsets) else offsets - start

    def _live_rows(self, dataset: lance.LanceDataset) -> LiveRows:
        """Returns the live rows of the open dataset."""
        live = self._live
        if live is None or live.dataset is not dataset:
            self._live = live = LiveRows(dataset)
        return live

    def _data_files(self, dataset: lance.LanceDataset, columns: list[str]) -> DataFiles:
        """Returns the data files of the open dataset."""
        with self._listing:
            if self._files is None or self._files.dataset is not dataset:
                self._files = DataFiles(dataset, columns)
            return self._files

    def count_reads(self, offsets: Int64Array) -> tuple[int, int]:
        """Returns the number of reads into which offsets are cut, and the number of reads that run at once."""
        return sum(1 for _ in self._pieces(offsets)), self._reads.at_once

    def choose(self, offsets: Int64Array) -> ReadMode:
        """Chooses "range" if ranges are long and most of their rows are wanted, else "take".

        Measured: a range of rows is read about as fast as one take of the same rows, and faster if it is long, because
        Lance then decodes in parallel. A take costs the same for dense and scattered rows. Small values make it dearer:
        with a hundred columns of floats, a take of one row in fifty took twice the time of the whole range.
        """
        return self._choose(offsets, self._range_firsts(offsets))

    def _choose(self, offsets: Int64Array, firsts: Int64Array) -> ReadMode:
        """See `choose`; ranges begin at the indices `firsts`."""
        if self.mode != "auto":
            return self.mode
        lasts = np.r_[firsts[1:], len(offsets)] - 1
        read_rows, ranges = int((offsets[lasts] - offsets[firsts] + 1).sum()), len(firsts)
        long_runs = read_rows >= _RANGE_ROWS * ranges and read_rows * self.row_bytes >= _RANGE_BYTES * ranges
        return "range" if long_runs and len(offsets) >= _DENSE * self._value_share * read_rows else "take"

    @property
    def _value_share(self) -> float:
        """The share of a take's cost that is for the bytes of the values, between 0 and 1."""
        value_bytes = max(self.row_bytes, 1) / max(1, len(self.columns))
        return value_bytes / (value_bytes + _VALUE_BYTES)

    def _range_firsts(self, offsets: Int64Array) -> Int64Array:
        """Returns the indices of the offsets that begin ranges, at least one. Small gaps do not end a range."""
        if not len(offsets):
            return np.zeros(1, dtype=np.int64)
        gap_rows = max(1, int(_GAP_BYTES / self._value_share / max(self.row_bytes, 1)))
        return np.flatnonzero(np.diff(offsets, prepend=offsets[0] - gap_rows - 1) > gap_rows)


def _tidy(table: pa.Table) -> pa.Table:
    """Returns a table whose dictionaries have distinct values without null: pandas and Arrow's concatenation need that.

    In Lance's take, a dictionary repeats the values of each fragment. In storage version 2.0, null is among them.
    """
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            chunks = [_distinct(chunk) for chunk in table[field.name].chunks]
            table = table.set_column(index, field, pa.chunked_array(chunks, field.type))
    return table


def _distinct(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
    kind, different = chunk.type, chunk.dictionary.unique().drop_null()
    if len(different) == len(chunk.dictionary):
        return chunk
    indices = pc.index_in(chunk.dictionary, different).take(chunk.indices).cast(kind.index_type)
    return pa.DictionaryArray.from_arrays(indices, different, ordered=kind.ordered)
