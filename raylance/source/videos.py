"""Frames of videos that lie in another dataset, as a column of the rows that name them."""

import dataclasses
import math
import os

import pyarrow as pa

from raylance.arguments import check_integer
from raylance.errors import ConfigError, DatasetError
from raylance.source.fields import find_field, is_blob
from raylance.source.lance_errors import readable_text
from raylance.source.reads import Reads
from raylance.source.retrying import OPENING_S
from raylance.source.storage_options import StorageOptions
from raylance.source.version import Source, Version, pin
from raylance.source.video_files import VideoFiles

_RUN_KEYFRAMES = 8  # keyframe distances of a run: half a distance is decoded before its first frame


@dataclasses.dataclass(frozen=True, slots=True)
class Video:
    """A column of pictures that are frames of videos in another dataset. Pass it to `raylance.dataset` in `decode`.

    Each row of the dataset names one frame. Frames of one window of the shuffle that follow one another in their video
    are decoded together, each once, also if several samples of `raylance.Windows` have them. They come as uint8
    (n, 3, H, W), or (n, k, 3, H, W) in windows, with the pixels that PyAV decodes from the whole file. PyAV must be
    installed wherever rows are read: `pip install raylance[video]`.

    Attributes:
        column: Name of the column in batches.
        videos: URI of a Lance dataset that has one video file in each row: MP4 or MOV, of a constant frame rate.
        video: Column of the row offsets of the videos in that dataset, an integer in each row.
        frame: Column of the numbers of the frames in their videos, from 0, an integer in each row.
        blob: Column of `videos` that holds the files.
        version: Version of `videos`; None for the newest.
        size: Height and width to which frames are resized, or an integer for both; None for the size of the first
            video.
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
            if not (isinstance(value := getattr(self, name), str) and value):
                raise ConfigError(f"Video({name}={value!r}): give the name of a column.")
        object.__setattr__(self, "videos", os.fspath(self.videos))
        if self.size is not None:
            given = self.size if isinstance(self.size, tuple | list) else (self.size, self.size)
            if len(given) != 2:
                raise ConfigError(f"Video(size={self.size!r}): give height and width, or one integer.")
            object.__setattr__(self, "size", tuple(check_integer("Video: size", each, 1) for each in given))


@dataclasses.dataclass(frozen=True, slots=True)
class VideoColumn:
    """A `Video` whose dataset is pinned, and whose size is known; picklable.

    Attributes:
        setting: The setting, with its version and size.
        source: The pinned dataset of videos.
        run_rows: Number of frames to decode one after the other: a few keyframe distances of the first video, because
            decoding begins at a keyframe.
    """

    setting: Video
    source: Source
    run_rows: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and 3."""
        size = self.setting.size
        if not isinstance(size, tuple):
            raise ValueError("the size of the frames is not known yet")
        return (*size, 3)

    @property
    def kind(self) -> pa.DataType:
        """Arrow type of the column: pixels as they lie in memory, (H, W, 3), which are (3, H, W) in batches."""
        return pa.fixed_shape_tensor(pa.uint8(), self.shape, permutation=[2, 0, 1])


@dataclasses.dataclass(frozen=True, slots=True)
class Cameras:
    """The columns of a dataset that are frames of videos; picklable.

    Attributes:
        videos: The columns.
        drops: Columns of the rows that are only needed to find frames, and that batches do not have.
    """

    videos: tuple[VideoColumn, ...] = ()
    drops: tuple[str, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of the frames of a row."""
        return sum(math.prod(each.shape) for each in self.videos)


NO_CAMERAS = Cameras()


def open_video(setting: Video, storage_options: StorageOptions | None) -> VideoColumn:
    """Pins the dataset of a `Video`, and finds the size of its frames.

    Raises:
        ConfigError: If PyAV is not installed.
        DatasetError: If the dataset or its column of videos is missing, or its first video cannot be opened.
    """
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Video({setting.column!r}): PyAV is not installed, which decodes videos ({error}). Nothing was started. "
            "Install it here and wherever rows are read: pip install raylance[video]."
        ) from error
    source = pin(setting.videos, setting.version, storage_options)
    opened = source.open()
    field = find_field(opened.schema, setting.blob)
    if field is None or not is_blob(field):
        raise DatasetError(
            f"Video({setting.column!r}): {source.uri!r}, version {source.version}, has no column {setting.blob!r} of "
            f"blobs; nothing was started. Its columns are {', '.join(opened.schema.names)}. Name the one that has the "
            "files, blob=…"
        )
    size, run_rows = setting.size, 1
    try:
        reads = Reads(source, at_once=1, retry_s=OPENING_S, missing=False, dataset=opened)
        video = VideoFiles(reads, setting.blob).find([0])[0].open()
        size, run_rows = size or video.size, _RUN_KEYFRAMES * video.index.keyframe_distance
        video.close()
    except Exception as error:
        if size is None:
            raise DatasetError(
                f"Video({setting.column!r}): the first video of {source.uri!r} cannot be opened "
                f"({readable_text(error)}), so the size of frames is not known; nothing was started. Give size=."
            ) from error
    return VideoColumn(dataclasses.replace(setting, version=source.version, size=size), source, run_rows)


def codec_name() -> str:
    """Returns the name of the decoder of videos, with its versions, which decide about pixels."""
    import av

    return f"PyAV {av.__version__}, libavcodec {'.'.join(map(str, av.library_versions['libavcodec']))}"
