"""What must always hold, known by a dispatcher's events, outputs and `deadline` alone. What can be broken:

order     every row of the plan once, in its place; every step whole; decoded where it should be
bytes     a reader holds no more than it may; an item is sent only where it has room, or where it is awaited first and
          no whole step waits to be taken
pool      never more helpers of a kind than were asked for; none ended that works
dead      no command to a helper that does not run, nothing awaited of one that is gone
turns     a chunk is loaded by one reader, which has not dropped it, and items are gathered there
early     before a consumer asks for a pass, only its first steps are gathered; before it asks for an epoch that
          follows, also what keeps the helpers at work; of the epoch after that, nothing
source    gathered is only what has been loaded; decoded and fetched only what was gathered, and was not forgotten
deadline  what may never come is awaited with a deadline, no wait is longer than work may take, and what is done at
          a deadline moves it
deadlock  a pass that is not over waits for something that will happen
liveness  once the faults end, the pass does; a decision ends, and so does a schedule
cause     an error only where what it says has happened, and no try more where it has; only a row by itself, in
          whose decoding processes ended too often to be an accident, is given up untried
left      after a pass nothing is kept
"""

import dataclasses
from collections import Counter
from typing import Any

from raylance.dispatch.load_ahead import MAX_FAULTS
from raylance.dispatch.messages import (
    Alive,
    ChunkLost,
    Command,
    Complete,
    Decode,
    DecodeBlock,
    Deliver,
    Dismiss,
    Done,
    Drop,
    Event,
    Failed,
    Faulted,
    Fetch,
    Fetched,
    Forget,
    Gather,
    GiveUp,
    GiveUpPlacing,
    Load,
    Loaded,
    Lost,
    NotPlaced,
    Ping,
    Place,
    Taken,
    Wanted,
)
from raylance.errors import HelperError, PlacementError
from raylance.planning.plan import WorkItem
from tests.simulation.schedule import DECODED_BYTES, PlannedRun, Scenario

MAX_DEATHS = MAX_FAULTS + 7  # a step of 60 rows is halved six times
MIN_ALONE = 2  # of them that decoded nothing but the row that is given up
PAUSE_S = 1.0  # before another helper is placed for one that was refused


# Epoch, position of the step, row of the rank's slice; of blocks, see `_units`; with 0 before it, of a sample in a
# chunk whose reader decodes.
_Key = tuple[int, ...]


class Broken(AssertionError):  # noqa: N818 - it is no error of the code that raises it
    """What must hold does not."""

    def __init__(self, what: str, told: str) -> None:
        super().__init__(f"{what}: {told}")
        self.what = what


@dataclasses.dataclass(slots=True, eq=False)
class _Seen:
    """A call, as far as was commanded and told."""

    command: Any
    item: Any  # of a block, None
    keys: list[_Key]
    units: list[_Key]  # what is searched for a row that ends its process: the same, or the rows of a block
    charge: float = 0.0
    is_answered: bool = False
    has_result: bool = False
    is_forgotten: bool = False
    gone: int = 0  # helpers that were gone when it was answered


@dataclasses.dataclass(slots=True, eq=False)
class _Known:
    """A helper, as far as was commanded and told."""

    kind: str
    since: float
    is_running: bool = False
    ended_by: str = ""
    is_pinged: bool = False
    calls: dict[int, None] = dataclasses.field(default_factory=dict)
    loads: dict[int, None] = dataclasses.field(default_factory=dict)


class Watch:
    """Looks at every event and every command of a rank's passes."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world: Any = None
        self.recovered: dict[str, int] = {}
        self._helpers: dict[int, _Known] = {}
        self._calls: dict[int, _Seen] = {}
        self._open: dict[int, _Seen] = {}  # neither answered nor forgotten
        self._permanent = False
        self._hits: dict[_Key, set[int]] = {}
        self._blamed: Counter[_Key] = Counter()
        self._deaths: Counter[_Key] = Counter()  # decoders that ended at work on the row
        self._alone: Counter[_Key] = Counter()  # the same, if the row was alone
        self._gone_count = 0
        self._dismissed: set[int] = set()
        self._chunks: dict[int, Load] = {}  # by number: the first load of it
        self._plan_of: dict[int, PlannedRun] = {}  # by number of a chunk
        self._loaded: set[int] = set()  # numbers of chunks that are said to be loaded
        self._dropped: set[int] = set()
        self._decoded: set[_Key] = set()
        self._load_calls: dict[int, Load] = {}  # that are not answered
        self._is_exact = scenario.needs_decoder or not scenario.decoders
        self._limit = scenario.limit_bytes * (1 + 1e-9)

    def begin(
        self, planned: PlannedRun, rank: int, epoch: int, position: int, prefetch_batches: int, *, spans_epochs: bool
    ) -> None:
        """A pass begins."""
        self._planned, self._rank, self._prefetch = planned, rank, max(1, prefetch_batches)
        self._spans_epochs = spans_epochs
        self._most_early = self._failed_loads = 0
        self._turn(epoch, position)
        self._next = (epoch, position, 0)  # step and row of its slice that are to be delivered next
        self._part: list[int] = []
        self._hits.clear()
        for counter in (self._blamed, self._deaths, self._alone):
            for key in [key for key in counter if len(key) == 3]:  # what is known of blocks outlives passes
                del counter[key]
        self._flying: dict[int, float] = {}  # charges of reads
        self._opened, self._ready = 0.0, list[tuple[tuple[int, int], float]]()
        self._answers: Any = None
        self._spent = {"reader": 0.0, "decoder": 0.0}  # seconds of those that were refused: others have the rest
        for helper in self._helpers.values():
            helper.since = self.world.now()  # nobody looked for it in between

    def _turn(self, epoch: int, position: int) -> None:
        """The consumer has not asked yet for the epoch whose steps it takes next."""
        self._is_wanted, self._epoch, self._position = False, epoch, position
        self._early_end = self._planned.plan.after(epoch, position, self._prefetch)

    def _recover(self, what: str) -> None:
        self.recovered[what] = self.recovered.get(what, 0) + 1

    # Events.

    def told(self, event: Event | None) -> None:
        """The dispatcher is about to be told."""
        self._answers = None
        self._is_wanted = self._is_wanted or isinstance(event, Wanted)
        match event:
            case Loaded(call) | Failed(call) | Faulted(call) if call in self._load_calls:
                load = self._load_calls.pop(call)
                self._helpers[load.helper].loads.pop(call, None)
                self._failed_loads += type(event) is Failed
                if type(event) is Faulted:
                    self._hit_rows(self._chunk_keys(load), self.world.causes[call])
                if type(event) is Loaded and event.rows == event.stored_rows > 0:
                    self._loaded.add(load.number)
            case Done(call) | Fetched(call) | Failed(call) | Faulted(call):
                seen = self._calls.get(call)
                if seen is None or seen.is_answered:
                    return
                seen.is_answered = True
                if type(seen.command) is DecodeBlock:
                    self._decoded_block(seen, event)
                is_result = type(event) is Done and not event.receipt.too_large_bytes
                is_result = is_result and type(seen.command) is not DecodeBlock
                seen.has_result = is_result and not seen.is_forgotten
                if self._open.pop(call, None) is not None:
                    self._answers = seen
                    seen.gone = self._gone_count
                    if type(event) is Faulted and self._is_its_own(seen.command):
                        self._blame(seen)
                helper = self._helpers.get(getattr(seen.command, "helper", -1))
                if helper is not None:
                    helper.calls.pop(call, None)
                    helper.is_pinged = False
            case Alive(number):
                helper = self._helpers[number]
                if not helper.ended_by:
                    helper.is_running, helper.is_pinged = True, False
            case ChunkLost(number):
                self._hit_rows(self._chunk_keys(self._chunks[number]), self.world.causes[number, "chunk"])
                self._recover("a chunk that a living reader has sent")
            case NotPlaced(number) | Lost(number):
                helper = self._helpers[number]
                if type(event) is NotPlaced and not helper.ended_by:
                    self._spent[helper.kind] += self.world.now() - helper.since + PAUSE_S
                    self._permanent = self._permanent or event.permanent
                self._gone(number, "told", may_be_rows=event.fault.may_be_rows)
            case Taken(epoch, position):
                self._ready = [(after, charge) for after, charge in self._ready if after > (epoch, position)]
                if self._planned.plan.is_over(epoch, position):
                    self._most_early = 2 * (self.scenario.decoders + 2) + 1  # an item may be cut where chunks meet
                    self._turn(epoch + 1, 0)

    def _gone(self, number: int, by: str, *, may_be_rows: bool = False) -> None:
        helper = self._helpers[number]
        if helper.ended_by:
            return
        helper.ended_by = by
        self._gone_count += 1
        for call in helper.loads if helper.is_running else ():
            if call in self._load_calls:
                self._hit_rows(self._chunk_keys(self._load_calls[call]), self.world.helpers[number].cause)
        if helper.is_running and helper.calls:  # it was working on the first that it had not answered, if on any
            self.hit(next(iter(helper.calls)), self.world.helpers[number].cause)
            seen = self._calls.get(next(iter(helper.calls)))
            decodes = seen is not None and (type(seen.command) in (Decode, DecodeBlock) or seen.command.decodes)
            if may_be_rows and seen is not None and decodes:
                self._deaths.update([] if seen.is_forgotten else seen.units)
                self._alone.update(seen.units if len(seen.units) == 1 and not seen.is_forgotten else [])
            else:
                self._blame(seen)
        for call in helper.calls:
            if type(self._calls[call].command) is DecodeBlock:  # nothing of it is kept
                self._calls[call].is_forgotten = True

    def _is_its_own(self, command: Any) -> bool:
        """Whether what failed cannot have gone with a helper that is known to be gone: none went since it was read."""
        read = getattr(command, "source", getattr(command, "gathered", None))
        return read is None or self._calls[read].gone == self._gone_count

    def _decoded_block(self, seen: _Seen, event: Any) -> None:
        """A block is decoded once, unless it was lost."""
        if type(event) is not Done or seen.is_forgotten:
            return
        units = self._units(seen.command)
        if again := self._decoded.intersection(units):
            raise Broken("again", f"{seen.command} decodes {sorted(again)} once more")
        self._decoded.update(units)
        self._recover("a block decoded")

    def _blame(self, seen: _Seen | None) -> None:
        """Counts a fault that is these rows' own, whatever else has happened: they may not be tried for ever."""
        if seen is not None and not seen.is_forgotten:
            self._blamed.update(unit for unit in seen.units if len(unit) != 4)  # its samples may not all be hit

    def hit(self, call: int, cause: int) -> None:
        """A fault hits the rows of a call: this is the truth, whatever the dispatcher thinks."""
        seen = self._calls.get(call)
        if seen is not None and not seen.is_forgotten:
            self._hit_rows(seen.keys, cause)

    def _hit_rows(self, keys: list[_Key], cause: int) -> None:
        for key in keys:
            self._hits.setdefault(key, set()).add(cause)

    def _chunk_keys(self, load: Load) -> list[_Key]:
        if self._plan_of[load.number] is not self._planned:  # a load of another share, which nobody needs
            return []
        return [(load.chunk.epoch, *place) for place in self._planned.places(load.chunk, load.dp_rank)]

    def _units(self, command: DecodeBlock) -> list[_Key]:
        """The rows of a block: number of the chunk, and of the stored row."""
        return [(command.number, row) for row in range(command.first + command.low, command.first + command.high)]

    def _block_keys(self, command: DecodeBlock) -> list[_Key]:
        """The samples that need rows of a block."""
        chunk = self.world.helpers[command.reader].chunks.get(command.number)
        keys = self._chunk_keys(self._chunks[command.number])
        if chunk is None or not keys:
            return []
        wanted = {*chunk.stored[command.first + command.low : command.first + command.high]}
        return [key for key, row in zip(keys, chunk.rows, strict=True) if wanted & self.world._stored([row])]

    def _keys(self, item: WorkItem) -> list[_Key]:
        plan, found = self._planned.plan, list[_Key]()
        starts = plan.starts(item.epoch, item.position, item.steps)
        for at, rows in zip(starts, plan.rows_by_step(item), strict=True):
            found += [(item.epoch, at, item.low + row) for row in range(max(1, rows))]
        return found

    # Commands.

    def commanded(self, command: Command, now: float) -> None:
        """The runtime is about to be commanded."""
        match command:
            case Place(number, kind):
                self._check_pool(number, kind, now)
            case Dismiss(number) if number not in self._helpers:
                raise Broken("pool", f"helper {number} is given up before it was to be placed")
            case Dismiss(number, is_lost):
                self._check_end(number, now) if is_lost else self._check_leave(number)
                self._dismissed.add(number)
            case Ping(number):
                self._check_runs(number, command)
                self._helpers[number].is_pinged = True
            case Load(call, number):
                self._check_runs(number, command)
                self._plan_of[command.number] = self._planned
                self._dropped.update(command.drops)
                self._check_load(command)
                self._load_calls[call] = command
                self._helpers[number].loads[call] = None
            case Drop(_, chunk):
                self._dropped.add(chunk)
            case Gather(call, number, item):
                self._check_runs(number, command)
                self._check_turn(number, command)
                self._check_early(item)
                self._see(call, command, item, number)
                self._check_room(command)
            case Decode(call, number, source):
                self._check_runs(number, command)
                self._see(call, command, self._check_source(source, command).item, number)
                self._recover("decoded by a decoder")
            case DecodeBlock(call, number, reader, chunk):
                self._check_runs(number, command)
                if self._chunks[chunk].helper != reader or chunk in self._dropped:
                    raise Broken("source", f"{command}, and its chunk is not there")
                self._see(call, command, None, number)
            case Fetch(call, gathered, decode):
                item = self._check_source(gathered, command).item
                if decode is not None and self._check_source(decode, command).item != item:
                    raise Broken("source", f"{command} joins two items")
                self._see(call, command, item, None)
            case Forget(calls):
                for call in calls:
                    self._flying.pop(call, None)
                    self._open.pop(call, None)
                    if call in self._calls:
                        self._calls[call].is_forgotten = True
                        self._calls[call].has_result = False
            case Deliver():
                self._check_delivery(command)
            case Complete():
                self._check_complete()
            case GiveUp(error):
                self._check_cause(error, now)
            case GiveUpPlacing():
                self._check_cause(PlacementError(str(command)), now)

    def _see(self, call: int, command: Any, item: Any, helper: int | None) -> None:
        if call in self._calls:
            raise Broken("source", f"{command} has the number of another call")
        if item is None:
            # What a reader has loaded ends with it, so that its chunk is searched, down to one sample.
            keys, is_there = self._block_keys(command), command.helper == command.reader
            seen = _Seen(command, item, keys, [(0, *key) for key in keys] if is_there else self._units(command))
        else:
            seen = _Seen(command, item, keys := self._keys(item), keys)
        if any(row in self._hits for row in seen.keys) and type(command) is not Fetch:
            self._recover(f"{type(command).__name__.lower()} again after a fault")
        worst = max((self._blamed[row] for row in seen.units), default=0)
        if worst > MAX_FAULTS:
            raise Broken("cause", f"{command} is tried again, after {worst} faults of its own")
        if type(command) is not Fetch:
            self._check_tries(seen)
        self._calls[call] = seen
        if item is not None:  # chunks outlive passes, and so does the work on blocks
            self._open[call] = seen
        if helper is not None:
            self._helpers[helper].calls[call] = None

    def _check_tries(self, seen: _Seen) -> None:
        command, units = seen.command, seen.units
        if command.given_up:
            self._recover("a row given up")
            if type(command) is DecodeBlock:
                units = self._units(command)
                # The only sample of its chunk has ended readers; before, blocks of others in the chunk may have.
                if len(seen.keys) == 1 and self._alone[0, *seen.keys[0]] >= MIN_ALONE:
                    return
            deaths = self._deaths[units[0]]
            if len(units) > 1 or deaths <= MAX_FAULTS or self._alone[units[0]] < MIN_ALONE:
                raise Broken("cause", f"{command} is given up after {deaths} deaths")
        elif (deaths := max(self._deaths[unit] for unit in units)) > MAX_DEATHS and len(units[0]) != 4:
            raise Broken("cause", f"{command} is tried again, after {deaths} processes ended")

    def _check_pool(self, number: int, kind: str, now: float) -> None:
        if self._spent[kind]:
            self._recover("placed again after a refusal")
        self._helpers[number] = _Known(kind, now)
        held = sum(helper.kind == kind for n, helper in self._helpers.items() if n not in self._dismissed)
        begin = self.scenario.readers if kind == "reader" else self.scenario.decoders
        if held > begin + (2 if self.scenario.scales and (kind == "decoder" or begin > 1) else 0):
            raise Broken("pool", f"{held} {kind}s at {now:.2f} s")

    def _check_leave(self, number: int) -> None:
        """One that is not needed goes only when it has no work."""
        known = self._helpers[number]
        if known.calls or known.loads or known.ended_by:
            raise Broken("pool", f"helper {number} is let go, and has calls {list(known.calls)}")
        self._recover("one not needed let go")
        self._gone(number, "dismissed")

    def _check_end(self, number: int, now: float) -> None:
        known, helper = self._helpers[number], self.world.helpers.get(number)
        if known.ended_by:
            self._recover("a dead one dismissed")
            return
        if not known.is_running:
            if not self._is_late(known, now) or self._says(Alive, number):
                raise Broken("pool", f"helper {number} is given up at {now:.2f} s, too early")
            self._recover("one too late dismissed")
        elif helper.state == "up" or any(self._says_done(call) for call in (*known.calls, *known.loads)):
            raise Broken("pool", f"helper {number}, which works, is ended at {now:.2f} s")
        else:
            self._recover("a hung one dismissed")
        self._gone(number, "dismissed")

    def _is_late(self, helper: _Known, now: float) -> bool:
        """Whether it had its time: what was left of it, where others were refused before."""
        allowed_s = self.scenario.placement_timeout_s - self._spent[helper.kind]
        return now >= helper.since + allowed_s - 1e-6

    def _says(self, kind: type, number: int) -> bool:
        return any(type(event) is kind and event.helper == number for event in self.world.inbox)

    def _says_done(self, call: int) -> bool:
        return any(type(event) in (Loaded, Done, Failed, Faulted) and event.call == call for event in self.world.inbox)

    def _check_runs(self, number: int, command: Command) -> None:
        helper = self._helpers.get(number)
        if helper is None or not helper.is_running or helper.ended_by:
            raise Broken("dead", f"{command} to a helper that does not run")

    def _check_load(self, command: Load) -> None:
        first = self._chunks.setdefault(command.number, command)
        # A later load may name fewer rows: the consumer may have changed the first ones.
        is_same = first.chunk == command.chunk or self.scenario.gives_away
        if first.helper != command.helper or not is_same or command.number in self._dropped:
            raise Broken("turns", f"{command}, and {first} came before")
        if any(row in self._hits for row in self._chunk_keys(command)):
            self._recover("load again after a fault")
        if command.first and command.chunk.epoch > self._epoch:
            self._recover("the next epoch loaded ahead")

    def _check_turn(self, number: int, command: Gather) -> None:
        if command.number is None:
            if command.item.rows:
                raise Broken("source", f"{command} of no chunk")
        elif self._chunks[command.number].helper != number or command.number in self._dropped:
            raise Broken("turns", f"{command}, and its chunk is not there")
        elif command.number not in self._loaded:
            raise Broken("source", f"{command} of a chunk that is not loaded")

    def _check_early(self, item: WorkItem) -> None:
        if item.epoch > self._epoch + 1:
            raise Broken("early", f"{item} is read, and the consumer takes steps of epoch {self._epoch}")
        is_first = item.epoch == self._epoch and item.position in range(self._position, self._early_end)
        is_early = not self._is_wanted and not is_first and item.rows > 0
        # Each death, and each load of bad rows, may have cut an item.
        most = self._most_early + sum(self._deaths.values()) + self._failed_loads
        if is_early and len(self._flying) + len(self._ready) >= most:
            raise Broken("early", f"{item} is read, and nobody has asked for the pass yet")
        # An item of several steps may be split, and its steps may be read again one by one.
        if not self._is_wanted and item.epoch == self._epoch:
            self._early_end = max(
                self._early_end,
                self._planned.plan.after(item.epoch, item.position, item.steps),
            )
            self._recover("read for a pass not asked for yet")

    def _check_source(self, call: int, command: Command) -> _Seen:
        seen = self._calls.get(call)
        if seen is None or not seen.has_result:
            raise Broken("source", f"{command} of call {call}, which has no result")
        return seen

    def _check_room(self, command: Gather) -> None:
        item, scenario = command.item, self.scenario
        raw = 0 if command.decodes or not item.rows else command.allowed_bytes
        charge = raw + item.rows * DECODED_BYTES * scenario.decodes_items
        if command.decodes and not scenario.decodes_items:
            raise Broken("order", f"{command} decodes what is not to be decoded")
        used = sum(self._flying.values()) + sum(charge for _, charge in self._ready)
        is_first = (item.epoch, item.position, item.low) == self._next and not self._ready
        # While the head waits for another row to be decoded, that may be larger than the limit.
        is_alone = not used and any(deaths > MAX_FAULTS for deaths in self._deaths.values())
        if self._is_exact and used + charge > self._limit and not (is_first or is_alone) and item.rows:
            raise Broken("bytes", f"{used:.0f} and {charge:.0f} more, of {self._limit:.0f}")
        self._flying[command.call] = charge
        if is_first and used + charge > self._limit:
            self._recover("alone beyond the limit")

    def _check_delivery(self, command: Deliver) -> None:
        item, plan = command.item, self._planned.plan
        fetch = self._answers
        if fetch is None or type(fetch.command) is not Fetch:
            raise Broken("order", f"{item} is delivered and was not fetched")
        if (item.epoch, item.position, item.low) != self._next or item.dp_rank != self._rank:
            raise Broken("order", f"{item} is delivered, but {self._next} is next")
        made = command.decoded
        if command.plain.item != item or made.item != item or made.is_decoded != self.scenario.decodes_items:
            raise Broken("order", f"{item} is delivered with what belongs to another, or is not decoded")
        self._opened += self._flying.pop(fetch.command.gathered, 0.0)
        begin, starts = 0, plan.starts(item.epoch, item.position, item.steps)
        for position, rows in zip(starts, plan.rows_by_step(item), strict=True):
            self._part += made.rows[begin : begin + rows]
            begin += rows
            self._next = (item.epoch, position, item.high)
            if plan.ends_step(item):
                if self._part != self._planned.step(item.epoch, position, self._rank):
                    raise Broken("order", f"step {position} has the rows {self._part}")
                after, self._part = plan.after(item.epoch, position), []
                self._next = (item.epoch, after, 0)
        if not self._part and self._next[2] == 0:
            self._ready.append((self._next[:2], self._opened))
            self._opened = 0.0
        if plan.is_over(*self._next[:2]) and self._spans_epochs:
            self._next = (item.epoch + 1, 0, 0)
            self._recover("an epoch delivered to its end, and another one follows")

    def _check_complete(self) -> None:
        if not self._planned.plan.is_over(*self._next[:2]) or self._part:
            raise Broken("liveness", f"the pass is complete, and {self._next} is next")

    def _check_cause(self, error: BaseException, now: float) -> None:
        row = getattr(error, "row", None)
        if row is not None:
            anchors = range(row - self.scenario.reach, row + 1)
            if not any(self._planned.has(*self._next[:2], self._rank, each) for each in anchors):
                raise Broken("cause", f"row {row} fails, in another step than {self._next}")
            self._recover("ended by a row")
        elif isinstance(error, PlacementError):
            if not any(h.ended_by == "dismissed" and not h.is_running for h in self._helpers.values()):
                raise Broken("cause", f"{error}, and none was late")
            self._recover("ended by a late helper")
        elif isinstance(error, HelperError) and "could not start" in str(error):
            refused = [
                helper for helper in self._helpers.values() if helper.ended_by == "told" and not helper.is_running
            ]
            if not self._permanent and not any(self._is_late(helper, now + PAUSE_S) for helper in refused):
                raise Broken("cause", f"{error}, and there was time")
            self._recover("ended by a helper that cannot start")
        elif isinstance(error, HelperError):
            hits = self._hits.get(self._next, set())
            # A row after it may have ended more decoders than that, while none decoded another row.
            # Of a chunk whose reader decodes, blocks of other samples may have ended readers, too.
            most = max((deaths + 2 * (len(unit) == 4) for unit, deaths in self._deaths.items()), default=0)
            is_row = "no other row was decoded" in str(error) and most > MAX_FAULTS
            if len(hits) <= MAX_FAULTS and not is_row:
                raise Broken("cause", f"{error}, and {self._next} was hit by {sorted(hits)}")
            self._recover("ended by work lost again and again")
        else:
            raise Broken("cause", repr(error))

    # Between.

    def settled(self, event: Event | None, deadline: float | None, now: float) -> None:
        """The dispatcher has said all that there is to do."""
        if type(event) is Lost:
            for call in self._helpers[event.helper].calls:
                if not self._calls[call].is_forgotten:
                    raise Broken("dead", f"call {call} of helper {event.helper} is awaited, which is lost")
        if event is None and deadline is not None and deadline <= now:
            raise Broken("deadline", f"{deadline:.3f} s is past at {now:.3f} s")
        helpers = [helper for helper in self._helpers.values() if not helper.ended_by]
        waits = self._open or any(
            not helper.is_running or helper.is_pinged or helper.calls or helper.loads for helper in helpers
        )
        if deadline is None:
            if waits:
                raise Broken("deadline", "something is awaited for ever")
        elif deadline > now + self.scenario.work_timeout_s:  # of a pause, too: a wait that ends only there has no end
            raise Broken("deadline", f"something is awaited until {deadline}")

    def closed(self) -> None:
        """The pass is over, and its commands are done."""
        kept = [call for call, seen in self._calls.items() if seen.has_result]
        if self.world.table or self._open or kept:
            raise Broken("left", f"calls {sorted({*self.world.table, *self._open, *kept})} are kept")
        self._calls = {call: self._calls[call] for helper in self._helpers.values() for call in helper.calls}
