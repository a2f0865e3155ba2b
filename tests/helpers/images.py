"""Owns small encoded images that tests make their datasets of."""

import io
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pyarrow as pa

from raylance.decode.images import Image
from raylance.decode.rows import Decoding
from raylance.observe import Receipt


def encode(image: np.ndarray | PIL.Image.Image, kind: str = "PNG", *, orientation: int = 0, **options: Any) -> bytes:
    """Encodes pixels or a picture; with an EXIF orientation, unless that is 0."""
    if orientation:
        options["exif"] = PIL.Image.Exif()
        options["exif"][0x0112] = orientation
    picture = image if isinstance(image, PIL.Image.Image) else PIL.Image.fromarray(image)
    picture.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    """The RGB pixels that Pillow makes of an image, as it is displayed."""
    return np.asarray(PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))).convert("RGB"))


def make_images(rows: int, seed: int = 0, size: tuple[int, int] = (24, 32)) -> list[bytes]:
    """Smooth random JPEGs, each different."""
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
    decoded, receipt = decoding.open().apply(pa.table(rows), epoch, executor)
    return decoded["image"].combine_chunks().to_numpy_ndarray(), decoded["_valid"].to_numpy(), receipt
