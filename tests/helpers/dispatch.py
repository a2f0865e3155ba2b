"""A dispatcher that a test drives by events. Its loads are answered at once, unless the test does it."""

from typing import Any

from raylance.dispatch.account import Account
from raylance.dispatch.block_work import BlockWork
from raylance.dispatch.dispatcher import Dispatcher, Kept
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.load_ahead import ChunkTable
from raylance.dispatch.messages import (
    Alive,
    Begin,
    Complete,
    Fault,
    GiveUp,
    GiveUpPlacing,
    Load,
    Loaded,
    Observation,
    Place,
    Wanted,
)
from raylance.dispatch.suspects import Suspects
from raylance.observe import Receipt
from tests.simulation.schedule import DECODED_BYTES, EPOCH, RAW_BYTES, make_plan

FAULT = Fault(what="it died")
RAW = Receipt(nbytes=RAW_BYTES, raw_bytes=RAW_BYTES)
DECODED = Receipt(nbytes=DECODED_BYTES)


def make_pool(decoders: int = 1, needs_decoder: bool = True, readers: int = 1) -> HelperPool:
    numbers = {"readers": readers, "decoders": decoders}
    return HelperPool(**numbers, needs_decoder=needs_decoder, placement_timeout_s=20.0, work_timeout_s=60.0)


def open_pool(running: int = 0, **options: Any) -> HelperPool:
    """A pool whose first pass begins at 0 s, when the first helpers run at once."""
    pool = make_pool(**options)
    pool.open(0.0)
    for helper in range(running):
        pool.due(0.0)
        pool.alive(helper, 0.0)
    return pool


def make_kept(
    pool: HelperPool, *, inflight_bytes: int = 1 << 30, reader_bytes: int = 1 << 30, by_block: bool = False
) -> Kept:
    limits = {"inflight_bytes": inflight_bytes, "reader_bytes": reader_bytes}
    account = Account(raw_bytes=RAW_BYTES, decoded_bytes=DECODED_BYTES, items=5, **limits)
    chunks = ChunkTable(account, decodes=True, gives_away=False, decodes_blocks=by_block)
    suspects = Suspects()
    return Kept(pool, chunks, account, suspects, BlockWork(pool, chunks, suspects))


def reader_of(pool: HelperPool, *, responsive: bool = False) -> list[int]:
    return pool.running("reader", responsive)


def of_kind(commands: list[Any], kind: type) -> list[Any]:
    return [command for command in commands if type(command) is kind]


class Driver:
    """A dispatcher, and the commands that it has given, by kind."""

    def __init__(
        self,
        pool: HelperPool | Kept,
        rows: int = 4,
        *,
        world_size: int = 1,
        item_rows: int = 1,
        global_batch_size: int = 1,
        chunk_positions: int = 1000,
        now: float = 0.0,
        answers_loads: bool = True,
        spans_epochs: bool = False,
        decodes: bool = True,
    ) -> None:
        plan = make_plan(
            0, rows, global_batch_size, world_size, "ragged" if world_size > 1 else "drop", chunk_positions
        )
        self.kept = pool if isinstance(pool, Kept) else make_kept(pool)
        self.plan, self._answers_loads = plan, answers_loads
        self.kept.account.item_rows = lambda: item_rows  # type: ignore[method-assign]
        self.dispatcher = Dispatcher(
            plan=plan,
            dp_rank=0,
            epoch=EPOCH,
            position=0,
            kept=self.kept,
            decodes=decodes,
            prefetch_batches=4,
            spans_epochs=spans_epochs,
            work_timeout_s=60.0,
            describe=lambda item: f"item {item.position}",
        )
        self.now = now
        self.commands: list[Any] = []
        self.handle(Begin())
        self.handle(Wanted())

    def handle(self, event: Any, now: float | None = None) -> list[Any]:
        self.now = self.now if now is None else now
        found = self.dispatcher.handle(event, self.now)
        commands = [output for output in found if not isinstance(output, Observation)]
        assert found[len(found) - len(commands) :] == commands, "observations come first"
        self.commands += commands
        for load in of_kind(commands, Load) if self._answers_loads else []:
            commands = [*commands, *self.handle(self.loaded(load))]
        return commands

    def loaded(self, load: Load, rows: int | None = None) -> Loaded:
        """The answer to a load after which so many rows are there."""
        stored, rows = self.plan.chunk_size(load.chunk, 0), load.first + load.rows if rows is None else rows
        return Loaded(load.call, Receipt(), rows, stored, rows * RAW_BYTES, 0, True, load.rows)

    @property
    def is_over(self) -> bool:
        return any(isinstance(command, Complete | GiveUp | GiveUpPlacing) for command in self.commands)

    def given(self, kind: type) -> list[Any]:
        return of_kind(self.commands, kind)

    def last(self, kind: type) -> Any:
        return self.given(kind)[-1]

    def start(self) -> None:
        for command in self.given(Place):
            self.handle(Alive(command.helper))


def kinds(commands: list[Any]) -> list[type]:
    return [type(command) for command in commands]
