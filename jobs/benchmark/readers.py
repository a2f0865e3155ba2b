"""How each reader is opened, all with the same cores."""

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
    own_into,
    pillow_into,
    touch,
)
from .setting import Job, start_ray


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An open reader: the rows that it claims to deliver in an epoch; what opens one, or measures a pass elsewhere."""

    claims: int
    open_pass: Callable[[int], Iterable[Batch]] = lambda _: ()
    elsewhere: Callable[[int], dict[str, Any]] | None = None


def open_decode(job: Job, stack: ExitStack, into: DecodeInto = pillow_into) -> Source:
    """Decoding alone: processes share the files in memory, and only sums and labels leave them."""
    path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "images.arrow")
    table = lance.dataset(job.uri).to_table(columns=list(job.columns))
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    pool = stack.enter_context(ProcessPoolExecutor(job.workers, multiprocessing.get_context("spawn")))

    def one_pass(_: int) -> Iterator[Batch]:  # a generator: no work begins before the clock does
        part = functools.partial(decode_part, path, job.batch_size, into)
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


def open_safe_lance(job: Job, _: ExitStack, *, pins: bool = False) -> Source:
    """SafeLanceDataset in a shuffling DataLoader, whose spawned workers decode while they collate."""
    dataset = SafeLanceDataset(job.uri)
    loader = get_safe_loader(
        dataset, job.batch_size, job.workers, shuffle=True, collate_fn=decode_rows, pin_memory=pins
    )
    return Source(claims=len(dataset), open_pass=lambda _: loader)


def open_lance_torch(job: Job, _: ExitStack, workers: int = 0) -> Source:
    """lance.torch's LanceDataset, sequential: in this process, or in spawned workers by fragment."""
    convert = {"to_tensor_fn": decode_arrow if job.is_images else vectors_arrow}
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
    if job.is_images:
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
    if not job.is_images:
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
    """raylance, rank 0 of 1, shuffled in windows; images are decoded in actors. `loads` are options of its loader."""
    start_ray(job)
    dataset = job.open(decode_fn)
    loader = stack.enter_context(dataset.loader(num_decoders=job.decoders, **loads))

    def one_pass(epoch: int) -> Iterator[Batch]:
        loader.set_epoch(epoch)
        batches = loader.iter_torch_batches(global_batch_size=job.batch_size, device=device)
        for data, numbers in two_columns(job, batches):
            yield data.permute(0, 2, 3, 1) if job.is_images else data, numbers  # channels last, as with the others

    return Source(claims=len(dataset), open_pass=one_pass)


def two_columns(job: Job, batches: Iterable[dict[str, torch.Tensor]]) -> Iterator[Batch]:
    """Dictionaries of columns → the two columns."""
    for batch in batches:
        yield batch[job.columns[0]], batch[job.columns[1]]


Reader = Callable[[Job, ExitStack], Source]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A reader of the tables."""

    open: Reader
    ceiling: str  # the reader that it is compared with
    tries: tuple[float, ...] = (1,)  # multiples of the cores to try as its workers; the best of them takes part


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
        "decode-own": Entry(open=functools.partial(open_decode, into=own_into), ceiling="decode-own"),
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
        "raylance-threads": Entry(open=functools.partial(open_raylance, runtime="threads"), ceiling="lance-torch"),
    },
}
PEERS = ("safe-lance", "lance-torch", "lance-torch-workers", "ray-data", "lancedb")
