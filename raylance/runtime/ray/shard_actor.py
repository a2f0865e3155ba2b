"""Owns the actor that reads; never decides which rows are read, and never loads torch before it decodes."""

import pyarrow as pa
import ray

from raylance.dispatch.messages import Read
from raylance.observe import Receipt
from raylance.planning.plan import Chunk, Plan
from raylance.read_spec import ReadSpec
from raylance.runtime.rank_reader import RankReader
from raylance.runtime.ray.actors import Actor
from raylance.runtime.ray.faults import errors_travel
from raylance.settings import Options
from raylance.source.memory import keep_freed_memory


class ShardActor(Actor):
    """Reads for one rank, alone or in turn with the rank's other shard actors; see `RankReader`."""

    def __init__(self, read_spec: ReadSpec, options: Options) -> None:
        super().__init__()
        keep_freed_memory()
        self._reader = RankReader(read_spec, options)

    def install(self, key: str, plan: Plan) -> None:
        """See `RankReader.install`."""
        self._reader.install(key, plan)

    def begin(self, key: str, dp_rank: int, chunk: Chunk) -> None:
        """See `RankReader.begin`."""
        with errors_travel():
            self._reader.begin(key, dp_rank, chunk)

    @ray.method(num_returns=3)
    def read(self, key: str, command: Read) -> tuple[pa.Table, pa.Table, Receipt]:
        """See `RankReader.read`."""
        with errors_travel():
            return self._reader.read(key, command)
