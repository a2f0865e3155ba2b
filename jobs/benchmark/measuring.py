"""Owns the passes that are timed, here or with another checkout, and the table of them; never asserts a speed."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .decoding import touch
from .readers import READERS, Job, Reader, Source


def measure(source: Source, epoch: int) -> dict[str, Any]:
    """Times one pass; the head of command.py says what the clock covers."""
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


def open_before(job: Job, stack: ExitStack, kind: str, name: str, checkout: Path) -> Source:
    """A reader with the raylance of another checkout, which measures in a process of its own."""
    command, env = (
        [sys.executable, Path(__file__).parents[1] / "benchmark.py", "--serve"],
        os.environ | {"PYTHONPATH": str(checkout)},
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    child = stack.enter_context(subprocess.Popen(command, env=env, cwd=checkout, **pipes))  # Ray's workers import there

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
