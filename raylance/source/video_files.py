"""The video files in a column of blobs, of which byte ranges are read in few calls."""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import lance
import numpy as np

from raylance.arguments import listed
from raylance.orders.permutation import Int64Array
from raylance.source.encoded_frames import FramePlaces, MissingBytesError, Opener, Ranges, Span, join_spans
from raylance.source.reads import Reads
from raylance.source.retrying import Wanted, always

_HEAD_BYTES, _TAIL_BYTES = 64 << 10, 256 << 10  # one of them has the index of most files
_INDEX_BYTES = 8 << 20  # that are read to open a file if they are all that follow: an index at the end, mostly
KEPT_BYTES = 32 << 20  # of the index and the begin of files that no load needs now


@dataclasses.dataclass(slots=True)
class VideoFile:
    """What is known of one video file.

    Attributes:
        size: Its bytes.
        head: The bytes that are needed to open it, and what is read with them.
        places: Where its frames are, once it could be opened.
        failure: Why it cannot be opened.
    """

    size: int
    head: Ranges = dataclasses.field(default_factory=dict)
    places: FramePlaces | None = None
    failure: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        places = 0 if self.places is None else self.places.nbytes
        return places + sum(len(data) for data in self.head.values())

    def spans(self, frames: Int64Array, margin: int) -> list[Span]:
        """Returns the bytes to read from which frames are decoded, beside those that opened the file. With a `margin`,
        of as many keyframes and frames more; the whole file if it has no more frames.
        """
        if self.places is None:
            return []
        asked = self.places.spans(frames, margin)
        if margin >= self.places.index.frames:
            asked = [(0, self.size)]
        return [span for begin, end in asked if begin < end and not self._has(span := (begin, min(end, self.size)))]

    def _has(self, span: Span) -> bool:
        """Whether bytes are among those that were read to open the file."""
        return any(begin <= span[0] and span[1] <= begin + len(data) for begin, data in self.head.items())

    def span_from(self, offset: int) -> Span:
        """Returns the bytes to read to open the file, if those from `offset` on are missing."""
        known, left = sum(len(data) for data in self.head.values()), self.size - offset
        # All that is left may be the index; else, each time as many as all before: it may be large.
        return offset, offset + (left if left <= _INDEX_BYTES else min(left, known))


class VideoFiles:
    """The files in one column of blobs. Several threads may use one object at once."""

    def __init__(self, reads: Reads, blob: str, opener: Opener) -> None:
        """Takes the calls into the dataset, the column, and what finds the frames of a file."""
        self.reads, self._blob, self._opener = reads, blob, opener
        self._known: OrderedDict[int, VideoFile] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, rows: Sequence[int], is_wanted: Wanted = always) -> dict[int, VideoFile]:
        """Returns the files in these rows. Those whose index is not known are opened, their first bytes read together.

        Raises:
            DatasetError: If the storage fails for too long.
        """
        with self._lock:
            found = {row: self._known[row] for row in rows if row in self._known}
        if new := [row for row in rows if row not in found]:
            self._call(new, lambda dataset: found.update(self._find(dataset, new)), is_wanted)
        opening = {row: found[row] for row in new if row in found and found[row].failure is None}
        while opening:
            spans = {row: [each] for row, file in opening.items() if (each := self._try_opening(file)) is not None}
            for row, ranges in self.read(spans, is_wanted).items():
                found[row].head.update(ranges)
            opening = {row: found[row] for row in spans} if is_wanted() else {}
        with self._lock:
            for row, file in found.items():
                if file.places is not None or file.failure is not None:  # else nobody waited for it any more
                    self._known[row] = file
                    self._known.move_to_end(row)
            while len(self._known) > len(found) and sum(file.nbytes for file in self._known.values()) > KEPT_BYTES:
                self._known.popitem(last=False)
        return found

    def read(self, spans: Mapping[int, Sequence[Span]], is_wanted: Wanted = always) -> dict[int, Ranges]:
        """Reads byte ranges of files, by row, in one call; returns them by their first byte.

        Raises:
            DatasetError: If the storage fails for too long.
        """
        found: dict[int, Ranges] = {row: {} for row in spans}
        asked = [(row, begin, end - begin) for row, each in spans.items() for begin, end in each if end > begin]
        if asked:
            self._call(list(spans), lambda dataset: self._read(dataset, asked, found), is_wanted)
        return found

    def _read(self, dataset: lance.LanceDataset, asked: list[tuple[int, int, int]], found: dict[int, Ranges]) -> None:
        read = dataset.read_blob_ranges(self._blob, asked, selector="indices", preserve_order=True)
        for (row, begin, _), (_, _, data) in zip(asked, read, strict=True):
            found[row][begin] = np.frombuffer(data or b"", np.uint8)

    def _find(self, dataset: lance.LanceDataset, rows: list[int]) -> dict[int, VideoFile]:
        videos = dataset.count_rows()
        wrong = IndexError(f"the dataset has {videos} videos, numbered from 0")
        files = {row: VideoFile(0, failure=wrong) for row in rows if not 0 <= row < videos}
        there = [row for row in rows if row not in files]
        for row, blob in zip(there, dataset.take_blobs(self._blob, indices=there), strict=True):
            size = 0 if blob is None else blob.size()
            files[row] = VideoFile(size, failure=None if size else ValueError("the file is empty"))
        found: dict[int, Ranges] = {row: file.head for row, file in files.items()}
        ends = {row: [(0, _HEAD_BYTES), (file.size - _TAIL_BYTES, file.size)] for row, file in files.items()}
        asked = [
            (row, begin, end - begin)
            for row, spans in ends.items()
            for begin, end in join_spans([(max(0, begin), min(end, files[row].size)) for begin, end in spans])
            if end > begin
        ]
        self._read(dataset, asked, found)
        return files

    def _call(self, rows: Sequence[int], call: Callable[[lance.LanceDataset], object], is_wanted: Wanted) -> None:
        def make(dataset: lance.LanceDataset, _: int) -> bool:
            call(dataset)
            return True

        self.reads.run(iter([0]), make, lambda _: True, lambda _: f"videos {listed([*map(str, rows)])}", is_wanted)

    def _try_opening(self, file: VideoFile) -> Span | None:
        """Opens a file for its index; returns the bytes that are missing for that."""
        try:
            file.places = self._opener(file.size, file.head)
        except MissingBytesError as error:
            return file.span_from(error.offset)
        except MemoryError:
            raise
        except Exception as error:  # an opener may raise any error for a file that is not a video
            file.failure = error
        return None
