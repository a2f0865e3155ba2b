"""Plans of given orders, and what their ranks deliver by their work items."""

import numpy as np

from raylance.orders.order import Resolved
from raylance.planning.plan import Plan, Remainder

Batches = list[list[int]]


def make_plan(order: Resolved, batch: int, world: int, remainder: Remainder = "ragged") -> Plan:
    return Plan(
        order=order,
        global_batch_size=batch,
        dp_size=world,
        remainder=remainder,
        chunk_positions=order.read_positions or 64,
    )


def rank_batches(plan: Plan, rank: int, epoch: int, position: int, item_rows: int) -> dict[int, list[int]]:
    """A rank's rows by position of the step, put together from its work items as a stream does."""
    items = list(plan.items(rank, epoch, position, item_rows))
    if not items:
        return {}
    positions = [plan.item_positions(item) for item in items]
    rows = plan.select(epoch, np.concatenate(positions))
    batches: dict[int, list[int]] = {}
    chunk, done = None, 0
    for item, of_item in zip(items, positions, strict=True):
        own, done = rows[done : done + item.rows], done + item.rows
        if item.chunk != chunk:
            chunk, read = item.chunk, plan.chunk_rows(item.chunk, rank)
            assert plan.chunk_size(chunk, rank) == len(read)
        begin = plan.line(item.position, rank) + item.low - plan.line(chunk.position, rank)
        assert np.array_equal(read[begin : begin + item.rows], own), "an item's rows are not where its chunk has them"
        singles = [plan.item_positions(single) for single in plan.cut(item, item.steps)]
        assert np.array_equal(np.concatenate(singles), of_item)
        size = item.high - item.low
        for step in range(item.steps):
            at = item.position + step * plan.stride
            batches.setdefault(at, []).extend(own[step * size : (step + 1) * size].tolist())
    return batches


def global_batches(plan: Plan, epoch: int, position: int, item_rows: int = 16) -> Batches:
    """The ranks' batches of each step, one after the other."""
    ranks = [rank_batches(plan, rank, epoch, position, item_rows) for rank in range(plan.dp_size)]
    assert all(list(batches) == list(ranks[0]) for batches in ranks), "ranks make different steps"
    assert len(ranks[0]) == plan.steps(position)
    return [[row for batches in ranks for row in batches[at]] for at in ranks[0]]
