"""Owns the way from tables to batches on their device, with the position behind each; never moves a position."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from raylance.batches.batches import Bound
from raylance.batches.device import on_device
from raylance.planning.plan import Plan
from raylance.runtime.stream import Stream
from raylance.telemetry import Stats


def make_batches(
    stream: Stream, plan: Plan, rank: int, bound: Bound, stats: Stats, epoch: int, position: int
) -> Iterator[tuple[Any, int]]:
    """Batches of a rank, from a position to the end of its epoch.

    Args:
        stream: The rank's stream, not yet read.
        plan: The plan that it follows.
        rank: The rank.
        bound: Arguments of the iterator.
        stats: Counters to add to.
        epoch: Epoch.
        position: Position of the first step.

    Returns:
        Batches, each with the position behind it.
    """

    def convert() -> Iterator[tuple[Any, int]]:
        after = position
        for table in stream.tables(epoch, position, bound.prefetch_batches):
            after = plan.after(after)
            with stats.timed("collate_s"):
                stats.rows += table.num_rows
                stats.nbytes += table.nbytes
                batch = bound.convert(table.drop_columns(bound.hidden))
            if plan.steps(after) <= 0:
                stats.epoch_certificate = {
                    "verdict": "every planned row exactly once",
                    "epoch": epoch,
                    "rank": rank,
                    "world_size": plan.world_size,
                    "positions": [position, after],
                    **dataclasses.asdict(stream.coverage),
                }
            yield batch, after

    batches = convert() if bound.device is None else on_device(convert(), bound.device, bound.pin_memory)
    return _timed(batches, stats)


def _timed(batches: Iterator[tuple[Any, int]], stats: Stats) -> Iterator[tuple[Any, int]]:
    """The same, counted: how long the consumer waits for each, and how long it keeps each."""
    is_first = True
    while True:
        begin = time.perf_counter()
        found = next(batches, None)
        waited_s = time.perf_counter() - begin
        stats.wait_s += waited_s
        stats.first_batch_s += waited_s if is_first else 0
        is_first = False
        if found is None:
            return
        stats.batches += 1
        begin = time.perf_counter()
        yield found
        stats.user_s += time.perf_counter() - begin
