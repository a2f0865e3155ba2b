"""Owns the items of a pass that are in flight, in the order of delivery, until the consumer has taken them: which there
are, and which have room. Never knows who works on them.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum, auto

from raylance.dispatch.sizes import Sizes
from raylance.observe import Receipt
from raylance.planning.plan import Plan, WorkItem


class Stage(Enum):
    """Where a piece stands."""

    WAITING = auto()  # for room, for the reader, or for a pause to end
    READING = auto()
    READ = auto()  # and waiting for a decoder
    DECODING = auto()
    DONE = auto()
    FETCHING = auto()
    FAILED = auto()


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class InFlightItem:
    """An item on its way."""

    item: WorkItem
    nbytes: float  # that it counts for
    allowed_bytes: float  # that its raw rows may have
    faults: int = 0  # of the machines, that it has seen
    stage: Stage = Stage.WAITING
    not_before: float = 0.0  # when it may be sent again
    call: int | None = None  # that is awaited
    since: float = 0.0  # since when
    read: int | None = None  # the call that read it
    replaced: int = 0  # helpers that had been replaced until then
    decode: int | None = None  # the call that decoded it
    receipts: list[Receipt] = dataclasses.field(default_factory=list)  # of both
    decodes_there: bool = False  # whether the reader decodes it
    error: BaseException | None = None  # what it ends with

    @property
    def is_sent(self) -> bool:
        """Whether it takes room."""
        return self.stage not in (Stage.WAITING, Stage.FAILED)

    def results(self) -> tuple[int, ...]:
        """Gives up the calls that have made something of it."""
        calls = tuple(call for call in (self.read, self.decode) if call is not None)
        self.read = self.decode = None
        self.receipts = []
        return calls


class InFlight:
    """What is on its way stays within a limit of bytes: what is in work, and what waits for the consumer.

    What is awaited first may always go alone, or nothing would ever be delivered; and the step that is being put
    together comes on top.
    """

    def __init__(
        self, plan: Plan, rank: int, items: Iterable[WorkItem], position: int, sizes: Sizes, prefetch_batches: int
    ) -> None:
        """Takes nothing on yet; see `Dispatcher`."""
        self._plan, self._rank, self._sizes, self._prefetch = plan, rank, sizes, max(1, prefetch_batches)
        self._items: Iterator[WorkItem] = iter(items)
        self._upcoming: deque[WorkItem] = deque()
        self._taken = position
        self._ready: deque[tuple[int, float, int]] = deque()  # delivered steps: position behind, bytes, items
        self._open = (0.0, 0)  # bytes and items of the step that is not whole yet
        self.pieces: deque[InFlightItem] = deque()

    @property
    def head(self) -> InFlightItem | None:
        """What is awaited first."""
        return self.pieces[0] if self.pieces else None

    @property
    def is_over(self) -> bool:
        """Whether all was delivered."""
        return not self.pieces and self._peek() is None

    def take_on(self, decoders: int | None) -> None:
        """Takes items on as long as they are wanted and have room: those of the steps to prefetch, and two for each
        decoder at work.
        """
        enough = 0 if decoders is None else 2 * max(1, decoders)
        if any(piece.stage is Stage.FAILED for piece in self.pieces):
            return  # nothing behind it will be delivered
        while (item := self._peek()) is not None:
            piece = self._piece(item)
            reserved = sum(piece.nbytes for piece in self.pieces) + self._ready_bytes
            if (self.pieces or self._ready) and reserved + piece.nbytes > self._sizes.limit_bytes:
                return
            items = len(self.pieces) + sum(items for _, _, items in self._ready) + self._open[1]
            ahead = -(-(item.position - self._taken) // self._plan.stride)
            if items > enough and ahead >= self._prefetch:
                return
            self.pieces.append(piece)
            self._upcoming.popleft()

    def _peek(self) -> WorkItem | None:
        """The next item, cut where its rows have turned out larger than they were thought to be."""
        if not self._upcoming:
            self._upcoming.extend(itertools.islice(self._items, 1))
        while self._upcoming and (parts := self._sizes.parts(self._upcoming[0])) > 1:
            self._upcoming.extendleft(reversed(self._plan.cut(self._upcoming.popleft(), parts)))
        return self._upcoming[0] if self._upcoming else None

    def _piece(self, item: WorkItem, allowed_bytes: float = 0.0) -> InFlightItem:
        """An item and what it may have: by what rows have had so far, or as much as it is known to have."""
        thought = self._sizes.allowed(item.rows)
        extra = max(0.0, allowed_bytes - thought)
        return InFlightItem(item=item, nbytes=self._sizes.worth(item.rows) + extra, allowed_bytes=thought + extra)

    def replace(self, piece: InFlightItem, parts: int, allowed_bytes: float) -> None:
        """Puts smaller pieces in the place of one that has to be read again."""
        place = self.pieces.index(piece)
        del self.pieces[place]
        for item in reversed(self._plan.cut(piece.item, parts)):
            smaller = self._piece(item, allowed_bytes * item.rows / max(1, piece.item.rows))
            smaller.faults, smaller.not_before = piece.faults, piece.not_before
            self.pieces.insert(place, smaller)

    @property
    def _ready_bytes(self) -> float:
        return sum(nbytes for _, nbytes, _ in self._ready)

    @property
    def has_ready(self) -> bool:
        """Whether a whole step was delivered and not taken yet."""
        return bool(self._ready)

    @property
    def used_bytes(self) -> float:
        """Bytes that count for the limit: of what is on its way, and of whole steps that were not taken yet."""
        return sum(other.nbytes for other in self.pieces if other.is_sent) + self._ready_bytes

    def has_room(self, piece: InFlightItem) -> bool:
        """Whether a piece may be sent now."""
        is_next = piece is self.pieces[0] and not self._ready
        return is_next or self.used_bytes + piece.nbytes <= self._sizes.limit_bytes

    def deliver(self) -> None:
        """Hands the head on; it counts until its last step is taken."""
        piece = self.pieces.popleft()
        item = piece.item
        self._open = (self._open[0] + piece.nbytes, self._open[1] + 1)
        low, high = self._plan.rank_slice(item.position, self._rank)
        if item.high == high - low:
            last = item.position + (item.steps - 1) * self._plan.stride
            self._ready.append((self._plan.after(last), *self._open))
            self._open = (0.0, 0)

    def taken(self, position: int) -> None:
        """Notes that the consumer has taken all steps before a position."""
        self._taken = position
        while self._ready and self._ready[0][0] <= position:
            self._ready.popleft()
