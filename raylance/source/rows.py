"""Owns the selected rows of one dataset, as a reader of a rank opens them; never decides who gets which."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from raylance.orders.permutation import Int64Array
from raylance.source.reader import Reader, ReadMode, retrying
from raylance.source.selection import Selection, Source
from raylance.store import Shared


class Selected(Protocol):
    """The rows that an epoch is made of."""

    @property
    def rows(self) -> int:
        """Their number, n."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of what they are."""
        ...

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Selected rows 0 … n-1 to the offsets that a reader takes, both ascending."""
        ...


class RowReader(Protocol):
    """Reads rows by their offsets."""

    def read(self, offsets: Int64Array) -> pa.Table:
        """Reads rows, offsets ascending; the table has `_rowoffset` beside the columns."""
        ...


class RowSource(Protocol):
    """Selected rows of pinned data: what a reader of a rank serves; picklable."""

    @property
    def uri(self) -> Any:
        """Where the data lies, JSON-able."""
        ...

    @property
    def branch(self) -> Any:
        """The branch that the version is counted in, JSON-able; None for what the URI opens."""
        ...

    @property
    def version(self) -> Any:
        """The pinned version, JSON-able."""
        ...

    @property
    def identity(self) -> Any:
        """Hash of the version's files, JSON-able."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """Columns to read."""
        ...

    @property
    def row_bytes(self) -> float:
        """Bytes of a row as it is read, of a few rows; "auto" orders are settled from it."""
        ...

    @property
    def likely_row_bytes(self) -> float:
        """Bytes of a row as it is read, the best guess: rows are read so many at a time until more is known."""
        ...

    @property
    def measure(self) -> str:
        """How `likely_row_bytes` is known, in words."""
        ...

    def load_selection(self) -> Selected:
        """The selected rows, fetched where only a reference is held."""
        ...

    def open_reader(self, retry_s: float = 0.0) -> RowReader:
        """Opens what the offsets address, for reads that are tried again for so long when the storage fails."""
        ...

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> "RowSource":
        """The same, with something done to each large value, such as `Shared.of_run`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """The selected rows of one dataset; see `RowSource`.

    Attributes:
        pinned: The pinned dataset.
        selection: The selected rows.
        columns: Columns to read.
        row_bytes: Bytes of a row of these columns as it is read, of a few rows; "auto" orders are settled from it.
        read: How rows are read; see `raylance.source.reader.Reader`.
        stored_bytes: Bytes of a row as it is stored, the mean of all rows; 0 where it is not known.
    """

    pinned: Source
    selection: Shared[Selection]
    columns: Sequence[str]
    row_bytes: float
    read: ReadMode = "auto"
    stored_bytes: float = 0.0

    @property
    def likely_row_bytes(self) -> float:
        """See `RowSource.likely_row_bytes`."""
        return max(self.row_bytes, self.stored_bytes)

    @property
    def measure(self) -> str:
        """See `RowSource.measure`."""
        return "the mean of all as they are stored" if self.stored_bytes > self.row_bytes else "the mean of a few rows"

    @property
    def uri(self) -> str:
        """URI of the dataset."""
        return self.pinned.uri

    @property
    def branch(self) -> str | None:
        """See `RowSource.branch`."""
        return self.pinned.branch

    @property
    def version(self) -> int:
        """The pinned version."""
        return self.pinned.version

    @property
    def identity(self) -> str:
        """See `RowSource.identity`."""
        return self.pinned.identity

    def load_selection(self) -> Selection:
        """See `RowSource.load_selection`."""
        return self.selection.get()

    def open_reader(self, retry_s: float = 0.0) -> Reader:
        """See `RowSource.open_reader`."""
        return Reader(
            dataset=retrying(retry_s)(self.pinned.open),
            columns=self.columns,
            row_bytes=self.row_bytes,
            mode=self.read,
            reopen=self.pinned.open,
            retry_s=retry_s,
        )

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> "TableRows":
        """See `RowSource.map_shared`."""
        return dataclasses.replace(self, selection=change(self.selection))
