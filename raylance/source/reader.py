"""Owns reading: row offsets in, one Arrow table out, by range or by take; never decides which rows, never decodes."""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import lance
import numpy as np
import pyarrow as pa
import tenacity

from raylance.columns import ROW_OFFSET
from raylance.errors import DatasetError
from raylance.orders.permutation import Int64Array

ReadMode = Literal["auto", "range", "take"]
READ_MODES: tuple[ReadMode, ...] = ("auto", "range", "take")

logger = logging.getLogger(__name__)

_RANGE_BYTES = 256 << 10  # runs of at least this many bytes are read as ranges,
_RANGE_ROWS = 8  # if they have at least this many rows: one take of a few large rows reads them in parallel
_DENSE = 0.5  # from this share of wanted rows on, reading all and dropping the rest is no slower than a take
_GAP_BYTES = 64 << 10  # gaps up to this size are read through
_LONGEST_PAUSE_S = 10.0
_BATCH_BYTES = 4 << 20  # Lance decodes the batches of a range in parallel, into memory that it can reuse


@dataclasses.dataclass(slots=True)
class Pace:
    """How many rows to read at a time, by the bytes of those before: a heavy tail shows only when it is read.

    Attributes:
        target_bytes: Bytes to read at a time.
        row_bytes: Bytes of a row, about; of the heavier ones, as far as they were seen lately.
        limit_rows: Rows to read at a time at the most; doubles, so that a bad guess is found out early.
        least_bytes: Bytes that a row counts for at the least: where the mean is known, a run of small rows only means
            that the large ones are still to come.
    """

    target_bytes: float
    row_bytes: float
    limit_rows: int = 0
    least_bytes: float = 1.0

    def __post_init__(self) -> None:
        self.limit_rows = self.limit_rows or int(self.target_bytes / max(self.row_bytes, 1) / 4) + 1

    def rows(self) -> int:
        """Rows to read next, at least one."""
        return max(1, min(self.limit_rows, int(self.target_bytes / max(self.row_bytes, 1))))

    def saw(self, rows: int, nbytes: int) -> None:
        """Learns from rows that were read."""
        self.row_bytes = max(self.least_bytes, self.row_bytes * 0.75, nbytes / max(rows, 1))
        self.limit_rows = min(self.limit_rows * 2, 1 << 40)


def stored_row_bytes(dataset: lance.LanceDataset, columns: Sequence[str]) -> float:
    """Bytes of a row of these columns as stored, the mean of all rows: it knows of a tail that no sample hits."""
    fields = [field for field in dataset.lance_schema.fields() if field.name() in columns]
    wanted = set()
    while fields:
        field = fields.pop()
        wanted.add(field.id())
        fields += field.children()
    stored = sum(int(field.bytes_on_disk) for field in dataset.stats.data_stats().fields if field.id in wanted)
    rows = sum(int(fragment.physical_rows) for fragment in dataset.get_fragments())
    return stored / max(1, rows)


@dataclasses.dataclass(slots=True, kw_only=True)
class Reader:
    """Reads rows of a pinned dataset.

    Attributes:
        row_bytes: Bytes of a row of these columns, about; chooses between range and take.
        mode: "range" and "take" read so whatever the rows; "auto" chooses, see `choose`.
        reopen: Opens the dataset anew, before a read is tried again.
        retry_s: Seconds that a read is tried again when the storage fails. What is queued behind a read that gave up is
            tried once only, for as long again: one outage costs one deadline.
    """

    dataset: lance.LanceDataset
    columns: Sequence[str]
    row_bytes: float
    mode: ReadMode = "auto"
    reopen: Callable[[], lance.LanceDataset] | None = None
    retry_s: float = 0.0
    _gave_up: float = dataclasses.field(default=float("-inf"), repr=False)

    def __post_init__(self) -> None:
        quoted = [name for name in self.columns if "`" in name]
        if quoted:  # however it is quoted, Lance panics over it
            raise DatasetError(
                f"{self.dataset.uri!r} has a backtick in the column name {', '.join(map(repr, quoted))}, by which "
                "Lance cannot read it; nothing was started. Name other columns in columns=, or write the dataset with "
                "another name."
            )

    def read(self, offsets: Int64Array) -> pa.Table:
        """Reads rows by their offsets, int64, strictly ascending; blob columns come as their bytes.

        Returns:
            A row for each offset, each column in one chunk where it fits: the columns, and `_rowoffset` (int64).

        Raises:
            DatasetError: If the dataset no longer gives these rows, or its storage failed for too long.
        """
        begin = time.monotonic()
        retry_s = self.retry_s if begin - self._gave_up > self.retry_s and self.reopen is not None else 0.0
        attempts = 0
        try:
            for attempt in retrying(retry_s):
                with attempt:
                    attempts += 1
                    if attempts > 1 and self.reopen is not None:
                        self.dataset = self.reopen()  # tells a version that is gone from a storage that fails
                    table = self._read_all(offsets)
        except (DatasetError, OSError, ValueError, pa.ArrowException) as error:
            tried = "The epoch stops here."
            if may_pass(error):
                self._gave_up = time.monotonic() if retry_s else self._gave_up
                tried = (
                    f"It was tried {attempts} times in {time.monotonic() - begin:.0f} s, and the epoch stops here. "
                    "When the storage is back, go on from the last checkpoint, or iterate again; read_timeout_s sets "
                    "how long to wait for it."
                )
            rows = f"rows {offsets[0]} to {offsets[-1]}" if len(offsets) else "columns"
            raise DatasetError(
                f"{rows} of {self.dataset.uri!r}, version {self.dataset.version}, cannot "
                f"be read ({error}). {tried} If the version was cleaned up: tag what you train on."
            ) from error
        if table.num_rows != len(offsets):
            raise DatasetError(
                f"{self.dataset.uri!r}, version {self.dataset.version}, gave {table.num_rows} rows for {len(offsets)} "
                "offsets; the epoch stops here so that no row is lost in silence."
            )
        # Gathering from one chunk is about ten times as fast as from many.
        return table.append_column(ROW_OFFSET, pa.array(offsets)).combine_chunks()

    def _read_all(self, offsets: Int64Array) -> pa.Table:
        schema = self.dataset.schema
        blobs = [name for name in self.columns if is_blob(schema.field(name))]
        plain = [name for name in self.columns if name not in blobs]
        table = self._read_plain(offsets, plain) if plain else {}
        columns = {name: table[name] for name in plain}
        for name in blobs:
            found = self.dataset.read_blobs(name, indices=offsets.tolist(), preserve_order=True) if len(offsets) else []
            columns[name] = pa.chunked_array([pa.array([value for _, value in found], pa.large_binary())])
        return pa.table({name: columns[name] for name in self.columns})

    def _read_plain(self, offsets: Int64Array, columns: list[str]) -> pa.Table:
        if len(offsets) == 0:
            # empty_table() knows no tensors with permuted axes.
            return pa.Table.from_batches([], schema=self.dataset.scanner(columns=columns).projected_schema)
        if self.choose(offsets) == "take":
            return self.dataset.take(pa.array(offsets), columns=columns)
        starts, stops = self._ranges(offsets)
        table = pa.concat_tables(
            self._range(int(start), int(stop - start), columns) for start, stop in zip(starts, stops, strict=True)
        )
        if table.num_rows == len(offsets):
            return table
        # Rows of the gaps were read as well. A row's place is its offset less what lies before its range.
        before = np.cumsum(stops - starts) - (stops - starts)
        which = np.searchsorted(stops, offsets, side="right")
        return table.take(pa.array(offsets - starts[which] + before[which]))

    def choose(self, offsets: Int64Array) -> ReadMode:
        """How rows are read: "range" where runs are long or most rows between the first and the last are wanted.

        Measured: a range of rows is read about as fast as one take of the same rows, and faster where it is long,
        because Lance then decodes in parallel; a take costs the same for dense and for scattered rows.
        """
        if self.mode != "auto":
            return self.mode
        starts, stops = self._ranges(offsets)
        read_rows = int((stops - starts).sum())
        long_runs = read_rows >= _RANGE_ROWS * len(starts) and read_rows * self.row_bytes >= _RANGE_BYTES * len(starts)
        return "range" if long_runs and len(offsets) >= _DENSE * read_rows else "take"

    def _ranges(self, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Half-open ranges that hold the offsets, small gaps read through: their starts and their stops."""
        gap_rows = max(1, int(_GAP_BYTES / max(self.row_bytes, 1)))
        first = np.flatnonzero(np.diff(offsets, prepend=offsets[0] - gap_rows - 1) > gap_rows)
        last = np.r_[first[1:], len(offsets)] - 1
        return offsets[first], offsets[last] + 1

    def _range(self, offset: int, rows: int, columns: list[str]) -> pa.Table:
        batch_rows = max(1, min(rows, int(_BATCH_BYTES / max(self.row_bytes, 1))))
        return self.dataset.scanner(columns=columns, offset=offset, limit=rows, batch_size=batch_rows).to_table()


def is_blob(field: pa.Field) -> bool:
    """Whether a column is blob-encoded, of either version: a plain read of it gives descriptors and not bytes."""
    return (field.metadata or {}).get(b"lance-encoding:blob") == b"true" or "lance.blob" in str(field.type)


def may_pass(error: BaseException) -> bool:
    """Whether a read may succeed when it is tried again: the storage failed, and not the data or the question.

    Lance wraps what object stores say into errors of several classes, and names only in the text that it was I/O.
    """
    if isinstance(error, DatasetError) and error.__cause__ is not None:
        return may_pass(error.__cause__)
    return isinstance(error, (TimeoutError, ConnectionError)) or "LanceError(IO)" in str(error)


def retrying(retry_s: float) -> tenacity.Retrying:
    """Tries again what fails in a way that may pass, with growing random pauses, for about so many seconds."""

    def warn(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        pause_s = state.next_action.sleep if state.next_action is not None else 0.0
        logger.warning("the storage failed, and is asked again in %.1f s: %s", pause_s, error)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_pass),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=min(_LONGEST_PAUSE_S, max(retry_s, 0.1) / 4)),
        stop=tenacity.stop_after_delay(retry_s),
        before_sleep=warn,
        reraise=True,
    )
