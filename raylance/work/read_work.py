"""The work of a reader: loading chunks into its memory, and gathering items from them."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from raylance.columns import DRAW, ROW_OFFSET, split_offsets
from raylance.decode.block_decoding import HelperDecoding, with_unneeded
from raylance.decode.sample_reading import read_samples
from raylance.dispatch.messages import Gather, Load, Loaded
from raylance.errors import DatasetError, HelperError
from raylance.memory.lending import Bytes, Lender
from raylance.observe import Receipt, clock
from raylance.opened import ReadSpec
from raylance.orders.permutation import BoolArray
from raylance.planning.plan import WorkItem
from raylance.planning.planned_rows import PlannedRows
from raylance.samples.table import SampleTable
from raylance.settings import Options
from raylance.source.limits import Calls
from raylance.source.reader import RowReader
from raylance.work.blocks import BlockColumns
from raylance.work.chunk_memory import ChunkLoad, ChunkMemory

# Shares of `reader_bytes` that are lent for chunks, most of which have half of it, rounded up; and for items. A caller
# that gets views may still hold the chunk before.
LENT = 2 * Fraction(9, 16), Fraction(1, 8)
LENT_AS_VIEWS = 3 * Fraction(9, 16), Fraction(1, 2)
_DROPPED = 256  # numbers of dropped chunks that are kept, because a load of one of them may still wait


class ReadWork:
    """Does the calls of one reader. Loads may run in several threads at once; other calls must not overlap."""

    def __init__(
        self,
        read_spec: ReadSpec,
        options: Options,
        *,
        own_memory: bool = False,
        by_block: BlockColumns | None = None,
    ) -> None:
        """Does not open the dataset yet. The columns `by_block` of loaded chunks are not held: loads return them.

        With `own_memory`, the caller keeps results and may write to them; they may be views of a chunk, each of whose
        rows should then be gathered once only. Without it, results may be views of memory that the next call
        overwrites or returns again, so copy results before the next call (sending them through Ray copies them).
        """
        decoding = read_spec.in_helpers
        self._own_memory, self._by_block = own_memory, by_block or BlockColumns()
        self._decoding = decoding and decoding.of_items
        self._opened = HelperDecoding(decoding) if decoding else None
        threads = 1 if options.decode_threads == "auto" else options.decode_threads
        self._threads = Calls(threads, "raylance-decode") if decoding else None
        self._source, self._limit, self._read_timeout_s = (
            read_spec.source,
            options.reader_bytes,
            options.read_timeout_s,
        )
        self._selection, self._samples = self._source.load_selection(), self._source.load_samples()
        of_chunks, of_items = LENT_AS_VIEWS if own_memory else LENT
        self._lender = Lender(int(self._limit * of_chunks))
        self._decoded = Lender(self._lender.most_bytes)  # for what is decoded of chunks
        self._items = Lender(int(self._limit * of_items))  # for gathered rows
        self._chunks: dict[int, tuple[ChunkMemory, int]] = {}  # by number, with the line of the first row
        self._dropped: deque[int] = deque(maxlen=_DROPPED)
        self._opening, self._lock = threading.Lock(), threading.Lock()
        self._rows: RowReader | None = None
        self._busy = _BusyTime()
        self._peak_bytes, self._is_closed = 0, False

    # Loading.

    def load(self, planned: PlannedRows, load: Load) -> tuple[Loaded, tuple[pa.Table, ...]]:
        """Loads a block of a chunk; see the message.

        Returns the answer, and the columns of the rows that come by block: those that are sent, if any, and those to
        decode, if any, as `BlockDecoding.apply` takes them.

        Raises:
            DatasetError: If rows cannot be read.
        """
        for number in load.drops:
            self.drop(number)
        with self._opening:
            chunk = self._open(planned, load)
        receipt, needs_bytes, added = Receipt(), 0, 0
        tables: tuple[pa.Table, ...] = (pa.table({}),) * self._by_block.tables
        if chunk is not None and load.first < chunk.stored_rows:  # a chunk may have fewer rows than were asked for
            block = self._read(chunk, load, receipt)
            needs_bytes, added = block.needs_bytes, block.added
            if block.block:
                unneeded = chunk.unneeded(load.first, added, list(self._by_block.decoded))
                tables = self._split(pa.concat_tables(block.block), unneeded)
            if needs_bytes and chunk.samples == 1 and chunk.nbytes + needs_bytes > self._limit:
                anchor = self._selection.offsets(planned.of_chunk(load.chunk, load.dp_rank))
                raise self._too_large(chunk, int(anchor[0]), needs_bytes)
        return self._loaded(load, receipt, chunk, needs_bytes, added), tables

    def _split(self, block: pa.Table, unneeded: Mapping[str, BoolArray]) -> tuple[pa.Table, ...]:
        """Returns the columns of a block that are sent, if any, and those to decode, if any."""
        columns, tables = self._by_block, list[pa.Table]()
        if columns.sent:
            tables.append(block.select(columns.sent))
        if columns.decoded:
            tables.append(with_unneeded(block.select([*columns.decoded, ROW_OFFSET]), unneeded))
        return tuple(tables)

    def _read(self, chunk: ChunkMemory, load: Load, receipt: Receipt) -> ChunkLoad:
        """Reads stored rows of a chunk into its memory."""
        block = chunk.load(load.first, load.rows, load.allowed_bytes)
        self._busy.begin()
        try:
            reader = self._open_rows.widened(load.margin)
            reader.read_pieces(chunk.stored(load.first, load.rows), block.prepare, block.add, block.is_wanted)
        finally:
            block.end()
            receipt.storage_s = self._busy.end()
        receipt.read_bytes = block.read_bytes
        return block

    def _loaded(self, load: Load, receipt: Receipt, chunk: ChunkMemory | None, needs_bytes: int, added: int) -> Loaded:
        self._note_held(receipt)
        rows, stored, nbytes, is_even = 0, 0, 0, False
        if chunk is not None:
            rows, stored, nbytes, is_even = chunk.loaded_rows, chunk.stored_rows, chunk.nbytes, chunk.is_even
        return Loaded(load.call, receipt, rows, stored, nbytes, needs_bytes, is_even, added)

    def _open(self, planned: PlannedRows, load: Load) -> ChunkMemory | None:
        """Returns the memory of a chunk, which its first load makes; None if nobody waits for the chunk any more."""
        found = self._chunks.get(load.number)
        if found is None and load.number not in self._dropped:
            anchors = self._selection.offsets(planned.of_chunk(load.chunk, load.dp_rank))
            first = planned.plan.first_line(load.chunk, load.dp_rank)
            # Half of the limit, so that two chunks fit.
            most_bytes, lend = self._limit // 2, self._lender.lend
            found = ChunkMemory(anchors, self._samples_of(load.chunk.epoch), most_bytes, lend, self._by_block), first
            with self._lock:
                if self._is_closed or load.number in self._dropped:  # meanwhile
                    return None
                self._chunks[load.number] = found
        return None if found is None else found[0]

    def drop(self, number: int) -> None:
        """Frees the memory of a chunk, when its last view is gone."""
        with self._lock:
            self._dropped.append(number)
            found = self._chunks.pop(number, None)
        if found is not None:
            found[0].is_dropped = True

    @property
    def _open_rows(self) -> RowReader:
        with self._lock:
            self._rows = self._rows or self._source.open_reader(self._read_timeout_s)
            return self._rows

    def _samples_of(self, epoch: int) -> SampleTable | None:
        return None if self._samples is None else self._samples.of_epoch(epoch)

    def _note_held(self, receipt: Receipt) -> None:
        with self._lock:
            held = sum(chunk.nbytes for chunk, _ in self._chunks.values())
            self._peak_bytes = max(self._peak_bytes, held)
        receipt.reader_bytes, receipt.held_bytes = held, self._peak_bytes

    # Gathering.

    def gather(
        self, planned: PlannedRows, command: Gather, fill_in: Callable[[pa.Table], pa.Table] | None = None
    ) -> tuple[tuple[pa.Table, ...], Receipt]:
        """Gathers an item; see the message. `fill_in` gives the samples that are to be decoded the columns that come by
        block; all others have the numbers of their rows.

        Returns tables in the order of delivery, and the receipt. The first table has the columns that need no decoding,
        and `_rowoffset`. If the loader decodes in helpers, a second one has the decoded columns and `_valid`, or, if a
        decoder follows, the encoded columns and `_rowoffset`. If the raw rows have more bytes than allowed, the tables
        have no rows; the receipt has the number of bytes.

        Raises:
            DatasetError: If rows cannot be read, or one row has more bytes than a reader may hold.
        """
        begin, item, plan, decoding = clock.now(), command.item, planned.plan, self._decoding
        receipt = Receipt()
        if not item.rows:
            table = self._empty_table(item.epoch)
        else:
            table = self._from_chunk(planned, item, command.number, command.allowed_bytes, receipt)
        if decoding is None or self._opened is None:
            receipt.read_s = clock.now() - begin
            self._note_held(receipt)
            return (table,), receipt
        if decoding.transform is None:
            encoded, plain = table.select([*decoding.columns, ROW_OFFSET]), table.drop_columns(decoding.columns)
        else:
            encoded, plain = table, table.select([ROW_OFFSET])
        if fill_in is not None and encoded.num_rows:
            encoded = fill_in(encoded)
        receipt.read_s = clock.now() - begin
        self._note_held(receipt)
        if receipt.too_large_bytes:
            return (plain, encoded), receipt
        if plan.order.repeats:
            encoded = encoded.append_column(DRAW, pa.array(plan.item_positions(item)))
        if not command.decodes:
            return (plain, encoded), receipt
        decoded, done = self._opened.decode(
            encoded, item.epoch, self._threads, own_memory=self._own_memory, given_up=command.given_up
        )
        receipt.decode_s, receipt.bad_rows = done.decode_s, done.bad_rows
        receipt.decode_cpu_s, receipt.transform_s = done.decode_cpu_s, done.transform_s
        receipt.fallback_rows, receipt.unturned_rows = done.fallback_rows, done.unturned_rows
        receipt.nbytes = plain.nbytes + done.nbytes
        return (plain, decoded), receipt

    def decode_block(self, block: pa.Table, **how: Any) -> tuple[pa.Table, Receipt]:
        """Decodes rows of a block that a load has returned; see `BlockDecoding.apply`."""
        if self._opened is None:
            raise HelperError("nothing is decoded. This is a defect of raylance: please report it.")
        return self._opened.decode_block(block, self._threads, **how)

    def lend(self, nbytes: int) -> Bytes:
        """Returns memory for the rows of an item; see `Lender.lend`."""
        return self._items.lend(nbytes)

    def lend_for_chunk(self, nbytes: int) -> Bytes:
        """Returns memory for what is decoded of a chunk; see `Lender.lend`."""
        return self._decoded.lend(nbytes)

    def _from_chunk(
        self, planned: PlannedRows, item: WorkItem, number: int | None, allowed_bytes: int, receipt: Receipt
    ) -> pa.Table:
        with self._lock:
            found = None if number is None else self._chunks.get(number)
        if found is None:
            raise HelperError(
                f"chunk {number} of an item is not loaded. This is a defect of raylance: please report it."
            )
        chunk, first = found
        low = planned.plan.item_line(item) - first
        table = chunk.gather(low, low + item.rows, self._items.lend, own=self._own_memory and self._is_kept_long())
        return self._checked(chunk, table, allowed_bytes, receipt)

    def _checked(self, chunk: ChunkMemory, table: pa.Table, allowed_bytes: int, receipt: Receipt) -> pa.Table:
        """Returns the rows of an item; none if they have more bytes than allowed."""
        nbytes = chunk.size_of(table)
        if nbytes > allowed_bytes:
            receipt.too_large_bytes = nbytes
            return table.slice(0, 0)
        receipt.nbytes = receipt.raw_bytes = nbytes
        return table

    def _too_large(self, chunk: ChunkMemory, anchor: int, needs_bytes: int) -> DatasetError:
        """Returns the error of a sample that does not fit, or of its row that does not. Some of its rows are loaded;
        the next one has `needs_bytes`.
        """
        what, offset, nbytes = "sample", anchor, chunk.nbytes + needs_bytes
        if needs_bytes > self._limit:
            what, offset, nbytes = "row", int(chunk.stored(chunk.loaded_rows, 1)[0]), needs_bytes
        _, offset = split_offsets(offset)
        as_decoded = ", with what is decoded of it" if self._by_block.row_bytes else ""
        return DatasetError(
            f"the {what} at offset {offset} of {self._source.uri!r}, version {self._source.version}, has {nbytes:,} "
            f"bytes by itself{as_decoded}, reader_bytes allows {self._limit:,}; the epoch stops here, because the "
            "memory of a shard actor is bounded. Raise reader_bytes, or leave the row out with filter=, and out of "
            "Windows with neighbours='selected'."
        )

    def _empty_table(self, epoch: int) -> pa.Table:
        table, _ = read_samples(self._open_rows, self._samples_of(epoch), np.empty(0, dtype=np.int64))
        return table if not self._by_block.decoded else self._by_block.fill_in_none(table)

    def _is_kept_long(self) -> bool:
        """Whether the caller still holds more memory of earlier chunks than one chunk may use. If so, items are copies
        instead of views, so that the caller does not hold even more of it.
        """
        with self._lock:
            held = sum(chunk.capacity_bytes for chunk, _ in self._chunks.values())
        return self._lender.lent_bytes - held > self._limit // 2

    def close(self) -> None:
        """Ends loads soon, begins no other, and waits for no storage that fails. Decoding threads end when this object
        is collected.
        """
        with self._lock:
            self._is_closed = True
            for chunk, _ in self._chunks.values():
                chunk.is_dropped = True
            if self._rows is not None:
                self._rows.close()


class _BusyTime:
    """Measures the time in which at least one of several calls runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running, self._since = 0, 0.0

    def begin(self) -> None:
        """Records that a call begins."""
        with self._lock:
            if not self._running:
                self._since = clock.now()
            self._running += 1

    def end(self) -> float:
        """Records that a call ends; returns the seconds that no earlier call has returned."""
        with self._lock:
            self._running -= 1
            now = clock.now()
            passed, self._since = now - self._since, now
            return passed
