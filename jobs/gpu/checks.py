"""The checks that batches on a device are those of the CPU, and that passes leave no memory there."""

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch

import raylance

from .pictures import odd_picture

_ROWS, _BATCH = 997, 64  # a last step that is not full
_WIDE, _LOADED_ROWS = 4096, 20_000
_LOAD = 24  # matrix products before each batch is read
_FREE_BYTES = 64 << 20  # what a device may lose to libraries between two measurements
_CLOSE = 8  # grey levels, mean over a picture: tiny pictures have colours at half their resolution


@dataclass(frozen=True, slots=True)
class Check:
    """A question, whether it holds, and what was found."""

    name: str
    holds: bool
    found: str


def check_batches(device: torch.device, folder: Path) -> Iterator[Check]:
    """Batches of all dtypes, in all ways to ask for them, by threads and through Ray."""
    uri = _write(folder / "dtypes.lance", _every_dtype(_ROWS))
    handle = raylance.dataset(uri, order="window", seed=3, remainder="pad")
    asked: dict[str, dict[str, Any]] = {
        "as stored": {"pad_lists": {"tokens": 0}},
        "one batch ahead": {"pad_lists": {"tokens": 0}, "prefetch_batches": 0},
        "eight batches ahead": {"pad_lists": {"tokens": raylance.Pad(-1, multiple=8)}, "prefetch_batches": 8},
        "jagged": {"pad_lists": {"tokens": "jagged"}},
        "other dtypes": {"pad_lists": {"tokens": 0}, "dtypes": {"int8": torch.float32, "float64": torch.bfloat16}},
        "with row offsets": {"pad_lists": {"tokens": 0}, "with_row_offset": True},
        "by a function": {"collate_fn": _collate},
    }
    for runtime, (name, options) in itertools.product(("threads", "ray"), asked.items()):
        with handle.loader(runtime=runtime, num_decoders=0) as on_cpu, handle.loader(runtime=runtime) as on_device:
            wanted = on_cpu.iter_torch_batches(batch_size=_BATCH, device="cpu", **options)
            found = on_device.iter_torch_batches(batch_size=_BATCH, device=device, **options)
            yield _compared(f"batches, {name}, {runtime}", wanted, found, device)
    with handle.loader(runtime="threads") as loader:
        options = {"batch_size": _BATCH, "device": "cpu", "pad_lists": {"tokens": 0}}
        wanted = list(loader.iter_torch_batches(**options))
        loader.set_epoch(0)
        pinned = list(loader.iter_torch_batches(**options, pin_memory=True))
        tensors = [value for batch in pinned for value in batch.values() if isinstance(value, torch.Tensor)]
        if device.type == "cuda":
            share = sum(tensor.is_pinned() for tensor in tensors) / len(tensors)
            yield Check("pin_memory: all tensors are pinned", share == 1, f"{share:.0%}")
        moved = ({name: _to(value, device) for name, value in batch.items()} for batch in pinned)
        yield _compared("batches, pinned and moved by the caller", wanted, moved, device)


def check_positions(device: torch.device, folder: Path) -> Iterator[Check]:
    """Breaks, resumes and two loaders at a time."""
    uri = _write(folder / "dtypes.lance", _every_dtype(_ROWS))
    handle = raylance.dataset(uri, columns=["id", "vector"], order="window", seed=4, remainder="ragged")
    options: dict[str, Any] = {"batch_size": _BATCH, "device": device, "with_row_offset": True}
    with handle.loader() as loader:
        wanted = list(loader.iter_torch_batches(**options | {"device": "cpu"}))
    with handle.loader() as loader:
        found = list(itertools.islice(loader.iter_torch_batches(**options), 5))
        found += list(itertools.islice(loader.iter_torch_batches(**options), 3))
        state = loader.state_dict()
    with handle.loader() as resumed:
        resumed.load_state_dict(state)
        found += list(resumed.iter_torch_batches(**options))
        yield _compared("two breaks and a resume in a new loader", wanted, found, device)
    with handle.loader() as one, handle.loader() as other:
        pairs = list(zip(one.iter_torch_batches(**options), other.iter_torch_batches(**options), strict=True))
    for number, batches in enumerate(zip(*pairs, strict=True), 1):
        yield _compared(f"loader {number} of two that take turns", wanted, batches, device)


def check_streams(device: torch.device, folder: Path) -> Iterator[Check]:
    """Batches that are read late, on several streams, while their memory is wanted for others.

    Each batch is read after long work on the consumer's stream and freed at once, and its memory is overwritten on the
    consumer's stream. A copy that is not awaited, or memory that is given away too early, shows as a wrong sum.
    """
    rows = np.random.default_rng(0).integers(0, 1 << 20, (_LOADED_ROWS, 512), dtype=np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 512)
    uri = _write(folder / "numbers.lance", pa.table({"id": np.arange(len(rows)), "numbers": column}))
    sums = rows.astype(np.int64).sum(1)
    handle = raylance.dataset(uri, order="window", seed=5, remainder="ragged")
    streams: dict[str, Callable[[], Any]] = {"the default stream": lambda: torch.cuda.default_stream(device)}
    if device.type == "cuda":
        streams["a stream of the consumer"] = lambda: torch.cuda.Stream(device)
    for (name, make), runtime in itertools.product(streams.items(), ("threads", "ray")):
        with handle.loader(runtime=runtime, num_decoders=0) as loader:
            batches = loader.iter_torch_batches(batch_size=_BATCH * 8, device=device, prefetch_batches=3)
            read = _read_late(batches, device, make if device.type == "cuda" else None)
            known = [(ids.clip(0, len(sums) - 1), found) for ids, found in read]  # wrong ids may be any number
            wrong = sum(int((sums[ids] != found).sum()) for ids, found in known)
        yield Check(f"rows read under load on {name}, {runtime}", wrong == 0, f"{wrong} of {len(rows)} rows wrong")


def _read_late(
    batches: Iterable[dict[str, torch.Tensor]], device: torch.device, make_stream: Callable[[], Any] | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of each batch, and the sums of its rows, by work that the device does long after the batch was freed."""
    load = torch.randn((_WIDE, _WIDE), device=device, dtype=torch.bfloat16) if make_stream else None
    found = []
    with torch.cuda.stream(make_stream() if make_stream else None):
        for batch in batches:
            for _ in range(_LOAD if load is not None else 0):
                torch.mm(load, load)
            found.append((batch["id"].clone(), batch["numbers"].sum(1, dtype=torch.int64)))
            shape = batch["numbers"].shape
            del batch
            for _ in range(4):
                torch.full(shape, -1, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [(ids.cpu().numpy(), sums.cpu().numpy()) for ids, sums in found]


def check_pictures(device: torch.device, folder: Path, number: int) -> Iterator[Check]:
    """`DeviceImage` on a device against `Image`, on odd pictures: the same rows are good, and the pixels are close."""
    pictures, damaged = zip(*(odd_picture(0, each) for each in range(number)), strict=True)
    table = pa.table({"id": np.arange(number), "image": pa.array(pictures, pa.binary())})
    uri = _write(folder / "odd.lance", table)
    for name, settings in (
        ("whole", {}),
        ("cropped and flipped", {"augment": raylance.RandomResizedCrop(), "hflip": 0.5}),
    ):
        (wanted, valid, _), (pixels, ours, _) = (
            _decoded(uri, kind("image", 224, **settings), device, on_bad_row="mask", max_bad_rows=None)
            for kind in (raylance.Image, raylance.images.DeviceImage)
        )
        # A codec may accept damage that another one refuses, and make other pixels of it.
        differ, broken = valid != ours, torch.tensor(damaged)
        found = f"{int((differ & ~broken).sum())} intact ones differ, {int((differ & broken).sum())} damaged ones"
        yield Check(f"pictures, {name}: the same are good", not (differ & ~broken).any(), found)
        apart = (wanted - pixels).abs().flatten(1)
        intact, rest = apart[valid & ours & ~broken], apart[valid & ours & broken]
        # A batch with a bad row is decoded row by row: what the codec leaves to Image shows among good rows alone.
        good = f"id in ({', '.join(map(str, np.flatnonzero(valid).tolist()))})"
        left = _decoded(uri, raylance.images.DeviceImage("image", 224, **settings), device, filter=good)[2]
        found = f"{_apart(intact)}; {left} of {int(valid.sum())} decoded by Image; damaged ones: {_apart(rest)}"
        yield Check(f"pictures, {name}: intact ones are close", _worst(intact) <= _CLOSE, found)


def _worst(apart: torch.Tensor) -> float:
    """The largest mean difference of a picture."""
    return float(apart.float().mean(1).max()) if len(apart) else 0.0


def _apart(apart: torch.Tensor) -> str:
    """Describes differences (n, values of a picture), of 255."""
    if not len(apart):
        return "none"
    return (
        f"{len(apart)}, {float((apart == 0).float().mean()):.1%} of values equal, "
        f"{float((apart <= 2).float().mean()):.2%} within 2 of 255, a picture's mean difference at most "
        f"{_worst(apart):.2f}, largest {int(apart.max())}"
    )


def _decoded(uri: str, decode: Any, device: torch.device, **options: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """All pixels, int16 (n, 3, H, W); which rows are good, bool (n,); how many `Image` decoded for `DeviceImage`."""
    handle = raylance.dataset(uri, columns=[decode], order="sequential", remainder="ragged", **options)
    with handle.loader(runtime="threads") as loader:
        batches = list(loader.iter_torch_batches(batch_size=_BATCH, device=device))
        fallbacks = loader.stats()["fallback_rows"]
    pixels = torch.cat([batch["image"].cpu() for batch in batches]).short()
    valid = [batch["_valid"].cpu() for batch in batches if "_valid" in batch]
    return pixels, torch.cat(valid) if valid else torch.ones(len(pixels), dtype=torch.bool), fallbacks


def check_memory(device: torch.device, folder: Path, passes: int) -> Iterator[Check]:
    """Memory of the device after many passes, each ended by a break or at the end of the epoch."""
    if device.type != "cuda":
        return
    encoded = pa.array([odd_picture(1, each)[0] for each in range(256)], pa.binary())
    uri = _write(folder / "pictures.lance", pa.table({"id": np.arange(256), "image": encoded}))
    decode = raylance.images.DeviceImage("image", 224)
    handle = raylance.dataset(uri, columns=[decode], on_bad_row="mask", max_bad_rows=None)
    held = [_held(device)]
    with handle.loader(runtime="threads") as loader:
        for number in range(passes):
            batches = loader.iter_torch_batches(batch_size=32, device=device)
            for _ in itertools.islice(batches, 3 if number % 2 else None):
                pass
            if number in (passes // 5, passes - 1):
                held.append(_held(device))
    del batches, _
    held.append(_held(device))
    shown = "; ".join(
        f"{name} {' → '.join(map(_mib, held))}" for name, held in zip(_HELD, zip(*held, strict=True), strict=True)
    )
    _, early, late, closed = held
    grows = any(after - before > _FREE_BYTES for before, after in zip(early, late, strict=True))
    name = f"memory of the device before, after {passes // 5} and {passes} passes, and closed"
    yield Check(name, not grows and closed[0] <= held[0][0], shown)


_HELD = "tensors", "of torch", "of the device"


def _held(device: torch.device) -> tuple[int, int, int]:
    """Bytes of tensors, those that torch keeps for tensors, and all that are taken of the device."""
    gc.collect()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total - free


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _compared(name: str, wanted: Iterable[Any], found: Iterable[Any], device: torch.device) -> Check:
    """Whether batches are equal: names, dtypes, shapes, layout, values bit by bit, and the device that holds them."""
    rows = 0
    for number, (one, other) in enumerate(itertools.zip_longest(wanted, found)):
        if one is None or other is None:
            return Check(name, False, f"{'more' if one is None else 'fewer'} batches than {number}")
        if one.keys() != other.keys():
            return Check(name, False, f"batch {number} has {sorted(other)}, not {sorted(one)}")
        for column in one:
            if fault := _fault(one[column], other[column], device):
                return Check(name, False, f"batch {number}, column {column}: {fault}")
        rows += len(one["id"])
    return Check(name, rows > 0, f"{rows} rows equal")


def _fault(wanted: Any, found: Any, device: torch.device) -> str:
    """What differs between two columns of a batch; empty if nothing does."""
    if not isinstance(wanted, torch.Tensor):
        return "" if wanted == found else f"{found!r}, not {wanted!r}"
    if found.device.type != device.type:
        return f"lies on {found.device}"
    if wanted.is_nested:
        pairs = zip((wanted.values(), wanted.offsets()), (found.values(), found.offsets()), strict=True)
        return next(filter(None, (_fault(one, other, device) for one, other in pairs)), "")
    if (wanted.dtype, wanted.shape, wanted.stride()) != (found.dtype, found.shape, found.stride()):
        return f"{found.dtype} {tuple(found.shape)} {found.stride()}, not {wanted.dtype} {tuple(wanted.shape)}"
    # Bits, so that NaN equals NaN.
    one, other = (tensor.contiguous().cpu().flatten().view(torch.uint8) for tensor in (wanted, found))
    return "" if torch.equal(one, other) else f"{int((one != other).sum())} of {len(one)} bytes differ"


def _collate(arrays: dict[str, Any]) -> dict[str, Any]:
    """A batch of a caller's own: tensors in a dict, one of them of two columns."""
    return {
        "id": torch.from_numpy(arrays["id"]),
        "both": torch.stack([torch.from_numpy(arrays[name]).double() for name in ("float32", "int16")], 1),
        "text": list(arrays["text"]),
    }


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _every_dtype(rows: int) -> pa.Table:
    """A column of each dtype that tensors have, with extremes and NaN; lists of one and of any length; text."""
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"id": np.arange(rows), "bool": rng.random(rows) < 0.5}
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        bounds = np.iinfo(name)
        columns[name] = rng.integers(bounds.min, bounds.max, rows, dtype=name, endpoint=True)
    for name in ("float16", "float32", "float64"):
        columns[name] = rng.standard_normal(rows).astype(name)
        columns[name][:3] = np.nan, np.inf, np.finfo(name).smallest_subnormal
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(rows * 16, np.float32)), 16)
    columns["tokens"] = pa.array(
        [rng.integers(0, 1 << 30, rng.integers(0, 40)) for _ in range(rows)], pa.list_(pa.int32())
    )
    columns["text"] = [f"row {number} …" for number in range(rows)]
    return pa.table(columns)


def _write(path: Path, table: pa.Table) -> str:
    if not path.exists():
        lance.write_dataset(table, str(path), max_rows_per_file=-(-table.num_rows // 3))
    return str(path)
