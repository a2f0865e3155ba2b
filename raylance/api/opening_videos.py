"""Opens the datasets of videos that rows name."""

import dataclasses

import numpy as np

from raylance.decode.open_video import OpenVideo, find_frames
from raylance.errors import ConfigError, DatasetError
from raylance.source.encoded_frames import Ranges, with_more_bytes
from raylance.source.fields import find_field, is_blob
from raylance.source.lance_errors import failure_of, readable_text
from raylance.source.reads import Reads
from raylance.source.retrying import OPENING_S
from raylance.source.storage_options import StorageOptions
from raylance.source.version import pin
from raylance.source.video_files import VideoFile, VideoFiles
from raylance.source.videos import Video, VideoColumn


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
    finder = setting.find_frames(storage_options)
    source = pin(setting.videos, setting.version, storage_options)
    opened = source.open()
    field = find_field(opened.schema, setting.blob)
    if field is None or not is_blob(field):
        raise DatasetError(
            f"Video({setting.column!r}): {source.uri!r}, version {source.version}, has no column {setting.blob!r} of "
            f"blobs; nothing was started. Its columns are {', '.join(opened.schema.names)}. Name the one that has the "
            "files, blob=…"
        )
    size, distance, first = setting.size, 1, finder.get().first_video
    try:
        reads = Reads(source, at_once=1, retry_s=OPENING_S, missing=False, dataset=opened)
        files = VideoFiles(reads, setting.blob, find_frames)
        file = files.find([first])[first]
        if file.failure is not None:
            raise file.failure
        if file.places is not None:
            distance = file.places.index.keyframe_distance
        size = size or _shown_size(files, first, file)
    except Exception as error:
        if size is None:
            raise DatasetError(
                f"Video({setting.column!r}): video {first} of {source.uri!r} cannot be opened "
                f"({readable_text(error)}), so the size of frames is not known; nothing was started. Repair "
                "the file; or, if other videos are good, give size=."
            ) from (error if failure_of(error) else None)
    return VideoColumn(
        dataclasses.replace(setting, videos=source.uri, version=source.version, size=size),
        source,
        finder,
        find_frames,
        distance,
        setting.levels,
        resizes=setting.size is not None,
    )


def _shown_size(files: VideoFiles, row: int, file: VideoFile) -> tuple[int, int]:
    """Returns height and width of a video as its first frame is shown."""

    def decode(margin: int) -> tuple[int, int]:
        ranges: Ranges = file.head | files.read({row: file.spans(np.zeros(1, dtype=np.int64), margin)})[row]
        video = OpenVideo(file.size, ranges, None if file.places is None else file.places.index)
        try:
            return video.shown_size(ranges)
        finally:
            video.close()

    return with_more_bytes(decode)
