"""Cuts a part out of frames of videos: the same part of all frames of a sample."""

import dataclasses
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.arguments import check_flag, check_name, check_probability
from raylance.decode.crops import cut_frames, whole_size
from raylance.decode.decoder import Decoder, Draws
from raylance.descriptions import OMIT_DEFAULT
from raylance.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class FrameCrop(Decoder):
    """Cuts a part out of the frames of a `raylance.Video`, without resizing. In windows, all frames of a sample get the
    same part, and are flipped alike. Pass it to `raylance.dataset` in `columns`, beside the `Video`.

    Frames come as uint8 (n, h, w, 3), or (n, k, h, w, 3) in windows; those of cameras of depth as float32 with one
    channel. Torch batches have the channels before height and width.

    Attributes:
        column: Name of the `Video` column.
        size: Height and width of the part in pixels, or one number for a square.
        random: Whether the part is drawn for each sample, keyed by seed, epoch and row; else it is the middle.
        hflip: Probability that the frames of a sample are flipped from left to right.
        like: Name of another `FrameCrop` whose part, as fractions of what is left over, and flip this one gets: for
            cameras that show the same. Leave out `random` and `hflip` here.
        name: Name of the column in batches; None for `column`. With names, several parts of a column are cut.
        source: Shape of a sample as it is decoded; set when the dataset is opened.
        dtype: dtype of the frames, set then, too.
        follows: The crop that `like` names; set when the dataset is opened.
    """

    size: tuple[int, int] | int
    random: bool = False
    hflip: float = 0.0
    like: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    name: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    source: tuple[int, ...] = dataclasses.field(default=(), init=False, repr=False)
    dtype: npt.DTypeLike = dataclasses.field(default=np.dtype(np.uint8), init=False, repr=False)
    follows: "FrameCrop | None" = dataclasses.field(default=None, init=False, repr=False)

    channels_last = True
    content = "frames"
    of_frames = True

    def __post_init__(self) -> None:
        owner = f"FrameCrop({self.column!r})"
        check_name("FrameCrop: column", self.column)
        for name in ("name", "like"):
            if (given := getattr(self, name)) is not None:
                check_name(f"{owner}.{name}", given)
        object.__setattr__(self, "size", whole_size(f"FrameCrop({self.column!r}, ", self.size))
        object.__setattr__(self, "random", check_flag(f"{owner}.random", self.random))
        check_probability(f"FrameCrop({self.column!r}, hflip", self.hflip)
        if self.like is not None and (self.random or self.hflip):
            raise ConfigError(
                f"FrameCrop({self.column!r}, like={self.like!r}): its part and flip are those of that column. Leave "
                "random= and hflip= out."
            )

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the part."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample: (h, w, channels), or (k, h, w, channels)."""
        return (*self.source[:-3], *self.sides, *(self.source[-1:] or (3,)))

    @property
    def draws(self) -> int:
        """Numbers for top, left and flip."""
        leader = self.follows or self
        return 3 if leader.random or leader.hflip else 0

    def of_type(self, kind: pa.DataType, leader: Decoder | None) -> Self:
        """Returns the setting for a column of frames of this type.

        Raises:
            ConfigError: If the frames are smaller than the part, or `leader` is not a `FrameCrop`.
        """
        shape: tuple[int, ...] = ()
        while not isinstance(kind, pa.FixedShapeTensorType):
            shape, kind = (*shape, kind.list_size), kind.value_type
        source = (*shape, *kind.shape)
        if any(side > whole for side, whole in zip(self.sides, source[-3:-1], strict=True)):
            raise ConfigError(
                f"FrameCrop({self.column!r}, size={self.size}): its frames are {source[-3:-1]}, which is smaller. "
                "Nothing was started."
            )
        if leader is not None and not isinstance(leader, FrameCrop):
            raise ConfigError(
                f"FrameCrop({self.column!r}, like={self.like!r}): that is a {type(leader).__name__}, and must be a "
                "FrameCrop. Nothing was started."
            )
        dtype = np.dtype(kind.value_type.to_pandas_dtype())
        return self._found(source=source, dtype=dtype, follows=leader)

    def open(self) -> "FrameCrop":
        """See `Decoder.open`."""
        return self

    def decode_into(self, encoded: memoryview, draws: Draws, out: npt.NDArray[Any]) -> None:
        """See `RowDecoder.decode_into`; `encoded` has the pixels."""
        frames, leader = np.frombuffer(encoded, self.dtype).reshape(self.source), self.follows or self
        out[...] = cut_frames(frames, self.sides, draws, random=leader.random, hflip=leader.hflip)
