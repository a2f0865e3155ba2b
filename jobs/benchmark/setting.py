"""Owns what the experiments share: the datasets, how raylance opens them, and how a wait is clocked; never measures by
itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data import cached_dataset, image_batches, vector_batches
from .readers import Job, own_image


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The command line's options for all parts.

    Attributes:
        data_dir: Where datasets are made once and kept.
        images: Photographs.
        vectors: Vectors.
        batch_size: Images a batch.
        vector_batch_size: Vectors a batch.
        workers: Cores to use.
        seed: Of data and orders.
        rounds: How often a part repeats what it times.
    """

    data_dir: Path
    images: int
    vectors: int
    batch_size: int
    vector_batch_size: int
    workers: int
    seed: int
    rounds: int

    def job(self, kind: str, rows: int | None = None) -> Job:
        """What readers of "images" or "vectors" share; the dataset is made where it is not there."""
        is_images = kind == "images"
        rows = rows or (self.images if is_images else self.vectors)
        batches = image_batches(rows, self.seed, self.workers) if is_images else vector_batches(rows, self.seed)
        return Job(
            uri=cached_dataset(self.data_dir.absolute() / f"{kind}-{rows}-seed{self.seed}.lance", rows, batches),
            columns=("image", "label") if is_images else ("vector", "id"),
            rows=rows,
            batch_size=self.batch_size if is_images else self.vector_batch_size,
            workers=self.workers,
            seed=self.seed,
        )


def open_dataset(job: Job, **changes: Any) -> Any:
    """The dataset as raylance opens it: shuffled in windows, images by the built-in decoder."""
    import raylance

    options: dict[str, Any] = {"order": "window", "seed": job.seed, "remainder": "ragged"}
    if "image" in job.columns:
        options["decode"] = own_image()
    return raylance.dataset(job.uri, columns=list(job.columns), **(options | changes))


def decoders_of(job: Job) -> int:
    """Decode actors of a loader: one for each core, where there is something to decode."""
    return job.workers if "image" in job.columns else 0


@dataclass(frozen=True, slots=True)
class Wait:
    """What getting one batch cost: seconds, and CPU seconds of the thread that asked. The last wait brings None."""

    batch: Any
    seconds: float
    cpu_s: float


def waits(batches: Iterator[Any]) -> Iterator[Wait]:
    """Takes batches until there are none, and clocks each wait, that for the end too."""
    batch: Any = ...
    while batch is not None:
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        batch = next(batches, None)
        yield Wait(batch, time.perf_counter() - begin, time.thread_time() - begin_cpu)


def own_batch_s(batches: Iterator[Any]) -> float:
    """Seconds that a pass takes a batch after its first one, when nothing but the loader is awaited."""
    found = [wait.seconds for wait in waits(batches)]
    return sum(found[1:]) / max(1, len(found) - 2)
