"""The datasets that are read, each made once and kept."""

import functools
import io
import itertools
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw

WIDTH, HEIGHT, SIDE, DIMENSION, FRAGMENTS = 512, 384, 224, 768, 8
SLOPE, DEVIATIONS, QUALITY = 1.3, ((28.0,), (6.0,), (4.0,)), 88  # of the spectra; a file is then about 42 kB
OPPONENT = np.array([[1, 1, 1], [1, 0, -1], [0.5, -1, 0.5]])  # luminance, red-blue, green-magenta → RGB


@functools.cache
def textures(seed: int) -> list[Image.Image]:
    """Noise whose amplitude falls with frequency as in photographs, in decorrelated colours."""
    height, width = 2 * HEIGHT, 2 * WIDTH
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf  # no constant part
    made = []
    for number in range(16):
        real, imaginary = np.random.default_rng((seed, 0, number)).standard_normal((2, 3, *frequency.shape))
        planes = np.fft.irfft2((real + 1j * imaginary) / frequency**SLOPE, (height, width)).reshape(3, -1)
        planes *= np.array(DEVIATIONS) / planes.std(axis=1, keepdims=True)
        pixels = (128 + planes.T @ OPPONENT).clip(0, 255).astype(np.uint8)
        made.append(Image.fromarray(pixels.reshape(height, width, 3)))
    return made


def random_cut(rng: np.random.Generator, seed: int) -> Image.Image:
    """A piece of a texture with a place, flip, contrast and tint of its own."""
    texture = textures(seed)[rng.integers(16)]
    x, y = rng.integers(texture.width - WIDTH), rng.integers(texture.height - HEIGHT)
    piece = texture.crop((x, y, x + WIDTH, y + HEIGHT))
    if rng.random() < 0.5:
        piece = piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    curve = (np.arange(256) - 128) * rng.uniform(0.5, 1.3) + 128 + rng.uniform(-40, 40, (3, 1))
    return piece.point(curve.clip(0, 255).astype(int).ravel().tolist())


def photograph(seed: int, number: int, quality: int = QUALITY) -> bytes:
    """One JPEG, of its arguments alone, in any process: pieces of texture with edges between them."""
    rng = np.random.default_rng((seed, 1, number))
    image = random_cut(rng, seed)
    for _ in range(rng.integers(2, 5)):
        mask = Image.new("L", (WIDTH // 2, HEIGHT // 2))
        (x, y), (rx, ry) = rng.integers(0, mask.size), rng.integers(16, 96, 2)
        ImageDraw.Draw(mask).ellipse((x - rx, y - ry, x + rx, y + ry), fill=255)
        image.paste(random_cut(rng, seed), mask=mask.resize(image.size, Image.Resampling.BICUBIC))
    image.save(encoded := io.BytesIO(), "JPEG", quality=quality)
    return encoded.getvalue()


def image_batches(rows: int, seed: int, workers: int, quality: int = QUALITY) -> Iterator[pa.RecordBatch]:
    """All photographs, made in parallel."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        files = pool.map(photograph, itertools.repeat(seed), range(rows), itertools.repeat(quality), chunksize=64)
        for start in range(0, rows, 512):
            part = pa.array(itertools.islice(files, 512), pa.binary())
            yield pa.record_batch({"image": part, "label": np.arange(start, start + len(part))})


def vector_batches(rows: int, seed: int) -> Iterator[pa.RecordBatch]:
    """All vectors, standard normal."""
    rng = np.random.default_rng(seed)
    for start in range(0, rows, 8192):
        ids = np.arange(start, min(start + 8192, rows))
        values = rng.standard_normal(len(ids) * DIMENSION, np.float32)
        yield pa.record_batch({"vector": pa.FixedSizeListArray.from_arrays(values, DIMENSION), "id": ids})


def cached_dataset(path: Path, rows: int, batches: Iterator[pa.RecordBatch]) -> str:
    """The URI of the dataset at `path`; written beside it and renamed, so half a one is never found."""
    if not path.exists():
        print(f"making {path}", file=sys.stderr)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            first = next(batches)
            reader = pa.RecordBatchReader.from_batches(first.schema, itertools.chain([first], batches))
            lance.write_dataset(reader, str(part), max_rows_per_file=-(-rows // FRAGMENTS))
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return str(path)
