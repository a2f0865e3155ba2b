"""Frames of videos that lie in another dataset, as a column of the rows that name them."""

import abc
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from raylance.arguments import check_integer, check_name
from raylance.environment.shared import Shared
from raylance.errors import ConfigError, DatasetError
from raylance.orders.permutation import Int64Array
from raylance.source.derived import Derived, LookedUp, Maker
from raylance.source.encoded_frames import Levels, Opener
from raylance.source.storage_options import StorageOptions
from raylance.source.version import Source, Version, check_version

NO_VIDEO = int(np.iinfo(np.int64).min)
"""Stands in place of the row of a video for rows that name no frame."""

_RUN_KEYFRAMES = 8  # keyframe distances of a run: half a distance is decoded before its first frame


class NamedFrames(NamedTuple):
    """The frames that rows name.

    Attributes:
        videos: Rows of the dataset of videos, int64; `NO_VIDEO` for rows that name no frame.
        frames: Numbers of the frames, int64.
        reasons: Why rows name no frame, by index.
    """

    videos: Int64Array
    frames: Int64Array
    reasons: dict[int, str]


class FrameFinder(abc.ABC):
    """Finds the frames that rows name; picklable.

    Attributes:
        rate: Frames a second that the videos must have; None for any.
        tolerance_s: By how many seconds frames may be shown at other times than the rate says.
        first_video: Row of a video that shows the size of frames.
    """

    rate: float | None
    tolerance_s: float
    first_video: int

    @abc.abstractmethod
    def find(self, table: pa.Table) -> NamedFrames:
        """Finds the frames of some rows, which have `_rowoffset`."""


@dataclasses.dataclass(frozen=True, slots=True)
class FramesByNumber(FrameFinder):
    """Finds frames by two columns: the row offset of the video, and the number of the frame."""

    rate: ClassVar[None] = None  # type: ignore[misc]
    tolerance_s: ClassVar[float] = 0.0  # type: ignore[misc]
    first_video: ClassVar[int] = 0  # type: ignore[misc]
    video: str
    frame: str

    def find(self, table: pa.Table) -> NamedFrames:
        """See `FrameFinder.find`."""
        names, reasons = (self.video, self.frame), dict[int, str]()
        for name in names:
            if table[name].null_count:
                rows = np.flatnonzero(table[name].is_null().to_numpy())
                reasons |= dict.fromkeys(rows.tolist(), f"it has no value in {name!r}")
        videos, frames = (np.asarray(table[name].fill_null(0).to_numpy(), dtype=np.int64) for name in names)
        return NamedFrames(without(videos, reasons), frames, reasons)


def without(videos: Int64Array, reasons: Mapping[int, str]) -> Int64Array:
    """Returns videos, with `NO_VIDEO` for the rows that have reasons."""
    if not reasons:
        return videos
    kept = videos.copy()
    kept[list(reasons)] = NO_VIDEO
    return kept


@dataclasses.dataclass(frozen=True, slots=True)
class Video(Derived):
    """A column of pictures that are frames of videos in another dataset. Pass it to `raylance.dataset` in `columns`.

    Each row of the dataset names one frame. Frames of one window of the shuffle that follow one another in their video
    are decoded together, each once, also if several samples of `raylance.Windows` have them. They come as uint8
    (n, H, W, 3), or (n, k, H, W, 3) in windows, with the pixels that PyAV decodes from the whole file, turned and
    flipped as the file says that they are shown. Torch batches have the channels before height and width. PyAV must be
    installed wherever rows are read: `pip install raylance[video]`.

    Attributes:
        column: Name of the column in batches.
        videos: URI of a Lance dataset that has one video file in each row: MP4 or MOV, of a constant frame rate.
        video: Column of the row offsets of the videos in that dataset, an integer in each row.
        frame: Column of the numbers of the frames in their videos, from 0, an integer in each row.
        blob: Column of `videos` that holds the files.
        version: Version of `videos`; None for the newest.
        size: Height and width to which frames are resized, or an integer for both; None if all have the size of the
            first video.
    """

    column: str
    videos: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    video: str
    frame: str
    blob: str = "video_bytes"
    version: Version | None = None
    size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("column", "video", "frame", "blob"):
            check_name(f"Video: {name}", getattr(self, name))
        if not (isinstance(self.videos, str | os.PathLike) and os.fspath(self.videos)):
            raise ConfigError(f"Video: videos={self.videos!r}: give the path or URI of a Lance dataset of videos.")
        object.__setattr__(self, "videos", os.fspath(self.videos))
        object.__setattr__(self, "version", check_version(self.version))
        if self.video == self.frame:
            raise ConfigError(
                f"Video: video={self.video!r}, frame={self.frame!r}: one column cannot say the video and the frame."
            )
        if self.size is not None:
            given = self.size if isinstance(self.size, tuple | list) else (self.size, self.size)
            if len(given) != 2:
                raise ConfigError(f"Video(size={self.size!r}): give height and width, or one integer.")
            object.__setattr__(self, "size", tuple(check_integer("Video: size", each, 1) for each in given))

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Derived.needs`."""
        return self.video, self.frame

    def check(self, schema: pa.Schema, uri: str) -> None:
        """Checks that a dataset has what it needs.

        Raises:
            DatasetError: If a column is missing, or has no integers.
        """
        Derived.check(self, schema, uri)
        for name in self.needs:
            if not pa.types.is_integer(schema.field(name).type):
                raise DatasetError(
                    f"Video({self.column!r}) needs the column {name!r} of integers, and {uri!r} has "
                    f"{schema.field(name).type}; nothing was started."
                )

    channels: ClassVar[int] = 3

    @property
    def levels(self) -> Levels | None:
        """For videos of one channel of 12 bits, the value of each number; None for pictures."""
        return None

    def find_frames(self, storage_options: StorageOptions | None) -> Shared[FrameFinder]:
        """Returns what finds the frames of rows."""
        return Shared("names of frames", FramesByNumber(self.video, self.frame), 0)


@dataclasses.dataclass(frozen=True, slots=True)
class VideoColumn:
    """A `Video` whose dataset is pinned, and whose size is known; picklable.

    Attributes:
        setting: The setting, with its version and size.
        source: The pinned dataset of videos.
        finder: Finds the frames of rows.
        keyframe_distance: Number of frames from one keyframe to the next, in one of the videos.
        levels: See `Video`.
        resizes: Whether frames of another size are resized; else they are an error.
        opener: Finds the frames of a file.
    """

    setting: Video
    source: Source
    finder: Shared[FrameFinder]
    opener: Opener
    keyframe_distance: int = 1
    levels: Levels | None = dataclasses.field(default=None, compare=False)
    resizes: bool = True

    @property
    def run_rows(self) -> int:
        """Number of frames to decode one after the other: a few keyframe distances, because decoding begins at one."""
        return _RUN_KEYFRAMES * self.keyframe_distance if self.keyframe_distance > 1 else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels: 3, or 1."""
        size = self.setting.size
        if not isinstance(size, tuple):
            raise ValueError("the size of the frames is not known yet")
        return (*size, self.setting.channels)

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The dtype of a pixel."""
        return np.dtype(np.uint8 if self.levels is None else np.float32)

    @property
    def kind(self) -> pa.DataType:
        """Arrow type of the column."""
        return pa.fixed_shape_tensor(pa.from_numpy_dtype(self.dtype), self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class AddedColumns:
    """The columns that readers add to stored ones; picklable.

    Attributes:
        settings: The settings, in the order in which they were given.
        videos: Those that are frames of videos.
        makers: What makes the others, by name.
        drops: Stored columns that batches do not have, and that only the columns in `makers` need.
        video_drops: Stored columns that batches do not have, and that the columns in `videos` need.
    """

    settings: tuple[Derived, ...] = ()
    videos: tuple[VideoColumn, ...] = ()
    makers: Mapping[str, Maker] = dataclasses.field(default_factory=dict)
    drops: tuple[str, ...] = ()
    video_drops: tuple[str, ...] = ()

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> "AddedColumns":
        """See `RowSource.map_shared`."""
        videos = tuple(dataclasses.replace(each, finder=change(each.finder)) for each in self.videos)
        makers = {
            name: dataclasses.replace(each, values=change(each.values)) if isinstance(each, LookedUp) else each
            for name, each in self.makers.items()
        }
        return dataclasses.replace(self, videos=videos, makers=makers)


NOTHING_ADDED = AddedColumns()
