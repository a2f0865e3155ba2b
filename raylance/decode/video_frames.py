"""Decodes the frames of videos that the rows of a block name."""

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import ROW_OFFSET
from raylance.decode.arrays import to_arrow
from raylance.decode.decoding import DecodedRows, VideoFrames, bytes_of_value
from raylance.decode.open_video import FrameError, OpenVideo, OtherSizeError
from raylance.decode.transforms import error_of_no_row
from raylance.errors import ConfigError, HelperError
from raylance.memory.lending import FadingLender, LendFor
from raylance.orders.permutation import Int64Array
from raylance.source.encoded_frames import EncodedFile
from raylance.source.lance_errors import readable_text

_PIECE_BYTES = 4 << 20  # about the bytes of the frames that one of several threads decodes at a time
MOST_OPEN = 4  # videos that a thread keeps open
_OPEN_PIXELS = 4 << 20  # that their frames have together, if they are more: a decoder may hold 17 frames


class FrameColumn:
    """Decodes the frames that rows of a block name, each once. Keeps some videos open in each thread."""

    def __init__(self, frames: VideoFrames) -> None:
        self._frames, self.column = frames, frames.column
        self._row_bytes = bytes_of_value(frames)
        self._lender, self._local = FadingLender(), threading.local()

    def decode(
        self,
        rows: DecodedRows,
        executor: Executor | None,
        block: pa.Table,
        known_bad: Mapping[int, str],
        lend: LendFor | None,
    ) -> pa.Array:
        """Decodes the frames of rows in the threads of `executor`, or in this one.

        Args:
            rows: The rows, of a column of the type `ENCODED`. A bad row becomes zeros, and is noted here.
            executor: See above.
            block: All rows of the block, some of which have the files.
            known_bad: Reasons not to decode the frames of some rows of the block, by the offset of the row. Frames
                after such a frame are decoded by way of it, so they are bad, too.
            lend: Gives the memory of the pixels.

        Returns:
            The pixels, in memory of their own.

        Raises:
            MissingBytesError: If the block has less bytes of a file than decoding needs.
            ConfigError: If a frame has another size than others, and is not to be resized.
        """
        count, whole = rows.table.num_rows, block[self.column].combine_chunks()
        named = rows.table[self.column].combine_chunks()
        videos, numbers = named.field("video").to_numpy(), named.field("frame").to_numpy()
        nbytes = count * self._row_bytes
        lent = self._lender.lend(nbytes) if lend is None else lend(self.column, nbytes)
        data = lent.view(self._frames.dtype)
        out = data.reshape(count, *self._frames.shape)
        is_wanted = rows.valid.copy()
        out[~is_wanted] = 0
        reasons = named.field("reason")
        for row in np.flatnonzero(reasons.is_valid().to_numpy(zero_copy_only=False) & is_wanted).tolist():
            self._note(rows, out, row, ValueError(reasons[row].as_py()))
            is_wanted[row] = False
        work = [
            _Frames(file, video, numbers[mine], mine, bad)
            for video, file, bad in self._files(whole, videos[is_wanted], block, known_bad)
            if len(mine := np.flatnonzero(is_wanted & (videos == video)))
        ]
        if executor is not None:
            least = max(1, _PIECE_BYTES // self._row_bytes)
            work = [part for each in work for part in each.cut(least)]
        made = (map if executor is None else executor.map)(self._decoder(out), work)
        for part, found in zip(work, made, strict=True):
            for row, error in found:
                reason = f"frame {numbers[row]} of video {part.video} in {part.file.name!r}: {readable_text(error)}"
                self._note(rows, out, row, ValueError(reason))
        return to_arrow(out)

    def _note(self, rows: DecodedRows, out: npt.NDArray[Any], row: int, error: Exception) -> None:
        out[row] = 0
        rows.add_bad(row, self.column, error)

    def _files(
        self, whole: pa.StructArray, videos: Int64Array, block: pa.Table, known_bad: Mapping[int, str]
    ) -> Iterator[tuple[int, EncodedFile, dict[int, str]]]:
        """Yields the videos that rows name, the file of each, and its frames that are not to be decoded."""
        files, named = whole.field("file"), whole.field("video").to_numpy()
        at = np.flatnonzero(files.is_valid().to_numpy(zero_copy_only=False))
        bad_rows = np.flatnonzero(np.isin(block[ROW_OFFSET].to_numpy(), [*known_bad])).tolist() if known_bad else []
        for video in np.unique(videos).tolist():
            parts = [EncodedFile.of(files[row]) for row in at[named[at] == video].tolist()]
            ranges = {begin: data for part in parts for begin, data in part.ranges.items()}
            frames = whole.field("frame")
            bad = {
                int(frames[row].as_py()): known_bad[block[ROW_OFFSET][row].as_py()]
                for row in bad_rows
                if named[row] == video
            }
            yield video, dataclasses.replace(parts[0], ranges=ranges), bad

    def _decoder(self, out: npt.NDArray[Any]) -> "Callable[[_Frames], list[tuple[int, Exception]]]":
        """Returns what decodes frames into `out`, and returns the rows of those that cannot be, with the reasons."""

        def decode(part: _Frames) -> list[tuple[int, Exception]]:
            try:
                return [(row, error) for rows, error in self._decode(part, out) for row in rows]
            except OtherSizeError as error:
                where = f"frame {error.number} of video {part.video} in {part.file.name!r}"
                raise ConfigError(f"Video({self.column!r}): {where} has {error.reason}") from None
            except (ImportError, MemoryError) as error:
                raise error_of_no_row(f"Video({self.column!r}) cannot decode", error) from error

        return decode

    def _decode(self, part: "_Frames", out: npt.NDArray[Any]) -> Iterator[tuple[list[int], Exception]]:
        """Decodes frames of one video, each once. Yields the rows of those that cannot be decoded, and the reason: a
        bad frame, and all after it up to the next keyframe.
        """
        file, index = part.file, part.file.index
        if index is None:
            yield part.rows.tolist(), ValueError(file.failure)
            return
        numbers, first, which = np.unique(part.numbers, return_index=True, return_inverse=True)
        places = part.rows[first]

        def rows_of(low: int, high: int) -> list[int]:
            found: list[int] = part.rows[(low <= which) & (which < high)].tolist()
            return found

        is_good = (numbers >= 0) & (numbers < index.frames)
        for at in np.flatnonzero(~is_good).tolist():
            yield rows_of(at, at + 1), ValueError(f"frame {numbers[at]} is asked for, and the video has {index.frames}")
        for bad, why in part.known_bad.items():
            low, high = np.searchsorted(numbers, [bad, index.keyframe_after(bad)]).tolist()
            yield rows_of(low, high), HelperError(why)
            is_good[low:high] = False
        left = np.flatnonzero(is_good)
        while len(left):
            try:
                self._read(part, numbers[left], places[left], out)
                break
            except FrameError as error:
                low = int(np.searchsorted(numbers, error.number))
                high = max(low + 1, int(np.searchsorted(numbers, index.end_of(error.number))))
                yield rows_of(low, high), error.cause
                left = left[left >= high]
        is_repeated = np.ones(len(part.rows), dtype=np.bool_)
        is_repeated[first] = False
        for row, at in zip(part.rows[is_repeated].tolist(), which[is_repeated].tolist(), strict=True):
            out[row] = out[places[at]]

    def _read(self, part: "_Frames", numbers: Int64Array, places: Int64Array, out: npt.NDArray[Any]) -> None:
        """Decodes frames of a video, which stays open if all are good."""
        file, kept = part.file, self._open_videos
        opened = kept.pop(file.key, None) or OpenVideo(file.size, file.ranges, file.index)
        try:
            opened.read(numbers, out, file.ranges, file.levels, places=places, resizes=file.resizes)
        except BaseException:
            opened.close()
            raise
        kept[file.key] = opened
        pixels = sum(math.prod(each.size) for each in kept.values())
        while len(kept) > MOST_OPEN or (len(kept) > 1 and pixels > _OPEN_PIXELS):
            _, oldest = kept.popitem(last=False)
            pixels -= math.prod(oldest.size)
            oldest.close()

    @property
    def _open_videos(self) -> "OrderedDict[str, OpenVideo]":
        """The videos that this thread has open, by key of the file; the last used one comes last."""
        kept: OrderedDict[str, OpenVideo] = self._local.__dict__.setdefault("kept", OrderedDict())
        return kept


class _Frames(NamedTuple):
    """Frames of one video that one thread decodes.

    Attributes:
        file: The file.
        video: Row of the video, for errors.
        numbers: Numbers of the frames, int64, (n,).
        rows: For each the row that names it, int64, (n,).
        known_bad: Numbers of frames that are not to be decoded, and why.
    """

    file: EncodedFile
    video: int
    numbers: Int64Array
    rows: Int64Array
    known_bad: Mapping[int, str]

    def cut(self, least: int) -> "Iterator[_Frames]":
        """Cuts frames at keyframes, into parts of at least `least` frames."""
        order = np.argsort(self.numbers, kind="stable")
        numbers, first = self.numbers[order], 0
        index = self.file.index
        keyframes = np.zeros(len(numbers), np.int64) if index is None else index.keyframe_of(numbers)
        for last in (*(np.flatnonzero(np.diff(keyframes)) + 1).tolist(), len(numbers)):
            if last - first >= least or (last == len(numbers) and last > first):
                mine, first = order[first:last], last
                yield self._replace(numbers=self.numbers[mine], rows=self.rows[mine])
