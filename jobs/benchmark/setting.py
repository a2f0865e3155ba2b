"""The command line's options for all parts, and what the readers of one dataset share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raylance
from jobs.common import without_fork_warning

from .data import cached_dataset, image_batches, vector_batches
from .decoding import DecodeOne, own_image


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all readers of one dataset share; `columns` are the payload and the row's number."""

    uri: str
    columns: tuple[str, str]
    rows: int
    batch_size: int
    workers: int
    seed: int
    pass_epochs: int = 2  # epochs of a timed pass; from two on, it has a turn

    @property
    def is_images(self) -> bool:
        """Whether there is something to decode."""
        return "image" in self.columns

    @property
    def decoders(self) -> int:
        """Decode actors of a loader of raylance: one for each core."""
        return self.workers if self.is_images else 0

    def open(self, decode_fn: DecodeOne | None = None, **changes: Any) -> raylance.Dataset:
        """The dataset as raylance opens it: shuffled in windows, images by the built-in decoder or a function."""
        options: dict[str, Any] = {"order": "window", "seed": self.seed, "remainder": "ragged"}
        if self.is_images:
            options["decode"] = own_image(decode_fn)  # not in `columns`, for the raylance of `--against`
        return raylance.dataset(self.uri, columns=list(self.columns), **(options | changes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The command line's options for all parts."""

    data_dir: Path  # where datasets are made once and kept
    images: int
    vectors: int
    batch_size: int
    vector_batch_size: int
    workers: int  # cores to use
    seed: int
    rounds: int  # how often a part repeats what it times
    pass_epochs: int  # see `Job`

    def path(self, name: str) -> Path:
        """Where a dataset is kept."""
        return self.data_dir.absolute() / f"{name}-seed{self.seed}.lance"

    def job(self, kind: str, rows: int | None = None) -> Job:
        """What readers of "images" or "vectors" share; the dataset is made where it is not there."""
        is_images = kind == "images"
        rows = rows or (self.images if is_images else self.vectors)
        batches = image_batches(rows, self.seed, self.workers) if is_images else vector_batches(rows, self.seed)
        return Job(
            uri=cached_dataset(self.path(f"{kind}-{rows}"), rows, batches),
            columns=("image", "label") if is_images else ("vector", "id"),
            rows=rows,
            batch_size=self.batch_size if is_images else self.vector_batch_size,
            workers=self.workers,
            seed=self.seed,
            pass_epochs=self.pass_epochs,
        )


def start_ray(job: Job) -> None:
    """Starts Ray, if none runs. Its CPUs are tokens: actors of one reader must not keep them from another."""
    import ray

    if not ray.is_initialized():
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        with without_fork_warning():
            ray.init(address="local", num_cpus=8 * job.workers + 8, include_dashboard=False, **quiet)


def end_ray() -> None:
    """Ends the Ray that `start_ray` started, if any."""
    import ray

    ray.shutdown()
