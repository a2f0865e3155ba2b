"""The images that a copy has smaller or encoded again."""

from __future__ import annotations

import dataclasses
import functools
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL
import PIL.Image
import pyarrow as pa

import raylance

QUALITY = 90  # of JPEGs, where the command line says none
ORIENTATION, TURNED = 0x0112, 5  # EXIF: from 5 up, width and height change places


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reencode:
    """How encoded images are changed.

    Pixels are those that `raylance.Image` makes of them, at the new size: EXIF rotation is done, and alpha is dropped.
    """

    column: str
    shorter_side: int | None = None  # pixels that it has at the most; None leaves sizes as they are
    quality: int | None = None  # of every JPEG; None leaves an image that is small enough as it is, byte for byte
    keep_bad: bool = False  # whether an image that cannot be decoded is kept as it is; else it is an error

    def describe(self) -> dict[str, Any]:
        """Its entry in the provenance."""
        return {
            "image_column": self.column,
            "shorter_side": self.shorter_side,
            "jpeg_quality": self.quality,
            "keep_bad": self.keep_bad,
            "pillow": PIL.__version__,
        }

    def apply(self, table: pa.Table, error_of: Callable[[int, Exception], Exception]) -> pa.Table:
        """Encodes the images of a table; `error_of` makes the error for a row that cannot be decoded."""
        made: list[bytes | None] = []
        for row, value in enumerate(table[self.column].to_pylist()):
            try:
                made.append(None if value is None else self.encode(value))
            except ImportError:  # no fault of the image
                raise
            except Exception as error:  # whatever a codec raises on damaged bytes
                if not self.keep_bad:
                    raise error_of(row, error) from None  # else the job's message would be the codec's: it names no row
                made.append(value)
        place = table.schema.get_field_index(self.column)
        field = table.schema.field(place)
        return table.set_column(place, field, pa.array(made, field.type))

    def encode(self, encoded: bytes) -> bytes:
        """One image, smaller or encoded again, or as it is."""
        with PIL.Image.open(io.BytesIO(encoded)) as header:
            width, height = header.size
            if header.getexif().get(ORIENTATION, 1) >= TURNED:
                width, height = height, width
            is_grey = header.mode in ("1", "L")
        scale = min(1.0, (self.shorter_side or width) / min(width, height))
        if scale == 1.0 and self.quality is None:
            return encoded
        if scale < 1.0:
            load_torch()
        size = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = np.empty((*size, 3), np.uint8)
        image = raylance.Image(self.column, size=size)
        image.decode_into(encoded, np.zeros(image.draws), pixels)  # without augmentation, draws are not looked at
        made = PIL.Image.fromarray(pixels[:, :, 0] if is_grey else pixels)
        made.save(buffer := io.BytesIO(), "JPEG", quality=self.quality or QUALITY)
        return buffer.getvalue()


def why_no_image(encoded: bytes, *, whole: bool) -> str:
    """What Pillow says of the header of an image, or of all of it; "" where it finds no fault."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, and of what is odd and can be decoded
            with PIL.Image.open(io.BytesIO(encoded)) as opened:
                if whole:
                    opened.load()
    except Exception as error:  # whatever a codec raises on damaged bytes
        return "empty" if not encoded else f"{type(error).__name__}: {error}".partition(" <")[0]
    return ""


@functools.cache
def load_torch() -> None:
    """Loads what resizes, in a thread of its own: where a task fails, Ray interrupts the others, in their main threads.

    A process in which torch was loaded by half can never load it again, and Ray gives it the next task.
    """

    def load() -> None:
        import torch.utils.dlpack  # noqa: F401

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
