"""The account of bytes: what rows are expected to cost, and how many of them readers may hold and may be in flight."""

import math

from raylance.observe import Receipt
from raylance.planning.pace import Pace
from raylance.planning.plan import WorkItem, fitting_rows

# An item of any size costs worker, helpers and Ray together about 13 ms of CPU, for two calls and five objects. At
# 96 MiB, about 450 decoded images, that is at most a thirtieth of the time to decode them.
MAX_ITEM_BYTES = 96 << 20
MAX_PLAIN_BYTES = 64 << 20  # if nothing is decoded: then larger items do not cause waits
# Raw rows reserve this multiple of their estimate, and may have as many bytes. So items in flight stay within the
# limit, and few have to be cut although sizes vary.
_MARGIN = 1.5
_LEAST_BYTES = 64 << 10  # any item may have these bytes; smaller sizes do not matter
_CUT_FROM = 2  # an item is cut if it reserves more than this multiple of the intended bytes
_ROUND_UP = 1.001  # so that a division gives at least as many rows again
_FADE = 0.9  # factor for each item: the estimate rises at once and falls slowly
_BLOCK_BYTES = 32 << 20  # most bytes of a block; enough for Lance to read and decode in parallel
_BLOCKS = 16  # least number of blocks in the limit, so that a block larger than estimated exceeds it only a little
_EVEN_BLOCK_BYTES = 64 << 20  # the same for rows of one size: each call costs a trainer 1 ms of CPU through Ray


class Account:
    """Estimates the bytes of rows, and holds the two limits, over all passes of a loader.

    Attributes:
        inflight_bytes: Most bytes of items in flight.
        reader_bytes: Most bytes of the rows that one reader holds.
        is_even: Whether all rows that were loaded last have one size, so that a block never exceeds its estimate.
    """

    def __init__(
        self,
        *,
        raw_bytes: float,
        decoded_bytes: float,
        inflight_bytes: int,
        reader_bytes: int,
        loaded_bytes: float | None = None,
        rows_each: float = 1.0,
        items: int = 1,
    ) -> None:
        """Begins with an estimate of a sample's bytes as read, of the bytes that decoding adds, and of a stored row's
        bytes, if samples are not rows, and of their number for each sample. `items` is the intended number of items in
        flight.
        """
        self.inflight_bytes, self.reader_bytes, self.is_even = inflight_bytes, reader_bytes, False
        # At first; and of the rows that were loaded last.
        self._likely_bytes = self._loaded_bytes = max(raw_bytes if loaded_bytes is None else loaded_bytes, 1)
        # Stored rows for each sample of a chunk of the plan, 0 while unknown; and of a small part of one, as few
        # samples share less.
        self._rows_each, self._part_rows_each, self._likely_rows_each = 0.0, rows_each, rows_each
        self._most_samples = 0.0  # samples of the largest chunk of the plan; smaller ones lower it a little each
        self._raw_bytes, self._decoded_bytes = raw_bytes, decoded_bytes
        self.set_items(items)

    def set_items(self, items: int, step_rows: int = 1) -> None:
        """Sets the intended number of items in flight, and the rows of a step."""
        most = MAX_ITEM_BYTES if self._decoded_bytes else MAX_PLAIN_BYTES
        self._item_bytes = min(most, self.inflight_bytes / items)
        step_bytes = _ROUND_UP * self.reserved_bytes(step_rows)
        if not self._decoded_bytes and 2 * step_bytes <= self.inflight_bytes:
            self._item_bytes = max(self._item_bytes, step_bytes)  # the items of a step would be copied once more

    # Items. A row's estimate rises at once to an item's mean, and falls slowly.

    def item_rows(self) -> int:
        """Returns the intended number of rows in an item."""
        return max(1, int(self._item_bytes / max(self.reserved_bytes(1), 1)))

    def reserved_bytes(self, rows: int) -> float:
        """Returns the bytes that rows reserve while they are in flight."""
        return rows * (self._raw_bytes * _MARGIN + self._decoded_bytes)

    def allowed_bytes(self, rows: int) -> float:
        """Returns the most bytes that this number of raw rows may have; an item with more is cut."""
        return max(_LEAST_BYTES, rows * self._raw_bytes * _MARGIN)

    def parts(self, item: WorkItem) -> int:
        """Returns the number of parts into which to cut an item by the current estimate; 1 keeps the item whole."""
        parts = self.reserved_bytes(item.rows) / self._item_bytes
        return math.ceil(parts) if parts > _CUT_FROM and item.rows > 1 else 1

    def too_large(self, item: WorkItem, raw_bytes: int) -> int:
        """Learns from an item that has more bytes than allowed; returns the number of parts into which to cut it."""
        self._raw_bytes = max(self._raw_bytes, raw_bytes / item.rows)
        return max(2, math.ceil(raw_bytes / self._item_bytes)) if item.rows > 1 else 1

    def learn(self, item: WorkItem, receipts: list[Receipt]) -> None:
        """Learns the bytes of rows from the receipts of a finished item."""
        if item.rows:
            nbytes = sum(receipt.nbytes for receipt in receipts)
            raw_bytes = sum(receipt.raw_bytes for receipt in receipts)
            self._raw_bytes = max(self._raw_bytes * _FADE, raw_bytes / item.rows)
            self._decoded_bytes = max(self._decoded_bytes * _FADE, (nbytes - raw_bytes) / item.rows)

    # Chunks.

    def chunk_rows(self, samples: int, whole: int | None = None) -> int:
        """Returns how many samples to load together, see `fitting_rows`: of a chunk of the plan, or of a part of one
        with `whole` samples, of which others are loaded by themselves.
        """
        whole = samples if whole is None else whole
        is_part, rows_each = 2 * samples < whole, self._rows_each or self._likely_rows_each
        if is_part:
            fitting = fitting_rows(whole, self._loaded_bytes * rows_each, self.reader_bytes)
            if self._rows_each and fitting == whole:
                return samples  # a part has no more stored rows than all
            rows_each = max(rows_each, self._part_rows_each)
        return fitting_rows(samples, self._loaded_bytes * rows_each, self.reader_bytes)

    def pace(self) -> Pace:
        """Returns the pace at which to load a chunk."""
        row_bytes, least = max(self._loaded_bytes, self._likely_bytes), self._likely_bytes
        if self.is_even:  # the estimate is exact, so the first block can be large
            row_bytes = self._loaded_bytes
            return Pace(_EVEN_BLOCK_BYTES, row_bytes, limit_rows=1 << 40, least_bytes=row_bytes)
        return Pace(max(1, min(_BLOCK_BYTES, self.reader_bytes // _BLOCKS)), row_bytes, least_bytes=least)

    def learn_rows(self, samples: int, rows: int, whole: int | None = None) -> None:
        """Learns how many stored rows a chunk of the plan has for its samples, which may have many rows each, or share
        them; or a part of one with `whole` samples. A chunk that is much smaller than others, as the last one of an
        epoch, says nothing of those.
        """
        whole = samples if whole is None else whole
        self._most_samples = max(whole, self._most_samples * _FADE)
        if 2 * samples < whole:
            self._part_rows_each = rows / samples
        elif 2 * samples > self._most_samples:
            self._rows_each = rows / samples

    def learn_even(self, row_bytes: float) -> None:
        """Learns the bytes of each row, if all have one size."""
        self._loaded_bytes = row_bytes

    def learn_chunk(self, rows: int, nbytes: int) -> None:
        """Learns the mean bytes of a row from a chunk that is loaded. The mean rises at once and falls slowly: a chunk
        that is too small costs some speed, and one that is too large is loaded again in parts.
        """
        self._loaded_bytes = nbytes / rows if self.is_even else max(self._loaded_bytes / 2, nbytes / rows)
