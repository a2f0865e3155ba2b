"""The passes over a handle, each with its own loader from the start of an epoch, and the warning that two passes had
the same order.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from raylance.api.batches import Batches
from raylance.api.loader import RankLoader
from raylance.opened import Opened
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.shard_context import ShardContext
from raylance.runtime import notes
from raylance.runtime.session import Session
from raylance.settings import Options

logger = logging.getLogger(__name__)

_COMPARED = 1024  # number of positions of an epoch that are compared with the next epoch
_MOVES = (
    "Give the batches of a loader, which moves from epoch to epoch: loader = handle.loader(), then "
    "loader.batches(global_batch_size=…) in place of the handle's; or say which epoch: iter_torch_batches(epoch=…)."
)


class HandlePasses:
    """Makes passes over a whole epoch as rank 0 of 1. Each pass uses the helpers of the pass before."""

    def __init__(self, spec: Opened) -> None:
        self._spec, self._context = spec, ShardContext(placed_by="nobody")
        self._idle: Session | None = None  # session of the last pass, for the next pass
        self._whole_passes = WholePasses()
        self.running: set[RankLoader] = set()  # loaders of the passes that have not ended

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return HandlePasses, (self._spec,)  # another process makes passes of its own

    def iterate(self, method: str, epoch: int, arguments: dict[str, Any], whose: str) -> Batches:
        """Returns batches of a `RankLoader` method, with a new loader for each pass; `whose` is the handle's repr."""
        # `first` checks the arguments, and has the number of steps.
        first: Batches = getattr(RankLoader(self._spec, Options()), method)(**arguments)
        return _HandleBatches(self, first, (method, epoch, arguments), f"{method}() of {whose}, epoch {epoch}")

    def whole_epoch(self, method: str, epoch: int, arguments: dict[str, Any]) -> Iterator[Any]:
        """Yields the batches of one pass over an epoch, with a new loader."""
        session = self._take_idle() or Session(self._spec.read, Options(), loads_next_epoch=False)
        loader = RankLoader(self._spec, Options(), self._context, session=session, is_recorded=False)
        loader.set_epoch(epoch)
        self.running.add(loader)
        try:
            with contextlib.closing(iter(getattr(loader, method)(**arguments))) as batches:
                for batch in batches:
                    if loader.epoch != epoch:  # the last batch has moved the loader to the next epoch
                        what = f"a handle of {self._spec.read.source.uri!r}, which has no position,"
                        self._whole_passes.add(epoch, self._spec.delivery, what, _MOVES)
                    yield batch
                    del batch  # else it would stay until the next one is here
        finally:
            if loader in self.running:  # else close() ended it
                self.running.remove(loader)
                other, self._idle = self._idle, session
                if other is not None:  # another pass ended meanwhile; the garbage collector may end this one
                    notes.leave(other.close)

    def close(self) -> None:
        """Ends the passes and their helpers."""
        running, self.running = self.running, set()
        for loader in running:
            loader.close()
        self.end_idle()

    def end_idle(self) -> None:
        """Ends the helpers that wait for another pass, and so frees their CPUs."""
        if (idle := self._take_idle()) is not None:
            idle.close()

    def _take_idle(self) -> Session | None:
        session, self._idle = self._idle, None
        return session


class _HandleBatches(Batches):
    """The batches of a handle. Each pass is over one whole epoch, the same each time."""

    def __init__(
        self, passes: HandlePasses, first: Batches, asked: tuple[str, int, dict[str, Any]], description: str
    ) -> None:
        """Takes `first`, which only gives the number of steps, and `asked`, arguments of `HandlePasses.whole_epoch`."""
        super().__init__(description)
        self._passes, self._first, self._asked = passes, first, asked

    def __len__(self) -> int:
        return len(self._first)

    def _begin(self) -> Iterator[Any]:
        return self._passes.whole_epoch(*self._asked)


class WholePasses:
    """Counts the whole passes of one process over objects without a position, whose passes all begin at the start.

    A program that trains with such passes gets the same shuffle in all epochs, and is warned once.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()  # epochs
        self._has_warned = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return WholePasses, ()  # another process makes passes of its own

    def add(self, epoch: int, delivery_spec: DeliverySpec, what: str, fix: str) -> None:
        """Counts a whole pass; warns once, at a second pass over an epoch. The warning names the object, `what`, and
        the remedy, `fix`.
        """
        if epoch in self._seen and not self._has_warned:
            self._has_warned = warn_of_one_order(epoch, delivery_spec, what, fix)
        self._seen.add(epoch)


def warn_of_one_order(epoch: int, delivery_spec: DeliverySpec, what: str, fix: str) -> bool:
    """Warns of a second pass in one order, and returns True; False if all epochs have one order, as for validation."""
    order = delivery_spec.resolved_order
    positions = np.arange(min(order.epoch_rows, _COMPARED), dtype=np.int64)
    if np.array_equal(order.epoch(epoch).rows(positions), order.epoch(epoch + 1).rows(positions)):
        return False
    logger.warning(
        "%s was handed out whole a second time, as epoch %d again. A model trained so sees one order, and one "
        "augmentation of each row, in all epochs. %s For the same batches each time on purpose, use "
        'order="sequential".',
        what,
        epoch,
        fix,
    )
    return True
