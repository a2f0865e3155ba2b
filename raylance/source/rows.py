"""The selected rows of a dataset, which open readers for themselves."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa

from raylance.descriptions import read_setting
from raylance.environment.shared import Shared
from raylance.errors import ConfigError, DatasetError
from raylance.memory.lending import Lend, fresh_memory
from raylance.orders.permutation import Int64Array
from raylance.planning.proof import HasOffsets
from raylance.samples.table import SampleTable
from raylance.source.derived import Derived
from raylance.source.lance_errors import Failure, failure_of
from raylance.source.reader import Reader, ReadMode, RowReader
from raylance.source.retrying import OPENING_S
from raylance.source.selection import Selection, select_again
from raylance.source.version import Source
from raylance.source.video_rows import add_columns
from raylance.source.videos import NOTHING_ADDED, AddedColumns

# A run of samples that share decoded values is this multiple of a sample's stored rows: then the values beside the run,
# which other runs decode again, are a quarter of its own.
_RUN_SAMPLES = 4


class Selected(HasOffsets, Protocol):
    """The selected rows, which an epoch delivers; `offsets` are those that a reader takes."""

    @property
    def fingerprint(self) -> str:
        """Hash of the rows; equal exactly if the rows are equal."""

    @property
    def block_ends(self) -> Int64Array | None:
        """The number of rows up to the end of each block that is read together at the least cost, int64, ascending.
        Then shards of an order should not cut blocks. None if there are no blocks.
        """

    @property
    def tokens(self) -> int | None:
        """Number of tokens of all rows without padding; None if rows are not sequences of tokens."""


class Completion(Protocol):
    """Adds the columns of rows that follow from others; equal if it adds the same. Picklable."""

    @property
    def rows(self) -> int:
        """Number of rows that are best completed together."""

    @property
    def added_bytes(self) -> int:
        """Bytes of the columns that are added to a row."""

    def __call__(self, table: pa.Table, lend: Lend = fresh_memory) -> pa.Table:
        """Returns the rows, which have `_component`, with the columns that are added, and those that are kept. `lend`
        gives the memory of the former.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSource(abc.ABC):
    """Selected rows of pinned data; picklable."""

    uri: Any  # where the data lie, JSON-able. In a mixture, this and the next four are dicts by name of a dataset
    branch: Any  # in which the version is counted; None for the branch that the URI opens
    version: Any  # the pinned version
    identity: Any  # hash of the version's files
    windows: Any  # the description of what makes samples of several rows, or of parts of rows; None if rows are samples
    columns: Sequence[str]  # to read
    # As it is held, the mean of a few rows; "auto" sizes of orders follow from it. If samples share values that are
    # decoded once, with its part of the rows beside a run that belong to samples of the run.
    row_bytes: float
    likely_row_bytes: float  # the best estimate, for the size of the first reads
    measure: str  # how `likely_row_bytes` was measured, in words
    sample_bytes: float  # the best estimate for a sample, which may have several rows; for the size of the first items

    @abc.abstractmethod
    def load_selection(self) -> Selected:
        """Returns the selected rows; fetches them if this process only has a reference."""

    @property
    @abc.abstractmethod
    def sources(self) -> tuple[Source, ...]:
        """The pinned versions of all datasets."""

    @property
    def run_rows(self) -> int:
        """Number of rows that cost less if they are read one after the other; see `Facts`."""
        return 1

    @property
    def derived(self) -> tuple[tuple[str, Derived], ...]:
        """The settings of columns that readers make, each with the name of its component in a mixture, else ""."""
        return ()

    def load_samples(self) -> SampleTable | None:
        """Returns the table that says of which rows each sample is made; None if each selected row is a sample."""
        return None

    @property
    def loaded_bytes(self) -> float:
        """The best estimate of the bytes of a stored row, as it is held."""
        return self.likely_row_bytes

    @property
    def rows_each(self) -> float:
        """The expected number of stored rows for each sample of many."""
        return 1.0

    @property
    def completion(self) -> Completion | None:
        """Makes the columns that readers leave out, so that nobody holds or sends them; None if they give all."""
        return None

    def has_rows_of(self, version: Any, identity: Any) -> bool:
        """Whether the data have the same rows in the same order as another version; see `Source.has_rows_of`."""
        return False

    def has_grown_from(self, before: Mapping[str, Any]) -> bool:
        """Whether the data have the rows that fields of a state select, with the same numbers, and maybe others after
        them; see `raylance.planning.state.Versions`.
        """
        return False

    def part(self, number: int) -> "RowSource":
        """Returns the rows of a dataset of a mixture."""
        raise DatasetError(f"{type(self).__name__}: not a mixture.")

    def fingerprint_of(self, fields: Mapping[str, Any] | None) -> str:
        """See `raylance.planning.state.Versions`. Raises DatasetError if the storage fails."""
        return self.load_selection().fingerprint if fields is None else ""

    def selection_of(self, fields: Mapping[str, Any]) -> HasOffsets:
        """Returns the rows that fields of a state select, of the version that they name. Raises DatasetError if that is
        gone, or the rows are other ones than those of the fingerprint, if there is one.
        """
        raise DatasetError(f"{type(self).__name__}: rows of other versions are not known.")

    def carry(
        self, before: Mapping[str, Any], after: Mapping[str, Any] | None, offsets: Int64Array, rows: Int64Array
    ) -> tuple[Int64Array, Int64Array] | None:
        """Carries rows from an earlier version to a later one, or to this one; see `raylance.planning.state.Versions`.
        Raises DatasetError if the storage fails.
        """
        return None

    def check_asked(self, offsets: Int64Array) -> None:  # noqa: B027 - all do, unless a subclass knows better
        """Checks rows that were asked for by their offsets, int64, (n,).

        Raises:
            IndexError: If one makes no sample.
        """

    @abc.abstractmethod
    def open_reader(self, retry_s: float | None = None) -> RowReader:
        """Makes a reader of stored rows. The first read opens the dataset and compares it with the pinned version.

        Args:
            retry_s: Seconds for which a read is repeated if the storage fails, or if files are missing that were there
                before. None, for a few rows on request, is `OPENING_S`, and a missing file is an error at once.
        """

    @abc.abstractmethod
    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> Self:
        """Returns a copy in which each large value is replaced by `change(value)`, such as `Shared.of_run`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableRows(RowSource):
    """The selected rows of one dataset; `read` is the `mode` of their `Reader`. With `samples`, they are anchors."""

    pinned: Source
    selection: Shared[Selection]
    read: ReadMode
    samples: Shared[SampleTable] | None = None
    added: AddedColumns = NOTHING_ADDED
    made_bytes: float = 0.0  # of a row: what is not read, but made of what is read
    shared_rows: int = 0  # stored rows from the first to the last one of a sample, whose values samples share

    def load_selection(self) -> Selection:
        """See `RowSource.load_selection`."""
        return self.selection.get()

    @property
    def sources(self) -> tuple[Source, ...]:
        """See `RowSource.sources`."""
        return (self.pinned, *(each.source for each in self.added.videos))

    @property
    def run_rows(self) -> int:
        """See `RowSource.run_rows`."""
        runs = [each.run_rows for each in self.added.videos]
        return max(1, _RUN_SAMPLES * self.shared_rows, *runs)

    @property
    def derived(self) -> tuple[tuple[str, Derived], ...]:
        """See `RowSource.derived`."""
        return tuple(("", each) for each in self.added.settings)

    def load_samples(self) -> SampleTable | None:
        """See `RowSource.load_samples`."""
        return None if self.samples is None else self.samples.get()

    def has_rows_of(self, version: Any, identity: Any) -> bool:
        """See `RowSource.has_rows_of`."""
        return self.pinned.has_rows_of(version, identity)

    def has_grown_from(self, before: Mapping[str, Any]) -> bool:
        """See `RowSource.has_grown_from`."""
        if self.samples is not None or self.load_selection().first(before["rows"]).fingerprint != before["fingerprint"]:
            return False
        return self.pinned.has_rows_of(before["version"], before["identity"], may_append=True)

    def carry(
        self, before: Mapping[str, Any], after: Mapping[str, Any] | None, offsets: Int64Array, rows: Int64Array
    ) -> tuple[Int64Array, Int64Array] | None:
        """See `RowSource.carry`."""
        try:
            there = np.concatenate([offsets, self.selection_of(before).offsets(rows)])
            selected = self.load_selection() if after is None else self.selection_of(after)
            here = self.version_of(after).offsets_of(self.version_of(before), np.sort(there))  # faster if sorted
        except (DatasetError, ConfigError) as error:
            if failure_of(error) is Failure.PASSING:
                raise
            return None  # a version is gone, or the fields are damaged
        if here is None:
            return None
        here = here[here >= 0]
        return here, selected.count_before(here[selected.has(here)])

    def fingerprint_of(self, fields: Mapping[str, Any] | None) -> str:
        """See `RowSource.fingerprint_of`."""
        if fields is None:
            return self.load_selection().fingerprint
        try:
            return self.selection_of({**fields, "fingerprint": ""}).fingerprint
        except (DatasetError, ConfigError) as error:
            if failure_of(error) is Failure.PASSING:
                raise
            return ""

    def version_of(self, fields: Mapping[str, Any] | None) -> Source:
        """Returns the version of the dataset that fields of a state name; the pinned one without fields."""
        if fields is None:
            return self.pinned
        return dataclasses.replace(self.pinned, version=fields["version"], identity=fields["identity"], written="")

    def selection_of(self, fields: Mapping[str, Any]) -> Selection:
        """See `RowSource.selection_of`."""
        split = None if fields["split"] is None else read_setting(fields["split"])
        return select_again(self.version_of(fields), fields["filter"], split, fields["fingerprint"])

    def check_asked(self, offsets: Int64Array) -> None:
        """See `RowSource.check_asked`."""
        samples = self.load_samples()
        if samples is not None and samples.knows_selected_alone:
            others = offsets[~self.load_selection().has(offsets)]
            if len(others):
                why = "a window is not whole, or the row is not selected"
                raise IndexError(f"row {others[0]} is the anchor of no sample: {why}")

    def open_reader(self, retry_s: float | None = None) -> RowReader:
        """See `RowSource.open_reader`."""
        rows = self.open_rows(retry_s)
        return add_columns(rows, self.added, str(self.uri), retry_s=rows.retry_s, missing=rows.missing)

    def open_rows(self, retry_s: float | None = None) -> Reader:
        """Makes the reader that `open_reader` has, without added columns."""
        return Reader(
            pinned=self.pinned,
            columns=self.columns,
            row_bytes=max(1.0, self.row_bytes / _held_rows(self.shared_rows) - self.made_bytes),
            mode=self.read,
            retry_s=OPENING_S if retry_s is None else retry_s,
            missing=retry_s is not None,
        )

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> Self:
        """See `RowSource.map_shared`."""
        samples = None if self.samples is None else change(self.samples)
        added = self.added.map_shared(change)
        return dataclasses.replace(self, selection=change(self.selection), samples=samples, added=added)


def table_rows(
    pinned: Source,
    selection: Shared[Selection],
    columns: Sequence[str],
    row_bytes: float,
    stored_bytes: float = 0.0,
    read: ReadMode = "auto",
    samples: Shared[SampleTable] | None = None,
    sample_bytes: float | None = None,
    added: AddedColumns = NOTHING_ADDED,
    made_bytes: float = 0.0,
    shared_rows: int = 0,
    windows: Any = None,
) -> TableRows:
    """Makes the `TableRows` of a dataset. `row_bytes` and `stored_bytes` are the mean sizes of few rows, and of all as
    stored, 0 if unknown; `sample_bytes` is that of a sample of several rows. For the rest, see `TableRows`.
    """
    return TableRows(
        uri=pinned.uri,
        branch=pinned.branch,
        version=pinned.version,
        identity=pinned.identity,
        windows=windows,
        columns=columns,
        row_bytes=row_bytes * _held_rows(shared_rows),
        likely_row_bytes=max(row_bytes, stored_bytes),
        measure="the mean of all as they are stored" if stored_bytes > row_bytes else "the mean of a few rows",
        sample_bytes=max(row_bytes, stored_bytes) if sample_bytes is None else sample_bytes,
        pinned=pinned,
        selection=selection,
        read=read,
        samples=samples,
        added=added,
        made_bytes=made_bytes,
        shared_rows=shared_rows,
    )


def _held_rows(shared_rows: int) -> float:
    """Returns how many stored rows are held for each sample of a run."""
    return 1 + 1 / _RUN_SAMPLES if shared_rows > 1 else 1.0
