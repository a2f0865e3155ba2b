"""Owns the watch over examples from outside: which rows their training loops are handed, and the death of a rank; never
what an example does.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import raylance.torchft
from raylance.api.loader import _LoaderBatches
from raylance.columns import ROW_OFFSET

_make_trainer, _of_replicas = DataParallelTrainer.__init__, raylance.torchft.batches


@contextlib.contextmanager
def watched(directory: Path, *, die_at: int | None = None) -> Iterator[None]:
    """Has a witness in each worker of the trainers that are made meanwhile.

    Each writes a file of its own into the directory. With `die_at`, the last rank is killed after its step of this
    number, once: the file `killed` says so.
    """
    directory.mkdir(exist_ok=True)

    def make(trainer: DataParallelTrainer, *, train_loop_per_worker: Callable[..., Any], **options: Any) -> None:
        train_fn = functools.partial(_train, train_loop_per_worker, directory, die_at)
        _make_trainer(trainer, train_loop_per_worker=train_fn, **options)

    with mock.patch.object(DataParallelTrainer, "__init__", make):
        yield


def _train(train_fn: Callable[..., Any], directory: Path, die_at: int | None, config: dict[str, Any]) -> Any:
    """Calls the training function, in a worker, and witnesses what it iterates over."""
    witness = Witness(directory, die_at)
    with (
        mock.patch.object(_LoaderBatches, "__iter__", lambda batches: witness.iterate(batches)),
        mock.patch.object(raylance.torchft, "batches", witness.iterate_as_replica),
    ):
        return train_fn(config)


class Witness:
    """Writes down which rows a rank is handed, as it is handed them: a killed process leaves what it had seen."""

    def __init__(self, directory: Path, die_at: int | None) -> None:
        context = ray.train.get_context()
        self._rank, self._world_size = context.get_world_rank(), context.get_world_size()
        # Ray Train restarts all ranks for an attempt, so the newest attempt is the one with the newest files.
        self._file = directory / f"{time.time_ns():020d}-{os.getpid()}-{self._rank}.jsonl"
        self._killed, self._die_at, self._steps = directory / "killed", die_at, 0

    def iterate(self, batches: _LoaderBatches) -> Iterator[Any]:
        """A pass over a loader's batches, which have `_rowoffset` here, and for the loop only if it asked for it."""
        loader, spec = batches.loader, batches._spec
        shown = dataclasses.replace(spec, hidden=tuple(name for name in spec.hidden if name != ROW_OFFSET))
        for batch in loader._begin(shown):
            self._saw(loader, batch[ROW_OFFSET])
            yield _without_offsets(batch) if ROW_OFFSET in spec.hidden else batch

    def iterate_as_replica(self, loader: raylance.RankLoader, manager: Any, **arguments: Any) -> Iterator[Any]:
        """`raylance.torchft.batches`: a step counts once the loop asks for the next one, if it was committed."""
        for batch in _of_replicas(loader, manager, **arguments, with_row_offset=True):
            step = manager.current_step()
            yield _without_offsets(batch)
            if manager.current_step() > step:
                self._saw(loader, batch[ROW_OFFSET])

    def _saw(self, loader: raylance.RankLoader, rows: Any) -> None:
        state = loader.state_dict()
        line = {"epoch": state["epoch"], "position": state["position"], "rows": rows.tolist()}
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"dp_rank": loader.dp_rank, "dp_size": loader.dp_size}) + "\n")
        self._steps += 1
        if self._steps == self._die_at and self._rank == self._world_size - 1 and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _without_offsets(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in batch.items() if name != ROW_OFFSET}


def rows_by_epoch(directory: Path) -> dict[int, list[int]]:
    """The rows that each epoch's steps had, over all ranks; those of peers count once.

    Steps of a killed attempt after its last checkpoint do not count: of a step that was made twice, the later one
    does, since the model continues from the checkpoint.

    Raises:
        RuntimeError: If a rank's part of a step is missing.
    """
    steps: dict[tuple[int, float], dict[int, dict[str, Any]]] = {}
    for path in sorted(directory.glob("*.jsonl")):  # by time: later attempts overwrite earlier ones
        for line in map(json.loads, path.read_text().splitlines()):
            # After the last step, the position is the start of the next epoch.
            ended = line["position"] == 0
            at = (line["epoch"] - ended, math.inf if ended else line["position"])
            ranks = steps.setdefault(at, {})
            if any(other["dp_size"] != line["dp_size"] for other in ranks.values()):
                ranks.clear()
            ranks[line["dp_rank"]] = line
    epochs: dict[int, list[int]] = {}
    for (epoch, position), ranks in sorted(steps.items()):
        dp_size = next(iter(ranks.values()))["dp_size"]
        if len(ranks) < dp_size:
            raise RuntimeError(f"epoch {epoch}, position {position}: {len(ranks)} of {dp_size} ranks were seen")
        epochs.setdefault(epoch, []).extend(row for line in ranks.values() for row in line["rows"])
    return epochs
