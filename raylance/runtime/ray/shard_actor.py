"""The actor that reads for one rank. It does not load torch before it decodes."""

import functools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import ray

from raylance.decode.block_rows import BlockRows, LoadedRows
from raylance.decode.pixels import set_up_process
from raylance.dispatch.messages import Gather, Load, Loaded
from raylance.memory.malloc import keep_freed_memory
from raylance.observe import Receipt
from raylance.opened import ReadSpec
from raylance.planning.plan import Plan
from raylance.planning.planned_rows import PlannedRows
from raylance.runtime.ray.actors import Actor
from raylance.runtime.ray.faults import errors_travel
from raylance.settings import Options
from raylance.work.blocks import BlockColumns
from raylance.work.read_work import ReadWork

_PLANS = 3  # that are kept: a call of an earlier pass may still wait


class ShardActor(Actor):
    """Reads for one rank, alone or in turn with the rank's other shard actors; see `ReadWork`."""

    def __init__(self, read_spec: ReadSpec, options: Options, by_block: BlockColumns) -> None:
        super().__init__()
        keep_freed_memory()
        if read_spec.in_helpers is not None:  # it decodes if there are no decoders
            set_up_process()
        self._work, self._by_block = ReadWork(read_spec, options, by_block=by_block), by_block
        self._planned: dict[str, PlannedRows] = {}

    def _of(self, key: str, plan: Plan | None) -> PlannedRows:
        """Returns the rows of the plan with this key; `plan` comes until a call that names it was done."""
        if plan is not None and key not in self._planned:
            self._planned.setdefault(key, PlannedRows(plan))
            for old in list(self._planned)[:-_PLANS]:
                self._planned.pop(old, None)
        return self._planned[key]

    @ray.method(concurrency_group="load")
    def load(self, key: str, plan: Plan | None, load: Load) -> Loaded | tuple[Loaded | pa.Table, ...]:
        """See `ReadWork.load`; without columns by block, returns the answer alone."""
        with errors_travel():
            loaded, tables = self._work.load(self._of(key, plan), load)
            return (loaded, *tables) if tables else loaded

    @ray.method(num_returns=2)
    def decode_block(self, block: pa.Table, **how: Any) -> tuple[pa.Table, Receipt]:
        """See `ReadWork.decode_block`."""
        with errors_travel():
            return self._work.decode_block(block, **how)

    @ray.method(concurrency_group="drop")  # while loads of the chunk run, which should end
    def drop(self, number: int) -> None:
        """See `ReadWork.drop`."""
        self._work.drop(number)

    def gather(
        self, key: str, plan: Plan | None, command: Gather, firsts: Sequence[int] = (), *blocks: pa.Table
    ) -> tuple[Receipt | pa.Table, ...]:
        """See `ReadWork.gather`; the receipt comes first. For `blocks`, see `DecodeActor.decode`."""
        with errors_travel():
            fill_in = None
            if blocks:
                rows = BlockRows(map(LoadedRows, firsts, blocks), self._by_block.decoded)
                fill_in = functools.partial(rows.fill_in, lend=self._work.lend)
            tables, receipt = self._work.gather(self._of(key, plan), command, fill_in)
            return receipt, *tables
