"""Owns one rank in simulated time: the real dispatcher, pool and sizes, helpers that take as long as they are said to,
and the thread of the feeder, which does one thing at a time. Never owns what ranks share, nor measures anything.
"""

import dataclasses
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from raylance.dispatch.dispatcher import Dispatcher
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.messages import (
    Awaited,
    Begin,
    Complete,
    Decode,
    Deliver,
    Done,
    Event,
    Fault,
    Fetch,
    Fetched,
    GiveUp,
    Kind,
    Lost,
    Observation,
    Place,
    Prefetch,
    Read,
    Taken,
    Wanted,
)
from raylance.observe import Receipt
from raylance.orders.order import Order
from raylance.orders.shuffles import WindowShuffle
from raylance.planning.plan import Chunk, Plan, WorkItem
from raylance.runtime.session import Session
from tests.simulation.schedule import EPOCH, Draws
from tests.simulation.world import Helper, Result, World

BLOCK_BYTES = 32 << 20  # that a reader reads at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A training, the seconds that its parts take, and the limits of what ranks share.

    `…_varies` is a standard deviation as a share of the mean.

    Attributes:
        readers: Shard actors of each rank; up to `most_readers` while the trainer waits for reading.
        steps: Steps to simulate, of an epoch of `rows`.
        dies: Kind of the helper of rank 0 that dies after half of the steps.
        is_warm: Whether helpers run already.
        step_s: The model's own time for a batch.
        read_call_s, read_row_s: The shard actor's time for a call, and for each row of it.
        decode_call_s, decode_row_s: A decoder's. `decode_row_varies` is between rows, `decode_item_varies` between
            items, and `rank_varies` between the decoders of one rank and those of another.
        put_byte_s: Either's, to put a byte of its result into the object store.
        submit_s, event_s: The feeder's, to submit a call, and to take an event and decide.
        fetch_call_s, fetch_byte_s: The feeder's, to fetch a result.
        batch_row_s: The feeder's, to make a row part of a batch.
        start_s: From a request for an actor to its first answer.
        notice_s: From the death of an actor until its caller knows.
        ranks_per_node: Ranks that share the network of a node, of `network_bytes_s` in each direction.
        decoders_elsewhere: Decoders of each rank on nodes of their own, whose network is not the limit.
        storage_bytes_s, storage_requests_s: Limits of the storage, for all ranks together.
        storage_wait_s: From a request to its answer.
        reader_bytes_s: Most that one reader gets from the storage.
        request_bytes: Most bytes of a request.
        actors_s, node_actors_s: Actors that Ray starts in a second, in the cluster and on one node.
    """

    ranks: int = 1
    readers: int = 1
    most_readers: int = 0
    decoders: int = 4
    batch_size: int = 256
    raw_bytes: int = 42_000
    decoded_bytes: int = 150_528
    steps: int = 30
    rows: int = 1_000_000_000
    order: Order = dataclasses.field(default_factory=WindowShuffle)
    prefetch_batches: int = 2
    max_inflight_bytes: int = 256 << 20
    max_window_bytes: int = 512 << 20
    seed: int = 0
    dies: str = ""
    is_warm: bool = False
    step_s: float = 0.0
    step_varies: float = 0.0
    read_call_s: float = 0.0
    read_row_s: float = 0.0
    decode_call_s: float = 0.0
    decode_row_s: float = 0.0
    decode_row_varies: float = 0.0
    decode_item_varies: float = 0.0
    rank_varies: float = 0.0
    put_byte_s: float = 0.0
    submit_s: float = 0.0
    event_s: float = 0.0
    fetch_call_s: float = 0.0
    fetch_byte_s: float = 0.0
    batch_row_s: float = 0.0
    start_s: float = 0.0
    notice_s: float = 0.0
    ranks_per_node: int = 8
    network_bytes_s: float = math.inf
    decoders_elsewhere: int = 0
    storage_bytes_s: float = math.inf
    storage_requests_s: float = math.inf
    storage_wait_s: float = 0.0
    reader_bytes_s: float = math.inf
    request_bytes: int = 8 << 20
    actors_s: float = math.inf
    node_actors_s: float = math.inf


class NoDraws(Draws):
    """Nothing is left to chance but what takes longer or shorter."""

    def bits(self) -> int:
        return 0


class Reading:
    """What a shard actor holds: a chunk of the plan, and the next one that it reads on its way, in blocks.

    As in `raylance.source.readahead`: until the first chunk is here, items of its first half are read by themselves.
    """

    def __init__(self, fleet: Any, rank: int, node: int) -> None:
        self._fleet, self._rank, self._node = fleet, rank, node
        self._block = max(1, min(BLOCK_BYTES, fleet.setting.max_window_bytes // 16) // fleet.setting.raw_bytes)
        self.most_bytes = 0
        self.forget()

    def forget(self) -> None:
        """The actor has died."""
        self._here: dict[Chunk, int] = {}  # rows that are still to come
        self._waiting: list[tuple[Chunk, Callable[[], None]]] = []
        self._following: Chunk | None = None
        self._cold: Chunk | None = None
        self._used: Chunk | None = None

    def begin(self, chunk: Chunk) -> None:
        """Starts reading a chunk that will be asked for."""
        if chunk not in self._here:
            self._here.clear()
            self._start(chunk)

    def gather(self, item: WorkItem, following: Chunk | None, then: Callable[[], None]) -> None:
        """Calls back when the rows of an item are here."""
        chunk, self._following = item.chunk, following
        if chunk not in self._here:
            self._here.clear()
            self._cold = chunk
            self._start(chunk)
        left = self._here[chunk]
        is_early = item.position < chunk.position + chunk.steps * self._fleet.plan.stride / 2
        if left and chunk == self._cold and is_early:
            self._fleet.read(self._node, item.rows, then)
        elif left:
            self._waiting.append((chunk, then))
        else:
            self._use(chunk)
            then()

    def _use(self, chunk: Chunk) -> None:
        """What was before it is given up, and what follows it is read."""
        if chunk == self._used:
            return
        self._used, following = chunk, self._following
        for other in [other for other in self._here if other.position < chunk.position]:
            del self._here[other]
        if following is not None and following.epoch == chunk.epoch and following not in self._here:
            self._start(following)

    def _start(self, chunk: Chunk) -> None:
        rows = self._here[chunk] = self._fleet.plan.chunk_size(chunk, self._rank)
        held = sum(self._fleet.plan.chunk_size(other, self._rank) for other in self._here)
        self.most_bytes = max(self.most_bytes, held * self._fleet.setting.raw_bytes)
        self._fleet.read(self._node, min(rows, self._block), self._read, chunk, min(rows, self._block))

    def _read(self, chunk: Chunk, rows: int) -> None:
        if chunk not in self._here:
            return
        left = self._here[chunk] = self._here[chunk] - rows
        if left:
            self._fleet.read(self._node, min(left, self._block), self._read, chunk, min(left, self._block))
            return
        ready = [then for waits, then in self._waiting if waits == chunk]
        self._waiting = [(waits, then) for waits, then in self._waiting if waits != chunk]
        if ready:
            self._use(chunk)
        for then in ready:
            then()


class TimedSession(Session):
    """A session that makes the dispatcher of one rank."""

    def __init__(self, rank: "TimedRank") -> None:
        setting, scenario = rank.fleet.setting, rank.scenario
        source = SimpleNamespace(likely_row_bytes=setting.raw_bytes, uri="rows")
        decoding = SimpleNamespace(row_bytes=setting.decoded_bytes, max_bad_rows=None, datasets=())
        options: Any = SimpleNamespace(
            reader_range=(setting.readers, max(setting.readers, setting.most_readers)),
            decoder_range=(setting.decoders, setting.decoders),
            max_inflight_bytes=scenario.limit_bytes,
            placement_timeout_s=scenario.placement_timeout_s,
            work_timeout_s=scenario.work_timeout_s,
        )
        read_spec: Any = SimpleNamespace(source=source, decoding=decoding, in_helpers=decoding, on_device=None)
        super().__init__(read_spec, options)
        self.pool: HelperPool = self._make_pool(rank)
        self._prefetch_batches = scenario.prefetch_batches

    def make_dispatcher(self, plan: Plan, rank: int, end: int) -> Dispatcher:
        """Of a pass whose items that begin at `end` are left out."""
        wanted: Any = SimpleNamespace(plan=plan, dp_rank=rank, epoch=EPOCH, position=0)
        wanted.prefetch_batches = self._prefetch_batches
        made = self._make_dispatcher(self.pool, wanted)
        made._inflight._planned = itertools.takewhile(lambda item: item.position < end, made._inflight._planned)
        return made


class TimedRank(World):
    """One rank: the helpers of `World`, which take time, and the feeder's thread, which does one thing at a time."""

    def __init__(self, fleet: Any, number: int) -> None:
        super().__init__(NoDraws(), fleet.scenario, None, fleet.clock)  # type: ignore[arg-type] - nothing is watched
        setting = fleet.setting
        self.fleet, self.number, self.node = fleet, number, number // fleet.setting.ranks_per_node
        self.reading: dict[int, Reading] = {}  # by reader
        self.session = TimedSession(self)
        self.dispatcher = self.session.make_dispatcher(fleet.plan, number, fleet.end)
        self.scalers = self.session._scalers
        self.step = self.bytes = self.most_bytes = self.events = 0
        self.waited_s = self.decided_s = 0.0
        self.delivered: list[WorkItem] = []
        self._random = random.Random(f"{setting.seed} {number}")
        self._slowness = self._factor(fleet.setting.rank_varies)
        self._placed_decoders = 0
        self._arrives: dict[int, float] = {}  # when what a decoder works on is where it is
        self._todo: deque[Any] = deque()
        self._whole: deque[int] = deque()  # steps that are here
        self._finished: deque[int] = deque()
        self._next = 0, 0  # step and row of it that is to be delivered
        self._wanted_at: float | None = 0.0
        self._taken: int | None = None
        self._is_busy, self._timer = True, math.inf

    # The feeder's thread.

    def begin(self) -> None:
        """Begins the pass."""
        for event in (Begin(), Wanted(), Awaited()):
            self._tell(event)
        self._pump()

    def post(self, event: Event) -> None:
        """Something has happened."""
        super().post(event)
        self._wake()

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self.later(0.0, self._pump)

    def _pump(self) -> None:
        wait_s: float | None = 0.0
        while wait_s == 0.0:
            wait_s = self._next_thing()
        self._is_busy = wait_s is not None
        if wait_s is not None:
            self.later(wait_s, self._pump)

    def _next_thing(self) -> float | None:
        """Does what is next, as the feeder does; returns what it takes, or None where there is nothing to do."""
        setting, plan = self.fleet.setting, self.fleet.plan
        if self._todo:
            command = self._todo.popleft()
            begin = self.now()
            if isinstance(command, Deliver):
                self._deliver(command)
            elif isinstance(command, GiveUp):
                raise command.error
            else:
                self.do(command)
            if type(command) is Fetch:
                return self._arrives.pop(command.call) - begin
            return setting.submit_s if type(command) in (Read, Decode, Place) else 0.0
        if self._whole and len(self._finished) < max(1, self.fleet.setting.prefetch_batches):
            after = self._whole.popleft()
            low, high = plan.rank_slice(after - plan.global_batch_size, self.number)
            self.later((high - low) * setting.batch_row_s, self._hand, after)
            return (high - low) * setting.batch_row_s
        if self._taken is not None:
            event: Event | None = Taken(self._taken)
            self._taken = None
        elif self.inbox:
            event = self.inbox.popleft()
        elif self._timer <= self.now():
            event = None
        else:
            return None
        begin = time.perf_counter()
        self._tell(event)
        deadline = self.dispatcher.deadline()
        self.decided_s += time.perf_counter() - begin
        self.events += 1
        if self._timer <= self.now():
            self._timer = math.inf
        if deadline is not None and deadline < self._timer:
            self._timer = deadline
            self.later(deadline - self.now(), self._wake)
        return setting.event_s

    def _tell(self, event: Event | None) -> None:
        outputs = self.dispatcher.handle(event, self.now())
        self._todo.extend(output for output in outputs if not isinstance(output, Observation | Complete))

    def _fetch(self, command: Fetch) -> None:
        """Blocks the thread until the results are here."""
        results = [self.table[call] for call in (command.read, command.decode) if call is not None]
        setting, here = self.fleet.setting, self.now()
        here += len(results) * setting.fetch_call_s
        for result in results:
            nbytes = self._bytes_of(result)
            away = result is not None and result.node != 0
            arrived = self.fleet.arriving[self.node].take(self.now(), nbytes) if away else self.now()
            here = max(here, arrived) + nbytes * setting.fetch_byte_s
        self._arrives[command.call] = here
        self.later(here - self.now(), self.post, Fetched(command.call, results[0], results[-1]))  # type: ignore[arg-type]

    def _deliver(self, command: Deliver) -> None:
        """Every row once and in its place, or the simulation is wrong."""
        item, plan = command.item, self.fleet.plan
        if (item.position, item.low) != self._next or item.dp_rank != self.number:
            raise RuntimeError(f"rank {self.number}: {item} is delivered, {self._next} is next")
        self.delivered.append(item)
        low, high = plan.rank_slice(item.position, self.number)
        self._next = item.position, item.high
        if item.high == high - low:
            self._whole.extend(item.position + step * plan.stride for step in range(1, item.steps + 1))
            self._next = item.position + item.steps * plan.stride, 0

    # The trainer.

    def want(self) -> None:
        """The trainer waits for a batch."""
        self._wanted_at = self.now()
        if self.scalers and not self._finished:
            self.post(Awaited())  # as the feeder says it; it matters to scalers alone
        self._take()

    def _hand(self, after: int) -> None:
        self._finished.append(after)
        self._count(self._batch_bytes)
        self._take()

    def _take(self) -> None:
        if self._wanted_at is None or not self._finished:
            return
        if self.step:
            self.waited_s += self.now() - self._wanted_at
        self._wanted_at, self._taken = None, self._finished.popleft()
        self._count(-self._batch_bytes)
        self._wake()
        setting = self.fleet.setting
        self.fleet.stepped(setting.step_s * self._factor(setting.step_varies), self.step)
        self.step += 1

    @property
    def _batch_bytes(self) -> int:
        return self.fleet.setting.batch_size * self.fleet.setting.decoded_bytes

    # The helpers.

    def die(self, kind: str) -> None:
        """A helper dies; nobody knows for a while."""
        helper = next(helper for helper in self.helpers.values() if helper.kind == kind and helper.state == "up")
        helper.state = "hung"  # it answers nothing, and what it is given says nothing either
        if kind == "reader":
            self.reading[helper.number].forget()
        self.later(self.fleet.setting.notice_s, self.post, Lost(helper.number, Fault(what="it died")))

    def count_decoders(self) -> tuple[int, int, int]:
        return (self.scenario.decoders,) * 3

    def _place(self, number: int, kind: Kind) -> None:
        is_decoder, fleet, now = kind == "decoder", self.fleet, self.now()
        self._placed_decoders += is_decoder
        away = is_decoder and self._placed_decoders <= fleet.setting.decoders_elsewhere
        helper = self.helpers[number] = self._helpers[number] = Helper(number, kind, int(away), now)
        if not is_decoder:
            self.reading[number] = Reading(fleet, self.number, self.node)
        if fleet.setting.is_warm and not fleet.ended:
            self._placed(helper)
            return
        started = max(fleet.starting.take(now, 1), fleet.starting_on[self.node].take(now, 1))
        self.later(started - now + fleet.setting.start_s, self._placed, helper)

    def _prefetch(self, command: Prefetch) -> None:
        self.reading[command.helper].begin(command.chunk)

    def _decode(self, command: Decode) -> None:
        if self.helpers[command.helper].node:  # Ray brings it while others are worked on
            nbytes = self._bytes_of(self.table[command.source])
            self._arrives[command.call] = self.fleet.leaving[self.node].take(self.now(), nbytes)
        super()._decode(command)

    def _work(self, helper: Helper) -> None:
        call, command, source = helper.queue[0]
        helper.is_working = True
        setting = self.fleet.setting
        if type(command) is Read:
            rows = command.item.rows
            took_s = setting.read_call_s + rows * (setting.read_row_s + setting.raw_bytes * setting.put_byte_s)
            reading = self.reading[helper.number]
            reading.gather(command.item, command.following, lambda: self.later(took_s, self._finish, helper, ""))
        elif type(command) is Decode:
            rows = source.item.rows
            varies = math.hypot(setting.decode_row_varies / math.sqrt(max(1, rows)), setting.decode_item_varies)
            took_s = setting.decode_call_s + rows * setting.decode_row_s * self._slowness * self._factor(varies)
            wait_s = max(0.0, self._arrives.pop(call, 0.0) - self.now())
            self.later(wait_s + took_s + rows * setting.decoded_bytes * setting.put_byte_s, self._finish, helper, "")
        else:
            self.later(0.0, self._finish, helper, "")

    def _outcome(self, helper: Helper, call: int, command: Any, source: Result | None, fault: str) -> Event:
        is_read, setting = type(command) is Read, self.fleet.setting
        item = command.item if is_read else source.item  # type: ignore[union-attr]
        result = Result(helper.number, helper.node, item, [], not is_read)
        nbytes = self._bytes_of(result)
        if call in self.table:
            self.table[call] = result
            self._count(nbytes)
        return Done(call, Receipt(raw_bytes=item.rows * setting.raw_bytes if is_read else 0, nbytes=nbytes))

    def _forget(self, calls: Iterable[int]) -> None:
        self._count(-sum(self._bytes_of(self.table.get(call)) for call in calls))
        super()._forget(calls)

    def _bytes_of(self, result: Result | None) -> int:
        if result is None:
            return 0
        setting = self.fleet.setting
        return result.item.rows * (setting.decoded_bytes if result.is_decoded else setting.raw_bytes)

    def _count(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.bytes)

    def _factor(self, varies: float) -> float:
        """How much longer than the mean something takes: log-normal."""
        if not varies:
            return 1.0
        width = math.sqrt(math.log1p(varies * varies))
        return self._random.lognormvariate(-width * width / 2, width)
