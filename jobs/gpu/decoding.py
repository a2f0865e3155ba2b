"""The rates of decoding JPEGs to 224 x 224: by the cores, by the device, by raylance with each."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import lance
import numpy as np
import torch

import raylance
from jobs.benchmark.data import SIDE
from jobs.benchmark.decoding import own_into
from jobs.benchmark.figures import Figure
from jobs.benchmark.readers import open_decode
from jobs.benchmark.setting import Job, start_ray

from .setting import QUALITIES, GpuSetting

KINDS: dict[str, type[Any]] = {"Image": raylance.Image, "DeviceImage": raylance.images.DeviceImage}


def measure(setting: GpuSetting) -> Iterator[Figure]:
    """Images/s of each way, for each size of JPEG; nothing trains beside it."""
    for size in QUALITIES:
        job = setting.photographs(size)
        with ExitStack() as stack:
            source = open_decode(replace(job, batch_size=min(64, job.batch_size)), stack, own_into)
            rate = rate_of(lambda epoch, source=source: source.open_pass(epoch), setting)
            yield Figure(f"JPEGs of {size}: {setting.workers} cores decoding alone", [rate], "images/s")
        for name, decode in (("codec", _codec_alone), ("decoder of DeviceImage", _decoder_alone)):
            rate = rate_of(decode(job, setting.device), setting)
            yield Figure(f"JPEGs of {size}: the {name} alone, {setting.device.type}", [rate], "images/s")
        for kind in KINDS:
            with closing(open_loader(setting, job, kind)) as loader:
                rate = rate_of(lambda _, loader=loader, job=job: epoch_of(loader, job, setting.device), setting)
            yield Figure(f"JPEGs of {size}: raylance with {kind}", [rate], "images/s")


def open_loader(setting: GpuSetting, job: Job, kind: str) -> raylance.RankLoader:
    """A loader, rank 0 of 1: `Image` decodes in actors beside a shard actor, `DeviceImage` in this process."""
    decode = KINDS[kind]("image", (SIDE, SIDE))
    handle = job.open(decode=decode, remainder="drop")  # steps of one size, so that a model is compiled once
    if kind == "DeviceImage":
        return handle.loader(runtime="threads")
    start_ray(job)
    return handle.loader(runtime="ray", num_decoders=setting.decoders)


def epoch_of(
    loader: raylance.RankLoader, job: Job, device: torch.device
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Pixels (n, 3, 224, 224) and labels (n,) of the loader's next epoch."""
    for batch in loader.iter_torch_batches(global_batch_size=job.batch_size, device=device):
        yield batch["image"], batch["label"]


def rate_of(open_pass: Callable[[int], Iterable[tuple[Any, Any]]], setting: GpuSetting) -> float:
    """Rows/s of passes one after the other, for about `seconds`, after a first pass that is not timed."""
    for _ in open_pass(0):
        pass
    synchronize(setting.device)
    rows, begin = 0, time.perf_counter()
    for epoch in itertools.count(1):
        rows += sum(len(numbers) for _, numbers in open_pass(epoch))
        synchronize(setting.device)
        if (seconds := time.perf_counter() - begin) >= setting.seconds / 2:
            return rows / seconds
    raise AssertionError("the passes have no end")


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all work."""
    torch.get_device_module(device).synchronize()


def _files(job: Job) -> Iterator[list[np.ndarray]]:
    """The encoded images of a dataset, a list for each batch."""
    for batch in lance.dataset(job.uri).to_batches(columns=["image"], batch_size=job.batch_size):
        yield [np.frombuffer(value, np.uint8) for value in batch["image"].to_pylist()]


def _codec_alone(job: Job, device: torch.device) -> Callable[[int], Iterable[tuple[Any, Any]]]:
    """NvImageCodec on images in memory: whole pictures, not resized."""
    from nvidia import nvimgcodec

    if device.type == "cuda":
        decoder = nvimgcodec.Decoder(device_id=torch.cuda.current_device())
    else:
        only = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
        decoder = nvimgcodec.Decoder(device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY, backends=only)
    batches = list(_files(job))
    return lambda _: ((None, decoder.decode(files)) for files in batches)


def _decoder_alone(job: Job, device: torch.device) -> Callable[[int], Iterable[tuple[Any, Any]]]:
    """What `DeviceImage` opens, on images in memory."""
    decoder = raylance.images.DeviceImage("image", (SIDE, SIDE)).open_on(device)
    batches = [[torch.from_numpy(file.copy()) for file in files] for files in _files(job)]
    out = torch.empty((job.batch_size, SIDE, SIDE, 3), dtype=torch.uint8, device=device)
    draws = np.zeros((job.batch_size, 64))  # there is no augmentation that would use them

    def one_pass(_: int) -> Iterator[tuple[Any, Any]]:
        for files in batches:
            decoder.decode_batch(files, draws[: len(files)], out[: len(files)])
            yield out, files

    return one_pass
