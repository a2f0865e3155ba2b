"""Owns a reader's work, in any process or thread; never decides which chunk is read next, or by which reader.

All work is idempotent: plan and item determine the result, so another reader can do the work again if a helper dies.
"""

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from raylance.columns import DRAW, ROW_OFFSET
from raylance.decode.rows import OpenDecoding
from raylance.dispatch.messages import Read
from raylance.observe import Receipt, clock
from raylance.planning.plan import Chunk, Plan
from raylance.read_spec import ReadSpec
from raylance.settings import Options
from raylance.source.memory import TableSize
from raylance.source.readahead import ReadAhead, TooLargeError


class RankReader:
    """Reads the rows of one rank ahead, and gathers the rank's items from them."""

    def __init__(self, read_spec: ReadSpec, options: Options, *, own_memory: bool = False) -> None:
        """Does not open the dataset yet. Without `own_memory`, results may be views of memory that the next call
        overwrites or returns again, so copy results before the next call (sending them through Ray copies them).
        """
        self._decoding, self._own_memory = read_spec.in_helpers, own_memory
        self._opened = OpenDecoding(self._decoding) if self._decoding else None
        self._ahead = ReadAhead(
            read_spec.source,
            options.max_window_bytes,
            options.read_timeout_s,
            lends=own_memory,
            at_once=self._decoding is None,  # if rows are decoded, decoding needs the cores when a window ends
        )
        self._size = TableSize()
        self._plans: dict[str, Plan] = {}
        threads = 1 if options.decode_threads == "auto" else options.decode_threads
        self._threads = ThreadPoolExecutor(threads) if self._decoding else None

    def install(self, key: str, plan: Plan) -> None:
        """Stores a plan under a key, which later calls name; keeps the last two plans."""
        while len(self._plans) > 1:
            self._plans.pop(next(iter(self._plans)))
        self._plans[key] = plan

    def begin(self, key: str, dp_rank: int, chunk: Chunk) -> None:
        """Begins to read a chunk before its rows are needed; the first `read` of the chunk raises its errors."""
        self._ahead.begin(key, self._plans[key], dp_rank, chunk)

    def read(self, key: str, command: Read) -> tuple[pa.Table, pa.Table, Receipt]:
        """Reads an item of the plan with this key.

        Returns the columns that need no decoding and `_rowoffset`, in the order of delivery; the decoded columns and
        `_valid`, or, if a decoder follows, the encoded columns and `_rowoffset`; and the receipt. If nothing is
        decoded, the second table is empty. If the raw rows have more bytes than allowed, returns no rows; the receipt
        has the number of bytes.
        """
        begin, item, plan, decoding = clock.now(), command.item, self._plans[key], self._decoding
        receipt = Receipt()
        try:
            table = self._ahead.gather(key, plan, item, command.allowed_bytes, command.following)
        except TooLargeError as large:
            table, receipt.too_large_bytes = self._ahead.empty_table(), large.nbytes
        receipt.nbytes = receipt.raw_bytes = self._size.of(table)
        receipt.read_s, receipt.held_bytes = clock.now() - begin, self._ahead.peak_bytes
        receipt.read_bytes, receipt.storage_s = self._ahead.read_since()
        receipt.window_bytes = self._ahead.held_bytes
        if decoding is None or self._opened is None:
            return table, table.select([]), receipt
        if decoding.transform is None:
            encoded, plain = table.select([*decoding.columns, ROW_OFFSET]), table.drop_columns(decoding.columns)
        else:
            encoded, plain = table, table.select([ROW_OFFSET])
        if receipt.too_large_bytes:
            return plain, encoded, receipt
        if plan.order.repeats:
            encoded = encoded.append_column(DRAW, pa.array(plan.item_positions(item)))
        if not command.decodes:
            return plain, encoded, receipt
        decoded, done = self._opened.apply(
            encoded, item.epoch, self._threads, own_memory=self._own_memory, given_up=command.given_up
        )
        receipt.decode_s, receipt.bad_rows = done.decode_s, done.bad_rows
        receipt.fallback_rows, receipt.unturned_rows = done.fallback_rows, done.unturned_rows
        receipt.nbytes = plain.nbytes + done.nbytes
        return plain, decoded, receipt

    def close(self) -> None:
        """Ends reading ahead. The decoding threads end when this object is garbage-collected."""
        self._ahead.close()
