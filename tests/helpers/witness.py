"""The watch over examples from outside: the rows that loops are handed, and a rank's death."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import raylance.torchft
from raylance.api.delivery import Delivery
from raylance.api.loader import _LoaderBatches, consumer_of
from raylance.columns import ROW_OFFSET

_make_trainer, _replica_batches = DataParallelTrainer.__init__, raylance.torchft.batches


@contextlib.contextmanager
def watched(directory: Path, *, die_at: int | None = None) -> Iterator[None]:
    """Has the workers of all trainers that are made meanwhile write down which rows they are handed, a file each.

    With `die_at`, the last rank is killed after its step of this number, once: the file `killed` says so.
    """
    directory.mkdir(exist_ok=True)

    def make(trainer: DataParallelTrainer, *, train_loop_per_worker: Callable[..., Any], **options: Any) -> None:
        train_fn = functools.partial(_train, train_loop_per_worker, directory, die_at)
        _make_trainer(trainer, train_loop_per_worker=train_fn, **options)

    with patch.object(DataParallelTrainer, "__init__", make):
        yield


def _train(train_fn: Callable[..., Any], directory: Path, die_at: int | None, config: dict[str, Any]) -> Any:
    """Calls a training function, in its worker. What it has seen is written at once, so that a kill leaves that."""
    context, steps, killed = ray.train.get_context(), itertools.count(1), directory / "killed"
    # Ray Train restarts all ranks for an attempt, so the newest attempt is the one with the newest files.
    file = directory / f"{time.time_ns():020d}-{os.getpid()}.jsonl"

    def saw(loader: raylance.RankLoader, rows: Any) -> None:
        state = loader.state_dict()  # after the last step of an epoch, it is at the start of the next one
        line = {"epoch": state["epoch"] - (state["position"] == 0), "step": state["global_step"]}
        line |= {"dp_rank": loader.dp_rank, "dp_size": loader.dp_size, "rows": rows.tolist()}
        with open(file, "a", encoding="utf-8") as opened:
            opened.write(json.dumps(line) + "\n")
        if next(steps) == die_at and context.get_world_rank() + 1 == context.get_world_size() and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def iterate(batches: _LoaderBatches) -> Iterator[Any]:
        spec, loader = batches._spec, batches.loader
        shown = dataclasses.replace(spec, hidden=tuple(name for name in spec.hidden if name != ROW_OFFSET))
        for batch in Delivery(consumer_of(loader), shown):
            parts = batch if isinstance(batch, list) else [batch]  # micro-batches
            rows = [each[ROW_OFFSET] if shown == spec else each.pop(ROW_OFFSET) for each in parts]
            saw(loader, np.concatenate(rows))
            yield batch

    def as_replica(loader: raylance.RankLoader, manager: Any, **arguments: Any) -> Iterator[Any]:
        for batch in _replica_batches(loader, manager, **arguments, with_row_offset=True):
            step = manager.current_step()
            yield {name: batch[name] for name in batch if name != ROW_OFFSET}
            if manager.current_step() > step:  # it was committed
                saw(loader, batch[ROW_OFFSET])

    with patch.object(_LoaderBatches, "__iter__", iterate), patch.object(raylance.torchft, "batches", as_replica):
        return train_fn(config)


def steps_seen(directory: Path) -> Iterator[dict[str, Any]]:
    """What ranks were handed, step by step: later attempts after earlier ones."""
    for path in sorted(directory.glob("*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())


def rows_by_epoch(directory: Path) -> dict[int, list[int]]:
    """The rows that each epoch's steps had, over all ranks; an error if a rank's part of a step is missing. Of a step
    that was made twice, the later one counts, since the model continues from the checkpoint.
    """
    steps: dict[int, dict[int, Any]] = {}
    for line in steps_seen(directory):
        ranks = steps.setdefault(line["step"], {})
        if any(other["dp_size"] != line["dp_size"] for other in ranks.values()):
            ranks.clear()
        ranks[line["dp_rank"]] = line
    epochs: dict[int, list[int]] = {}
    for step, ranks in sorted(steps.items()):
        for line in ranks.values():
            epochs.setdefault(line["epoch"], []).extend(line["rows"])
            if len(ranks) < line["dp_size"]:
                raise RuntimeError(f"step {step}: {len(ranks)} of {line['dp_size']} ranks were seen")
    return epochs
