"""Frames of videos that lie in another dataset, as a column of the rows that name them."""

import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, TypeVar

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.arguments import check_integer
from raylance.columns import ROW_OFFSET
from raylance.errors import BadRowError, ConfigError, DatasetError
from raylance.memory.arrow import wanted_rows
from raylance.orders.permutation import Int64Array
from raylance.source.fields import find_field, is_blob
from raylance.source.lance_errors import readable_text
from raylance.source.reader import Prepare, RowReader
from raylance.source.retrying import Wanted, always
from raylance.source.storage_options import StorageOptions
from raylance.source.version import Source, Version, pin

T = TypeVar("T")
Frames = npt.NDArray[np.uint8]
_RUN_KEYFRAMES = 8  # keyframe distances of a run: half a distance is decoded before its first frame
_OPEN = 8  # videos that a thread keeps open
_BUFFER_BYTES = 256 << 10  # that one read of a video asks for: small requests to an object store take as long


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

    def added_to(self, reader: RowReader, dataset: str, *, is_trial: bool = False) -> RowReader:
        """Returns a reader that also reads the frames, see `VideoReader`; the same reader if there are no videos."""
        return VideoReader(reader, self, dataset, is_trial=is_trial) if self.videos else reader


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
        video = _OpenVideo(_blob_file(opened, setting.blob, 0))
        size, run_rows = size or video.size, _RUN_KEYFRAMES * video.keyframe_distance
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


class _BlobFile:
    """A blob as ffmpeg reads a file. Keeps the error of the storage, which ffmpeg would hide."""

    def __init__(self, blob: Any) -> None:
        self._blob = blob
        self.error: Exception | None = None

    def read(self, size: int = -1) -> bytes:
        """Reads bytes from the present place on."""
        try:
            found: bytes = self._blob.read(size)
            return found
        except Exception as error:
            self.error = error
            raise

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves the place."""
        return int(self._blob.seek(offset, whence))

    def tell(self) -> int:
        """Returns the place."""
        return int(self._blob.tell())


def _blob_file(opened: lance.LanceDataset, column: str, row: int) -> _BlobFile:
    (blob,) = opened.take_blobs(column, indices=[row])
    return _BlobFile(blob)


class _OpenVideo:
    """One video, for one thread. Decodes on from its last frame if no keyframe lies between, else from a keyframe."""

    def __init__(self, file: _BlobFile) -> None:
        import av
        from av.video.reformatter import VideoReformatter

        self.file = file
        self._container: Any = av.open(file, buffer_size=_BUFFER_BYTES)
        try:
            if not self._container.streams.video:
                raise ValueError("the file has no video")
            self._stream = stream = self._container.streams.video[0]
            stream.thread_type = "NONE"  # several videos are decoded at once
            if not stream.average_rate or not stream.time_base:
                raise ValueError("the file says no frame rate")
            self._step = 1 / (stream.average_rate * stream.time_base)  # timestamps from one frame to the next
            self._start = stream.start_time or 0
            entries = list(stream.index_entries)
            if not entries or len(entries) != stream.frames:
                raise ValueError(
                    f"the file's index has {len(entries)} of {stream.frames or 'unknown'} frames; an MP4 has all"
                )
        except BaseException:
            self._container.close()
            raise
        self._keyframes = np.array([at for at, entry in enumerate(entries) if entry.is_keyframe] or [0])
        self._times = [entries[at].timestamp for at in self._keyframes]
        self._frames, self._reformatter = len(entries), VideoReformatter()
        self._decoded: Iterator[Any] = iter(())
        self._at, self._is_placed = -1, False  # the number of the last frame, and whether another one may follow it

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self._stream.codec_context.height, self._stream.codec_context.width

    @property
    def keyframe_distance(self) -> int:
        """Number of frames from one keyframe to the next, on average."""
        return max(1, self._frames // len(self._keyframes))

    def close(self) -> None:
        """Frees the memory of ffmpeg."""
        self._container.close()

    def read(self, numbers: Int64Array, out: Frames) -> None:
        """Decodes frames with these numbers, strictly ascending, into `out`, (n, H, W, 3).

        Raises:
            _FrameError: If one of them cannot be decoded.
        """
        height, width = out.shape[1:3]
        for place, number in enumerate(numbers.tolist()):
            try:
                frame = self._frame(number)
            except Exception as error:
                raise _FrameError(number) from error
            # A reformatter that is kept, in this thread alone, costs a tenth of `to_ndarray`.
            plane: Any = self._reformatter.reformat(
                frame, width=width, height=height, format="rgb24", threads=1
            ).planes[0]
            lines = np.frombuffer(plane, np.uint8).reshape(height, plane.line_size)
            out[place] = lines[:, : 3 * width].reshape(height, width, 3)

    def _frame(self, number: int) -> Any:
        if not 0 <= number < self._frames:
            raise ValueError(f"frame {number} is asked for, and the video has {self._frames}")
        nearest = int(np.searchsorted(self._keyframes, number, side="right")) - 1
        is_ahead = self._is_placed and self._at < number
        frame = None
        if not is_ahead or self._keyframes[max(0, nearest)] > self._at + 1:
            frame = self._go_before(number, nearest)
        while frame is None or self._at < number:
            before, self._is_placed = self._at, False  # until a frame has come
            frame = next(self._decoded, None)
            if frame is None:
                raise ValueError(f"frame {number} is asked for, and decoding ends after frame {before}")
            self._at = self._number(frame)
            if self._at != before + 1:
                raise ValueError(f"frame {self._at} follows frame {before}, so the frame rate is not constant")
            self._is_placed = True
        return frame

    def _go_before(self, number: int, nearest: int) -> Any:
        """Goes to a keyframe before a frame; returns the first frame from there. Keyframes are counted as they are
        stored, where frames that are shown before one may follow it: then the one before it is taken.
        """
        self._is_placed = False
        for at in range(max(0, nearest), -1, -1):
            self._container.seek(self._times[at], stream=self._stream, backward=True)
            self._decoded = self._container.decode(self._stream)
            frame = next(self._decoded, None)
            while frame is not None and not frame.key_frame:  # it may refer to frames that were not decoded
                frame = next(self._decoded, None)
            if frame is not None and (found := self._number(frame)) <= number:
                self._at, self._is_placed = found, True
                return frame
        raise ValueError(f"no keyframe lies before frame {number}")

    def _number(self, frame: Any) -> int:
        if frame.is_corrupt:
            raise ValueError("a frame from which it follows is damaged")
        at = Fraction(frame.pts - self._start) / self._step
        if at.denominator != 1:
            raise ValueError(f"a frame is shown at {float(at):g} frames, so the frame rate is not constant")
        return int(at)


class VideoReader(RowReader):
    """Reads rows together with the frames that they name. Several threads may use one reader at once."""

    def __init__(self, reader: RowReader, cameras: Cameras, dataset: str, *, is_trial: bool) -> None:
        """Takes a reader of the rows, the columns to add, and the name of the dataset for errors. In a trial, whose
        pixels nobody uses, frames may be bad.
        """
        self._reader, self._videos, self._drops, self._dataset = reader, cameras.videos, cameras.drops, dataset
        self._is_trial = is_trial
        self._opened: dict[int, lance.LanceDataset] = {}
        self._local, self._opening = threading.local(), threading.Lock()

    def read_into(self, offsets: Int64Array, add: Callable[[pa.Table], None], is_wanted: Wanted = always) -> None:
        """See `RowReader.read_into`."""
        self._reader.read_into(offsets, lambda table: add(self._with_frames(table)), is_wanted)

    def read_pieces(
        self,
        offsets: Int64Array,
        prepare: Prepare[T],
        add: Callable[[T], bool],
        is_wanted: Wanted = always,
    ) -> None:
        """See `RowReader.read_pieces`."""

        def with_frames(first: int, table: pa.Table, places: Int64Array | None) -> T:
            return prepare(first, self._with_frames(wanted_rows(table, places)), None)

        self._reader.read_pieces(offsets, with_frames, add, is_wanted)

    def close(self) -> None:
        """See `RowReader.close`."""
        self._reader.close()

    def _with_frames(self, table: pa.Table) -> pa.Table:
        whole = table.drop_columns([ROW_OFFSET, *self._drops])
        for number, column in enumerate(self._videos):
            kind, frames = column.kind, self._decode(number, column, table)
            flat = pa.FixedSizeListArray.from_arrays(pa.array(frames.reshape(-1)), kind.storage_type.list_size)
            whole = whole.append_column(column.setting.column, pa.ExtensionArray.from_storage(kind, flat))
        return whole.append_column(ROW_OFFSET, table[ROW_OFFSET])

    def _decode(self, number: int, column: VideoColumn, table: pa.Table) -> Frames:
        """Returns the frame of each row."""
        setting, out = column.setting, np.empty((table.num_rows, *column.shape), dtype=np.uint8)
        named = [table[name] for name in (setting.video, setting.frame)]
        for name, values in zip((setting.video, setting.frame), named, strict=True):
            if values.null_count:
                row = int(table[ROW_OFFSET].filter(values.is_null())[0].as_py())
                raise BadRowError(setting.column, row, f"it has no value in {name!r}", self._dataset)
        videos, frames = (np.asarray(values.to_numpy(), dtype=np.int64) for values in named)
        offsets, order = table[ROW_OFFSET].to_numpy(), np.lexsort((frames, videos))
        _, cuts = np.unique(videos[order], return_index=True)
        for mine in np.split(order, cuts[1:]) if len(order) else ():
            different, first, which = np.unique(frames[mine], return_index=True, return_inverse=True)
            decoded, rows = np.empty((len(different), *column.shape), np.uint8), offsets[mine[first]]
            try:
                self._read(number, int(videos[mine[0]]), different, decoded, rows)
            except BadRowError:
                if not self._is_trial:
                    raise
            out[mine] = decoded[which]
        return out

    def _read(self, number: int, video: int, frames: Int64Array, out: Frames, rows: Int64Array) -> None:
        """Decodes frames of one video, ascending, into `out`; `rows` are the offsets of rows that name them."""
        kept: OrderedDict[tuple[int, int], _OpenVideo] = self._local.__dict__.setdefault("kept", OrderedDict())
        setting, opened = self._videos[number].setting, kept.pop((number, video), None)
        file = self._file(number, video) if opened is None else opened.file
        try:
            opened = opened or _OpenVideo(file)
            opened.read(frames, out)
        except Exception as error:
            if file.error is not None:  # the storage failed, and the read may be repeated
                raise file.error from error
            at = frames.searchsorted(error.number) if isinstance(error, _FrameError) else 0
            cause = error.__cause__ or error
            reason = f"frame {frames[at]} of video {video} in {setting.videos!r}: {readable_text(cause)}"
            raise BadRowError(setting.column, int(rows[at]), reason, self._dataset) from cause
        kept[number, video] = opened
        while len(kept) > _OPEN:
            kept.popitem(last=False)[1].close()

    def _file(self, number: int, video: int) -> _BlobFile:
        column = self._videos[number]
        with self._opening:
            if number not in self._opened:
                self._opened[number] = column.source.open()
        opened = self._opened[number]
        if not 0 <= video < opened.count_rows():
            raise DatasetError(
                f"a row names the video {video}, and {column.source.uri!r} has {opened.count_rows()} videos, numbered "
                f"from 0; the epoch stops here. Mend {column.setting.video!r}."
            )
        return _blob_file(opened, column.setting.blob, video)


class _FrameError(Exception):
    """A frame cannot be decoded."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
