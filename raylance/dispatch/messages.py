"""Owns the vocabulary of the dispatcher: events in, outputs out; never acts on any of them."""

import dataclasses
from typing import Any, Literal

import pyarrow as pa

from raylance.observe.observations import FaultSeen, Receipt, Status, WorkDone
from raylance.planning.plan import Chunk, WorkItem

Kind = Literal["reader", "decoder"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A machine fault: nothing is known to be wrong with the rows, and the same work may succeed elsewhere or later."""

    what: str  # what happened, in one line
    may_be_rows: bool = False  # whether a helper's process has ended by itself, as a row can make it do
    is_of_others: bool = False  # whether the helper was at the work of another loader
    advice: str = ""  # what to do if it does not end
    error: BaseException | None = None  # what was raised


# Commands: outputs for the runtime.


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Find a place for a helper and start it: answered by `Alive` or `NotPlaced`."""

    helper: int
    kind: Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Dismiss:
    """End a helper: it died, hangs or found no place; with `is_lost` False, it is not needed. Its later answers are
    ignored.
    """

    helper: int
    is_lost: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Ping:
    """Ask a helper for a sign of life, after the work that it has: answered by `Alive` or `Lost`."""

    helper: int


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Read an item, and decode it in the same place where `decodes`; no more than `allowed_bytes` of raw rows.

    When its chunk is here, read the chunk `following`; None where any will do. `given_up`: as of `Decode`.
    """

    call: int
    helper: int
    item: WorkItem
    decodes: bool
    allowed_bytes: int
    following: Chunk | None = None
    given_up: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Prefetch:
    """Begin to read a chunk that a reader will be asked for: answered by nothing but `Lost`."""

    helper: int
    dp_rank: int
    chunk: Chunk


@dataclasses.dataclass(frozen=True, slots=True)
class Decode:
    """Decode the result of the call `source`; or, if `given_up` says why, take its only row for a bad one, untried."""

    call: int
    helper: int
    source: int
    epoch: int
    given_up: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the results of a read and, where there was one, of a decode to this process: answered by `Fetched`."""

    call: int
    read: int
    decode: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
    """Drop the results of calls, also of those that have none yet."""

    calls: tuple[int, ...]


Command = Place | Dismiss | Ping | Read | Prefetch | Decode | Fetch | Forget


# Outputs about the pass, for the feeder.


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver:
    """The next item of the pass: its plain columns, and its decoded ones where there are any."""

    item: WorkItem
    plain: Any
    decoded: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Complete:
    """All items of the pass were delivered."""


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUp:
    """The pass ends with this error, after what was delivered."""

    error: BaseException


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUpPlacing:
    """The pass ends: so many of the helpers of a kind were not placed in time. The runtime knows the cause."""

    kind: Kind
    pending: int
    asked: int


# Outputs for statistics and the log, which come before the commands of the same decision: `Log`, and the observations
# of `raylance.observe`.


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """A line for the log, with a level of `logging`."""

    level: int
    line: str


Observation = Log | FaultSeen | WorkDone | Status
Output = Command | Deliver | Complete | GiveUp | GiveUpPlacing | Observation


# Events of the consumer.


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """The pass begins: its first steps are made, although no consumer has asked for them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A consumer has asked for the batches of the pass."""


@dataclasses.dataclass(frozen=True, slots=True)
class Awaited:
    """The consumer waits for a batch, until it takes one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """The consumer has taken all batches before this position of the epoch."""

    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
    """The pass ends here. Events that follow matter to the helpers alone, which outlive it."""


# Events of the runtime.


@dataclasses.dataclass(frozen=True, slots=True)
class Alive:
    """A helper runs: it has started, or it answers a `Ping`."""

    helper: int


@dataclasses.dataclass(frozen=True, slots=True)
class NotPlaced:
    """A helper died as it started; `permanent` where another one would die in the same way."""

    helper: int
    fault: Fault
    permanent: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A read or a decode is done, and its result lies where it was made."""

    call: int
    receipt: Receipt


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """The results that a `Fetch` asked for."""

    call: int
    plain: pa.Table
    decoded: pa.Table | None


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A call raised an error that is due to its rows or to user code: it would raise it again."""

    call: int
    error: BaseException


@dataclasses.dataclass(frozen=True, slots=True)
class Faulted:
    """A call failed by a machine fault, and its helper lives: an input was lost, or an output found no room."""

    call: int
    fault: Fault


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A helper is gone, with all calls that it had not answered."""

    helper: int
    fault: Fault


@dataclasses.dataclass(frozen=True, slots=True)
class Wake:
    """Ends a wait of the feeder; never reaches the dispatcher."""


Event = Begin | Wanted | Awaited | Taken | Close | Alive | NotPlaced | Done | Fetched | Failed | Faulted | Lost
