"""Decodes pictures of depth: one channel of 16 bits or of floats."""

import dataclasses
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from raylance.decode.decoder import Decoder, Draws
from raylance.decode.pixels import decode_depth
from raylance.errors import ConfigError

Unit = Literal["m", "mm"]
_MM = np.float32(1000)


@dataclasses.dataclass(frozen=True, slots=True)
class DepthImage(Decoder):
    """Decodes a column of PNGs or TIFFs of one channel, of 16 bits or of floats, to float32 (n, H, W, 1); torch batches
    have (n, 1, H, W). Values are not resized.

    Attributes:
        column: Name of the column.
        stored: The unit of the stored values; None if unknown, so that they stay as they are.
        unit: The unit in batches.
        size: Height and width, those of a stored picture; set when the dataset is opened.
    """

    stored: Unit | None
    unit: Unit
    size: tuple[int, int] = dataclasses.field(default=(0, 0), init=False, repr=False)

    dtype = np.dtype(np.float32)
    channels_last = True
    content = "pictures of depth"

    @property
    def shape(self) -> tuple[int, ...]:
        """Height, width and 1."""
        return (*self.size, 1)

    def resolve(self, encoded: memoryview) -> Self:
        """See `Decoder.resolve`."""
        height, width = decode_depth(encoded).shape
        return self._found(size=(height, width))

    def open(self) -> Self:
        """See `Decoder.open`."""
        return self

    def decode_into(self, encoded: memoryview, draws: Draws, out: npt.NDArray[Any]) -> None:
        """See `RowDecoder.decode_into`."""
        depth = decode_depth(encoded)
        if depth.shape != self.size:
            raise ConfigError(f"is a picture of {depth.shape} pixels, and others are {self.size}. Convert it to that.")
        if self.stored in (None, self.unit):
            out[..., 0] = depth
        else:
            (np.multiply if self.unit == "mm" else np.divide)(depth, _MM, out=out[..., 0])
