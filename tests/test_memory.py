"""Owns the promise that memory is bounded by configuration: by the bytes that were read, not by what rows were guessed
to have, nor by the size of a step.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance

MIB = 1 << 20


def table(sizes: list[int]) -> pa.Table:
    """One row of so many bytes each, none like another."""
    rng = np.random.default_rng(len(sizes))
    values = pa.array([rng.bytes(size) for size in sizes], pa.binary())
    return pa.table({"id": np.arange(len(sizes)), "data": values})


def parent(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]


def shard_actor() -> Path | None:
    """The process of the one shard actor of this process's Ray, if it has begun."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"ShardActor" in (process / "cmdline").read_bytes() and parent(parent(process.name)) == str(os.getpid()):
                return process
    return None


class Watch:
    """Looks every few milliseconds how much memory of its own, the object store left out, the shard actor has."""

    def __enter__(self) -> "Watch":
        self.peak_bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        process = None
        while not self._stop.wait(0.005):
            process = process or shard_actor()
            if process is not None:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    status = (process / "status").read_text()
                    self.peak_bytes = max(self.peak_bytes, int(status.split("RssAnon:")[1].split()[0]) << 10)


def run(loader: raylance.RankLoader, **batches: Any) -> tuple[list[int], int, dict[str, Any]]:
    """An epoch: its row offsets, the peak of the shard actor, and the counters."""
    with Watch() as watch, loader:
        found = [batch["_rowoffset"].tolist() for batch in loader.iter_batches(with_row_offset=True, **batches)]
        return [row for rows in found for row in rows], watch.peak_bytes, loader.stats()


@pytest.fixture(scope="module")
def floor(ray_session: None, write_dataset: Callable[..., str]) -> int:
    """What a shard actor has resident that holds next to nothing."""
    uri = write_dataset(table([64] * 64))
    return run(raylance.dataset(uri).loader(), global_batch_size=8)[1]


def test_a_step_larger_than_the_limit_is_read_in_parts(write_dataset: Callable[..., str], floor: int) -> None:
    uri = write_dataset(table([MIB // 2] * 600))
    limit = 16 * MIB
    dataset = raylance.dataset(uri, seed=1, remainder="ragged")
    loader = dataset.loader(max_window_bytes=limit, max_inflight_bytes=8 * MIB)
    rows, peak, stats = run(loader, global_batch_size=256)
    print((peak - floor) / MIB, stats.get("held_bytes", 0) / MIB)
    assert sorted(rows) == list(range(600))
    assert peak - floor < 4 * limit, "a step has 128 MiB"
    assert stats["held_bytes"] <= limit * 9 / 8


def test_a_tail_that_no_sample_hits(write_dataset: Callable[..., str], floor: int) -> None:
    sizes = [8 * MIB if row % 40 == 7 else 4096 for row in range(1600)]
    uri = write_dataset(*[table(sizes[low : low + 400]) for low in range(0, 1600, 400)])
    limit = 32 * MIB
    dataset = raylance.dataset(uri, order="sequential", remainder="ragged")
    loader = dataset.loader(max_window_bytes=limit, max_inflight_bytes=16 * MIB)
    rows, peak, stats = run(loader, global_batch_size=64)
    print((peak - floor) / MIB, stats.get("held_bytes", 0) / MIB)
    assert rows == list(range(1600))
    assert peak - floor < 6 * limit, "the tail has 320 MiB, and a window of rows of 4 KiB all of it"
    assert stats["held_bytes"] <= limit + 2 * 8 * MIB
