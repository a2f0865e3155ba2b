"""The passes that are timed, here or with another checkout."""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from .decoding import touch
from .readers import READERS, Entry, Source
from .setting import Job, end_ray

_QUIET = 0.1  # of the cores: below it, the previous reader has finished
_LONGEST_REST_S = 5.0
_PROGRAM = Path(__file__).parents[1] / "benchmark.py"
APART = 100  # epochs from pass to pass: the first one was not expected

Result = dict[str, Any]


def one_thread_each() -> None:
    """Gives this process and all that it starts one thread for numbers: workers are the parallelism of every reader."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def rest(longest_s: float = _LONGEST_REST_S) -> None:
    """Waits until the machine is quiet: what a reader still does after its pass must not slow the next reader."""
    end = time.monotonic() + longest_s
    psutil.cpu_percent()
    while time.monotonic() < end:
        time.sleep(0.25)
        if psutil.cpu_percent() < 100 * _QUIET:
            return


def waits(batches: Iterable[Any]) -> Iterator[tuple[Any, float, float]]:
    """Takes batches until there are none, each with what it cost: seconds, and CPU seconds of this thread.

    The first wait includes `iter()`. The last one brings None: it is the wait for the end.
    """
    begin = time.perf_counter()
    taken = iter(batches)
    while True:
        begin_cpu = time.thread_time()
        batch = next(taken, None)
        yield batch, time.perf_counter() - begin, time.thread_time() - begin_cpu
        if batch is None:
            return
        del batch  # its memory may be used again for the next one
        begin = time.perf_counter()


def own_batch_s(batches: Iterable[Any]) -> float:
    """Seconds that a pass takes a batch after its first one, when nothing but the loader is awaited."""
    found = [seconds for _, seconds, _ in waits(batches)]
    return sum(found[1:]) / max(1, len(found) - 2)


def measure(source: Source, number: int, epochs: int, longest_rest_s: float = _LONGEST_REST_S) -> Result:
    """Times one pass; the head of command.py says what the clock covers."""
    if source.elsewhere:
        return source.elsewhere(number)
    made = [source.open_pass(APART * number + epoch) for epoch in range(epochs)]
    gc.collect()  # the garbage of the previous reader is not timed
    rest(longest_rest_s)
    epochs_numbers, checksum, firsts_s, cpu_s = list[list[torch.Tensor]](), 0, list[float](), 0.0
    start = time.perf_counter()
    for one in made:
        numbers: list[torch.Tensor] = []
        epochs_numbers.append(numbers)
        for batch, wait_s, wait_cpu_s in waits(one):
            cpu_s += wait_cpu_s
            if batch is None:
                break
            data, ids = batch
            if not numbers:
                firsts_s.append(wait_s)
            checksum += data if isinstance(data, int) else touch(data)
            numbers.append(ids.clone())  # a view would keep the whole batch
            del batch, data, ids
    seconds = time.perf_counter() - start
    by_epoch = [torch.cat(numbers) for numbers in epochs_numbers]
    rows, first_rows = sum(map(len, by_epoch)), len(epochs_numbers[0][0])
    return {
        "rows": rows,
        "distinct_rows": min(len(numbers.unique()) for numbers in by_epoch),
        "epochs": epochs,
        "rows_per_s": rows / seconds,
        "later_rows_per_s": (rows - first_rows) / (seconds - firsts_s[0]),
        "first_batch_s": firsts_s[0],
        "turn_s": max(firsts_s[1:], default=0.0),
        "seconds": seconds,
        "checksum": checksum,
        "thread_ms": 1e3 * cpu_s / sum(map(len, epochs_numbers)),
    }


def measure_alone(job: Job, entry: Entry, workers: int, number: int) -> tuple[int, Result]:
    """The rows that a reader claims, and its pass, after a warm-up pass; for number 0, the warm-up pass itself.

    Nothing of the reader runs afterwards, nor Ray: idle processes would cost the other readers time.
    """
    with ExitStack() as stack:
        source = entry.open(replace(job, workers=workers), stack)
        result, claims = measure(source, 0, epochs=1), source.claims
        if number:
            result = measure(source, number, job.pass_epochs)
    del source  # a DataLoader ends its workers when it is freed
    end_ray()
    return claims, result | {"workers": workers}


def try_workers(job: Job, entry: Entry) -> tuple[int, Result]:
    """The rows that a reader claims, and its fastest warm-up pass, over the worker counts to try."""
    counts = sorted({max(1, round(job.workers * share)) for share in entry.tries})
    return max(
        (measure_alone(job, entry, workers, 0) for workers in counts), key=lambda one: one[1]["later_rows_per_s"]
    )


def run_rounds(job: Job, entries: dict[str, Entry], rounds: int) -> dict[str, Result]:
    """Tries every reader, then measures one pass of each in each round; returns all by name."""
    results: dict[str, Result] = {}
    for name, entry in entries.items():
        print(f"trying {name}", file=sys.stderr)
        try:
            claims, warm_up = try_workers(job, entry)
        except ImportError as error:
            print(f"{name}: skipped, {error}")
            continue
        results[name] = {"claims": claims, "warm_up": warm_up, "passes": []}
    for number, name in in_turns(results, rounds):
        _, result = measure_alone(job, entries[name], results[name]["warm_up"]["workers"], number)
        results[name]["passes"].append(result)
    return results


def in_turns(names: Iterable[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    """Each name once a round, from 1 up; each round begins with another one, so that none is always the first."""
    every = [*names]
    for number in range(1, rounds + 1):
        print(f"round {number} of {rounds}", file=sys.stderr)
        turn = number % max(1, len(every))
        for name in every[turn:] + every[:turn]:
            yield number, name


def fault(result: Result, peer: Result) -> str:
    """What is wrong with the rows that a reader delivered; empty where nothing is."""
    claims = result["claims"]
    for one in result["passes"]:
        wanted = one["epochs"] * claims
        if (one["rows"], one["distinct_rows"]) != (wanted, claims):
            return f"claims {wanted} rows, delivered {one['rows']}, {one['distinct_rows']} of them distinct in an epoch"
        if one["checksum"] != peer["passes"][0]["checksum"]:
            return "other values than its peers"
    return ""


def values_of(result: Result, key: str) -> list[float]:
    """One number of each pass of a reader."""
    return [one[key] for one in result["passes"]]


def median(result: Result, key: str) -> float:
    """The median of one number over the passes of a reader."""
    return statistics.median(values_of(result, key))


def ratios(result: Result, other: Result, key: str = "rows_per_s") -> list[float]:
    """The ratio of two readers' numbers in each round."""
    pairs = zip(values_of(result, key), values_of(other, key), strict=True)
    return [one / max(two, 1e-9) for one, two in pairs]


def open_before(job: Job, stack: ExitStack, kind: str, name: str, checkout: Path) -> Source:
    """A reader with the raylance of another checkout, which measures in a process of its own."""
    # raylance first, from the folder in which the process starts; then this job, which would find its own raylance.
    program = f"import raylance, runpy; runpy.run_path({str(_PROGRAM)!r}, run_name='__main__')"
    command, env = [sys.executable, "-c", program, "--serve"], os.environ | {"PYTHONPATH": str(checkout)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    child = stack.enter_context(subprocess.Popen(command, env=env, cwd=checkout, **pipes))  # Ray's workers import there

    def ask(question: Any) -> Any:
        print(json.dumps(question), file=child.stdin)
        if not (answer := child.stdout.readline()):
            raise SystemExit(f"{name} of {checkout} failed; its message stands above")
        return json.loads(answer)

    return Source(claims=ask([kind, name, asdict(job)]), elsewhere=ask)


def serve() -> int:
    """The other side of `open_before`: a line of JSON for each line of JSON."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    kind, name, fields = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        job = Job(**fields)
        source = READERS[kind][name].open(job, stack)
        print(source.claims, file=answers)
        for line in sys.stdin:
            print(json.dumps(measure(source, int(line), job.pass_epochs)), file=answers)
    return 0
