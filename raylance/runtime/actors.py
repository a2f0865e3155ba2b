"""Owns the two helper actors, thin shells around reader and decoder; never decides what is read next, or by whom.

Their calls are idempotent: the plan and the item say everything, so a call can be made again elsewhere when its actor
dies. What they return is owned by the worker that called.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import ray
import torch

from raylance.columns import DRAW, ROW_OFFSET
from raylance.decode.rows import Decoding, OpenDecoding
from raylance.planning.plan import Plan, WorkItem
from raylance.runtime.faults import errors_travel
from raylance.settings import Feed, Options
from raylance.source.readahead import ReadAhead, TooLargeError
from raylance.telemetry import Receipt


class ShardActor:
    """Reads one rank's rows ahead, and gathers its items from them."""

    def __init__(self, feed: Feed, options: Options) -> None:
        """Opens nothing yet.

        Args:
            feed: What to serve.
            options: Bytes to hold, threads to decode in where no decode actor does, and how long to retry reads.
        """
        self._feed = feed
        self._ahead = ReadAhead(feed.source, options.max_window_bytes, options.read_timeout_s)
        self._plans: dict[str, Plan] = {}
        self._decoding = feed.decoding.open() if feed.decoding else None
        self._threads = ThreadPoolExecutor(options.decode_threads) if feed.decoding else None
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
    def read(
        self, key: str, item: WorkItem, decodes: bool, allowed_bytes: float = math.inf
    ) -> tuple[pa.Table, pa.Table, Receipt]:
        """Reads an item.

        Args:
            key: The plan of the epoch.
            item: Which rows.
            decodes: Whether to decode them here, in threads; otherwise a decode actor follows.
            allowed_bytes: Bytes that its raw rows may have; where they have more, none are returned, and the receipt
                says how many they have.

        Returns:
            The columns that need no decoding and `_rowoffset`, in the order of delivery; the decoded columns and
            `_valid`, or the encoded ones and `_rowoffset` when a decode actor follows; and what it took.
        """
        with errors_travel():
            return self._read_item(key, item, decodes, allowed_bytes)

    def _read_item(
        self, key: str, item: WorkItem, decodes: bool, allowed_bytes: float
    ) -> tuple[pa.Table, pa.Table, Receipt]:
        begin, plan = time.perf_counter(), self._plans[key]
        decoding, opened = self._feed.decoding, self._decoding
        receipt = Receipt()
        try:
            table = self._ahead.gather(key, plan, item, allowed_bytes)
        except TooLargeError as large:
            table, receipt.too_large_bytes = self._ahead.nothing(), large.nbytes
        receipt.nbytes = receipt.raw_bytes = table.nbytes
        receipt.read_s, receipt.held_bytes = time.perf_counter() - begin, self._ahead.peak_bytes
        receipt.read_bytes = self._ahead.read_bytes_since()
        if decoding is None or opened is None:
            return table, table.select([]), receipt
        if decoding.transform is None:
            encoded, plain = table.select([*decoding.columns, ROW_OFFSET]), table.drop_columns(decoding.columns)
        else:
            encoded, plain = table, table.select([ROW_OFFSET])
        if receipt.too_large_bytes:
            return plain, encoded, receipt
        if plan.order.repeats:
            encoded = encoded.append_column(DRAW, pa.array(plan.item_positions(item)))
        if not decodes:
            return plain, encoded, receipt
        if decoding.transform is not None:
            # A transform may change what it is given in place, and these may be the very rows that are held here.
            # Arrow copies only where there is more than one chunk.
            encoded = pa.concat_tables([encoded, encoded.slice(0, 0)]).combine_chunks()
        decoded, done = opened.apply(encoded, item.epoch, self._threads)
        receipt.decode_s, receipt.masked_rows = done.decode_s, done.masked_rows
        receipt.nbytes = plain.nbytes + done.nbytes
        return plain, decoded, receipt


class DecodeActor:
    """Decodes columns for any loader of the worker that owns it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # parallel by actors: more threads would fight for the same cores
        self._decodings: dict[str, OpenDecoding] = {}

    def actor_id(self) -> str:
        """The ID of this actor, hex; answers once the actor is ready."""
        return str(ray.get_runtime_context().get_actor_id())

    def install(self, key: str, decoding: Decoding) -> None:
        """Learns how to decode for one loader, so that later calls only name it."""
        self._decodings[key] = decoding.open()

    def forget(self, key: str) -> None:
        """Drops what `install` told, and the memory that was decoded into."""
        self._decodings.pop(key, None)

    @ray.method(num_returns=2)
    def decode(self, key: str, epoch: int, encoded: pa.Table) -> tuple[pa.Table, Receipt]:
        """Decodes an item; see `OpenDecoding.apply`."""
        with errors_travel():
            return self._decodings[key].apply(encoded, epoch)
