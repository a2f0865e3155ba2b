"""A small dataset of robots in LeRobot's Lance layout, and its items by plain loops over whole files."""

import dataclasses
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import lance
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.helpers.images import encode as encode_image
from tests.helpers.videos import encode, scene, whole

FPS = 10
CAMERAS = {"observation.images.top": (32, 48), "observation.images.wrist": (16, 24)}
TASKS = ["push the block", "open the drawer", "open the drawer slowly"]
FEATURES: dict[str, tuple[str, list[int]]] = {
    "observation.state": ("float32", [3]),
    "observation.grid": ("float32", [2, 3]),
    "action": ("float32", [2]),
    "next.done": ("bool", [1]),
    "timestamp": ("float32", [1]),
    "frame_index": ("int64", [1]),
    "episode_index": ("int64", [1]),
    "index": ("int64", [1]),
    "task_index": ("int64", [1]),
}


@dataclasses.dataclass(kw_only=True)
class Robots:
    """What is written; tests change it before `write`.

    Attributes:
        lengths: Frames of each episode.
        files: Number of each episode's video file, by camera.
        info, episodes, stats: Contents of `meta/`.
        frames: Rows.
        videos: The MP4s by camera and number.
        pixels: For each camera, the frame of each row, by decoding whole files.
    """

    lengths: Sequence[int]
    files: dict[str, list[int]]
    info: dict[str, Any]
    episodes: list[dict[str, Any]]
    stats: dict[str, Any]
    frames: pa.Table
    videos: dict[tuple[str, int], bytes]
    pixels: dict[str, np.ndarray]

    def write(self, root: str, *, meta: str = "folder") -> str:
        """Writes the dataset; `meta` is where LeRobot's files lie: in a "folder", or a "table"."""
        lance.write_dataset(self.frames, f"{root}/frames.lance", max_rows_per_file=70)
        keys = sorted(self.videos)
        schema = pa.schema(
            [
                ("video_key", pa.string()), ("chunk_index", pa.int64()), ("file_index", pa.int64()),
                ("file_size", pa.int64()), lance.blob_field("video_bytes"),
            ]
        )  # fmt: skip
        columns = [
            [key for key, _ in keys], [0] * len(keys), [number for _, number in keys],
            [len(self.videos[key]) for key in keys], lance.blob_array([self.videos[key] for key in keys]),
        ]  # fmt: skip
        table = pa.table(columns, schema=schema)
        lance.write_dataset(table, f"{root}/videos.lance", schema=schema, data_storage_version="2.2")
        half = (len(self.episodes) + 1) // 2
        files = {"info.json": json.dumps(self.info).encode(), "stats.json": json.dumps(self.stats).encode()}
        files["tasks.parquet"] = _parquet(pa.table({"task": TASKS[::-1], "task_index": [*range(len(TASKS))][::-1]}))
        for number, part in enumerate((self.episodes[:half], self.episodes[half:])):
            files[f"episodes/chunk-000/file-{number:03d}.parquet"] = _parquet(pa.Table.from_pylist(part))
        if meta == "folder":
            for path, data in files.items():
                place = Path(root, "meta", path)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)
        else:
            rows = pa.table({"path": list(files), "data": pa.array(files.values(), pa.large_binary())})
            lance.write_dataset(rows, f"{root}/meta.lance")
        return root

    def window(self, name: str, values: np.ndarray, row: int, deltas: Sequence[float]) -> tuple[np.ndarray, list[bool]]:
        """The values of a sample's window, and which of them are padding."""
        ends = np.cumsum(self.lengths)
        episode = int(np.searchsorted(ends, row, side="right"))
        rows = [row + round(delta * FPS) for delta in deltas]
        first, last = int(ends[episode]) - self.lengths[episode], int(ends[episode]) - 1
        return values[np.clip(rows, first, last)], [not first <= each <= last for each in rows]


def make_robots(lengths: Sequence[int] = (23, 40, 17, 55, 31), *, gop: int = 2) -> Robots:
    """Robots with two cameras; each video has the episodes of some numbers, one after another."""
    rows, rng = sum(lengths), np.random.default_rng(0)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    frame = np.concatenate([np.arange(length) for length in lengths])
    grid = rng.random((rows, 2, 3), dtype=np.float32)
    frames = pa.table(
        {
            "observation_state": pa.FixedSizeListArray.from_arrays(rng.random(rows * 3, dtype=np.float32), 3),
            "observation_grid": pa.array(grid.tolist(), pa.list_(pa.list_(pa.float32()))),
            "action": pa.FixedSizeListArray.from_arrays(rng.random(rows * 2, dtype=np.float32), 2),
            "next_done": frame == np.array(lengths)[episode] - 1,
            "timestamp": (frame / FPS).astype(np.float32),
            "frame_index": frame,
            "episode_index": episode,
            "index": np.arange(rows),
            "task_index": episode % len(TASKS),
        }
    )
    files = {"observation.images.top": [0, 0, 1, 1, 1], "observation.images.wrist": [0, 1, 1, 2, 3]}
    starts, videos, pixels = {}, dict[tuple[str, int], bytes](), {}
    for number, (name, size) in enumerate(CAMERAS.items()):
        made, starts[name] = [], [0.0] * len(lengths)
        for file in sorted({*files[name]}):
            mine = [each for each, of in enumerate(files[name]) if of == file]
            for before, each in enumerate(mine):
                starts[name][each] = sum(lengths[other] for other in mine[:before]) / FPS
            total = sum(lengths[each] for each in mine)
            videos[name, file] = encode(scene(10 * number + file, total, *size), gop=gop, rate=FPS)
            made.append(whole(videos[name, file]))
        pixels[name] = np.concatenate(made)
    ends = np.cumsum(lengths)
    episodes: list[dict[str, Any]] = []
    for each, length in enumerate(lengths):
        begin = int(ends[each]) - length
        episodes.append({"episode_index": each, "tasks": [TASKS[each % len(TASKS)]], "length": length})
        episodes[-1] |= {"dataset_from_index": begin, "dataset_to_index": begin + length, "stats/action/max": [1.0]}
        for name in CAMERAS:
            where = {"chunk_index": 0, "file_index": files[name][each], "from_timestamp": starts[name][each]}
            episodes[-1] |= {f"videos/{name}/{key}": value for key, value in where.items()}
    features: dict[str, Any] = {name: {"dtype": kind, "shape": shape} for name, (kind, shape) in FEATURES.items()}
    features |= {name: {"dtype": "video", "shape": [*size, 3], "info": {}} for name, size in CAMERAS.items()}
    info = {"codebase_version": "v3.0", "fps": FPS, "total_frames": rows, "features": features}
    stats = {"action": {"mean": [0.5, 0.4], "std": [0.1, 0.2], "count": [rows]}}
    return Robots(
        lengths=lengths, files=files, info=info, episodes=episodes, stats=stats, frames=frames, videos=videos,
        pixels=pixels,
    )  # fmt: skip


def with_images(robots: Robots, name: str) -> Robots:
    """Robots that also have a feature of encoded pictures, as the layout stores them."""
    files = [encode_image(np.full((8, 8, 3), row % 256, np.uint8)) for row in range(robots.frames.num_rows)]
    return _with_files(robots, name, files, {"shape": [8, 8, 3]})


def _with_files(robots: Robots, name: str, files: Sequence[bytes], feature: dict[str, Any]) -> Robots:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    stored = pa.array([{"bytes": file, "path": None} for file in files], kind)
    robots.frames = robots.frames.append_column(name.replace(".", "_"), stored)
    robots.info["features"][name] = {"dtype": "image"} | feature
    return robots


def with_depth(robots: Robots, name: str, **settings: Any) -> Robots:
    """Robots that also have a camera of depth, by LeRobot's `DepthEncoderConfig` with these settings, one video for
    all; `pixels` has its millimetres.
    """
    rows, (height, width) = robots.frames.num_rows, (16, 24)
    codes = (np.arange(height * width).reshape(height, width) * 11 + np.arange(rows)[:, None, None] * 37) % 4096
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as box:
        stream = box.add_stream("libx265", rate=FPS, options={"x265-params": "lossless=1:keyint=7:log-level=none"})
        stream.height, stream.width, stream.pix_fmt = height, width, "gray12le"
        for each in codes:
            box.mux(stream.encode(av.VideoFrame.from_ndarray(each.astype(np.uint16), format="gray12le")))
        box.mux(stream.encode())
    robots.videos[name, 0] = out.getvalue()
    info = {"is_depth_map": True} | {f"video.{key}": value for key, value in settings.items()}
    robots.info["features"][name] = {"dtype": "video", "shape": [height, width, 1], "info": info}
    starts = np.cumsum([0, *robots.lengths]) / FPS
    for each, start in zip(robots.episodes, starts.tolist(), strict=False):
        where = {"chunk_index": 0, "file_index": 0, "from_timestamp": start}
        each |= {f"videos/{name}/{key}": value for key, value in where.items()}
    low, high, shift = settings.get("depth_min", 0.01), settings.get("depth_max", 10.0), settings.get("shift", 3.5)
    is_log, metres = settings.get("use_log", True), torch.from_numpy(codes).float()  # as LeRobot: rounding is seen
    ends = [math.log(end + shift) if is_log else end for end in (low, high)]
    metres = metres * ((ends[1] - ends[0]) / 4095) + ends[0]
    metres = (metres.exp() - shift if is_log else metres).clamp(low, high)
    robots.pixels[name] = (1000 * metres).round().numpy()[..., None]
    return robots


def with_depth_images(robots: Robots, name: str, unit: str) -> Robots:
    """Robots that also have pictures of depth: TIFFs of 16 bits of millimetres, or of floats of metres."""
    depth = (np.arange(48).reshape(6, 8) * 100 + np.arange(robots.frames.num_rows)[:, None, None]) % 5000
    files = []
    for each in depth:
        values = each.astype(np.uint16) if unit == "mm" else each.astype(np.float32) / 1000
        PIL.Image.fromarray(values).save(out := io.BytesIO(), "TIFF")
        files.append(out.getvalue())
    robots.pixels[name] = depth[..., None].astype(np.float64)
    info = {"is_depth_map": True, "depth_unit": unit}
    return _with_files(robots, name, files, {"shape": [6, 8, 1], "info": info})


def changed(table: pa.Table, name: str, row: int, value: float) -> pa.Table:
    """The table with another value in one row."""
    values = table[name].to_pylist()
    values[row] = value
    return table.set_column(table.column_names.index(name), name, pa.array(values, table[name].type))


def _parquet(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()
