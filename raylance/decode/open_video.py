"""One video file: its index, and its frames, decoded from byte ranges that were read before."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from raylance.memory.lending import Bytes
from raylance.orders.permutation import Int64Array
from raylance.source.encoded_frames import FramePlaces, Levels, MissingBytesError, Ranges, VideoIndex

Frames = npt.NDArray[Any]  # uint8 (n, H, W, 3), or float32 (n, H, W, 1)
_BUFFER_BYTES = 64 << 10  # that ffmpeg asks for at once
_AWAY = 0.25  # most frames between a frame's time and its time at a constant rate: files round times


class FrameError(Exception):
    """Raised if a frame cannot be decoded.

    Attributes:
        number: Number of the frame.
        cause: Why.
    """

    def __init__(self, number: int, cause: Exception) -> None:
        super().__init__(number)
        self.number, self.cause = number, cause


class OtherSizeError(Exception):
    """Raised if a frame has another size than the first video.

    Attributes:
        number: Number of the frame.
        reason: What is wrong, and what to do.
    """

    def __init__(self, number: int, size: tuple[int, int], first: tuple[int, int]) -> None:
        super().__init__(number)
        self.number = number
        self.reason = (
            f"{size[1]}x{size[0]} pixels, others are {first[1]}x{first[0]}, and without size= all must be of one size "
            'to make a batch; the epoch stops here, with on_bad_row="mask" too: this is not a bad row. Give '
            f"size=({first[0]}, {first[1]}), height first, to resize them."
        )


class _Ranges:
    """Byte ranges of a file, which ffmpeg reads like the whole file."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0
        self._begins: list[int] = []
        self._data: list[Bytes] = []
        self.missing: MissingBytesError | None = None

    def hold(self, ranges: Mapping[int, Bytes]) -> None:
        """Takes the ranges from which is read from now on, by their first byte."""
        self._begins, self._data, self.missing = [], [], None
        end = 0
        for begin, data in sorted(ranges.items()):
            if begin + len(data) > end:  # ranges may overlap
                self._begins.append(max(begin, end))
                self._data.append(data[max(0, end - begin) :])
                end = begin + len(data)

    def read(self, size: int = -1) -> bytes:
        """Reads up to `size` bytes; fewer if a range ends."""
        if self._at >= self._size:
            return b""
        number = bisect_right(self._begins, self._at) - 1
        inside = self._at - self._begins[number] if number >= 0 else 0
        found = self._data[number][inside : inside + size if size >= 0 else None] if number >= 0 else b""
        if not len(found):  # as if the file ended here: PyAV prints errors that are raised here
            self.missing = self.missing or MissingBytesError(self._at)
        self._at += len(found)
        return bytes(found)

    def raise_missing(self) -> None:
        """Raises MissingBytesError if bytes were asked for that were not read."""
        if self.missing is not None:
            raise self.missing

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves the place."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        """Returns the place."""
        return self._at


class OpenVideo:
    """A video that one thread decodes. It decodes on from its last frame if no keyframe lies between, else from the
    keyframe before the wanted frame.
    """

    def __init__(self, size: int, ranges: Mapping[int, Bytes], index: VideoIndex | None = None) -> None:
        """Opens a file of `size` bytes; without its `index`, finds that, and `places`.

        Raises:
            MissingBytesError: If more bytes are needed.
            Exception: The error of PyAV if the file is not a video; ValueError if frames cannot be counted.
        """
        from av.video.reformatter import VideoReformatter

        self._file = _Ranges(size)
        self._file.hold(ranges)
        self._open()
        self.places: FramePlaces | None = None
        try:
            if index is None:
                self.places = self._find_places()
                index = self.places.index
        except BaseException:
            self.close()
            raise
        self.index = index
        self._reformatter = VideoReformatter()

    def _open(self) -> None:
        import av

        self._decoded: Iterator[tuple[Any, bool]] = iter(())
        # The number of the last frame, whether another one may follow it, and whether the decoder has met damage, which
        # may change what it makes of other frames.
        self._at, self._is_placed, self._is_spoilt = -1, False, False
        self._file.seek(0)
        try:
            self._container: Any = av.open(self._file, buffer_size=_BUFFER_BYTES)
        except Exception as error:
            raise self._file.missing or error from error
        try:
            self._file.raise_missing()
            self._stream = self._checked_stream()
        except BaseException:
            self.close()
            raise

    def _checked_stream(self) -> Any:
        from av.stream import Discard, Disposition

        streams = [each for each in self._container.streams.video if Disposition.attached_pic not in each.disposition]
        if not streams:
            raise ValueError("the file has no video")
        stream = streams[0]
        stream.thread_type = "NONE"  # several videos are decoded at once
        for each in self._container.streams:
            if each is not stream:
                each.discard = Discard.all  # sound would be read, too
        self._start = stream.start_time or 0
        return stream

    def _find_places(self) -> FramePlaces:
        entries, frames = list(self._stream.index_entries), self._stream.frames
        if not entries or not frames:
            raise ValueError(
                f"the file ({self._container.format.long_name}) has no index of all frames. It must be MP4 or MOV, and "
                "not fragmented: write it again (remux)"
            )
        if len(entries) != frames or any(entry.is_discard for entry in entries):
            raise ValueError(
                f"the file has {frames} frames, of which an edit list leaves some out. Write it again without one "
                "(encode it, do not copy the stream)"
            )
        times = np.array([entry.timestamp for entry in entries], dtype=np.float64)
        # The average rate of the file depends on how long the last frame is shown.
        step = (times[-1] - times[0]) / (frames - 1) if frames > 1 else 1.0
        if not step > 0 or not self._stream.time_base:
            raise ValueError("the file says no frame rate")
        away = np.abs((times - times[0]) / step - np.arange(frames))
        if away.max() > _AWAY:
            raise ValueError(
                f"frame {int(away.argmax())} lies {away.max():.3g} frames away from its time, so the frame rate is not "
                "constant"
            )
        keyframes = [at for at, entry in enumerate(entries) if entry.is_keyframe] or [0]
        begins = np.array([entry.pos for entry in entries], dtype=np.int64)
        index = VideoIndex(
            frames=frames,
            keyframes=np.array(keyframes, dtype=np.int64),
            times=[entries[at].timestamp for at in keyframes],
            step=float(step),
            tick_s=float(self._stream.time_base),
            is_reordered=bool(self._stream.codec_context.has_b_frames),
        )
        return FramePlaces(index, begins, begins + np.array([entry.size for entry in entries]))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, as frames are stored."""
        return self._stream.codec_context.height, self._stream.codec_context.width

    def close(self) -> None:
        """Frees the memory of ffmpeg."""
        self._container.close()

    def shown_size(self, ranges: Mapping[int, Bytes]) -> tuple[int, int]:
        """Returns height and width of the first frame as it is shown, decoded from byte ranges of the file.

        Raises:
            MissingBytesError: If more bytes are needed.
            Exception: Why it cannot be decoded.
        """
        self._file.hold(ranges)
        try:
            frame, is_turned, _, _ = self._turned_frame(0)
        except FrameError as error:
            raise error.cause from None
        return (frame.width, frame.height) if is_turned else (frame.height, frame.width)

    def read(
        self,
        numbers: Int64Array,
        out: Frames,
        ranges: Mapping[int, Bytes],
        levels: Levels | None = None,
        *,
        places: Int64Array | None = None,
        resizes: bool = True,
    ) -> None:
        """Decodes frames from byte ranges of the file.

        Args:
            numbers: Numbers of the frames as they are shown, strictly ascending, int64.
            out: Where their pixels are written.
            places: For each frame its index in `out`, int64; None if they lie there one after the other.
            ranges: The byte ranges that were read, by their first byte.
            levels: For videos of one channel of 12 bits, the value of each number; None for pictures.
            resizes: Whether frames of another size are resized; else they are an error.

        Raises:
            MissingBytesError: If more bytes are needed. Decoding then begins at a keyframe again.
            FrameError: If a frame cannot be decoded; those before it are decoded.
            OtherSizeError: If a frame has another size.
        """
        self._file.hold(ranges)
        at = range(len(numbers)) if places is None else places.tolist()
        for place, number in zip(at, numbers.tolist(), strict=True):
            frame, is_turned, down, right = self._turned_frame(number)
            height, width = out.shape[2:0:-1] if is_turned else out.shape[1:3]
            if not resizes and (frame.height, frame.width) != (height, width):
                size = (frame.width, frame.height) if is_turned else (frame.height, frame.width)
                raise OtherSizeError(number, size, out.shape[1:3])
            # A reformatter that is kept, in this thread alone, costs a tenth of `to_ndarray`.
            wanted: dict[str, Any] = {"width": width, "height": height, "threads": 1}
            if levels is None:
                plane: Any = self._reformatter.reformat(frame, format="rgb24", **wanted).planes[0]
                stored = np.frombuffer(plane, np.uint8).reshape(height, plane.line_size)[:, : 3 * width]
                stored = stored.reshape(height, width, 3)
            else:  # between two values, others would come out that nothing has
                plane = self._reformatter.reformat(frame, format="gray12le", interpolation="POINT", **wanted).planes[0]
                stored = np.frombuffer(plane, "<u2").reshape(height, plane.line_size // 2)[:, :width]
            shown = (stored.swapaxes(0, 1) if is_turned else stored)[::down, ::right]
            if levels is None:
                out[place] = shown
            else:
                np.take(levels, shown, out=out[place, :, :, 0], mode="clip")

    def _turned_frame(self, number: int) -> tuple[Any, bool, int, int]:
        """Returns a frame, whether its rows are shown as columns, and the steps, 1 or -1, down and to the right."""
        try:
            frame = self._frame(number)
            turn = _turn_of(frame)
        except Exception as error:
            self._is_placed, self._is_spoilt = False, True
            self._file.raise_missing()
            raise FrameError(number, error) from error
        self._file.raise_missing()  # then the frame may be made of less than all its bytes
        return frame, *turn

    def _frame(self, number: int) -> Any:
        index = self.index
        if not 0 <= number < index.frames:
            raise ValueError(f"frame {number} is asked for, and the video has {index.frames}")
        nearest = int(np.searchsorted(index.keyframes, number, side="right")) - 1
        if self._is_placed and self._at < number and index.keyframes[max(0, nearest)] <= self._at + 1:
            try:
                return self._go_on(number, None)
            except Exception:
                self._is_spoilt = True
                self._file.raise_missing()  # else it may be made of a later keyframe than the damaged frame
        return self._go_on(number, self._go_before(number, nearest))

    def _go_on(self, number: int, frame: Any) -> Any:
        """Decodes from a frame, or the last one, up to another one; returns that."""
        while frame is None or self._at < number:
            before, self._is_placed = self._at, False  # until a frame has come
            frame = self._next()
            if frame is None:
                raise ValueError(f"frame {number} is asked for, and decoding ends after frame {before}")
            self._at = self._number(frame)
            if self._at != before + 1:
                raise ValueError(f"frame {self._at} follows frame {before}, so the frame rate is not constant")
            self._is_placed = True
        return frame

    def _go_before(self, number: int, nearest: int) -> Any:
        """Goes to a keyframe before a frame, or to the frame if it is one; returns the first frame from there."""
        if self._is_spoilt:
            self.close()
            self._open()
        self._is_placed = False
        # ffmpeg finds the last keyframe that is shown at a time or before it. If times in the file are wrong, earlier
        # keyframes are tried, by their decoding times.
        shown = self._start + round(number * self.index.step)
        for time in [shown, *(self.index.times[at] for at in range(max(0, nearest), -1, -1))]:
            self._container.seek(time, stream=self._stream, backward=True)
            self._decoded = _decode(self._container, self._stream)
            frame = self._next()
            if frame is not None and (found := self._number(frame)) <= number:
                self._at, self._is_placed = found, True
                return frame
        kind = self._container.format
        if "mp4" not in kind.name:
            raise ValueError(
                f"the file ({kind.long_name}) does not say when its frames are shown. Write it again, as MP4 or MOV"
            )
        raise ValueError(f"no keyframe lies before frame {number}")

    def _next(self) -> Any:
        frame, is_good = next(self._decoded, (None, True))
        if not is_good:
            raise ValueError("it is damaged, or may be made of a damaged frame")
        return frame

    def _number(self, frame: Any) -> int:
        at = float(frame.pts - self._start) / self.index.step
        if abs(at - round(at)) > _AWAY:
            raise ValueError(f"a frame is shown at {at:g} frames, so the frame rate is not constant")
        return round(at)


def find_frames(size: int, ranges: Ranges) -> FramePlaces:
    """Finds the frames of a video file; see `raylance.source.encoded_frames.Opener`."""
    video = OpenVideo(size, ranges)
    video.close()
    if video.places is None:
        raise ValueError("its index is not known")
    return video.places


def codec_name() -> str:
    """Returns the name of the decoder of videos, with its versions, which decide about pixels."""
    import av

    return f"PyAV {av.__version__}, libavcodec {'.'.join(map(str, av.library_versions['libavcodec']))}"


def _turn_of(frame: Any) -> tuple[bool, int, int]:
    """Returns whether the rows of a frame are shown as columns, and the steps, 1 or -1, down and to the right, by the
    matrix that phones write if they are turned.
    """
    if (matrix := frame.side_data.get("DISPLAYMATRIX")) is None:
        return False, 1, 1
    right_right, right_down, _, down_right, down_down = np.frombuffer(matrix, np.int32)[:5].tolist()
    is_turned = not right_right and not down_down
    if not is_turned and (right_down or down_right):
        raise ValueError(f"it is shown turned by {-frame.rotation} degrees, and only quarters of a turn are supported")
    down, right = (right_down, down_right) if is_turned else (down_down, right_right)
    return is_turned, -1 if down < 0 else 1, -1 if right < 0 else 1


def _decode(container: Any, stream: Any) -> Iterator[tuple[Any, bool]]:
    """Decodes from the next keyframe on. Yields frames as they are shown, and whether each is good: neither it nor a
    frame that is stored before it, of which it may be made, is damaged. Such a frame may be shown after it, and what is
    damaged is known when it is shown, so frames wait for all that are stored before them.
    """
    places: dict[int, int] = {}  # of the frames that have not come, as they are stored, by when they are shown
    waiting: deque[tuple[Any, int]] = deque()
    stored, damaged, is_begun = 0, None, False
    for packet in container.demux(stream):
        if packet.pts is not None:  # it is None at the end
            places[packet.pts] = stored
            stored += 1
        for frame in packet.decode():
            place = places.get(frame.pts, stored)
            places = {shown: each for shown, each in places.items() if shown > frame.pts}
            is_begun = is_begun or frame.key_frame  # a frame before may refer to frames that were not decoded
            if is_begun:
                waiting.append((frame, place))
            if is_begun and frame.is_corrupt:
                damaged = place if damaged is None else min(damaged, place)
            while waiting and waiting[0][1] < min(places.values(), default=stored):
                frame, place = waiting.popleft()
                yield frame, damaged is None or place < damaged
    yield from ((frame, damaged is None or place < damaged) for frame, place in waiting)
