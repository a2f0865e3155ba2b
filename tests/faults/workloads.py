"""The datasets that the fault suite trains on, and how a run opens them."""

import dataclasses
import os
import signal
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import raylance
from tests.helpers.images import encode
from tests.helpers.videos import encode as encode_video
from tests.helpers.videos import scene, write_videos

ROWS, BATCH, EPOCHS = 484, 16, 3  # a last step of four rows
STEPS = -(-ROWS // BATCH)
VERSION = 2
FATAL_ROW = 137
DELETED = 16  # rows before it
MASKED = -1  # in place of a row's checksum
ORDER = raylance.WindowShuffle(shard_rows=20, window_shards=2, lanes=4)


@dataclasses.dataclass(frozen=True)
class Lengths(raylance.RaggedDecoder):
    """Bytes as float32 (length,), at a random volume."""

    shape, dtype, draws = (), "float32", 1

    def open(self) -> "Lengths":
        return self

    def decode(self, encoded: memoryview, draws: np.ndarray) -> np.ndarray:
        return np.frombuffer(encoded, np.uint8).astype(np.float32) * np.float32(draws[0])


@dataclasses.dataclass(frozen=True)
class Scaled(raylance.BatchDecoder):
    """64 bytes as float32, times a random number, all rows in one operation."""

    shape, dtype, draws = (64,), "float32", 1

    def open(self) -> "Scaled":
        return self

    def decode_batch(self, encoded: Sequence[memoryview], draws: np.ndarray, out: np.ndarray) -> None:
        time.sleep(0.002 * len(encoded))
        rows = np.frombuffer(b"".join(encoded), np.uint8).reshape(len(encoded), 64)
        np.multiply(rows, draws.astype(np.float32), out=out)


@dataclasses.dataclass(frozen=True)
class Fatal(raylance.Decoder):
    """The first bytes as a number. One ends the process that decodes it, by an exit or, if the file says so, a signal;
    but only if the file is there, as it is not while the dataset is opened.
    """

    armed: str = ""
    fatal: int = FATAL_ROW + DELETED
    row_s: float = 0.0
    shape, dtype = (), "int64"

    def open(self) -> "Fatal":
        return self

    def decode_into(self, encoded: memoryview, draws: np.ndarray, out: np.ndarray) -> None:
        out[...] = number = int.from_bytes(encoded[:4], "little")
        time.sleep(self.row_s)
        if number == self.fatal and os.path.exists(self.armed):
            if Path(self.armed).read_text() == "signal":
                os.kill(os.getpid(), signal.SIGSEGV)
            os._exit(1)


class Slowly:
    """A transform that takes a while for each row, so that there is work when a fault comes."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.002 * len(batch["id"]))
        return {name: values for name, values in batch.items() if name != "_rowoffset"}


NAMES = ("images", "ragged", "batch", "fatal", "vectors", "mixture", "peers", "windows", "clips")
LATER = ("pictures", "packs")  # of which schedules of the names above know nothing
FATAL = "fatal"
LENGTH = 64  # tokens of a sequence


def write(folder: Path) -> None:
    """Writes the dataset of all workloads, and another for mixtures: several files, some rows deleted."""
    write_videos(str(folder / "videos.lance"), [encode_video(scene(seed, 100), gop=20) for seed in range(5)])
    for name, rows in (("data", ROWS), ("other", 200)):
        rng = np.random.default_rng(rows)
        # As many sequences as rows, when those of deleted rows are gone.
        lengths = np.insert(1 + rng.multinomial(rows * (LENGTH - 1), [1 / rows] * rows), 40, [LENGTH] * DELETED)
        table = pa.table(
            {
                "id": np.arange(rows + DELETED),
                "episode": np.arange(rows + DELETED) * 7 // 100,
                "video": np.arange(rows + DELETED) // 100,
                "frame": np.arange(rows + DELETED) % 100,
                "image": pa.array(
                    [encode(rng.integers(0, 255, (24, 32, 3), np.uint8), "JPEG") for _ in range(rows + DELETED)]
                ),
                "sound": pa.array([rng.bytes(int(rng.integers(1, 90))) for _ in range(rows + DELETED)], pa.binary()),
                "code": pa.array([n.to_bytes(4, "little") + rng.bytes(60) for n in range(rows + DELETED)], pa.binary()),
                "tokens": [rng.integers(0, 1000, length) for length in lengths.tolist()],
                "vector": pa.FixedSizeListArray.from_arrays(rng.random((rows + DELETED) * 64, np.float32), 64),
            }
        )
        uri = folder / f"{name}.lance"
        lance.write_dataset(table, uri, max_rows_per_file=100)
        lance.dataset(uri).delete(f"id >= 40 and id < {40 + DELETED}")


def opened(name: str, folder: str | os.PathLike[str], armed: str = "", **arguments: Any) -> raylance.Dataset:
    """The training data of a workload; the row of `Fatal` ends its decoder while the file `armed` exists."""
    uri = f"{folder}/data.lance"
    common: dict[str, Any] = {"version": VERSION, "order": ORDER, "seed": 3, "remainder": "ragged", **arguments}
    image = raylance.Image("image", size=(16, 16), augment=raylance.RandomResizedCrop(), hflip=0.5)
    match name:
        case "images" | "peers":
            return raylance.dataset(uri, columns=["id", "image"], decode=image, **common)
        case "ragged":
            return raylance.dataset(uri, columns=["id", "sound"], decode=Lengths("sound"), **common)
        case "batch":
            return raylance.dataset(uri, columns=["id", "code"], decode=Scaled("code"), **common)
        case "fatal":
            decode = Fatal("code", armed)
            return raylance.dataset(uri, columns=["id", "code"], decode=decode, on_bad_row="mask", **common)
        case "vectors":
            return raylance.dataset(uri, columns=["id", "vector"], transform=Slowly(), **common)
        case "windows":
            windows = raylance.Windows(episode="episode", offsets={"vector": range(-2, 3)})
            return raylance.dataset(uri, columns=["id", "vector"], samples=windows, transform=Slowly(), **common)
        case "pictures":
            windows = raylance.Windows(episode="episode", offsets={"image": [-20, -1, 0]})
            decode = raylance.Image("image", size=(16, 16))
            return raylance.dataset(uri, columns=["id", "image"], decode=decode, samples=windows, **common)
        case "packs":
            return raylance.dataset(uri, samples=raylance.Pack("tokens", length=LENGTH, block_rows=50), **common)
        case "clips":
            windows = raylance.Windows(episode="video", offsets={"top": [-2, 0]})
            camera = raylance.Video("top", f"{folder}/videos.lance", video="video", frame="frame")
            return raylance.dataset(uri, columns=["id"], decode=camera, samples=windows, transform=Slowly(), **common)
        case "mixture":
            remainder = common.pop("remainder")
            parts = {
                part: (raylance.dataset(f"{folder}/{part}.lance", columns=["id", "vector"], **common), weight)
                for part, weight in (("data", 2), ("other", 1))
            }
            return raylance.mix(parts, stop=ROWS, remainder=remainder)
    raise ValueError(name)


def validation(folder: str | os.PathLike[str], **arguments: Any) -> raylance.Dataset:
    """What every rank sees whole between the epochs."""
    uri = f"{folder}/other.lance"
    common = {"version": VERSION, "order": "sequential", "remainder": "ragged", **arguments}
    return raylance.dataset(uri, columns=["id", "vector"], **common)


def rows_of(batch: pa.Table) -> Iterator[tuple[int, int]]:
    """(row, checksum of all that was delivered of it) of a batch, in its order. A mixture's rows count by component."""
    for row in batch.to_pylist():
        offset = row.pop("_rowoffset") + (row.get("_component") or 0) * 1_000_000
        is_valid = row.pop("_valid", True)
        yield offset, zlib.crc32(repr(row).encode()) if is_valid else MASKED


def undisturbed(name: str, folder: str | os.PathLike[str]) -> list[list[list[tuple[int, int]]]]:
    """Rows and checksums of each step of each epoch, by one rank and threads of this process."""
    epochs = []
    with opened(name, folder).loader(runtime="threads", record=False) as loader:
        for _ in range(EPOCHS):
            found = loader.iter_batches(global_batch_size=BATCH, batch_format="pyarrow", with_row_offset=True)
            epochs.append([list(rows_of(batch)) for batch in found])
    if name == FATAL:
        for step in (step for epoch in epochs for step in epoch):
            step[:] = [(row, MASKED if row == FATAL_ROW else crc) for row, crc in step]
    return epochs
