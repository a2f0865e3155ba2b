"""Owns the images that a copy has smaller or encoded again; never reads storage, and knows nothing of orders."""

from __future__ import annotations

import dataclasses
import functools
import io
import threading
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

    def apply(self, table: pa.Table, offsets: np.ndarray) -> pa.Table:
        """Encodes the images of a table; `offsets`, int64 (rows,), name a bad one."""
        made = [
            None if value is None else self._one(value, int(offset))
            for value, offset in zip(table[self.column].to_pylist(), offsets, strict=True)
        ]
        place = table.schema.get_field_index(self.column)
        field = table.schema.field(place)
        return table.set_column(place, field, pa.array(made, field.type))

    def _one(self, encoded: bytes, offset: int) -> bytes:
        try:
            return self.encode(encoded)
        except ImportError:  # no fault of the image
            raise
        except Exception as error:  # whatever a codec raises on damaged bytes
            if self.keep_bad:
                return encoded
            raise raylance.DatasetError(
                f"column {self.column} of row offset {offset} cannot be decoded ({error}). Nothing was committed. "
                "Repair the row, leave it out by --filter, or keep such bytes as they are by --on-bad-image keep."
            ) from error

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
