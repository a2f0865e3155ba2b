"""Owns reading: row offsets in, one Arrow table out, by range or by take; never decides which rows, never decodes."""

import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

import lance
import numpy as np
import pyarrow as pa
import tenacity

from raylance.columns import ROW_OFFSET
from raylance.errors import DatasetError
from raylance.orders.permutation import Int64Array
from raylance.source.lance_errors import may_pass, tell
from raylance.source.memory import take_rows

ReadMode = Literal["auto", "range", "take"]
READ_MODES: tuple[ReadMode, ...] = ("auto", "range", "take")

logger = logging.getLogger(__name__)

_RANGE_BYTES = 256 << 10  # runs of at least this many bytes are read as ranges,
_RANGE_ROWS = 8  # if they have at least this many rows: one take of a few large rows reads them in parallel
_DENSE = 0.5  # from this share of wanted rows on, reading all and dropping the rest is no slower than a take
_GAP_BYTES = 64 << 10  # gaps up to this size are read through
_LONGEST_PAUSE_S = 10.0
_PIECE_BYTES = 4 << 20  # to read at once, of a range or of scattered rows: the allocator has so much ready, not more
_REQUESTS = 8  # pieces under way from an object store, where each takes its time,
_READS = 4  # and from a disk, so that the next one is read while this one is copied


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
    _threads: ThreadPoolExecutor | None = dataclasses.field(default=None, repr=False)  # end when this object does

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
            A row for each offset: the columns, in as many chunks as they came, and `_rowoffset` (int64).

        Raises:
            DatasetError: If the dataset no longer gives these rows, or its storage failed for too long.
        """
        pieces: list[pa.Table] = []
        self.read_into(offsets, pieces.append)
        return pa.concat_tables(pieces)

    def read_into(self, offsets: Int64Array, add: Callable[[pa.Table], None]) -> None:
        """The same, handed on in the order of the offsets, some mebibytes at a time: at least one table."""
        begin = time.monotonic()
        retry_s = self.retry_s if begin - self._gave_up > self.retry_s and self.reopen is not None else 0.0
        attempts, left = 0, offsets
        try:
            for attempt in retrying(retry_s):
                with attempt:
                    attempts += 1
                    if attempts > 1 and self.reopen is not None:
                        self.dataset = self.reopen()  # tells a version that is gone from a storage that fails
                    for table in self._read_pieces(left):
                        add(table.append_column(ROW_OFFSET, pa.array(left[: table.num_rows])))
                        left = left[table.num_rows :]
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
                f"be read ({tell(error)}). {tried} If the version was cleaned up: tag what you train on."
            ) from error

    def _read_pieces(self, offsets: Int64Array) -> Iterator[pa.Table]:
        """Reads rows some mebibytes at a time, and the next ones while these are used."""
        pieces = deque(self._pieces(offsets))
        if len(pieces) == 1:
            yield self._read_piece(*pieces.popleft())
            return
        most = _REQUESTS if _is_remote(self.dataset.uri) else _READS
        self._threads = self._threads or ThreadPoolExecutor(most, thread_name_prefix="read")
        under_way: deque[Future[pa.Table]] = deque()
        try:
            while pieces or under_way:
                while pieces and len(under_way) < most:
                    under_way.append(self._threads.submit(self._read_piece, *pieces.popleft()))
                yield under_way.popleft().result()
        finally:
            wait(under_way)  # of one that failed or was left: nothing is read behind its back

    def _pieces(self, offsets: Int64Array) -> Iterator[tuple[Int64Array, bool]]:
        """Cuts offsets into what is read at once, and says whether as a range; at least one piece."""
        rows = max(1, int(_PIECE_BYTES / max(self.row_bytes, 1)))
        is_range = len(offsets) > 0 and self.choose(offsets) == "range"
        firsts = self._range_firsts(offsets) if is_range else np.zeros(1, dtype=np.int64)
        for first, last in itertools.pairwise([*firsts.tolist(), len(offsets)]):
            for begin in range(first, max(last, first + 1), rows):
                yield offsets[begin : min(begin + rows, last)], is_range

    def _read_piece(self, offsets: Int64Array, is_range: bool) -> pa.Table:
        schema = self.dataset.schema
        blobs = [name for name in self.columns if is_blob(schema.field(name))]
        plain = [name for name in self.columns if name not in blobs]
        table = self._read_plain(offsets, plain, is_range) if plain else {}
        columns = {name: table[name] for name in plain}
        for name in blobs:
            found = self.dataset.read_blobs(name, indices=offsets.tolist(), preserve_order=True) if len(offsets) else []
            columns[name] = pa.chunked_array([pa.array([value for _, value in found], pa.large_binary())])
        whole = pa.table({name: columns[name] for name in self.columns})
        if whole.num_rows != len(offsets):
            raise DatasetError(
                f"{whole.num_rows} rows came for {len(offsets)} offsets, and no row may be lost in silence"
            )
        return whole

    def _read_plain(self, offsets: Int64Array, columns: list[str], is_range: bool) -> pa.Table:
        if len(offsets) == 0:
            # empty_table() knows no tensors with permuted axes.
            return pa.Table.from_batches([], schema=self.dataset.scanner(columns=columns).projected_schema)
        if not is_range:
            return self.dataset.take(pa.array(offsets), columns=columns)
        start, rows = int(offsets[0]), int(offsets[-1] - offsets[0]) + 1
        table = self.dataset.scanner(columns=columns, offset=start, limit=rows, batch_size=rows).to_table()
        return table if rows == len(offsets) else take_rows(table, offsets - start)  # rows of gaps were read as well

    def choose(self, offsets: Int64Array) -> ReadMode:
        """How rows are read: "range" where runs are long or most rows between the first and the last are wanted.

        Measured: a range of rows is read about as fast as one take of the same rows, and faster where it is long,
        because Lance then decodes in parallel; a take costs the same for dense and for scattered rows.
        """
        if self.mode != "auto":
            return self.mode
        firsts = self._range_firsts(offsets)
        lasts = np.r_[firsts[1:], len(offsets)] - 1
        read_rows, ranges = int((offsets[lasts] - offsets[firsts] + 1).sum()), len(firsts)
        long_runs = read_rows >= _RANGE_ROWS * ranges and read_rows * self.row_bytes >= _RANGE_BYTES * ranges
        return "range" if long_runs and len(offsets) >= _DENSE * read_rows else "take"

    def _range_firsts(self, offsets: Int64Array) -> Int64Array:
        """Where ranges begin among the offsets, small gaps read through."""
        gap_rows = max(1, int(_GAP_BYTES / max(self.row_bytes, 1)))
        return np.flatnonzero(np.diff(offsets, prepend=offsets[0] - gap_rows - 1) > gap_rows)


def _is_remote(uri: str) -> bool:
    return "://" in uri and not uri.startswith("file")


def is_blob(field: pa.Field) -> bool:
    """Whether a column is blob-encoded, of either version: a plain read of it gives descriptors and not bytes."""
    return (field.metadata or {}).get(b"lance-encoding:blob") == b"true" or "lance.blob" in str(field.type)


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
