"""The simulated machines: a runtime in virtual time, whose helpers take time, die, hang and lose what they made, as a
schedule draws it.

It keeps the truth that the dispatcher has to guess: who is dead, what lies where, and which rows each fault really hit.
"""

import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from raylance.dispatch.messages import (
    Alive,
    ChunkLost,
    Command,
    Decode,
    DecodeBlock,
    Dismiss,
    Done,
    Drop,
    Event,
    Failed,
    Fault,
    Faulted,
    Fetch,
    Fetched,
    Gather,
    Kind,
    Load,
    Loaded,
    Lost,
    NotPlaced,
    Ping,
    Wake,
)
from raylance.observe import Receipt
from raylance.planning.plan import WorkItem
from raylance.planning.planned_rows import PlannedRows
from raylance.runtime.runtime import Runtime
from tests.simulation.schedule import BITS, DECODED_BYTES, RAW_BYTES, Draws, PlannedRun, Scenario
from tests.simulation.watch import Broken, Watch

_WAITS_S = (0.0, 0.05, 0.2, 0.2, 0.5, 0.5, 1.0, 3.0)
_TRANSIT_S = (0.0, 0.0, 0.01, 0.3)


DIED = Fault(what="it died")


class RowError(Exception):
    """A row that cannot be decoded, or read."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = self.joined_offset = row


class LackingError(Exception):
    """A load has brought too few bytes of a row."""

    needs_bytes = True


@dataclasses.dataclass(slots=True, eq=False)
class Result:
    """What gathering or a decode has made; `lost_by` names the fault that took it."""

    maker: int
    node: int
    item: WorkItem
    rows: list[int]
    is_decoded: bool
    lost_by: int | None = None
    chunk: "Chunk | None" = None  # from which it was gathered, and the places there
    places: frozenset[int] = frozenset()


@dataclasses.dataclass(slots=True, eq=False)
class Chunk:
    """A chunk in a reader's memory."""

    number: int
    rows: list[int]  # in the order of delivery
    stored: list[int]  # the different ones in storage order
    first: int
    loaded: int = 0  # stored rows that are there, from the first one on
    nbytes: int = 0
    early: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # loaded before those in front of them
    gathered: set[int] = dataclasses.field(default_factory=set)  # places
    decoded: set[int] = dataclasses.field(default_factory=set)  # numbers of stored rows, if they are decoded by block
    margin: int = 1 << 60  # the least of its loads


@dataclasses.dataclass(slots=True, eq=False)
class Helper:
    """A helper as it really is."""

    number: int
    kind: str
    node: int
    state: str = "placing"  # or "up", "hung", "dead", "dismissed"
    queue: deque[Any] = dataclasses.field(default_factory=deque)  # what it has not finished, of other calls than loads
    loads: deque[Load] = dataclasses.field(default_factory=deque)  # not finished; two at a time are done
    loading: int = 0
    chunks: dict[int, Chunk] = dataclasses.field(default_factory=dict)  # its memory, by number
    dropped: set[int] = dataclasses.field(default_factory=set)  # numbers of chunks that are not there any more
    cause: int = 0  # the fault that ended it, or that it hangs by
    fault: Fault = DIED  # what is said of its end
    is_working: bool = False

    def end(self, *, is_dead: bool) -> None:
        self.state = "dismissed"


class Clock:
    """Virtual time, and what is under way in it: of one world, or of several that share it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._under_way: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def later(self, wait_s: float, what: Callable[..., None], *about: Any) -> None:
        self._number += 1
        heapq.heappush(self._under_way, (self.now + wait_s, self._number, what, about))

    def pass_time(self, until: float | None) -> bool:
        """Lets the next thing happen, or time pass until then; says whether anything could."""
        if self._under_way and (until is None or self._under_way[0][0] <= until):
            at, _, what, about = heapq.heappop(self._under_way)
            self.now = max(self.now, at)
            what(*about)
            return True
        if until is None:
            return False
        self.now = max(self.now, until)
        return True

    def busy(self, seconds: float) -> None:
        """Lets time pass while nobody takes events."""
        until = self.now + seconds
        while self._under_way and self._under_way[0][0] <= until:
            self.pass_time(until)
        self.now = until


class World(Runtime):
    """A runtime without threads or Ray, in virtual time, by a clock of its own unless it is given one."""

    def __init__(self, draws: Draws, scenario: Scenario, watch: Watch, clock: Clock | None = None) -> None:
        super().__init__(None, None)  # type: ignore[arg-type] - what is read, and by which options, the scenario says
        self.draws, self.scenario, self.watch = draws, scenario, watch
        self.clock = clock or Clock()
        self.later = self.clock.later
        self.helpers: dict[int, Helper] = {}  # all that ever were; the runtime's own are those that it has not ended
        self.table: dict[int, Result | None] = self._results
        self.inbox: deque[Event | Wake] = deque()
        del self._inbox
        self.counts: Counter[str] = Counter()
        self.planned: PlannedRun | None = None
        self._plans: dict[int, PlannedRun | None] = {}  # by the call of a load, or of one that gathers
        self.deadline: float | None = None  # to the last bit, which the seconds until then do not give back
        self.causes: dict[Any, int] = {}  # faults of loads by call, and of chunks by number
        self.sources: dict[int, int] = {}  # rows that loads have brought and that are decoded by block, by call
        self.faults = self.deaths = 0  # drawn; and, counted downwards, by fatal rows
        self._threshold = int((1 - scenario.rate) * (1 << BITS)) if scenario.faults else 1 << BITS
        for kind in sorted(scenario.faults & {"idle dies", "idle hangs", "node dies"}):
            for _ in range(1 + draws.bits() * 3 // (1 << BITS)):
                self.later(draws.seconds(30.0), self._strike, kind, draws.bits())

    @property
    def needs_decoder(self) -> bool:
        return self.scenario.needs_decoder

    @property
    def gives_away(self) -> bool:
        return self.scenario.gives_away

    @property
    def fetches_from_chunks(self) -> bool:
        return self.scenario.fetches_from_chunks

    def begin(self, planned: PlannedRows, plan_key: str) -> None:
        """One key for each plan."""
        known = self._plan[1]
        if known is not None and (self._plan[0] == plan_key) != (known.plan == planned.plan):
            raise Broken("turns", f"the plan {known.plan} has the key {self._plan[0]}, {planned.plan} has {plan_key}")
        super().begin(planned, plan_key)

    def count_decoders(self) -> tuple[int, int, int]:
        begin = self.scenario.decoders
        return (1, begin, begin + 2) if begin and self.scenario.scales else (begin, begin, begin)

    def explain_placing(self, kind: Kind, pending: int, asked: int) -> str:
        return f"{pending} of {asked} {kind}s found no place"

    # Time.

    def now(self) -> float:
        return self.clock.now

    def post(self, event: Event | Wake) -> None:
        self.inbox.append(event)

    def next_event(self, timeout_s: float | None) -> Event | Wake | None:
        until = None if timeout_s is None else self.deadline
        waits_s = None if until is None else max(0.0, until - self.now())
        if (timeout_s is None) != (waits_s is None) or abs((timeout_s or 0.0) - (waits_s or 0.0)) > 1e-6:
            raise Broken("deadline", f"an event is awaited for {timeout_s} s, and the deadline is in {waits_s} s")
        while not self.inbox:
            if until is not None and until <= self.now():
                return None
            if not self.clock.pass_time(until):
                raise Broken("deadlock", f"nothing will happen any more after {self.now():.2f} s")
        return self.inbox.popleft()

    # Commands.

    def do(self, command: Command) -> None:
        if isinstance(command, Dismiss):
            for call, _, _ in self.helpers[command.helper].queue:
                if call is not None and self.draws.chance(0.1):  # it was dead or hung: what it says now comes late
                    self.counts["said after it was dismissed"] += 1
                    self.later(0.1, self.post, Done(call, Receipt()))
        super().do(command)

    def _place(self, number: int, kind: Kind) -> None:
        bits = self.draws.bits()
        helper = Helper(number, kind, bits % 3 if kind == "decoder" else bits % 2)
        self.helpers[number] = self._helpers[number] = helper
        wait_s = _WAITS_S[(bits >> 4) % 8]
        fault = self._fault(bits, ("refused", "hopeless", "delayed", "never placed"))
        if fault in ("refused", "hopeless"):
            told = NotPlaced(number, Fault(what=fault), fault == "hopeless")
            self.later(wait_s, self._not_placed, helper, told)
        elif fault != "never placed":
            self.later(wait_s + (self.draws.seconds(60.0) if fault == "delayed" else 0), self._placed, helper)

    def _not_placed(self, helper: Helper, told: NotPlaced) -> None:
        if helper.state == "placing":
            helper.state = "dead"
            self.post(told)

    def _placed(self, helper: Helper) -> None:
        if helper.state == "placing":
            helper.state = "up"
            self.post(Alive(helper.number))

    def _gather(self, command: Gather) -> None:
        self._plans[command.call] = self.planned
        self._give(command.helper, command.call, command, None)

    def _load(self, command: Load) -> None:
        self._plans[command.call] = self.planned
        helper = self.helpers[command.helper]
        helper.loads.append(command)
        if helper.state == "dead":
            self.later(_TRANSIT_S[2], self.post, Lost(helper.number, helper.fault))
        elif helper.state == "up":
            self._load_next(helper)

    def _drop(self, command: Drop) -> None:
        helper = self.helpers[command.helper]
        chunk = helper.chunks.pop(command.number, None)
        if self.scenario.fetches_from_chunks and chunk is not None:
            is_needed = any(each is not None and each.chunk is chunk for each in self.table.values())
            self.counts["dropped before its items were fetched"] += is_needed
            # Chunks come in order unless one has changed its reader, or turned out to be larger than expected, or its
            # rows are gathered again, one by one, because one is bad.
            is_in_order = (
                not (self.faults or self.deaths or self.scenario.scales)
                and self.scenario.varies == 1.0
                and not (self.scenario.reach or self.scenario.bad_rows)
            )
            if is_needed and is_in_order:
                raise Broken("source", f"{command}, and an item of it is not fetched")
        helper.dropped.add(command.number)

    def _forget(self, calls: Iterable[int]) -> None:
        calls = tuple(calls)
        super()._forget(calls)
        for call in calls:
            self.sources.pop(call, None)

    def _decode(self, command: Decode | DecodeBlock) -> None:
        if isinstance(command, DecodeBlock):
            if command.high > self.sources.get(command.source, 0):
                raise Broken("source", f"{command} of rows that no load has brought")
            self._give(command.helper, command.call, command, None)
            return
        self._give(command.helper, command.call, command, self.table[command.source])

    def _ping(self, number: int) -> None:
        self._give(number, None, Ping(number), None)

    def _give(self, number: int, call: int | None, command: Any, source: Result | None) -> None:
        helper = self.helpers[number]
        if call is not None and type(command) is not DecodeBlock:
            self.table[call] = None
        helper.queue.append((call, command, source))
        if helper.state == "dead":
            self.later(_TRANSIT_S[2], self.post, Lost(helper.number, helper.fault))
        elif helper.state == "up" and not helper.is_working:
            self._work(helper)

    # Helpers at work.

    def _work(self, helper: Helper) -> None:
        call, command, source = helper.queue[0]
        helper.is_working = True
        bits = self.draws.bits()
        wait_s = _WAITS_S[bits % 8] if call is not None else 0.0
        if self._is_fatal(command, source):
            self.deaths -= 1
            helper.fault = Fault(what="a row ended it", may_be_rows=True)
            self.counts["ended by a fatal row"] += 1
            self.later(wait_s / 2, self._end, helper, "dead", self.deaths)
            return
        kinds = ("dies", "hangs", "faulted", "lost later", "twice", "late", "slow", "node")
        fault = self._fault(bits, kinds) if call is not None else ""
        self._finish_later(helper, fault, wait_s, bits, self._finish, helper, fault, self.faults)

    def _finish_later(
        self, helper: Helper, fault: str, wait_s: float, bits: int, finish: Callable[..., None], *args: Any
    ) -> None:
        """Calls `finish` when the work is done, unless the fault ends the helper in the middle of it."""
        if fault in ("dies", "hangs"):
            # Of a process that was killed from outside, nobody knows that it did not end by itself.
            helper.fault = Fault(what="it died", may_be_rows=bool(bits & 256))
            self.later(wait_s / 2, self._end, helper, "dead" if fault == "dies" else "hung", self.faults)
            return
        if fault == "node":
            self.later(wait_s / 2, self._node, helper.node, self.faults)
        if fault == "slow":
            wait_s += self.draws.seconds(50.0)
        self.later(wait_s, finish, *args)

    def _load_next(self, helper: Helper) -> None:
        if helper.loading == 2 or not helper.loads:
            return
        command, helper.loading = helper.loads.popleft(), helper.loading + 1
        bits = self.draws.bits()
        wait_s = _WAITS_S[bits % 8]
        fault = self._fault(bits, ("dies", "hangs", "faulted", "twice", "late", "slow", "node"))
        for number in command.drops:
            self._drop(Drop(helper.number, number))
        self._finish_later(helper, fault, wait_s, bits, self._finish_load, helper, command, fault, self.faults)

    def _finish_load(self, helper: Helper, command: Load, fault: str, cause: int) -> None:
        if helper.state != "up":
            return
        helper.loading -= 1
        transit_s = _TRANSIT_S[self.draws.bits() % 4] + (10.0 if fault == "late" else 0.0)
        if fault == "faulted":
            self.causes[command.call] = cause
        event = Faulted(command.call, Fault(what="fault")) if fault == "faulted" else self._loaded(helper, command)
        self.later(transit_s, self.post, event)
        if fault == "twice":
            self.later(transit_s + 0.1, self.post, event)
        self._load_next(helper)

    def _loaded(self, helper: Helper, command: Load) -> Event:
        """What a load has done, and how it is answered."""
        planned, needs_bytes = self._plans[command.call], 0
        if command.number in helper.dropped or planned is None:
            return Loaded(command.call, Receipt(), 0, 0, 0, 0, False, 0)
        rows = planned.of_chunk(command.chunk, command.dp_rank)
        first = planned.plan.first_line(command.chunk, command.dp_rank)
        chunk = helper.chunks.setdefault(command.number, Chunk(command.number, rows, sorted(self._stored(rows)), first))
        wanted, left = chunk.stored[command.first : command.first + command.rows], command.allowed_bytes
        for bad in (row for row in wanted if row in self.scenario.bad_rows and not self.scenario.decodes):
            self.counts["rows that fail"] += 1
            return Failed(command.call, RowError(bad))
        fitting = list[int]()
        for row in wanted:
            if self._raw_bytes(row) > left:
                needs_bytes = self._raw_bytes(row)
                self.counts["short loads"] += 1
                break
            left -= self._raw_bytes(row)
            fitting.append(row)
        chunk.early[command.first], chunk.margin = fitting, min(chunk.margin, command.margin)
        added = len(fitting)
        if self.scenario.by_block and self.scenario.decodes and added:
            self.sources[command.call] = added
        chunk.nbytes += sum(map(self._raw_bytes, fitting))
        while fitting := chunk.early.pop(chunk.loaded, []):
            chunk.loaded += len(fitting)
        held = sum(each.nbytes for each in helper.chunks.values())
        if held > self.scenario.window_bytes:
            raise Broken("bytes", f"a reader holds {held} bytes, of {self.scenario.window_bytes}")
        is_even, receipt = self.scenario.varies == 1.0, Receipt(reader_bytes=held)
        return Loaded(command.call, receipt, chunk.loaded, len(chunk.stored), chunk.nbytes, needs_bytes, is_even, added)

    def _places(self, helper: Helper, command: Gather, rows: list[int]) -> tuple[Chunk, frozenset[int]]:
        """Places of an item in its chunk, which must have all of its rows, and must not have given these away."""
        chunk = helper.chunks.get(command.number if command.number is not None else -1)
        if chunk is None or chunk.loaded < len(chunk.stored):
            raise Broken("source", f"{command} of a chunk that is not loaded")
        if self.scenario.by_block and self.scenario.decodes and len(chunk.decoded) < len(chunk.stored):
            raise Broken("source", f"{command} of a chunk that is not decoded")
        planned = self._plans[command.call]
        line = (
            planned.plan.line(command.item.epoch, command.item.position, command.item.dp_rank)
            + command.item.low
            - chunk.first
        )
        if chunk.rows[line : line + len(rows)] != [row if row >= 0 else -1 - row for row in rows]:
            raise Broken("source", f"{command} of a chunk with other rows")
        places = set(range(line, line + len(rows)))
        if self.scenario.gives_away and chunk.gathered & places:
            raise Broken("order", f"{command} of rows that were given away")
        self.counts["gathered from a chunk"] += 1
        return chunk, frozenset(places)

    def _is_fatal(self, command: Any, source: Result | None) -> bool:
        """Whether a call decodes a row that ends its process."""
        if not self.scenario.fatal_rows or isinstance(command, Ping) or command.given_up:
            return False
        if type(command) is DecodeBlock:
            known = dict(command.known_bad)
            rows = [row for row in self._block_rows(command) if row not in known]
        elif type(command) is Decode:
            rows = [] if source is None or source.lost_by is not None else source.rows
        else:
            rows = self._rows(command) if command.decodes else []
            if self._item_bytes(rows) > command.allowed_bytes:
                return False  # none of them is decoded
        return any((row if row >= 0 else -1 - row) in self.scenario.fatal_rows for row in rows)

    def _chunk_of(self, command: DecodeBlock) -> Chunk | None:
        return self.helpers[command.reader].chunks.get(command.number)

    def _block_rows(self, command: DecodeBlock) -> list[int]:
        """The stored rows of a block; none if its chunk was dropped."""
        chunk = self._chunk_of(command)
        return [] if chunk is None else chunk.stored[command.first + command.low : command.first + command.high]

    def _decoded(self, command: DecodeBlock, fault: str, cause: int) -> Event:
        """What has become of a block."""
        chunk, rows = self._chunk_of(command), self._block_rows(command)
        if fault == "faulted":
            self.causes[command.number, "chunk"] = cause
            return self._faulted(command.call, cause)
        known = [row for row in rows if row in dict(command.known_bad)]
        if (command.given_up or known) and not self.scenario.masks:
            return Failed(command.call, RowError((known or rows or [0])[0]))
        if bad := [row for row in rows if row in self.scenario.bad_rows and not command.given_up]:
            self.counts["rows that fail"] += 1
            return Failed(command.call, RowError(bad[0]))
        lacks = chunk is not None and chunk.margin < self.scenario.margin
        if lacks and any(row % 3 == 0 for row in rows) and not command.given_up:
            self.counts["blocks that lacked bytes"] += 1
            return Failed(command.call, LackingError())
        if chunk is not None:
            chunk.decoded |= set(range(command.first + command.low, command.first + command.high))
        self.counts["blocks decoded"] += 1
        self.counts["rows known to be bad"] += len(known)
        return Done(command.call, Receipt(bad_rows=tuple((row, "", "") for row in rows if command.given_up)))

    def _rows(self, command: Gather) -> list[int]:
        """Rows of an item, by the plan that was there when it was asked for."""
        planned = self._plans[command.call]
        return planned.rows(command.item) if planned else []

    def _finish(self, helper: Helper, fault: str, cause: int) -> None:
        """The work is done. `cause` numbers the fault that was drawn when it began: others may have come since."""
        if helper.state != "up":
            return
        call, command, source = helper.queue.popleft()
        helper.is_working = False
        bits = self.draws.bits()
        transit_s = _TRANSIT_S[bits % 4] + (10.0 if fault == "late" else 0.0)
        event = Alive(helper.number) if call is None else self._outcome(helper, call, command, source, fault, cause)
        self.later(transit_s, self.post, event)
        if fault == "twice":
            self.later(transit_s + 0.1, self.post, event)
        if helper.queue:
            self._work(helper)

    def _outcome(self, helper: Helper, call: int, command: Any, source: Result | None, fault: str, cause: int) -> Event:
        is_read = type(command) is Gather
        if type(command) is DecodeBlock:
            return self._decoded(command, fault, cause)
        if fault == "faulted":
            return self._faulted(call, cause)
        if not is_read and (source is None or source.lost_by is not None):
            return self._faulted(call, -1 if source is None or source.lost_by is None else source.lost_by)
        decodes = command.decodes if is_read else True
        places: tuple[Any, ...] = ()
        if is_read:
            item = command.item
            rows = self._rows(command)
            raw = self._item_bytes(rows)
            if raw > command.allowed_bytes:
                self.counts["larger than thought"] += 1
                return Done(call, Receipt(too_large_bytes=raw))
            if command.number is not None and rows and call in self.table:
                places = self._places(helper, command, rows)
        else:
            item, rows, raw = source.item, source.rows, 0  # type: ignore[union-attr]
        if command.given_up and not self.scenario.masks:
            return Failed(call, RowError(rows[0]))
        if (decodes or not self.scenario.decodes) and not command.given_up:
            for row in rows:
                if (row if row >= 0 else -1 - row) in self.scenario.bad_rows:
                    self.counts["rows that fail"] += 1
                    return Failed(call, RowError(row))
        result = Result(helper.number, helper.node, item, rows, decodes, None, *places)
        if call in self.table:
            self.table[call] = result
        if fault == "lost later":
            self.later(_TRANSIT_S[self.draws.bits() % 4], self._lose, result, cause)
        decoded = DECODED_BYTES * len(rows) if decodes and self.scenario.decodes_items else 0
        return Done(call, Receipt(raw_bytes=raw, nbytes=decoded if decodes and self.scenario.decodes_items else raw))

    def _stored(self, rows: Iterable[int]) -> set[int]:
        """The stored rows of samples."""
        last, reach = self.scenario.rows - 1, self.scenario.reach
        return {min(row + after, last) for row in rows for after in range(reach + 1)}

    def _item_bytes(self, rows: list[int]) -> int:
        """Bytes of samples, which have rows in common."""
        parts = (self._stored([row if row >= 0 else -1 - row]) if self.scenario.reach else [row] for row in rows)
        return sum(self._raw_bytes(row) for part in parts for row in part)

    def _raw_bytes(self, row: int) -> int:
        if self.scenario.varies == 1.0:
            return RAW_BYTES
        return int(RAW_BYTES * (self.scenario.varies if (row * 7919) % 5 == 0 else 0.7))

    def _faulted(self, call: int, cause: int) -> Event:
        self.watch.hit(call, cause)
        return Faulted(call, Fault(what=f"fault {cause}"))

    def _lose(self, result: Result, cause: int) -> None:
        result.lost_by = cause if result.lost_by is None else result.lost_by

    # Faults.

    def _fault(self, bits: int, kinds: tuple[str, ...]) -> str:
        """The fault that some drawn bits mean, if any is left."""
        if bits < self._threshold or self.faults >= self.scenario.budget:
            return ""
        able = [kind for kind in kinds if kind in self.scenario.faults]
        if not able:
            return ""
        return self._count(able[(bits >> 5) % len(able)])

    def _count(self, kind: str) -> str:
        self.faults += 1
        self.counts[kind] += 1
        return kind

    def _strike(self, kind: str, bits: int) -> None:
        """What happens at a time, whatever is being done."""
        up = [helper for helper in self.helpers.values() if helper.state == "up"]
        if not up or self.faults >= self.scenario.budget:
            return
        self._count(kind)
        helper = up[bits % len(up)]
        if kind == "node dies":
            self._node(helper.node, self.faults)
        else:
            self._end(helper, "dead" if kind == "idle dies" else "hung", self.faults)

    def _node(self, node: int, cause: int) -> None:
        for result in self.table.values():
            if result is not None and result.node == node:
                self._lose(result, cause)
        for helper in self.helpers.values():
            if helper.node == node:
                self._end(helper, "dead", cause)

    def _end(self, helper: Helper, state: str, cause: int) -> None:
        if helper.state == "hung" and state == "dead":
            helper.state = "up"
        if helper.state == "placing" and state == "dead":
            self._not_placed(helper, NotPlaced(helper.number, Fault(what="its node died"), False))
        if helper.state != "up":
            return
        helper.state, helper.cause = state, cause
        if state == "dead":
            for at in range(min(len(helper.queue) + len(helper.loads) + helper.loading, 3)):  # each call says so
                lost = Lost(helper.number, helper.fault)
                self.later(_TRANSIT_S[(cause + at) % 4], self.post, lost)

    # Fetching.

    def _fetch(self, command: Fetch) -> None:
        bits = self.draws.bits()
        fault = self._fault(bits, ("fetch faulted", "fetch hangs"))
        if fault == "fetch hangs":
            self.watch.hit(command.call, self.faults)
            if bits % 2:
                self.later(self.scenario.work_timeout_s + 5.0, self._fetched, command, "", self.faults)
            return
        wait_s = _WAITS_S[bits % 8] / 4
        self.later(wait_s, self._fetched, command, fault, self.faults)

    def _fetched(self, command: Fetch, fault: str, cause: int) -> None:
        calls = [command.gathered] if command.decode is None else [command.gathered, command.decode]
        if not all(call in self.table for call in calls):
            self.post(Fetched(command.call, "late", "late"))  # type: ignore[arg-type]
            return
        results = [self.table[call] for call in calls]
        gone = [result.lost_by for result in results if result is not None and result.lost_by is not None]
        chunk = results[0].chunk if results[0] is not None else None
        if fault and chunk is not None and self.scenario.fetches_from_chunks and cause % 2:
            self.counts["what a living reader has sent is gone"] += 1
            self.causes[chunk.number, "chunk"] = cause
            self.post(ChunkLost(chunk.number, Fault(what=f"fault {cause}")))
        if fault or gone:
            self.post(self._faulted(command.call, gone[0] if gone else cause))
            return
        if results[0].chunk is not None:
            results[0].chunk.gathered |= results[0].places
        self.post(Fetched(command.call, results[0], results[-1]))  # type: ignore[arg-type]
