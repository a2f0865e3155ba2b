"""The memory of one chunk: its rows as they are loaded, and the items that are gathered from them."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raylance.columns import ROW_OFFSET
from raylance.memory.arrow import own_memory, slice_runs, take_rows, wanted_rows
from raylance.memory.lending import Lend
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.samples.table import Located, SampleTable, unneeded_rows
from raylance.source.sampling import gather_samples
from raylance.work.blocks import BlockColumns
from raylance.work.row_memory import Placed, RowMemory


class ChunkMemory:
    """Holds rows that are read in storage order, and hands out samples of them in the order of delivery.

    Attributes:
        nbytes: Bytes of the rows that are loaded.
        is_dropped: Whether the rows are not needed any more, so that loads should end.
    """

    def __init__(
        self,
        anchors: Int64Array,
        samples: SampleTable | None,
        most_bytes: int,
        lend: Lend,
        by_block: BlockColumns | None = None,
    ) -> None:
        """Takes the row offsets of the samples' anchors in the order of delivery, at least one; and the table of
        samples, None if each sample is its anchor. The columns `by_block` are not held: samples have the numbers of
        their rows instead. `RowMemory` explains the other arguments.
        """
        self._samples, self.nbytes, self.is_dropped = samples, 0, False
        self.by_block = by_block or BlockColumns()
        self._located: Located | None = None
        self._places: Int64Array = np.empty(len(anchors), dtype=np.int64)
        self._is_repeated, lines = False, None
        if samples is not None:
            self._stored: Int64Array
            self._stored, self._located = samples.resolve(anchors)
        else:
            lines = np.argsort(anchors)
            self._stored = anchors[lines]
            self._is_repeated = bool((self._stored[1:] == self._stored[:-1]).any())
            if self._is_repeated:
                self._stored, self._places = np.unique(anchors, return_inverse=True)
                lines = None
            else:
                self._places[lines] = np.arange(len(anchors))
        self._memory = RowMemory(most_bytes, len(self._stored), lines, lend)
        self._lock = threading.Lock()
        self._unneeded: dict[str, BoolArray] | None = None  # see `unneeded_rows`; once it is asked for
        self._early: dict[int, Placed] = {}  # rows that came before those in front of them

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self._places)

    @property
    def stored_rows(self) -> int:
        """Number of different rows, which are what is read."""
        return len(self._stored)

    @property
    def loaded_rows(self) -> int:
        """Number of stored rows that are loaded, from the first one on."""
        return self._memory.rows

    @property
    def is_even(self) -> bool:
        """Whether all rows have one size; False before the first row."""
        return self._memory.is_even and not self.by_block.decoded

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the memory, in use or not."""
        return self._memory.capacity_bytes

    def stored(self, first: int, rows: int) -> Int64Array:
        """Returns the offsets of up to `rows` stored rows, ascending, from number `first` on in storage order."""
        return self._stored[first : first + rows]

    def unneeded(self, first: int, rows: int, columns: Sequence[str]) -> dict[str, BoolArray]:
        """Returns which of some stored rows from number `first` on no sample needs in some columns, bool, (rows,). All
        calls must name the same columns.
        """
        if self._samples is None or self._located is None or not columns:
            return {}
        with self._lock:
            if self._unneeded is None:
                self._unneeded = unneeded_rows(self._samples, self._stored, self._located, columns)
        return {name: which[first : first + rows] for name, which in self._unneeded.items()}

    def load(self, first: int, rows: int, allowed_bytes: float) -> "ChunkLoad":
        """Begins to load up to `rows` stored rows from number `first` on, which may have `allowed_bytes`."""
        return ChunkLoad(self, self._memory, first, rows, allowed_bytes)

    def add(self, first: int, placed: Placed, nbytes: int) -> None:
        """Adds the next rows, see `RowMemory.append`. Rows that come early wait until those before them are here."""
        with self._lock:
            if first < self._memory.rows or first in self._early:
                return  # they are here
            self._early[first] = placed
            self.nbytes += nbytes
            while (found := self._early.pop(self._memory.rows, None)) is not None:
                before = self._memory.rows
                try:
                    self._memory.append(*found)
                except BaseException:
                    self._memory.cut(before)
                    raise

    def gather(self, low: int, high: int, lend: Lend, *, own: bool) -> pa.Table:
        """Returns samples [low, high) in the order of delivery, in one piece of memory for each column. All their rows
        must be loaded. With `own`, the table holds no memory of the chunk.
        """
        if self._samples is not None and self._located is not None:
            located = self._located.part(low, high)
            return gather_samples(
                self._memory.stored(), self._stored, located, self._samples, lend, self.by_block.names
            )
        table = self._gather_rows(low, high, lend, own=own)
        for name in self.by_block.names:
            table = table.append_column(name, pa.array(self._places[low:high]))
        return table

    def _gather_rows(self, low: int, high: int, lend: Lend, *, own: bool) -> pa.Table:
        """Returns samples that are rows, without the columns by block."""
        by_line, table = self._memory.by_line(low, high), self._memory.stored()
        if table.num_columns:
            table = self._take(table, self._places[low:high], lend, own or self._is_repeated)
            if not by_line.num_columns:
                return table
            columns = dict(zip(by_line.column_names + table.column_names, by_line.columns + table.columns, strict=True))
            schema = self._memory.schema
            by_line = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
        return own_memory(by_line) if own else by_line

    def _take(self, table: pa.Table, places: Int64Array, lend: Lend, own: bool) -> pa.Table:
        """Returns the rows of a table at the indices `places`: long runs as slices, others taken by index."""
        runs = slice_runs(table, places)
        if runs is None:
            return take_rows(table, places, lend)
        return own_memory(runs[0]) if own and len(runs) == 1 else pa.concat_tables(runs).combine_chunks()

    def size_of(self, table: pa.Table) -> int:
        """Returns the bytes of some samples, with the rows whose numbers they have."""
        if self._samples is None and not self.by_block.names:
            return self._memory.size_of(table)
        return int(table.nbytes) + int(table.num_rows) * self.by_block.sample_bytes


class ChunkLoad:
    """One load of stored rows into the memory of a chunk. `prepare` and `add` are for `RowReader.read_pieces`.

    Attributes:
        read_bytes: Bytes of the rows that were read.
        block: The columns of the added rows that the chunk does not hold, in tables of some of the rows.
        needs_bytes: Bytes of the first row that did not fit; 0 if all rows did.
        added: Number of rows that were added.
    """

    def __init__(self, chunk: ChunkMemory, memory: RowMemory, first: int, rows: int, allowed_bytes: float) -> None:
        self._chunk, self._memory, self._first, self._left = chunk, memory, first, allowed_bytes
        self._wanted = rows if first + rows < chunk.stored_rows else 0  # 0 for those up to the end of the chunk
        self._made_bytes = chunk.by_block.row_bytes  # that decoding will add to each row
        self._gate = _Gate()
        self.added = self.read_bytes = self.needs_bytes = 0
        self.block: list[pa.Table] = []

    def is_wanted(self) -> bool:
        """Whether the chunk was not dropped."""
        return not self._chunk.is_dropped

    def prepare(self, number: int, table: pa.Table, places: Int64Array | None) -> "_Prepared":
        """Copies rows to their lines, see `RowMemory.place`; `number` counts from the first row of the load."""
        with self._gate.enter() as is_open:
            if not is_open:
                return _Prepared(Placed(None, frozenset(), 0), 0, None)  # nobody takes them
            apart = None
            if names := self._chunk.by_block.names:
                table, places = wanted_rows(table, places), None
                apart, table = table.select([*names, ROW_OFFSET]), table.drop_columns(names)
            placed = self._memory.place(self._first + number, table, places)
            nbytes = self._memory.size_of(table, places) if placed.table is None else self._memory.size_of(placed.table)
            return _Prepared(placed, nbytes, apart)

    def add(self, made: "_Prepared") -> bool:
        """Adds the next rows, as many as fit; returns whether more may come."""
        placed, _, apart = made
        rows = placed.rows
        nbytes = self._size_of(made, 0, rows)
        self.read_bytes += nbytes - rows * self._made_bytes
        if nbytes > self._left:
            low = 0
            while low < rows:  # the most rows that fit
                middle = (low + rows + 1) // 2
                low, rows = (middle, rows) if self._size_of(made, 0, middle) <= self._left else (low, middle - 1)
            if rows < placed.rows:
                self.needs_bytes = self._size_of(made, rows, rows + 1)
        elif apart is not None and self.added + rows == self._wanted:
            cut = self._chunk.by_block.cut(apart)
            rows = cut if 2 * cut > rows else rows
        if rows < placed.rows:
            nbytes, table = self._size_of(made, 0, rows), placed.table
            placed = placed._replace(rows=rows, table=None if table is None else table.slice(0, rows))
        if rows and apart is not None:
            self.block.append(apart.slice(0, rows))
        if rows:
            self._chunk.add(self._first + self.added, placed, nbytes)
        self.added += rows
        self._left -= nbytes
        return self.is_wanted() and not self.needs_bytes

    def _size_of(self, made: "_Prepared", low: int, high: int) -> int:
        """Returns the bytes of rows [low, high) of those that were prepared together, as decoded."""
        placed, nbytes, apart = made
        rows, is_all = high - low, high - low == placed.rows
        if placed.table is None:  # all rows have one size
            nbytes = nbytes * rows // max(1, placed.rows)
        elif not is_all:
            nbytes = placed.table.slice(low, rows).nbytes
        others = 0 if apart is None else (apart if is_all else apart.slice(low, rows)).nbytes
        return nbytes + others + rows * self._made_bytes

    def end(self) -> None:
        """Lets no late read write to the memory any more."""
        self._gate.close()


class _Prepared(NamedTuple):
    """Rows that `ChunkLoad.prepare` has placed, with the bytes of those columns, and their columns by block, if any."""

    placed: Placed
    nbytes: int
    apart: pa.Table | None


class _Gate:
    """Keeps a read that timed out, but still runs, from writing into memory whose rows were handed out meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._is_open = 0, True

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Yields whether the gate is open. If it is, `close` waits until the body of the `with` statement has ended."""
        with self._changed:
            is_open = self._is_open
            self._inside += is_open
        try:
            yield is_open
        finally:
            with self._changed:
                self._inside -= is_open
                self._changed.notify_all()

    def close(self) -> None:
        """Lets no more threads in, and waits for those inside, which copy a few MiB."""
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: not self._inside)
