"""Owns the two helper actors, thin shells around reader and decoder; never decides what is read next, or by whom.

Their calls are idempotent: the plan and the item say everything, so a call can be made again elsewhere when its actor
dies. What they return is owned by the worker that called.
"""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import ray
import torch

from raylance.columns import DRAW, ROW_OFFSET
from raylance.decoding import Decoding
from raylance.faults import errors_travel, first_line
from raylance.metrics import Receipt
from raylance.permutation import Int64Array
from raylance.plan import Chunk, Plan, WorkItem
from raylance.spec import Feed, RowReader

logger = logging.getLogger(__name__)

Loaded = tuple[Int64Array, pa.Table]
ChunkKey = tuple[str, int, Chunk]


class ShardActor:
    """Reads one rank's chunks, the next one while the current one drains, and gathers its items from them."""

    def __init__(self, feed: Feed, decode_threads: int, read_timeout_s: float) -> None:
        """Opens nothing yet.

        Args:
            feed: What to serve.
            decode_threads: Threads to decode images in here, where no decode actor does.
            read_timeout_s: Seconds that a read is tried again when the storage fails.
        """
        self._feed = feed
        self._selection = feed.load_selection()
        self._read_timeout_s = read_timeout_s
        self._read_bytes, self._counting = 0, threading.Lock()
        self._reader: RowReader | None = None  # opened by the first read, whose errors reach the worker as they are
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._chunks: dict[ChunkKey, Future[Loaded]] = {}
        self._cold: ChunkKey | None = None
        self._plans: dict[str, Plan] = {}
        self._threads = ThreadPoolExecutor(decode_threads) if feed.decoding else None
        torch.set_num_threads(1)

    def actor_id(self) -> str:
        """The ID of this actor, hex; answers once the actor is ready."""
        return str(ray.get_runtime_context().get_actor_id())

    def install(self, key: str, plan: Plan) -> None:
        """Learns a plan, so that later calls only name it; forgets the one before the last."""
        while len(self._plans) > 1:
            self._plans.pop(next(iter(self._plans)))
        self._plans[key] = plan

    @ray.method(num_returns=3)
    def read(self, key: str, item: WorkItem, decodes: bool) -> tuple[pa.Table, pa.Table, Receipt]:
        """Reads an item.

        Args:
            key: The plan of the epoch.
            item: Which rows.
            decodes: Whether to decode them here, in threads; otherwise a decode actor follows.

        Returns:
            The columns that need no decoding and `_rowoffset`, in the order of delivery; the decoded columns and
            `_valid`, or the encoded ones and `_rowoffset` when a decode actor follows; and what it took.
        """
        with errors_travel():
            return self._read_item(key, item, decodes)

    def _read_item(self, key: str, item: WorkItem, decodes: bool) -> tuple[pa.Table, pa.Table, Receipt]:
        begin = time.perf_counter()
        table = self._gather(key, item)
        took = Receipt(nbytes=table.nbytes, read_s=time.perf_counter() - begin, read_bytes=self._read_bytes_since())
        decoding = self._feed.decoding
        if decoding is None:
            return table, table.select([]), took
        if decoding.transform is None:
            encoded, plain = table.select([*decoding.columns, ROW_OFFSET]), table.drop_columns(decoding.columns)
        else:
            encoded, plain = table, table.select([ROW_OFFSET])
        plan = self._plans[key]
        if plan.order.repeats:
            encoded = encoded.append_column(DRAW, pa.array(plan.item_positions(item)))
        if not decodes:
            return plain, encoded, took
        decoded, receipt = decoding.apply(encoded, item.epoch, self._threads)
        receipt.read_s, receipt.read_bytes = took.read_s, took.read_bytes
        receipt.nbytes += plain.nbytes
        return plain, decoded, receipt

    def _read_bytes_since(self) -> int:
        with self._counting:
            since, self._read_bytes = self._read_bytes, 0
        return since

    def _gather(self, plan_key: str, item: WorkItem) -> pa.Table:
        """The rows of an item in the order of delivery, from its chunk where that is there."""
        plan = self._plans[plan_key]
        key = (plan_key, item.rank, item.chunk)
        # The epoch behind this one most likely comes next: its first chunk is then there when it begins.
        following = plan.next_chunk(item.chunk) or plan.chunk_at(item.epoch + 1, 0)
        ahead = None if following is None else (plan_key, item.rank, following)
        for stale in self._chunks.keys() - {key, ahead}:
            self._chunks.pop(stale).cancel()
        if key not in self._chunks:
            self._cold = key
        chunk = self._chunk(key)
        if ahead is not None:
            self._chunk(ahead)
        # Where nobody read this chunk ahead, its first items are read by themselves, so that a start, or a resume,
        # waits for a batch and not for a window.
        if key != self._cold or chunk.done():
            try:
                places, table = chunk.result()
                return table.take(pa.array(places[plan.chunk_slice(item)]))
            except Exception as error:
                # The fault may lie in other rows of the chunk, or be over: this item is read by itself, and whoever
                # asks for the chunk next has it read again.
                logger.warning("a chunk could not be read (%s); its rows are read an item at a time", first_line(error))
                del self._chunks[key]
        places, table = self._read(plan.select(item.epoch, plan.item_positions(item)))
        return table.take(pa.array(places))

    def _chunk(self, key: ChunkKey) -> "Future[Loaded]":
        """The chunk, being read if it is not there yet."""
        if key not in self._chunks:
            plan_key, rank, chunk = key
            self._chunks[key] = self._ahead.submit(self._load, self._plans[plan_key], rank, chunk)
        return self._chunks[key]

    def _load(self, plan: Plan, rank: int, chunk: Chunk) -> Loaded:
        return self._read(plan.chunk_rows(chunk, rank))

    def _read(self, rows: Int64Array) -> Loaded:
        """Reads selected rows in storage order; tells where each lies in the table, in the order asked for."""
        stored, places = np.unique(rows, return_inverse=True)
        self._reader = self._reader or self._feed.open_reader(self._read_timeout_s)
        table = self._reader.read(self._selection.offsets(stored))
        with self._counting:
            self._read_bytes += table.nbytes
        return places, table


class DecodeActor:
    """Decodes image columns for any loader of the worker that owns it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # parallel by actors: more threads would fight for the same cores
        self._decodings: dict[str, Decoding] = {}

    def actor_id(self) -> str:
        """The ID of this actor, hex; answers once the actor is ready."""
        return str(ray.get_runtime_context().get_actor_id())

    def install(self, key: str, decoding: Decoding) -> None:
        """Learns how to decode for one loader, so that later calls only name it."""
        self._decodings[key] = decoding

    def forget(self, key: str) -> None:
        """Drops what `install` told, and the memory that was decoded into."""
        self._decodings.pop(key, None)

    @ray.method(num_returns=2)
    def decode(self, key: str, epoch: int, encoded: pa.Table) -> tuple[pa.Table, Receipt]:
        """Decodes an item; see `Decoding.apply`."""
        with errors_travel():
            return self._decodings[key].apply(encoded, epoch)
