"""Owns the exploration of a small world as a whole: every order of its events, not a sample; never draws anything.

What is done is told at once: that an answer is long on its way looks as work that takes long. For the same reason only
helpers die that have something to do, or are being placed: an idle one that died looks as one that dies over the next
thing that it is given. Nothing hangs, and nothing is told twice: that is for the drawn schedules.

States are told apart by what can matter from then on: numbers of calls and helpers are replaced by their places, times
by what is left of them. For that alone it looks into dispatcher and pool.
"""

import dataclasses
import functools
import hashlib
import io
import operator
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from raylance.batches.masking import MaskedRows
from raylance.observe import Stats
from raylance.planning.plan import Plan, WorkItem
from tests.simulation.play import Rank, Wrong
from tests.simulation.schedule import DECODED_BYTES, EPOCH, RAW_BYTES, Draws, PlannedRun, Scenario, planned
from tests.simulation.watch import Broken
from tests.simulation.world import Helper, World

Choice = tuple[str, int]
SOON_S = 10.0  # a pause; more is the time that a helper may take to be placed


class SmallWorld(World):
    """Machines without a will of their own: what is under way may happen in any order."""

    def __init__(self, *about: Any, deaths: int, late: int, loses_results: bool) -> None:
        super().__init__(*about)
        self.pending: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.deaths, self.late, self.loses_results = deaths, late, loses_results
        self.is_time = False  # for what has a deadline

    def later(self, wait_s: float, what: Callable[..., None], *about: Any) -> None:
        if what.__name__ in ("post", "look"):
            what(*about)  # an answer that takes its time looks as work that takes its time; and the consumer is quick
        else:
            self.pending.append((what, about))

    def pass_time(self, until: float | None) -> bool:
        return False

    def next_event(self, timeout_s: float | None) -> Any:
        if self.inbox:
            return self.inbox.popleft()
        self.is_time = False
        return None

    def kill(self, number: int) -> None:
        self.deaths -= 1
        self.faults += 1
        helper = self.helpers[number]
        if self.loses_results:
            for result in self.table.values():
                if result is not None and result.maker == number:
                    self._lose(result, self.faults)
        self._end(helper, "dead", self.faults)
        self.pending = [(what, about) for what, about in self.pending if about[0] is not helper]  # it does no more


class _Nothing(Draws):
    def bits(self) -> int:
        return 0


# What never changes is not copied.
_FIXED: dict[int, Any] = {}
_FIXED_KINDS = (WorkItem, Plan, Scenario, PlannedRun, Wrong, Stats, MaskedRows, SimpleNamespace, functools.partial)


@dataclasses.dataclass(slots=True)
class One:
    """A rank in its pass."""

    rank: Rank
    feeder: Any

    @property
    def world(self) -> Any:
        return self.rank.world

    @property
    def dispatcher(self) -> Any:
        return self.feeder._dispatcher.dispatcher

    @property
    def is_over(self) -> bool:
        return self.feeder._is_closed or (self.feeder._is_over and not self.feeder._assembly)

    def catch_up(self) -> None:
        """Has the feeder do all that it can do now."""
        while not self.is_over and (self.feeder._said or self.world.inbox or self.world.is_time):
            self.feeder.step()


def _keep(one: One) -> Callable[[], One]:
    """Keeps a state, to go on from it as often as is wanted."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = dict.fromkeys(_FIXED_KINDS, _refer)
    pickler.dump(one)
    return functools.partial(pickle.loads, file.getvalue())


def _refer(value: Any) -> Any:
    _FIXED[id(value)] = value
    return _fixed, (id(value),)


def _fixed(number: int) -> Any:
    return _FIXED[number]


@dataclasses.dataclass
class Explored:
    """What was seen: states, ways from one to the next (`left` of which were not gone), whole orders of events, and how
    they ended.
    """

    took_s: float = 0.0
    steps: int = 0
    left: int = 0
    orders: int = 0
    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    known: dict[bytes, int] = dataclasses.field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        yield f"{len(self.known):,} states, {self.steps:,} steps between them, {self.orders:,} orders of events: all"
        yield f"in {self.took_s:.1f} s; every one ended as it should: {dict(self.ends)}"


def explore(
    *,
    items: int = 4,
    decoders: int = 2,
    readers: int = 1,
    deaths: int = 2,
    late: int = 1,
    needs_decoder: bool = True,
    loses_results: bool = True,
    made_of: Wrong | None = None,
) -> Explored:
    """Tries every order of events of some readers and decoders.

    Args:
        items: Items of the pass.
        decoders: Decoders.
        readers: Readers; of several, each item is a chunk.
        deaths: Helpers that may die, at any time.
        late: Placements that may come too late.
        needs_decoder: Whether decoders are insisted upon.
        loses_results: Whether what a helper has made goes with it.
        made_of: What to try.

    Raises:
        Broken: With what does not hold, and the choices that lead there.
    """
    chunk = 1000 if readers == 1 else 1
    limit = 5 * (1.5 * RAW_BYTES + DECODED_BYTES)
    scenario = Scenario(
        order=0, rows=items, remainder="drop", chunk_positions=chunk, legs=[(1, 1, None)], decoders=decoders,
        readers=readers,
        needs_decoder=needs_decoder, decodes=True, prefetch_batches=items, limit_bytes=int(limit), blocks=False,
        varies=1.0, bad_rows=frozenset(), faults=frozenset(), rate=0.0, budget=0, breaks=0.0, work_timeout_s=1e6,
    )  # fmt: skip
    world: Any = functools.partial(SmallWorld, deaths=deaths, late=late, loses_results=loses_results)
    rank = Rank(_Nothing(), scenario, planned(0, items, 1, 1, "drop", chunk), 0, Counter(), None, world)
    found, begin = Explored(), time.monotonic()
    with (made_of or Wrong()).in_place():
        rank.aim(0, (EPOCH + 1, 0))
        rank.begin()
        one = One(rank, rank.to_run.popleft())
        flight = one.dispatcher._inflight
        flight._planned = iter(list(flight._planned))  # which can be copied
        one.catch_up()
        found.orders = _explore(one, found, [])
    found.took_s = time.monotonic() - begin
    return found


def _explore(one: One, found: Explored, way: list[Choice]) -> int:
    """How many orders of events there are from here."""
    if one.is_over:
        one.feeder._end()
        one.rank.watch.closed()
        error = one.rank.error
        found.ends[type(error).__name__ if error else "everything delivered"] += 1
        if error is None and one.rank.place <= (EPOCH, 0):
            raise Broken("liveness", f"over at {one.rank.place}: {way}")
        return 1
    key = hashlib.blake2b(repr(state(one)).encode(), digest_size=16).digest()
    if key in found.known:
        return found.known[key]
    choices = list(_choices(one))
    if not choices:
        raise Broken("deadlock", f"nothing can happen any more: {way}")
    found.left += len(choices)
    kept, orders = _keep(one), 0
    for number, choice in enumerate(choices):
        other = one if number == len(choices) - 1 else kept()
        try:
            _happen(other, choice)
        except Broken as broken:
            raise Broken(broken.what, f"{broken}: {[*way, choice]}") from None
        found.steps, found.left = found.steps + 1, found.left - 1
        orders += _explore(other, found, [*way, choice])
    found.known[key] = orders
    return orders


def _choices(one: One) -> Iterator[Choice]:
    world: Any = one.world
    yield from (("happens", at) for at in range(len(world.pending)))
    if world.deaths:
        yield from (
            ("dies", n)
            for n, helper in world.helpers.items()
            if helper.state == "placing" or (helper.state == "up" and helper.queue)
        )
    deadline = one.dispatcher.deadline()
    if deadline is not None:
        is_soon = deadline - world.now() < SOON_S
        is_late = world.late > 0 and any(helper.state == "placing" for helper in world.helpers.values())
        if is_soon or is_late or not world.pending:
            yield "time", 0 if is_soon or not world.pending else 1


def _happen(one: One, choice: Choice) -> None:
    world: Any = one.world
    kind, number = choice
    if kind == "happens":
        what, about = world.pending.pop(number)
        what(*about)
    elif kind == "dies":
        world.kill(number)
    else:
        world.late -= number
        world.clock.now = max(world.now(), one.dispatcher.deadline() or 0.0)
        world.is_time = True
    one.catch_up()


def state(one: One) -> Any:
    """What can matter from here on."""
    dispatcher, world = one.dispatcher, one.world
    pool: Any = one.rank.session.pool
    numbers: dict[tuple[str, int], int] = {}

    def name(kind: str, number: int | None) -> int | None:
        return None if number is None else numbers.setdefault((kind, number), len(numbers))

    def call(number: int | None) -> int | None:
        return name("call", number)

    def left(at: float | None) -> float | None:
        return None if at is None or at <= world.now() else round(at - world.now(), 3)

    pieces = tuple(
        (
            p.item.position, p.item.low, p.stage.value, p.faults, p.deaths, p.waits, left(p.not_before),
            p.decodes_there,
            call(p.call), call(p.read), call(p.decode), p.read is not None and p.replaced < pool.replaced,
        )
        for p in dispatcher._inflight.entries
    )  # fmt: skip
    helpers = tuple(
        (
            name("helper", n), h.kind, left(h.place_at), None if h.running else left(h.deadline), h.running,
            h.pings, tuple(call(c) for c in h.calls),
        )
        for n, h in pool._helpers.items()
    )  # fmt: skip
    flight = dispatcher._inflight
    rest = (
        operator.length_hint(flight._planned), len(flight._upcoming), flight._taken, tuple(flight._ready), flight._open,
        tuple((turn.chunk.position, name("helper", turn.reader)) for turn in pool.schedule.assignments),
        one.rank.place, world.deaths, world.late,
    )  # fmt: skip
    machines = tuple(
        (
            name("helper", n), h.state, h.is_working,
            tuple((call(c), type(command).__name__, s is not None and s.lost_by is None) for c, command, s in h.queue),
        )
        for n, h in world.helpers.items()
        if h.state != "dismissed"
    )  # fmt: skip
    table = tuple(
        sorted(
            ((call(c) or 0, r and (r.lost_by is None, name("helper", r.node))) for c, r in world.table.items()),
            key=repr,
        )
    )

    def about(value: Any) -> Any:
        if isinstance(value, Helper):
            return name("helper", value.number), value.state == "dismissed"
        found = [(kind, getattr(value, kind, None)) for kind in ("call", "helper", "read", "decode")]
        return type(value).__name__, tuple(name(kind, number) for kind, number in found if isinstance(number, int))

    world_pending = sorted(repr((what.__name__, tuple(about(a) for a in args))) for what, args in world.pending)
    return pieces, helpers, rest, machines, tuple(table), tuple(world_pending)
