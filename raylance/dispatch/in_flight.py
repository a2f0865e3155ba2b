"""The items of a pass that are in flight, until the consumer takes their steps, within the limit of their bytes."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from raylance.dispatch.account import Account
from raylance.dispatch.states import ItemState, change
from raylance.dispatch.suspects import Suspicion
from raylance.observe import Receipt
from raylance.planning.plan import Plan, WorkItem


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class InFlightItem:
    """An item in flight, and the state of the work on it.

    Attributes:
        reserved_bytes: Bytes that it counts for while it is in flight.
        allowed_bytes: Most bytes of its raw rows.
        faults: Number of machine faults that have hit it.
        suspicion: What is known against its rows.
        not_before: When it may be sent again.
        call: The awaited call, and `since` when it was sent.
        gathered: The call that gathered it.
        decode: The call that decoded it.
        replaced: Number of helpers that were replaced before it was gathered.
        receipts: From gathering and decoding.
        decodes_there: Whether the reader decodes it.
        error: The error with which the pass ends at this item.
    """

    item: WorkItem
    reserved_bytes: float
    allowed_bytes: float
    faults: int = 0
    suspicion: Suspicion = dataclasses.field(default_factory=Suspicion)
    state: ItemState = ItemState.WAITING
    not_before: float = 0.0
    call: int | None = None
    since: float = 0.0
    gathered: int | None = None
    decode: int | None = None
    replaced: int = 0
    receipts: list[Receipt] = dataclasses.field(default_factory=list)
    decodes_there: bool = False
    error: BaseException | None = None

    def change(self, state: ItemState) -> None:
        """Changes the state, see `raylance.dispatch.states`."""
        self.state = change(self.state, state)

    @property
    def is_sent(self) -> bool:
        """Whether the item was sent, so that its bytes count for the limit."""
        return self.state not in (ItemState.WAITING, ItemState.FAILED)

    @property
    def is_hit(self) -> bool:
        """Whether a fault has hit the item."""
        return self.faults + self.suspicion.deaths > 0

    @property
    def is_suspect(self) -> bool:
        """Whether a fresh decoder must try the item."""
        return self.suspicion.needs_fresh(self.item.rows)

    def drop_results(self) -> tuple[int, ...]:
        """Drops the item's results; returns the calls that made them."""
        calls = tuple(call for call in (self.gathered, self.decode) if call is not None)
        self.gathered = self.decode = None
        self.receipts = []
        return calls


class InFlight:
    """Keeps the bytes of items in progress, and of whole steps that the consumer has not taken, within a limit.

    The next item to deliver may be sent in spite of the limit if no whole step waits, because otherwise nothing would
    be delivered. Delivered items of a step that is not whole yet do not count for the limit.

    Attributes:
        entries: The items in flight, in the order of delivery.
        error: The error, such as one of a custom order, by which no other item could be planned. It belongs after the
            items before it, because it may be one of the next epoch.
    """

    def __init__(
        self,
        plan: Plan,
        items: Iterable[WorkItem],
        place: tuple[int, int],
        account: Account,
        prefetch_batches: int,
    ) -> None:
        """Begins with nothing in flight; the items begin at a place, which is an epoch and a position."""
        self._plan, self._account, self._prefetch = plan, account, max(1, prefetch_batches)
        self._planned: Iterator[WorkItem] = iter(items)
        self._upcoming: deque[WorkItem] = deque()
        self._taken = place
        # Whole steps: the place after the step, bytes, items
        self._ready: deque[tuple[tuple[int, int], float, int]] = deque()
        self._open = (0.0, 0)  # bytes and items delivered of the step that is not whole yet
        self.entries: deque[InFlightItem] = deque()
        self.error: Exception | None = None

    @property
    def head(self) -> InFlightItem | None:
        """The next item to deliver."""
        return self.entries[0] if self.entries else None

    @property
    def is_over(self) -> bool:
        """Whether all items were delivered that could be planned."""
        return not self.entries and self._peek() is None

    def take_on(self, decoders: int | None) -> None:
        """Adds items while they are wanted and have room: items of the steps to prefetch, and at least two for each of
        the running `decoders`, also of the next epoch. With None, only the steps to prefetch count.
        """
        enough = 0 if decoders is None else 2 * max(1, decoders)
        if any(other.state is ItemState.FAILED for other in self.entries):
            return  # items after a failed one will not be delivered
        epoch, _ = self._taken
        while (item := self._peek()) is not None:
            count = len(self.entries) + sum(items for _, _, items in self._ready) + self._open[1]
            if item.epoch > epoch + 1 or (count > enough and self._is_far(item)):
                return
            entry = self._reserve(item)
            reserved = sum(other.reserved_bytes for other in self.entries) + self._ready_bytes
            if (self.entries or self._ready) and reserved + entry.reserved_bytes > self._account.inflight_bytes:
                return
            self.entries.append(entry)
            self._upcoming.popleft()

    def _is_far(self, item: WorkItem) -> bool:
        """Whether an item is after the steps to prefetch, of the epoch whose steps the consumer takes now or next."""
        epoch, position = self._taken
        return item.epoch > epoch or self._plan.steps_between(epoch, position, item.position) >= self._prefetch

    def _peek(self) -> WorkItem | None:
        """Returns the next planned item, cut if its rows turned out larger than estimated; None if all were added."""
        if not self._upcoming and self.error is None:
            try:
                self._upcoming.extend(itertools.islice(self._planned, 1))
            except Exception as error:
                self.error = error
        while self._upcoming and (parts := self._account.parts(self._upcoming[0])) > 1:
            self._upcoming.extendleft(reversed(self._plan.cut(self._upcoming.popleft(), parts)))
        return self._upcoming[0] if self._upcoming else None

    def _reserve(self, item: WorkItem, allowed_bytes: float = 0.0) -> InFlightItem:
        """Makes the entry of an item. Its raw rows may have the estimated bytes, or `allowed_bytes` if that is more."""
        estimate = self._account.allowed_bytes(item.rows)
        extra = max(0.0, allowed_bytes - estimate)
        reserved_bytes = self._account.reserved_bytes(item.rows) + extra
        return InFlightItem(item=item, reserved_bytes=reserved_bytes, allowed_bytes=estimate + extra)

    def cut(self, entry: InFlightItem, parts: int, allowed_bytes: float) -> None:
        """Replaces an item by up to `parts` parts, which are gathered again."""
        self._replace(entry, self._plan.cut(entry.item, parts), allowed_bytes)

    def cut_at(self, entry: InFlightItem, rows: int) -> None:
        """Replaces an item by parts, one of which ends after its first `rows` rows."""
        self._replace(entry, self._plan.cut_at(entry.item, rows), entry.allowed_bytes)

    def _replace(self, entry: InFlightItem, items: Sequence[WorkItem], allowed_bytes: float) -> None:
        at = self.entries.index(entry)
        del self.entries[at]
        entry.change(ItemState.GONE)
        for item in reversed(items):
            smaller = self._reserve(item, allowed_bytes * item.rows / max(1, entry.item.rows))
            smaller.faults, smaller.not_before = entry.faults, entry.not_before
            smaller.suspicion = entry.suspicion.of_part()
            self.entries.insert(at, smaller)

    @property
    def _ready_bytes(self) -> float:
        return sum(nbytes for _, nbytes, _ in self._ready)

    @property
    def has_ready(self) -> bool:
        """Whether a whole step was delivered that the consumer has not taken yet."""
        return bool(self._ready)

    @property
    def used_bytes(self) -> float:
        """Bytes that count for the limit: those of items in progress, and of whole steps that were not taken yet."""
        return sum(other.reserved_bytes for other in self.entries if other.is_sent) + self._ready_bytes

    def has_room(self, entry: InFlightItem) -> bool:
        """Returns whether an item may be sent now."""
        used, head = self.used_bytes, self.entries[0]
        is_next = not self._ready and entry is head
        # If the head waits until another row is decoded, that row must be sent, even if it alone exceeds the limit.
        return (
            is_next
            or (head.suspicion.waits and not used)
            or used + entry.reserved_bytes <= self._account.inflight_bytes
        )

    def deliver(self) -> None:
        """Moves the head to the delivered items. Until the step in which it ends is whole, its bytes do not count; then
        they count until the consumer has taken that step.
        """
        entry = self.entries.popleft()
        entry.change(ItemState.GONE)
        item = entry.item
        self._open = (self._open[0] + entry.reserved_bytes, self._open[1] + 1)
        if self._plan.ends_step(item):
            after = self._plan.after(item.epoch, item.position, item.steps)
            self._ready.append(((item.epoch, after), *self._open))
            self._open = (0.0, 0)

    def taken(self, place: tuple[int, int]) -> bool:
        """Records that the consumer has taken all steps before a place; returns whether its epoch has others."""
        is_over = self._plan.is_over(*place)
        self._taken = (place[0] + 1, 0) if is_over else place
        while self._ready and self._ready[0][0] <= place:
            self._ready.popleft()
        return not is_over
