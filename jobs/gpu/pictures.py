"""Pictures that are hard to decode alike on two devices, made on the spot."""

import io
from typing import Any

import numpy as np
from PIL import Image

_LONGEST = 700  # pixels of a side
_ORIENTATION = 0x0112  # the EXIF tag
_SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")


def odd_picture(seed: int, number: int) -> tuple[bytes, bool]:
    """One picture, of (seed, number) alone, and whether it is damaged: mostly JPEGs of all kinds, and other formats."""
    rng = np.random.default_rng((seed, number))
    width, height = (int(2 ** rng.uniform(0, np.log2(_LONGEST))) for _ in range(2))
    image = _scene(rng, width, height)
    kind = rng.choice(["RGB", "L", "CMYK", "other", "damaged"], p=[0.6, 0.1, 0.05, 0.15, 0.1])
    if kind == "other":
        return _encoded(image, str(rng.choice(["PNG", "WEBP", "GIF", "BMP"]))), False
    if kind != "damaged":
        return _encoded(image.convert(str(kind)), "JPEG", **_options(rng, is_grey=kind == "L")), False
    content = bytearray(_encoded(image, "JPEG", **_options(rng, is_grey=False)))
    if rng.random() < 0.5:
        return bytes(content[: int(rng.integers(1, len(content)))]), True
    for place in rng.integers(0, len(content), 3):
        content[place] = rng.integers(256)
    return bytes(content), True


def _options(rng: np.random.Generator, *, is_grey: bool) -> dict[str, Any]:
    """How a JPEG is written."""
    options: dict[str, Any] = {"quality": int(rng.integers(1, 101)), "optimize": bool(rng.random() < 0.5)}
    if not is_grey:
        options["subsampling"] = str(rng.choice(_SUBSAMPLINGS))
    if rng.random() < 0.3:
        options["progressive"] = True
    if rng.random() < 0.2:
        options["restart_marker_blocks"] = int(rng.integers(1, 8))
    if rng.random() < 0.4:
        options["exif"] = Image.Exif()
        options["exif"][_ORIENTATION] = int(rng.integers(1, 9))
    return options


def _scene(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Smooth colours with an edge and some noise, as photographs have."""
    small = rng.integers(0, 256, (max(1, height // 16), max(1, width // 16), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    smooth[height // 3 :, width // 2 :] ^= 63
    return Image.fromarray((smooth + rng.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8))


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    image.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()
