"""Owns the training of ResNet-50 on one GPU from JPEG, with raylance and with SafeLanceDataset in a DataLoader; never
asserts a speed, and measures nothing where there is no GPU.

    python -m jobs.benchmark --only gpu --images 20000 --workers 12

bf16, channels last, batches of 256 images of 224 x 224; what loads may use `--workers` cores. "memory" is the ceiling:
the same batch from the GPU's own memory again and again. It reports images/s, the share of the time that the training
thread waited for a batch (stall), and the share that the GPU worked, by the events of its own stream.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import torch

from .figures import Figure
from .measuring import Result, rest, values_of, waits
from .readers import open_raylance, open_safe_lance
from .setting import Setting

# uint8 (N, 224, 224, 3), or channels first in channels-last memory; labels (N,)
Batch = tuple[torch.Tensor, torch.Tensor]
_MEAN, _DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, of 255
_CLASSES, _BATCH = 1000, 256


def measure(setting: Setting) -> dict[str, Any]:
    """Trains from each source in turn, one epoch each a round; {} with a line where there is no GPU."""
    if not torch.cuda.is_available():
        print("gpu: not measured, torch sees no CUDA device here")
        return {}
    from torchvision.models import resnet50

    device, job = torch.device("cuda"), replace(setting.job("images"), batch_size=_BATCH)
    model = resnet50().to(device, memory_format=torch.channels_last)
    steps = job.rows // job.batch_size
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "batch": job.batch_size}
    with ExitStack() as stack:
        sources: dict[str, Callable[[int], Iterable[Batch]]] = {
            "memory": lambda _: itertools.repeat(_random_batch(job.batch_size, device), steps),
            "raylance": open_raylance(job, stack, device="cuda").open_pass,
            "safe-lance": open_safe_lance(job, stack, pins=True).open_pass,
        }
        for number in range(setting.rounds + 1):  # the first one warms up: processes, page cache, kernels
            for name, open_pass in sources.items():
                rest()
                one_pass = train(open_pass(number), model, device)
                if number:
                    results.setdefault(name, {"passes": []})["passes"].append(one_pass)
    return results


def figures(results: dict[str, Any]) -> Iterator[Figure]:
    """Rates, stalls and work of each source."""
    for name in ("memory", "raylance", "safe-lance") if results else ():
        for key, unit in (("rows_per_s", "images/s"), ("stall", ""), ("busy", "")):
            target = 0.01 if (name, key) == ("raylance", "stall") else None
            yield Figure(f"ResNet-50 from {name}: {key}", values_of(results[name], key), unit, at_most=target)


def train(batches: Iterable[Batch], model: torch.nn.Module, device: torch.device) -> Result:
    """Trains one epoch; returns images/s, and the shares of the time that it waited for batches and that it worked."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean, deviation = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (_MEAN, _DEVIATION))
    stall_s, rows, spans = 0.0, 0, []
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    begin = time.perf_counter()
    for batch, wait_s, _ in waits(batches):
        stall_s += wait_s
        if batch is None:
            break
        pixels, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        pixels = pixels.permute(0, 3, 1, 2) if pixels.shape[-1] == 3 else pixels
        span = _event(device), _event(device)
        span[0].record()
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model((pixels - mean) / deviation), labels % _CLASSES)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        span[1].record()
        spans.append(span)
        rows += len(labels)
    synchronize()
    seconds = time.perf_counter() - begin
    busy_s = sum(first.elapsed_time(last) for first, last in spans) / 1000
    return {"rows_per_s": rows / seconds, "stall": stall_s / seconds, "busy": busy_s / seconds, "rows": rows}


class _Moment:
    """A CUDA event's stand-in where work is done when the call returns."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Self) -> float:
        return 1000 * (other.at - self.at)


def _event(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _Moment()


def _random_batch(rows: int, device: torch.device) -> Batch:
    pixels = torch.randint(0, 256, (rows, 224, 224, 3), dtype=torch.uint8, device=device)
    return pixels, torch.arange(rows, device=device)
