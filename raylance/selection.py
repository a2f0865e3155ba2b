"""Owns what is read: the pinned dataset version and the row offsets that a filter leaves; never reads column data."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Self

import lance
import numpy as np
import pyarrow as pa

from raylance.errors import DatasetError
from raylance.permutation import Int64Array
from raylance.split import Split

_SCAN_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A pinned version of a Lance dataset, cheap to pickle and to open anywhere.

    Attributes:
        uri: Path or URI, as Lance takes it.
        version: Version number, never a tag: tags move.
        storage_options: Options of the object store (credentials, endpoint).
    """

    uri: str
    version: int
    storage_options: Mapping[str, str] | None = None

    def open(self) -> lance.LanceDataset:
        """Opens exactly the pinned version.

        Raises:
            DatasetError: If the version is gone.
        """
        return _open(self.uri, self.version, self.storage_options)


def pin(uri: str | os.PathLike[str], version: int | str | None, storage_options: Mapping[str, str] | None) -> Source:
    """Resolves a version number, a tag, or None for the newest, once.

    Raises:
        DatasetError: If there is no dataset, or no such version or tag.
    """
    uri = os.fspath(uri)
    if "://" not in uri:  # workers and later runs may stand in another directory
        uri = os.path.abspath(uri)
    dataset = _open(uri, version, storage_options)
    return Source(uri=uri, version=dataset.version, storage_options=storage_options)


def _open(uri: str, version: int | str | None, storage_options: Mapping[str, str] | None) -> lance.LanceDataset:
    options = dict(storage_options) if storage_options else None
    try:
        return lance.dataset(uri, version=version, storage_options=options)
    except (ValueError, OSError) as error:
        if version is None:
            raise DatasetError(
                f"no Lance dataset can be opened at {uri!r} ({error}); nothing was started. Check the path, the "
                "credentials in storage_options, and that the dataset was written."
            ) from error
        try:
            newest = lance.dataset(uri, storage_options=options)
        except (ValueError, OSError):
            return _open(uri, None, storage_options)  # tells that the dataset itself is missing
        kind = "tag" if isinstance(version, str) else "version"
        numbers = [entry["version"] for entry in newest.versions()]
        raise DatasetError(
            f"{uri!r} has no {kind} {version!r} ({error}); nothing was started. It has versions {numbers[0]} to "
            f"{numbers[-1]} and tags {sorted(newest.tags.list())}: ask for one of them, and tag the versions that you "
            "train on, because clean-up spares only tagged ones."
        ) from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected rows in storage order, as row offsets of the pinned version.

    Kept as runs of consecutive offsets where that is smaller, else as plain offsets: 8 bytes a row at the most, a few
    bytes for a whole dataset. The arrays travel through the object store without a copy.

    Attributes:
        rows: Number of selected rows, N.
        fingerprint: Hash of the offsets, equal exactly when the offsets are, whichever way they are kept.
        starts: First offset of each run, int64, shape (runs,); or every offset, shape (N,), when `ends` is None.
        ends: Selected rows up to the end of each run, int64, shape (runs,), or None.
    """

    rows: int
    fingerprint: str
    starts: Int64Array
    ends: Int64Array | None

    @classmethod
    def whole(cls, rows: int) -> Self:
        """All rows of a dataset of `rows` live rows."""
        return cls.from_runs(np.zeros(min(rows, 1), dtype=np.int64), np.full(min(rows, 1), rows, dtype=np.int64))

    @classmethod
    def from_offsets(cls, batches: Iterable[Int64Array]) -> Self:
        """Builds a selection from ascending offsets that arrive in batches.

        Args:
            batches: int64 offsets, strictly ascending within and across batches.
        """
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
        if len(starts):
            first = np.flatnonzero(np.r_[True, starts[1:] != (starts + lengths)[:-1]])
            starts, lengths = starts[first], np.add.reduceat(lengths, first)
        ends = np.cumsum(lengths, dtype=np.int64)
        rows = int(ends[-1]) if len(ends) else 0
        digest = hashlib.blake2b(digest_size=16)
        for array in (starts, ends):
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        if 2 * len(starts) > rows:  # two numbers a run are more than one a row
            shift = np.repeat(starts - (ends - lengths), lengths)
            return cls(rows=rows, fingerprint=digest.hexdigest(), starts=shift + np.arange(rows), ends=None)
        return cls(rows=rows, fingerprint=digest.hexdigest(), starts=starts, ends=ends)

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

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Maps selected rows to row offsets.

        Args:
            selected: int64 in [0, N), any shape.

        Returns:
            int64 row offsets of the same shape.
        """
        if self.ends is None:
            return self.starts[selected]
        if len(self.ends) == 1:
            return np.asarray(self.starts[0] + selected, dtype=np.int64)
        run = np.searchsorted(self.ends, selected, side="right")
        before = np.where(run > 0, self.ends[run - 1], 0)
        return np.asarray(self.starts[run] + selected - before, dtype=np.int64)


def select(source: Source, filter: str | None, split: Split | None = None) -> Selection:
    """Finds the live rows that satisfy a filter, through a scalar index where there is one, and belong to a split.

    Raises:
        DatasetError: If the filter does not parse, the split's column is missing, or no row is left.
    """
    dataset = source.open()
    keys = split.columns if split is not None else []
    missing = sorted(set(keys) - set(dataset.schema.names))
    if missing:
        raise DatasetError(
            f"{split} needs the column {', '.join(missing)}, which {source.uri!r} does not have; nothing was started. "
            f"Its columns are {', '.join(dataset.schema.names)}."
        )
    if filter is None and split is None:
        selection = Selection.whole(dataset.count_rows())
    else:
        try:
            scanner = dataset.scanner(columns=[*keys, "_rowoffset"], filter=filter, batch_size=_SCAN_ROWS)
            selection = Selection.from_offsets(_kept(batch, split) for batch in scanner.to_batches())
        except (ValueError, OSError, pa.ArrowException) as error:
            names = ", ".join(dataset.schema.names)
            raise DatasetError(
                f"filter={filter!r} cannot be applied to {source.uri!r} ({error}); nothing was started. A filter is an "
                f"SQL expression over the columns {names}; string values take single quotes."
            ) from error
    if selection.rows == 0:
        conditions = " and ".join(str(condition) for condition in (filter, split) if condition is not None)
        what = f"has no row with {conditions}" if conditions else "has no live rows"
        raise DatasetError(
            f"{source.uri!r} at version {source.version} {what}, so there is nothing to train on. Check filter, split "
            "and version."
        )
    return selection


def _kept(batch: pa.RecordBatch, split: Split | None) -> Int64Array:
    offsets: Int64Array = batch.column("_rowoffset").to_numpy(zero_copy_only=False).astype(np.int64)
    if split is None:
        return offsets
    return offsets[split.keep(offsets, batch.column(split.columns[0]).to_pylist() if split.columns else None)]
