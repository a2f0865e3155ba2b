"""Decodes some frames of each row's own video."""

import dataclasses
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from raylance.arguments import check_flag, check_integer, check_name, check_probability, check_word
from raylance.decode.crops import cut_frames, whole_size
from raylance.decode.decoder import Decoder, Draws
from raylance.decode.open_video import FrameError, OpenVideo, OtherSizeError, codec_name
from raylance.descriptions import OMIT_DEFAULT
from raylance.errors import ConfigError

Start = Literal["first", "middle", "random"]
Short = Literal["refuse", "repeat"]


@dataclasses.dataclass(frozen=True, slots=True)
class Clip(Decoder):
    """Decodes frames of a column of videos (MP4 or MOV, of a constant frame rate), one in each row, to uint8
    (n, frames, H, W, 3), turned and flipped as the file says that they are shown. Torch batches have the channels
    before height and width. PyAV must be installed wherever rows are decoded: `pip install raylance[video]`.

    Only the frames from the keyframe before the first one on are decoded. For videos of which many rows take frames,
    see `raylance.Video`.

    Attributes:
        column: Column of videos, binary or blobs.
        frames: Number of frames.
        stride: Distance between them in frames of the video.
        start: Which frame is the first one: the "first" of the video, the one with which the clip lies in the "middle",
            or a "random" one, keyed by seed, epoch and row.
        short: A video with fewer frames is a bad row, "refuse", or its last frame is taken again, "repeat".
        size: Height and width to which frames are resized, or one number for both; None if all videos have one size.
        crop: Height and width of a part that is then cut out, the same of all frames, or one number for both; None for
            all.
        random_crop: Whether the part is drawn like a random start; else it is the middle.
        hflip: Probability that all frames are flipped from left to right.
        name: Name of the decoded column; None for `column`.
        keeps_size: Whether raylance took `size` from a stored video because the user gave none. Then a video of another
            size is an error.
    """

    frames: int
    stride: int = 1
    start: Start = "middle"
    short: Short = "refuse"
    size: tuple[int, int] | int | None = None
    crop: tuple[int, int] | int | None = None
    random_crop: bool = False
    hflip: float = 0.0
    name: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    keeps_size: bool = dataclasses.field(default=False, init=False, repr=False)

    dtype = np.dtype(np.uint8)
    channels_last = True
    content = "videos"
    draws = 4  # for start, top, left and flip

    def __post_init__(self) -> None:
        owner = f"Clip({self.column!r}"
        check_name("Clip: column", self.column)
        if self.name is not None:
            check_name(f"{owner}).name", self.name)
        for name in ("frames", "stride"):
            object.__setattr__(self, name, check_integer(f"{owner}).{name}", getattr(self, name), 1))
        check_word(f"{owner}).start", self.start, get_args(Start))
        check_word(f"{owner}).short", self.short, get_args(Short))
        for name in ("size", "crop"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_size(f"{owner}, {name}: ", given))
        object.__setattr__(self, "random_crop", check_flag(f"{owner}).random_crop", self.random_crop))
        check_probability(f"{owner}, hflip", self.hflip)
        if isinstance(self.size, tuple) and isinstance(self.crop, tuple) and np.any(np.less(self.size, self.crop)):
            raise ConfigError(f"Clip({self.column!r}, crop={self.crop}): frames of {self.size} are smaller.")

    @property
    def shape(self) -> tuple[int, ...]:
        """(frames, H, W, 3)."""
        sides = self.crop or self.size
        if not isinstance(sides, tuple):
            raise ConfigError(f"Clip({self.column!r}): size is not known yet.")
        return (self.frames, *sides, 3)

    @property
    def is_random(self) -> bool:
        """Whether the start, the part or the flip is random."""
        return self.start == "random" or self.random_crop or 0 < self.hflip < 1

    @property
    def codec(self) -> str:
        """PyAV and its decoder, with versions."""
        return codec_name()

    def resolve(self, encoded: memoryview) -> Self:
        """See `Decoder.resolve`: takes the size of a stored video if none was given."""
        if self.size is not None:
            return self
        video = _open(encoded)
        try:
            size = video.shown_size(_whole(encoded))
        finally:
            video.close()
        return self._found(size=size, keeps_size=True)

    def open(self) -> Self:
        """See `Decoder.open`."""
        return self

    def decode_into(self, encoded: memoryview, draws: Draws, out: npt.NDArray[np.uint8]) -> None:
        """See `RowDecoder.decode_into`.

        Raises:
            ConfigError: If `size` is None, and the frames have another size than those of other rows.
        """
        video = _open(encoded)
        try:
            numbers, which = np.unique(self._numbers(video.index.frames, draws[0]), return_inverse=True)
            size = self.size if isinstance(self.size, tuple) else video.size
            pixels = np.empty((len(numbers), *size, 3), np.uint8)
            video.read(numbers, pixels, _whole(encoded), resizes=not self.keeps_size)
        except OtherSizeError as error:
            raise ConfigError(f"has frames of {error.reason}") from None
        except FrameError as error:
            raise ValueError(f"frame {error.number}: {error.cause}") from error.cause
        finally:
            video.close()
        part = cut_frames(pixels, out.shape[1:3], draws[1:], random=self.random_crop, hflip=self.hflip)
        np.take(part, which, axis=0, out=out, mode="clip")

    def _numbers(self, there: int, draw: float) -> npt.NDArray[np.int64]:
        """Returns the numbers of the frames in a video of `there` frames."""
        free = there - (self.frames - 1) * self.stride - 1
        if free < 0 and self.short == "refuse":
            raise ValueError(f"the video has {there} frames, {there - free} are asked for")
        first = {"first": 0, "middle": max(0, free // 2), "random": int(draw * (max(0, free) + 1))}[self.start]
        return np.minimum(first + self.stride * np.arange(self.frames), there - 1)


def _whole(encoded: memoryview) -> dict[int, npt.NDArray[np.uint8]]:
    return {0: np.frombuffer(encoded, np.uint8)}


def _open(encoded: memoryview) -> OpenVideo:
    return OpenVideo(len(encoded), _whole(encoded))
