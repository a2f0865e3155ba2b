"""What the parts of the GPU script share."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from jobs.benchmark.data import cached_dataset, image_batches, vector_batches
from jobs.benchmark.setting import Job

QUALITIES = {"42 kB": 88, "110 kB": 98}  # of JPEGs of 512 x 384 pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSetting:
    """The command line's options."""

    device: torch.device
    folder: Path
    images: int
    odd: int
    vectors: int
    passes: int
    workers: int
    seconds: int

    @property
    def decoders(self) -> int:
        """Decode actors: the cores, less two for the trainer and the shard actor."""
        return max(1, self.workers - 2)

    @property
    def described(self) -> str:
        """The machine and its software, in a line."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "no GPU"
        return f"{name}, {self.workers} cores, torch {torch.__version__}, Python {platform.python_version()}"

    def photographs(self, size: str, batch_size: int = 256) -> Job:
        """JPEGs of about a size, made where they are not there."""
        path = self.folder / f"photographs-{size.replace(' ', '-')}-{self.images}.lance"
        batches = image_batches(self.images, 0, self.workers, QUALITIES[size])
        uri = cached_dataset(path, self.images, batches)
        return self._job(uri, ("image", "label"), self.images, batch_size)

    def embeddings(self, batch_size: int) -> Job:
        """Rows of 768 floats."""
        path = self.folder / f"vectors-{self.vectors}.lance"
        uri = cached_dataset(path, self.vectors, vector_batches(self.vectors, 0))
        return self._job(uri, ("vector", "id"), self.vectors, batch_size)

    def _job(self, uri: str, columns: tuple[str, str], rows: int, batch_size: int) -> Job:
        size = min(batch_size, rows // 4)
        return Job(uri=uri, columns=columns, rows=rows, batch_size=size, workers=self.workers, seed=0)
