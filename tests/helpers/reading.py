"""A rank's items gathered as the dispatcher has it, from readers in memory, one call after another."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from raylance.decode.block_rows import BlockRows, LoadedRows
from raylance.dispatch.account import Account
from raylance.dispatch.load_ahead import ChunkTable
from raylance.dispatch.messages import Drop, Fault, Gather, Load
from raylance.dispatch.states import ChunkState
from raylance.errors import DatasetError
from raylance.memory.lending import fresh_memory
from raylance.observe import Receipt
from raylance.planning.plan import Plan, WorkItem
from raylance.planning.planned_rows import PlannedRows
from raylance.settings import Options
from raylance.work.blocks import BlockColumns
from raylance.work.read_work import ReadWork
from tests.helpers.in_memory import InMemory


@dataclasses.dataclass(frozen=True)
class Spec:
    source: InMemory
    in_helpers: None = None


class Reading:
    """Items of a plan, from one reader or several."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[InMemory],
        limit: int,
        *,
        decodes: bool = False,
        gives_away: bool = False,
        by_block: BlockColumns | None = None,
    ) -> None:
        self.plan, self.planned, self.sources = plan, PlannedRows(plan), sources
        source, options = sources[0], Options(reader_bytes=limit)
        self.account = Account(
            raw_bytes=source.likely_row_bytes, decoded_bytes=0, inflight_bytes=1 << 40, reader_bytes=limit
        )
        self.table = ChunkTable(self.account, decodes=decodes, gives_away=gives_away)
        self._settings: dict[str, Any] = {"own_memory": gives_away, "by_block": by_block}
        self.work: list[Any] = [ReadWork(Spec(each), options, **self._settings) for each in sources]  # type: ignore[arg-type]
        self._blocks: dict[tuple[int, int], list[LoadedRows]] = {}  # by reader, and number of the chunk
        self.readers = list(range(len(sources)))
        self.receipts: list[Receipt] = []
        self._calls = itertools.count()
        self._waiting: deque[Load] = deque()

    def begin(self, rank: int, epoch: int, position: int, item_rows: int) -> Any:
        chunks = self.table.begin(self.plan, rank, epoch, position)
        return self.plan.items(rank, epoch, position, item_rows, chunks=chunks)

    def load(self, most: int = 1 << 40) -> int:
        """Carries out loads, as many as there are; returns how many there were."""
        self._collect()
        for done in range(most):
            if not self._waiting:
                return done
            load = self._waiting.popleft()
            try:
                loaded, blocks = self.work[load.helper].load(self.planned, load)
            except DatasetError as error:
                self.table.failed(load.call, error)
            else:
                for block in blocks:
                    self._blocks.setdefault((load.helper, load.number), []).append(LoadedRows(load.first, block))
                self.receipts.append(loaded.receipt)
                self.table.loaded(loaded)
            self._collect()
        return most

    def _collect(self) -> None:
        self.table.load(self.readers, lambda _: next(self._calls), 0.0)
        for command in self.table.take_commands():
            if isinstance(command, Drop):
                self.work[command.helper].drop(command.number)
                self._blocks.pop((command.helper, command.number), None)
            elif isinstance(command, Load):
                self._waiting.append(command)

    def gather(self, item: WorkItem, allowed_bytes: int = 1 << 40, loads: int = 1 << 40) -> pa.Table:
        """Gathers an item, after up to so many loads if it need not wait for more."""
        self.load(loads)
        if not item.rows:
            none = Gather(next(self._calls), 0, item, None, False, allowed_bytes)
            return self.work[0].gather(self.planned, none)[0][0]
        while True:
            rows = self.table.together(item)
            if rows < item.rows:
                return pa.concat_tables(
                    self.gather(part, allowed_bytes, loads) for part in self.plan.cut_at(item, rows)
                )
            held = self.table.place_of(item)
            if held is not None:
                break
            assert self.load(1), f"{item} waits for ever"
        if held.trouble.error is not None and held.state is ChunkState.FAILED:
            raise held.trouble.error  # type: ignore[misc]
        assert held.reader is not None
        call = next(self._calls)
        held.gathers.add(call)
        try:
            (table, *_), receipt = self.work[held.reader].gather(
                self.planned, Gather(call, held.reader, item, held.number, False, allowed_bytes)
            )
            self.receipts.append(receipt)
            if not receipt.too_large_bytes:
                self.table.gathered(item)
        finally:
            self.table.answered(call)
        blocks = self._blocks.get((held.reader, held.number), [])
        return BlockRows(blocks).fill_in(table, fresh_memory)

    def lose(self, reader: int) -> None:
        """A reader is gone, and comes back with nothing."""
        calls = [load.call for load in self._waiting if load.helper == reader]
        self._waiting = deque(load for load in self._waiting if load.helper != reader)
        self.table.lost(reader, calls, Fault(what="gone"), is_at_load=False)
        options = Options(reader_bytes=self.account.reader_bytes)
        self.work[reader] = ReadWork(Spec(self.sources[reader]), options, **self._settings)  # type: ignore[arg-type]

    @property
    def peak_bytes(self) -> int:
        return max(receipt.held_bytes for receipt in self.receipts)
