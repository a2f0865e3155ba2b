"""Owns what dispatcher and runtime say to each other, commands and events; never acts on them."""

import dataclasses
from typing import Any, Literal

import pyarrow as pa

from raylance.observe import Receipt
from raylance.planning.plan import Chunk, WorkItem

Kind = Literal["reader", "decoder"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of the machines: nothing is wrong with the rows, and the same work may succeed elsewhere or later."""

    told: str  # what happened, in a line
    advice: str = ""  # what to do if it does not end
    error: BaseException | None = None  # what was raised


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Find a place for a helper and start it: answered by `Placed` or `NotPlaced`."""

    helper: int
    kind: Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Dismiss:
    """End a helper: it died, hangs, found no place, or unless `is_lost`, is not needed. What it still says is of no
    interest.
    """

    helper: int
    is_lost: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """Ask a helper for a sign of life, behind the work that it has: answered by `Alive` or `Lost`."""

    helper: int


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Read an item, and decode it in the same place where `decodes`; no more than `allowed_bytes` of raw rows.

    When its chunk is here, read the chunk `following`; None where that does not matter.
    """

    call: int
    helper: int
    item: WorkItem
    decodes: bool
    allowed_bytes: int
    following: Chunk | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Prefetch:
    """Begin to read a chunk that a reader will be asked for: not answered, unless by `Lost`."""

    helper: int
    rank: int
    chunk: Chunk


@dataclasses.dataclass(frozen=True, slots=True)
class Decode:
    """Decode what the call `source` has read."""

    call: int
    helper: int
    source: int
    epoch: int


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


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver:
    """Hand an item on: its plain columns, and its decoded ones where any are."""

    item: WorkItem
    plain: Any
    decoded: Any


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise this behind what was delivered; nothing follows."""

    error: BaseException


Command = Place | Dismiss | Ask | Read | Prefetch | Decode | Fetch | Forget | Deliver | GiveUp


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A helper runs."""

    helper: int


@dataclasses.dataclass(frozen=True, slots=True)
class NotPlaced:
    """A helper died as it started; `hopeless` where another one would die likewise."""

    helper: int
    fault: Fault
    hopeless: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Alive:
    """A helper answers."""

    helper: int


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A read or a decode is done, and its result lies where it was made."""

    call: int
    receipt: Receipt


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """What a `Fetch` asked for is here."""

    call: int
    plain: pa.Table
    decoded: pa.Table | None


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A call raised something that is the fault of its rows or of user code: it would again."""

    call: int
    error: BaseException


@dataclasses.dataclass(frozen=True, slots=True)
class Faulted:
    """A call failed by a fault of the machines, and its helper lives: an input was lost, an output found no room."""

    call: int
    fault: Fault


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A helper is gone, with all calls that it had not answered."""

    helper: int
    fault: Fault


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """The consumer has taken all batches before this position of the epoch."""

    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wake:
    """Ends a wait, and says nothing."""


Event = Placed | NotPlaced | Alive | Done | Fetched | Failed | Faulted | Lost | Taken | Wake
