"""Decodes images at their own sizes to patches, as vision encoders of any resolution take them.

Sizes, order and values are those of the processors of the Qwen-VL family (Wang et al.: "Qwen2-VL", 2024, section 2.1):
an image is resized to a multiple of the side of `merge` patches, cut into patches, and the patches that the model
merges follow one another.
"""

import dataclasses
import math
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raylance.arguments import check_flag, check_integer, check_name
from raylance.decode.arrays import holds_files
from raylance.decode.clips import Clip
from raylance.decode.column import lengths_of, read_only
from raylance.decode.decoder import CountedDecoder, Decoder, Draws
from raylance.decode.pixels import CODEC, Box, PixelRows, Pixels, Rules, resize_into, shown_size, size_in_head
from raylance.descriptions import OMIT_DEFAULT
from raylance.errors import ConfigError, DatasetError
from raylance.memory.arrow import sum_lists
from raylance.orders.permutation import Int64Array

GRID = "_grid"
"""Suffix of the column with the numbers of patches of images."""
_LONGEST = 200  # times as long as wide: longer images are refused, as by the processors
_CHANNELS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Patches(CountedDecoder):
    """Decodes a column of images of any size to patches: uint8 (p, channels * temporal * patch * patch), the patches of
    all images of a batch one after another, and `<name>_grid`, int32 (m, 3), the numbers of patches of each image in
    time, height and width. So `pixel_values` of the Qwen-VL models are `(patches / 255 - mean) / std`, by channel, to
    be computed on the device, and `image_grid_thw` is the grid.

    Each row has an image (bytes), or a list of images (bytes, or structs with `bytes`). `<name>_length`, int64 (n,), is
    the number of patches of each row; of lists, `<name>_grid_length` is the number of images. With
    `on_bad_row="mask"`, an image that cannot be decoded has patches of zeros, as many as its header says; none, and a
    grid of zeros, if that cannot be read. Of lists, `<name>_valid`, bool (m,), is False for it, and the row stays.

    The object is also a cost: `cost={"patches": raylance.Patches("images")}` is the number of patches of each row. It
    is computed from `height` and `width`, if these columns are named; else from the headers of all images, which are
    read once for a version, with the whole images if these are not blobs.

    Pixels are those of `Image`, as displayed, resized on 8 bits by torch's bicubic kernel with antialiasing. That is
    the kernel of the processors that use torchvision, whose values are the same; those that use Pillow differ by 1 or 2
    of 255. Differences remain where `Image` reads other pixels than Pillow's `convert("RGB")`, which clips grey of 16
    bits and does not turn images by EXIF, and with `draft`.

    Attributes:
        column: Column of encoded images, or of lists of them.
        patch: Side of a patch, in pixels.
        merge: The model merges `merge` x `merge` patches into a token. Sides are multiples of `patch * merge` pixels.
        min_pixels: A smaller image is enlarged to at least this number of pixels.
        max_pixels: A larger image is reduced to at most this number of pixels.
        temporal: How often a patch has the image: a model of videos takes two frames in a patch. 1 sends half of the
            bytes; then repeat the values on the device.
        draft: Whether a JPEG that is reduced to half its size or less is decoded at a reduced scale; see `Image`.
        height: Column with the height of each image, an integer, or a list of integers; for the cost alone.
        width: Column with the width.
        name: Name of the column in batches; None for `column`.

    Raises:
        ConfigError: If a field is not of its type or range.
    """

    _hints: ClassVar = {"size": "min_pixels= and max_pixels= bound the number of pixels; an image keeps its shape"}
    patch: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    temporal: int = 2
    draft: bool = dataclasses.field(default=False, metadata=OMIT_DEFAULT)
    height: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    width: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    name: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)

    dtype = np.dtype(np.uint8)
    content = "images"
    codec = CODEC
    adds = (GRID,)

    def __post_init__(self) -> None:
        where = f"Patches({self.column!r})"
        for field in ("column", "height", "width", "name"):
            if field == "column" or getattr(self, field) is not None:
                check_name(f"{where}.{field}", getattr(self, field))
        _check_sizes(self, where)
        check_flag(f"{where}.draft", self.draft)
        if (self.height is None) != (self.width is None):
            raise ConfigError(f"{where}: height={self.height!r}, width={self.width!r}: name both columns, or none.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one patch: its values, by channel, repetition, row and column."""
        return (_CHANNELS * self.temporal * self.patch**2,)

    @property
    def companions(self) -> tuple[Decoder, ...]:
        """The decoder of the grid."""
        return (PatchGrid(self.column, self),)

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Returns the numbers of patches of an image of this size, in time, height and width.

        Raises:
            ValueError: If it is more than 200 times as long as wide, or has no pixel.
        """
        return 1, *_grid(self, height, width)

    def open(self) -> "_PatchRows":  # type: ignore[override]  # as in RaggedDecoder
        """Opens a decoder for one thread; see `Decoder.open`. It writes as many patches as `count` says."""
        return _PatchRows(self)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns of which the cost of a row is computed."""
        sizes = [name for name in (self.height, self.width) if name is not None]
        return tuple(dict.fromkeys(sizes or [self.column]))

    def measure(self, rows: pa.Table, *, heads: bool = False) -> Int64Array:
        """Returns the cost of rows, their numbers of patches, int64 (n,). See `measure_images`."""
        return sum_lists(*self.measure_images(rows, heads=heads))

    def measure_images(self, rows: pa.Table, *, heads: bool = False) -> tuple[Int64Array, Int64Array]:
        """Returns the number of patches of each image, int64 (m,), and the number of images of each row, int64 (n,). An
        image whose size is not known has none; the head of a damaged one may have a size, which then counts.

        Args:
            rows: The columns of `reads`.
            heads: Whether values may be cut off. -1 is then the number of an image whose size is not in these bytes.

        Raises:
            DatasetError: If a column has another type, or the lists of heights and widths differ in length.
        """
        for name in self.reads:
            kind = rows.schema.field(name).type
            inside = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
            is_file = kind in (pa.binary(), pa.large_binary()) or holds_files(kind)
            is_fit = pa.types.is_integer(inside) if self.height else is_file
            if not is_fit:
                what = "integers, or lists of them" if self.height else "bytes of images, or lists of them"
                raise DatasetError(f"{self}: column {name!r} is {kind}; nothing was started. Name a column of {what}.")
        if self.height is not None and self.width is not None:
            sides, lengths = zip(*(_numbers(rows[name]) for name in (self.height, self.width)), strict=True)
            if not np.array_equal(*lengths):
                raise DatasetError(
                    f"{self}: the lists of {self.height!r} and of {self.width!r} have other lengths in some rows; "
                    "nothing was started. Correct them, or leave height= and width= out: headers have the sizes."
                )
            counts = [self._count(*size) for size in zip(*sides, strict=True)]
        else:
            lengths = (lengths_of(rows[self.column]),)
            count = self._count_of_head if heads else self.count
            counts = [count(value) for value in read_only(rows[self.column])]
        return np.array(counts, dtype=np.int64), lengths[0]

    def _count(self, height: int, width: int) -> int:
        try:
            return math.prod(self.grid(height, width))
        except ValueError:
            return 0

    def _count_of_head(self, head: memoryview | None) -> int:
        size = None if head is None else size_in_head(head)
        return -1 if size is None else self._count(*size)

    def count(self, encoded: memoryview | None) -> int:
        """Returns the number of patches of an image; 0 if its size cannot be read."""
        try:
            return 0 if encoded is None else self._count(*shown_size(encoded, Rules())[1::-1])
        except ConfigError:
            raise
        except Exception:  # a codec may raise anything for damaged bytes, which decoding handles
            return 0


def _numbers(column: pa.ChunkedArray) -> tuple[list[int], Int64Array]:
    """Returns the integers of a column, 0 for a null, and their number in each row."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.asarray(pc.list_value_length(column).fill_null(0).to_numpy(), dtype=np.int64)
        column = pc.list_flatten(column)
    else:
        lengths = np.ones(len(column), dtype=np.int64)
    return [int(each or 0) for each in column.to_pylist()], lengths


@dataclasses.dataclass(frozen=True, slots=True)
class FramePatches(Decoder):
    """Cuts the frames of a `raylance.Video` or `raylance.Clip` into patches, as the Qwen-VL family takes videos: uint8
    (n, p, channels * temporal * patch * patch), `temporal` frames in each patch, and `<name>_grid`, int32 (n, 3), the
    numbers of patches of a sample in time, height and width. `pixel_values_videos` are `(patches.flatten(0, 1) / 255 -
    mean) / std`, by channel. Pass it to `raylance.dataset` in `columns`: beside the `Video`, or in place of the `Clip`,
    `FramePatches("video", clip=raylance.Clip("video", 8))`.

    Frames are resized as by `raylance.Patches`. If `temporal` does not divide the frames of a sample, the last one is
    repeated.

    Attributes:
        column: Name of the `Video` column, or of the column of the `Clip`.
        patch: Side of a patch, in pixels.
        merge: The model merges `merge` x `merge` patches into a token.
        min_pixels: Smaller frames are enlarged to at least this number of pixels.
        max_pixels: Larger frames are reduced to at most this number of pixels.
        temporal: Number of frames of a patch.
        name: Name of the column in batches; None for `column`.
        clip: The `Clip`; None for frames of a `Video`.
        source: Shape of a sample as it is decoded; set when the dataset is opened.

    Raises:
        ConfigError: If a field is not of its type or range.
    """

    patch: int = 14
    merge: int = 2
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    temporal: int = 2
    name: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    clip: Clip | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    source: tuple[int, ...] = dataclasses.field(default=(), init=False, repr=False)

    dtype = np.dtype(np.uint8)
    content = "frames"
    adds = (GRID,)

    def __post_init__(self) -> None:
        where = f"FramePatches({self.column!r})"
        check_name(f"{where}.column", self.column)
        if self.clip is not None and not (isinstance(self.clip, Clip) and self.clip.column == self.column):
            raise ConfigError(
                f"{where}: clip={self.clip!r} is no raylance.Clip of this column; name the same one in both."
            )
        if self.name is not None:
            check_name(f"{where}.name", self.name)
        _check_sizes(self, where)

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Returns the numbers of patches of a sample of this number and size of frames, in time, height and width.
        Raises ValueError, see `Patches.grid`.
        """
        return -(-frames // self.temporal), *_grid(self, height, width)

    @property
    def of_frames(self) -> bool:  # type: ignore[override]  # others know it without their fields
        """Whether a reader makes the frames."""
        return self.clip is None

    @property
    def draws(self) -> int:
        """See `Decoder.draws`."""
        return 0 if self.clip is None else self.clip.draws

    @property
    def is_random(self) -> bool:
        """See `Decoder.is_random`."""
        return self.clip is not None and self.clip.is_random

    @property
    def codec(self) -> str:
        """See `Decoder.codec`."""
        return "" if self.clip is None else self.clip.codec

    @property
    def found_grid(self) -> tuple[int, int, int]:
        """That of a sample; known once the dataset is opened."""
        return self.grid(self.source[0] if len(self.source) > 3 else 1, *self.source[-3:-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample: (p, values)."""
        return (math.prod(self.found_grid) if self.source else 1, _CHANNELS * self.temporal * self.patch**2)

    @property
    def companions(self) -> tuple[Decoder, ...]:
        """The decoder of the grid."""
        return (PatchGrid(self.column, self, of_frames=self.of_frames),)

    def resolve(self, encoded: memoryview) -> Self:
        """See `Decoder.resolve`: takes the size of a stored video if the clip has none."""
        clip = self.clip and self.clip.resolve(encoded)
        if clip is None:
            return self
        _grid(self, *clip.shape[1:3])
        return self._found(clip=clip, source=clip.shape)

    def of_type(self, kind: pa.DataType, leader: Decoder | None) -> Self:
        """Returns the setting for a column of frames of this type.

        Raises:
            ConfigError: If the frames are not of three channels of 8 bits, or much longer than wide.
        """
        source = _frames_of(kind)
        try:
            _grid(self, *source[-3:-1])
        except ValueError as error:
            raise ConfigError(f"FramePatches({self.column!r}): a frame {error}. Nothing was started.") from error
        if kind_of_pixels(kind) != pa.uint8() or source[-1] != _CHANNELS:
            raise ConfigError(
                f"FramePatches({self.column!r}): its frames have {source[-1]} channels of {kind_of_pixels(kind)}, and "
                "patches have three of uint8. Nothing was started."
            )
        return self._found(source=source)

    def open(self) -> "_CutFrames":
        """See `Decoder.open`."""
        return _CutFrames(self)


def _frames_of(kind: pa.DataType) -> tuple[int, ...]:
    """Returns the shape of a sample of frames."""
    shape: tuple[int, ...] = ()
    while not isinstance(kind, pa.FixedShapeTensorType):
        shape, kind = (*shape, kind.list_size), kind.value_type
    return (*shape, *kind.shape)


def kind_of_pixels(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the numbers in a column of frames."""
    while isinstance(kind, pa.FixedSizeListType | pa.FixedShapeTensorType):
        kind = kind.value_type
    return kind


@dataclasses.dataclass(frozen=True, slots=True)
class PatchGrid(Decoder):
    """Delivers the numbers of patches of each image of a `Patches`, int32 (m, 3): it parses the headers alone;
    or of each sample of a `FramePatches`, (n, 3).
    """

    of: Patches | FramePatches
    of_frames: bool = False

    dtype = np.dtype(np.int32)
    content = "images"
    shape = (3,)
    has_marks = False
    is_companion = may_lack_samples = True

    @property
    def output_name(self) -> str:
        """Name of the column in batches."""
        return f"{self.of.output_name}{GRID}"

    def open(self) -> "PatchGrid":
        """Returns this object, which keeps nothing between rows; see `Decoder.open`."""
        return self

    def of_type(self, kind: pa.DataType, leader: Decoder | None) -> Self:
        """See `Decoder.of_type`."""
        return self._found(of=self.of.of_type(kind, leader))

    def resolve(self, encoded: memoryview) -> Self:
        """See `Decoder.resolve`."""
        return self._found(of=self.of.resolve(encoded))

    def decode_into(self, encoded: memoryview, draws: Draws, out: npt.NDArray[Any]) -> None:
        """Writes the three numbers of an image, or of a sample of frames, into `out`."""
        if isinstance(self.of, FramePatches):
            out[:] = self.of.found_grid
        else:
            width, height, _ = shown_size(encoded, Rules())
            out[:] = self.of.grid(height, width)


class _Cutter:
    """Cuts images of one setting into patches, in one thread; keeps memory between images."""

    def __init__(self, setting: Patches | FramePatches) -> None:
        self.setting = setting
        self._memory = [np.empty(0, dtype=np.uint8)] * 2

    def cut(self, pixels: Pixels, size: tuple[int, int]) -> Pixels:
        """Resizes pixels (h, w, 3 or 4); returns their patches, (p, channels, patch * patch), until the next call."""
        if pixels.shape[:2] != size:
            small = self._scratch(0, (*size, pixels.shape[2]))
            resize_into(pixels, small, bicubic=True)
            pixels = small
        side, merge = self.setting.patch, self.setting.merge
        high, wide = (each // (side * merge) for each in size)
        cut = self._scratch(1, (high, wide, merge, merge, _CHANNELS, side, side))
        for channel in range(_CHANNELS):
            stored = pixels[..., channel].reshape(high, merge, side, wide, merge, side)
            cut[..., channel, :, :] = stored.transpose(0, 3, 1, 4, 2, 5)
        return cut.reshape(-1, _CHANNELS, side * side)

    def _scratch(self, number: int, shape: tuple[int, ...]) -> Pixels:
        """Returns memory for one image."""
        nbytes = math.prod(shape)
        if len(self._memory[number]) < nbytes:
            self._memory[number] = np.empty(nbytes, dtype=np.uint8)
        return self._memory[number][:nbytes].reshape(shape)


class _PatchRows(PixelRows):
    """Decodes images to patches, in one thread."""

    def __init__(self, patches: Patches) -> None:
        super().__init__(Rules())
        self._patches, self._cutter = patches, _Cutter(patches)

    def decode_into(self, encoded: memoryview, draws: Draws, out: Pixels) -> None:
        """Decodes one image into its patches, (p, values)."""
        patches, size = self._patches, (0, 0)

        def whole(height: int, width: int) -> list[Box]:
            nonlocal size
            high, wide = _grid(patches, height, width)
            size = (high * patches.patch, wide * patches.patch)
            return [(0, 0, width, height)]

        (pixels,) = self._pixels.decode_parts(encoded, whole, lambda: [size] if patches.draft else [])
        once = self._cutter.cut(pixels, size)
        out.reshape(len(once), _CHANNELS, patches.temporal, -1)[:] = once[:, :, None]


class _CutFrames:
    """Cuts frames into patches, in one thread."""

    def __init__(self, patches: FramePatches) -> None:
        self._patches, self._cutter = patches, _Cutter(patches)
        self._frames = np.empty((0, 0, 0, 0) if patches.clip is None else patches.clip.shape, dtype=np.uint8)

    def decode_into(self, encoded: memoryview, draws: Draws, out: Pixels) -> None:
        """Cuts the frames of a sample; `encoded` has the pixels, or the video of a clip."""
        patches = self._patches
        if patches.clip is None:
            frames = np.frombuffer(encoded, np.uint8).reshape(-1, *patches.source[-3:])
        else:
            frames = self._frames
            patches.clip.decode_into(encoded, draws, frames)
        times, high, wide = patches.found_grid
        made = out.reshape(times, high * wide, _CHANNELS, patches.temporal, -1)
        for number in range(times * patches.temporal):
            time, within = divmod(number, patches.temporal)
            frame = frames[min(number, len(frames) - 1)]
            made[time, :, :, within] = self._cutter.cut(frame, (high * patches.patch, wide * patches.patch))


def _check_sizes(setting: Patches | FramePatches, where: str) -> None:
    """Replaces the sizes of patches by Python's integers. Raises ConfigError if one is not of its type or range."""
    for field in ("patch", "merge", "min_pixels", "max_pixels", "temporal"):
        object.__setattr__(setting, field, check_integer(f"{where}.{field}", getattr(setting, field), 1))
    least = (setting.patch * setting.merge) ** 2
    if setting.min_pixels > setting.max_pixels or setting.max_pixels < least:
        raise ConfigError(
            f"{where}: min_pixels={setting.min_pixels}, max_pixels={setting.max_pixels}: the first must be at most the "
            f"second, and that at least {least}, the pixels of {setting.merge} x {setting.merge} patches."
        )


def _grid(setting: Patches | FramePatches, height: int, width: int) -> tuple[int, int]:
    """Returns the numbers of patches of an image of this size, in height and width. Raises ValueError, see `grid`."""
    if min(height, width) < 1 or max(height, width) > _LONGEST * min(height, width):
        raise ValueError(f"has {width}x{height} pixels, more than {_LONGEST} times as many on one side as on the other")
    side = setting.patch * setting.merge
    high, wide = round(height / side) * side, round(width / side) * side
    if high * wide > setting.max_pixels:
        scale = math.sqrt(height * width / setting.max_pixels)
        high, wide = (max(side, math.floor(each / scale / side) * side) for each in (height, width))
    elif high * wide < setting.min_pixels:
        scale = math.sqrt(setting.min_pixels / (height * width))
        high, wide = (math.ceil(each * scale / side) * side for each in (height, width))
    return high // setting.patch, wide // setting.patch
