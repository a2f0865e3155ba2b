"""Reads rows together with the bytes of the frames of videos that they name."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa

from raylance.columns import ROW_OFFSET
from raylance.orders.permutation import Int64Array
from raylance.source.derived import DerivingReader
from raylance.source.encoded_frames import ENCODED, EncodedFile, Ranges, Span, join_spans
from raylance.source.lance_errors import readable_text
from raylance.source.reader import PieceReader, Prepare, RowReader
from raylance.source.reads import Reads
from raylance.source.retrying import Wanted, always
from raylance.source.video_files import VideoFile, VideoFiles
from raylance.source.videos import NO_VIDEO, AddedColumns, NamedFrames, VideoColumn

T = TypeVar("T")

_RANGE_BYTES = 32 << 20  # most bytes of files that are read at once, and lie in one table
_VIDEOS = 64  # whose rows lie in one table: the index of each has some hundred KiB
_READS = 2  # calls into a dataset of videos at once

_File = tuple[int, int]  # the number of the files, and the row of the video


class VideoRowReader(PieceReader):
    """Reads rows together with the frames that they name, still encoded, as columns of the type `ENCODED`. Several
    threads may use one reader at once.

    Attributes:
        margin: See `RowReader.widened`.
    """

    def __init__(self, reader: RowReader, added: AddedColumns, *, retry_s: float, missing: bool) -> None:
        """Opens nothing yet. Takes a reader of the rows, the columns to add, and for the datasets of videos `retry_s`
        and `missing` as in `Reads`.
        """
        self._reader, self._columns, self._drops, self.margin = reader, added.videos, added.video_drops, 0
        self._files: list[VideoFiles] = []
        self._files_of: list[int] = []  # the number of each column's files
        keys: list[tuple[object, ...]] = []
        for column in self._columns:
            key = column.source.uri, column.source.version, column.setting.blob
            if key not in keys:
                keys.append(key)
                reads = Reads(column.source, at_once=_READS, retry_s=retry_s, missing=missing)
                self._files.append(VideoFiles(reads, column.setting.blob, column.opener))
            self._files_of.append(keys.index(key))

    def widened(self, margin: int) -> "VideoRowReader":
        """See `RowReader.widened`."""
        found = copy.copy(self)  # with the same files
        found.margin = margin
        return found

    def read_pieces(
        self, offsets: Int64Array, prepare: Prepare[T], add: Callable[[T], bool], is_wanted: Wanted = always
    ) -> None:
        """See `RowReader.read_pieces`."""
        table = self._reader.read_wanted(offsets, is_wanted)
        if table is None:
            return
        for first, last in itertools.pairwise(self._cuts(table)):
            part = table.slice(first, last - first)
            for begin, piece in self._with_frames(part, is_wanted):
                if not (is_wanted() and add(prepare(first + begin, piece, None))):
                    return

    def _cuts(self, table: pa.Table) -> list[int]:
        """Returns where to cut rows, from 0 to their number, so that no part names more than some videos."""
        new = [np.unique(each.finder.get().find(table).videos, return_index=True)[1] for each in self._columns]
        return [0, *np.sort(np.concatenate(new))[_VIDEOS::_VIDEOS].tolist(), table.num_rows]

    def close(self) -> None:
        """See `RowReader.close`."""
        self._reader.close()
        for files in self._files:
            files.reads.close()

    def _with_frames(self, table: pa.Table, is_wanted: Wanted) -> Iterator[tuple[int, pa.Table]]:
        """Yields rows with their frames, some at a time, and the index of the first of them.

        Raises:
            DatasetError: If the storage of videos fails for too long.
        """
        named = [column.finder.get().find(table) for column in self._columns]
        wanted: list[set[int]] = [set() for _ in self._files]
        for number, (videos, _, _) in zip(self._files_of, named, strict=True):
            wanted[number].update(set(np.unique(videos).tolist()) - {NO_VIDEO})
        files: dict[_File, VideoFile] = {
            (number, video): file
            for number, videos in enumerate(wanted)
            for video, file in self._files[number].find(sorted(videos), is_wanted).items()
        }
        if not is_wanted():
            return  # then files may be missing
        for first, last, spans in self._groups(table.num_rows, named, files):
            ranges = self._read(spans, files, is_wanted)
            if not is_wanted():
                return
            rows, piece = table.slice(first, last - first), table.slice(first, last - first)
            piece = piece.drop_columns([ROW_OFFSET, *self._drops])
            for column, number, each in zip(self._columns, self._files_of, named, strict=True):
                mine = {video: found for (of, video), found in ranges.items() if of == number}
                encoded = _encoded(column, each, slice(first, last), mine, number, files)
                piece = piece.append_column(column.setting.column, encoded)
            yield first, piece.append_column(ROW_OFFSET, rows[ROW_OFFSET])

    def _groups(
        self, rows: int, named: Sequence[NamedFrames], files: Mapping[_File, VideoFile]
    ) -> Iterator[tuple[int, int, dict[_File, list[Span]]]]:
        """Cuts rows into runs whose frames have not too many bytes; yields the first row of each, the row after it, and
        the bytes that it needs.
        """
        first, step = 0, max(1, rows)
        while first < rows or not rows:
            spans = self._spans(slice(first, first + step), named, files)
            nbytes = sum(end - begin for each in spans.values() for begin, end in each)
            if nbytes > _RANGE_BYTES and step > 1:
                step = max(1, min(step // 2, int(step * _RANGE_BYTES / nbytes)))
                continue
            yield first, min(first + step, rows), spans
            if not rows:
                return
            first += step

    def _spans(
        self, part: slice, named: Sequence[NamedFrames], files: Mapping[_File, VideoFile]
    ) -> dict[_File, list[Span]]:
        spans: dict[_File, list[Span]] = {}
        for number, (videos, frames, _) in zip(self._files_of, named, strict=True):
            for video in np.unique(videos[part]).tolist():
                file = files.get((number, video))
                if file is not None and file.places is not None:
                    more = file.spans(frames[part][videos[part] == video], self.margin)
                    spans[number, video] = join_spans([*spans.get((number, video), ()), *more])
        return spans

    def _read(
        self, spans: Mapping[_File, list[Span]], files: Mapping[_File, VideoFile], is_wanted: Wanted
    ) -> dict[_File, Ranges]:
        """Reads bytes, in one call for each dataset of videos; returns them with those that open the files."""
        found = {key: dict(file.head) for key, file in files.items()}
        for number, source in enumerate(self._files):
            mine = {video: each for (of, video), each in spans.items() if of == number and each}
            for video, ranges in source.read(mine, is_wanted).items():
                found[number, video] |= ranges
        return found


def _encoded(
    column: VideoColumn,
    named: NamedFrames,
    part: slice,
    ranges: Mapping[int, Ranges],
    number: int,
    files: Mapping[_File, VideoFile],
) -> pa.Array:
    """Returns the frames of a part of the rows that `named` is of, as a column of the type `ENCODED`."""
    videos, frames = named.videos[part], named.frames[part]
    reasons: list[str | None] = [None] * len(videos)
    for row in named.reasons.keys() & range(part.start, part.stop):
        reasons[row - part.start] = named.reasons[row]
    values: list[dict[str, object] | None] = [None] * len(videos)
    for video, at in zip(*(each.tolist() for each in np.unique(videos, return_index=True)), strict=True):
        if (file := files.get((number, video))) is not None:
            values[at] = _file_of(column, video, file, ranges[video]).to_arrow()
    fields = [pa.array(videos), pa.array(frames), pa.array(reasons, pa.string()), pa.array(values, ENCODED[3].type)]
    return pa.StructArray.from_arrays(fields, fields=list(ENCODED))


def _file_of(column: VideoColumn, video: int, file: VideoFile, ranges: Ranges) -> EncodedFile:
    failure = None if file.failure is None else readable_text(file.failure)
    index, finder = None if file.places is None else file.places.index, column.finder.get()
    if index is not None and finder.rate is not None:
        drift_s = (index.frames - 1) * abs(1 / index.rate - 1 / finder.rate)
        if drift_s > max(finder.tolerance_s, 2 * index.tick_s):
            failure = f"it has {index.rate:.9g} frames a second, the rows say {finder.rate:.9g}"
    return EncodedFile(
        name=str(column.setting.videos),
        key=f"{column.source.uri} {column.source.version} {column.setting.blob} {video}",
        size=file.size,
        ranges={} if failure else ranges,
        index=None if failure else index,
        failure=failure,
        levels=column.levels,
        resizes=column.resizes,
    )


def add_columns(reader: RowReader, added: AddedColumns, dataset: str, *, retry_s: float, missing: bool) -> RowReader:
    """Returns a reader of rows with added columns; `dataset` is for errors, see `VideoRowReader` for the others."""
    if added.makers:
        reader = DerivingReader(reader, added.makers, added.drops, dataset)
    if added.videos:
        reader = VideoRowReader(reader, added, retry_s=retry_s, missing=missing)
    return reader
