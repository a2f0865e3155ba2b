"""Small videos, and their frames by a decoder that knows nothing of raylance."""

import contextlib
import io
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import av
import lance
import numpy as np
import pyarrow as pa
import torch


def scene(seed: int, frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    """A noisy picture that moves, with a square that goes its own way: uint8 (frames, height, width, 3)."""
    rng = np.random.default_rng(seed)
    back = np.kron(rng.integers(0, 255, (height // 8, width // 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    made = np.stack([np.roll(back, (at % height, 2 * at % width), (0, 1)) for at in range(frames)])
    for at in range(frames):
        left = 3 * at % (width - 8)
        made[at, 8:16, left : left + 8] = at % 255, 20, 200
    return made


def encode(
    frames: np.ndarray,
    *,
    gop: int = 12,
    rate: int = 10,
    times: Sequence[int] = (),
    format: str = "mp4",
    ticks: int = 0,
    sound: bool = False,
    codec: str = "libx264",
    **options: object,
) -> bytes:
    """Encodes frames in a file, as H.264 if no other codec is named. `times` are when they are shown, in steps of the
    rate: else 0, 1, … With `ticks`, times are rounded to so many a second. With `sound`, there is some between frames.
    """
    out = io.BytesIO()
    with av.open(out, "w", format=format) as box:
        settings = {"g": str(gop), "keyint_min": str(gop), "sc_threshold": "0"} | {
            k: str(v) for k, v in options.items()
        }
        stream = box.add_stream(codec, rate=rate, options=settings)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if ticks:
            stream.time_base = stream.codec_context.time_base = Fraction(1, ticks)
        tones = box.add_stream("aac", rate=48000, layout="mono") if sound else None
        for at, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[at], Fraction(1, rate)
            if ticks:
                frame.pts, frame.time_base = round(at * ticks / rate), Fraction(1, ticks)
            box.mux(stream.encode(frame))
            if tones is not None:
                noise = np.random.default_rng(at).uniform(-1, 1, (1, 48000 // rate)).astype(np.float32)
                played = av.AudioFrame.from_ndarray(noise, format="fltp", layout="mono")
                played.sample_rate, played.pts = 48000, at * (48000 // rate)
                box.mux(tones.encode(played))
        box.mux(stream.encode())
        if tones is not None:
            box.mux(tones.encode())
    return out.getvalue()


def whole(video: bytes, size: tuple[int, int] | None = None) -> np.ndarray:
    """All frames of a video, decoded from its begin up to the first error: uint8 (frames, height, width, 3)."""
    found = []
    with av.open(io.BytesIO(video)) as box, contextlib.suppress(av.error.InvalidDataError):
        for frame in box.decode(video=0):
            height, width = size or (frame.height, frame.width)
            found.append(frame.to_ndarray(format="rgb24", width=width, height=height))
    return np.stack(found)


def damaged(video: bytes, at: int) -> bytes:
    """The file with a few zeros in the middle of the frame that is stored as number `at`."""
    with av.open(io.BytesIO(video)) as box:
        entry = list(box.streams.video[0].index_entries)[at]
        begin, size = entry.pos + entry.size // 3, max(1, min(16, entry.size // 3))
    return video[:begin] + bytes(size) + video[begin + size :]


def flagged(video: bytes) -> bool:
    """Whether a decoder says of any frame that it is damaged."""
    with av.open(io.BytesIO(video)) as box:
        return any(frame.is_corrupt for frame in box.decode(video=0))


def change_box(data: bytes, path: Sequence[bytes], change: Callable[[bytes], bytes]) -> bytes:
    """The MP4, or the content of one of its boxes, with a changed content of the first box of each kind in `path`,
    which lie one inside another. No frames may lie after it.
    """
    at, (kind, *inside) = 0, path
    while data[at + 4 : at + 8] != kind:
        at += int.from_bytes(data[at : at + 4], "big")
    end = at + int.from_bytes(data[at : at + 4], "big")
    content = change_box(data[at + 8 : end], inside, change) if inside else change(data[at + 8 : end])
    return data[:at] + (8 + len(content)).to_bytes(4, "big") + kind + content + data[end:]


def pixels_of(values: Any) -> np.ndarray:
    """Pictures of a batch with their channels last, as they are outside of torch."""
    return values.movedim(-3, -1).numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def write_videos(uri: str, videos: Sequence[bytes], version: str = "2.1") -> str:
    """Writes a dataset of one video in each row, by a version of the file format: from 2.2 on, blobs have a type."""
    field = pa.field("video_bytes", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    blobs: pa.Array = pa.array(videos, pa.large_binary())
    if version >= "2.2":
        field, blobs = lance.blob_field("video_bytes"), lance.blob_array(videos)
    schema = pa.schema([field, pa.field("name", pa.string())])
    table = pa.table([blobs, [f"{at}.mp4" for at in range(len(videos))]], schema=schema)
    lance.write_dataset(table, uri, schema=schema, data_storage_version=version)
    return uri
