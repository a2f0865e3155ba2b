"""Owns a dispatcher that a test drives by events, and the helper pool that it has; never a runtime."""

from typing import Any

from raylance.dispatch.dispatcher import Dispatcher
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.messages import (
    Fault,
    Place,
    Placed,
)
from raylance.dispatch.sizes import Sizes
from raylance.observe import Receipt, Stats
from tests.simulation.schedule import DECODED_BYTES, EPOCH, RAW_BYTES, make_plan

FAULT = Fault(told="it died")


RAW = Receipt(nbytes=RAW_BYTES, raw_bytes=RAW_BYTES)


DECODED = Receipt(nbytes=DECODED_BYTES)


def make_crew(decoders: int = 1, insists: bool = True, readers: int = 1) -> HelperPool:
    return HelperPool(
        readers=readers,
        decoders=decoders,
        insists=insists,
        placement_timeout_s=20.0,
        work_timeout_s=60.0,
        explain=lambda pending, asked, kind: f"{pending} of {asked} {kind}s",
    )


def reader_of(crew: HelperPool, *, proven: bool = False) -> list[int]:
    """The reader of the first item, if one is able."""
    plan = make_plan(0, 4, 1, 1, "drop", 1000)
    reader, _, _ = crew.reader(plan, next(plan.items(0, EPOCH, 0, 1)), proven=proven)
    return [] if reader is None else [reader]


def of_kind(commands: list[Any], kind: type) -> list[Any]:
    return [command for command in commands if type(command) is kind]


class Driver:
    """A dispatcher, and the commands that it has given, by kind."""

    def __init__(
        self,
        crew: HelperPool,
        rows: int = 4,
        *,
        world_size: int = 1,
        item_rows: int = 1,
        chunk_positions: int = 1000,
        now: float = 0.0,
    ) -> None:
        plan = make_plan(0, rows, 1, world_size, "ragged" if world_size > 1 else "drop", chunk_positions)
        sizes = Sizes(raw_bytes=RAW_BYTES, decoded_bytes=DECODED_BYTES, limit_bytes=1 << 30, items=5)
        self.dispatcher = Dispatcher(
            plan=plan,
            rank=0,
            items=plan.items(0, EPOCH, 0, item_rows),
            position=0,
            crew=crew,
            sizes=sizes,
            stats=Stats(),
            decodes=True,
            prefetch_batches=4,
            work_timeout_s=60.0,
            tell=lambda item: f"item {item.position}",
        )
        self.now = now
        self.commands = self.dispatcher.begin(now)

    def tell(self, event: Any, now: float | None = None) -> list[Any]:
        self.now = self.now if now is None else now
        found = self.dispatcher.handle(event, self.now)
        self.commands += found
        return found

    def given(self, kind: type) -> list[Any]:
        return of_kind(self.commands, kind)

    def last(self, kind: type) -> Any:
        return self.given(kind)[-1]

    def start(self) -> None:
        """All helpers run."""
        for command in self.given(Place):
            self.tell(Placed(command.helper))


def kinds(commands: list[Any]) -> list[type]:
    return [type(command) for command in commands]
