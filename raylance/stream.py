"""Owns the work in flight of one iteration: hands it out, bounds it by bytes, collects it in order, and hands it out
again when a helper dies; never interprets the rows.

All references belong to this process, so raw tables go from the shard actor to a decoder without passing here. Work is
handed out when the consumer asks for a batch: no thread runs here. Each item is sent to its decoder at once, as a
reference that Ray resolves when the shard actor has read it.
"""

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from raylance.columns import COMPONENT, COMPONENT_SHIFT, ROW_OFFSET, VALID
from raylance.errors import CoverageError, HelperError
from raylance.metrics import Coverage, Receipt, Stats
from raylance.plan import Plan, WorkItem
from raylance.pool import Helper, Helpers
from raylance.spec import Feed, Options

logger = logging.getLogger(__name__)

_MAX_DEATHS = 3
_MAX_ITEM_BYTES = 32 << 20
# Raw rows count for more than they are thought to have, and may have that much: what is in flight stays within its
# limit, and few items have to be cut although sizes vary.
_MARGIN = 1.5
_LEAST_BYTES = 64 << 10  # any item may have: below it, sizes say nothing
_CUT_FROM = 2  # times the bytes that items should have: less is left as it is


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Piece:
    """An item in flight and where it is; without receipts, it waits until there is room for it."""

    item: WorkItem
    nbytes: float
    allowed_bytes: float
    deaths: int = 0
    shard: Helper | None = None
    decoder: Helper | None = None
    plain: Any = None
    images: Any = None
    receipts: list[Any] = dataclasses.field(default_factory=list)

    def used(self, actor_id: str | None) -> bool:
        """Whether the piece was handed to an actor."""
        return actor_id in [helper.actor_id for helper in (self.shard, self.decoder) if helper is not None]


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
        decoding_key: str,
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
            decoding_key: Names the feed's decoding to the decoders.
            options: Limits of bytes in flight and of placement.
            stats: Counters to add to.
        """
        self._feed, self._plan, self._rank = feed, plan, rank
        self._plan_key, self._shared_plan = plan_key, ray.put(plan)
        self._selection = feed.load_selection()
        self._shard, self._pool = helpers.start(feed), helpers.pool
        self._helpers, self._options, self._key = helpers, options, decoding_key
        self._stats = stats
        self._inflight: deque[_Piece] = deque()
        self.coverage = Coverage()
        # In the object store for each row, and raw; of the larger ones, as far as they were seen lately.
        self._row_bytes = feed.read_bytes + (feed.decoding.row_bytes if feed.decoding else 0)
        self._raw_bytes = feed.read_bytes
        self._item_bytes = float(_MAX_ITEM_BYTES)

    def tables(self, epoch: int, position: int, prefetch_batches: int) -> Iterator[pa.Table]:
        """Yields the rank's rows of each step: the feed's columns, `_component`, `_rowoffset` and `_valid`.

        Args:
            epoch: Epoch.
            position: Position of the first step.
            prefetch_batches: Steps to keep in flight at the least; more where the decoders need it.

        Raises:
            BadRowError: A row cannot be decoded, and bad rows are not masked.
            HelperError: A helper died again and again on the same rows.
            PlacementError: A replacement found no place.
        """
        busy = 2 * max(1, len(self._pool) if self._pool else 1)  # one item in work and one waiting, for each decoder
        self._item_bytes = min(_MAX_ITEM_BYTES, self._options.max_inflight_bytes / (busy + 1))
        item_rows = max(1, int(self._item_bytes / max(self._worth(1), 1)))
        items = self._sized(self._plan.items(self._rank, epoch, position, item_rows))
        waiting = next(items, None)
        parts: list[pa.Table] = []
        try:
            while True:
                while waiting is not None and self._may_send(waiting, busy, prefetch_batches):
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

    def _piece(self, item: WorkItem, allowed_bytes: float = 0) -> _Piece:
        """An item and what it may have, by what rows have had so far, or as much as it is known to have."""
        thought = max(_LEAST_BYTES, item.rows * self._raw_bytes * _MARGIN)
        extra = max(0.0, allowed_bytes - thought)
        return _Piece(item=item, nbytes=self._worth(item.rows) + extra, allowed_bytes=thought + extra)

    def _sized(self, items: Iterable[WorkItem]) -> Iterator[WorkItem]:
        """Cuts items whose rows have turned out larger than they were thought to be."""
        for item in items:
            parts = self._worth(item.rows) / self._item_bytes
            if parts > _CUT_FROM and item.rows > 1:
                yield from self._sized(self._plan.cut(item, max(2, math.ceil(parts))))
            else:
                yield item

    def _has_room(self, nbytes: float) -> bool:
        sent = [piece.nbytes for piece in self._inflight if piece.receipts]
        return not sent or sum(sent) + nbytes <= self._options.max_inflight_bytes

    def _may_send(self, item: WorkItem, busy: int, prefetch_batches: int) -> bool:
        if not all(piece.receipts for piece in self._inflight) or not self._has_room(self._worth(item.rows)):
            return False
        ahead = 0
        if self._inflight:
            ahead = -(-(item.position - self._inflight[0].item.position) // self._plan.global_batch_size)
        return len(self._inflight) < busy or ahead <= prefetch_batches

    def _send(self, piece: _Piece) -> None:
        """Hands a piece out, for the first time or again."""
        self._take_back(piece)
        piece.shard = self._shard
        reader = self._shard.knows(self._plan_key, self._shared_plan).handle
        allowed = max(1, int(piece.allowed_bytes))
        piece.plain, second, receipt = reader.read.remote(self._plan_key, piece.item, allowed)
        piece.images, piece.receipts = second, [receipt]
        if self._pool is not None and self._feed.decoding is not None:
            piece.decoder = self._pool.least_busy(self._key, self._feed.decoding)
            piece.decoder.outstanding += 1
            piece.images, receipt = piece.decoder.handle.decode.remote(self._key, piece.item.epoch, second)
            piece.receipts.append(receipt)

    def _take_back(self, piece: _Piece) -> None:
        """Ends what a piece counts for at its decoder."""
        if piece.decoder is not None:
            piece.decoder.outstanding -= 1
            piece.decoder = None

    def _collect(self) -> tuple[WorkItem, pa.Table]:
        """Waits for the oldest piece, and has it done again until it is done."""
        while True:
            piece = self._inflight[0]
            for unsent in [piece for piece in self._inflight if not piece.receipts]:
                if unsent is not piece and not self._has_room(unsent.nbytes):
                    break
                self._send(unsent)
            try:
                receipts: list[Receipt] = ray.get(piece.receipts)
                if receipts[0].too_large_bytes:
                    self._cut(piece, receipts[0].too_large_bytes)
                    continue
                plain, images = ray.get([piece.plain, piece.images])
                break
            except RayActorError as error:
                self._recover(piece, error.actor_id, error)
            except ObjectLostError as error:
                self._recover(piece, None, error)
            except RayTaskError as error:
                if piece.item.steps > 1:  # the steps before the one that fails are still to be delivered
                    self._split(piece)
                    continue
                if isinstance(error.cause, Exception):
                    raise error.cause from error
                raise
        self._take_back(self._inflight.popleft())
        for receipt in receipts:
            self._stats.add(receipt)
        if piece.item.rows:
            measured = sum(receipt.nbytes for receipt in receipts) / piece.item.rows
            self._row_bytes = max(self._row_bytes * 0.9, measured)
            self._raw_bytes = max(self._raw_bytes * 0.9, receipts[0].raw_bytes / piece.item.rows)
        return piece.item, self._merge(piece.item, plain, images)

    def _split(self, piece: _Piece) -> None:
        """Puts single steps in the place of the oldest piece, so that a fault concerns the rows of one step."""
        self._take_back(self._inflight.popleft())
        items = self._plan.single_steps(piece.item)
        pieces = [self._piece(item, piece.allowed_bytes / len(items)) for item in items]
        self._inflight.extendleft(reversed(pieces))
        for single in pieces:
            self._send(single)

    def _cut(self, piece: _Piece, raw_bytes: int) -> None:
        """Puts smaller items in the place of the oldest piece, whose rows have more bytes than it was to have."""
        self._take_back(self._inflight.popleft())
        rows = piece.item.rows
        larger = max(0.0, raw_bytes / rows - self._raw_bytes)
        self._raw_bytes, self._row_bytes = self._raw_bytes + larger, self._row_bytes + larger
        items = (
            [piece.item] if rows == 1 else self._plan.cut(piece.item, max(2, math.ceil(raw_bytes / self._item_bytes)))
        )
        self._inflight.extendleft(reversed([self._piece(item, raw_bytes * item.rows / rows) for item in items]))

    def _recover(self, oldest: _Piece, actor_id: str | None, error: Exception) -> None:
        """Replaces the dead helper and sends its unfinished pieces elsewhere; counts the death against the oldest."""
        oldest.deaths += 1
        if oldest.deaths > _MAX_DEATHS:
            rows = self._plan.select(oldest.item.epoch, self._plan.item_positions(oldest.item))
            offsets = self._selection.offsets(rows)
            raise HelperError(
                f"helper actors died {oldest.deaths} times over the same {len(rows)} rows, with row offsets between "
                f"{offsets.min()} and {offsets.max()} of {self._feed.uri!r} ({error}). The epoch stops here. "
                "Look for a row that crashes the decoder, or for too little memory on the nodes of the helpers."
            ) from error
        replaced = False
        if actor_id == self._shard.actor_id:
            self._shard = self._helpers.new_shard(self._feed)
            replaced = True
        elif self._pool is not None and actor_id is not None:
            replaced = self._pool.replace(actor_id, self._options.placement_timeout_s)
        self._stats.helpers_replaced += replaced
        logger.warning("work of a lost helper is done again (%s)", str(error).splitlines()[0])
        lost = [piece for piece in self._inflight if piece is not oldest and piece.used(actor_id)]
        if oldest.item.steps > 1:
            self._split(oldest)
        else:
            self._send(oldest)
        for piece in lost:
            if not _is_finished(piece):
                self._send(piece)

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
        columns[ROW_OFFSET] = pa.chunked_array([wanted & ((1 << COMPONENT_SHIFT) - 1)])
        columns |= {name: images[name] for name in images.column_names}
        valid = columns.get(VALID, pa.chunked_array([np.ones(item.rows, dtype=np.bool_)]))
        if self._plan.remainder == "pad":
            valid = pc.and_(valid, pa.chunked_array([real]))
        columns[VALID] = valid
        return pa.table({name: columns[name] for name in (*self._feed.delivers, COMPONENT, ROW_OFFSET, VALID)})


def _is_finished(piece: _Piece) -> bool:
    """Whether all helpers of a piece have done their part; their results then outlive them."""
    ready, pending = ray.wait(piece.receipts, num_returns=len(piece.receipts), timeout=0)
    try:
        ray.get(ready)
    except RayError:
        return False
    return not pending
