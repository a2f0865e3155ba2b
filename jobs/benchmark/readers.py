"""Owns how each reader is opened, all with the same cores; never measures."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch
from lance.torch.data import LanceDataset, SafeLanceDataset, get_safe_loader
from torch.utils.data import DataLoader

from .data import DIMENSION, SIDE
from .decoding import (
    Batch,
    DecodeInto,
    DecodeOne,
    decode_all,
    decode_arrow,
    decode_nothing,
    decode_one,
    decode_rows,
    touch,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all readers of one dataset share; `columns` are the payload and the row's number."""

    uri: str
    columns: tuple[str, str]
    rows: int
    batch_size: int
    workers: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An open reader: the rows that an epoch of it claims to deliver, and what opens an epoch, or measures a pass
    elsewhere.
    """

    claims: int
    open_pass: Callable[[int], Iterable[Batch]] = lambda _: ()
    elsewhere: Callable[[int], dict[str, Any]] | None = None


def open_decode(job: Job, stack: ExitStack, into: DecodeInto | None = None) -> Source:
    """Decoding alone: processes share the files in memory, and only sums and labels leave them."""
    path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "images.arrow")
    table = lance.dataset(job.uri).to_table(columns=list(job.columns))
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    pool = stack.enter_context(ProcessPoolExecutor(job.workers, multiprocessing.get_context("spawn")))

    def one_pass(_: int) -> Iterator[Batch]:  # a generator: no work begins before the clock does
        part = functools.partial(decode_part, path, job.batch_size, into or pillow_into)
        yield from pool.map(part, range(0, job.rows, job.batch_size))

    return Source(claims=job.rows, open_pass=one_pass)


def decode_part(path: Path, batch_size: int, into: DecodeInto, start: int) -> Batch:
    """Decodes one batch in a process of `open_decode`."""
    table, buffer = files_and_buffer(path, batch_size)
    part = table.slice(start, batch_size)
    for data, out in zip(part["image"].to_pylist(), buffer, strict=False):
        into(data, out)
    return touch(torch.from_numpy(buffer[: len(part)])), torch.tensor(part["label"].to_numpy())


@functools.cache
def files_and_buffer(path: Path, batch_size: int) -> tuple[pa.Table, np.ndarray]:
    """Made once a process: the files, mapped, and memory for pixels; fresh memory a batch would be dear."""
    torch.set_num_threads(1)  # the processes are the parallelism
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    return table, np.zeros((batch_size, SIDE, SIDE, 3), np.uint8)


def pillow_into(data: bytes, out: np.ndarray) -> None:
    """The common decode function, into given memory."""
    out[:] = decode_one(data)


def open_own_decode(job: Job, stack: ExitStack) -> Source:
    """The built-in decoder of raylance alone."""
    own_image()  # fails here, and not in a process, where raylance cannot be imported
    return open_decode(job, stack, own_into)


def own_into(data: bytes, out: np.ndarray) -> None:
    """The decoder of raylance, into given memory; the draws are for augmentation, of which there is none."""
    own_rows().decode_into(data, np.zeros(41), out)


@functools.cache
def own_rows() -> Any:
    """What decodes rows in this process: it keeps its memory, as in a decode actor."""
    return own_image().open()


@functools.cache
def own_image(decode_fn: DecodeOne | None = None) -> Any:
    """How raylance decodes."""
    import raylance

    return raylance.Image("image", size=(SIDE, SIDE), decode_fn=decode_fn)


def open_safe_lance(job: Job, _: ExitStack, *, pins: bool = False) -> Source:
    """SafeLanceDataset in a shuffling DataLoader, whose spawned workers decode while they collate."""
    dataset = SafeLanceDataset(job.uri)
    loader = get_safe_loader(
        dataset, job.batch_size, job.workers, shuffle=True, collate_fn=decode_rows, pin_memory=pins
    )
    return Source(claims=len(dataset), open_pass=lambda _: loader)


def open_lance_torch(job: Job, _: ExitStack, workers: int = 0) -> Source:
    """lance.torch's LanceDataset, sequential: in this process, or in spawned workers by fragment."""
    convert = {"to_tensor_fn": decode_arrow if "image" in job.columns else vectors_arrow}
    dataset = LanceDataset(job.uri, job.batch_size, columns=list(job.columns), **convert)
    options: dict[str, Any] = {"batch_size": None, "num_workers": workers}
    if workers:
        options |= {"persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = DataLoader(dataset, **options)
    return Source(claims=job.rows, open_pass=lambda _: loader)


def vectors_arrow(batch: pa.RecordBatch, **_: Any) -> Batch:
    """A record batch → vectors (N, 768) and ids, without a copy."""
    vectors = batch["vector"].flatten().to_numpy().reshape(-1, DIMENSION)
    return torch.from_dlpack(vectors), torch.from_dlpack(batch["id"].to_numpy())


def open_ray_data(job: Job, _: ExitStack) -> Source:
    """Ray Data, as many tasks at a time as there are cores; images are decoded in a map stage."""
    import ray.data

    start_ray(job)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(cpu=job.workers)
    # Its best of a few settings: longer scans and deeper prefetching than by default.
    scanner = {"batch_size": 8 * job.batch_size}
    dataset = ray.data.read_lance(job.uri, columns=list(job.columns), scanner_options=scanner)
    claims = dataset.count()
    if "image" in job.columns:
        dataset = dataset.map_batches(
            lambda batch: {**batch, "image": decode_all(batch["image"])}, batch_size=job.batch_size
        )
    options = {"batch_size": job.batch_size, "prefetch_batches": 4}
    return Source(claims=claims, open_pass=lambda _: two_columns(job, dataset.iter_torch_batches(**options)))


def open_lancedb(job: Job, _: ExitStack) -> Source:
    """LanceDB's StreamingDataset with its own threads, shuffled by row, vectors in clumps of 256 rows."""
    streams = lancedb_streams(job)
    # One split, so there is no surplus to drop; a new one each time: once read, it stays at its end.
    return Source(claims=job.rows, open_pass=lambda epoch: streams(epoch)[1])


def lancedb_streams(job: Job) -> Callable[[int], tuple[Any, DataLoader]]:
    """What makes LanceDB's dataset of an epoch, and the loader of its batches."""
    import lancedb
    from lancedb.streaming import StreamingDataset

    folder, name = os.path.split(job.uri)
    table = lancedb.connect(folder).open_table(name.removesuffix(".lance"))
    convert: Callable[[pa.RecordBatch], Batch] = decode_arrow
    options: dict[str, Any] = {"columns": list(job.columns), "transform_parallelism": job.workers}
    if "image" not in job.columns:
        convert = vectors_arrow
        options |= {"shuffle_clump_size": 256, "read_batch_size": job.batch_size}

    def rows_of(batch: pa.RecordBatch) -> list[Batch]:
        return list(zip(*convert(batch), strict=True))

    def stacked(rows: list[Batch]) -> Batch:
        data, numbers = zip(*rows, strict=True)
        return torch.stack(data), torch.stack(numbers)

    def make(epoch: int) -> tuple[Any, DataLoader]:
        dataset = StreamingDataset(table, shuffle_seed=job.seed, epoch=epoch, transform=rows_of, **options)
        return dataset, DataLoader(dataset, batch_size=job.batch_size, collate_fn=stacked)

    return make


def open_raylance(
    job: Job, stack: ExitStack, decode_fn: DecodeOne | None = None, *, device: str = "cpu", **loads: Any
) -> Source:
    """raylance, rank 0 of 1, shuffled in windows; images are decoded in `workers` actors. `loads` are options of its
    loader.
    """
    import raylance

    start_ray(job)
    images = "image" in job.columns
    options: dict[str, Any] = {"order": "window", "seed": job.seed, "remainder": "ragged"}
    if images:
        options["decode"] = own_image(decode_fn)
    dataset = raylance.dataset(job.uri, columns=list(job.columns), **options)
    loader = dataset.loader(num_decoders=job.workers if images else 0, **loads)
    stack.callback(loader.close)

    def one_pass(epoch: int) -> Iterator[Batch]:
        loader.set_epoch(epoch)
        batches = loader.iter_torch_batches(global_batch_size=job.batch_size, device=device)
        for data, numbers in two_columns(job, batches):
            yield data.permute(0, 2, 3, 1) if images else data, numbers  # channels last, as with the others

    return Source(claims=len(dataset), open_pass=one_pass)


def two_columns(job: Job, batches: Iterable[dict[str, torch.Tensor]]) -> Iterator[Batch]:
    """Dictionaries of columns → the two columns."""
    for batch in batches:
        yield batch[job.columns[0]], batch[job.columns[1]]


def start_ray(job: Job) -> None:
    """One Ray for all. Its CPUs are tokens: the idle actors of one reader must not keep them from another."""
    import ray

    if not ray.is_initialized():
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        ray.init(address="local", num_cpus=8 * job.workers + 8, include_dashboard=False, **quiet)


Reader = Callable[[Job, ExitStack], Source]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A reader of the tables.

    Attributes:
        open: Opens it.
        ceiling: Name of the reader that it is compared with.
        tries: Multiples of the cores to try as its workers; the best of them takes part.
    """

    open: Reader
    ceiling: str
    tries: tuple[float, ...] = (1,)


_TRIES = (1, 1.5, 2)
# By dataset, then name.
READERS: dict[str, dict[str, Entry]] = {
    "images": {
        "decode": Entry(open=open_decode, ceiling="decode"),
        "safe-lance": Entry(open=open_safe_lance, ceiling="decode", tries=_TRIES),
        "lance-torch": Entry(open=open_lance_torch, ceiling="decode"),
        "lance-torch-workers": Entry(
            open=lambda job, stack: open_lance_torch(job, stack, job.workers), ceiling="decode", tries=_TRIES
        ),
        "ray-data": Entry(open=open_ray_data, ceiling="decode", tries=_TRIES),
        "lancedb": Entry(open=open_lancedb, ceiling="decode", tries=_TRIES),
        "raylance": Entry(open=functools.partial(open_raylance, decode_fn=decode_one), ceiling="decode"),
        "decode-own": Entry(open=open_own_decode, ceiling="decode-own"),
        "raylance-own": Entry(open=open_raylance, ceiling="decode-own"),
        "raylance-own-256": Entry(
            open=lambda job, stack: open_raylance(replace(job, batch_size=256), stack), ceiling="decode-own"
        ),
        "raylance-free": Entry(
            open=functools.partial(open_raylance, decode_fn=decode_nothing), ceiling="raylance-free"
        ),
    },
    "vectors": {
        "lance-torch": Entry(open=open_lance_torch, ceiling="lance-torch"),
        "ray-data": Entry(open=open_ray_data, ceiling="lance-torch", tries=_TRIES),
        "lancedb": Entry(open=open_lancedb, ceiling="lance-torch", tries=_TRIES),
        "raylance": Entry(open=open_raylance, ceiling="lance-torch"),
    },
}
PEERS = ("safe-lance", "lance-torch", "lance-torch-workers", "ray-data", "lancedb")
