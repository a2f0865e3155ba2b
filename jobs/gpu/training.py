"""The training of ResNet-50 from JPEGs, beside the same model on tensors of the device."""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, Self

import torch

from jobs.benchmark.figures import Figure
from jobs.benchmark.measuring import waits

from .decoding import KINDS, epoch_of, open_loader, synchronize
from .setting import QUALITIES, GpuSetting

# uint8 (n, 3, 224, 224) in channels-last memory; labels (n,)
Batch = tuple[torch.Tensor, torch.Tensor]
_MEAN, _DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet, in grey levels of 0 to 255
_CLASSES = 1000
_WARM_UP = 12  # steps before the clock: compilation, the choice of kernels, the first batches
_GOAL = 0.95  # the least share of the rate with random tensors


def measure(setting: GpuSetting) -> Iterator[Figure]:
    """The ceiling, then each size of JPEG by each decoder: images/s, share of the ceiling, stall, busy."""
    model, name = _model(setting.device)
    job = setting.photographs("42 kB")
    shape = job.batch_size, 224, 224, 3
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=setting.device).permute(0, 3, 1, 2)
    labels = torch.arange(job.batch_size, device=setting.device)
    ceiling = train(itertools.repeat((pixels, labels)), model, setting.device, setting.seconds)
    yield Figure(f"{name} on random tensors of the device", [ceiling["rows_per_s"]], "images/s")
    yield Figure(f"{name} on random tensors: busy", [ceiling["busy"]], "%")
    for size, kind in itertools.product(QUALITIES, KINDS):
        job = setting.photographs(size)
        with closing(open_loader(setting, job, kind)) as loader:
            epochs = itertools.chain.from_iterable(epoch_of(loader, job, setting.device) for _ in itertools.count())
            found = train(epochs, model, setting.device, setting.seconds)
        source = f"{name} from JPEGs of {size} by {kind}"
        yield Figure(source, [found["rows_per_s"]], "images/s")
        yield Figure(
            f"{source}: of the rate of random tensors", [found["rows_per_s"] / ceiling["rows_per_s"]], "%", _GOAL
        )
        yield Figure(f"{source}: stall", [found["stall"]], "%")
        yield Figure(f"{source}: busy", [found["busy"]], "%")


def _model(device: torch.device) -> tuple[torch.nn.Module, str]:
    """ResNet-50, compiled; without a GPU, a small model that is not."""
    if device.type != "cuda":
        layers = torch.nn.Conv2d(3, 4, 7, 8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        return torch.nn.Sequential(*layers, torch.nn.Linear(4, _CLASSES)), "a small model"
    from torchvision.models import resnet50

    model = resnet50().to(device, memory_format=torch.channels_last)
    return torch.compile(model), "ResNet-50"  # type: ignore[return-value]


def train(batches: Iterable[Batch], model: torch.nn.Module, device: torch.device, seconds: float) -> dict[str, float]:
    """Trains for some seconds; returns images/s, and the shares of the time that it waited for batches and worked."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean, deviation = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (_MEAN, _DEVIATION))
    stall_s, rows, spans, begin = 0.0, 0, list[Any](), 0.0
    for step, (batch, wait_s, _) in enumerate(waits(batches)):
        if step == _WARM_UP:
            synchronize(device)
            stall_s, rows, spans, begin = 0.0, 0, [], time.perf_counter()
        elif step > _WARM_UP:
            stall_s += wait_s
        if batch is None or (begin and time.perf_counter() - begin > seconds):
            break
        pixels, labels = batch
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
        if step % 2:  # as a loop that logs its loss: the queue of the device does not run far ahead of the loader
            loss.item()
    synchronize(device)
    took_s = time.perf_counter() - begin
    busy_s = sum(first.elapsed_time(last) for first, last in spans) / 1000
    return {"rows": rows, "rows_per_s": rows / took_s, "stall": stall_s / took_s, "busy": busy_s / took_s}


class _Moment:
    """A CUDA event's stand-in where work is done when the call returns."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Self) -> float:
        return 1000 * (other.at - self.at)


def _event(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _Moment()
