"""Owns how a schedule is played: pump, assembly and consumer of a rank's passes, as feeder and loader have them, in
virtual time; never decides what goes wrong.
"""

import contextlib
import dataclasses
import itertools
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raylance.dispatch.dispatcher import Dispatcher
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.messages import (
    Begin,
    Close,
    Complete,
    Deliver,
    Event,
    GiveUp,
    GiveUpPlacing,
    Kind,
    Observation,
    Output,
    Taken,
    Wake,
    Wanted,
)
from raylance.dispatch.scaling import Scaler
from raylance.dispatch.sizes import Sizes
from raylance.errors import PlacementError
from raylance.planning.plan import Plan, WorkItem
from tests.simulation.schedule import (
    BITS,
    DECODED_BYTES,
    EPOCH,
    RAW_BYTES,
    Draws,
    PlannedRun,
    Scenario,
    draw_scenario,
    planned,
)
from tests.simulation.strict import StrictWatch
from tests.simulation.watch import Broken
from tests.simulation.world import RowError, World

MOST_EVENTS = 6_000
MOST_PASSES = 60
MOST_CPU_S = 5.0  # of a schedule, which takes hundredths of one
Log = Callable[[str], None] | None


class Whim(Scaler):
    """Wants other numbers of helpers by chance."""

    def __init__(self, draws: Draws, scenario: Scenario, kind: Kind) -> None:
        begin = scenario.decoders if kind == "decoder" else scenario.readers
        super().__init__(1, begin + 2, begin, kind)
        self._draws, self._chance, self._last = draws, scenario.scales, begin + 2

    def stepped(self, now: float) -> list[Output]:
        if self._draws.chance(self._chance):
            self.wanted = 1 + self._draws.bits() * self._last // (1 << BITS)
        return []

    def refused(self, running: int) -> None:
        self.wanted = running


@dataclasses.dataclass
class Wrong:
    """What to play with; the real ones, unless it is to be shown that wrong ones are caught."""

    dispatcher: type[Dispatcher] = Dispatcher
    pool: type[HelperPool] = HelperPool
    sizes: type[Sizes] = Sizes


def describe(item: WorkItem) -> str:
    return f"{item.position}:{item.low}-{item.high}"


def make_pool(scenario: Scenario, made_of: Wrong) -> HelperPool:
    """As the runtime makes it."""
    return made_of.pool(
        readers=scenario.readers,
        decoders=scenario.decoders,
        require_all=scenario.require_all,
        placement_timeout_s=scenario.placement_timeout_s,
        work_timeout_s=scenario.work_timeout_s,
    )


def make_dispatcher(
    scenario: Scenario,
    pool: HelperPool,
    plan: Plan,
    rank: int,
    position: int,
    made_of: Wrong,
    *,
    row_bytes: tuple[int, int] = (RAW_BYTES, DECODED_BYTES),
    is_early: bool = False,
    end: int | None = None,
    scalers: Sequence[Scaler] = (),
) -> Dispatcher:
    """As the helpers of a loader make it; `row_bytes` are raw and decoded ones, `is_early` has the first step go to all
    decoders, and items that begin at `end` are left out.
    """
    sizes = made_of.sizes(
        raw_bytes=row_bytes[0],
        decoded_bytes=row_bytes[1] if scenario.decodes else 0,
        limit_bytes=scenario.limit_bytes,
        items=2 * max(1, scenario.decoders) + 1,
    )
    low, high = plan.rank_slice(position, rank)
    first_rows = -(-(high - low) // max(1, scenario.decoders)) if is_early else 0
    items = plan.items(rank, EPOCH, position, sizes.item_rows(), first_rows)
    wanted = list(itertools.takewhile(lambda item: end is None or item.position < end, items))
    return made_of.dispatcher(
        plan=plan,
        rank=rank,
        items=wanted,
        position=position,
        pool=pool,
        sizes=sizes,
        decodes=scenario.decodes,
        prefetch_batches=scenario.prefetch_batches,
        work_timeout_s=scenario.work_timeout_s,
        describe=describe,
        scalers=scalers,
    )


class Rank:
    """One rank: its machines, which outlive passes, and what it was handed."""

    def __init__(
        self,
        draws: Draws,
        scenario: Scenario,
        made_of: Wrong,
        counts: Counter[str],
        log: Log,
        world: type[World] = World,
    ) -> None:
        self.world_type = world
        self.draws, self.scenario, self.made_of, self.counts, self.log = draws, scenario, made_of, counts, log
        self.budget = scenario.budget
        self.steps: list[list[int]] = []
        self.events = 0
        self._start()

    def _start(self) -> None:
        """Begins with new helpers."""
        self.watch = StrictWatch(self.scenario)
        self.world = self.world_type(self.draws, dataclasses.replace(self.scenario, budget=self.budget), self.watch)
        self.watch.world = self.world
        self.pool = make_pool(self.scenario, self.made_of)
        kinds: dict[Kind, bool] = {"decoder": bool(self.scenario.decoders), "reader": self.scenario.readers > 1}
        scales = [kind for kind, is_scaled in kinds.items() if is_scaled and self.scenario.scales]
        self.scalers = [Whim(self.draws, self.scenario, kind) for kind in scales]

    def go(self, run: PlannedRun, rank: int, position: int, end: int) -> bool:
        """Consumes from a position up to another one; whether it got there, or a row's error ended it."""
        for _ in range(MOST_PASSES):
            if position >= end:
                return True
            one = Pass(self, run, rank, position, end)
            one.run()
            position = one.after
            for name, count in (self.world.counts + Counter(self.watch.recovered)).items():
                self.counts[name] += count
            self.world.counts.clear()
            self.watch.recovered.clear()
            if isinstance(one.error, RowError):
                return False
            if self.pool.failure is not None:
                self.budget = max(0, self.budget - self.world.faults)
                self._start()
            elif one.error is None and position < end and not one.was_broken_off:
                raise Broken("liveness", f"the pass is over at {position}, before {end}")
            else:
                self.world.busy((0.0, 0.0, 1.0, 200.0)[self.draws.bits() >> 14])
        raise Broken("liveness", f"{MOST_PASSES} passes, and still at {position} of {end}")


class Pass:
    """One pass: what the feeder's thread and the consumer do."""

    def __init__(self, rank: Rank, run: PlannedRun, number: int, position: int, end: int) -> None:
        scenario, draws = rank.scenario, rank.draws
        self.rank, self.world, self.watch, self.log = rank, rank.world, rank.watch, rank.log
        self.after, self.end_at = position, end
        self.error: BaseException | None = None
        self.was_broken_off = False
        self._finished: deque[tuple[int, list[int]]] = deque()
        self._wants = False
        self._taken: int | None = None
        self.deadline: float | None = None
        self._room = max(1, scenario.prefetch_batches)
        self._draws = draws
        self._stop_after = draws.bits() % 4 if draws.chance(scenario.breaks) else None
        self.is_stopped = self.is_last = False
        rank.counts["passes"] += 1
        rank.counts["passes with helpers of before"] += bool(rank.world.helpers)
        if self._stop_after == 0:  # an interrupt while it waits
            self.world.later(draws.seconds(4.0), self._interrupt)
        self._laziness = (0.0, 0.0, 0.3, 5.0)[draws.bits() >> 14]
        self.world.planned = run
        self.watch.begin(run, number, position)
        self.dispatcher = make_dispatcher(
            scenario, rank.pool, run.plan, number, position, rank.made_of, scalers=rank.scalers
        )
        self._want()

    # The consumer.

    def _want(self) -> None:
        self._wants = True
        self._take()

    def _take(self) -> None:
        if self.is_stopped or not (self._wants and self._finished):
            return
        self._wants = False
        self.after, rows = self._finished.popleft()
        self.rank.steps.append(rows)
        self._taken = self.after
        self.world.post(Wake())
        if self._stop_after is not None:
            self._stop_after -= 1
        if self.after >= self.end_at or (self._stop_after is not None and self._stop_after <= 0):
            self._interrupt()
        elif self._laziness:
            self.world.later(self._draws.seconds(self._laziness), self._want)
        else:
            self._want()

    def _interrupt(self) -> None:
        self.is_stopped = self.was_broken_off = True
        self.rank.counts["broken off"] += self.after < self.end_at
        self.world.post(Wake())

    # The feeder.

    def run(self) -> None:
        """Goes on until the pass is over, or broken off."""
        self.begin()
        while not (self.is_last or self.is_stopped):
            self.tell(self._next_event())
        self.end()

    def begin(self) -> None:
        for event in (Begin(), Wanted()):
            self._settle(event, self.dispatcher.handle(event, self.world.now))

    def tell(self, event: Event | None) -> None:
        """Tells the dispatcher what happened, and does what it wants."""
        if self.is_stopped:  # it may be about helpers, which outlive the pass
            self._close()
        self.watch.told(event)
        self._settle(event, self.dispatcher.handle(event, self.world.now))

    def _settle(self, event: Any, outputs: list[Output]) -> None:
        self._tell_log(event)
        for output in outputs:
            self._do(output)
        self.deadline = self.dispatcher.deadline()
        self.watch.settled(event, self.deadline, self.world.now)
        self._finish()

    def end(self) -> None:
        """Ends the pass, when the consumer has taken what there is."""
        if self.is_last:
            self._drain()
        self._close()
        self.watch.closed()

    def _close(self) -> None:
        for output in self.dispatcher.handle(Close(), self.world.now):
            self._do(output)

    def _tell_log(self, event: Any) -> None:
        self.rank.events += 1
        if self.rank.events > MOST_EVENTS:
            raise Broken("liveness", f"{MOST_EVENTS} events, and no end")
        if self.log is not None:
            self.log(f"{self.world.now:8.2f} {event}")

    def taken(self) -> Event | None:
        """What the consumer has to say."""
        taken, self._taken = self._taken, None
        return None if taken is None else Taken(taken)

    def _next_event(self) -> Event | None:
        world, taken = self.world, self.taken()
        if taken is not None:
            return taken
        while not world.inbox:
            deadline = self.deadline
            if deadline is not None and deadline <= world.now:
                return None
            before = world.now
            if not world.pass_time(deadline):
                raise Broken("deadlock", f"nothing will happen any more after {before:.2f} s")
            if deadline is not None and world.now >= deadline and not world.inbox:
                return None
        return world.inbox.popleft()

    def _do(self, command: Any) -> None:
        if isinstance(command, Observation):
            return
        if self.log is not None:
            self.log(f"             {command}")
        self.watch.commanded(command, self.world.now)
        self.is_last = self.is_last or isinstance(command, Complete | GiveUp | GiveUpPlacing)
        if isinstance(command, GiveUp):
            self.error = command.error
        elif isinstance(command, GiveUpPlacing):
            self.error = PlacementError(str(command))
        elif not isinstance(command, Complete | Deliver):
            self.world.do(command)

    def _finish(self) -> None:
        """Makes batches of whole steps, as many as have room."""
        while self.watch.steps and len(self._finished) < self._room:
            self._finished.append(self.watch.steps.pop(0))
            self._take()

    def _drain(self) -> None:
        """Waits for the consumer, when nothing else is awaited."""
        while not self.is_stopped and (self.watch.steps or self._finished):
            self._finish()
            if self._finished and not self.is_stopped and not self.world.pass_time(None):
                raise Broken("deadlock", "the consumer takes no more")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Ends a decision that has no end, where no event is counted any more: by CPU time, whatever else runs here."""

    def end(*_: object) -> None:
        raise Broken("liveness", f"{MOST_CPU_S:g} s of computing, and no end")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def play(draws: Draws, made_of: Wrong | None = None, log: Log = None) -> Counter[str]:
    """Plays a schedule; returns what was injected, and how often.

    Raises:
        Broken: With what does not hold.
    """
    with limited():
        return _play(draws, made_of, log)


def _play(draws: Draws, made_of: Wrong | None, log: Log) -> Counter[str]:
    scenario, counts, wrong = draw_scenario(draws), Counter[str](), made_of or Wrong()
    if log is not None:
        log(str(scenario))
    position, got = 0, list[int]()
    for world_size, size, steps in scenario.legs:
        run = planned(scenario.order, scenario.rows, size, world_size, scenario.remainder, scenario.chunk_positions)
        plan = run.plan
        left = max(0, plan.steps(position)) if steps is None else min(steps, max(0, plan.steps(position)))
        end = position
        for _ in range(left):
            end = plan.after(end)
        for number in range(world_size):
            rank = Rank(draws, scenario, wrong, counts, log)
            if not rank.go(run, number, position, end):
                return counts  # every rank ends here, for good
            got += [row for rows in rank.steps for row in rows if row >= 0]
        counts["resumed with other sizes"] += position > 0
        position = end
    if len(got) != position or (scenario.order != 4 and len(set(got)) != position):
        raise Broken("order", f"{len(got)} rows, {len(set(got))} of them different, and {position} were to come")
    counts["rows"] += len(got)
    return counts
