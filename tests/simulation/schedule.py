"""What a schedule is: a list of integers that says all that chance decides.

Zero is always the harmless choice (the first of several, no fault, the shortest wait), so that a schedule is made
simpler by zeroing and shortening it.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from raylance.orders.order import Facts, Order
from raylance.orders.sampling import Weighted
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle
from raylance.planning.balance import Balance
from raylance.planning.plan import Chunk, Plan, WorkItem
from raylance.planning.step_size import CostLimit, Remainder
from raylance.testing import SampleRows
from tests.helpers.orders import changed_mixture, grown

T = TypeVar("T")

BITS = 16
RAW_BYTES = 400_000  # of a row as it is thought to be
DECODED_BYTES = 150_000
EPOCH = 1


class Draws:
    """Integers of 16 bits: from a seed, or given (and zeros behind them)."""

    def __init__(self, seed: int | None = None, given: Sequence[int] = ()) -> None:
        self.taken: list[int] = []
        self._given = given
        self._random = None if seed is None else random.Random(seed)

    def bits(self) -> int:
        if self._random is not None:
            value = self._random.getrandbits(BITS)
        else:
            at = len(self.taken)
            value = self._given[at] if at < len(self._given) else 0
        self.taken.append(value)
        return value

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.bits() * len(choices) >> BITS]

    def chance(self, share: float) -> bool:
        return self.bits() >= (1 - share) * (1 << BITS)

    def seconds(self, most: float) -> float:
        return self.bits() * most / (1 << BITS)


# What can go wrong when a helper works on a call, when one is placed, and by itself.
WORK_FAULTS = ("dies", "hangs", "faulted", "lost later", "twice", "late", "slow", "node")
PLACE_FAULTS = ("refused", "hopeless", "delayed", "never placed")
FETCH_FAULTS = ("fetch faulted", "fetch hangs")
TIMED_FAULTS = ("idle dies", "idle hangs", "node dies")


@dataclasses.dataclass(slots=True, kw_only=True)
class Scenario:
    """What a schedule draws before it begins: a plan, the loader's options, and what happens, with its chances."""

    order: int
    rows: int
    remainder: Remainder
    chunk_positions: int
    legs: list[tuple[int, int, int | None]]  # world and global batch size, steps (None: all); how a run is resumed
    decoders: int
    needs_decoder: bool
    decodes: bool
    prefetch_batches: int
    limit_bytes: int
    window_bytes: int
    gives_away: bool  # rows may be gathered once only from a loaded chunk
    varies: float  # times that a row may have more raw bytes than it is thought to have
    bad_rows: frozenset[int]  # that cannot be decoded, or read
    faults: frozenset[str]
    rate: float  # the share of work that they hit
    budget: int  # until there are no more
    breaks: float  # a pass is broken off, and another one begun
    scales: float = 0.0  # another number of decoders, and of several readers, is wanted when batches were taken
    readers: int = 1
    epochs: int = 0  # that follow the one of the legs
    prepares: bool = False  # passes before they are asked for; and the next epoch follows without a gap
    changes: float = 0.0  # what was prepared is given up: another pass is asked for
    dawdles: float = 0.0  # the feeder takes time, in which the consumer acts, over an event or a batch
    placement_timeout_s: float = 20.0
    work_timeout_s: float = 60.0
    fatal_rows: frozenset[int] = frozenset()  # that end the process of what decodes them
    masks: bool = True  # a row that is given up is delivered as a bad one; otherwise it ends the pass
    reach: int = 0  # samples are made of as many rows after their own, too
    fetches_from_chunks: bool = False  # chunks are kept until their items are fetched
    reshards: bool = False  # ranks live on from one leg to the next, with other shares; else new ones resume
    by_block: bool = False  # chunks are decoded by block, and items are not
    margin: int = 0  # that loads need so that each third row can be decoded by block

    @property
    def decodes_items(self) -> bool:
        return self.decodes and not self.by_block


def draw_scenario(draws: Draws) -> Scenario:
    """Draws what happens, small and harmless where the draws are zero."""
    pick = draws.pick
    remainder: Remainder = pick(("drop", "pad", "ragged"))
    rows = pick((4, 7, 12, 1, 24, 33, 60))
    legs: list[tuple[int, int, int | None]] = []
    for _ in range(pick((1, 1, 1, 2, 3))):
        world_size, size = pick((1, 1, 1, 2, 3)), pick((2, 1, 3, 4, 8))
        if remainder != "ragged":
            size = max(size, world_size)
        if remainder == "drop":
            size = min(size, rows)
            world_size = min(world_size, size)
        legs.append((world_size, size, pick((1, 2, 3, 5))))
    legs[-1] = (*legs[-1][:2], None)
    decodes = pick((True, True, True, False))
    bad = frozenset(row for row in range(pick((0, 0, 0, 0, 1, 2))) for row in [draws.bits() % rows])
    groups = pick(((), WORK_FAULTS, PLACE_FAULTS, FETCH_FAULTS, TIMED_FAULTS, "all", "all", "some", "some"))
    kinds = WORK_FAULTS + PLACE_FAULTS + FETCH_FAULTS + TIMED_FAULTS
    if groups == "some":
        groups = {pick(kinds) for _ in range(3)}
    varies = pick((1.0, 1.0, 1.3, 4.0, 20.0))
    reach = 2 if rows % 3 == 0 and not bad else 0  # not drawn, so that the seeds of rare faults still have them
    return Scenario(
        order=pick((0, 1, 2, 3, 4)),
        rows=rows,
        remainder=remainder,
        chunk_positions=pick((1000, 1, 5, 16)),
        legs=legs,
        decoders=pick((2, 1, 3, 0)) if decodes else 0,
        needs_decoder=pick((True, False)),
        decodes=decodes,
        prefetch_batches=pick((2, 0, 1, 3, 4)),
        limit_bytes=int(pick((100, 20, 8, 3, 0.1, 1000)) * (1.5 * RAW_BYTES + DECODED_BYTES * decodes)),
        window_bytes=int(max(reach + 1.0, pick((1000, 40, 12, 4, 1.0))) * RAW_BYTES * max(1.0, varies)),
        gives_away=(gives_away := pick((False, True))),
        varies=varies,
        bad_rows=bad,
        faults=frozenset(kinds if groups == "all" else groups),
        rate=pick((0.0, 0.02, 0.1, 0.4, 0.9)),
        budget=pick((2, 1, 4, 12)),
        breaks=pick((0.0, 0.0, 0.3, 0.7)),
        scales=pick((0.0, 0.0, 0.2, 0.6)),
        readers=pick((1, 1, 2, 3)),
        epochs=pick((0, 0, 0, 1, 2)),
        prepares=pick((False, True, True)),
        changes=pick((0.0, 0.0, 0.3)),
        dawdles=pick((0.0, 0.0, 0.3)),
        fatal_rows=frozenset(draws.bits() % rows for _ in range(pick((0, 0, 0, 0, 0, 1, 1, 2))))
        if decodes
        else frozenset(),
        masks=pick((True, False)),
        reach=reach,
        fetches_from_chunks=rows % 4 == 0 and not gives_away,  # not drawn either
        reshards=rows % 2 == 0,  # nor this
        by_block=draws.taken[0] % 4 == 3,  # nor this: the low bits decide nothing else
        margin=(0, 0, 0, 0, 0, 16, 1000, 1 << 40)[draws.taken[0] // 4 % 8],  # nor this
    )


class PlannedRun:
    """A plan, and what it says, looked up once."""

    def __init__(self, order: int, rows: int, size: int, world_size: int, remainder: Remainder, chunk: int) -> None:
        self.plan = make_plan(order, rows, size, world_size, remainder, chunk)
        self._order = order, rows
        self._steps = _known_steps(order, rows, size, world_size, remainder)

    def step(self, epoch: int, position: int, rank: int) -> list[int]:
        """Rows of a rank's slice of a step, in the order of delivery; padding stands as -1 - row."""
        if (epoch, position, rank) not in self._steps:
            plan, whole = self.plan, _epoch(*self._order, epoch)
            positions = plan.positions(epoch, position, *plan.rank_slice(epoch, position, rank)).tolist()
            rows = [whole[p] if p < len(whole) else -1 - whole[p % len(whole)] for p in positions]
            self._steps[epoch, position, rank] = rows
        return self._steps[epoch, position, rank]

    def has(self, epoch: int, position: int, rank: int, row: int) -> bool:
        """Whether a rank's slice of a step has a row, maybe as padding."""
        return not {row, -1 - row}.isdisjoint(self.step(epoch, position, rank))

    def of_chunk(self, chunk: Chunk, rank: int) -> list[int]:
        """Rows of a rank's chunk in the order of delivery, padding as the rows that it repeats."""
        found = [self.step(chunk.epoch, at, rank)[number] for at, number in self.places(chunk, rank)]
        return [row if row >= 0 else -1 - row for row in found]

    def places(self, chunk: Chunk, rank: int) -> Iterator[tuple[int, int]]:
        """Of each row of a rank's chunk, in the order of delivery: the position of its step, and its number there."""
        for number, at in enumerate(self.plan.starts(chunk.epoch, chunk.position, chunk.steps)):
            end = chunk.high if number == chunk.steps - 1 else None
            rows = range(len(self.step(chunk.epoch, at, rank)))[chunk.low if number == 0 else 0 : end]
            yield from ((at, row) for row in rows)

    def rows(self, item: WorkItem) -> list[int]:
        """Rows of an item."""
        found: list[int] = []
        for at in self.plan.starts(item.epoch, item.position, item.steps):
            found += self.step(item.epoch, at, item.dp_rank)
        return found[item.low : item.high]


@functools.cache
def _epoch(order: int, rows: int, epoch: int) -> list[int]:
    found: list[int] = make_plan(order, rows, 1, 1, "ragged", 1).select(epoch, np.arange(rows)).tolist()
    return found


@functools.cache
def _known_steps(*_: object) -> dict[tuple[int, int, int], list[int]]:
    return {}


@functools.cache
def planned(order: int, rows: int, size: int, world_size: int, remainder: Remainder, chunk: int) -> PlannedRun:
    return PlannedRun(order, rows, size, world_size, remainder, chunk)


def make_plan(order: int, rows: int, size: int, world_size: int, remainder: Remainder, chunk: int) -> Plan:
    """The one place that makes a plan."""
    kinds: tuple[Order, ...] = (
        Sequential(shard_rows=4, window_shards=1, lanes=1),
        RowShuffle(shard_rows=4),
        WindowShuffle(shard_rows=3, window_shards=2, lanes=2),
        ShardShuffle(shard_rows=4, window_shards=1, lanes=1),
        Weighted(weights=1.0 + np.arange(rows) % 3, shard_rows=3),
    )
    if rows in (12, 60):  # not drawn: runs whose rows and weights have changed in the epoch
        kinds = (
            *kinds[:2],
            grown(kinds[2], rows, (EPOCH, rows // 3), rows // 2, 7),
            kinds[3],
            changed_mixture(rows, EPOCH),
        )
    costs = np.arange(rows) * 5 % 7
    bound, tables = kinds[order].bind(SampleRows(count=rows))
    return Plan(
        order=bound.resolve(Facts(rows=rows, seed=7, tables={**tables, "cost": costs.astype(np.int32)})),
        global_batch_size=size,
        # Not drawn, so that the seeds of rare faults still have them.
        budget=CostLimit(cost=4 * size, padded=size % 2 == 0) if rows in (24, 33) else None,
        balance=Balance(equal_rows=rows == 33, most_moved=0.5) if rows in (24, 33) else None,
        dp_size=world_size,
        remainder=remainder,
        chunk_positions=chunk,
    )
