"""The messages of the dispatcher: the events that it takes and the outputs that it returns."""

import dataclasses
from typing import Any, Literal

import pyarrow as pa

from raylance.observe.observations import FaultSeen, Receipt, Status, WorkDone
from raylance.planning.plan import Chunk, WorkItem

Kind = Literal["reader", "decoder"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A machine fault: the rows are not known to be the cause, and the same work may succeed elsewhere or later."""

    what: str  # the fault, in one line
    may_be_rows: bool = False  # whether a helper's process ended by itself, which a row may have caused
    is_of_others: bool = False  # whether the helper was working for another loader
    advice: str = ""  # the fix if the fault persists
    error: BaseException | None = None  # the error that was raised


# Commands: outputs for the runtime.


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Find a place for a helper and start it: answered by `Alive` or `NotPlaced`."""

    helper: int
    kind: Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Dismiss:
    """End a helper that died, hangs or found no place; with `is_lost` False, a helper that is not needed any more. Its
    later answers are ignored.
    """

    helper: int
    is_lost: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Ping:
    """Ask a helper for a sign of life, which follows its present work: answered by `Alive` or `Lost`."""

    helper: int


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Read stored rows of a chunk into the reader's memory: `rows` of them, from number `first` on in storage order, a
    row that occurs several times counted once; fewer if the chunk has no more, or if they would have more than
    `allowed_bytes`. Answered by `Loaded`.

    Each loaded chunk has a `number` of its own. Two loads of one reader may be done at the same time; they begin in
    order. First of all, the reader frees the memory of the chunks `drops`, as by `Drop`. With a `margin`, it reads more
    of video files than their indices say, see `RowReader.widened`.
    """

    call: int
    helper: int
    number: int
    dp_rank: int
    chunk: Chunk
    first: int
    rows: int
    allowed_bytes: int
    drops: tuple[int, ...] = ()
    margin: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Free the memory of a chunk. Loads of it that are not done end soon, with any result."""

    helper: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Put the rows of an item together in the order of delivery: from the chunk `number`, all of whose rows are loaded;
    None if it has no rows. If `decodes`, also decode them in the same helper. If the raw rows have more bytes
    than `allowed_bytes`, the result has no rows, and the receipt in `Done` has the number of bytes. `given_up`: see
    `Decode`.
    """

    call: int
    helper: int
    item: WorkItem
    number: int | None
    decodes: bool
    allowed_bytes: int
    given_up: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Decode:
    """Decode the result of the gathering call `source`. If `given_up` is not empty, it says why the item's only
    row is bad; then the row is not decoded.
    """

    call: int
    helper: int
    source: int
    epoch: int
    given_up: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeBlock:
    """Decode rows [low, high) of those that the load `source` has added to a chunk of a reader, from its stored row
    number `first` on. The result stays with the chunk `number`: items that are gathered from it have these rows. For
    `given_up`, see `Decode`. The rows with the offsets in `known_bad` are not decoded either, for these reasons.
    Answered by `Done`.
    """

    call: int
    helper: int
    reader: int
    number: int
    source: int
    first: int
    low: int
    high: int
    given_up: str = ""
    known_bad: tuple[tuple[int, str], ...] = ()

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of `BlockDecoding.apply`."""
        return {
            "low": self.low,
            "high": self.high,
            "given_up": self.given_up,
            "known_bad": dict(self.known_bad),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the results of a gathering call and, if there was one, of a decode to this process; see `Fetched`."""

    call: int
    gathered: int
    decode: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
    """Drop the results of calls, and the later results of calls that are not answered yet."""

    calls: tuple[int, ...]


Command = Place | Dismiss | Ping | Load | Drop | Gather | Decode | DecodeBlock | Fetch | Forget


# Outputs about the pass, for the feeder.


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver:
    """The next item of the pass: its plain columns, and its decoded columns if it has any."""

    item: WorkItem
    plain: Any
    decoded: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Complete:
    """All items of the pass were delivered, and no epoch follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUp:
    """The pass ends with this error, after the items that were delivered."""

    error: BaseException


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUpPlacing:
    """The pass ends because `pending` of `asked` helpers were not placed in time. The runtime knows the cause."""

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
    """The pass begins: its first steps are made before a consumer asks for them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A consumer has asked for the batches of an epoch: the first one of the pass, or the one that follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Awaited:
    """The consumer waits for a batch; the wait ends with `Taken`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """The consumer has taken all batches before this position of an epoch. After the last one of the epoch, nobody
    asks for batches until `Wanted`.
    """

    epoch: int
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
    """The pass ends. Later events concern only the helpers, which outlive the pass."""


# Events of the runtime.


@dataclasses.dataclass(frozen=True, slots=True)
class Alive:
    """A helper runs: it has started, or answered a `Ping`."""

    helper: int


@dataclasses.dataclass(frozen=True, slots=True)
class NotPlaced:
    """A helper died during its start; `permanent` if another one would die in the same way."""

    helper: int
    fault: Fault
    permanent: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A gathering call or a decode, also of a block, is done; its result has not been fetched."""

    call: int
    receipt: Receipt


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A load is done. `receipt` describes the call; the other fields describe the chunk after the call.

    Attributes:
        rows: Number of its stored rows that are loaded, from the first one on.
        stored_rows: Number of its stored rows.
        nbytes: Bytes of all rows that are loaded, also of those that lie behind rows that are still being loaded.
        needs_bytes: Bytes of the first row that did not fit; 0 if all did.
        is_even: Whether all rows have the same size.
        added: Number of rows that this load has added.
    """

    call: int
    receipt: Receipt
    rows: int
    stored_rows: int
    nbytes: int
    needs_bytes: int
    is_even: bool
    added: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """The results that a `Fetch` has brought to this process."""

    call: int
    plain: pa.Table
    decoded: pa.Table | None


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A call raised an error because of its rows or user code, and would raise it again."""

    call: int
    error: BaseException


@dataclasses.dataclass(frozen=True, slots=True)
class Faulted:
    """A call failed by a machine fault, but its helper is alive: an input was lost, or an output did not fit."""

    call: int
    fault: Fault


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkLost:
    """What a living reader has sent of a chunk is gone, so that the chunk has to be loaded again."""

    number: int
    fault: Fault


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A helper is gone, and with it all its unanswered calls."""

    helper: int
    fault: Fault


@dataclasses.dataclass(frozen=True, slots=True)
class Wake:
    """Ends a wait of the feeder; never reaches the dispatcher."""


Answer = Loaded | Done | Fetched | Failed | Faulted
Event = Begin | Wanted | Awaited | Taken | Close | Alive | NotPlaced | Answer | ChunkLost | Lost
