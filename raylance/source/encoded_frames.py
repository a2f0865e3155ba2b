"""Where the frames of a video lie in its file, and the columns in which rows carry their frames, still encoded."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.memory.lending import Bytes
from raylance.orders.permutation import Int64Array
from raylance.planning.pace import MARGINS

Levels = npt.NDArray[np.float32]  # the value of each number that a pixel of a frame of 12 bits may have, (4096,)
Span = tuple[int, int]  # bytes [begin, end) of a file
Ranges = dict[int, Bytes]  # bytes of a file that were read, by their first byte

T = TypeVar("T")

_REORDERED = 16  # frames that may be stored after one that is shown after them, by H.264 and H.265
_CLOSE_BYTES = 64 << 10  # ranges closer than this are read as one

_FILE = pa.struct(
    {
        "name": pa.string(),
        "key": pa.string(),
        "size": pa.int64(),
        "begins": pa.list_(pa.int64()),
        "ranges": pa.list_(pa.large_binary()),
        "frames": pa.int64(),
        "keyframes": pa.list_(pa.int64()),
        "times": pa.list_(pa.int64()),
        "step": pa.float64(),
        "tick_s": pa.float64(),
        "is_reordered": pa.bool_(),
        "failure": pa.string(),
        "levels": pa.list_(pa.float32()),
        "resizes": pa.bool_(),
    }
)
ENCODED = pa.struct({"video": pa.int64(), "frame": pa.int64(), "reason": pa.string(), "file": _FILE})
"""Arrow type of frames that are still encoded: the row of the video, and the number of the frame; or the reason why the
row has none. Of the rows of a table that name one video, the first one has the file.
"""


class MissingBytesError(Exception):
    """Raised if a decoder asks for bytes of a file that were not read.

    Attributes:
        offset: The first of these bytes.
        needs_bytes: True: that the same rows, loaded with more bytes, can be decoded.
    """

    needs_bytes = True

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"bytes from {self.offset} on are missing"


def with_more_bytes(attempt: Callable[[int], T]) -> T:
    """Calls `attempt` with one margin after another, see `MARGINS`, until it has the bytes that it needs.

    Raises:
        MissingBytesError: If the whole file does not have them.
    """
    for margin in MARGINS[:-1]:
        with contextlib.suppress(MissingBytesError):
            return attempt(margin)
    return attempt(MARGINS[-1])


def join_spans(spans: Sequence[Span]) -> list[Span]:
    """Returns ranges that hold all of these ranges, ascending; those that lie close together become one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1] + _CLOSE_BYTES:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


@dataclasses.dataclass(frozen=True, slots=True)
class VideoIndex:
    """Where the frames of a video lie in its file. Here, frames are numbered as they are stored, which is not always as
    they are shown: those that are shown before a keyframe may be stored after it.

    Attributes:
        frames: Number of frames.
        keyframes: Numbers of the keyframes, ascending, int64.
        times: Their timestamps in the file.
        step: By how much the timestamps of two frames that follow one another differ, on average.
        tick_s: Seconds of a step of 1, by which the file rounds times.
        is_reordered: Whether frames may be stored in another order than they are shown.
    """

    frames: int
    keyframes: Int64Array
    times: Sequence[int]
    step: float
    tick_s: float
    is_reordered: bool

    @property
    def rate(self) -> float:
        """Frames a second."""
        return 1 / (self.step * self.tick_s)

    @property
    def keyframe_distance(self) -> int:
        """Number of frames from one keyframe to the next, on average."""
        return max(1, round(self.frames / len(self.keyframes)))

    def keyframe_of(self, frames: Int64Array) -> Int64Array:
        """Returns, for each frame, how many keyframes are stored before it, the first one not counted; int64."""
        return np.maximum(np.searchsorted(self.keyframes, frames, side="right") - 1, 0)

    def end_of(self, frame: int) -> int:
        """Returns the keyframe after the first one that a frame may need, or the number of frames: all frames between
        need that one, too.
        """
        later = int(self.earliest(np.array([frame]))[0]) + 1
        return int(self.keyframes[later]) if later < len(self.keyframes) else self.frames

    def keyframe_after(self, frame: int) -> int:
        """Returns the keyframe after a frame, or the number of frames: none from there on is decoded by way of it."""
        later = int(np.searchsorted(self.keyframes, frame, side="right"))
        return int(self.keyframes[later]) if later < len(self.keyframes) else self.frames

    @property
    def late(self) -> int:
        """Most frames that may be stored after one that is shown after them."""
        return _REORDERED if self.is_reordered else 0

    def earliest(self, frames: Int64Array) -> Int64Array:
        """Returns the first keyframe that each frame may need, as `keyframe_of` counts: a frame that is shown shortly
        before a keyframe may be stored after it, and needs the keyframe before, too.
        """
        return self.keyframe_of(np.maximum(frames - self.late, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class FramePlaces:
    """The bytes of the frames of a video.

    Attributes:
        index: The frames.
        begins: First byte of each frame, int64.
        ends: The byte after each frame, int64.
    """

    index: VideoIndex
    begins: Int64Array
    ends: Int64Array

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.index.keyframes.nbytes + self.begins.nbytes + self.ends.nbytes

    def spans(self, frames: Int64Array, margin: int = 0) -> list[Span]:
        """Returns the bytes from which these frames are decoded, as far as the index says it. With a `margin`, of as
        many keyframes and frames more.
        """
        index = self.index
        inside = frames[(frames >= 0) & (frames < index.frames)]
        if not len(inside):
            return []
        firsts = np.maximum(index.earliest(inside) - margin, 0)
        lasts = np.minimum(inside + index.late + margin, index.frames - 1)
        found = []
        for keyframe in np.unique(firsts):
            first, last = index.keyframes[keyframe], lasts[firsts == keyframe].max()
            found.append((int(self.begins[first]), int(self.ends[last])))
        return join_spans(found)


Opener = Callable[[int, Ranges], FramePlaces]
"""Finds the frames of a file by its size and the ranges of it that were read. Raises MissingBytesError if more bytes
are needed, and any other error if it is no video.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedFile:
    """What decoders need of a video file, to decode the frames that some rows name.

    Attributes:
        name: Name of the dataset of videos.
        key: Names the file: the dataset with its version, the column, and the row.
        size: Bytes of the file.
        ranges: Those bytes of it that were read.
        index: Its frames; None if there is a `failure`.
        failure: Why none of its frames can be decoded.
        levels: For videos of one channel of 12 bits, the value of each number; None for pictures.
        resizes: Whether frames of another size are resized; else they are an error.
    """

    name: str
    key: str
    size: int
    ranges: Mapping[int, Bytes]
    index: VideoIndex | None
    failure: str | None
    levels: Levels | None
    resizes: bool

    def to_arrow(self) -> dict[str, Any]:
        """Returns it as a value of the field `file` of `ENCODED`."""
        index, ranges = self.index, sorted(self.ranges.items())
        return {
            "name": self.name,
            "key": self.key,
            "size": self.size,
            "begins": [begin for begin, _ in ranges],
            "ranges": [data.tobytes() for _, data in ranges],
            "frames": index and index.frames,
            "keyframes": index and index.keyframes,
            "times": index and index.times,
            "step": index and index.step,
            "tick_s": index and index.tick_s,
            "is_reordered": index and index.is_reordered,
            "failure": self.failure,
            "levels": self.levels,
            "resizes": self.resizes,
        }

    @classmethod
    def of(cls, value: pa.StructScalar) -> "EncodedFile":
        """Returns the file of a row, which has one. Its bytes are views of the row."""
        ranges = value["ranges"].values
        read = {
            begin: np.frombuffer(each.as_buffer(), np.uint8)
            for begin, each in zip(value["begins"].as_py(), ranges, strict=True)
        }
        index = None
        if value["frames"].is_valid:
            index = VideoIndex(
                frames=value["frames"].as_py(),
                keyframes=value["keyframes"].values.to_numpy(),
                times=value["times"].as_py(),
                step=value["step"].as_py(),
                tick_s=value["tick_s"].as_py(),
                is_reordered=value["is_reordered"].as_py(),
            )
        return cls(
            name=value["name"].as_py(),
            key=value["key"].as_py(),
            size=value["size"].as_py(),
            ranges=read,
            index=index,
            failure=value["failure"].as_py(),
            levels=value["levels"].values.to_numpy() if value["levels"].is_valid else None,
            resizes=value["resizes"].as_py(),
        )


def last_keyframe(column: pa.ChunkedArray) -> int:
    """Returns the number of rows, of a column of the type `ENCODED`, before the last one that begins with a keyframe or
    another video; 0 if only the first one does.
    """
    rows = column.combine_chunks()
    files, videos, frames = (rows.field(name) for name in ("file", "video", "frame"))
    videos, frames = videos.to_numpy(), frames.to_numpy()
    groups = np.zeros(len(rows), dtype=np.int64)
    for row in np.flatnonzero(files.is_valid().to_numpy(zero_copy_only=False)).tolist():
        index, mine = EncodedFile.of(files[row]).index, videos == videos[row]
        if index is not None:
            groups[mine] = index.keyframe_of(frames[mine])
    firsts = np.flatnonzero((np.diff(videos) != 0) | (np.diff(groups) != 0)) + 1
    return int(firsts[-1]) if len(firsts) else 0
