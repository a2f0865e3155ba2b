"""What a trainer that is slower than its loader still waits for, also at turns."""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from .figures import Figure
from .measuring import own_batch_s, waits
from .setting import Setting, start_ray

_SLOWER = 1.5  # times the loader's own time for a batch
_PASSES = ("train", "train", "val")  # a round: both kinds of turns
_VALIDATED = 8  # a part of so many is the validation set
TURNS = {"train-train": "epoch to epoch", "train-val": "into a validation pass", "val-train": "back from it"}


def measure(setting: Setting) -> dict[str, Any]:
    """Trains some epochs with validation passes between, by steps that sleep."""
    job = setting.job("images")
    start_ray(job)
    size: dict[str, Any] = {"global_batch_size": job.batch_size}
    datasets = {
        "train": job.open(),
        "val": job.open(filter=f"label < {job.rows // _VALIDATED}", order="sequential"),
    }
    with datasets["train"].loader(num_decoders=job.decoders) as loader:
        own_batch_s(loader.batches(**size))  # warms up
        loader.set_epoch(8)  # one that was not prepared
        batch_s = own_batch_s(loader.batches(**size))
    step_s = _SLOWER * batch_s
    with ExitStack() as stack:
        batches = {
            kind: stack.enter_context(dataset.loader(num_decoders=job.decoders)).prepare(**size)
            for kind, dataset in datasets.items()
        }
        passes = [{"kind": kind, **_train(batches[kind], step_s)} for kind in _PASSES * setting.rounds]
    return {"batch_s": batch_s, "step_s": step_s, "batch_size": job.batch_size, "passes": passes}


def _train(batches: Iterable[Any], step_s: float) -> dict[str, Any]:
    """A pass: its seconds, and for each batch and the end what it waited, and the CPU seconds of this thread."""
    begin, waited_s, cpu_s = time.perf_counter(), [], []
    for batch, wait_s, wait_cpu_s in waits(batches):
        waited_s.append(wait_s)
        cpu_s.append(wait_cpu_s)
        if batch is not None:
            time.sleep(step_s)
    return {"seconds": time.perf_counter() - begin, "waited_s": waited_s, "cpu_s": cpu_s}


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """The stall, turns in batches' times, and the CPU of the training thread.

    The first batch of the run is a figure of its own: no training came before it that could have hidden it.
    """
    passes, batch_s = found["passes"], found["batch_s"]
    first_s = passes[0]["waited_s"][0]
    stalls = []
    for at in range(0, len(passes), len(_PASSES)):
        part = passes[at : at + len(_PASSES)]
        left_out_s = 0.0 if at else first_s
        waited_s = sum(sum(one["waited_s"]) for one in part) - left_out_s
        stalls.append(waited_s / (sum(one["seconds"] for one in part) - left_out_s))
    yield Figure(f"stall of a trainer {_SLOWER:g} × as slow as the loader", stalls, at_most=0.01)
    yield Figure("first batch of that run, not in the stall", [first_s], "s")
    for turn, name in TURNS.items():
        if pauses := pauses_s(found, turn):
            values = [pause / batch_s for pause in pauses]
            yield Figure(f"pause at the turn {name} / one batch's time", values, at_most=1.0)
    cpu_ms = [1000 * sum(one["cpu_s"]) / max(1, len(one["cpu_s"]) - 1) for one in passes]
    yield Figure(f"training thread, CPU a batch of {found['batch_size']} images", cpu_ms, "ms", at_most=1.0)


def pauses_s(found: dict[str, Any], turn: str) -> list[float]:
    """Seconds between the last batch of a pass and the first of the next, of one kind of turn, steps left out."""
    passes = found["passes"]
    return [
        before["waited_s"][-1] + after["waited_s"][0]
        for before, after in itertools.pairwise(passes)
        if f"{before['kind']}-{after['kind']}" == turn
    ]
