"""Owns the estimate of the bytes of items, learned from those that came; never knows where they are."""

import math

from raylance.observe import Receipt
from raylance.planning.plan import WorkItem

# An item costs its worker, its helpers and Ray some 10 ms of CPU together whatever its size, for two calls and two
# objects. At 48 MiB, some 200 decoded images, that is a twentieth of decoding them at the most.
MAX_ITEM_BYTES = 48 << 20
MAX_PLAIN_BYTES = 64 << 20  # without decoding, larger items cost no waiting
# Raw rows reserve more than their estimate, and may have that much: items in flight stay within the limit, and few have
# to be cut although sizes vary.
_MARGIN = 1.5
_LEAST_BYTES = 64 << 10  # any item may have: below it, sizes say nothing
_CUT_FROM = 2  # times the bytes that items should have: less is left as it is
_FADE = 0.9  # an item: up at once, down slowly


class Sizes:
    """Bytes of rows in flight: of the larger ones, as far as they were seen lately."""

    def __init__(self, *, raw_bytes: float, decoded_bytes: float, limit_bytes: int, items: int) -> None:
        """Begins with an estimate: of a row as it is read, and of what decoding adds. All items in flight may have
        `limit_bytes`, and there are to be so many items.
        """
        self.limit_bytes = limit_bytes
        self._raw_bytes, self._decoded_bytes = raw_bytes, decoded_bytes
        self._item_bytes = min(MAX_ITEM_BYTES if decoded_bytes else MAX_PLAIN_BYTES, limit_bytes / items)

    def item_rows(self) -> int:
        """Rows to aim at in an item."""
        return max(1, int(self._item_bytes / max(self.reserved_bytes(1), 1)))

    def reserved_bytes(self, rows: int) -> float:
        """Bytes that rows reserve while they are in flight."""
        return rows * (self._raw_bytes * _MARGIN + self._decoded_bytes)

    def allowed(self, rows: int) -> float:
        """Bytes that raw rows may have together before they are cut."""
        return max(_LEAST_BYTES, rows * self._raw_bytes * _MARGIN)

    def parts(self, item: WorkItem) -> int:
        """Into how many items an item should be cut, now that more is known; 1 leaves it."""
        parts = self.reserved_bytes(item.rows) / self._item_bytes
        return math.ceil(parts) if parts > _CUT_FROM and item.rows > 1 else 1

    def too_large(self, item: WorkItem, raw_bytes: int) -> int:
        """Learns from an item that has more bytes than it was allowed; returns the parts that it should be cut into."""
        self._raw_bytes = max(self._raw_bytes, raw_bytes / item.rows)
        return max(2, math.ceil(raw_bytes / self._item_bytes)) if item.rows > 1 else 1

    def learn(self, item: WorkItem, receipts: list[Receipt]) -> None:
        """Learns from an item that is done."""
        if item.rows:
            nbytes = sum(receipt.nbytes for receipt in receipts)
            raw_bytes = sum(receipt.raw_bytes for receipt in receipts)
            self._raw_bytes = max(self._raw_bytes * _FADE, raw_bytes / item.rows)
            self._decoded_bytes = max(self._decoded_bytes * _FADE, (nbytes - raw_bytes) / item.rows)
