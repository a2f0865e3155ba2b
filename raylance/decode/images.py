"""Decodes an image column to uint8 pixels of one size.

Every geometric augmentation cuts a box out of the source and resizes it to the output size. The box is keyed by (seed,
epoch, row offset), so it is the same on every rank, decoder and machine, in any batch.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from raylance.arguments import check_flag, check_integer, check_name, check_probability
from raylance.decode.crops import BOX_DRAWS, CenterCrop, Crop, whole_size
from raylance.decode.decoder import Decoder, Draws
from raylance.decode.pixels import (
    CODEC,
    MAX_PIXELS,
    Box,
    PixelDecoder,
    PixelRows,
    Pixels,
    Rules,
    Truncated,
    copy_pixels,
    pick_into,
    resize_into,
    shown_size,
)
from raylance.descriptions import OMIT_DEFAULT
from raylance.errors import ConfigError

_VIEW_DRAWS = BOX_DRAWS + 1  # the draws of the box, and one for the flip


@dataclasses.dataclass(frozen=True, slots=True)
class Image(Decoder):
    """Decodes a column of images (JPEG, PNG, WebP, …) to uint8 (N, H, W, C); with several views to (N, views, H, W, C).
    C is 3, or 1 with `mode="L"`. Torch batches have the channels before height and width, in channels-last memory.

    If each row has a list of images (bytes, or structs with `bytes`), batches have those of all rows one after another:
    uint8 (m, H, W, C), and `<name>_length`, int64 (n,), their number in each row; see `pad_lists` of the iterators for
    other forms. Each image gets a crop and flip of its own. With `on_bad_row="mask"`, `<name>_valid`, bool (m,), is
    False for an image that cannot be decoded, which is zeros; its row stays valid, and counts as a bad row. A null in
    place of a list is a list without images. Images with `like` need lists of the same lengths.

    Grey, palette, CMYK and 16-bit images become RGB, alpha is dropped, and the rotation that EXIF or XMP names is
    applied. Metadata never makes a row bad: an image whose orientation cannot be read is taken as stored, and counted
    as `unturned_rows` in `stats()`. A 32-bit grey
    image (integers or floats) does not say which value is white. raylance takes as white the smallest of 1 (floats
    only), 255 and 65,535 that no pixel exceeds. If a pixel exceeds all three, or is negative, the smallest value of the
    image becomes black and the largest white. Pixels that are not finite become black. So two such images of a column
    may get different scales; to give all the same scale, use `decode_fn`.

    Attributes:
        column: Column of encoded images, binary.
        size: Output (height, width) in pixels, or one number for a square. None keeps the size of the images, which
            must all be the same.
        augment: Chooses the part of the image to take; None takes the whole image and stretches it to `size`.
        hflip: Probability of a horizontal flip.
        decode_fn: Replaces decoding, cropping and resizing, but not the flip: a picklable function from bytes to uint8
            (H, W, C) of the output's size.
        draft: Whether a JPEG is decoded at half its size or less, if every part to take is at least twice as high and
            wide as the output. This takes about half the time. Pixels of 512 x 384 photographs then differ by 1 of 255
            on average, by 5 in the worst hundredth of the pixels, and by 40 at most.
        keeps_size: Whether raylance took `size` from a stored image because the user gave none. If so, an image of
            another size is an error, and is not resized.
        like: Name of another `Image` whose crops and flips this one (such as a mask) gets. Leave out `augment`,
            `hflip`, `decode_fn` and `views` here, and also `size` if it is the same. In each row, the images of the two
            columns must have the same displayed size and the same EXIF orientation (none is the same as upright), else
            the row is bad. One difference is allowed: one image is stored upright, the other is turned by a quarter,
            and they are not square. Then their equal displayed sizes prove that both are displayed upright.
        mode: "RGB", or "L" for one channel, which holds grey as it is stored, the indices of a palette, or the
            brightness of colours. Grey of fewer than 8 bits is not scaled: 4 bits give 0 for black to 15 for white. "L"
            refuses grey of more than 8 bits.
        interpolation: How pixels are resized: "bilinear", or "nearest", which makes no new values.
        views: Number of crops that are made of each image, each with another random box and flip. The image is decoded
            once for all of them.
        name: Name of the decoded column; None for `column`. With names, one column can be decoded in several ways, at
            the cost of one decode.
        follows: The image that `like` names; set when the dataset is opened.
        max_pixels: Maximum number of pixels, width times height, of an encoded image; None for no limit. An image with
            more pixels is a bad row, and none of its pixels are decoded. Where this process decodes (by threads, by
            `take`), a limit above Pillow's also needs a larger `PIL.Image.MAX_IMAGE_PIXELS`, except for JPEGs. The
            limit does not apply to `decode_fn`.
        truncated: Whether an image whose end is missing is a bad row, "refuse", or its missing pixels are grey or
            black, "accept". `PIL.ImageFile.LOAD_TRUNCATED_IMAGES` does not take its place, because it acts in one
            process only: where it is set, and "accept" is not, images that Pillow decodes are refused.
        setup: A picklable function without arguments that each process calls once before it decodes, such as
            `pillow_heif.register_heif_opener`. Without it, only formats that Pillow itself reads can be decoded, even
            if a plug-in is registered in this process.
    """

    _hints: ClassVar = {
        **dict.fromkeys(("crop", "transform"), "augment=raylance.RandomResizedCrop() chooses the part of the image"),
        **dict.fromkeys(("crops", "num_crops"), "views=2 makes two crops of each image"),
        "resize": "size= is that of the output",
    }
    size: tuple[int, int] | int | None = None
    augment: Crop | None = None
    hflip: float = 0.0
    decode_fn: Callable[[bytes], Pixels] | None = None
    keeps_size: bool = dataclasses.field(default=False, init=False, repr=False)
    draft: bool = dataclasses.field(default=False, metadata=OMIT_DEFAULT)
    like: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    mode: Literal["RGB", "L"] = dataclasses.field(default="RGB", metadata=OMIT_DEFAULT)
    interpolation: Literal["bilinear", "nearest"] = dataclasses.field(default="bilinear", metadata=OMIT_DEFAULT)
    follows: "Image | None" = dataclasses.field(default=None, init=False, repr=False)
    views: int = dataclasses.field(default=1, metadata=OMIT_DEFAULT)
    name: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    max_pixels: int | None = dataclasses.field(default=MAX_PIXELS, metadata=OMIT_DEFAULT)
    truncated: Truncated = dataclasses.field(default="refuse", metadata=OMIT_DEFAULT)
    setup: Callable[[], Any] | None = dataclasses.field(default=None, repr=False)

    dtype = np.dtype(np.uint8)
    channels_last = True
    content = "images"

    def __post_init__(self) -> None:
        _check_names(self)
        _check_functions(self)
        if self.size is not None:
            object.__setattr__(self, "size", whole_size(f"Image({self.column!r}, ", self.size))
        check_flag(f"Image({self.column!r}).draft", self.draft)
        check_probability(f"Image({self.column!r}, hflip", self.hflip)
        for name, value, words in (
            ("mode", self.mode, ("RGB", "L")),
            ("interpolation", self.interpolation, ("bilinear", "nearest")),
            ("truncated", self.truncated, ("refuse", "accept")),
        ):
            if value not in words:
                raise ConfigError(f"Image({self.column!r}, {name}={value!r}): must be {' or '.join(map(repr, words))}.")
        if self.like is not None and (self.augment is not None or self.hflip or self.decode_fn is not None):
            raise ConfigError(
                f"Image({self.column!r}, like={self.like!r}): its crop and flip are those of that column. Leave "
                "augment=, hflip= and decode_fn= out."
            )
        object.__setattr__(self, "views", check_integer(f"Image({self.column!r}).views", self.views, 1))
        if self.max_pixels is not None:
            name = f"Image({self.column!r}).max_pixels"
            object.__setattr__(self, "max_pixels", check_integer(name, self.max_pixels, 1))
        if self.size is None and self.augment is not None:
            raise ConfigError(f"Image({self.column!r}, augment=…): needs size=(height, width), which all crops get.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one decoded row, before a batch becomes tensors: (H, W, C); with several views, (views, H, W, C)."""
        if not isinstance(self.size, tuple):
            raise ConfigError(f"Image({self.column!r}): size is not known yet.")
        view = (self.size[0], self.size[1], 3 if self.mode == "RGB" else 1)
        return view if self.views == 1 else (self.views, *view)

    @property
    def draws(self) -> int:
        """Number of uniform random numbers for each row. Each view needs some for its crop and one for its flip."""
        return self.views * _VIEW_DRAWS

    @property
    def rules(self) -> Rules:
        """Which images may be opened."""
        return Rules(self.max_pixels, self.truncated, self.setup is not None)

    def prepare(self) -> None:
        """Calls `setup`, if this process has not called it yet."""
        if self.setup is not None:
            with _SETTING_UP:
                _set_up(self.setup)

    @property
    def codec(self) -> str:
        """The codecs that make the pixels, with versions; "" if `decode_fn` makes them."""
        return CODEC if self.decode_fn is None else ""

    @property
    def is_random(self) -> bool:
        """Whether the crop or the flip is random. False with `like`, because the other image then decides."""
        crops = self.augment is not None and not isinstance(self.augment, CenterCrop)
        return self.like is None and (crops or 0 < self.hflip < 1)

    def follow(self, other: Decoder) -> Self:
        """Returns a copy of this `Image` with the crops and flips of `other`. raylance calls it if this `Image` has a
        `like`, with the decoder of the column that `like` names. If this `Image` has no `size`, the copy gets that of
        `other`.

        Raises:
            ConfigError: If `other` is not an `Image` or has a `decode_fn`, or if this `Image` has several `views` and
                `other` has another number of them.
        """
        leader = _leader(self, other)
        if self.views not in (1, leader.views):
            raise ConfigError(
                f"Image({self.column!r}, like={self.like!r}, views={self.views}): that image has {leader.views} views, "
                "and each view has one crop. Leave views= out here."
            )
        size, keeps = (leader.size, leader.keeps_size) if self.size is None else (self.size, self.keeps_size)
        return self._found(size=size, keeps_size=keeps, views=leader.views, follows=leader)

    def open(self) -> "_ImageRows":
        """Opens a row decoder for one thread; see `Decoder.open`.

        Raises:
            ConfigError: If `like` names an image and `follow` was not called with that image.
        """
        return self.open_group(())

    def open_group(self, others: Sequence[Self]) -> "_ImageRows":
        """Opens this `Image` and `others`, which read the same column, together, so that each stored image is decoded
        once for all of them.

        Raises:
            ConfigError: If `open` would raise it for one of them.
        """
        for image in (self, *others):
            if image.like is not None and image.follows is None:
                raise ConfigError(
                    f"Image({image.column!r}, like={image.like!r}) does not know its crop. Pass it to "
                    "raylance.dataset(…, columns=[…]), together with the image that it follows."
                )
            image.prepare()
        return _ImageRows([self, *others])

    def resolve(self, encoded: bytes | memoryview) -> Self:
        """Returns a copy of this `Image` that has the size of an encoded image; this `Image` if it has a size."""
        if self.size is not None:
            return self
        self.prepare()
        decode_fn = self.decode_fn
        pixels = decode_fn(bytes(encoded)) if decode_fn else PixelDecoder(self.rules).decode(encoded, _whole)
        return self._found(size=(int(pixels.shape[0]), int(pixels.shape[1])), keeps_size=True)

    def decode_into(self, encoded: bytes | memoryview, draws: Draws, out: Pixels) -> None:
        """Decodes one image into `out`, by a row decoder that is opened for this call only; see `open`."""
        self.open().decode_into(encoded, draws, out)


@dataclasses.dataclass(frozen=True, slots=True)
class ImageCrop(Decoder):
    """Delivers the crop and flip that an `Image` gets in each row, as int32 (N, 7), or (N, views, 7).

    The seven numbers are left, top, width and height of the crop; width and height of the whole image as displayed; and
    1 if the crop is flipped, else 0.

    A transform can use these numbers to map boxes and points that belong to the image: see `raylance.images.map_boxes`
    and `map_points` there. Only the header of the image is parsed; the image is not decoded again.

    Attributes:
        column: Column of encoded images, binary.
        like: Name of the `Image`; None for the `Image` named `column`.
        name: Name of the resulting column; None for the image's name followed by "_crop".
        follows: The `Image` that `like` names; set when the dataset is opened.
    """

    like: str | None = None
    name: str | None = None
    follows: Image | None = dataclasses.field(default=None, init=False, repr=False)

    dtype = np.dtype(np.int32)
    content = "images"

    def __post_init__(self) -> None:
        object.__setattr__(self, "like", self.column if self.like is None else self.like)
        object.__setattr__(self, "name", f"{self.like}_crop" if self.name is None else self.name)
        _check_names(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row: (7,), or (views, 7) if the image has several views."""
        views = 1 if self.follows is None else self.follows.views
        return (7,) if views == 1 else (views, 7)

    @property
    def draws(self) -> int:
        """Number of random numbers for each row: as many as the image has; 0 until the image is known."""
        return 0 if self.follows is None else self.follows.draws

    @property
    def is_random(self) -> bool:
        """False: the crop column uses the random numbers of its image."""
        return False

    def follow(self, other: Decoder) -> Self:
        """Returns a copy of this `ImageCrop` that delivers the crops and flips of `other`, the image that `like` names.

        Raises:
            ConfigError: If `other` is not an `Image` of the same column, or has a `decode_fn`.
        """
        leader = _leader(self, other)
        if leader.column != self.column:
            raise ConfigError(
                f"ImageCrop({self.column!r}, like={self.like!r}): that image is of the column {leader.column!r}, so "
                f"its boxes lie in images of that column. Write ImageCrop({leader.column!r}, like={self.like!r})."
            )
        return self._found(follows=leader)

    def open(self) -> Self:
        """Returns this object, because an `ImageCrop` keeps nothing between rows; see `Decoder.open`."""
        if self.follows is not None:
            self.follows.prepare()
        return self

    def decode_into(self, encoded: memoryview, draws: Draws, out: npt.NDArray[Any]) -> None:
        """Writes the seven numbers of each view of one row into `out`.

        Raises:
            ConfigError: If `follow` was not called with the image that `like` names.
        """
        if self.follows is None:
            raise ConfigError(
                f"does not know its crop: pass ImageCrop({self.column!r}) to raylance.dataset(…, columns=[…]), "
                "together with the image that it follows."
            )
        width, height, _ = shown_size(encoded, self.follows.rules)
        for view, made in zip(_by_view(self.follows, draws), out.reshape(self.follows.views, 7), strict=True):
            made[:] = (*box_of_view(self.follows, height, width, view), width, height, flips_view(self.follows, view))


class _ImageRows(PixelRows):
    """Decodes the images of a column, in one thread."""

    def __init__(self, images: Sequence[Image]) -> None:
        rules = [each.rules for each in images if each.decode_fn is None]
        limits = [each.max_pixels for each in rules if each.max_pixels is not None]
        self._rules = Rules(  # the strictest of all, so that a row is bad for all images or none
            max_pixels=min(limits, default=None),
            truncated="accept" if all(each.truncated == "accept" for each in rules) else "refuse",
            plugins=all(each.plugins for each in rules),
        )
        super().__init__(self._rules)
        self._images = images

    def check_like(self, encoded: memoryview, other: memoryview) -> None:
        """Raises ValueError if the image does not fit `other`, the image whose crop it gets; see `like` of `Image`."""
        first = self._images[0]
        like, leader = first.like, first.follows or first
        width, height, turn = shown_size(encoded, self._rules)
        wide, high, other_turn = shown_size(other, leader.rules)
        if (width, height) != (wide, high):
            raise ValueError(f"is {width}x{height} pixels, and {like!r} is {wide}x{high}: one crop does not fit both")
        # If one image is stored upright (1), and the other is turned by a quarter and not a square, then equal
        # displayed sizes prove that both are displayed upright.
        is_proven = width != height and (turn > 4) != (other_turn > 4) and 1 in (turn, other_turn)
        if turn != other_turn and not is_proven:
            raise ValueError(
                f"has EXIF orientation {turn}, and {like!r} has {other_turn}: one of them would be turned or "
                "mirrored, and both may not show the same then. Store both upright, or with one orientation"
            )

    def decode_into(self, encoded: bytes | memoryview, draws: Draws, out: Pixels) -> None:
        """Decodes one image to `out`, uint8 (H, W, 3 or 1), or (views, H, W, …); see `raylance.Decoder`."""
        self.decode_all(encoded, [draws], [out])

    def decode_all(self, encoded: bytes | memoryview, draws: Sequence[Draws], outs: Sequence[Pixels]) -> None:
        """Decodes one image once for all settings; see `raylance.decode.decoder.RowDecoderGroup`."""
        by_source: dict[object, list[View]] = {}
        for image, numbers, out in zip(self._images, draws, outs, strict=True):
            made = out.reshape(image.views, *out.shape[-3:])
            views = [View(image, *each) for each in zip(_by_view(image, numbers), made, strict=True)]
            by_source.setdefault(image.decode_fn or image.mode, []).extend(views)
        for views in by_source.values():
            for view, pixels in zip(views, self._decode(encoded, views), strict=True):
                view.write(pixels)

    def _decode(self, encoded: bytes | memoryview, views: Sequence["View"]) -> Sequence[Pixels]:
        """Decodes an image for views that share a source of pixels: one `decode_fn`, or one mode."""
        first = views[0].image
        if first.decode_fn is not None:
            return [first.decode_fn(bytes(encoded))] * len(views)

        def cut(height: int, width: int) -> list[Box]:
            return [box_of_view(view.image, height, width, view.draws) for view in views]

        if first.mode == "L":
            return self._pixels.decode_grey(encoded, cut)
        drafts = all(view.image.draft for view in views)
        sizes = [(view.out.shape[0], view.out.shape[1]) for view in views] if drafts else []
        return self._pixels.decode_parts(encoded, cut, lambda: sizes)


class View(NamedTuple):
    """One view of an image: the setting, the view's random numbers, and memory for its pixels, uint8 (H, W, 3 or 1)."""

    image: Image
    draws: Draws
    out: Pixels

    def write(self, pixels: Pixels) -> None:
        """Resizes and flips the pixels of the box, (h, w, 3, 4 or 1), into `out`."""
        image, out = self.image, self.out
        if image.decode_fn is not None:
            if pixels.dtype == np.uint8 and pixels.shape[2:] == out.shape[2:]:
                self._check_kept_size(pixels)
            if pixels.shape != out.shape or pixels.dtype != np.uint8:
                raise ValueError(f"decode_fn gave {pixels.dtype} {pixels.shape}, expected uint8 {out.shape}")
        flips = flips_view(image, self.draws)
        if pixels.shape[:2] != out.shape[:2]:
            self._check_kept_size(pixels)
            made = np.empty_like(out) if flips else out
            (resize_into if image.interpolation == "bilinear" else pick_into)(pixels, made)
            pixels = made
        if pixels is not out:
            copy_pixels(pixels[:, ::-1] if flips else pixels, out)

    def _check_kept_size(self, pixels: Pixels) -> None:
        (height, width), (out_height, out_width) = pixels.shape[:2], self.out.shape[:2]
        if self.image.keeps_size and (height, width) != (out_height, out_width):
            raise ConfigError(
                f"is {width}x{height} pixels, others are {out_width}x{out_height}, and without size= all must be "
                'of one size to make a batch; the epoch stops here, with on_bad_row="mask" too: this is not a bad row. '
                f"Pass Image({self.image.column!r}, size=({out_height}, {out_width})), height first, to resize them."
            )


_SETTING_UP = threading.Lock()


@functools.cache
def _set_up(function: Callable[[], Any]) -> None:
    function()


def _check_names(setting: Image | ImageCrop) -> None:
    """Raises ConfigError if a setting's column, `like` or `name` cannot be the name of a column."""
    check_name(f"{type(setting).__name__}: column", setting.column)
    for name in ("like", "name"):
        if (given := getattr(setting, name)) is not None:
            check_name(f"{type(setting).__name__}({setting.column!r}).{name}", given)


def _check_functions(image: Image) -> None:
    """Raises ConfigError if what an image calls cannot be called."""
    if image.decode_fn is not None and not callable(image.decode_fn):
        raise ConfigError(f"Image({image.column!r}, decode_fn={image.decode_fn!r}): give a function of bytes.")
    if image.setup is not None and not callable(image.setup):
        raise ConfigError(f"Image({image.column!r}, setup={image.setup!r}): give a function without arguments.")
    if image.augment is not None and (isinstance(image.augment, type) or not hasattr(image.augment, "box")):
        raise ConfigError(
            f"Image({image.column!r}, augment={image.augment!r}): give an object that chooses a box in each image, "
            "such as raylance.RandomResizedCrop() or raylance.CenterCrop(), with the parentheses."
        )


def _leader(follower: Decoder, other: Decoder) -> Image:
    """Returns the image whose crops and flips a decoder takes over; raises ConfigError if `other` has none."""
    if isinstance(other, Image) and other.decode_fn is None:
        return other
    raise ConfigError(
        f"{type(follower).__name__}({follower.column!r}, like={follower.like!r}): that column is decoded by {other!r}, "
        "whose crop is not known. Name a column that raylance.Image decodes, without decode_fn=."
    )


def _by_view(image: Image, draws: Draws) -> Draws:
    """Returns the draws of each view, (views, 41): 40 for the box, and one for the flip."""
    return draws.reshape(image.views, _VIEW_DRAWS)


def box_of_view(image: Image, height: int, width: int, draws: Draws) -> Box:
    """Returns the part of the whole image that a view shows; without `augment`, the whole image."""
    leader = image.follows or image
    if leader.augment is None:
        return _whole(height, width)
    high, wide, _ = leader.shape[-3:]
    return leader.augment.box(width, height, (high, wide), draws[:BOX_DRAWS])


def flips_view(image: Image, draws: Draws) -> bool:
    """Returns whether a view is flipped."""
    return bool((image.follows or image).hflip > draws[BOX_DRAWS])


def _whole(height: int, width: int) -> Box:
    return 0, 0, width, height
