"""Where the CPU time of a row goes, by process, beside what its parts cost alone."""

import collections
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import lance
import pandas as pd
import psutil

from .decoding import Batch, touch
from .figures import Figure
from .measuring import APART, in_turns, rest
from .readers import READERS
from .setting import Job, Setting

READING = "Lance's scan alone"
# Which readers, by dataset; those of raylance after what they are made of.
SPENDERS = {
    "images": (READING, "decode", "raylance", "decode-own", "raylance-own", "raylance-free"),
    "vectors": (READING, "raylance", "raylance-threads"),
}
_NAMES = {"ShardActor": "shard actor", "DecodeActor": "decoders", "raylet": "Ray itself", "gcs_server": "Ray itself"}

Spent = dict[str, float]  # CPU microseconds a row by the name of the process


def measure(setting: Setting) -> dict[str, dict[str, list[Spent]]]:
    """What a row took, by dataset and reader, for each round; and what the clock and the cores allow."""
    found: dict[str, dict[str, list[Spent]]] = {}
    for kind, names in SPENDERS.items():
        job, found[kind] = setting.job(kind), {name: [] for name in names}
        for number, name in in_turns(names, setting.rounds):
            with ExitStack() as stack:  # one reader at a time: idle actors of another would count for this one
                one_pass = _open(name, kind, job, stack)
                found[kind][name].append(_spend(one_pass, job, number))
    return found


def _open(name: str, kind: str, job: Job, stack: ExitStack) -> Callable[[int], Iterable[Batch]]:
    if name != READING:
        return READERS[kind][name].open(job, stack).open_pass
    dataset = lance.dataset(job.uri)

    def scan(_: int) -> Iterable[Batch]:
        batches = dataset.scanner(columns=list(job.columns), batch_size=job.batch_size).to_batches()
        return ((batch.num_rows, batch.num_rows) for batch in batches)

    return scan


def _spend(open_pass: Callable[[int], Iterable[Batch]], job: Job, number: int) -> Spent:
    """What a row takes in the epochs after the first. At both ends of this time, a reader that works ahead has begun
    the epoch that follows, so that its rows count once.
    """
    rest()
    begin, before = 0.0, dict[int, tuple[str, float]]()
    for epoch in range(1 + job.pass_epochs):
        if epoch == 1:
            begin, before = time.perf_counter(), _cpu_s()
        for data, _ in open_pass(APART * number + epoch):
            if not isinstance(data, int):
                touch(data)
    seconds, after = time.perf_counter() - begin, _cpu_s()
    by_name: collections.Counter[str] = collections.Counter()
    for process, (name, cpu_s) in after.items():
        by_name[name] += cpu_s - before.get(process, (name, 0.0))[1]
    rows = job.pass_epochs * job.rows
    spent = {name: 1e6 * cpu_s / rows for name, cpu_s in by_name.items() if cpu_s}
    return spent | {"cores × clock": 1e6 * seconds * (psutil.cpu_count() or 1) / rows}


def _cpu_s() -> dict[int, tuple[str, float]]:
    """Name and CPU seconds so far of this process and all below it."""
    this, found = psutil.Process(), dict[int, tuple[str, float]]()
    for process in (this, *this.children(recursive=True)):
        try:
            command, times = " ".join(process.cmdline()[:1]), process.cpu_times()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        fits = [name for key, name in _NAMES.items() if key in command]
        name = "this process" if process == this else fits[0] if fits else "others"
        found[process.pid] = name, times.user + times.system
    return found


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """A line for each process of each reader."""
    for kind, readers in found.items():
        for reader, rounds in readers.items():
            table = pd.DataFrame(rounds).fillna(0.0)
            for name in sorted(table):
                if table[name].max() >= 0.01 * table["cores × clock"].max():
                    yield Figure(f"CPU of one of {kind}, {reader}: {name}", table[name].tolist(), "µs")
