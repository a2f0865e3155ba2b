"""Reads rows together with the frames of videos that they name."""

import copy
import dataclasses
import functools
import itertools
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from raylance.columns import FAILURE, ROW_OFFSET
from raylance.errors import BadRowError, ConfigError
from raylance.orders.permutation import Int64Array
from raylance.source.derived import DerivingReader
from raylance.source.lance_errors import readable_text
from raylance.source.limits import Calls
from raylance.source.reader import PieceReader, Prepare, RowReader
from raylance.source.reads import Reads
from raylance.source.retrying import Wanted, always
from raylance.source.video_file import (
    FrameError,
    Frames,
    MissingBytesError,
    OpenVideo,
    OtherSizeError,
    Span,
    join_spans,
)
from raylance.source.video_files import Ranges, VideoFile, VideoFiles
from raylance.source.videos import NO_VIDEO, AddedColumns

T = TypeVar("T")

_THREADS = 2  # that decode
_PIECE_BYTES = 4 << 20  # of the frames in one table: the allocator reuses freed memory of this size
_RANGE_BYTES = 32 << 20  # most bytes of files that a load has in memory
_AHEAD = _THREADS + 2  # pieces that are decoded, or wait for a thread
_SKIPPED = NO_VIDEO + 1  # the video of rows whose frame nobody needs
_NO_FILE = VideoFile(0, failure=ValueError("the row names no frame"))
_VIDEOS = 64  # that one load has open: each holds some hundred KiB
_OPEN = 4  # videos that a thread keeps open
_OPEN_PIXELS = 4 << 20  # that their frames have together, if they are more: a decoder may hold 17 frames


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [first, last) of a load, and the bytes from which their frames are decoded: by number of the files, and row
    of the video.
    """

    first: int
    last: int
    spans: dict[tuple[int, int], list[Span]]

    @property
    def nbytes(self) -> int:
        return sum(end - begin for spans in self.spans.values() for begin, end in spans)


@dataclasses.dataclass(frozen=True, slots=True)
class _Decoded(Generic[T]):
    """What became of a piece: the prepared rows; if they are not all, why."""

    made: list[T]
    error: BadRowError | None = None
    missing: tuple[tuple[int, int], int] | None = None  # a video as in `_Piece`, and the offset of bytes to read


class VideoReader(PieceReader):
    """Reads rows together with the frames that they name. Several threads may use one reader at once.

    A load reads its rows first. Their frames are cut into pieces at keyframes. The byte ranges of all pieces are read
    in one call for each dataset of videos. Then each piece is decoded by one thread.
    """

    def __init__(
        self,
        reader: RowReader,
        added: AddedColumns,
        dataset: str,
        *,
        retry_s: float,
        missing: bool,
        is_trial: bool = False,
    ) -> None:
        """Opens nothing yet.

        Args:
            reader: Reads the rows.
            added: The columns to add.
            dataset: Name of the dataset of rows, for errors.
            retry_s: As in `Reads`, for the datasets of videos.
            missing: As in `Reads`.
            is_trial: Whether frames may be bad, because nobody uses the pixels.
        """
        self._reader, self.columns, self._drops, self.dataset = reader, added.videos, added.video_drops, dataset
        self.is_trial, self.masks, self.row_bytes = is_trial, added.masks, max(1, added.frame_bytes)
        self.files: list[VideoFiles] = []
        self.files_of: list[int] = []  # the number of each column's files
        keys: list[tuple[object, ...]] = []
        for column in self.columns:
            key = column.source.uri, column.source.version, column.setting.blob
            if key not in keys:
                keys.append(key)
                reads = Reads(column.source, at_once=_THREADS, retry_s=retry_s, missing=missing)
                self.files.append(VideoFiles(reads, column.setting.blob))
            self.files_of.append(keys.index(key))
        self.threads, self._local = Calls(_THREADS, "raylance-frames"), threading.local()
        self.unneeded: Mapping[str, Int64Array] = {}

    def skipping(self, unneeded: Mapping[str, Int64Array]) -> "VideoReader":
        """See `RowReader.skipping`. The frames are zeros there."""
        found = copy.copy(self)  # with the same threads, files and open videos
        found.unneeded = unneeded
        return found

    def read_pieces(
        self,
        offsets: Int64Array,
        prepare: Prepare[T],
        add: Callable[[T], bool],
        is_wanted: Wanted = always,
    ) -> None:
        """See `RowReader.read_pieces`."""
        table = self._reader.read_wanted(offsets, is_wanted)
        if table is None:
            return
        if not table.num_rows:
            add(prepare(0, self.with_frames(table, self.new_frames(0), [{} for _ in self.columns], 0), None))
            return
        firsts = self._cuts(table)
        for first, last in itertools.pairwise([*firsts, table.num_rows]):
            load = _Load(self, table.slice(first, last - first), is_wanted)
            for group in load.groups():
                if not (is_wanted() and load.run(group, functools.partial(_moved, prepare, first), add)):
                    return

    def _cuts(self, table: pa.Table) -> list[int]:
        """Returns where to cut rows, so that no part names more than some videos, whose index is held meanwhile."""
        new = [np.unique(each.finder.get().find(table).videos, return_index=True)[1] for each in self.columns]
        return [0, *np.sort(np.concatenate(new))[_VIDEOS::_VIDEOS].tolist()]

    def close(self) -> None:
        """See `RowReader.close`."""
        self._reader.close()
        for files in self.files:
            files.reads.close()

    def new_frames(self, rows: int) -> list[Frames]:
        """Returns new memory for the frames of some rows, by column."""
        return [np.empty((rows, *each.shape), each.dtype) for each in self.columns]

    def with_frames(
        self, table: pa.Table, frames: Sequence[Frames], errors: Sequence[Mapping[int, BadRowError]], first: int
    ) -> pa.Table:
        """Returns rows with their frames, as they are delivered. The errors of bad rows are those of each column, by
        number from `first` on; they are marked if bad rows are masked.
        """
        whole = table.drop_columns([ROW_OFFSET, *self._drops])
        for column, pixels, bad in zip(self.columns, frames, errors, strict=True):
            flat = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), column.kind.storage_type.list_size)
            whole = whole.append_column(column.setting.column, pa.ExtensionArray.from_storage(column.kind, flat))
            if self.masks:
                reasons = [bad[row].reason if row in bad else None for row in range(first, first + table.num_rows)]
                whole = whole.append_column(f"{FAILURE}{column.setting.column}", pa.array(reasons, pa.string()))
        return whole.append_column(ROW_OFFSET, table[ROW_OFFSET])

    @property
    def open_videos(self) -> "OrderedDict[tuple[int, int], OpenVideo]":
        """The videos that this thread has open, by number of the files and row; the last used one comes last."""
        kept: OrderedDict[tuple[int, int], OpenVideo] = self._local.__dict__.setdefault("kept", OrderedDict())
        return kept


class _Load:
    """One load of rows, and the frames that they name."""

    def __init__(self, reader: VideoReader, table: pa.Table, is_wanted: Wanted) -> None:
        """Finds the frames, and opens files that are not known yet.

        Raises:
            DatasetError: If the storage of videos fails for too long.
        """
        self._reader, self._table, self._is_wanted = reader, table, is_wanted
        self._finders = [column.finder.get() for column in reader.columns]
        self._named = [each.find(table) for each in self._finders]
        for number, column in enumerate(reader.columns):
            if len(unneeded := reader.unneeded.get(column.setting.column, ())):
                named, is_unneeded = self._named[number], np.isin(table[ROW_OFFSET].to_numpy(), unneeded)
                self._named[number] = named._replace(videos=np.where(is_unneeded, _SKIPPED, named.videos))
        wanted: list[set[int]] = [set() for _ in reader.files]
        for number, (videos, _, _) in zip(reader.files_of, self._named, strict=True):
            wanted[number].update(set(np.unique(videos).tolist()) - {NO_VIDEO, _SKIPPED})
        self._files: dict[tuple[int, int], VideoFile] = {
            (number, video): file
            for number, videos in enumerate(wanted)
            for video, file in reader.files[number].find(sorted(videos), is_wanted).items()
        }

    def groups(self) -> Iterator[list[_Piece]]:
        """Yields the pieces of the load, together those whose bytes are read in one call."""
        group: list[_Piece] = []
        if not self._is_wanted():
            return  # then files may be missing
        for piece in self._pieces():
            if group and sum(each.nbytes for each in group) + piece.nbytes > _RANGE_BYTES:
                yield group
                group = []
            group.append(piece)
        yield group

    def _pieces(self) -> Iterator[_Piece]:
        """Cuts the rows at keyframes, into pieces that are not small; one thread decodes each."""
        least_rows, first = max(1, _PIECE_BYTES // self._reader.row_bytes), 0
        for last in [*self._cuts().tolist(), self._table.num_rows]:
            if last - first >= least_rows or last == self._table.num_rows:
                yield _Piece(first, last, self._spans(first, last))
                first = last

    def _cuts(self) -> Int64Array:
        """Returns where rows begin a part between two keyframes, in the column whose keyframes are furthest apart."""
        parts: list[Int64Array] = []
        for column, (videos, frames, _) in enumerate(self._named):
            keyframes = np.zeros(len(frames), dtype=np.int64)
            for video, rows in self._rows_of(column, 0, len(frames)):
                if (index := self._file(column, video).index) is not None:
                    keyframes[rows] = index.keyframe_of(frames[rows])
            changes = (np.diff(videos) != 0) | (np.diff(keyframes) != 0)
            parts.append(np.flatnonzero(changes) + 1)
        return min(parts, key=len)

    def _spans(self, first: int, last: int) -> dict[tuple[int, int], list[Span]]:
        spans: dict[tuple[int, int], list[Span]] = {}
        for column, (_, frames, _) in enumerate(self._named):
            for video, rows in self._rows_of(column, first, last):
                file, key = self._file(column, video), (self._reader.files_of[column], video)
                if file.index is not None:
                    cut = [(begin, min(end, file.size)) for begin, end in file.index.spans(frames[rows])]
                    more = [span for span in cut if span[0] < span[1] and not file.has(span)]
                    spans[key] = join_spans([*spans.get(key, ()), *more])
        return spans

    def _rows_of(self, column: int, first: int, last: int) -> Iterator[tuple[int, Int64Array]]:
        """Yields the videos that rows [first, last) need, and the indices of these rows, ordered by frame."""
        videos, frames = (each[first:last] for each in self._named[column][:2])
        order = np.lexsort((frames, videos))
        _, cuts = np.unique(videos[order], return_index=True)
        for mine in np.split(order, cuts[1:]):
            if videos[mine[0]] != _SKIPPED:
                yield int(videos[mine[0]]), mine + first

    def _file(self, column: int, video: int) -> VideoFile:
        return _NO_FILE if video == NO_VIDEO else self._files[self._reader.files_of[column], video]

    def run(self, group: list[_Piece], prepare: Prepare[T], add: Callable[[T], bool]) -> bool:
        """Reads the bytes of pieces, decodes them, and adds their rows; returns whether more may follow.

        Raises:
            BadRowError: If a frame cannot be decoded; the rows before it were added.
            DatasetError: If the storage of videos fails for too long.
        """
        ranges = self._read(group)
        running: deque[tuple[_Piece, Future[_Decoded[T]]]] = deque()
        pieces = iter(group)

        def submit(piece: _Piece) -> Future[_Decoded[T]]:
            return self._reader.threads.submit(self._decode, piece, ranges, prepare)

        try:
            while True:
                running.extend((piece, submit(piece)) for piece in itertools.islice(pieces, _AHEAD - len(running)))
                if not running:
                    return True
                piece, future = running.popleft()
                found = future.result()
                while found.missing is not None and self._is_wanted():
                    key, offset = found.missing
                    span = self._files[key].span_from(offset)
                    more = self._reader.files[key[0]].read({key[1]: [span]}, self._is_wanted)
                    ranges[key] = ranges.get(key, {}) | more[key[1]]
                    found = submit(piece).result()
                if not all(add(made) for made in found.made):
                    return False
                if found.error is not None:
                    raise found.error
        finally:
            wait([future for _, future in running if not future.cancel()])

    def _read(self, group: Sequence[_Piece]) -> dict[tuple[int, int], Ranges]:
        """Reads the bytes of pieces, in one call for each dataset of videos."""
        found: dict[tuple[int, int], Ranges] = {}
        for number, files in enumerate(self._reader.files):
            spans: dict[int, list[Span]] = {}
            for (of, video), each in itertools.chain.from_iterable(piece.spans.items() for piece in group):
                if of == number and each:
                    spans.setdefault(video, []).extend(each)
            joined = {video: join_spans(each) for video, each in spans.items()}
            found |= {(number, video): each for video, each in files.read(joined, self._is_wanted).items()}
        return found

    def _decode(self, piece: _Piece, ranges: dict[tuple[int, int], Ranges], prepare: Prepare[T]) -> _Decoded[T]:
        """Decodes the frames of a piece, and prepares its rows, some MiB at once."""
        made: list[T] = []
        step = max(1, _PIECE_BYTES // self._reader.row_bytes)
        for first in range(piece.first, piece.last, step):
            if not self._is_wanted():
                break
            last = min(first + step, piece.last)
            try:
                pixels, errors = self._decode_rows(first, last, ranges)
            except _MissingError as error:
                return _Decoded([], missing=error.missing)
            bad = {row: error for each in reversed(errors) for row, error in each.items()}
            is_end = bool(bad) and not (self._reader.is_trial or self._reader.masks)
            if is_end:
                last = min(bad)
            if last > first:
                rows, cut = self._table.slice(first, last - first), [each[: last - first] for each in pixels]
                made.append(prepare(first, self._reader.with_frames(rows, cut, errors, first), None))
            if is_end:
                return _Decoded(made, error=bad[last])
        return _Decoded(made)

    def _decode_rows(
        self, first: int, last: int, ranges: dict[tuple[int, int], Ranges]
    ) -> tuple[list[Frames], list[dict[int, BadRowError]]]:
        """Returns the frames of rows [first, last) by column, and the errors of rows without a frame, which are 0."""
        made, errors = self._reader.new_frames(last - first), [dict[int, BadRowError]() for _ in self._named]
        for column, out in enumerate(made):
            out[self._named[column].videos[first:last] == _SKIPPED] = 0
            for video, rows in self._rows_of(column, first, last):
                numbers, which = np.unique(self._named[column][1][rows], return_inverse=True)
                is_run = len(numbers) == len(rows) and bool((np.diff(rows) == 1).all())
                pixels = out[rows[0] - first : rows[-1] + 1 - first] if is_run else np.empty_like(out[: len(numbers)])
                try:
                    for low, high, error in self._decode_video(column, video, numbers, pixels, ranges):
                        pixels[low:high] = 0
                        for row in rows[(low <= which) & (which < high)].tolist():
                            errors[column][row] = self._bad_row(column, row, error)
                except OtherSizeError as error:
                    setting = self._reader.columns[column].setting
                    named = f"frame {error.number} of video {video} in {setting.videos!r}"
                    raise ConfigError(f"Video({setting.column!r}): {named} has {error.reason}") from None
                if not is_run:
                    out[rows - first] = pixels[which]
        return made, errors

    def _decode_video(
        self, column: int, video: int, numbers: Int64Array, out: Frames, ranges: dict[tuple[int, int], Ranges]
    ) -> Iterator[tuple[int, int, Exception]]:
        """Decodes frames of one video. Yields the indices [low, high) of those that cannot be decoded, and the reason:
        a bad frame, and all after it up to the next keyframe.
        """
        file, kept = self._file(column, video), self._reader.open_videos
        if file.failure is not None or file.index is None:
            yield 0, len(numbers), file.failure or ValueError("its index is not known")
            return
        index, finder, made = file.index, self._finders[column], self._reader.columns[column]
        if finder.rate is not None:
            drift_s = (index.frames - 1) * abs(1 / index.rate - 1 / finder.rate)
            if drift_s > max(finder.tolerance_s, 2 * index.tick_s):
                reason = f"it has {index.rate:.9g} frames a second, the rows say {finder.rate:.9g}"
                yield 0, len(numbers), ValueError(reason)
                return
        for at in np.flatnonzero((numbers < 0) | (numbers >= index.frames)).tolist():
            yield at, at + 1, ValueError(f"frame {numbers[at]} is asked for, and the video has {index.frames}")
        low, high = np.searchsorted(numbers, [0, index.frames]).tolist()
        key = self._reader.files_of[column], video
        opened, held, is_good = kept.pop(key, None), file.head | ranges.get(key, {}), True
        try:
            opened = opened or OpenVideo(file.size, held, index)
            while low < high:
                try:
                    opened.read(numbers[low:high], out[low:high], held, made.levels, resizes=made.resizes)
                    break
                except FrameError as error:
                    is_good, bad = False, int(numbers.searchsorted(error.number))
                    low = max(bad + 1, int(numbers.searchsorted(index.end_of(error.number))))
                    yield bad, low, error.cause
        except MissingBytesError as error:
            raise _MissingError(key, error.offset) from error
        if is_good:
            kept[key] = opened
        else:
            opened.close()
        pixels = sum(math.prod(each.size) for each in kept.values())
        while len(kept) > _OPEN or (len(kept) > 1 and pixels > _OPEN_PIXELS):
            _, oldest = kept.popitem(last=False)
            pixels -= math.prod(oldest.size)
            oldest.close()

    def _bad_row(self, column: int, row: int, error: Exception) -> BadRowError:
        setting, named = self._reader.columns[column].setting, self._named[column]
        reason = named.reasons.get(row) or (
            f"frame {named.frames[row]} of video {named.videos[row]} in {setting.videos!r}: {readable_text(error)}"
        )
        offset = int(self._table[ROW_OFFSET][row].as_py())
        bad = BadRowError(setting.column, offset, reason, self._reader.dataset)
        bad.__cause__ = error
        return bad


class _MissingError(Exception):
    """Bytes of a video are missing."""

    def __init__(self, key: tuple[int, int], offset: int) -> None:
        super().__init__(key, offset)
        self.missing = key, offset


def _moved(prepare: Prepare[T], by: int, first: int, table: pa.Table, places: Int64Array | None) -> T:
    return prepare(first + by, table, places)


def add_columns(
    reader: RowReader, added: AddedColumns, dataset: str, *, retry_s: float, missing: bool, is_trial: bool = False
) -> RowReader:
    """Returns a reader of rows with added columns; see `VideoReader` for the arguments."""
    if added.makers:
        reader = DerivingReader(reader, added.makers, added.drops, dataset)
    if added.videos:
        reader = VideoReader(reader, added, dataset, retry_s=retry_s, missing=missing, is_trial=is_trial)
    return reader
