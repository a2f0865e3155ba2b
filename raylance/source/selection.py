"""The row offsets that filter and split select."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import lance
import numpy as np
import pyarrow as pa

from raylance.columns import ROW_OFFSET
from raylance.environment.shared import Shared
from raylance.errors import DatasetError
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.source.filters import check_filter, short_text
from raylance.source.lance_errors import LANCE_ERRORS, failure_of, readable_text
from raylance.source.limits import requests_of
from raylance.source.retrying import patiently
from raylance.source.splits import FractionSplit, Split
from raylance.source.version import Source, warn_once

_SCAN_ROWS = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected rows in storage order, as row offsets of the pinned version.

    The offsets are stored as runs of consecutive ones if that is smaller, else one by one: 8 bytes a row or less.
    Processes read the arrays from Ray's object store without a copy.
    """

    block_ends: ClassVar[None] = None  # see `Selected`, as the next one
    tokens: ClassVar[None] = None
    rows: int  # number of selected rows, N
    fingerprint: str  # hash of the offsets, independent of how they are stored
    starts: Int64Array  # first offset of each run, (runs,); or every offset, (N,), if `ends` is None
    ends: Int64Array | None  # selected rows up to the end of each run, (runs,)

    @classmethod
    def whole(cls, rows: int) -> Self:
        """Builds the selection of all rows of a dataset that has `rows` live rows."""
        return cls.from_runs(np.zeros(min(rows, 1), dtype=np.int64), np.full(min(rows, 1), rows, dtype=np.int64))

    @classmethod
    def from_offsets(cls, batches: Iterable[Int64Array]) -> Self:
        """Builds a selection from int64 offsets, strictly ascending within and across batches."""
        starts, lengths = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for offsets in batches:
            if not len(offsets):
                continue
            first = np.flatnonzero(np.diff(offsets, prepend=offsets[0] - 2) != 1)
            starts.append(offsets[first])
            lengths.append(np.diff(first, append=len(offsets)))
        return cls.from_runs(np.concatenate(starts), np.concatenate(lengths))

    @classmethod
    def from_runs(cls, starts: Int64Array, lengths: Int64Array) -> Self:
        """Builds a selection from runs [start, start + length), ascending; runs that touch are joined."""
        touches = starts[1:] - lengths[:-1] == starts[:-1]
        if touches.any():  # else this would copy arrays that may be the largest of the process
            first = np.flatnonzero(np.r_[True, ~touches])
            starts, lengths = starts[first], np.add.reduceat(lengths, first)
        ends = np.cumsum(lengths, dtype=np.int64)
        rows = int(ends[-1]) if len(ends) else 0
        digest = hashlib.blake2b(digest_size=16)
        for array in (starts, ends):
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        if 2 * len(starts) > rows:  # two numbers for each run take more memory than one for each row
            if len(starts) < rows:
                starts = np.repeat(starts - (ends - lengths), lengths)
                starts += np.arange(rows)
            return cls(rows=rows, fingerprint=digest.hexdigest(), starts=starts, ends=None)
        return cls(rows=rows, fingerprint=digest.hexdigest(), starts=starts, ends=ends)

    def first(self, rows: int) -> Self:
        """Returns the selection of the first rows, or of all if they are fewer."""
        rows = min(rows, self.rows)
        if self.ends is None:
            return self.from_offsets([self.starts[:rows]])
        ends = np.minimum(self.ends, rows)
        lengths = np.diff(ends, prepend=0)
        return self.from_runs(self.starts[lengths > 0], lengths[lengths > 0])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.starts.nbytes + (0 if self.ends is None else self.ends.nbytes)

    def count_before(self, offsets: Int64Array) -> Int64Array:
        """Counts the selected rows before each row offset; int64, of the shape of `offsets`."""
        if self.ends is None or self.rows == 0:
            return np.searchsorted(self.starts, offsets, side="left")
        run = np.searchsorted(self.starts, offsets, side="right") - 1
        first = np.r_[0, self.ends[:-1]]
        within = np.minimum(first[run] + offsets - self.starts[run], self.ends[run])
        return np.asarray(np.where(run < 0, 0, within), dtype=np.int64)

    def has(self, offsets: Int64Array) -> BoolArray:
        """Returns which row offsets are selected; bool, of the shape of `offsets`."""
        return np.asarray(self.count_before(offsets + 1) > self.count_before(offsets))

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Maps selected rows, int64 in [0, N) of any shape, to row offsets, int64 of that shape."""
        if self.ends is None:
            return self.starts[selected]
        if len(self.ends) == 1:
            return np.asarray(self.starts[0] + selected, dtype=np.int64)
        run = np.searchsorted(self.ends, selected, side="right")
        before = np.where(run > 0, self.ends[run - 1], 0)
        return np.asarray(self.starts[run] + selected - before, dtype=np.int64)


Groups = dict[Any, bool]
"""The values that a split divides, and whether each is in the part; not all if there are many."""

_FEW_GROUPS = 1000
_UNEVEN = 0.2  # of the size that was asked for


def select(
    source: Source,
    filter: str | None,
    split: Split | None = None,
    opened: lance.LanceDataset | None = None,
    groups: Groups | None = None,
) -> Selection:
    """Selects the live (not deleted) rows that satisfy a filter and belong to a split; with a scalar index if there is
    one. `opened` is the open dataset; None if it must be opened. `groups` gets what the split divides. Raises
    ConfigError if the filter is not a string, and DatasetError if it is wrong or too deep, the split's column is
    missing, no row is selected, or the storage fails.
    """
    check_filter(filter)
    dataset = source.open() if opened is None else opened
    keys = split.columns if split is not None else []
    missing = sorted(set(keys) - set(dataset.schema.names))
    if missing:
        raise DatasetError(
            f"{split} needs the column {', '.join(missing)}, which {source.uri!r} does not have; nothing was started. "
            f"Its columns are {', '.join(dataset.schema.names)}."
        )
    try:
        # A scan may take minutes until its first rows; its requests to the storage show its progress.
        selection = patiently(
            functools.partial(_scan, dataset, filter, split, groups), functools.partial(requests_of, dataset)
        )
    except LANCE_ERRORS as error:
        raise _not_selected(source, dataset, filter, error) from error
    if selection.rows == 0:
        conditions = " and ".join(short_text(str(condition)) for condition in (filter, split) if condition is not None)
        what = f"has no row with {conditions}" if conditions else "has no live rows"
        raise DatasetError(
            f"{source.uri!r} at version {source.version} {what}; nothing was started. Check filter, split and "
            f"version.{_quotes(filter)}"
        )
    return selection


def _scan(
    dataset: lance.LanceDataset, filter: str | None, split: Split | None, groups: Groups | None = None
) -> Selection:
    if filter is None and split is None:
        return Selection.whole(dataset.count_rows())
    keys = split.columns if split is not None else []
    scanner = dataset.scanner(columns=[*keys, ROW_OFFSET], filter=filter, batch_size=_SCAN_ROWS)

    def keep(batch: pa.RecordBatch) -> Int64Array:
        offsets: Int64Array = batch[ROW_OFFSET].to_numpy(zero_copy_only=False).astype(np.int64)
        if split is None:
            return offsets
        values = batch[keys[0]].to_pylist() if keys else None
        kept = split.keep(offsets, values)
        if groups is not None and values is not None and len(groups) <= _FEW_GROUPS:
            groups.update(zip(values, kept.tolist(), strict=True))
        return offsets[kept]

    return Selection.from_offsets(map(keep, scanner.to_batches()))


def _not_selected(source: Source, dataset: lance.LanceDataset, filter: str | None, error: Exception) -> DatasetError:
    """Returns the error for rows that cannot be selected, because of the storage or because of the filter."""
    if failure_of(error) is not None:
        return DatasetError(
            f"the rows of {source.uri!r}, version {source.version}, cannot be selected, because its files cannot be "
            f"read ({readable_text(error)}); nothing was started. Check that they are there, whole and readable."
        )
    names = ", ".join(dataset.schema.names)
    return DatasetError(
        f"filter={short_text(filter or '')!r} cannot be applied to {source.uri!r} "
        f"({short_text(readable_text(error))}); nothing was started. A filter is an SQL expression over the columns "
        f"{names}; string values take single quotes, and names that are not plain words take backticks."
        f"{_quotes(filter)}"
    )


def share_selection(
    source: Source, filter: str | None, split: Split | None = None, opened: lance.LanceDataset | None = None
) -> Shared[Selection]:
    """Selects rows like `select`; returns the selection as a value that all processes of a run share."""
    groups: Groups | None = {} if isinstance(split, FractionSplit) else None
    selection = select(source, filter, split, opened, groups)
    if isinstance(split, FractionSplit) and split.values is None and groups:
        _warn_if_uneven(source.uri, split, groups)
    make = functools.partial(select_again, source, filter, split, selection.fingerprint)
    return Shared(f"selection of {source.uri}", selection, selection.nbytes, make)


def _warn_if_uneven(uri: str, split: FractionSplit, groups: Groups) -> None:
    """Warns once if a split has another part of few groups than was asked for."""
    asked, got = split.fractions[split.part] * len(groups), sum(groups.values())
    if len(groups) <= _FEW_GROUPS and abs(got - asked) >= max(1.0, _UNEVEN * asked):
        warn_once(
            f"{uri!r}: FractionSplit(part={split.part!r}, by={split.by!r}, seed={split.seed}) got {got} of "
            f"{len(groups)} values, {got / len(groups):.1%}, and was asked for {split.fractions[split.part]:.1%}: each "
            "value is hashed by itself, so few values make uneven parts. values=, a list of them all, makes them exact."
        )


def select_again(source: Source, filter: str | None, split: Split | None, fingerprint: str) -> Selection:
    """Selects rows like `select`. Raises DatasetError if they are not those of the fingerprint, if there is one."""
    selection = select(source, filter, split)
    if selection.fingerprint != fingerprint != "":
        raise DatasetError(
            f"filter={filter and short_text(filter)!r}, split={split} selected the rows {fingerprint} of "
            f"{source.uri!r} at version {source.version} when the dataset was opened, and selects "
            f"{selection.fingerprint} now: the dataset has changed. Nothing is read. Open it again with "
            "raylance.dataset(…)."
        )
    return selection


def _quotes(filter: str | None) -> str:
    """Returns a hint if the filter has double quotes, which quote names in standard SQL, but not in Lance; else ""."""
    if filter is None or '"' not in filter:
        return ""
    return (
        " The filter has double quotes, which quote a string in Lance, and no column name. Use 'single quotes' for "
        "strings and `backticks` for names."
    )
