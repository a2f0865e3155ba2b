"""The rate at which rows of floats reach the device, beside copies of pinned memory."""

import itertools
import time
from collections.abc import Iterator

import torch

from jobs.benchmark.data import DIMENSION
from jobs.benchmark.figures import Figure
from jobs.benchmark.setting import start_ray

from .decoding import rate_of, synchronize
from .setting import GpuSetting

_BATCH = 8192  # rows: 24 MiB


def measure(setting: GpuSetting) -> Iterator[Figure]:
    """GB/s of copies, of raylance to the device, and of raylance to the CPU, which needs no copy."""
    job = setting.embeddings(_BATCH)
    yield Figure(f"copies of pinned memory to {setting.device.type}", [_copies(setting, job.batch_size)], "GB/s")
    start_ray(job)
    cpu = torch.device("cpu")
    for runtime, device in itertools.product(("threads", "ray"), (setting.device, cpu)):
        with job.open(remainder="drop").loader(runtime=runtime, num_decoders=0) as loader:

            def open_pass(_: int, loader=loader, device=device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
                for batch in loader.iter_torch_batches(global_batch_size=job.batch_size, device=device):
                    yield batch["vector"], batch["id"]

            rate = rate_of(open_pass, setting)
        name = "threads" if runtime == "threads" else "Ray"
        yield Figure(f"768-float rows, shuffled, by {name}, to {device.type}", [rate * DIMENSION * 4 / 1e9], "GB/s")


def _copies(setting: GpuSetting, rows: int) -> float:
    """GB/s of copies of one batch from pinned memory (from any, without a GPU), one after the other."""
    batch, out = torch.rand((rows, DIMENSION)), torch.empty((rows, DIMENSION), device=setting.device)
    batch = batch.pin_memory() if setting.device.type == "cuda" else batch
    copies, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < setting.seconds / 4:
        for _ in range(10):
            out.copy_(batch, non_blocking=True)
        synchronize(setting.device)
        copies += 10
    return copies * batch.nbytes / (time.perf_counter() - begin) / 1e9
