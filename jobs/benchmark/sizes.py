"""Owns cost against size: rows, pixels, decoders and ranks; never compares with a peer."""

import dataclasses
import io
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import psutil
import pyarrow as pa
from PIL import Image

import raylance

from .data import HEIGHT, QUALITY, SIDE, WIDTH, cached_dataset, random_cut
from .decoding import own_image
from .figures import Figure
from .measuring import APART, rest
from .memory import processes
from .setting import Setting, start_ray

FACTORS = (1, 10, 100)  # of rows
SIDES = (224, 500, 1000, 2000)  # of square images
DECODERS = (1, 2, 4, 8, 16)
RANKS = (1, 2, 4)
_PIXELS = 1 << 28  # of all images of one size together: 67 of the largest
_MOST_IMAGES = 2048
_ROW_S, _ROWS_EACH = 0.02, 512  # of a sleeping decoder: 10 s
_BATCH, _RANK_DECODERS = 16, 2
_LINEAR = 0.9

Found = dict[str, dict[str, dict[str, float]]]  # by what grows, and its size


@dataclasses.dataclass(frozen=True, slots=True)
class Sleeping(raylance.Decoder):
    """Decodes a row in a given time without a core, so that two cores are enough for many decoders."""

    row_s: float
    shape = (SIDE, SIDE, 3)
    dtype = "uint8"

    def open(self) -> Self:
        """Needs no memory of its own."""
        return self

    def decode_into(self, encoded: memoryview, draws: Any, out: np.ndarray) -> None:
        """Sleeps."""
        time.sleep(self.row_s)
        out[...] = encoded[0]


def measure(setting: Setting) -> Found:
    """One thing grows at a time."""
    start_ray(setting.job("vectors"))
    found: Found = {}
    for name, sizes in {"rows": _rows, "image side": _sides, "decoders": _decoders, "ranks": _ranks}.items():
        found[name] = {}
        for size, one in sizes(setting):
            print(f"{name} {size}", file=sys.stderr)
            found[name][size] = one
    return found


def _rows(setting: Setting) -> Iterator[tuple[str, dict[str, float]]]:
    for factor in FACTORS:
        job = setting.job("vectors", max(setting.vectors * factor // FACTORS[-1], 1))
        passes = max(2, 10 // factor)  # short ones are repeated
        yield str(job.rows), _timed(job.open(), job.batch_size, 0, passes)


def _sides(setting: Setting) -> Iterator[tuple[str, dict[str, float]]]:
    for side in SIDES:
        rows = min(_MOST_IMAGES, _PIXELS // side**2)
        uri = cached_dataset(setting.path(f"side{side}-{rows}"), rows, _images(rows, side, setting.seed))
        dataset = raylance.dataset(uri, decode=own_image(), seed=setting.seed, remainder="ragged")
        yield str(side), _timed(dataset, _BATCH, setting.workers, 2)


def _images(rows: int, side: int, seed: int) -> Iterator[pa.RecordBatch]:
    """Square JPEGs, pieced together of cuts, so that a pixel takes as many bytes whatever the size."""
    for start in range(0, rows, 64):
        files = []
        for number in range(start, min(rows, start + 64)):
            rng = np.random.default_rng((seed, 2, number))
            image = Image.new("RGB", (side, side))
            for corner in itertools.product(range(0, side, WIDTH), range(0, side, HEIGHT)):
                image.paste(random_cut(rng, seed), corner)
            image.save(encoded := io.BytesIO(), "JPEG", quality=QUALITY)
            files.append(encoded.getvalue())
        yield pa.record_batch({"image": pa.array(files, pa.binary()), "label": np.arange(start, start + len(files))})


def _sleeping_dataset(setting: Setting, rows: int) -> Any:
    most = _ROWS_EACH * max(DECODERS[-1], RANKS[-1] * _RANK_DECODERS)
    batch = pa.record_batch({"image": pa.array([b"\1" * 64] * most, pa.binary()), "label": np.arange(most)})
    uri = cached_dataset(setting.data_dir.absolute() / f"sleeping-{most}.lance", most, iter([batch]))
    decode: Any = Sleeping("image", _ROW_S)
    return raylance.dataset(
        uri, columns=["image", "label"], decode=decode, filter=f"label < {rows}", order="sequential"
    )


def _decoders(setting: Setting) -> Iterator[tuple[str, dict[str, float]]]:
    """As many rows for each decoder, whatever their number; at 20 ms a row."""
    for decoders in DECODERS:
        dataset = _sleeping_dataset(setting, decoders * _ROWS_EACH)
        found = _timed(dataset, _BATCH, decoders, 1, **_sleeping(decoders))
        yield str(decoders), found | {"of_linear": found["rows_per_s"] * _ROW_S / decoders}


def _sleeping(decoders: int) -> dict[str, Any]:
    """How sleeping decoders are timed: an item is one step, which is a fixed cost, and a few of them warm up."""
    return {"warm_steps": 4 * decoders, "max_inflight_bytes": int(1.25 * (2 * decoders + 1) * _BATCH * 3 * SIDE**2)}


def _ranks(setting: Setting) -> Iterator[tuple[str, dict[str, float]]]:
    """Logical ranks, a process each with decoders of its own; they do not wait for each other."""
    import ray

    one_rank: Any = ray.remote(_timed).options(num_cpus=0)
    options = _sleeping(_RANK_DECODERS)
    for ranks in RANKS:
        dataset = _sleeping_dataset(setting, ranks * _RANK_DECODERS * _ROWS_EACH)
        found = ray.get([
            one_rank.remote(dataset, ranks * _BATCH, _RANK_DECODERS, 1, rank=rank, world_size=ranks, **options)
            for rank in range(ranks)
        ])  # fmt: skip
        rows_per_s = sum(one["rows_per_s"] for one in found)
        firsts = {key: max(one[key] for one in found) for key in ("first_of_run_s", "first_batch_s")}
        linear = ranks * _RANK_DECODERS / _ROW_S
        yield str(ranks), {"rows_per_s": rows_per_s, "of_linear": rows_per_s / linear, **firsts}


def _timed(
    dataset: Any, global_batch_size: int, num_decoders: int, passes: int, warm_steps: int | None = None, **options: Any
) -> dict[str, float]:
    """A pass that warms up, or its first steps, and some that are timed; `first_batch_s` is the median of the latter.

    `own_bytes` is the most that this process and its helpers have resident alone at the end of a pass.
    """
    firsts_s, seconds, rows, peak = list[float](), 0.0, 0, 0
    with dataset.loader(num_decoders=num_decoders, **options) as loader:
        batches = loader.batches(global_batch_size=global_batch_size)
        for number in range(passes + 1):
            loader.set_epoch(APART * number)  # one that was not prepared
            rest()
            begin = time.perf_counter()
            taken = itertools.islice(batches, None if number else warm_steps)
            times = [time.perf_counter() - begin for _ in taken]
            firsts_s.append(times[0])
            if number:
                seconds, rows = seconds + times[-1], rows + len(dataset) // loader.world_size
            peak = max(peak, own_bytes())
    return {
        "rows_per_s": rows / seconds,
        "first_of_run_s": firsts_s[0],
        "first_batch_s": float(np.median(firsts_s[1:])),
        "own_bytes": float(peak),
    }


def own_bytes() -> int:
    """Bytes resident of this process and the helpers together, without what they share."""
    total = 0
    for _, process in processes():
        try:
            memory = process.memory_info()
            total += memory.rss - memory.shared
        except psutil.NoSuchProcess:
            continue
    return total


def figures(found: Found) -> Iterator[Figure]:
    """What grows with size, and how far decoders and ranks are from linear."""
    for name, rate in (("rows", "rows/s"), ("image side", "images/s")):
        for size, one in found[name].items():
            yield Figure(f"{name} {size}: throughput", [one["rows_per_s"]], rate)
            yield Figure(f"{name} {size}: first batch", [one["first_batch_s"]], "s")
            yield Figure(f"{name} {size}: memory", [one["own_bytes"] / 2**20], "MiB")
    for name in ("decoders", "ranks"):
        shares = {int(size): one["of_linear"] for size, one in found[name].items()}
        least, most = min(shares), max(shares)
        yield Figure(f"{name} {least} to {most}: share of linear", [shares[most] / shares[least]], at_least=_LINEAR)
        for size, share in shares.items():
            yield Figure(f"…{name} {size}: share of decoding alone", [share])
