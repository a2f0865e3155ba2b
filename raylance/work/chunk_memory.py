"""The memory of one chunk: its rows as they are loaded, and the items that are gathered from them."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from raylance.columns import ROW_OFFSET
from raylance.memory.arrow import own_memory, slice_runs, take_rows
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
            self._stored: Int64Array = samples.stored(anchors)
            self._located = samples.locate(self._stored, anchors)
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
        return self._memory.is_even

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the memory, in use or not."""
        return self._memory.capacity_bytes

    def stored(self, first: int, rows: int) -> Int64Array:
        """Returns the offsets of up to `rows` stored rows, ascending, from number `first` on in storage order."""
        return self._stored[first : first + rows]

    def unneeded(self, first: int, rows: int, columns: Sequence[str]) -> dict[str, Int64Array]:
        """Returns the offsets of those of the stored rows from number `first` on that no sample needs in some columns.
        All calls must name the same columns.
        """
        if self._samples is None or self._located is None or not columns:
            return {}
        with self._lock:
            if self._unneeded is None:
                self._unneeded = unneeded_rows(self._samples, self._stored, self._located, columns)
        part = slice(first, first + rows)
        return {name: self._stored[part][which[part]] for name, which in self._unneeded.items()}

    def load(self, first: int, allowed_bytes: float) -> "ChunkLoad":
        """Begins to load stored rows from number `first` on, which may have `allowed_bytes`."""
        return ChunkLoad(self, self._memory, first, allowed_bytes)

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
            located = self._located.part(slice(low, high))
            return gather_samples(
                self._memory.stored(), self._stored, located, self._samples, lend, self.by_block.names
            )
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
        if self._samples is None:
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

    def __init__(self, chunk: ChunkMemory, memory: RowMemory, first: int, allowed_bytes: float) -> None:
        self._chunk, self._memory, self._first, self._left = chunk, memory, first, allowed_bytes
        self._made_bytes = chunk.by_block.row_bytes  # that decoding will add to each row
        self._gate = _Gate()
        self.added = self.read_bytes = self.needs_bytes = 0
        self.block: list[pa.Table] = []

    def is_wanted(self) -> bool:
        """Whether the chunk was not dropped."""
        return not self._chunk.is_dropped

    def prepare(self, number: int, table: pa.Table, places: Int64Array | None) -> tuple[int, Placed]:
        """Copies rows to their lines, see `RowMemory.place`; `number` counts from the first row of the load."""
        with self._gate.enter() as is_open:
            if not is_open:
                return 0, Placed(None, frozenset(), 0)  # nobody takes them
            placed = self._memory.place(self._first + number, table, places)
            return self._size_of(table, places) if placed.table is None else self._size_of(placed.table), placed

    def _size_of(self, table: pa.Table, places: Int64Array | None = None) -> int:
        rows = table.num_rows if places is None else len(places)
        return self._memory.size_of(table, places) + rows * self._made_bytes

    def add(self, made: tuple[int, Placed]) -> bool:
        """Adds the next rows, as many as fit; returns whether more may come."""
        nbytes, placed = made
        self.read_bytes += nbytes - placed.rows * self._made_bytes
        if nbytes > self._left:
            nbytes, placed = self._fitting(nbytes, placed)
        if placed.rows and placed.table is not None and (apart := self._chunk.by_block.names):
            self.block.append(placed.table.select([*apart, ROW_OFFSET]))
            placed = placed._replace(table=placed.table.drop_columns(apart))
        if placed.rows:
            self._chunk.add(self._first + self.added, placed, nbytes)
        self.added += placed.rows
        self._left -= nbytes
        return self.is_wanted() and not self.needs_bytes

    def _fitting(self, nbytes: int, placed: Placed) -> tuple[int, Placed]:
        """Returns the first rows that fit, with their bytes."""
        table = placed.table
        if table is None:  # all rows have one size
            row_bytes = nbytes // placed.rows
            rows = int(self._left // row_bytes)
            self.needs_bytes = row_bytes
            return rows * row_bytes, placed._replace(rows=rows)
        rows = _fitting_rows(table, self._left, self._made_bytes)
        if rows < placed.rows:
            self.needs_bytes = self._size_of(table.slice(rows, 1))
        table = table.slice(0, rows)
        return self._size_of(table), placed._replace(table=table, rows=rows)

    def end(self) -> None:
        """Lets no late read write to the memory any more."""
        self._gate.close()


def _fitting_rows(table: pa.Table, nbytes: float, made_bytes: int) -> int:
    """Returns how many of the first rows of a table, each with `made_bytes` more, have up to `nbytes` together."""
    low, high = 0, table.num_rows
    while low < high:
        middle = (low + high + 1) // 2
        if table.slice(0, middle).nbytes + middle * made_bytes <= nbytes:
            low = middle
        else:
            high = middle - 1
    return low


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
