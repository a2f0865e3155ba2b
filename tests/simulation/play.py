"""How a schedule is played: a consumer in virtual time, who drives the loader's own session and the feeder's own
loop over a simulated runtime; never decides what goes wrong.

Only threads are replaced: the feeder's loop runs in the one thread there is, and while it waits, time passes and the
consumer acts.
"""

import contextlib
import dataclasses
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from raylance.batches.assembly import DeliveredStep
from raylance.dispatch.dispatcher import Dispatcher, Kept
from raylance.dispatch.messages import Close, Decode, Event, Fetch, Gather, Kind, Observation, Output
from raylance.dispatch.scaling import Scaler
from raylance.dispatch.states import PassState
from raylance.observe import Stats
from raylance.observe.observations import Status
from raylance.planning.plan import Plan, WorkItem
from raylance.runtime import session
from raylance.runtime.feeder import Feeder
from raylance.runtime.session import Session
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
from tests.simulation.world import Clock, RowError, World

MOST_EVENTS = 10_000  # the slowest of 100,000 schedules has some 6,000
MOST_PASSES = 60
MOST_CPU_S = 2.0  # of a schedule, which takes hundredths of one
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


# ---- what the feeder is given


class Watched:
    """A dispatcher that is watched."""

    def __init__(self, dispatcher: Dispatcher, rank: "Rank") -> None:
        self.dispatcher, self._rank = dispatcher, rank
        self.status: Status | None = None  # the last one

    def handle(self, event: Event | None, now: float) -> list[Output]:
        watch, log = self._rank.watch, self._rank.log
        self._rank.count_event()
        watch.told(event)
        outputs = self.dispatcher.handle(event, now)
        if log is not None:
            log(f"{now:8.2f} {event}")
        for output in outputs:
            self.status = output if isinstance(output, Status) else self.status
            if log is not None and not isinstance(output, Observation):
                log(f"             {output}")
            watch.commanded(output, now)
        if not isinstance(event, Close):
            watch.settled(event, self.dispatcher.deadline(), now)
        return outputs

    def deadline(self) -> float | None:
        found = self._rank.world.deadline = self.dispatcher.deadline()
        return found


class Rows(list[int]):
    """Rows in the place of those of a step, and in the place of their table."""

    nbytes = 0
    item = SimpleNamespace(names=())

    def table(self) -> "Rows":
        return self

    @property
    def num_rows(self) -> int:
        return len(self)

    def take(self, places: Any) -> "Rows":
        return self


class RowAssembly:
    """The whole steps of the items that were delivered."""

    def __init__(self, plan: Plan, epoch: int, position: int) -> None:
        self._plan, self._epoch, self._after = plan, epoch, position
        self._part: list[int] = []
        self._steps: deque[Rows] = deque()

    def add(self, item: WorkItem, plain: Any, decoded: Any) -> None:
        begin = 0
        for rows in self._plan.rows_by_step(item):
            self._part += decoded.rows[begin : begin + rows]
            begin += rows
            if self._plan.ends_step(item):
                self._steps.append(Rows(self._part))
                self._part = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def describe(self, rows: Rows) -> str:
        return f"rows {rows}"

    def next_step(self) -> tuple[Rows, DeliveredStep]:
        if self._plan.is_over(self._epoch, self._after):
            self._epoch, self._after = self._epoch + 1, 0
        rows, before = self._steps.popleft(), self._after
        self._after = self._plan.after(self._epoch, before)
        is_last = self._plan.is_over(self._epoch, self._after)
        sizes: Any = {"rows": len(rows), "nbytes": 0, "masked": (), "digest": None}
        step = DeliveredStep(epoch=self._epoch, before=before, after=self._after, is_last=is_last, **sizes)
        return rows, step


class Condition:
    """In the place of a lock: there is one thread. Waiting lets time pass, and the consumer act."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._rank.clock.pass_time(None):
            raise Broken("deadlock", "the consumer takes no more")

    def notify_all(self) -> None:
        self._rank.look_again()


class RunByHand:
    """In the place of a thread: what it would run, the rank runs."""

    def __init__(self, feeder: "HandFeeder") -> None:
        self._feeder = feeder

    def is_alive(self) -> bool:
        return not self._feeder._thread_ends

    def join(self, timeout_s: float) -> None:
        """Has it run where it was not run yet; one that runs now cannot be waited for in here."""
        to_run = self._feeder.rank.to_run
        if self._feeder in to_run:
            to_run.remove(self._feeder)
            self._feeder.run()


class HandFeeder(Feeder):
    """The feeder, without its thread."""

    def __init__(self, rank: "Rank", dispatcher: Any, runtime: World, assembly: Any, observer: Any) -> None:
        super().__init__(dispatcher, runtime, assembly, observer, rank.session._masked)
        self.rank = rank
        self._changed: Any = Condition(rank)
        self._thread: Any = RunByHand(self)
        self._broken: BaseException | None = None
        self._most = 0  # batches to make ahead

    def bind(self, spec: Any, on_device: Any = None) -> None:
        self._most = max(1, spec.prefetch_batches)
        super().bind(spec, on_device)

    def start(self) -> None:
        self.rank.to_run.append(self)

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self._broken is not None:
                raise self._broken
        self.rank.watch.closed()

    def step(self) -> None:
        try:
            super().step()
            status = self._dispatcher.status
            if (
                self._is_awaited
                and not (self._said or self._assembly or self._state is not PassState.RUNNING)
                and status.cause is None
            ):
                raise Broken("cause", "the consumer waits, and the status names no cause")
            if self.is_closed and self._finished:
                raise Broken("left", "a batch is added to a pass that is closed")
            if len(self._finished) > self._most:
                raise Broken(
                    "bytes", f"{len(self._finished)} batches wait for the consumer, who asked for {self._most} ahead"
                )
        except BaseException as raised:  # no error of the consumer's: those are outputs
            self._broken = self._broken or raised
            raise

    def _next_event(self) -> Any:
        event = super()._next_event()
        if event is not None:  # else what comes now would have come in time
            self.rank.dawdle()
        return event

    def _do(self, outputs: list[Output], now: float) -> None:
        if self.is_closed and any(isinstance(output, Gather | Decode | Fetch) for output in outputs):
            raise Broken("left", f"work is begun for a pass that is closed: {outputs}")
        super()._do(outputs, now)


class SimulatedSession(Session):
    """A session whose runtime is simulated, and whose feeders are run by hand."""

    def __init__(self, rank: "Rank") -> None:
        scenario = rank.scenario
        source = SimpleNamespace(loaded_bytes=RAW_BYTES, rows_each=1.0, sample_bytes=RAW_BYTES, uri="rows")
        whole = SimpleNamespace(row_bytes=DECODED_BYTES)
        items, blocks = (None, SimpleNamespace(row_bytes=0)) if scenario.by_block else (whole, None)
        decoding = SimpleNamespace(max_bad_rows=None, datasets=(), of_items=items, of_blocks=blocks)
        done = decoding if scenario.decodes else None
        read_spec: Any = SimpleNamespace(source=source, decoding=done, in_helpers=done, on_device=None)
        most_readers = scenario.readers + 2 * bool(scenario.readers > 1 and scenario.scales)
        options: Any = SimpleNamespace(
            reader_range=(scenario.readers, most_readers),
            decoder_range=(scenario.decoders, scenario.decoders),
            inflight_bytes=scenario.limit_bytes,
            reader_bytes=scenario.window_bytes,
            placement_timeout_s=scenario.placement_timeout_s,
            work_timeout_s=scenario.work_timeout_s,
        )
        super().__init__(read_spec, options, spans_epochs=scenario.prepares)
        self._rank = rank

    def _make_runtime(self) -> World:
        return self._rank.make_world()

    def _make_scaler(self, kind: Kind, least: int, most: int, first: int) -> Scaler:
        return Whim(self._rank.draws, self._rank.scenario, kind)

    def _make_dispatcher(self, kept: Kept, wanted: Any) -> Any:
        rank = self._rank
        rank.counts["passes"] += 1
        rank.counts["passes with helpers of before"] += bool(rank.world.helpers)
        where = wanted.dp_rank, wanted.epoch, wanted.position, wanted.prefetch_batches
        rank.watch.begin(rank.planned, *where, spans_epochs=rank.scenario.prepares)
        made = super()._make_dispatcher(kept, wanted)
        made._describe = describe
        return Watched(made, rank)

    def _make_feeder(self, runtime: Any, dispatcher: Any, planned: Any, wanted: Any, observer: Any) -> Feeder:
        assembly = RowAssembly(wanted.plan, wanted.epoch, wanted.position)
        return HandFeeder(self._rank, dispatcher, runtime, assembly, observer)


def describe(item: WorkItem) -> str:
    return f"{item.position}:{item.low}-{item.high}"


# ---- the consumer


class Rank:
    """One rank: its session, which outlives passes, and its consumer, who takes batches as a loader does."""

    def __init__(
        self,
        draws: Draws,
        scenario: Scenario,
        run: PlannedRun,
        number: int,
        counts: Counter[str],
        log: Log,
        world: type[World] = World,
    ) -> None:
        self.world_type = world
        self.draws, self.scenario, self.counts, self.log = draws, scenario, counts, log
        self.planned, self._number = run, number
        self.budget = scenario.budget
        self.clock = Clock()
        self.events = 0
        self.to_run: deque[HandFeeder] = deque()
        self.got: dict[int, list[int]] = {}  # rows that were taken, by epoch
        self.place = (EPOCH, 0)  # where the next batch begins
        self.error: BaseException | None = None
        self._goal = (EPOCH, 0)
        self._feeder: Feeder | None = None
        self._has_left = self._is_waiting = self._has_prepared = self._has_all = False
        self._then: int | None = None  # batches to prefetch of the pass to start, once no feeder runs
        self._stop_after: int | None = None
        self._laziness = 0.0
        self.world: World | None = None
        self.stats = Stats()
        self.session = SimulatedSession(self)

    def make_world(self) -> World:
        """New machines, with what is left of the faults."""
        if self.world is not None:
            self._check_left()
            self.budget = max(0, self.budget - self.world.faults)
            self._count_faults()
        scenario = dataclasses.replace(self.scenario, budget=self.budget)
        self.watch = StrictWatch(scenario)
        self.world = self.watch.world = self.world_type(self.draws, scenario, self.watch, self.clock)
        self.world.planned = self.planned
        return self.world

    def _count_faults(self) -> None:
        for name, count in (self.world.counts + Counter(self.watch.recovered)).items():
            self.counts[name] += count
        self.world.counts.clear()
        self.watch.recovered.clear()

    def count_event(self) -> None:
        self.events += 1
        if self.events > MOST_EVENTS:
            raise Broken("liveness", f"{MOST_EVENTS} events, and no end")

    def reshard(self, run: PlannedRun, number: int) -> None:
        """Takes another share; session and helpers stay."""
        self.planned, self._number, self.got = run, number, {}
        if self.world is not None:
            self.world.planned = run

    def go(self, position: int, goal: tuple[int, int]) -> bool:
        """Consumes from a position of the first epoch up to a place; returns False where a row's error ended it."""
        self.aim(position, goal)
        for _ in range(MOST_PASSES):
            if self.place >= goal:
                return True
            self.begin()
            while self.to_run or self._then is not None or not self._has_left:
                if self._then is not None:
                    prefetch_batches, self._then = self._then, None
                    self._start(prefetch_batches)
                elif self.to_run:
                    self.to_run.popleft().run()
                elif not self.clock.pass_time(None):
                    raise Broken("deadlock", "the consumer waits for ever")
            if isinstance(self.error, RowError) or "no other row was decoded" in str(self.error):
                return False
            self.clock.busy((0.0, 0.0, 1.0, 200.0)[self.draws.bits() >> 14])
        raise Broken("liveness", f"{MOST_PASSES} passes, and still at {self.place} of {goal}")

    def aim(self, position: int, goal: tuple[int, int]) -> None:
        """Goes to a position, to consume from there up to a place."""
        self._goal = goal
        self.place = (EPOCH, position) if not self.planned.plan.is_over(EPOCH, position) else (EPOCH + 1, 0)

    def end(self) -> None:
        """Closes the session, and all that it holds."""
        self.session.close()
        if self.world is None:  # no step was left
            return
        self._count_faults()
        self._check_left()
        if self.session._prepared is not None or self.session.runtime is not None:
            raise Broken("left", "a session that is closed has a prepared pass, or a runtime")

    def _check_left(self) -> None:
        """Nothing is left of a world that nobody uses any more."""
        up = [n for n, helper in self.world.helpers.items() if helper.state in ("up", "placing")]
        if up or self.world.table:
            raise Broken("left", f"helpers {up} and calls {sorted(self.world.table)} after the runtime was closed")

    def begin(self) -> None:
        """Begins a pass: at times one that was prepared, at times in the place of one that was."""
        draws, scenario = self.draws, self.scenario
        self.error, self._has_left, self._is_waiting, self._has_all = None, False, False, False
        self.session._take_prepared(None)
        self._has_prepared = False
        if scenario.prepares and draws.chance(scenario.changes):
            epoch, position = self.place
            self._prepare(*((epoch + 1, 0) if draws.chance(0.3) else (epoch, position)))
        self._stop_after = draws.bits() % 4 if draws.chance(scenario.breaks) else None
        self._laziness = (0.0, 0.0, 0.3, 5.0)[draws.bits() >> 14]
        if self._has_prepared and draws.chance(0.5):  # the loader is prepared before it is iterated
            self.clock.later(draws.seconds(4.0), self._ask)
        else:
            self._ask()

    def _prepare(self, epoch: int, position: int) -> None:
        where = {"epoch": epoch, "position": position, "prefetch_batches": self.scenario.prefetch_batches}
        self.session.prepare(self.planned.plan, self._number, **where, observer=self.stats)
        self._has_prepared = self.session._prepared is not None
        self.counts["passes prepared"] += self._has_prepared

    def _ask(self) -> None:
        """Asks for the pass, as a loader that is iterated; where another one is prepared, that is given up."""
        changes = self._has_prepared and self.draws.chance(self.scenario.changes)
        prefetch_batches = self.scenario.prefetch_batches + changes
        prepared, (epoch, position) = self.session._prepared, self.place
        wanted = session._Pass(self.planned.plan, self._number, epoch, position, prefetch_batches)
        if prepared is None or (prepared.wanted == wanted and self.session._is_usable):
            self._start(prefetch_batches)
        else:
            self.counts["passes given up"] += 1
            prepared.feeder.stop()  # the session waits for its end, which is not in here
            self._then = prefetch_batches

    def _start(self, prefetch_batches: int) -> None:
        epoch, position = self.place
        spec: Any = SimpleNamespace(
            prefetch_batches=prefetch_batches, device=None, hidden=(), convert=self._collate, micro=None
        )
        spec.pin_memory = False
        where = {"epoch": epoch, "position": position}
        feeder = self.session.start(self.planned.plan, self._number, **where, batch_spec=spec, observer=self.stats)
        self._feeder, self._has_prepared = feeder, False
        if self._stop_after == 0:  # an interrupt while it waits
            self.clock.later(self.draws.seconds(4.0), self._interrupt, feeder)
        self.look()

    def look_again(self) -> None:
        """Something has changed that the consumer may wait for."""
        if self._is_waiting:
            self._is_waiting = False
            self.clock.later(0.0, self.look)

    def look(self) -> None:
        """Takes a batch if there is one, and what follows; else waits."""
        feeder = self._feeder
        if feeder is None:
            return
        if not feeder._is_ready():
            self._is_waiting = True
            return
        try:
            found = feeder.take()
        except Exception as error:
            self.error = error
            self._check_error(feeder, error)
            self._leave()
            return
        if found is None and self._has_all:
            self._leave()
            return
        if found is None:
            raise Broken("liveness", f"the pass is over at {self.place}, before {self._goal}")
        rows, step = found
        self._check(rows, step)
        if step.is_last:
            self._has_prepared = self.session.follow()
            self.counts["epochs that followed"] += self._has_prepared
        elif self.scenario.prepares:  # in mid-pass, where it has no effect
            self._prepare(self.place[0] + 1, 0)
        if self._stop_after is not None:
            self._stop_after -= 1
        if self.place >= self._goal or (self._stop_after is not None and self._stop_after <= 0):
            self._interrupt(feeder)
        elif step.is_last and self._has_prepared:
            self._feeder = None
            self.clock.later(self.draws.seconds(self._laziness), self._ask)
        elif step.is_last:
            self._has_all = True  # it asks once more, as a loop over the pass does
            self.look()
        elif self._laziness:
            self.clock.later(self.draws.seconds(self._laziness), self.look)
        else:
            self.look()

    def _check(self, rows: list[int], step: DeliveredStep) -> None:
        epoch, position = self.place
        if step.before != position or rows != self.planned.step(epoch, position, self._number):
            raise Broken("order", f"{rows} are handed out at {step.before}, and {self.place} is next")
        self.got.setdefault(epoch, []).extend(row for row in rows if row >= 0)
        self.place = (epoch + 1, 0) if step.is_last else (epoch, step.after)

    def _check_error(self, feeder: Feeder, error: Exception) -> None:
        """An error comes after the last good batch."""
        epoch, position = self.place
        is_elsewhere = isinstance(error, RowError) and not any(
            self.planned.has(epoch, position, self._number, row)
            for row in range(error.row - self.scenario.reach, error.row + 1)
        )
        if feeder._finished or is_elsewhere:
            raise Broken("order", f"{error!r} comes at {self.place}, before the batches that were made")

    def dawdle(self) -> None:
        """At times the feeder's thread is slow, and the consumer acts meanwhile."""
        if self.scenario.dawdles and self.draws.chance(self.scenario.dawdles):
            self.clock.busy(self.draws.seconds(5.0))

    def _collate(self, rows: Rows, *_: object) -> Rows:
        self.dawdle()
        return rows

    def _interrupt(self, feeder: Feeder) -> None:
        if feeder is self._feeder:
            self.counts["broken off"] += self.place < self._goal
            self._leave()

    def _leave(self) -> None:
        """The pass is over for the consumer."""
        feeder, self._feeder, self._has_left = self._feeder, None, True
        for other in (feeder, self.session._prepared and self.session._prepared.feeder):
            if other is not None and not other.has_ended:
                other.stop()
                if other._finished:
                    raise Broken("left", "a pass that is over keeps its batches")


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


def play(draws: Draws, world: type[World] = World, log: Log = None) -> Counter[str]:
    """Plays a schedule on a kind of world; returns what was injected, and how often, or raises what does not hold."""
    with limited():
        return _play(draws, world, log)


def _play(draws: Draws, world: type[World], log: Log) -> Counter[str]:
    scenario, counts = draw_scenario(draws), Counter[str]()
    if log is not None:
        log(str(scenario))
    position, got, ranks = 0, dict[int, list[int]](), dict[int, Rank]()
    for leg, (world_size, size, steps) in enumerate(scenario.legs):
        run = planned(scenario.order, scenario.rows, size, world_size, scenario.remainder, scenario.chunk_positions)
        end = end_of(run.plan, EPOCH, position, steps)
        goal = (EPOCH, end) if steps is not None else (EPOCH + 1 + scenario.epochs, 0)
        for number in range(world_size):
            share = (number + leg) % world_size if scenario.reshards else number
            if number in ranks:
                counts["resharded"] += 1
                ranks[number].reshard(run, share)
            rank = ranks.setdefault(number, Rank(draws, scenario, run, share, counts, log, world))
            if not rank.go(position, goal):
                for each in ranks.values():
                    each.end()
                return counts  # every rank ends here, for good
            if not scenario.reshards or steps is None:
                ranks.pop(number).end()
            for epoch, rows in rank.got.items():
                got.setdefault(epoch, []).extend(rows)
        counts["resumed with other sizes"] += position > 0 and not scenario.reshards
        position = end
    for rank in ranks.values():  # that had no share in the last leg
        rank.end()
    for epoch in range(EPOCH, EPOCH + 1 + scenario.epochs):
        wanted = position if epoch == EPOCH else end_of(run.plan, epoch, 0, None)
        rows = got.get(epoch, [])
        if len(rows) != wanted or (scenario.order != 4 and len(set(rows)) != wanted):
            raise Broken("order", f"epoch {epoch}: {len(rows)} rows, {len(set(rows))} different; {wanted} were to come")
        counts["rows"] += len(rows)
    counts["epochs after the first"] += scenario.epochs
    return counts


def end_of(plan: Plan, epoch: int, position: int, steps: int | None) -> int:
    """The position after some steps, or after all that are left."""
    left = plan.steps(epoch, position)
    for _ in range(left if steps is None else min(steps, left)):
        position = plan.after(epoch, position)
    return position
