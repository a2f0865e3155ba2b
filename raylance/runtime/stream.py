"""Owns the work in flight of one iteration: hands it out, bounds it by bytes, collects it in order, and hands it out
again when a helper dies; never interprets the rows.

All references belong to this process, so raw tables go from the shard actor to a decoder without passing here. Work is
handed out when the consumer asks for a batch: no thread runs here. Each item is sent to its decoder at once, as a
reference that Ray resolves when the shard actor has read it.
"""

import dataclasses
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import RayError

from raylance.columns import COMPONENT, COMPONENT_SHIFT, OFFSET_MASK, ROW_OFFSET, VALID, dataset_names, tell_rows
from raylance.errors import CoverageError, HelperError
from raylance.planning.coverage import Coverage
from raylance.planning.plan import Plan, WorkItem
from raylance.runtime.faults import advice, as_raised, first_line, is_helper_gone, is_machine_fault
from raylance.runtime.placement import Helper
from raylance.runtime.pool import Helpers
from raylance.settings import Feed, Options
from raylance.telemetry import Receipt, Stats

logger = logging.getLogger(__name__)

_MAX_FAULTS = 3  # of the machines, that one item may see
_PAUSES_S = (0.2, 1.0, 5.0)  # before work is done again where nothing died: a store that is full takes time to drain
_MAX_ITEM_BYTES = 32 << 20
# Raw rows count for more than they are thought to have, and may have that much: what is in flight stays within its
# limit, and few items have to be cut although sizes vary.
_MARGIN = 1.5
_LEAST_BYTES = 64 << 10  # any item may have: below it, sizes say nothing
_CUT_FROM = 2  # times the bytes that items should have: less is left as it is


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Piece:
    """An item in flight and where it is; without calls, it waits until there is room for it."""

    item: WorkItem
    nbytes: float
    allowed_bytes: float
    faults: int = 0
    sent: int = 0  # counts up over all pieces: helpers work in this order
    decoder: Helper | None = None
    plain: Any = None
    images: Any = None
    calls: list[tuple[Helper, Any]] = dataclasses.field(default_factory=list)  # helpers, and what gives their receipts

    @property
    def receipts(self) -> list[Any]:
        return [receipt for _, receipt in self.calls]

    def is_finished(self) -> bool:
        """Whether all its helpers have done their part; their results then outlive them."""
        ready, pending = ray.wait(self.receipts, num_returns=len(self.calls), timeout=0)
        return not pending and all(_error_of(receipt) is None for receipt in ready)


class Stream:
    """One rank's tables of one epoch, in order, from a position on."""

    def __init__(
        self,
        *,
        feed: Feed,
        plan: Plan,
        plan_key: str,
        rank: int,
        helpers: Helpers,
        options: Options,
        stats: Stats,
    ) -> None:
        """Makes a stream and starts the helpers; nothing is read before `tables`.

        Args:
            feed: What the shard actor serves.
            plan: The plan of the epoch.
            plan_key: Names it to the shard actor; the same for equal plans, so that what is read ahead is found.
            rank: The rank.
            helpers: The loader's helpers, which are started here.
            options: Limits of bytes in flight and of placement.
            stats: Counters to add to.
        """
        self._feed, self._plan, self._rank = feed, plan, rank
        self._plan_key, self._shared_plan = plan_key, ray.put(plan)
        self._selection = feed.source.load_selection()
        self._shard = helpers.start(feed)
        self._replaced = helpers.replaced
        self._helpers, self._options = helpers, options
        self._sends = itertools.count()
        self._stats = stats
        self._inflight: deque[_Piece] = deque()
        self.coverage = Coverage()
        # In the object store for each row, and raw; of the larger ones, as far as they were seen lately.
        self._row_bytes = feed.source.likely_row_bytes + (feed.decoding.row_bytes if feed.decoding else 0)
        self._raw_bytes = feed.source.likely_row_bytes
        self._item_bytes = float(_MAX_ITEM_BYTES)

    def tables(self, epoch: int, position: int, prefetch_batches: int) -> Iterator[pa.Table]:
        """Yields the rank's rows of each step: the feed's columns, `_component`, `_rowoffset` and `_valid`.

        Args:
            epoch: Epoch.
            position: Position of the first step.
            prefetch_batches: Steps to keep in flight at the least; more where the decoders need it.

        Raises:
            BadRowError: A row cannot be decoded, and bad rows are not masked.
            HelperError: Work on the same rows was lost again and again.
            PlacementError: A replacement found no place.
        """
        # One item in work and one waiting, for each decoder.
        parts_in_flight = 2 * self._helpers.decoders_wanted + 1
        self._item_bytes = min(_MAX_ITEM_BYTES, self._options.max_inflight_bytes / parts_in_flight)
        item_rows = max(1, int(self._item_bytes / max(self._worth(1), 1)))
        items = self._sized(self._plan.items(self._rank, epoch, position, item_rows))
        waiting = next(items, None)
        parts: list[pa.Table] = []
        try:
            while True:
                while waiting is not None and self._may_send(waiting, prefetch_batches):
                    self._inflight.append(self._piece(waiting))
                    self._send(self._inflight[-1])
                    waiting = next(items, None)
                if not self._inflight:
                    return
                item, table = self._collect()
                rows = item.high - item.low
                if item.steps > 1:
                    for step in range(item.steps):
                        yield table.slice(step * rows, rows)
                    continue
                parts.append(table)
                low, high = self._plan.rank_slice(item.position, self._rank)
                if item.high == high - low:
                    yield parts[0] if len(parts) == 1 else pa.concat_tables(parts)
                    parts = []
        finally:
            for piece in self._inflight:
                self._take_back(piece)
            self._inflight.clear()

    def _worth(self, rows: int) -> float:
        """Bytes that rows count for while they are in flight."""
        return rows * (self._row_bytes + (_MARGIN - 1) * self._raw_bytes)

    def _piece(self, item: WorkItem, allowed_bytes: float = 0, faults: int = 0) -> _Piece:
        """An item and what it may have, by what rows have had so far, or as much as it is known to have."""
        thought = max(_LEAST_BYTES, item.rows * self._raw_bytes * _MARGIN)
        extra = max(0.0, allowed_bytes - thought)
        nbytes = self._worth(item.rows) + extra
        return _Piece(item=item, nbytes=nbytes, allowed_bytes=thought + extra, faults=faults)

    def _sized(self, items: Iterable[WorkItem]) -> Iterator[WorkItem]:
        """Cuts items whose rows have turned out larger than they were thought to be."""
        for item in items:
            parts = self._worth(item.rows) / self._item_bytes
            if parts > _CUT_FROM and item.rows > 1:
                yield from self._sized(self._plan.cut(item, max(2, math.ceil(parts))))
            else:
                yield item

    def _has_room(self, nbytes: float) -> bool:
        sent = [piece.nbytes for piece in self._inflight if piece.calls]
        return not sent or sum(sent) + nbytes <= self._options.max_inflight_bytes

    def _may_send(self, item: WorkItem, prefetch_batches: int) -> bool:
        if not all(piece.calls for piece in self._inflight) or not self._has_room(self._worth(item.rows)):
            return False
        ahead = 0
        if self._inflight:
            ahead = -(-(item.position - self._inflight[0].item.position) // self._plan.global_batch_size)
        return len(self._inflight) < 2 * self._helpers.decoders_running or ahead <= prefetch_batches

    def _send(self, piece: _Piece) -> None:
        """Hands a piece out, for the first time or again."""
        self._take_back(piece)
        decoder = self._helpers.decoder(proven=piece.faults > 0)
        reader = self._shard.knows(self._plan_key, self._shared_plan)
        read, allowed = reader.handle.read, max(1, int(piece.allowed_bytes))
        piece.plain, second, receipt = read.remote(self._plan_key, piece.item, decoder is None, allowed)
        piece.images, piece.calls, piece.sent = second, [(reader, receipt)], next(self._sends)
        if decoder is not None:
            piece.decoder = decoder.knows(self._helpers.key, self._feed.decoding)
            decoder.outstanding += 1
            piece.images, receipt = decoder.handle.decode.remote(self._helpers.key, piece.item.epoch, second)
            piece.calls.append((decoder, receipt))

    def _take_back(self, piece: _Piece) -> None:
        """Ends what a piece counts for at its decoder."""
        if piece.decoder is not None:
            piece.decoder.outstanding -= 1
            piece.decoder = None

    def _collect(self) -> tuple[WorkItem, pa.Table]:
        """Waits for the oldest piece, and has it done again until it is done."""
        while True:
            piece = self._inflight[0]
            for unsent in [other for other in self._inflight if not other.calls]:
                if unsent is not piece and not self._has_room(unsent.nbytes):
                    break
                self._send(unsent)
            try:
                receipts: list[Receipt] = ray.get(piece.receipts)
                if receipts[0].too_large_bytes:
                    self._stats.add(receipts[0])
                    self._cut(piece, receipts[0].too_large_bytes)
                    continue
                plain, images = ray.get([piece.plain, piece.images])
                break
            except RayError as error:
                self._redo(piece, error)
        self._take_back(self._inflight.popleft())
        replaced, self._replaced = self._replaced, self._helpers.replaced
        self._stats.helpers_replaced += self._replaced - replaced
        for receipt in receipts:
            self._stats.add(receipt)
        if piece.item.rows:
            measured = sum(receipt.nbytes for receipt in receipts) / piece.item.rows
            self._row_bytes = max(self._row_bytes * 0.9, measured)
            self._raw_bytes = max(self._raw_bytes * 0.9, receipts[0].raw_bytes / piece.item.rows)
        return piece.item, self._merge(piece.item, plain, images)

    def _redo(self, piece: _Piece, error: RayError) -> None:
        """Has the oldest piece done again: elsewhere where a helper died, step by step where its rows are at fault.

        Raises:
            Exception: What a helper raised over the rows of one step.
            HelperError: The faults of the machines do not end.
            PlacementError: There is no place for other helpers.
        """
        helper = None
        for caller, receipt in piece.calls:  # the first that failed; those behind it lacked its result
            found = _error_of(receipt)
            if found is not None:
                helper, error = caller, found
                break
        if not is_machine_fault(error):
            if piece.item.steps == 1:
                raise as_raised(error) from error
            self._split(piece)  # the steps before the one that fails are still to be delivered
            return
        logger.warning("work is done again after a fault of the machines (%s)", first_line(error))
        lost = [piece]
        if helper is not None and is_helper_gone(error):
            # The helper may have been working on the first that it had left, and on no other.
            lost = [other for other in self._inflight if helper in dict(other.calls) and not other.is_finished()]
            lost.sort(key=lambda other: other.sent)
            if helper is self._shard:
                self._shard = self._helpers.new_shard(self._feed)
            else:
                self._helpers.lost_decoder(helper)
            self._blame(lost[0], error)
        else:
            self._blame(piece, error)
            time.sleep(_PAUSES_S[piece.faults - 1])
        if lost[0].item.steps > 1:
            self._split(lost.pop(0))
        for other in lost:
            self._send(other)

    def _blame(self, piece: _Piece, error: RayError) -> None:
        """Counts a fault of the machines against a piece."""
        piece.faults += 1
        if piece.faults > _MAX_FAULTS:
            rows = self._plan.select(piece.item.epoch, self._plan.item_positions(piece.item))
            told = tell_rows(self._selection.offsets(rows), dataset_names(self._feed.source.uri))
            raise HelperError(
                f"the work on the same {len(rows)} rows, {told}, was lost {piece.faults} times ({first_line(error)}). "
                f"The epoch stops here. {advice(error)} Ray says: {error}"
            ) from error

    def _split(self, piece: _Piece) -> None:
        """Puts single steps in the place of a piece, so that a fault concerns the rows of one step."""
        self._take_back(piece)
        items = self._plan.cut(piece.item, piece.item.steps)
        singles = [self._piece(item, piece.allowed_bytes / len(items), piece.faults) for item in items]
        place = self._inflight.index(piece)
        del self._inflight[place]
        for offset, single in enumerate(singles):
            self._inflight.insert(place + offset, single)
            self._send(single)

    def _cut(self, piece: _Piece, raw_bytes: int) -> None:
        """Puts smaller items in the place of the oldest piece, whose rows have more bytes than it was to have."""
        self._take_back(self._inflight.popleft())
        rows, items = piece.item.rows, [piece.item]
        larger = max(0.0, raw_bytes / rows - self._raw_bytes)
        self._raw_bytes, self._row_bytes = self._raw_bytes + larger, self._row_bytes + larger
        if rows > 1:
            items = self._plan.cut(piece.item, max(2, math.ceil(raw_bytes / self._item_bytes)))
        smaller = [self._piece(item, raw_bytes * item.rows / rows, piece.faults) for item in items]
        self._inflight.extendleft(reversed(smaller))

    def _merge(self, item: WorkItem, plain: pa.Table, images: pa.Table) -> pa.Table:
        """Joins the columns in the feed's order, and says which rows are real."""
        positions = self._plan.item_positions(item)
        wanted = self._selection.offsets(self._plan.select(item.epoch, positions))
        if not np.array_equal(plain[ROW_OFFSET].to_numpy(), wanted):
            raise CoverageError(
                f"the helpers delivered other rows than planned at position {item.position} of epoch {item.epoch}, "
                f"rank {item.rank}. The epoch stops here: going on would lose or repeat rows. "
                "This is raylance's fault: please report it."
            )
        real = positions < self._plan.epoch_rows
        self.coverage.add(wanted[real])
        columns = {name: plain[name] for name in plain.column_names}
        columns[COMPONENT] = pa.chunked_array([wanted >> COMPONENT_SHIFT])
        columns[ROW_OFFSET] = pa.chunked_array([wanted & OFFSET_MASK])
        columns |= {name: images[name] for name in images.column_names}
        valid = columns.get(VALID, pa.chunked_array([np.ones(item.rows, dtype=np.bool_)]))
        if self._plan.remainder == "pad":
            valid = pc.and_(valid, pa.chunked_array([real]))
        columns[VALID] = valid
        return pa.table({name: columns[name] for name in (*self._feed.delivers, COMPONENT, ROW_OFFSET, VALID)})


def _error_of(receipt: Any) -> RayError | None:
    """What a call failed with; None where it succeeded, or goes on."""
    if not ray.wait([receipt], timeout=0)[0]:
        return None
    try:
        ray.get(receipt)
    except RayError as error:
        return error
    return None
