"""Owns small encoded images that tests make their datasets of."""

import io

import numpy as np
import PIL.Image


def encode(pixels: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    """Encodes uint8 pixels."""
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def make_images(rows: int, seed: int = 0, size: tuple[int, int] = (24, 32)) -> list[bytes]:
    """Smooth random JPEGs, each different."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 255, (rows, 6, 8, 3), dtype=np.uint8)
    resized = (PIL.Image.fromarray(pixels).resize(size[::-1], PIL.Image.Resampling.BICUBIC) for pixels in small)
    return [encode(np.asarray(image), "JPEG", quality=90) for image in resized]
