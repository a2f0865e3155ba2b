"""Owns the estimate of the bytes of items, learned from finished items; never knows where items are."""

import math

from raylance.observe import Receipt
from raylance.planning.plan import WorkItem

# An item of any size costs worker, helpers and Ray together about 10 ms of CPU, for two calls and two objects. At
# 48 MiB, about 200 decoded images, that is at most a twentieth of the time to decode them.
MAX_ITEM_BYTES = 48 << 20
MAX_PLAIN_BYTES = 64 << 20  # if nothing is decoded: then larger items do not cause waits
# Raw rows reserve this multiple of their estimate, and may have as many bytes. So items in flight stay within the
# limit, and few have to be cut although sizes vary.
_MARGIN = 1.5
_LEAST_BYTES = 64 << 10  # any item may have these bytes; smaller sizes do not matter
_CUT_FROM = 2  # an item is cut if it reserves more than this multiple of the intended bytes
_FADE = 0.9  # factor for each item: the estimate rises at once and falls slowly


class Sizes:
    """Estimates the bytes of rows in flight. A row's estimate rises at once to an item's mean, and falls slowly."""

    def __init__(self, *, raw_bytes: float, decoded_bytes: float, limit_bytes: int, items: int) -> None:
        """Begins with an estimate of a row's bytes as read, and of the bytes that decoding adds. All items in flight
        together may have `limit_bytes`; `items` is their intended number.
        """
        self.limit_bytes = limit_bytes
        self._raw_bytes, self._decoded_bytes = raw_bytes, decoded_bytes
        self._item_bytes = min(MAX_ITEM_BYTES if decoded_bytes else MAX_PLAIN_BYTES, limit_bytes / items)

    def item_rows(self) -> int:
        """Returns the intended number of rows in an item."""
        return max(1, int(self._item_bytes / max(self.reserved_bytes(1), 1)))

    def reserved_bytes(self, rows: int) -> float:
        """Returns the bytes that rows reserve while they are in flight."""
        return rows * (self._raw_bytes * _MARGIN + self._decoded_bytes)

    def allowed(self, rows: int) -> float:
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
