"""Owns the selected rows of one dataset, as a reader of a rank opens them; never decides who gets which."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import pyarrow as pa

from raylance.environment.shared import Shared
from raylance.orders.permutation import Int64Array
from raylance.source.reader import Reader, ReadMode
from raylance.source.retrying import OPENING_S
from raylance.source.selection import Selection
from raylance.source.version import Source


class Selected(Protocol):
    """The rows that an epoch is made of."""

    @property
    def rows(self) -> int:
        """Their number, n."""

    @property
    def fingerprint(self) -> str:
        """Hash of what they are."""

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Selected rows 0 … n-1 to the offsets that a reader takes, both ascending."""


class RowReader(Protocol):
    """Reads rows by their offsets."""

    def read(self, offsets: Int64Array) -> pa.Table:
        """Reads rows, offsets ascending; the table has `_rowoffset` beside the columns."""

    def read_into(self, offsets: Int64Array, add: Callable[[pa.Table], None]) -> None:
        """The same, handed on in one or more tables."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSource(abc.ABC):
    """Selected rows of pinned data: what a reader of a rank serves; picklable.

    Attributes:
        uri: Where the data lies; like the next three by component in a mixture, JSON-able.
        branch: Branch that the version is counted in; None for what the URI opens.
        version: The pinned version.
        identity: Hash of the version's files.
        columns: Columns to read.
        row_bytes: Bytes of a row as it is read, of a few rows; "auto" orders are resolved from it.
        likely_row_bytes: The best guess of the same: rows are read so many at a time until more is known.
        measure: How `likely_row_bytes` is known, in words.
    """

    uri: Any
    branch: Any
    version: Any
    identity: Any
    columns: Sequence[str]
    row_bytes: float
    likely_row_bytes: float
    measure: str

    @abc.abstractmethod
    def load_selection(self) -> Selected:
        """The selected rows, fetched where only a reference is held."""

    @abc.abstractmethod
    def open_reader(self, retry_s: float | None = None) -> RowReader:
        """Makes what reads by the offsets; it opens with the first read, and compares that with what is pinned.

        Args:
            retry_s: Seconds that a read is tried again when the storage fails, or when files are away that were there
                before. None is for those who look at a few rows: a missing file is an error at once.
        """

    @abc.abstractmethod
    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> Self:
        """The same, with something done to each large value, such as `Shared.of_run`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableRows(RowSource):
    """The selected rows of one dataset, read as `read` says; see `Reader.choose`."""

    pinned: Source
    selection: Shared[Selection]
    read: ReadMode

    def load_selection(self) -> Selection:
        """See `RowSource.load_selection`."""
        return self.selection.get()

    def open_reader(self, retry_s: float | None = None) -> Reader:
        """See `RowSource.open_reader`."""
        return Reader(
            dataset=None,
            columns=self.columns,
            row_bytes=self.row_bytes,
            mode=self.read,
            pinned=self.pinned,
            retry_s=OPENING_S if retry_s is None else retry_s,
            missing=retry_s is not None,
        )

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> Self:
        """See `RowSource.map_shared`."""
        return dataclasses.replace(self, selection=change(self.selection))


def table_rows(
    pinned: Source,
    selection: Shared[Selection],
    columns: Sequence[str],
    row_bytes: float,
    stored_bytes: float = 0.0,
    read: ReadMode = "auto",
) -> TableRows:
    """The selected rows of one dataset; `stored_bytes` is the mean of all rows as stored, 0 where it is not known."""
    return TableRows(
        uri=pinned.uri,
        branch=pinned.branch,
        version=pinned.version,
        identity=pinned.identity,
        columns=columns,
        row_bytes=row_bytes,
        likely_row_bytes=max(row_bytes, stored_bytes),
        measure="the mean of all as they are stored" if stored_bytes > row_bytes else "the mean of a few rows",
        pinned=pinned,
        selection=selection,
        read=read,
    )
