"""The memory of many short epochs and of rows of very different sizes."""

import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pyarrow as pa

import raylance

from .data import cached_dataset
from .figures import Figure
from .setting import Setting, start_ray

_MIB = 1 << 20
_BATCHES = 4  # of a short epoch
_EPOCHS = 100  # for each round
_WARM = 0.5  # of the epochs: while allocators fill what they keep
_KIB_AN_EPOCH = 8.0  # more, and a thousand epochs cost 8 MiB
_TAIL_ROWS, _TAIL_MEDIAN, _TAIL_MOST = 4000, 8 << 10, 6 << 20  # bytes
_WINDOW_BYTES, _INFLIGHT_BYTES, _TAIL_BATCH = 48 << 20, 24 << 20, 8
_TAIL_PREFETCH = 200  # steps, of far more bytes than may be in flight


def measure(setting: Setting) -> dict[str, Any]:
    """Hundreds of epochs of a few batches, and an epoch of heavy-tailed rows."""
    job = setting.job("images", _BATCHES * setting.batch_size)
    start_ray(job)
    found: dict[str, Any] = {"epochs": _EPOCHS * setting.rounds, "samples": []}
    with job.open().loader(num_decoders=job.decoders) as loader:
        batches = loader.batches(global_batch_size=job.batch_size)
        for epoch in range(found["epochs"]):
            for _ in batches:
                pass
            found["samples"].append({"epoch": epoch, **sample()})
    found["spilled_bytes"] = spilled_bytes()
    return found | {"tail": _measure_tail(setting)}


def sample() -> dict[str, Any]:
    """Bytes in the object store, and of each process of the run what it has alone, what it has resident, shared too."""
    by_name: dict[str, dict[str, int]] = {}
    for name, process in processes():
        memory = process.memory_full_info()
        by_name[name] = {"own": memory.uss, "resident": memory.rss, "shared": memory.shared}
    return {"processes": by_name, "store_bytes": store_bytes()}


def processes() -> Iterator[tuple[str, psutil.Process]]:
    """This process and the helpers of its loaders, by name."""
    this, numbers = psutil.Process(), itertools.count(1)
    yield "this process", this
    for child in sorted(this.children(recursive=True), key=lambda child: child.pid):
        command = "".join(child.cmdline()[:1])
        if "ShardActor" in command:
            yield "shard actor", child
        elif "DecodeActor" in command:
            yield f"decoder {next(numbers)}", child


def store_bytes() -> int:
    """Bytes of Ray's object store in use, as Ray counts them; it counts ten times a second."""
    import ray

    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources().get(name, 0))


def spilled_bytes() -> int:
    """Bytes that Ray has spilled since it began, by its own command: whole MiB."""
    import ray

    command = [str(Path(sys.executable).parent / "ray"), "memory", "--stats-only"]
    address = ray.get_runtime_context().gcs_address
    shown = subprocess.run([*command, "--address", address], capture_output=True, text=True, check=True).stdout
    if "Plasma memory usage" not in shown:
        raise SystemExit(f"ray memory shows nothing of the object store: {shown}")
    spilled = re.search(r"Spilled (\d+) MiB", shown)
    return int(spilled[1]) * _MIB if spilled else 0


@dataclass
class Peak:
    """Calls `look` again and again until the block ends, and keeps the maximum."""

    look: Callable[[], int]
    pause_s: float = 0.02
    most: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.pause_s):
            self.most = max(self.most, self.look())


def tail_sizes(seed: int) -> np.ndarray:
    """Bytes of rows: half of them below 8 KiB, one in a hundred some hundred times as large."""
    sizes = _TAIL_MEDIAN / 2 * (1 + np.random.default_rng(seed).pareto(1.0, _TAIL_ROWS))
    return sizes.clip(64, _TAIL_MOST).astype(np.int64)


def _tail_batches(seed: int) -> Iterator[pa.RecordBatch]:
    rng = np.random.default_rng(seed)
    for start, sizes in enumerate(np.array_split(tail_sizes(seed), _TAIL_ROWS // 100)):
        ids = np.arange(len(sizes)) + 100 * start
        yield pa.record_batch({"data": pa.array([rng.bytes(size) for size in sizes], pa.binary()), "id": ids})


def _measure_tail(setting: Setting) -> dict[str, Any]:
    sizes = tail_sizes(setting.seed)
    uri = cached_dataset(setting.path(f"tail-{_TAIL_ROWS}"), _TAIL_ROWS, _tail_batches(setting.seed))
    before, rows, step_bytes = store_bytes(), 0, 0
    limits = {"reader_bytes": _WINDOW_BYTES, "inflight_bytes": _INFLIGHT_BYTES}
    data = raylance.dataset(uri, seed=setting.seed, window_bytes=_WINDOW_BYTES, remainder="ragged")
    with data.loader(**limits) as loader, Peak(store_bytes) as peak:
        size: dict[str, Any] = {"global_batch_size": _TAIL_BATCH, "prefetch_batches": _TAIL_PREFETCH}
        for batch in loader.iter_batches(batch_format="pyarrow", **size):
            rows, step_bytes = rows + len(batch), max(step_bytes, batch.nbytes)
            time.sleep(0.02)  # the consumer is slower than the reader: what may be in flight, is
        held_bytes = loader.stats()["held_bytes"]
    return {
        **limits,
        "rows": rows,
        "row_bytes": {"median": float(np.median(sizes)), "mean": float(sizes.mean()), "most": int(sizes.max())},
        "held_bytes": held_bytes,
        "largest_step_bytes": step_bytes,
        "store_peak_bytes": peak.most - before,
        "spilled_bytes": spilled_bytes(),
    }


def slope(values: list[float]) -> tuple[float, float]:
    """Least squares: what each step adds, and its standard error, which grows with the correlation of neighbours."""
    x, y = np.arange(len(values), dtype=float), np.asarray(values, dtype=float)
    x -= x.mean()
    rise = float(x @ y / (x @ x))
    residuals = y - y.mean() - rise * x
    square = float(residuals @ residuals)
    alike = min(0.99, max(0.0, float(residuals[1:] @ residuals[:-1]) / square)) if square else 0.0
    variance = square / (len(values) - 2) / float(x @ x) * (1 + alike) / (1 - alike)
    return rise, float(np.sqrt(variance))


def series(found: dict[str, Any]) -> dict[str, list[float]]:
    """Bytes by epoch: own memory of each process that was there all the time, and the object store."""
    samples = found["samples"]
    names = [name for name in samples[-1]["processes"] if all(name in one["processes"] for one in samples)]
    own = {name: [float(one["processes"][name]["own"]) for one in samples] for name in names}
    return own | {"object store": [float(one["store_bytes"]) for one in samples]}


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """Slopes with their standard errors, and limits."""
    for name, values in series(found).items():
        warm = values[int(_WARM * len(values)) :]
        rise, error = (value / 1024 for value in slope(warm))
        words = f"{name}: an epoch adds, ± {error:.2g} ({warm[-1] / _MIB:.0f} MiB)"
        yield Figure(words, [rise], "KiB", at_most=_KIB_AN_EPOCH)
    tail = found["tail"]
    spilled = (found["spilled_bytes"] + tail["spilled_bytes"]) / _MIB
    yield Figure(f"spilled in {found['epochs']} epochs", [spilled], "MiB", at_most=0.0)
    # As documented, reader_bytes may be exceeded by a block, and inflight_bytes by a step.
    window = tail["held_bytes"] / (tail["reader_bytes"] * (1 + 1 / 16))
    yield Figure("heavy-tailed rows: held / reader_bytes and a block", [window], at_most=1.0)
    inflight = tail["store_peak_bytes"] / (tail["inflight_bytes"] + tail["largest_step_bytes"])
    yield Figure("heavy-tailed rows: object store / inflight_bytes and a step", [inflight], at_most=1.0)
