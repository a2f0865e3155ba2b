"""Plans of given orders, and what their ranks deliver by their work items."""

import dataclasses
import itertools
import pickle

import numpy as np
from hypothesis import strategies as st

from raylance.orders.order import Resolved
from raylance.orders.permutation import Int64Array
from raylance.planning.balance import Balance
from raylance.planning.plan import Plan
from raylance.planning.planned_rows import PlannedRows
from raylance.planning.step_size import CostLimit, Remainder

Batches = list[list[int]]
budgets = st.builds(CostLimit, cost=st.integers(1, 3000), max_rows=st.none() | st.integers(1, 60), padded=st.booleans())
sizes = budgets | st.integers(1, 50)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Selected rows, by their offsets."""

    every: Int64Array

    @property
    def rows(self) -> int:
        return len(self.every)

    def offsets(self, selected: Int64Array) -> Int64Array:
        return self.every[selected]


def limits_of(order: Resolved, budget: CostLimit) -> CostLimit:
    """A budget for each of the costs of an order: of several, the first one is padded if the budget is."""
    if order.cost_names == ("cost",) or not isinstance(budget.cost, int):
        return budget
    names = sorted(order.cost_names, reverse=True)  # tokens first
    most = {name: (number + 1) * budget.cost for number, name in enumerate(names)}
    padded = names[:1] if budget.padded else []
    return CostLimit(cost=most, max_rows=budget.max_rows, padded=padded)


def fits(order: Resolved, budget: CostLimit, rows: list[int]) -> bool:
    """Whether rows exceed no limit of a budget; by brute force."""
    if len(rows) > (budget.max_rows or len(rows)):
        return False
    for name, most in budget.most.items():
        costs = order.costs(np.array(rows, dtype=np.int64))[:, order.cost_names.index(name)].tolist()
        is_padded = budget.pads(name) or order.buckets_by == name
        if (len(rows) * max(costs) if is_padded else sum(costs)) > most:
            return False
    return True


def make_plan(
    order: Resolved, batch: int | CostLimit, world: int, remainder: Remainder = "ragged", balance: Balance | None = None
) -> Plan:
    budget = limits_of(order, batch) if isinstance(batch, CostLimit) else None
    return Plan(
        order=order,
        global_batch_size=1 if isinstance(batch, CostLimit) else batch,
        budget=budget,
        balance=balance,
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
        begin = plan.line(epoch, item.position, rank) + item.low - plan.line(epoch, chunk.position, rank)
        assert np.array_equal(read[begin : begin + item.rows], own), "an item's rows are not where its chunk has them"
        singles = [plan.item_positions(single) for single in plan.cut(item, item.steps)]
        assert np.array_equal(np.concatenate(singles), of_item)
        begin = 0
        for step, size in enumerate(plan.rows_by_step(item)):
            at = plan.after(epoch, item.position, step)
            batches.setdefault(at, []).extend(own[begin : begin + size].tolist())
            begin += size
    return batches


def global_batches(plan: Plan, epoch: int, position: int, item_rows: int = 16) -> Batches:
    """The ranks' batches of each step, one after the other."""
    ranks = [rank_batches(plan, rank, epoch, position, item_rows) for rank in range(plan.dp_size)]
    assert all(list(batches) == list(ranks[0]) for batches in ranks), "ranks make different steps"
    assert len(ranks[0]) == plan.steps(epoch, position)
    return [[row for batches in ranks for row in batches[at]] for at in ranks[0]]


def lognormal(n: int) -> np.ndarray:
    """Lengths of lognormal(5, 1), clipped to 16 to 1,024, as in transformers#47340."""
    lengths = np.random.default_rng(0).lognormal(5, 1, n)
    return np.clip(lengths, 16, 1024).astype(np.int32)


def check_items(plan: Plan, rank: int, position: int, item_rows: int, data: st.DataObject) -> None:
    """An item's rows are where its chunk has them: however chunks are cut; whether their rows were computed before, or
    not; cut items, too.
    """
    chunks, chunk = [], plan.chunk_at(1, position)
    while chunk is not None:
        size = plan.chunk_size(chunk, rank)
        chunks.append(plan.head(chunk, rank, data.draw(st.integers(1, size))) if size else chunk)
        assert plan.chunk_size(chunks[-1], rank) == len(plan.chunk_rows(chunks[-1], rank))
        assert plan.chunk_size(chunks[-1], rank) or not size, "a part of a chunk has rows"
        chunk = plan.next_chunk(chunks[-1])
    planned, found = PlannedRows(plan), []
    for item in plan.items(rank, 1, position, item_rows, chunks=chunks):
        for part in plan.cut(item, data.draw(st.integers(1, 3))):
            if data.draw(st.booleans()):
                planned.of_chunk(part.chunk, rank)
            assert planned.of_item(part).tolist() == plan.item_rows(part).tolist()
            assert plan.is_real(part).tolist() == (plan.item_positions(part) < plan.epoch_rows).tolist()
            found.append(plan.item_positions(part))
    whole = [plan.item_positions(item) for item in plan.items(rank, 1, position, item_rows)]
    assert [*map(int, itertools.chain(*found))] == [*map(int, itertools.chain(*whole))]
    assert pickle.loads(pickle.dumps(plan)) == plan
