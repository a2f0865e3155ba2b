"""Owns the count of rows that one rank was handed as zeros, and the error where they are too many; never masks a row,
never decides what a bad one is.
"""

import numpy as np

from raylance.columns import COMPONENT_SHIFT, OFFSET_MASK, TRANSFORM, describe_rows
from raylance.errors import BadRowError
from raylance.observe import Stats
from raylance.orders.permutation import Int64Array
from raylance.settings import ReadSpec

_LEAST_ROWS = 1000  # fewer say nothing of a fraction
_NAMED = 5


class MaskedRows:
    """Counts the masked rows of one rank, over all its passes."""

    def __init__(self, feed: ReadSpec) -> None:
        """Has counted nothing."""
        self._most = feed.decoding.max_bad_rows if feed.decoding else None
        self._datasets = feed.decoding.datasets if feed.decoding else ()
        self._rows = self._masked = 0
        self._different: set[int] = set()  # rows, where a count of them is the limit
        self._first: dict[int, tuple[str, str]] = {}  # the first ones by offset: column, why

    def add(self, rows: int, masked: Int64Array, stats: Stats) -> None:
        """Counts rows that are about to be handed out.

        Args:
            rows: How many.
            masked: Offsets of those that are masked, with component bits.
            stats: Knows why the first ones were masked.

        Raises:
            BadRowError: If there are now more than `max_bad_rows` allows; it names the first of them.
        """
        self._rows += rows
        self._masked += len(masked)
        if len(masked) and len(self._first) < _NAMED:
            why = {offset: (column, reason) for offset, column, reason in stats.bad_rows}
            for offset in masked.tolist()[:_NAMED]:
                self._first.setdefault(offset, why.get(offset, ("a column", "for a reason that was not kept")))
        if isinstance(self._most, float):
            if self._rows >= _LEAST_ROWS and self._masked > self._most * self._rows:
                self._refuse(f"{self._masked:,} of {self._rows:,} rows")
        elif self._most is not None:
            self._different.update(masked.tolist())
            if len(self._different) > self._most:
                self._refuse(f"{len(self._different):,} different rows")

    def _refuse(self, found: str) -> None:
        told = [
            f"{column} of {describe_rows(np.array([offset]), self._datasets)} ({why})"
            for offset, (column, why) in self._first.items()
        ]
        offset, (column, why) = next(iter(self._first.items()))
        raise BadRowError(
            None if column == TRANSFORM else column,
            offset & OFFSET_MASK,
            why,
            next(iter(self._datasets[offset >> COMPONENT_SHIFT :]), None),
            f"{found} that this rank was handed since its start cannot be decoded, more than "
            f"max_bad_rows={self._most!r} allows. The epoch stops here: a mask is for damaged rows, and so many look "
            "like a decoder, a transform or settings that do not fit good ones. The first: "
            f"{'; '.join(told[:_NAMED])}. Look at these; if they are damaged indeed, raise max_bad_rows (a count, or a "
            "fraction; None for no limit).",
        )
