"""Owns the decoding of an image column to uint8 pixels of one size; never reads storage, and never draws from a global
generator.

Every geometric augmentation is a box that is cut out of the source and resized to the output size, keyed by
(seed, epoch, row offset): it is the same on every rank, decoder and machine, in any batch.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, Self

import numpy as np

from raylance.decode.decoder import Decoder, Draws
from raylance.decode.pixels import (
    CODEC,
    Box,
    PixelDecoder,
    Pixels,
    copy_pixels,
    decode_grey,
    pick_into,
    resize_into,
    shown_size,
)
from raylance.errors import ConfigError
from raylance.planning.state import OMIT_DEFAULT

_BOX_DRAWS = 40  # uniform numbers for the box; the flip uses the next one
_CROP_ATTEMPTS = 10


class Crop(Protocol):
    """Chooses the part of a source image that becomes the output."""

    def box(self, width: int, height: int, size: tuple[int, int], draws: Draws) -> Box:
        """Chooses a box.

        Args:
            width: Width of the source in pixels.
            height: Its height.
            size: (height, width) of the output.
            draws: Uniform numbers in [0, 1) of this row and epoch, float64, shape (40,).

        Returns:
            (left, top, width, height) in pixels, within the source.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CenterCrop:
    """Resizes so that the output is the middle of the image: the usual validation transform.

    Attributes:
        zoom: Shorter side of the resized image over that of the output: 256 / 224 cuts off a margin of an eighth.
    """

    zoom: float = 256 / 224

    def __post_init__(self) -> None:
        if not self.zoom >= 1:
            raise ConfigError(f"CenterCrop(zoom={self.zoom}): must be at least 1, or the crop outgrows the image.")

    def box(self, width: int, height: int, size: tuple[int, int], draws: Draws) -> Box:
        """See `Crop.box`; uses no draws."""
        out_height, out_width = size
        scale = min(height / out_height, width / out_width) / self.zoom
        cut_width, cut_height = (max(1, round(side * scale)) for side in (out_width, out_height))
        return (width - cut_width) // 2, (height - cut_height) // 2, cut_width, cut_height


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RandomResizedCrop:
    """A box of random area and aspect ratio (Szegedy et al., "Going deeper with convolutions", 2014).

    Attributes:
        scale: Least and most area, as a fraction of the source's.
        ratio: Least and most aspect ratio, width over height; drawn log-uniformly.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        # No image is a million times as wide as high, and far larger numbers overflow.
        for name, (low, high), least, most in (("scale", self.scale, 0.0, 1.0), ("ratio", self.ratio, 1e-6, 1e6)):
            if not (0 < low <= high <= most and least <= low):
                limit = "0 < low <= high <= 1" if name == "scale" else "1e-6 <= low <= high <= 1e6"
                raise ConfigError(f"RandomResizedCrop({name}={(low, high)}): {limit} must hold.")

    def box(self, width: int, height: int, size: tuple[int, int], draws: Draws) -> Box:
        """See `Crop.box`. Ten attempts of four draws; after them, the largest centred box within the ratios,
        at least one pixel wide and high.
        """
        (low, high), (narrow, wide) = self.scale, (math.log(r) for r in self.ratio)
        for area_u, ratio_u, left_u, top_u in draws.reshape(_CROP_ATTEMPTS, 4):
            area = width * height * (low + (high - low) * area_u)
            ratio = math.exp(narrow + (wide - narrow) * ratio_u)
            cut_width, cut_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < cut_width <= width and 0 < cut_height <= height:
                left, top = int(left_u * (width - cut_width + 1)), int(top_u * (height - cut_height + 1))
                return left, top, cut_width, cut_height
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        cut_width, cut_height = max(1, min(width, round(height * ratio))), max(1, min(height, round(width / ratio)))
        return (width - cut_width) // 2, (height - cut_height) // 2, cut_width, cut_height


@dataclasses.dataclass(frozen=True, slots=True)
class Image(Decoder):
    """How an encoded column (JPEG, PNG, WebP, …) becomes uint8 (N, H, W, 3), or (N, H, W, 1).

    Grey, palette, CMYK and 16-bit images become RGB, alpha is dropped, and EXIF rotation is applied. Grey of 32 bits,
    integers or floats, does not define white: raylance takes the least of 1 (floats only), 255 and 65,535 that no pixel
    exceeds. Where a pixel exceeds them all, or is negative, the image's least value becomes black and its greatest
    white; pixels that are not finite become black. Where that would differ between images, scale in `decode_fn`.

    Attributes:
        column: Column of encoded images, binary.
        size: Output (height, width) in pixels, or one number for a square. None keeps the size, which must then be the
            same for all images.
        augment: Chooses the part of the source to take; None takes all of it and stretches it to `size`.
        hflip: Probability of a horizontal flip.
        decode_fn: Replaces decoding and resizing: a picklable function from bytes to uint8 (H, W, 3).
        draft: Whether libjpeg decodes a JPEG at half of its size or less, where the part to take is at least twice as
            large as the output. It takes about half of the time. Pixels of 512 x 384 photographs then differ by 1 of
            255 on average, by 5 in the worst hundredth, and by 40 at most.
        keeps_size: Whether `size` was taken from the images, so that another size is an error and is not resized.
        like: Column of another `Image` whose crop and flip this one gets, as a mask does. Leave `augment` and `hflip`
            out here, and `size` too if it is the same. Both images of a row must have one displayed size, and one EXIF
            orientation (none is 1), unless their sizes prove that an image turned by a quarter and its upright mask
            fit; other rows are bad rows.
        mode: "RGB", or "L" for one channel: grey as it is, the indices of a palette, the brightness of colours. "L"
            refuses grey of more than 8 bits.
        interpolation: How pixels are resized: "bilinear", or "nearest", which makes no new values.
        follows: The setting of the column that `like` names, once the dataset is opened.
    """

    size: tuple[int, int] | int | None = None
    augment: Crop | None = None
    hflip: float = 0.0
    decode_fn: Callable[[bytes], Pixels] | None = None
    keeps_size: bool = dataclasses.field(default=False, repr=False)
    draft: bool = dataclasses.field(default=False, metadata=OMIT_DEFAULT)
    like: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    mode: Literal["RGB", "L"] = dataclasses.field(default="RGB", metadata=OMIT_DEFAULT)
    interpolation: Literal["bilinear", "nearest"] = dataclasses.field(default="bilinear", metadata=OMIT_DEFAULT)
    follows: "Image | None" = dataclasses.field(default=None, repr=False)

    dtype = np.dtype(np.uint8)
    draws = _BOX_DRAWS + 1
    channels_last = True
    content = "images"

    def __post_init__(self) -> None:
        if self.size is not None:
            object.__setattr__(self, "size", _whole_size(self.column, self.size))
        if not 0 <= self.hflip <= 1:
            raise ConfigError(f"Image({self.column!r}, hflip={self.hflip}): a probability lies in [0, 1].")
        for name, value, words in (
            ("mode", self.mode, ("RGB", "L")),
            ("interpolation", self.interpolation, ("bilinear", "nearest")),
        ):
            if value not in words:
                raise ConfigError(f"Image({self.column!r}, {name}={value!r}): must be {' or '.join(map(repr, words))}.")
        if self.like is not None and (self.augment is not None or self.hflip or self.decode_fn is not None):
            raise ConfigError(
                f"Image({self.column!r}, like={self.like!r}): its crop and flip are those of that column. Leave "
                "augment=, hflip= and decode_fn= out."
            )
        if self.size is None and self.augment is not None:
            raise ConfigError(f"Image({self.column!r}, augment=…): needs size=(height, width), which all crops get.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Output shape (H, W, 3) of one image, or (H, W, 1)."""
        if not isinstance(self.size, tuple):
            raise ConfigError(f"Image({self.column!r}): size is not known yet.")
        return (self.size[0], self.size[1], 3 if self.mode == "RGB" else 1)

    @property
    def codec(self) -> str:
        """What makes the pixels, with versions; "" where `decode_fn` does."""
        return CODEC if self.decode_fn is None else ""

    @property
    def is_random(self) -> bool:
        """Whether its draws change what comes out."""
        crops = self.augment is not None and not isinstance(self.augment, CenterCrop)
        return self.like is None and (crops or 0 < self.hflip < 1)

    def follow(self, other: Decoder) -> Self:
        """Takes crop, flip and, unless it has one, the size of the column that `like` names.

        Raises:
            ConfigError: If that column is not decoded by an `Image`, or has a `decode_fn`.
        """
        if not isinstance(other, Image) or other.decode_fn is not None:
            raise ConfigError(
                f"Image({self.column!r}, like={self.like!r}): that column is decoded by {other!r}, whose crop is "
                "not known. Name a column that raylance.Image decodes, without decode_fn=."
            )
        size, keeps = (other.size, other.keeps_size) if self.size is None else (self.size, self.keeps_size)
        return dataclasses.replace(self, size=size, keeps_size=keeps, follows=other)

    def open(self) -> "_ImageRows":
        """A row decoder with memory of its own.

        Raises:
            ConfigError: If the column that `like` names is not known yet.
        """
        if self.like is not None and self.follows is None:
            raise ConfigError(
                f"Image({self.column!r}, like={self.like!r}) does not know its crop. Pass it to raylance.dataset(…, "
                "decode=[…]), together with the image that it follows."
            )
        return _ImageRows(self)

    def resolve(self, encoded: bytes | memoryview) -> Self:
        """Takes the size from an image where none is given."""
        if self.size is not None:
            return self
        pixels = PixelDecoder().decode(encoded, _whole) if self.decode_fn is None else self.decode_fn(bytes(encoded))
        return dataclasses.replace(self, size=(int(pixels.shape[0]), int(pixels.shape[1])), keeps_size=True)

    def decode_into(self, encoded: bytes | memoryview, draws: Draws, out: Pixels) -> None:
        """Decodes one image with a new row decoder; see `raylance.Decoder`."""
        self.open().decode_into(encoded, draws, out)


class _ImageRows:
    """Decodes the images of a column, in one thread."""

    def __init__(self, image: Image) -> None:
        self._image, self._pixels = image, PixelDecoder()

    @property
    def fallbacks(self) -> int:
        """Images that the fast codec left to the slow one."""
        return self._pixels.fallbacks

    def check_like(self, encoded: memoryview, other: memoryview) -> None:
        """Refuses an image of another displayed size or orientation than the one whose crop it gets."""
        (width, height, turn), (wide, high, other_turn) = shown_size(encoded), shown_size(other)
        if (width, height) != (wide, high):
            raise ValueError(
                f"is {width}x{height} pixels where {self._image.like!r} is {wide}x{high}: one crop is not that of both"
            )
        # If one alone is turned by a quarter, and it is no square, equal displayed sizes prove that both are upright.
        is_proven = width != height and (turn > 4) != (other_turn > 4) and 1 in (turn, other_turn)
        if turn != other_turn and not is_proven:
            raise ValueError(
                f"has EXIF orientation {turn} where {self._image.like!r} has {other_turn}: one of them would be turned "
                "or mirrored, and both may not show the same then. Store both upright, or with one orientation"
            )

    def decode_into(self, encoded: bytes | memoryview, draws: Draws, out: Pixels) -> None:
        """Decodes one image to `out`, uint8 (H, W, 3 or 1); see `raylance.Decoder`."""
        image, size = self._image, (out.shape[0], out.shape[1])
        leader = image.follows or image  # defines crop and flip
        if image.decode_fn is not None:
            pixels = image.decode_fn(bytes(encoded))
            if pixels.dtype == np.uint8 and pixels.shape[2:] == out.shape[2:]:
                self._check_kept_size(pixels, out)
            if pixels.shape != out.shape or pixels.dtype != np.uint8:
                raise ValueError(f"decode_fn gave {pixels.dtype} {pixels.shape}, expected uint8 {out.shape}")
        else:

            def cut(height: int, width: int) -> Box:
                if leader.augment is None:
                    return _whole(height, width)
                return leader.augment.box(width, height, leader.shape[:2], draws[:_BOX_DRAWS])

            if image.mode == "L":
                pixels = decode_grey(encoded, cut)
            else:
                pixels = self._pixels.decode(encoded, cut, size if image.draft else None)
        flips = leader.hflip > draws[_BOX_DRAWS]
        if pixels.shape[:2] != size:
            self._check_kept_size(pixels, out)
            made = np.empty_like(out) if flips else out
            (resize_into if image.interpolation == "bilinear" else pick_into)(pixels, made)
            pixels = made
        if pixels is not out:
            copy_pixels(pixels[:, ::-1] if flips else pixels, out)

    def _check_kept_size(self, pixels: Pixels, out: Pixels) -> None:
        (height, width), (out_height, out_width) = pixels.shape[:2], out.shape[:2]
        if self._image.keeps_size and (height, width) != (out_height, out_width):
            raise ConfigError(
                f"is {width}x{height} pixels where others are {out_width}x{out_height}, and without size= all must be "
                'alike to make a batch; the epoch stops here, with on_bad_row="mask" too: this is no bad row. Pass '
                f"Image({self._image.column!r}, size=({out_height}, {out_width})), height first, to resize them."
            )


def _whole_size(column: str, size: Any) -> tuple[int, int]:
    """Checks a size argument, and returns it as (height, width)."""
    sides = list(size) if isinstance(size, tuple | list) else [size, size]
    whole = [isinstance(side, int | np.integer) and not isinstance(side, bool) and side >= 1 for side in sides]
    if len(sides) != 2 or not all(whole):
        raise ConfigError(
            f"Image({column!r}, size={size!r}): must be (height, width) in whole pixels, both at least 1, or one "
            "number for a square."
        )
    return int(sides[0]), int(sides[1])


def _whole(height: int, width: int) -> Box:
    return 0, 0, width, height
