"""Owns the service times of this machine: what Ray's calls, reading, decoding and batches take; never simulates.

What a real run waits for differs from machine to machine, so the figures go with the machine's name.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

import raylance
from jobs.benchmark.data import SIDE, cached_dataset, image_batches, photograph

SMALL, LARGE = 100_000, 10_000_000  # bytes of two results, whose difference is what a byte costs


class Worker:
    """An actor that does nothing, by itself or with tables, as the helpers do."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)

    def ping(self) -> int:
        """Answers with the process ID."""
        return os.getpid()

    def put(self, nbytes: int) -> float:
        """Seconds that it takes to put a table into the object store, from memory that was used before."""
        table, took = _table(nbytes), []
        for _ in range(10):
            begin = time.perf_counter()
            ray.put(table)
            took.append(time.perf_counter() - begin)
        return statistics.median(took)

    @ray.method(num_returns=2)
    def pass_on(self, table: pa.Table, nbytes: int) -> tuple[pa.Table, int]:
        """Takes a table, and gives another one and a small answer, as a decoder does."""
        if not hasattr(self, "_made") or self._made.nbytes != nbytes:
            self._made = _table(nbytes)
        return self._made, table.num_rows

    def sleep(self, seconds: float) -> None:
        """Is busy."""
        time.sleep(seconds)


def _table(nbytes: int) -> pa.Table:
    return pa.table({"bytes": pa.array(np.ones(nbytes, np.uint8))})


def calls() -> dict[str, float]:
    """What calls of Ray take: of an actor that answers, that takes and gives tables, that starts and that dies."""
    remote = ray.remote(Worker).options(num_cpus=0, max_restarts=0)
    starts = []
    for _ in range(3):
        begin = time.perf_counter()
        actor: Any = remote.remote()
        ray.get(actor.ping.remote())
        starts.append(time.perf_counter() - begin)
    round_trips = [_timed(lambda: ray.get(actor.ping.remote())) for _ in range(200)]
    submit_s, event_s = _calls_in_flight(actor)
    put_s = {nbytes: ray.get(actor.put.remote(nbytes)) for nbytes in (SMALL, LARGE)}
    call_s = {nbytes: _passed_on(actor, nbytes) for nbytes in (SMALL, LARGE)}
    fetch_s = {nbytes: _fetched(actor, nbytes) for nbytes in (SMALL, LARGE)}
    return {
        "start_s": statistics.median(starts),
        "round_trip_s": statistics.median(round_trips),
        "submit_s": submit_s,
        "event_s": event_s,
        "put_10mb_s": put_s[LARGE],
        "put_byte_s": max(0.0, (put_s[LARGE] - put_s[SMALL]) / (LARGE - SMALL)),
        "call_s": call_s[SMALL],
        "call_10mb_s": call_s[LARGE],
        "fetch_10mb_s": fetch_s[LARGE],
        "fetch_call_s": fetch_s[SMALL],
        "fetch_byte_s": max(0.0, (fetch_s[LARGE] - fetch_s[SMALL]) / (LARGE - SMALL)),
        "notice_s": statistics.median(_noticed(remote) for _ in range(3)),
    }


def _timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _calls_in_flight(actor: Any, count: int = 500) -> tuple[float, float]:
    """What a call takes of this process: to submit it, and to hear its answer by a callback."""
    begin, cpu = time.perf_counter(), time.process_time()
    answers = [actor.ping.remote() for _ in range(count)]
    submit_s = (time.perf_counter() - begin) / count
    for answer in answers:
        answer.future().add_done_callback(lambda done: done.result())
    ray.get(answers)
    return submit_s, max(0.0, (time.process_time() - cpu) / count - submit_s)


def _passed_on(actor: Any, nbytes: int, count: int = 20) -> float:
    """Seconds of one of many calls in a row that take a table and give one."""
    given = ray.put(_table(nbytes))
    ray.get(actor.pass_on.remote(given, nbytes)[1])
    took = []
    for _ in range(3):
        begin = time.perf_counter()
        made = [actor.pass_on.remote(given, nbytes) for _ in range(count)]
        ray.get(made[-1][1])
        took.append((time.perf_counter() - begin) / count)
        del made
    return statistics.median(took)


def _fetched(actor: Any, nbytes: int) -> float:
    """Seconds to bring a result here that is ready on this node."""
    given, took = ray.put(_table(SMALL)), []
    for _ in range(10):
        table, answer = actor.pass_on.remote(given, nbytes)
        ray.get(answer)
        took.append(_timed(lambda table=table: ray.get(table)))
    return statistics.median(took)


def _noticed(remote: Any) -> float:
    """Seconds from the end of a process until its caller knows."""
    actor = remote.remote()
    pid = ray.get(actor.ping.remote())
    pending = actor.sleep.remote(60.0)
    time.sleep(0.5)  # it is under way
    begin = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        ray.get(pending)
    except ray.exceptions.RayActorError:
        return time.perf_counter() - begin
    raise SystemExit("an actor that was killed has answered")


def decoding(images: int = 200) -> dict[str, float]:
    """What a photograph of the benchmark takes to decode on one core, and by how much that varies."""
    files = [photograph(0, number) for number in range(images)]
    decoder = raylance.Image("image", size=(SIDE, SIDE)).open()
    draws, out = np.zeros(41), np.zeros((SIDE, SIDE, 3), np.uint8)
    rows, passes = np.full((5, images), np.inf), []
    for number in range(5):
        for row, data in enumerate(files):
            rows[number, row] = _timed(lambda data=data: decoder.decode_into(memoryview(data), draws, out))
        passes.append(rows[number].reshape(-1, 50).sum(axis=1))
    each, blocks = np.median(rows, axis=0), np.array(passes)
    return {
        "decode_row_s": float(each.mean()),
        "decode_row_varies": float(each.std() / each.mean()),
        "decode_item_varies": float((blocks / np.median(blocks, axis=0)).std()),
        "raw_bytes": float(np.mean([len(data) for data in files])),
    }


def feeding(folder: Path, rows: int = 2000) -> dict[str, float]:
    """What a row takes of the shard actor and of the worker, in a real run with one decoder; not its first epoch."""
    uri = cached_dataset(folder / f"images-{rows}-seed0.lance", rows, image_batches(rows, 0, os.cpu_count() or 1))
    dataset = raylance.dataset(uri, columns=["image", "label"], decode=raylance.Image("image", size=(SIDE, SIDE)))
    loader = dataset.loader(num_decoders=1)
    read_s, worker_s = [], []
    for epoch in range(3):
        before, cpu = loader.stats(), time.process_time()
        for _ in loader.iter_torch_batches(batch_size=256):
            pass
        after = loader.stats()
        done = after["rows"] - before["rows"]
        if epoch:
            read_s.append((after["read_s"] - before["read_s"]) / done)
            worker_s.append((time.process_time() - cpu) / done)
    loader.close()
    return {
        "read_row_s": statistics.median(read_s),
        "batch_row_s": statistics.median(worker_s),
        "reader_bytes_s": _reading(uri),
    }


def _reading(uri: str) -> float:
    """Bytes a second that one rank reads of rows without decoding, from the page cache."""
    loader, rates = raylance.dataset(uri, columns=["image"]).loader(), []
    for _ in range(4):
        begin, before = time.perf_counter(), loader.stats()["nbytes"]
        for _ in loader.iter_batches(batch_size=256, batch_format="pyarrow"):
            pass
        rates.append((loader.stats()["nbytes"] - before) / (time.perf_counter() - begin))
    loader.close()
    return statistics.median(rates[1:])


def measure(folder: Path) -> dict[str, float]:
    """All of them."""
    return {**calls(), **decoding(), **feeding(folder)}
