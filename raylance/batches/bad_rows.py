"""The count of masked rows that one rank was handed, and the error for too many of them."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from raylance.columns import TRANSFORM, VALID, dataset_of, describe_rows, split_offsets
from raylance.errors import NULL, BadRowError, filter_of_nulls
from raylance.orders.permutation import BoolArray, Int64Array

if TYPE_CHECKING:
    from raylance.opened import ReadSpec  # loads Lance

_LEAST_ROWS = 1000  # a fraction of fewer rows is not significant
_NAMED = 5  # masked rows named in the error


def rows_with_bad_values(table: pa.Table, names: Iterable[str]) -> BoolArray:
    """Returns which rows have a list with a bad value, bool (n,). `names` are columns of lists, of whose values the
    columns `<name>_valid` say which are good, if bad values are masked.
    """
    is_bad = np.zeros(table.num_rows, dtype=np.bool_)
    for marks in (table[name + VALID].combine_chunks() for name in names if name + VALID in table.column_names):
        rows = np.repeat(np.arange(len(marks)), np.diff(marks.offsets.to_numpy()))
        is_bad[rows[~marks.flatten().to_numpy(zero_copy_only=False)]] = True
    return is_bad


class MaskedRows:
    """Counts the masked rows of one rank, over all its passes."""

    def __init__(self, read_spec: "ReadSpec") -> None:
        decoding, self._source = read_spec.decoding, read_spec.source
        self._most = decoding.max_bad_rows if decoding else None
        self._datasets = decoding.datasets if decoding else ()
        self._rows = self._masked = 0
        self._different: set[int] = set()  # offsets of masked rows, if the limit is a number of rows
        self._first: dict[int, tuple[str, str]] = {}  # column and reason of the first masked rows, by offset

    def add(self, rows: int, masked: Int64Array, reason_of: Callable[[int], tuple[str, str] | None]) -> None:
        """Counts rows that are about to be handed out. `masked` has the offsets of the masked ones, joined as by
        `join_offsets`. `reason_of` returns the column and the reason of a masked row; None if they were not kept.

        Raises:
            BadRowError: If there are more masked rows than `max_bad_rows`; the error names the first masked rows.
        """
        self._rows += rows
        self._masked += len(masked)
        if len(masked) and len(self._first) < _NAMED:
            for offset in masked.tolist()[:_NAMED]:
                self._first.setdefault(offset, self._reason(offset, reason_of))
        if isinstance(self._most, float):
            if self._rows >= _LEAST_ROWS and self._masked > self._most * self._rows:
                raise self._too_many(f"{self._masked:,} of {self._rows:,} rows")
        elif self._most is not None:
            self._different.update(masked.tolist())
            if len(self._different) > self._most:
                raise self._too_many(f"{len(self._different):,} different rows")

    def _reason(self, offset: int, reason_of: Callable[[int], tuple[str, str] | None]) -> tuple[str, str]:
        """Returns the column and the reason of a masked sample, which may be those of another one of its rows."""
        samples = self._source.load_samples()
        others = [] if samples is None else samples.stored(np.array([offset])).tolist()
        known = (found for row in [offset, *others] if (found := reason_of(row)) is not None)
        return next(known, ("a column", "for a reason that was not kept"))

    def _too_many(self, found: str) -> BadRowError:
        named = [
            f"{column} of {describe_rows(np.array([offset]), self._datasets)} ({why})"
            for offset, (column, why) in self._first.items()
        ]
        offset, (column, why) = next(iter(self._first.items()))
        return BadRowError(
            None if column == TRANSFORM else column,
            split_offsets(offset)[1],
            why,
            dataset_of(offset, self._datasets),
            f"{found} that this rank was handed since its start cannot be decoded, more than "
            f"max_bad_rows={self._most!r} allows. The epoch stops here: masks are for damaged rows. This number "
            "rather points to the decoder, the transform or the settings. The first: "
            f"{'; '.join(named[:_NAMED])}. {self._fix()}",
        )

    def _fix(self) -> str:
        nulls = {column for column, why in self._first.values() if why == NULL}
        if not nulls:
            return "Inspect these; if they are damaged, raise max_bad_rows (a count, or a fraction; None for no limit)."
        return (
            f"Leave rows without a value out, {filter_of_nulls(min(nulls))}; or, if they belong to the data, set "
            "max_bad_rows=None, and use _valid, which is False for them."
        )
