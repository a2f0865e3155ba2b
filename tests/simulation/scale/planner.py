"""Owns what the planner costs at 10¹⁰ rows: seconds and bytes of any step's rows of one rank; never asserts a time.

python -m tests.simulation.scale.planner 1024    # each built-in order on so many ranks, as JSON: for jobs/benchmark
"""

import dataclasses
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np

import raylance
from raylance.orders.order import Facts, Order
from raylance.planning.plan import Plan

ROWS = 10**10
PER_RANK = 256
IMAGE_BYTES = 42_000.0
RUNS = 5
ORDERS: tuple[Order, ...] = (
    raylance.WindowShuffle(),
    raylance.WindowShuffle(shard_rows=4096, window_shards=8, lanes=32),
    raylance.ShardShuffle(shard_rows=4096),
    raylance.RowShuffle(),
    raylance.Sequential(),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of the rows of one step, one rank: the median and the longest of many, and the most bytes allocated.

    `chunk_…` is of what a shard actor reads together, once a chunk.
    """

    order: str
    ranks: int
    rows: int
    seconds: float
    longest_s: float
    peak_bytes: int
    chunk_rows: int
    chunk_s: float


def plan_of(order: Order, ranks: int, rows: int = ROWS) -> Plan:
    """A plan of 256 rows a rank and step."""
    size = PER_RANK * ranks
    resolved = order.resolve(Facts(rows=rows, seed=3, row_bytes=IMAGE_BYTES, global_batch_size=size))
    chunk = resolved.read_positions or PER_RANK * ranks * 4
    return Plan(order=resolved, global_batch_size=size, dp_size=ranks, remainder="drop", chunk_positions=chunk)


def places(plan: Plan) -> Iterator[tuple[int, int]]:
    """Positions and ranks at the begin, in the middle and at the end."""
    steps = plan.steps()
    for step in (0, 1, steps // 3, steps // 2, steps - 1):
        for rank in {0, plan.dp_size // 2, plan.dp_size - 1}:
            yield step * plan.global_batch_size, rank


def cost(order: Order, ranks: int) -> Cost:
    """Asks a plan for steps all over the epoch; the first one of an epoch is not left out."""
    plan, took = plan_of(order, ranks), []
    for position, rank in places(plan):
        begin = time.perf_counter()
        rows = plan.select(1, plan.positions(position, *plan.rank_slice(position, rank)))
        took.append(time.perf_counter() - begin)
    peak_bytes = peak(plan)
    chunk = plan.chunk_at(1, plan.steps() // 2 * plan.global_batch_size)
    begin = time.perf_counter()
    together = np.empty(0) if chunk is None else plan.chunk_rows(chunk, ranks // 2)
    return Cost(
        order=str(plan.order.settings),
        ranks=ranks,
        rows=len(rows),
        seconds=statistics.median(took),
        longest_s=max(took),
        peak_bytes=peak_bytes,
        chunk_rows=len(together),
        chunk_s=time.perf_counter() - begin,
    )


def peak(plan: Plan) -> int:
    """Most bytes that any of the steps allocates; an epoch that was not planned before."""
    tracemalloc.start()
    try:
        for position, rank in places(plan):
            plan.select(2, plan.positions(position, *plan.rank_slice(position, rank)))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def undisturbed(order: Order, ranks: int) -> Cost:
    """The run whose longest step is the shortest of some runs: other programs did not disturb it."""
    return min((cost(order, ranks) for _ in range(RUNS)), key=lambda found: found.longest_s)


if __name__ == "__main__":
    print(json.dumps([dataclasses.asdict(undisturbed(order, int(sys.argv[1]))) for order in ORDERS]))
