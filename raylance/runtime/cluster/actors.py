"""Owns the two helper actors, thin shells around the work that any helper does; never decides what is read, or by whom.

What they return is owned by the worker that called: tables go from the shard actor to a decoder without passing it.
"""

import pyarrow as pa
import ray
import torch

from raylance.decode.rows import Decoding, OpenDecoding
from raylance.planning.plan import Chunk, Plan, WorkItem
from raylance.runtime.cluster.faults import errors_travel
from raylance.runtime.work import RankReader
from raylance.settings import Feed, Options
from raylance.source.memory import keep_freed_memory
from raylance.telemetry import Receipt


class _Actor:
    """What both have."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # parallel by actors: more threads would fight for the same cores

    def actor_id(self) -> str:
        """The ID of this actor, hex; answers once the actor is ready."""
        return str(ray.get_runtime_context().get_actor_id())


class ShardActor(_Actor):
    """Reads for one rank, by itself or in turn with others; see `RankReader`."""

    def __init__(self, feed: Feed, options: Options) -> None:
        """Opens nothing yet."""
        super().__init__()
        keep_freed_memory()
        self._reader = RankReader(feed, options)

    def install(self, key: str, plan: Plan) -> None:
        """See `RankReader.install`."""
        self._reader.install(key, plan)

    def begin(self, key: str, rank: int, chunk: Chunk) -> None:
        """See `RankReader.begin`."""
        with errors_travel():
            self._reader.begin(key, rank, chunk)

    @ray.method(num_returns=3)
    def read(
        self, key: str, item: WorkItem, decodes: bool, allowed_bytes: int, following: Chunk | None
    ) -> tuple[pa.Table, pa.Table, Receipt]:
        """See `RankReader.read`."""
        with errors_travel():
            return self._reader.read(key, item, decodes, allowed_bytes, following)


class DecodeActor(_Actor):
    """Decodes for any loader of the worker that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self._decodings: dict[str, OpenDecoding] = {}

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
