"""The decoding that readers share, and how a batch is touched."""

import functools
import io
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

import raylance

from .data import SIDE

Batch = tuple[Any, Any]  # (N, …) tensor, or the sum of its touched part; (N,) row numbers
DecodeOne = Callable[[bytes], np.ndarray]
DecodeInto = Callable[[bytes, np.ndarray], None]


def decode_one(data: bytes) -> np.ndarray:
    """One file → uint8 (224, 224, 3), with Pillow alone."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


_BLACK = np.zeros((SIDE, SIDE, 3), np.uint8)


def decode_nothing(_: bytes) -> np.ndarray:
    """uint8 (224, 224, 3) that costs nothing: the data path alone is left."""
    return _BLACK


def pillow_into(data: bytes, out: np.ndarray) -> None:
    """The common decode function, into given memory."""
    out[:] = decode_one(data)


def own_into(data: bytes, out: np.ndarray) -> None:
    """The decoder of raylance, into given memory; the draws are for augmentation, of which there is none."""
    own_rows().decode_into(data, np.zeros(41), out)


@functools.cache
def own_rows() -> Any:
    """What decodes rows in this process: it keeps its memory, as in a decode actor."""
    return own_image().open()


@functools.cache
def own_image(decode_fn: DecodeOne | None = None) -> raylance.Image:
    """How raylance decodes."""
    return raylance.Image("image", size=(SIDE, SIDE), decode_fn=decode_fn)


def decode_all(files: Iterable[bytes]) -> np.ndarray:
    """Files → uint8 (N, 224, 224, 3)."""
    return np.stack([decode_one(data) for data in files])


def decode_arrow(batch: pa.RecordBatch, **_: Any) -> Batch:
    """A record batch → pixels and labels."""
    return torch.from_numpy(decode_all(batch["image"].to_pylist())), torch.tensor(batch["label"].to_numpy())


def decode_rows(rows: list[dict[str, Any]]) -> Batch:
    """SafeLanceDataset's row dictionaries → pixels and labels."""
    pixels = torch.from_numpy(decode_all(row["image"] for row in rows))
    return pixels, torch.tensor([row["label"] for row in rows])


def touch(data: torch.Tensor) -> int:
    """Sums each 16th value along each axis but the first: all cache lines of a vector, 196 of an image."""
    part = data[(slice(None), *[slice(None, None, 16)] * (data.ndim - 1))].contiguous()
    return int((part.view(torch.int32) if part.is_floating_point() else part).sum())  # exact in any order
