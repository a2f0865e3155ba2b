"""Owns ranks in simulated time and what they share: storage, network, starting actors, the barrier of synchronous
training. Never injects a fault but the death that it was asked for, and never measures: what things take is given.

`simulate` is where it starts; `tests/simulation/scale` prints what it gives, and compares it with real runs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from raylance.orders.order import Facts
from raylance.planning.plan import Plan
from tests.simulation.schedule import EPOCH, Scenario
from tests.simulation.timed import Setting, TimedRank
from tests.simulation.world import Clock

AT_ONCE = 64  # requests that a reader has in flight


@dataclasses.dataclass(kw_only=True)
class Found:
    """What was simulated.

    Attributes:
        seconds: From the start to the end of the last step.
        first_batch_s: From the start until every rank has its first batch.
        rows_per_s: Of all ranks together, from the first batch on.
        ideal_rows_per_s: The same, had no rank ever waited for a batch: the slowest step of any rank counts.
        stall: Share of the time of the second half of the steps that waiting for batches costs: all wait for the last.
        own_wait: Share of the time from the first batch on that a rank waits for its own, the mean over ranks.
        inflight_bytes: Most that one rank has in the object store and in finished batches.
        held_bytes: Most that one shard actor holds.
        requests_per_row: To the storage.
        longest_step_s: Between the ends of two steps.
        events: That the dispatchers were told.
        decide_s: Real seconds that they took for one of them.
    """

    rows: int = 0
    seconds: float = 0.0
    first_batch_s: float = 0.0
    rows_per_s: float = 0.0
    ideal_rows_per_s: float = 0.0
    stall: float = 0.0
    own_wait: float = 0.0
    inflight_bytes: int = 0
    held_bytes: int = 0
    requests_per_row: float = 0.0
    longest_step_s: float = 0.0
    events: int = 0
    decide_s: float = 0.0


class Queue:
    """What serves one after the other at a rate."""

    def __init__(self, per_s: float) -> None:
        self._per_s, self._free_at = per_s, 0.0

    def take(self, now: float, amount: float) -> float:
        """Reserves; returns when it is served."""
        self._free_at = max(now, self._free_at) + amount / self._per_s
        return self._free_at


class Fleet:
    """All ranks, by one clock."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.clock = Clock()
        self.plan = make_plan(setting)
        self.requests_per_row = requests_per_row(self.plan, setting)
        nodes = -(-setting.ranks // setting.ranks_per_node)
        self.storage = Queue(setting.storage_bytes_s), Queue(setting.storage_requests_s)
        self.arriving = [Queue(setting.network_bytes_s) for _ in range(nodes)]
        self.leaving = [Queue(setting.network_bytes_s) for _ in range(nodes)]
        self.starting, self.starting_on = Queue(setting.actors_s), [Queue(setting.node_actors_s) for _ in range(nodes)]
        self.end = self.plan.global_batch_size * setting.steps
        self.scenario = Scenario(
            order=0, rows=setting.rows, remainder="drop", chunk_positions=1, legs=[], decoders=setting.decoders,
            needs_decoder=True, decodes=True, prefetch_batches=setting.prefetch_batches,
            limit_bytes=setting.max_inflight_bytes, blocks=True, varies=1.0, bad_rows=frozenset(), faults=frozenset(),
            rate=0.0, budget=0, breaks=0.0, placement_timeout_s=1e6, work_timeout_s=1e6, readers=setting.readers,
        )  # fmt: skip
        self.ranks = [TimedRank(self, number) for number in range(setting.ranks)]
        self.ended: list[float] = []  # when each step ended
        self.longest_s: list[float] = []  # that each step takes on the rank where it takes longest
        self.first_batch_s = 0.0
        self._left, self._longest_s = setting.ranks, 0.0

    def go(self) -> Found:
        """Trains until the last step has ended."""
        for rank in self.ranks:
            rank.begin()
        while len(self.ended) < self.setting.steps:
            if not self.clock.pass_time(None):
                raise RuntimeError(f"nothing will happen any more after step {len(self.ended)}")
        setting, ranks = self.setting, self.ranks
        rows, begin = setting.batch_size * setting.ranks * setting.steps, self.first_batch_s
        self.longest_s[0] = self.ended[0] - begin  # whoever began it before the last did is not waited for
        took_s = self.ended[-1] - begin
        half = setting.steps // 2
        half_s = self.ended[-1] - (self.ended[half - 1] if half else begin)
        events = sum(rank.events for rank in ranks)
        return Found(
            rows=rows,
            seconds=self.ended[-1],
            first_batch_s=begin,
            rows_per_s=rows / max(took_s, 1e-12),
            ideal_rows_per_s=rows / max(sum(self.longest_s), 1e-12),
            stall=max(0.0, 1 - sum(self.longest_s[half:]) / max(half_s, 1e-12)),
            own_wait=sum(rank.waited_s for rank in ranks) / setting.ranks / max(took_s, 1e-12),
            inflight_bytes=max(rank.most_bytes for rank in ranks),
            held_bytes=max(reading.most_bytes for rank in ranks for reading in rank.reading.values()),
            requests_per_row=self.requests_per_row,
            longest_step_s=float(max(np.diff([begin, *self.ended]))),
            events=events,
            decide_s=sum(rank.decided_s for rank in ranks) / max(1, events),
        )

    # The barrier: a step ends when it has ended everywhere.

    def stepped(self, seconds: float, step: int) -> None:
        """A rank begins a step."""
        self._longest_s = max(self._longest_s, seconds)
        if step == 0:
            self.first_batch_s = max(self.first_batch_s, self.clock.now)
        self.clock.later(seconds, self._ended)

    def _ended(self) -> None:
        self._left -= 1
        if self._left:
            return
        self.ended.append(self.clock.now)
        self.longest_s.append(self._longest_s)
        self._left, self._longest_s = self.setting.ranks, 0.0
        if self.setting.dies and len(self.ended) == self.setting.steps // 2:
            self.ranks[0].die(self.setting.dies)
        if len(self.ended) < self.setting.steps:
            for rank in self.ranks:
                rank.want()

    # What is shared.

    def read(self, node: int, rows: int, then: Callable[..., None], *about: Any) -> None:
        """Reads rows from the storage."""
        now, setting, nbytes = self.clock.now, self.setting, rows * self.setting.raw_bytes
        requests = max(1.0, rows * self.requests_per_row, nbytes / setting.request_bytes)
        served = [
            self.storage[0].take(now, nbytes),
            self.storage[1].take(now, requests),
            self.arriving[node].take(now, nbytes),
            now + setting.storage_wait_s * math.ceil(requests / AT_ONCE) + nbytes / setting.reader_bytes_s,
        ]
        self.clock.later(max(served) - now, then, *about)


def make_plan(setting: Setting) -> Plan:
    """The plan as loaders make it."""
    size = setting.batch_size * setting.ranks
    facts = Facts(
        rows=setting.rows, seed=setting.seed, row_bytes=setting.raw_bytes, global_batch_size=size,
        window_bytes=setting.max_window_bytes,
    )  # fmt: skip
    order = setting.order.resolve(facts)
    fitting = max(order.lane_count, int(setting.max_window_bytes / 2 * setting.ranks / setting.raw_bytes))
    chunk = min(order.read_positions or fitting, fitting)
    return Plan(order=order, global_batch_size=size, dp_size=setting.ranks, remainder="drop", chunk_positions=chunk)


def requests_per_row(plan: Plan, setting: Setting) -> float:
    """Runs of rows that lie together in the storage, of what some ranks read together, by the plan itself."""
    chunk, runs, rows = plan.chunk_at(EPOCH, 0), 0, 0
    for _ in range(8):  # windows and steps need not end together, so that chunks differ
        for rank in {0, setting.ranks // 2, setting.ranks - 1} if chunk is not None else ():
            stored = np.sort(plan.chunk_rows(chunk, rank))
            runs, rows = runs + 1 + int(np.count_nonzero(np.diff(stored) != 1)), rows + len(stored)
        chunk = None if chunk is None else plan.next_chunk(chunk)
    return runs / max(1, rows)


def simulate(setting: Setting) -> Found:
    """Trains some steps on simulated machines; the same arguments give the same, but for `decide_s`."""
    return Fleet(setting).go()
