"""Packing: tokens a second of sequences that are packed while training, beside stored rows of the same bytes."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import raylance

from .data import cached_dataset
from .figures import Figure
from .measuring import in_turns, rest
from .setting import Job, Setting, start_ray

LENGTH, BATCH = 2048, 16
COLUMNS = ("input_ids", "labels", "position_ids", "segment_ids")
_DOCUMENTS, _FIXED = 200_000, 20_000  # about the same number of tokens
_AT_ONCE = 2_000  # documents that are written together
_EPOCHS = 3  # a pass times all but its first epoch, a part of which was loaded before the pass
_WAYS = {"stored": None, "stream": "stream", "whole": "whole"}  # policies of `Pack`


def _documents(seed: int) -> Iterator[pa.RecordBatch]:
    """Lists of tokens, of the lengths of lognormal(5, 1), from 16 to 1,024."""
    rng = np.random.default_rng(seed)
    for _ in range(0, _DOCUMENTS, _AT_ONCE):
        ends = np.cumsum(np.clip(rng.lognormal(5, 1, _AT_ONCE), 16, LENGTH // 2).astype(np.int32), dtype=np.int32)
        tokens = rng.integers(0, 50_000, ends[-1], dtype=np.int32)
        lists = pa.ListArray.from_arrays(pa.array(np.append(np.int32(0), ends)), pa.array(tokens))
        yield pa.record_batch({"tokens": lists})


def _sequences(seed: int) -> Iterator[pa.RecordBatch]:
    """Rows of the columns that a batch of `Pack` has."""
    rng = np.random.default_rng(seed)
    for _ in range(0, _FIXED, _AT_ONCE):
        values = [rng.integers(0, 50_000, _AT_ONCE * LENGTH, dtype=np.int32) for _ in COLUMNS]
        arrays = [pa.FixedSizeListArray.from_arrays(pa.array(each), LENGTH) for each in values]
        yield pa.record_batch(arrays, names=list(COLUMNS))


def _open(setting: Setting) -> dict[str, raylance.Dataset]:
    """The stored rows, and the documents packed by each policy."""
    stored = cached_dataset(setting.path("packing-stored"), _FIXED, _sequences(setting.seed))
    documents = cached_dataset(setting.path("packing-documents"), _DOCUMENTS, _documents(setting.seed))
    return {
        way: raylance.dataset(stored, seed=setting.seed)
        if policy is None
        else raylance.dataset(documents, samples=raylance.Pack("tokens", LENGTH, policy), seed=setting.seed)  # type: ignore[arg-type]
        for way, policy in _WAYS.items()
    }


def _pass_of(data: raylance.Dataset, runtime: str) -> Callable[[int], float]:
    """Returns a function that takes epochs, one after another as in training, and returns tokens a second."""
    loader: Any = data.loader(runtime=runtime, record=False)

    def one(number: int) -> float:
        taken, begin = 0, 0.0
        for epoch in range(_EPOCHS):
            loader.set_epoch(number * _EPOCHS + epoch)
            for batch in loader.iter_torch_batches(global_batch_size=BATCH):
                taken += batch["input_ids"].numel() if begin else 0
                _ = [batch[name][:, ::64].sum() for name in COLUMNS]
            begin = begin or time.perf_counter()
        return taken / (time.perf_counter() - begin)

    return one


def measure(setting: Setting) -> dict[str, Any]:
    """Each way makes one pass a round."""
    start_ray(Job(uri="", columns=("", ""), rows=0, batch_size=BATCH, workers=setting.workers, seed=setting.seed))
    found: dict[str, Any] = {}
    for runtime in ("threads", "ray"):
        passes = {way: _pass_of(data, runtime) for way, data in _open(setting).items()}
        found[runtime] = {way: [] for way in passes}
        for number, way in in_turns(passes, setting.rounds):
            rest()
            found[runtime][way].append(passes[way](number))
    return found


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """Tokens a second, and what they are of those of stored rows."""
    for runtime, ways in found.items():
        for way, values in ways.items():
            yield Figure(f"sequences of {LENGTH:,}, {runtime}: {way}", [value / 1e6 for value in values], "M tokens/s")
            if way != "stored":
                ratios = [value / stored for value, stored in zip(values, ways["stored"], strict=True)]
                yield Figure(f"… {way} / stored rows of the same bytes", ratios, at_least=0.8)
