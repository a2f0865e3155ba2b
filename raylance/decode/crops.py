"""Chooses the part of an image that becomes the output, and maps points and boxes to that output."""

import dataclasses
import math
from collections.abc import Container
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from raylance.arguments import is_between, is_pair
from raylance.decode.decoder import Draws
from raylance.decode.pixels import Box
from raylance.descriptions import Setting
from raylance.errors import ConfigError

BOX_DRAWS = 40
"""Number of uniform random numbers for one box."""

_ATTEMPTS = 10


class Crop(Protocol):
    """Chooses the part of a source image that becomes the output."""

    def box(self, width: int, height: int, size: tuple[int, int], draws: Draws) -> Box:
        """Chooses a box.

        Args:
            width: Width of the source in pixels.
            height: Height of the source in pixels.
            size: (height, width) of the output.
            draws: Uniform numbers in [0, 1) of this row and epoch, float64, shape (40,), which is the number that
                `RandomResizedCrop` needs: ten attempts of four numbers.

        Returns:
            (left, top, width, height) in pixels, within the source.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CenterCrop(Setting):
    """Takes the middle of the image, as usual for validation.

    Attributes:
        zoom: The number by which width and height of the largest possible crop are divided. This largest crop has the
            output's aspect ratio and just fits in the image. With 256 / 224, seven eighths of each side remain.
    """

    zoom: float = 256 / 224

    def __post_init__(self) -> None:
        if not is_between(self.zoom, 1, math.inf):
            raise ConfigError(f"CenterCrop(zoom={self.zoom!r}): must be at least 1, or the crop outgrows the image.")

    def box(self, width: int, height: int, size: tuple[int, int], draws: Draws) -> Box:
        """See `Crop.box`. Does not use `draws`."""
        out_height, out_width = size
        scale = min(height / out_height, width / out_width) / self.zoom
        cut_width, cut_height = (max(1, round(side * scale)) for side in (out_width, out_height))
        return (width - cut_width) // 2, (height - cut_height) // 2, cut_width, cut_height


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RandomResizedCrop(Setting):
    """Takes a box of random area and aspect ratio (Szegedy et al., "Going deeper with convolutions", 2014).

    Attributes:
        scale: Smallest and largest area of the box, as fractions of the image's area.
        ratio: Smallest and largest aspect ratio of the box, width over height; drawn log-uniformly.
    """

    _hints: ClassVar = {"size": "the size is that of Image(…, size=224)"}
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        # No image is a million times wider than high, and much larger numbers overflow.
        for name, pair, least, most in (("scale", self.scale, 0.0, 1.0), ("ratio", self.ratio, 1e-6, 1e6)):
            if not (is_pair(pair) and 0 < pair[0] <= pair[1] <= most and least <= pair[0]):
                limit = "0 < low <= high <= 1" if name == "scale" else "1e-6 <= low <= high <= 1e6"
                raise ConfigError(f"RandomResizedCrop({name}={pair!r}): give (low, high), for which {limit} holds.")

    def box(self, width: int, height: int, size: tuple[int, int], draws: Draws) -> Box:
        """See `Crop.box`. Makes up to ten attempts to find a box that fits in the image. Each attempt uses four of the
        `draws`. If all fail, takes the largest centred box whose aspect ratio lies within `ratio`, at least one pixel
        wide and high.
        """
        (low, high), (narrow, wide) = self.scale, (math.log(r) for r in self.ratio)
        for area_u, ratio_u, left_u, top_u in draws.reshape(_ATTEMPTS, 4):
            area = width * height * (low + (high - low) * area_u)
            ratio = math.exp(narrow + (wide - narrow) * ratio_u)
            cut_width, cut_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < cut_width <= width and 0 < cut_height <= height:
                left, top = int(left_u * (width - cut_width + 1)), int(top_u * (height - cut_height + 1))
                return left, top, cut_width, cut_height
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        cut_width, cut_height = max(1, min(width, round(height * ratio))), max(1, min(height, round(width / ratio)))
        return (width - cut_width) // 2, (height - cut_height) // 2, cut_width, cut_height


def cut_frames(
    frames: npt.NDArray[Any], size: tuple[int, int], draws: Draws, *, random: bool, hflip: float
) -> npt.NDArray[Any]:
    """Cuts the same part out of all frames of a sample.

    Args:
        frames: Pixels, (…, H, W, channels).
        size: (height, width) of the part, at most (H, W).
        draws: Uniform numbers in [0, 1) for top, left and flip, float64; not used without `random` and `hflip`.
        random: Whether the part is drawn; else it is the middle.
        hflip: Probability of a horizontal flip.

    Returns:
        A view (…, height, width, channels).
    """
    (height, width), free = size, np.subtract(frames.shape[-3:-1], size)
    top, left = (draws[:2] * (free + 1)).astype(int) if random else free // 2
    part = frames[..., top : top + height, left : left + width, :]
    return part[..., ::-1, :] if hflip and draws[2] < hflip else part


def map_points(points: npt.ArrayLike, crop: npt.ArrayLike, size: tuple[int, int] | int) -> npt.NDArray[np.float64]:
    """Maps points of a source image through crop, resizing and flip.

    Args:
        points: (x, y) in pixels of the source after EXIF rotation, shape (…, 2), or (0,) for none. Pixel i covers
            [i, i + 1).
        crop: Crop and flip of the row, as `raylance.images.ImageCrop` gives them: shape (7,), or (views, 7).
        size: (height, width) of the output, or one number for a square, as `raylance.Image` takes it.

    Returns:
        The points in pixels of the output, float64 (…, 2), or (views, …, 2). Points that were cut off lie outside the
        output. Points of a masked row, whose crop is all zeros, are NaN.

    Raises:
        ConfigError: If an array has another shape, or no image can have the size.
    """
    at, (high, wide) = _array("points", points, "(…, 2), x and y of each", 2, range(1, 99)), whole_size("", size)
    crops = _array("crop", crop, "(7,) or (views, 7), as ImageCrop gives it for a row", 7, (1, 2))
    mapped = np.full((*crops.shape[:-1], *at.shape), np.nan)
    for view in np.ndindex(crops.shape[:-1]):
        left, top, width, height, _, _, flips = crops[view]
        if width and height:
            mapped[view] = (at - (left, top)) * (wide / width, high / height)
            if flips:
                mapped[(*view, ..., 0)] = wide - mapped[(*view, ..., 0)]
    return mapped


def map_boxes(
    boxes: npt.ArrayLike, crop: npt.ArrayLike, size: tuple[int, int] | int, *, least_visible: float = 0.0
) -> tuple[Any, npt.NDArray[np.bool_]]:
    """Maps boxes of a source image through crop, resizing and flip, and clips them to the output.

    Args:
        boxes: (left, top, right, bottom) in pixels of the source after EXIF rotation, shape (k, 4), or (0,) for none.
        crop: Crop and flip of the row, as `raylance.images.ImageCrop` gives them: shape (7,), or (views, 7).
        size: (height, width) of the output, or one number for a square, as `raylance.Image` takes it.
        least_visible: The fraction of a box's area that must be visible for the box to be kept.

    Returns:
        The m kept boxes, float64 (m, 4), and whether each of the k boxes was kept, bool (k,). If `crop` has several
        views, a list of arrays (m, 4), one for each view, and bool (views, k). Boxes without a visible part are never
        kept, nor are the boxes of a masked row, whose crop is all zeros.

    Raises:
        ConfigError: If an array has another shape or no numbers, if no image can have the size, or if `least_visible`
            is not a fraction.
    """
    if not is_between(least_visible, 0, 1):
        raise ConfigError(f"least_visible={least_visible!r}: a fraction lies in [0, 1].")
    given = _array("boxes", boxes, "(k, 4): left, top, right, bottom of each", 4, (2,))
    corners = map_points(given.reshape(-1, 2, 2), crop, size)
    low, high = corners.min(axis=-2), corners.max(axis=-2)  # a flip swaps left and right
    ends = whole_size("", size)[::-1]
    shown_low, shown_high = low.clip(0, ends), high.clip(0, ends)
    visible = (shown_high - shown_low).prod(axis=-1)
    # Comparisons with NaN are False, and the visible fraction of an infinite box is 0.
    with np.errstate(invalid="ignore", over="ignore"):
        whole = (high - low).prod(axis=-1)
        keep = (visible > 0) & (visible / whole >= least_visible)
    shown = np.concatenate([shown_low, shown_high], axis=-1)
    return (shown[keep] if keep.ndim == 1 else [view[kept] for view, kept in zip(shown, keep, strict=True)]), keep


def whole_size(owner: str, size: Any) -> tuple[int, int]:
    """Returns a size argument as (height, width); `owner` is the start of the call, for errors. Raises ConfigError if
    it is not one or two whole numbers of at least 1.
    """
    sides = list(size) if isinstance(size, tuple | list) else [size, size]
    whole = [isinstance(side, int | np.integer) and not isinstance(side, bool) and side >= 1 for side in sides]
    if len(sides) != 2 or not all(whole):
        given = f"{owner}size={size!r}" + (")" if owner else "")
        raise ConfigError(
            f"{given}: must be (height, width) in whole pixels, both at least 1, or one number for a square."
        )
    return int(sides[0]), int(sides[1])


def _array(name: str, given: npt.ArrayLike, wanted: str, width: int, axes: Container[int]) -> npt.NDArray[np.float64]:
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={given!r} cannot be mapped ({error}): give numbers, {wanted}.") from error
    if not array.size and array.ndim == 1:  # an empty list
        return array.reshape(0, width)
    if array.ndim not in axes or array.shape[-1] != width:
        raise ConfigError(f"{name} of shape {array.shape} cannot be mapped: give {wanted}.")
    return array
