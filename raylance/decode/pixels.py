"""Decodes images to the RGB pixels of a box, the same in every process, and resizes them.

simplejpeg calls libjpeg-turbo with Pillow's settings, so its pixels of JPEGs are equal to Pillow's. Pillow decodes what
simplejpeg refuses: CMYK, damaged images of which a part can be decoded, other formats. Metadata do not decide whether
an image can be decoded. Torch's antialiased uint8 kernel resizes with Pillow's filter in a fraction of Pillow's time.
Under 1 % of the resized pixels differ from Pillow's, by one grey level at most.
"""

import contextlib
import dataclasses
import importlib.metadata
import io
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import PIL.GifImagePlugin
import PIL.Image
import PIL.ImageFile
import pyarrow as pa
import simplejpeg

from raylance.errors import ConfigError

if TYPE_CHECKING:
    import torch

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]  # left, top, width, height
Cut = Callable[[int, int], Box]  # from height and width of the whole image
Cuts = Callable[[int, int], Sequence[Box]]

MAX_PIXELS = 178_956_970
"""Default for the maximum number of pixels of an image. Pillow treats a larger image as a decompression bomb."""

Truncated = Literal["refuse", "accept"]

_ORIENTATION = 0x0112  # a tag of EXIF and of TIFF
_XMP_ORIENTATION = b"tiff:Orientation"
_DEEP = "I;16", "I;16B", "I;16L", "F"  # Pillow's names of 16 bits, and of floats
_PNG = b"\x89PNG\r\n\x1a\n"
_PIXEL_CHUNKS = b"tRNS", b"acTL", b"fcTL", b"fdAT"  # chunks that change pixels, though PNG allows to ignore them
_TURNING_TEXTS = "Raw profile type exif", "XML:com.adobe.xmp"  # texts of a PNG by which Pillow turns it
_TEXT_BYTES = 16 << 20  # most bytes of such a text
_JPEG2000_SIZE, _JPEG2000_BITS = b"\xff\x4f\xff\x51", 42  # start of the code; bytes from there to its bits
_KEEP_PALETTE = PIL.GifImagePlugin.LoadingStrategy.RGB_AFTER_FIRST  # only the first frame is decoded
_TIFF = "TIFF"  # Pillow turns TIFFs itself when it loads them; images of other formats stay as they are stored
_JPEG = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
_JPEGS = "JPEG", "MPO"  # Pillow's names
_WEBP = re.compile(rb"RIFF....WEBP", re.DOTALL)
_COLOURS = ("YCbCr", "RGB", "Gray")  # colour spaces of JPEGs; Pillow converts CMYK
_BLOCK_PIXELS = 4 << 20  # most that Pillow holds in one block, which Arrow can import
_STRIP_PIXELS = 1 << 20  # pixels of a larger image converted at once
KEPT_BYTES = 64 << 20  # memory for pixels that a thread keeps from one JPEG to the next, at most
_TORCH = importlib.metadata.version("torch").partition("+")[0]
CODEC = f"simplejpeg {simplejpeg.__version__}, pillow {PIL.__version__}, torch {_TORCH}"
"""The codecs that make the pixels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """Which images Pillow may open and decode, the same in every process."""

    max_pixels: int | None = MAX_PIXELS  # the maximum number of pixels of an image; None for no limit
    truncated: Truncated = "refuse"  # whether an image without its end is an error
    plugins: bool = False  # whether plug-ins, which Pillow does not contain, may open images


class PixelDecoder:
    """Decodes one image after another, in one thread."""

    def __init__(self, rules: Rules = Rules()) -> None:
        self._rules, self.fallbacks = rules, 0  # JPEGs that Pillow decoded
        self.unturned = 0  # images decoded as stored, because their orientation cannot be read
        self._memory = np.empty(0, dtype=np.uint8)

    def decode(self, encoded: bytes | memoryview, cut: Cut, reduce_to: tuple[int, int] | None = None) -> Pixels:
        """Decodes one box of an image; see `decode_parts`."""
        sizes = [] if reduce_to is None else [reduce_to]
        return self.decode_parts(encoded, lambda height, width: [cut(height, width)], lambda: sizes)[0]

    def decode_parts(
        self, encoded: bytes | memoryview, cut: Cuts, reduce_to: Callable[[], Sequence[tuple[int, int]]]
    ) -> list[Pixels]:
        """Decodes an image once, applies EXIF rotation, and cuts boxes out of it: uint8 (h, w, 3), or (h, w, 4) with
        padding after the colours. They are valid until the next call, and may be read-only.

        `reduce_to` returns the (height, width) to which each box will be resized, once `cut` has chosen the boxes;
        nothing for the whole size. If each box is at least twice as high and wide, a JPEG is decoded at half its size
        or less, with enough pixels for every box.

        Raises DecompressionBombError if the image has too many pixels, before any of them is decoded; and ValueError,
        OSError, … as Pillow raises for data that is not an image.
        """
        data = memoryview(encoded).cast("B")  # Arrow gives signed bytes, which simplejpeg refuses
        if data[: len(_JPEG)] == _JPEG:
            if (parts := self._by_turbo(data, cut, reduce_to)) is not None:
                return parts
            self.fallbacks += 1
        image = _open(data, self._rules)
        image = _load(image, data, self._rules)
        whole = self._turned(_rgb(image), image)
        return [part_of(whole, box) for box in cut(*whole.shape[:2])]

    def decode_grey(self, encoded: bytes | memoryview, cut: Cuts) -> list[Pixels]:
        """Decodes the boxes of an image to one channel, uint8 (h, w, 1), with EXIF rotation applied. The channel holds
        grey as it is stored, the indices of a palette, or the brightness of colours. Grey of fewer than 8 bits counts
        from 0 for black in each format.

        Raises the errors of `decode_parts`; and ValueError if grey has more than 8 bits, because scaling would change
        the classes of a mask. Pillow itself scales grey with alpha to 8 bits.
        """
        image = _open(encoded, self._rules)
        white = _white(image)
        image = _load(image, encoded, self._rules)
        if image.mode[0] in "IF":
            raise ValueError(f"has more than 8 bits a pixel (mode {image.mode}), which uint8 cannot hold")
        one = image.getchannel(0) if image.mode in ("LA", "PA") else image
        grey = np.asarray(one if one.mode in ("L", "P") else one.convert("L"))
        white = 1 if image.mode == "1" else white
        if white < 255:  # Pillow has scaled it
            grey = ((np.arange(256) * white + 127) // 255).astype(np.uint8)[grey]
        if image.format == "JPEG2000" and image.mode in ("L", "LA"):
            grey = grey >> _shifted_bits(bytes(encoded))
        whole = self._turned(grey[..., None], image)
        return [part_of(whole, box) for box in cut(*whole.shape[:2])]

    def _turned(self, stored: Pixels, image: PIL.Image.Image) -> Pixels:
        return shown(stored, 1 if image.format == _TIFF else self._count(_orientation(image)))

    def _count(self, orientation: int | None) -> int:
        self.unturned += orientation is None
        return orientation or 1

    def _by_turbo(
        self, data: memoryview, cut: Cuts, reduce_to: Callable[[], Sequence[tuple[int, int]]]
    ) -> list[Pixels] | None:
        """Decodes the boxes of a JPEG; None if simplejpeg refuses it."""
        if (size := jpeg_size(data)) is None:
            return None
        high, wide = size
        _check_pixels(wide, high, self._rules.max_pixels)
        try:
            orientation: int | None = 1
            if _may_be_turned(data):
                orientation = _orientation(_open(data, self._rules))
            is_turned = (orientation or 1) > 4  # by a quarter, so that rows of stored pixels are displayed as columns
            shown_high, shown_wide = (wide, high) if is_turned else (high, wide)
            boxes = cut(shown_high, shown_wide)
            least: dict[str, Any] = {}
            sizes = reduce_to()
            if sizes and all(min(box[3] / to[0], box[2] / to[1]) >= 2 for box, to in zip(boxes, sizes, strict=True)):
                needed = [
                    (-(-shown_high * to[0] // box[3]), -(-shown_wide * to[1] // box[2]))
                    for box, to in zip(boxes, sizes, strict=True)
                ]
                sides = [max(side) for side in zip(*needed, strict=True)]
                sides = sides[::-1] if is_turned else sides
                least = {"min_height": sides[0], "min_width": sides[1], "min_factor": 2}
                high, wide, _, _ = simplejpeg.decode_jpeg_header(data, **least)
            stored = simplejpeg.decode_jpeg(data, "RGB", buffer=self._scratch(high * wide * 3), **least)
        except ValueError:  # the data may be damaged; Pillow may decode a part of it, or describe the damage better
            return None
        pixels = shown(stored, self._count(orientation))
        if least:
            y, x = pixels.shape[0] / shown_high, pixels.shape[1] / shown_wide
            boxes = [
                (round(left * x), round(top * y), round(width * x), round(height * y))
                for left, top, width, height in boxes
            ]
        return [part_of(pixels, box) for box in boxes]

    def _scratch(self, nbytes: int) -> Pixels:
        """Returns memory for one image; that of a very large one is not kept."""
        memory = self._memory if nbytes <= len(self._memory) else np.empty(nbytes, dtype=np.uint8)
        if nbytes <= KEPT_BYTES:
            self._memory = memory
        return memory[:nbytes]


class PixelRows:
    """A row decoder that has a `PixelDecoder`, and its counters."""

    def __init__(self, rules: Rules) -> None:
        self._pixels = PixelDecoder(rules)

    @property
    def fallbacks(self) -> int:
        """Number of images that the fast codec left to the slow one."""
        return self._pixels.fallbacks

    @property
    def unturned(self) -> int:
        """Number of images whose orientation cannot be read."""
        return self._pixels.unturned


def holds_images(values: pa.ChunkedArray | pa.Array) -> bool:
    """Whether all values of a sample are bytes that begin as JPEG, PNG, WebP or GIF do."""
    if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
        return False
    begins = [value.as_buffer()[:12].to_pybytes() for value in values if value.is_valid]
    is_image = (each.startswith((_JPEG, _PNG, b"GIF8")) or _WEBP.match(each) for each in begins)
    return bool(begins) and all(is_image)


def decode_depth(encoded: bytes | memoryview) -> npt.NDArray[np.float32]:
    """Decodes an image of one channel of 16 bits or of floats to its values as they are stored, float32 (h, w).

    Raises ValueError if it has other pixels, and the errors of `PixelDecoder.decode_parts`.
    """
    image = _open(encoded, Rules())
    if image.mode not in _DEEP:
        raise ValueError(f"has pixels of mode {image.mode!r}; those of depth have {' or '.join(_DEEP)}")
    return np.asarray(_load(image, encoded, Rules()), dtype=np.float32)


def jpeg_size(data: memoryview) -> tuple[int, int] | None:
    """Returns the stored height and width of a JPEG that fast codecs decode like Pillow; None for all else."""
    if data[: len(_JPEG)] != _JPEG:
        return None
    try:
        high, wide, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (high, wide) if colours in _COLOURS else None


def size_in_head(head: memoryview) -> tuple[int, int] | None:
    """Returns the stored height and width of a JPEG, PNG, WebP or AVIF from its first bytes; None for other formats,
    and if they do not have it.
    """
    data, at = bytes(head), 2
    if data[:8] == _PNG and data[12:16] == b"IHDR" and len(data) >= 24:
        return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    if _WEBP.match(data) and len(data) >= 30:
        return _size_of_webp(data)
    if data[4:12] == b"ftypavif":
        found = [data[each.start() + 8 : each.start() + 16] for each in re.finditer(b"ispe", data)]
        sizes = [(int.from_bytes(each[4:], "big"), int.from_bytes(each[:4], "big")) for each in found if len(each) == 8]
        return max(sizes, key=math.prod, default=None)  # smaller ones are of thumbnails and tiles
    while data[:3] == _JPEG and at + 9 <= len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the header of a frame
            return int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
        at += 1 if kind == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _size_of_webp(data: bytes) -> tuple[int, int] | None:
    """Returns the height and width of a WebP: lossy, lossless, or extended."""
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[27:30], "little"), 1 + int.from_bytes(data[24:27], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(data[28:30], "little") & 0x3FFF, int.from_bytes(data[26:28], "little") & 0x3FFF
    return None


def orientation_if_plain(data: memoryview, rules: Rules) -> int | None:
    """Returns the orientation, 1 to 8, of a JPEG that every codec decodes to the same stored pixels as Pillow; else
    None. Some codecs stop at wrong markers among the pixels.
    """
    if (size := jpeg_size(data)) is None or not _has_plain_scans(np.frombuffer(data, np.uint8)):
        return None
    try:
        _check_pixels(*size, rules.max_pixels)
        return _orientation(_open(data, rules)) if _may_be_turned(data) else 1
    except Exception:  # damaged segments raise errors of many kinds
        return None


def _has_plain_scans(data: npt.NDArray[np.uint8]) -> bool:
    """Whether a JPEG is sequential or progressive, and has only allowed markers among its pixels: restart markers in
    sequence; if it is progressive, Huffman tables and further scans, too.
    """
    at, is_progressive = 2, False
    marks = np.flatnonzero((data[:-1] == 0xFF) & (data[1:] != 0))  # FF 00 is a byte of pixels
    while True:
        if at + 4 > len(data) or data[at] != 0xFF:
            return False
        if data[at + 1] == 0xFF:  # a fill byte
            at += 1
            continue
        kind, size = int(data[at + 1]), (int(data[at + 2]) << 8) + int(data[at + 3])
        if 0xC0 <= kind <= 0xCF and kind != 0xC4:
            is_progressive = kind == 0xC2
            if kind not in (0xC0, 0xC1, 0xC2):
                return False
        at += 2 + size
        if kind != 0xDA:  # not the start of pixels
            continue
        later = marks[np.searchsorted(marks, at) :]
        kinds = data[later + 1]
        ends = np.flatnonzero((kinds & 0xF8) != 0xD0)  # not a restart marker
        if not len(ends) or (kinds[: ends[0]] != 0xD0 + np.arange(ends[0]) % 8).any():
            return False
        at, end = int(later[ends[0]]), int(kinds[ends[0]])
        if end == 0xD9:
            return True
        if not is_progressive or end not in (0xC4, 0xDA):
            return False


def part_of(pixels: Pixels, box: Box) -> Pixels:
    """Returns a view of the pixels (h, w, c) in a box."""
    left, top, width, height = box
    return pixels[top : top + height, left : left + width]


def _orientation(image: PIL.Image.Image) -> int | None:
    """Returns the display orientation, 1 to 8: from EXIF, XMP, or a TIFF's own tag. None if these cannot be read."""
    if image.format != _TIFF:
        info, image = image.info, PIL.Image.Image()  # a PNG would be decoded, and a JPEG has hidden an error already
        image.info = info
    try:
        found = image.getexif().get(_ORIENTATION, 1)
        return next((number for number in range(1, 9) if found == number), 1)  # it may be a fraction, as in Pillow
    except Exception:  # Pillow raises errors of any kind for damaged metadata
        return None


def _may_be_turned(data: memoryview) -> bool:
    """Whether a segment before the pixels is EXIF or XMP with an orientation, or cannot be parsed. If not, Pillow need
    not parse the image, which would take a twentieth of the time of decoding.
    """
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF and data[at + 1] >= 0xC0:
        if data[at + 1] == 0xDA:  # the pixels
            return False
        end = at + 2 + (data[at + 2] << 8) + data[at + 3]
        if data[at + 1] == 0xE1:
            segment = bytes(data[at + 4 : end])
            if segment[:6] == b"Exif\0\0" or _XMP_ORIENTATION in segment:
                return True
        at = end
    return True


def shown(stored: Pixels, orientation: int) -> Pixels:
    """Returns a view of stored pixels (h, w, c), turned and mirrored as they are displayed."""
    if orientation == 1:
        return stored
    pixels = stored.transpose(1, 0, 2) if orientation > 4 else stored
    return pixels[:: -1 if orientation in (3, 4, 7, 8) else 1, :: -1 if orientation in (2, 3, 6, 7) else 1]


def set_up_process() -> None:
    """Sets Pillow in a process that only decodes, so that what the environment has set changes no pixel there. In a
    process of the user's, nothing is set: there, images that its settings would decode otherwise are refused.
    """
    PIL.Image.MAX_IMAGE_PIXELS = None
    PIL.ImageFile.LOAD_TRUNCATED_IMAGES = False
    PIL.GifImagePlugin.LOADING_STRATEGY = _KEEP_PALETTE
    warnings.filterwarnings("ignore", module=r"PIL\b")


def _load(image: PIL.Image.Image, encoded: bytes | memoryview, rules: Rules) -> PIL.Image.Image:
    """Decodes the pixels of an image that was opened; returns it, or another one of the same bytes. Raises ConfigError
    if a setting of Pillow in this process would change its pixels.
    """
    if image.format == "GIF" and PIL.GifImagePlugin.LOADING_STRATEGY is PIL.GifImagePlugin.LoadingStrategy.RGB_ALWAYS:
        raise ConfigError(
            "is a GIF, whose palette PIL.GifImagePlugin.LOADING_STRATEGY of this process turns into colours. Leave it "
            "at RGB_AFTER_FIRST."
        )
    if rules.truncated == "refuse" and PIL.ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ConfigError(
            "cannot be checked for its end, because this process has set PIL.ImageFile.LOAD_TRUNCATED_IMAGES, which "
            'acts in one process only. To accept truncated images, pass Image(…, truncated="accept"); else leave it '
            "False."
        )
    try:
        image.load()
    except (OSError, SyntaxError):  # Pillow's own switch to accept it belongs to the process
        if rules.truncated == "refuse":
            raise
        if image.format in _JPEGS:
            image = _open(bytes(encoded) + _JPEG_END, rules)
        elif getattr(image, "_im", None) is not None:
            image.tile = []  # type: ignore[attr-defined]  # it is decoded as far as it goes
        image.load()
    return image


def _open(encoded: bytes | memoryview, rules: Rules) -> PIL.Image.Image:
    """Opens an image without decoding its pixels; raises the errors of `decode_parts`."""
    max_pixels = rules.max_pixels
    data, info = _split_png(memoryview(encoded)) if bytes(encoded[: len(_PNG)]) == _PNG else (encoded, {})
    try:
        image = PIL.Image.open(io.BytesIO(data), formats=None if rules.plugins else _own_formats())
    except PIL.Image.DecompressionBombError as error:
        allowed = 2 * (PIL.Image.MAX_IMAGE_PIXELS or 0)
        if max_pixels is not None and max_pixels <= allowed:
            raise _too_many(str(error).rstrip("."), max_pixels) from None
        raise ConfigError(
            f"is not opened: {str(error).rstrip('.')}. PIL.Image.MAX_IMAGE_PIXELS of this process allows {allowed}, "
            f"Image(…, max_pixels={max_pixels}) more. Raise PIL.Image.MAX_IMAGE_PIXELS, or set it to None."
        ) from None
    except PIL.UnidentifiedImageError:
        if rules.plugins:
            raise
        PIL.Image.open(io.BytesIO(data))
        raise PIL.UnidentifiedImageError(
            "only a plug-in of Pillow opens this image, and a plug-in is registered in one process only. Name what "
            "registers it, so that each process that decodes does: Image(…, setup=function)"
        ) from None
    _check_pixels(*image.size, max_pixels)
    image.info.update(info)
    return image


def _own_formats() -> list[str]:
    """Returns the formats that Pillow itself opens, in its order."""
    PIL.Image.init()
    return [name for name in PIL.Image.ID if PIL.Image.OPEN[name][0].__module__.startswith("PIL.")]


def _split_png(data: memoryview) -> tuple[bytes | memoryview, dict[str, Any]]:
    """Returns a PNG without its metadata, which could make Pillow refuse it; and the metadata by which it is turned,
    named as in `PIL.Image.Image.info`.
    """
    kept, info, at = [data[: len(_PNG)]], dict[str, Any](), len(_PNG)
    while at + 12 <= len(data):
        end, kind = at + 12 + int.from_bytes(data[at : at + 4], "big"), bytes(data[at + 4 : at + 8])
        if end > len(data) or not kind.isalpha():
            break
        if kind[:1].isupper() or kind in _PIXEL_CHUNKS:
            kept.append(data[at:end])
        elif kind == b"eXIf":
            info["exif"] = b"Exif\0\0" + bytes(data[at + 8 : end - 4])
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            info |= _turning_text(kind, bytes(data[at + 8 : end - 4]))
        at = end
    return b"".join([*kept, data[at:]]), info


def _turning_text(kind: bytes, chunk: bytes) -> dict[str, str]:
    """Returns the text of a chunk by its name, if Pillow turns a PNG by it; raw if it cannot be read."""
    key, _, text = chunk.partition(b"\0")
    name = key.decode("latin-1")
    if name not in _TURNING_TEXTS:
        return {}
    is_packed = kind == b"zTXt" or (kind == b"iTXt" and text[:1] == b"\1")
    if kind == b"iTXt":
        text = text[2:].partition(b"\0")[2].partition(b"\0")[2]
    with contextlib.suppress(zlib.error):
        text = zlib.decompressobj().decompress(text[kind == b"zTXt" :], _TEXT_BYTES) if is_packed else text
    return {name: text.decode("latin-1")}


def _check_pixels(width: int, height: int, max_pixels: int | None) -> None:
    if max_pixels is not None and width * height > max_pixels:
        raise _too_many(f"{width}x{height} is {width * height} pixels", max_pixels)


def _too_many(what: str, max_pixels: int | None) -> Exception:
    return PIL.Image.DecompressionBombError(
        f"{what}: more than max_pixels={max_pixels} allows, so none were decoded. If such images are wanted, pass "
        "Image(…, max_pixels=…) with a larger number, or None for no limit"
    )


def _rgb(image: PIL.Image.Image) -> Pixels:
    """Returns loaded pixels, uint8 (H, W, 3), or (H, W, 4) with padding, perhaps read-only: as stored, but a TIFF as
    displayed.
    """
    high, wide = image.height, image.width
    if image.mode in ("I", "F") and image.format != "PPM":  # Pillow gives the 16 bits of PPM as 32 bits
        deep = np.asarray(image)
        black, scale = _scale_of_32_bits(deep)
        return _in_strips(high, wide, lambda rows: _grey_of_32_bits(deep[rows], black, scale)[..., None])
    if image.mode.startswith("I"):  # 16-bit grey: convert() would clip it to white
        deep = np.asarray(image)
        return _in_strips(high, wide, lambda rows: np.minimum(deep[rows].astype(np.uint32) >> 8, 255)[..., None])
    if high * wide <= _BLOCK_PIXELS:
        with contextlib.suppress(ValueError):  # Arrow cannot import an image in several blocks
            packed = pa.array(image if image.mode == "RGB" else image.convert("RGB"))
            return np.asarray(packed.values.to_numpy(zero_copy_only=True).reshape(high, wide, 4))
    return _in_strips(high, wide, lambda rows: np.asarray(image.crop((0, rows.start, wide, rows.stop)).convert("RGB")))


def _strips(high: int, wide: int) -> Iterator[slice]:
    rows = max(1, _STRIP_PIXELS // max(1, wide))
    return (slice(top, min(top + rows, high)) for top in range(0, high, rows))


def _in_strips(high: int, wide: int, strip: Callable[[slice], Pixels]) -> Pixels:
    """Fills (high, wide, 3) in strips: a large image in several forms at once would take several times its memory."""
    out = np.empty((high, wide, 3), dtype=np.uint8)
    for rows in _strips(high, wide):
        out[rows] = strip(rows)
    return out


def _white(image: Any) -> int:
    """Returns the number that the format of a grey image, not loaded yet, has for white, before Pillow scales it."""
    if image.mode != "L" or not getattr(image, "tile", None):
        return 255
    codec, *_, arguments = image.tile[0]
    if codec in ("ppm", "ppm_plain"):
        return int(arguments[-1])
    raw = arguments if isinstance(arguments, str) else str(arguments[0]) if arguments else ""
    few = re.match("L;([124])", raw)
    return 255 if few is None else (1 << int(few[1])) - 1


def _shifted_bits(encoded: bytes) -> int:
    """Returns by how many bits Pillow shifts the grey of a JPEG 2000 image, which may have fewer than 8 bits."""
    at = encoded.find(_JPEG2000_SIZE)
    bits = 1 + (encoded[at + _JPEG2000_BITS] & 0x7F) if 0 <= at < len(encoded) - _JPEG2000_BITS else 8
    return max(0, 8 - bits)


def shown_size(encoded: bytes | memoryview, rules: Rules) -> tuple[int, int, int]:
    """Returns an image's displayed width and height, and its orientation, 1 to 8, without decoding its pixels. Raises
    DecompressionBombError as `PixelDecoder.decode_parts`.
    """
    data = memoryview(encoded).cast("B")
    if (size := jpeg_size(data)) is not None and not _may_be_turned(data):
        _check_pixels(size[1], size[0], rules.max_pixels)
        return size[1], size[0], 1
    image: Any = _open(encoded, rules)
    orientation = _orientation(image) or 1
    # Pillow gives the displayed size of a TIFF with the tag, but the stored size of a TIFF that XMP turns.
    is_displayed = image.format == _TIFF and image.tag_v2.get(_ORIENTATION) == orientation
    is_stored_turned = orientation > 4 and not is_displayed
    return (*((image.height, image.width) if is_stored_turned else image.size), orientation)


def _scale_of_32_bits(grey: npt.NDArray[Any]) -> tuple[float, float]:
    """Returns the value of black and the scale of int32 or float32 (H, W), as `Image` documents."""
    parts = (grey[rows][np.isfinite(grey[rows])] for rows in _strips(*grey.shape))
    ends = [(float(part.min()), float(part.max())) for part in parts if part.size] or [(0.0, 0.0)]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    black, white = 0.0, next((white for white in (1.0, 255.0, 65535.0) if high <= white), high)
    if low < 0 or high > 65535:
        black, white = low, high
    elif grey.dtype.kind != "f":
        white = max(white, 255.0)
    scale = (
        1 / 256 if (black, white) == (0.0, 65535.0) else 255 / (white - black) if white > black else 0.0
    )  # the upper 8 of 16 bits
    return black, scale


def _grey_of_32_bits(grey: npt.NDArray[Any], black: float, scale: float) -> Pixels:
    scaled = (np.where(np.isfinite(grey), grey, black).astype(np.float64) - black) * scale
    return np.asarray(scaled.astype(np.uint8))


def resize_into(pixels: Pixels, out: Pixels, *, bicubic: bool = False) -> None:
    """Resizes uint8 (h, w, 3 or 4) into (height, width, 3), or one channel into one, bilinear or bicubic, and
    antialiased.
    """
    import torch  # imported here, because a shard actor that only reads starts a second faster without it

    direct = pixels.shape[2] == out.shape[2] and out.flags.c_contiguous and out.flags.writeable
    made = out if direct else np.empty((*out.shape[:2], pixels.shape[2]), dtype=np.uint8)
    # What `interpolate` calls, which itself cannot write into given memory.
    kernels: Any = torch._C._nn  # noqa: SLF001
    resize = kernels._upsample_bicubic2d_aa if bicubic else kernels._upsample_bilinear2d_aa  # noqa: SLF001
    resize(_channels_first(np.ascontiguousarray(pixels)), out.shape[:2], False, None, out=_channels_first(made))
    if not direct:
        copy_pixels(made, out)


def _channels_first(pixels: Pixels) -> "torch.Tensor":
    """Returns contiguous pixels (h, w, c) as a tensor (1, c, h, w) of the same memory."""
    import torch.utils.dlpack

    # An axis of one pixel may have any stride, even a negative one, by which torch would leave the memory. NumPy turns
    # axes in a fifth of torch's time.
    turned = pixels.reshape(-1).reshape(pixels.shape).transpose(2, 0, 1)[None]
    # DLPack takes read-only memory, which from_numpy would warn of.
    return torch.from_numpy(turned) if pixels.flags.writeable else torch.utils.dlpack.from_dlpack(turned)


def pick_into(pixels: Pixels, out: Pixels) -> None:
    """Resizes without mixing pixels: each output pixel is the source pixel whose centre is nearest."""
    rows, columns = ((2 * np.arange(o) + 1) * i // (2 * o) for o, i in zip(out.shape[:2], pixels.shape, strict=False))
    out[:] = pixels[rows[:, None], columns[None, :], : out.shape[2]]


def copy_pixels(pixels: Pixels, out: Pixels) -> None:
    """Copies uint8 (h, w, 3 or 4) to (h, w, 3), or one channel to one."""
    if pixels.strides[1:] == out.strides[1:]:
        out[:] = pixels
    else:  # three strided copies, one for each channel, are several times faster than one copy of all channels
        for channel in range(out.shape[2]):
            out[:, :, channel] = pixels[:, :, channel]
