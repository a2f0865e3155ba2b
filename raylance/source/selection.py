"""Owns what is read: the pinned dataset version and the row offsets that a filter leaves; never reads column data."""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Self

import lance
import numpy as np
import pyarrow as pa

from raylance.errors import ConfigError, DatasetError
from raylance.orders.permutation import Int64Array
from raylance.source.lance_errors import suspect, tell
from raylance.source.splits import Split
from raylance.store import Shared

Version = int | str | tuple[str | None, int | None]

_SCAN_ROWS = 1 << 16
_MAIN = "main"  # what Lance calls the trunk in references


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A pinned version of a Lance dataset, cheap to pickle and to open anywhere.

    Attributes:
        uri: Path or URI, as Lance takes it; a branch's own URI where that was given.
        version: Version number, never a tag: tags move.
        branch: Branch that a tag or a reference named, and the version is counted in; None for what `uri` opens.
        identity: Hash of the data and deletion files of the version. Files get random names when they are written, so
            it tells a dataset from another one that was written anew in its place, with the same number of rows.
        storage_options: Options of the object store (credentials, endpoint); never shown.
    """

    uri: str
    version: int
    branch: str | None = None
    identity: str = ""
    storage_options: Mapping[str, str] | None = dataclasses.field(default=None, repr=False)

    def open(self) -> lance.LanceDataset:
        """Opens exactly the pinned version, or raises a `DatasetError` where that is gone."""
        version = self.version if self.branch is None else (self.branch, self.version)
        return _open(self.uri, version, self.storage_options)

    def newest(self) -> Self:
        """The newest version now of what this is a version of, opened once; raises as `open`."""
        dataset = _open(self.uri, None if self.branch is None else (self.branch, None), self.storage_options)
        return dataclasses.replace(self, version=dataset.version, identity=_identity(dataset))


def pin(uri: str | os.PathLike[str], version: Version | None, storage_options: Mapping[str, str] | None) -> Source:
    """Resolves a version number, a tag, a reference (branch, version), or None for the newest, once.

    A tag may point into a branch; in a reference, None stands for the trunk, and for the newest version.

    Raises:
        ConfigError: If the arguments are of no such type.
        DatasetError: If there is no dataset, or no such branch, version or tag.
    """
    if not isinstance(uri, str | os.PathLike):
        raise ConfigError(
            f"uri={uri!r} is a {type(uri).__name__}: give the path or URI of one Lance dataset. Several are opened one "
            "by one and joined by raylance.mix()."
        )
    _check_version(version)
    uri = os.fspath(uri)
    if "://" not in uri:  # workers and later runs may stand in another directory
        uri = os.path.abspath(uri)
    dataset = _open(uri, version, storage_options)
    identity = _identity(dataset)
    source = Source(uri=uri, version=dataset.version, identity=identity, storage_options=storage_options)
    if version is None or isinstance(version, int):
        return source
    with contextlib.suppress(DatasetError):  # the URI has no such number
        if _identity(source.open()) == identity:  # what a tag or a reference means is what the URI opens by itself
            return source
    branch = version[0] if isinstance(version, tuple) else dataset.tags.list()[version]["branch"]
    return dataclasses.replace(source, branch=str(branch or _MAIN))


def _check_version(version: object) -> None:
    match version:
        case bool():  # an int to Python
            pass
        case None | int() | str() | tuple((None | str(), None | int())):
            return
    raise ConfigError(
        f"version={version!r}: give a version number, the name of a tag, a reference (branch, number or None), or None "
        "for the newest."
    )


def _identity(dataset: lance.LanceDataset) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for fragment in dataset.get_fragments():
        meta = fragment.metadata
        deleted = "" if meta.deletion_file is None else f"{meta.deletion_file.read_version}-{meta.deletion_file.id}"
        digest.update(f"{meta.id} {[file.path for file in meta.files]} {deleted}\n".encode())
    return digest.hexdigest()


def _open(uri: str, version: Version | None, storage_options: Mapping[str, str] | None) -> lance.LanceDataset:
    options = dict(storage_options) if storage_options else None
    try:
        if isinstance(version, tuple):
            branch, number = version
            return lance.dataset(uri, storage_options=options).checkout_version((branch or _MAIN, number))
        return lance.dataset(uri, version=version, storage_options=options)
    except (ValueError, OSError) as error:
        if version is None:
            raise DatasetError(
                f"no Lance dataset can be opened at {uri!r} ({tell(error)}); nothing was started. Check the path, the "
                f"credentials in storage_options, and that the dataset was written.{suspect(uri, options)}"
            ) from error
        try:
            newest = lance.dataset(uri, storage_options=options)
        except (ValueError, OSError):
            return _open(uri, None, storage_options)  # tells that the dataset itself is missing
        kind = "tag" if isinstance(version, str) else "reference" if isinstance(version, tuple) else "version"
        numbers = [entry["version"] for entry in newest.versions()]
        raise DatasetError(
            f"{uri!r} has no {kind} {version!r} ({tell(error)}); nothing was started. It has versions {numbers[0]} to "
            f"{numbers[-1]} and tags {sorted(newest.tags.list())}, and branches {sorted(newest.branches.list())} "
            "(version=(branch, None) takes a branch's newest): ask for one of them, and tag the versions that you "
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
        """Maps selected rows, int64 in [0, N) of any shape, to row offsets, int64 of that shape."""
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
                f"filter={filter!r} cannot be applied to {source.uri!r} ({tell(error)}); nothing was started. A filter "
                f"is an SQL expression over the columns {names}; string values take single quotes, and names that are "
                f"not plain words take backticks.{_quotes(filter)}"
            ) from error
    if selection.rows == 0:
        conditions = " and ".join(str(condition) for condition in (filter, split) if condition is not None)
        what = f"has no row with {conditions}" if conditions else "has no live rows"
        raise DatasetError(
            f"{source.uri!r} at version {source.version} {what}; nothing was started. Check filter, split and "
            f"version.{_quotes(filter)}"
        )
    return selection


def share_selection(source: Source, filter: str | None, split: Split | None = None) -> Shared[Selection]:
    """As `select`, as a value that all processes of a run share."""
    selection = select(source, filter, split)
    make = functools.partial(_select_again, source, filter, split, selection.fingerprint)
    return Shared(f"selection of {source.uri}", selection, selection.nbytes, make)


def _select_again(source: Source, filter: str | None, split: Split | None, fingerprint: str) -> Selection:
    selection = select(source, filter, split)
    if selection.fingerprint != fingerprint:
        raise DatasetError(
            f"filter={filter!r}, split={split} selected the rows {fingerprint} of {source.uri!r} at version "
            f"{source.version} when the dataset was opened, and selects {selection.fingerprint} now; nothing is read. "
            "The dataset was written anew meanwhile: open it again with raylance.dataset(…)."
        )
    return selection


def _quotes(filter: str | None) -> str:
    """A hint for a filter with double quotes, which stand for names in other SQL."""
    if filter is None or '"' not in filter:
        return ""
    return (
        " The filter has double quotes: Lance takes what stands between them for a string, also where a column's name "
        "was meant. Use 'single quotes' for strings and `backticks` for names."
    )


def _kept(batch: pa.RecordBatch, split: Split | None) -> Int64Array:
    offsets: Int64Array = batch.column("_rowoffset").to_numpy(zero_copy_only=False).astype(np.int64)
    if split is None:
        return offsets
    return offsets[split.keep(offsets, batch.column(split.columns[0]).to_pylist() if split.columns else None)]
