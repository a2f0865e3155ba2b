"""Small encoded images and sounds that tests make their datasets of."""

import functools
import io
import struct
import wave
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pyarrow as pa
import simplejpeg

from raylance.decode.decoding import Decoding
from raylance.decode.images import Image
from raylance.decode.open_decoding import OpenDecoding
from raylance.observe import Receipt


def encode(image: np.ndarray | PIL.Image.Image, kind: str = "PNG", *, orientation: int = 0, **options: Any) -> bytes:
    if orientation:
        options["exif"] = PIL.Image.Exif()
        options["exif"][0x0112] = orientation
    picture = image if isinstance(image, PIL.Image.Image) else PIL.Image.fromarray(image)
    picture.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


def odd_images() -> list[bytes | None]:
    """One pixel, 16 bits, CMYK, an animation, and a picture that is large beside the others."""
    grey = PIL.Image.fromarray(np.arange(0, 60_000, 100, dtype=np.uint16).reshape(20, 30))
    frames = [PIL.Image.fromarray(np.full((9, 9), value, np.uint8)) for value in (30, 200)]
    one, large = (np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8) for size in ((1, 1), (600, 800)))
    return [
        encode(one),
        encode(grey),
        encode(PIL.Image.new("CMYK", (12, 10), (9, 80, 200, 3)), "JPEG"),
        encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        encode(large),
    ]


def wav(frames: np.ndarray) -> bytes:
    with wave.open(buffer := io.BytesIO(), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", "NONE"))
        file.writeframes(frames.astype("<i2").tobytes())
    return buffer.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    """The RGB pixels that Pillow makes of an image, as it is displayed."""
    return np.asarray(PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))).convert("RGB"))


def make_images(rows: int, seed: int = 0, size: tuple[int, int] = (24, 32)) -> list[bytes]:
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 255, (rows, 6, 8, 3), dtype=np.uint8)
    resized = (PIL.Image.fromarray(pixels).resize(size[::-1], PIL.Image.Resampling.BICUBIC) for pixels in small)
    return [encode(image, "JPEG", quality=90) for image in resized]


def decode(
    values: Sequence[bytes | None],
    image: Image,
    epoch: int = 0,
    offsets: Sequence[int] | None = None,
    executor: Executor | None = None,
    **settings: Any,
) -> tuple[np.ndarray, np.ndarray, Receipt]:
    """The pixels of rows as raylance decodes them, which of them are good, and what that took."""
    rows = {"image": pa.array(values, pa.binary()), "_rowoffset": offsets or range(len(values))}
    decoding = Decoding(**({"decoders": (image,), "seed": 7, "mask_bad_rows": False} | settings))
    decoded, receipt = OpenDecoding(decoding).apply(pa.table(rows), epoch, executor)
    return decoded["image"].combine_chunks().to_numpy_ndarray(), decoded["_valid"].to_numpy(), receipt


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """Smooth colours with edges and some noise, as photographs have."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    smooth = np.asarray(PIL.Image.fromarray(small).resize((width, height), PIL.Image.Resampling.BICUBIC)).astype(int)
    smooth[height // 3 :, width // 2 :] ^= 63
    return PIL.Image.fromarray((smooth + rng.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8))


jpeg = functools.partial(encode, kind="JPEG")


def inserted(data: bytes, before: bytes) -> bytes:
    return data[:2] + before + data[2:]


def exif_segment(orientation: int) -> bytes:
    content = encode(np.zeros((8, 8), np.uint8), "JPEG", orientation=orientation)
    begin = content.index(b"\xff\xe1")
    return content[begin : begin + 2 + int.from_bytes(content[begin + 2 : begin + 4], "big")]


def with_size(data: bytes, kind: str, width: int, height: int) -> bytes:
    """An encoded picture whose header says another size; PNG with a checksum that fits, WebP in lossless form."""
    little, big = struct.pack("<HH", width & 65535, height & 65535), struct.pack(">HH", height & 65535, width & 65535)
    if kind == "PNG":
        header = data[12:16] + struct.pack(">II", width, height) + data[24:29]
        return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    if kind == "BMP":
        return data[:18] + struct.pack("<ii", width, height) + data[26:]
    if kind == "GIF":
        return data[:6] + little + data[10:]
    if kind == "JPEG":
        at = next(at for at in range(len(data)) if data[at : at + 2] in (b"\xff\xc0", b"\xff\xc2")) + 5
        return data[:at] + big + data[at + 4 :]
    if kind == "WEBP":
        bits = (width - 1 & 0x3FFF) | (height - 1 & 0x3FFF) << 14
        return b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f" + struct.pack("<I", bits) + b"\0" * 9
    tags = struct.unpack("<HI", data[:2] + data[4:8])[1]  # TIFF of this byte order
    found = bytearray(data)
    for entry in range(tags + 2, tags + 2 + 12 * int.from_bytes(data[tags : tags + 2], "little"), 12):
        if (tag := int.from_bytes(data[entry : entry + 2], "little")) in (256, 257):
            found[entry + 2 : entry + 12] = struct.pack("<HII", 4, 1, width if tag == 256 else height)
    return bytes(found)


XMP = b'<x:xmpmeta tiff:Orientation="6"/>'
KINDS: dict[str, Callable[[PIL.Image.Image], bytes]] = {
    "4:4:4": lambda image: jpeg(image, subsampling="4:4:4"),
    "4:2:2": lambda image: jpeg(image, subsampling="4:2:2"),
    "4:2:0": lambda image: jpeg(image, subsampling="4:2:0"),
    "4:4:0": lambda image: simplejpeg.encode_jpeg(np.asarray(image), colorsubsampling="440"),
    "4:1:1": lambda image: simplejpeg.encode_jpeg(np.asarray(image), colorsubsampling="411"),
    "grey": lambda image: jpeg(image.convert("L")),
    "colours as they are": lambda image: jpeg(image, keep_rgb=True),
    "progressive": lambda image: jpeg(image, progressive=True),
    "progressive 4:4:4": lambda image: jpeg(image, progressive=True, subsampling="4:4:4", quality=95),
    "restart markers": lambda image: jpeg(image, restart_marker_rows=1),
    "restart markers of blocks": lambda image: jpeg(image, restart_marker_blocks=3, optimize=True),
    "best": lambda image: jpeg(image, quality=100),
    "worst": lambda image: jpeg(image, quality=1),
    "trailing bytes": lambda image: jpeg(image) + b"\xff\xd8 and more \0" * 7,
    "a thumbnail after it": lambda image: jpeg(image) + jpeg(image.resize((8, 8))),
    **{f"EXIF {number}": lambda image, number=number: jpeg(image, orientation=number) for number in range(1, 10)},
    "EXIF after a segment": lambda image: inserted(jpeg(image, orientation=6), b"\xff\xe2\0\x0aICC\xff\xda\xff\xda\0"),
    "EXIF after a fill byte": lambda image: inserted(jpeg(image, orientation=6), b"\xff"),
    "two orientations": lambda image: inserted(jpeg(image, orientation=3), exif_segment(6)),
    "two orientations, one of a quarter": lambda image: inserted(jpeg(image, orientation=6), exif_segment(3)),
    "an orientation as a long integer": lambda image: jpeg(image, orientation=6).replace(
        b"\x01\x12\0\x03\0\0\0\x01\0\x06\0\0", b"\x01\x12\0\x04\0\0\0\x01\0\0\0\x06"
    ),
    "EXIF beside XMP": lambda image: jpeg(image, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0", xmp=XMP),
    "a thumbnail in a segment": lambda image: inserted(jpeg(image), b"\xff\xe5\0\x0aExif\0\0\xff\xda"),
    "Exif as a comment": lambda image: jpeg(image, comment=b"Exif\0\0 is not there"),
}
TO_PILLOW: dict[str, Callable[[PIL.Image.Image], bytes]] = {
    "CMYK": lambda image: jpeg(image.convert("CMYK")),
    "damage that is decoded around": lambda image: jpeg(image)[:-300] + b"\xff\xd9",
}


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunks(data: bytes, *chunks: bytes, before_pixels: bool = True) -> bytes:
    """A PNG with chunks after its header, or before its end."""
    at = 33 if before_pixels else len(data) - 12
    return data[:at] + b"".join(chunks) + data[at:]


def packed(numbers: np.ndarray, bits: int) -> list[bytes]:
    return [
        np.packbits(np.unpackbits(row[:, None].astype(np.uint8), axis=1)[:, 8 - bits :].reshape(-1)).tobytes()
        for row in numbers
    ]


def grey_of(numbers: np.ndarray, kind: str, bits: int, maxval: int = 255) -> bytes:
    """A grey image of numbers (h, w) that has fewer than 8 bits a pixel, or a smaller maxval."""
    (high, wide), rows = numbers.shape, packed(numbers, bits)
    if kind == "PNG":
        header = struct.pack(">IIBBBBB", wide, high, bits, 0, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
        chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)
    if kind == "BMP":
        pixels = b"".join(row + b"\0" * (-len(row) % 4) for row in rows[::-1])
        header = struct.pack("<IiiHHIIiiII", 40, wide, high, 1, bits, 0, len(pixels), 0, 0, 2, 0)
        return b"BM" + struct.pack("<IHHI", 62 + len(pixels), 0, 0, 62) + header + b"\0\0\0\0\xff\xff\xff\0" + pixels
    if kind == "PGM":
        return f"P5\n{wide} {high}\n{maxval}\n".encode() + numbers.astype(np.uint8).tobytes()
    if kind == "plain PGM":
        return f"P2\n{wide} {high}\n{maxval}\n{' '.join(map(str, numbers.reshape(-1).tolist()))}\n".encode()
    if kind == "JPEG2000":  # coefficients around the middle of 8 bits, in a code that says that there are fewer bits
        middle = numbers + (1 << 7) - (1 << (bits - 1))
        data = bytearray(encode(PIL.Image.fromarray(middle.astype(np.uint8)), kind, irreversible=False))
        data[data.index(b"\xff\x4f\xff\x51") + 42] = bits - 1
        return bytes(data)
    pixels = b"".join(rows) + b"\0" * (sum(map(len, rows)) % 2)
    tags = [(256, wide), (257, high), (258, bits), (259, 1), (262, 1), (273, 8), (278, high), (279, len(pixels))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + struct.pack("<H", len(tags)) + entries + bytes(4)


def register_backwards() -> None:
    """Registers a format with Pillow, as a plug-in does: a PNG from its end to its beginning."""
    PIL.Image.register_open(
        "BACKWARDS",
        lambda file, name: PIL.Image.open(io.BytesIO(file.read()[::-1])),  # type: ignore[arg-type, return-value]
        lambda prefix: prefix.startswith(struct.pack(">I", 0xAE426082)[::-1]),
    )
