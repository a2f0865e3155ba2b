"""Owns reading: row offsets in, one Arrow table out, by range or by take; never decides which rows, never decodes."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raylance.columns import ROW_OFFSET
from raylance.errors import ConfigError, DatasetError
from raylance.orders.permutation import Int64Array
from raylance.source.lance_errors import LANCE_ERRORS, Failure, failure_of, readable_text
from raylance.source.memory import take_rows
from raylance.source.retrying import OPENING_S, patiently, retrying
from raylance.source.version import Source, VersionCheck

ReadMode = Literal["auto", "range", "take"]
READ_MODES: tuple[ReadMode, ...] = ("auto", "range", "take")

_RANGE_BYTES = 256 << 10  # runs of at least this many bytes are read as ranges,
_RANGE_ROWS = 8  # if they have at least this many rows: one take of a few large rows reads them in parallel
_DENSE = 0.5  # from this share of wanted rows on, reading all and dropping the rest is no slower than a take
_GAP_BYTES = 64 << 10  # gaps up to this size are read through
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
    """Bytes of a row of these columns as stored, the mean of all rows: it knows of a tail that no sample hits.

    Raises:
        DatasetError: If the files cannot be read.
    """
    fields = [field for field in dataset.lance_schema.fields() if field.name() in columns]
    wanted = set()
    while fields:
        field = fields.pop()
        wanted.add(field.id())
        fields += field.children()
    try:
        stats = patiently(dataset.stats.data_stats)
    except LANCE_ERRORS as error:
        raise DatasetError(
            f"the files of {dataset.uri!r}, version {dataset.version}, cannot be read ({readable_text(error)}); "
            "nothing was started. Look whether they are there, whole and readable, and try again."
        ) from error
    stored = sum(int(field.bytes_on_disk) for field in stats.fields if field.id in wanted)
    rows = sum(int(fragment.physical_rows) for fragment in dataset.get_fragments())
    return stored / max(1, rows)


@dataclasses.dataclass(slots=True, kw_only=True)
class Reader:
    """Reads rows of a pinned dataset, for several threads at once.

    Attributes:
        dataset: The dataset; None opens what is pinned with the first read.
        row_bytes: Bytes of a row of these columns, about; chooses between range and take.
        mode: "range" and "take" read so whatever the rows; "auto" chooses, see `choose`.
        pinned: What is opened again before a read is tried again, and checked now and then while all goes well; None
            where only the open dataset is at hand.
        retry_s: Seconds that a read is tried again when the storage fails. What is queued after a read that gave up is
            tried once only, for as long again: one outage costs one deadline.
        missing: Whether a file that is missing is such a failure: where it was there before, it may come back.
    """

    dataset: lance.LanceDataset | None
    columns: Sequence[str]
    row_bytes: float
    mode: ReadMode = "auto"
    pinned: Source | None = None
    retry_s: float = OPENING_S
    missing: bool = False
    _gave_up: float = dataclasses.field(default=float("-inf"), repr=False)
    _threads: ThreadPoolExecutor | None = dataclasses.field(default=None, repr=False)  # end when this object does
    _check: VersionCheck | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.pinned is not None:
            self._check = VersionCheck(self.pinned.check)
        quoted = [name for name in self.columns if "`" in name]
        if quoted:  # however it is quoted, Lance panics over it
            raise DatasetError(
                f"{self._uri!r} has a backtick in the column name {', '.join(map(repr, quoted))}, by which "
                "Lance cannot read it; nothing was started. Name other columns in columns=, or write the dataset with "
                "another name."
            )

    @property
    def _uri(self) -> str:
        return self.pinned.uri if self.pinned is not None else str(self.dataset and self.dataset.uri)

    @property
    def _version(self) -> int | None:
        return self.pinned.version if self.pinned is not None else self.dataset and int(self.dataset.version)

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
        retry_s = self.retry_s if begin - self._gave_up > self.retry_s else 0.0
        attempts, left = 0, offsets
        try:
            for attempt in retrying(retry_s, missing=self.missing):
                with attempt:
                    attempts += 1
                    for table in self._read_pieces(self._ready(is_first=attempts == 1), left):
                        add(table.append_column(ROW_OFFSET, pa.array(left[: table.num_rows])))
                        left = left[table.num_rows :]
        except (DatasetError, *LANCE_ERRORS) as error:
            rows = f"rows {offsets[0]} to {offsets[-1]}" if len(offsets) else "columns"
            what = f"{rows} of {self._uri!r}, version {self._version}, cannot be read"
            failure = failure_of(error)
            if failure is Failure.PASSING or (self.missing and failure is Failure.MISSING):
                self._gave_up = time.monotonic() if retry_s else self._gave_up
                fix = (
                    "and the epoch stops here. When the storage is back, continue from the last checkpoint, or iterate "
                    "again; read_timeout_s sets how long to wait for it."
                    if self.missing
                    else "and nothing more is read. Try again when the storage is back."
                )
                tried = f"It was tried {attempts} times in {time.monotonic() - begin:.0f} s, {fix}"
                raise DatasetError(f"{what} ({readable_text(error)}). {tried}") from error
            found = self._reason(error) if failure is Failure.MISSING else error
            raise DatasetError(f"{what} ({readable_text(found)}). The epoch stops here.") from found

    def _ready(self, *, is_first: bool) -> lance.LanceDataset:
        """Returns the dataset to read from: at the first attempt the open one, later one that is opened again.

        Two threads may read at once, so `self.dataset` is read only once: the other thread may drop it at any moment.
        """
        dataset = self.dataset
        if dataset is None or (self.pinned is not None and not is_first):
            if self.pinned is None:
                raise ConfigError("a Reader takes a dataset, or what is pinned: nothing can be read of neither.")
            self.dataset = None  # the next read, too, opens it again if this opening fails
            self.dataset = dataset = self.pinned.open_once()
            if self._check is not None:
                self._check.passed()
        elif self._check is not None:
            self._check.make()
        return dataset

    def _reason(self, error: Exception) -> Exception:
        """Why a file is missing: as the error says, or because the version is gone, or another dataset is there."""
        try:
            if self.pinned is not None:
                self.pinned.open_once()
        except DatasetError as found:
            return found
        return error

    def _read_pieces(self, dataset: lance.LanceDataset, offsets: Int64Array) -> Iterator[pa.Table]:
        """Reads rows some mebibytes at a time, and the next ones while these are used."""
        pieces = deque(self._pieces(offsets))
        if len(pieces) == 1:
            yield self._read_piece(dataset, *pieces.popleft())
            return
        most = _REQUESTS if _is_remote(dataset.uri) else _READS
        self._threads = self._threads or ThreadPoolExecutor(most, thread_name_prefix="read")
        under_way: deque[Future[pa.Table]] = deque()
        try:
            while pieces or under_way:
                while pieces and len(under_way) < most:
                    under_way.append(self._threads.submit(self._read_piece, dataset, *pieces.popleft()))
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

    def _read_piece(self, dataset: lance.LanceDataset, offsets: Int64Array, is_range: bool) -> pa.Table:
        schema = dataset.schema
        blobs = [name for name in self.columns if is_blob(schema.field(name))]
        plain = [name for name in self.columns if name not in blobs]
        table = _read_plain(dataset, offsets, plain, is_range) if plain else {}
        columns = {name: table[name] for name in plain}
        for name in blobs:
            found = dataset.read_blobs(name, indices=offsets.tolist(), preserve_order=True) if len(offsets) else []
            columns[name] = pa.chunked_array([pa.array([value for _, value in found], pa.large_binary())])
        whole = pa.table({name: columns[name] for name in self.columns})
        if whole.num_rows != len(offsets):
            raise DatasetError(
                f"{whole.num_rows} rows came for {len(offsets)} offsets, and no row may be lost in silence"
            )
        return whole

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


def _read_plain(dataset: lance.LanceDataset, offsets: Int64Array, columns: list[str], is_range: bool) -> pa.Table:
    if len(offsets) == 0:
        # empty_table() knows no tensors with permuted axes.
        return pa.Table.from_batches([], schema=dataset.scanner(columns=columns).projected_schema)
    if not is_range:
        return _tidy(dataset.take(pa.array(offsets), columns=columns))
    start, rows = int(offsets[0]), int(offsets[-1] - offsets[0]) + 1
    table = _tidy(dataset.scanner(columns=columns, offset=start, limit=rows, batch_size=rows).to_table())
    return table if rows == len(offsets) else take_rows(table, offsets - start)  # rows of gaps were read as well


def _tidy(table: pa.Table) -> pa.Table:
    """The same with dictionaries of different values. A take of Lance's puts those of several fragments one after the
    other, and storage version 2.0 has null among the values: neither pandas nor Arrow's own concatenation takes that.
    """
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            chunks = [_tidy_chunk(chunk) for chunk in table[field.name].chunks]
            table = table.set_column(place, field, pa.chunked_array(chunks, field.type))
    return table


def _tidy_chunk(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
    kind, different = chunk.type, chunk.dictionary.unique().drop_null()
    if len(different) == len(chunk.dictionary):
        return chunk
    indices = pc.index_in(chunk.dictionary, different).take(chunk.indices).cast(kind.index_type)
    return pa.DictionaryArray.from_arrays(indices, different, ordered=kind.ordered)


def _is_remote(uri: str) -> bool:
    return "://" in uri and not uri.startswith("file")


def is_blob(field: pa.Field) -> bool:
    """Whether a column is blob-encoded, of either version: a plain read of it gives descriptors and not bytes."""
    return (field.metadata or {}).get(b"lance-encoding:blob") == b"true" or "lance.blob" in str(field.type)
