"""Owns the side-by-side measurement of raylance and its peers; never asserts a speed, it prints what it saw.

    python jobs/benchmark.py                              # everything, about five minutes on two cores
    python jobs/benchmark.py --only images --readers decode,safe-lance,raylance --epochs 5 --json o.json
    python jobs/benchmark.py --against ../before          # beside the raylance of another checkout, in the same rounds

Two datasets are made once and kept: JPEG photographs with a label, and float32 vectors with an id; label and
id are the row's number. Every reader hands torch batches to this process and uses the same cores:
`--workers` processes, threads, tasks or actors. "decode" is the ceiling: the decode function alone, on bytes
in memory.

The clock covers, for every reader alike, one whole pass: from the call of `iter()` until the last batch is
touched. Opening, permuting, starting processes and one warm-up pass, which also fills the page cache, are
not timed. The last columns tell the first batch from the rest: how long it took, and the rate after it. That
rate is what a long epoch comes near to, but it flatters a reader that has much prefetched by then, in a short
pass half of the rows; and the CPU time that the consuming thread itself spends on getting a batch, which no
prefetching hides from training. Readers take turns, one pass each a round, so that noise of the machine hits all alike;
a ratio is the median of the ratios within the rounds.

To touch a batch is to sum a strided part of it. The sum does not depend on the order, so readers that share
a decode function must agree on it; it and the row numbers are checked after the pass. Exit status: 1 when a
reader delivered other rows than it claims or other values than its peers, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import io
import itertools
import json
import logging
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch
from lance.torch.data import LanceDataset, SafeLanceDataset, get_safe_loader
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader

WIDTH, HEIGHT, SIDE, DIMENSION, FRAGMENTS = 512, 384, 224, 768, 8
SLOPE, DEVIATIONS, QUALITY = 1.3, ((28.0,), (6.0,), (4.0,)), 88  # of the spectra; a file is then about 42 kB
OPPONENT = np.array([[1, 1, 1], [1, 0, -1], [0.5, -1, 0.5]])  # luminance, red-blue, green-magenta → RGB

Batch = tuple[Any, Any]  # (N, …) tensor, or the sum of its touched part; (N,) row numbers
DecodeOne = Callable[[bytes], np.ndarray]
DecodeInto = Callable[[bytes, np.ndarray], None]


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
    """An open reader: the rows that a pass of it claims to deliver, and what prepares the pass of a round, or measures
    it elsewhere.
    """

    claims: int
    open_pass: Callable[[int], Iterable[Batch]] = lambda _: ()
    elsewhere: Callable[[int], dict[str, Any]] | None = None


# --- data ---------------------------------------------------------------------------------------------------


@functools.cache
def textures(seed: int) -> list[Image.Image]:
    """Noise whose amplitude falls with frequency as in photographs, in decorrelated colours."""
    height, width = 2 * HEIGHT, 2 * WIDTH
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf  # no constant part
    made = []
    for number in range(16):
        real, imaginary = np.random.default_rng((seed, 0, number)).standard_normal((2, 3, *frequency.shape))
        planes = np.fft.irfft2((real + 1j * imaginary) / frequency**SLOPE, (height, width)).reshape(3, -1)
        planes *= np.array(DEVIATIONS) / planes.std(axis=1, keepdims=True)
        pixels = (128 + planes.T @ OPPONENT).clip(0, 255).astype(np.uint8)
        made.append(Image.fromarray(pixels.reshape(height, width, 3)))
    return made


def random_cut(rng: np.random.Generator, seed: int) -> Image.Image:
    """A piece of a texture with a place, flip, contrast and tint of its own."""
    texture = textures(seed)[rng.integers(16)]
    x, y = rng.integers(texture.width - WIDTH), rng.integers(texture.height - HEIGHT)
    piece = texture.crop((x, y, x + WIDTH, y + HEIGHT))
    if rng.random() < 0.5:
        piece = piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    curve = (np.arange(256) - 128) * rng.uniform(0.5, 1.3) + 128 + rng.uniform(-40, 40, (3, 1))
    return piece.point(curve.clip(0, 255).astype(int).ravel().tolist())


def photograph(seed: int, number: int) -> bytes:
    """One JPEG, of (seed, number) alone whoever makes it: pieces of texture with edges between them."""
    rng = np.random.default_rng((seed, 1, number))
    image = random_cut(rng, seed)
    for _ in range(rng.integers(2, 5)):
        mask = Image.new("L", (WIDTH // 2, HEIGHT // 2))
        (x, y), (rx, ry) = rng.integers(0, mask.size), rng.integers(16, 96, 2)
        ImageDraw.Draw(mask).ellipse((x - rx, y - ry, x + rx, y + ry), fill=255)
        image.paste(random_cut(rng, seed), mask=mask.resize(image.size, Image.Resampling.BICUBIC))
    image.save(encoded := io.BytesIO(), "JPEG", quality=QUALITY)
    return encoded.getvalue()


def image_batches(rows: int, seed: int, workers: int) -> Iterator[pa.RecordBatch]:
    """All photographs, made in parallel."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        files = pool.map(photograph, itertools.repeat(seed), range(rows), chunksize=64)
        for start in range(0, rows, 512):
            part = pa.array(itertools.islice(files, 512), pa.binary())
            yield pa.record_batch({"image": part, "label": np.arange(start, start + len(part))})


def vector_batches(rows: int, seed: int) -> Iterator[pa.RecordBatch]:
    """All vectors, standard normal."""
    rng = np.random.default_rng(seed)
    for start in range(0, rows, 8192):
        ids = np.arange(start, min(start + 8192, rows))
        values = rng.standard_normal(len(ids) * DIMENSION, np.float32)
        yield pa.record_batch({"vector": pa.FixedSizeListArray.from_arrays(values, DIMENSION), "id": ids})


def cached_dataset(path: Path, rows: int, batches: Iterator[pa.RecordBatch]) -> str:
    """The URI of the dataset at `path`; written beside it and renamed, so half a one is never found."""
    if not path.exists():
        print(f"making {path}", file=sys.stderr)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            first = next(batches)
            reader = pa.RecordBatchReader.from_batches(first.schema, itertools.chain([first], batches))
            lance.write_dataset(reader, str(part), max_rows_per_file=-(-rows // FRAGMENTS))
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return str(path)


# --- decoding, the same for all -----------------------------------------------------------------------------


def decode_one(data: bytes) -> np.ndarray:
    """One file → uint8 (224, 224, 3), with Pillow alone."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def decode_all(files: Iterable[bytes]) -> np.ndarray:
    """Files → uint8 (N, 224, 224, 3)."""
    return np.stack([decode_one(data) for data in files])


def decode_arrow(batch: pa.RecordBatch, **_: Any) -> Batch:
    """A record batch → pixels and labels."""
    return torch.from_numpy(decode_all(batch["image"].to_pylist())), torch.tensor(batch["label"].to_numpy())


def decode_rows(rows: list[dict[str, Any]]) -> Batch:
    """SafeLanceDataset's row dictionaries → pixels and labels."""
    pixels = torch.from_numpy(decode_all(row["image"] for row in rows))
    return pixels, torch.tensor([row["label"] for row in rows])


def touch(data: torch.Tensor) -> int:
    """Sums each 16th value along each axis but the first: all cache lines of a vector, 196 of an image."""
    part = data[(slice(None), *[slice(None, None, 16)] * (data.ndim - 1))].contiguous()
    return int((part.view(torch.int32) if part.is_floating_point() else part).sum())  # exact in any order


# --- readers ------------------------------------------------------------------------------------------------


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
    own_image().decode_into(data, np.zeros(41), out)


@functools.cache
def own_image(decode_fn: DecodeOne | None = None) -> Any:
    """How raylance is told to decode."""
    import raylance

    return raylance.Image("image", size=(SIDE, SIDE), decode_fn=decode_fn)


def open_safe_lance(job: Job, _: ExitStack) -> Source:
    """SafeLanceDataset in a shuffling DataLoader, whose spawned workers decode while they collate."""
    dataset = SafeLanceDataset(job.uri)
    loader = get_safe_loader(dataset, job.batch_size, job.workers, shuffle=True, collate_fn=decode_rows)
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

    def open_pass(epoch: int) -> DataLoader:  # a new one each time: once read, it stays at its end
        dataset = StreamingDataset(table, shuffle_seed=job.seed, epoch=epoch, transform=rows_of, **options)
        return DataLoader(dataset, batch_size=job.batch_size, collate_fn=stacked)

    return Source(claims=table.count_rows(), open_pass=open_pass)  # one split, so there is no surplus to drop


def open_raylance(job: Job, stack: ExitStack, decode_fn: DecodeOne | None = None) -> Source:
    """raylance, rank 0 of 1, shuffled in windows; images are decoded in `workers` actors."""
    import raylance

    start_ray(job)
    images = "image" in job.columns
    options: dict[str, Any] = {"order": "window", "seed": job.seed, "remainder": "ragged"}
    if images:
        options["decode"] = own_image(decode_fn)
    dataset = raylance.dataset(job.uri, columns=list(job.columns), **options)
    loader = dataset.loader(num_decoders=job.workers if images else 0)
    stack.callback(loader.close)

    def one_pass(epoch: int) -> Iterator[Batch]:
        loader.set_epoch(epoch)
        for data, numbers in two_columns(job, loader.iter_torch_batches(global_batch_size=job.batch_size)):
            yield data.permute(0, 2, 3, 1) if images else data, numbers  # channels last, as with the others

    return Source(claims=len(dataset), open_pass=one_pass)


def open_before(job: Job, stack: ExitStack, kind: str, name: str, checkout: Path) -> Source:
    """A reader with the raylance of another checkout, which measures in a process of its own."""
    command, env = [sys.executable, __file__, "--serve"], os.environ | {"PYTHONPATH": str(checkout)}
    child = stack.enter_context(subprocess.Popen(command, env=env, stdin=-1, stdout=-1, text=True, bufsize=1))

    def ask(question: Any) -> Any:
        print(json.dumps(question), file=child.stdin)
        if not (answer := child.stdout.readline()):
            raise SystemExit(f"{name} of {checkout} failed; what it said stands above")
        return json.loads(answer)

    return Source(claims=ask([kind, name, asdict(job)]), elsewhere=ask)


def serve() -> int:
    """The other side of `open_before`: a line of JSON for each line of JSON."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    kind, name, job = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        source = READERS[kind][name][0](Job(**job), stack)
        print(source.claims, file=answers)
        for line in sys.stdin:
            print(json.dumps(measure(source, int(line))), file=answers)
    return 0


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


# By dataset, then name: the reader, and the reader that is its ceiling.
Reader = Callable[[Job, ExitStack], Source]
READERS: dict[str, dict[str, tuple[Reader, str]]] = {
    "images": {
        "decode": (open_decode, "decode"),
        "safe-lance": (open_safe_lance, "decode"),
        "lance-torch": (open_lance_torch, "decode"),
        "lance-torch-workers": (lambda job, stack: open_lance_torch(job, stack, job.workers), "decode"),
        "ray-data": (open_ray_data, "decode"),
        "lancedb": (open_lancedb, "decode"),
        "raylance": (functools.partial(open_raylance, decode_fn=decode_one), "decode"),
        "decode-own": (open_own_decode, "decode-own"),
        "raylance-own": (open_raylance, "decode-own"),
        "raylance-own-256": (lambda job, stack: open_raylance(replace(job, batch_size=256), stack), "decode-own"),
    },
    "vectors": {
        "lance-torch": (open_lance_torch, "lance-torch"),
        "ray-data": (open_ray_data, "lance-torch"),
        "lancedb": (open_lancedb, "lance-torch"),
        "raylance": (open_raylance, "lance-torch"),
    },
}


# --- measuring ----------------------------------------------------------------------------------------------


def measure(source: Source, epoch: int) -> dict[str, Any]:
    """Times one pass; the head of this file says what the clock covers."""
    if source.elsewhere:
        return source.elsewhere(epoch)
    made = source.open_pass(epoch)
    gc.collect()  # nobody pays for the garbage of the reader before
    numbers, checksum, first_s, cpu_s = [torch.empty(0, dtype=torch.int64)], 0, 0.0, 0.0
    start = time.perf_counter()
    batches = iter(made)
    while True:
        begin = time.thread_time()
        batch = next(batches, None)
        cpu_s += time.thread_time() - begin
        if batch is None:
            break
        data, ids = batch
        first_s = first_s or time.perf_counter() - start
        checksum += data if isinstance(data, int) else touch(data)
        numbers.append(ids.clone())  # a view would keep the whole batch
    seconds = time.perf_counter() - start
    rows, later = torch.cat(numbers), sum(map(len, numbers[2:]))  # the first one is the empty one
    counts = {"rows": len(rows), "distinct_rows": len(rows.unique()), "checksum": checksum}
    rates = {"rows_per_s": len(rows) / seconds, "later_rows_per_s": later / (seconds - first_s)}
    thread_ms = 1000 * cpu_s / max(1, len(numbers) - 1)
    return {**counts, **rates, "seconds": seconds, "first_batch_s": first_s, "thread_ms": thread_ms}


def run_rounds(job: Job, readers: dict[str, Reader], epochs: int) -> dict[str, dict[str, Any]]:
    """Opens and warms up every reader, then lets each make one pass a round; returns all by name."""
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        sources: dict[str, Source] = {}
        for name, reader in readers.items():
            try:
                sources[name] = reader(job, stack)
            except ImportError as error:
                print(f"{name}: skipped, {error}")
                continue
            warm_up = measure(sources[name], 0)
            results[name] = {"claims": sources[name].claims, "warm_up": warm_up, "passes": []}
        for epoch in range(1, epochs + 1):
            print(f"round {epoch} of {epochs}", file=sys.stderr)
            turn = epoch % max(1, len(sources))
            for name in [*sources][turn:] + [*sources][:turn]:  # so that none always comes first
                results[name]["passes"].append(measure(sources[name], epoch))
    return results


def fault(result: dict[str, Any], peer: dict[str, Any]) -> str:
    """What is wrong with the rows that a reader delivered, or an empty string."""
    claims = result["claims"]
    for one in result["passes"]:
        if (one["rows"], one["distinct_rows"]) != (claims, claims):
            return f"claims {claims} rows, delivered {one['rows']}, {one['distinct_rows']} of them distinct"
        if one["checksum"] != peer["passes"][0]["checksum"]:
            return "other values than its peers"
    return ""


def median(result: dict[str, Any], key: str) -> float:
    """The median of one number over the passes of a reader."""
    return statistics.median(one[key] for one in result["passes"])


def ratio(result: dict[str, Any], other: dict[str, Any] | None, key: str = "rows_per_s") -> str:
    """The median ratio of two numbers of the same round."""
    if other is None:
        return "–"
    pairs = zip(result["passes"], other["passes"], strict=True)
    return f"{statistics.median(one[key] / max(two[key], 1e-9) for one, two in pairs):.2f}"


def print_table(kind: str, ceilings: dict[str, str], results: dict[str, dict[str, Any]]) -> bool:
    """Prints one table; False when a reader delivered other rows than it claims, or other values."""
    print(f"\n{'':<62}  first batch        after it   CPU of the thread")
    print(f"{kind:<20}  rows/s          min–max / ceiling / raylance    seconds  rows/s / ceiling   ms a batch")
    sound = True
    for name, result in results.items():
        ceiling = ceilings[name]
        peer = next(other for key, other in results.items() if ceilings[key] == ceiling)
        rates = [one["rows_per_s"] for one in result["passes"]]
        remark = fault(result, peer)
        sound = sound and not remark
        print(
            f"{name:<20} {median(result, 'rows_per_s'):>7.0f} {f'{min(rates):.0f}–{max(rates):.0f}':>16}"
            f" {ratio(result, results.get(ceiling)):>9} {ratio(result, results.get('raylance')):>10}"
            f" {median(result, 'first_batch_s'):>10.2f} {median(result, 'later_rows_per_s'):>7.0f}"
            f" {ratio(result, results.get(ceiling), 'later_rows_per_s'):>9} {median(result, 'thread_ms'):>12.2f}"
            f"  {remark}".rstrip()
        )
    return sound


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    versions = {"python": platform.python_version()}
    for package in ("raylance", "ray", "pylance", "lancedb", "torch", "pillow", "pyarrow", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"cores": os.cpu_count(), **versions, **{key: str(value) for key, value in vars(args).items()}}


# --- command line -------------------------------------------------------------------------------------------


def positive_integer(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    names = sorted({name for readers in READERS.values() for name in readers})
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    add = functools.partial(parser.add_argument, metavar="N", type=positive_integer)
    add("--images", default=4000, help="photographs (default %(default)s)")
    add("--vectors", default=200_000, help="vectors (default %(default)s)")
    add("--batch-size", default=64, help="images a batch (default %(default)s)")
    add("--vector-batch-size", default=1024, help="vectors a batch (default %(default)s)")
    add("--workers", default=os.cpu_count(), help="cores that each reader may use (default %(default)s)")
    add("--epochs", default=3, help="timed rounds (default %(default)s)")
    add("--seed", type=int, default=0, help="of the data and of the orders (default %(default)s)")
    folder = Path(tempfile.gettempdir(), "raylance-benchmark")
    add("--data-dir", type=Path, default=folder, metavar="DIR", help="of the datasets (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all raw numbers here")
    add("--readers", type=str, metavar="A,B", default=",".join(names), help="some of %(default)s")
    add("--against", type=Path, metavar="DIR", help="a checkout whose raylance takes part, as …-before")
    parser.add_argument("--only", choices=READERS, help="measure this dataset only")
    args = parser.parse_args(argv)
    chosen = set(args.readers.split(","))
    if unknown := chosen - set(names):
        parser.error(f"--readers: there is no {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    if not any(chosen & set(READERS[kind]) for kind in READERS if args.only in (None, kind)):
        parser.error(f"--readers: {args.readers} cannot read {args.only}")
    if args.against and not (args.against / "raylance" / "__init__.py").exists():
        parser.error(f"--against: {args.against} is no checkout, it has no raylance/__init__.py")
    if args.seed < 0:
        parser.error(f"--seed: {args.seed} is negative, and NumPy's seeds start at 0")
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json: {args.json} is a folder, or lies in none")
    try:
        args.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--data-dir: cannot be a folder: {error}")
    return args


def choose(kind: str, args: argparse.Namespace) -> dict[str, tuple[Reader, str]]:
    """The readers of a dataset that the command line names, those of another checkout behind them."""
    chosen = {name: READERS[kind][name] for name in READERS[kind] if name in args.readers.split(",")}
    for name in [name for name in chosen if name.startswith("raylance")] if args.against else []:
        before = functools.partial(open_before, kind=kind, name=name, checkout=args.against.absolute())
        chosen[f"{name}-before"] = before, chosen[name][1]
    return chosen


def main(argv: list[str] | None = None) -> int:
    """Measures what the command line chose; returns the exit status."""
    if (sys.argv[1:] if argv is None else argv) == ["--serve"]:
        return serve()
    args = parse(argv)
    report: dict[str, Any] = {"environment": environment(args)}
    print(*(f"{key}={value}" for key, value in report["environment"].items()))
    images = image_batches(args.images, args.seed, args.workers)
    vectors = vector_batches(args.vectors, args.seed)
    sets = {
        "images": (("image", "label"), args.images, args.batch_size, images),
        "vectors": (("vector", "id"), args.vectors, args.vector_batch_size, vectors),
    }
    sound = True
    for kind, (columns, rows, batch_size, batches) in sets.items():
        chosen = choose(kind, args)
        if args.only not in (None, kind) or not chosen:
            continue
        path = args.data_dir.absolute() / f"{kind}-{rows}-seed{args.seed}.lance"
        shared = {"columns": columns, "rows": rows, "workers": args.workers, "seed": args.seed}
        job = Job(uri=cached_dataset(path, rows, batches), batch_size=batch_size, **shared)
        report[kind] = run_rounds(job, {name: reader for name, (reader, _) in chosen.items()}, args.epochs)
        sound = print_table(kind, {name: ceiling for name, (_, ceiling) in chosen.items()}, report[kind]) and sound
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
