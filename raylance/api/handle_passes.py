"""Owns the passes over a handle: each is a loader of its own, from the start of an epoch; never keeps a position."""

import contextlib
from collections.abc import Iterator
from typing import Any

from raylance.api.loader import RankLoader
from raylance.api.passes import WholePasses
from raylance.batches.batches import Batches
from raylance.environment import process
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.shard_context import ShardContext
from raylance.read_spec import ReadSpec
from raylance.runtime.session import Session
from raylance.settings import Options

_MOVES = (
    "Give the batches of a loader, which moves from epoch to epoch: loader = handle.loader(), then "
    "loader.batches(global_batch_size=…) in place of the handle's; or say which epoch: iter_torch_batches(epoch=…)."
)


class HandlePasses:
    """Passes over a whole epoch as rank 0 of 1; the helpers of one serve the next.

    Attributes:
        running: The loaders of those that have not ended.
    """

    def __init__(self, read_spec: ReadSpec, delivery_spec: DeliverySpec) -> None:
        """Starts nothing."""
        self._read_spec, self._delivery_spec, self._context = read_spec, delivery_spec, ShardContext()
        self._idle: Session | None = None  # of the last pass, for the next one
        self._whole_passes = WholePasses()
        self.running: set[RankLoader] = set()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return HandlePasses, (self._read_spec, self._delivery_spec)  # another process makes passes of its own

    def iterate(self, method: str, epoch: int, arguments: dict[str, Any], whose: str) -> Batches:
        """Calls an iterator of `RankLoader` on a loader of each pass.

        Args:
            method: Name of the iterator.
            epoch: The epoch of all passes.
            arguments: Of the iterator.
            whose: Which handle's batches they are, for their repr.

        Raises:
            ConfigError: For arguments that the iterator refuses.
        """
        first: Batches = getattr(RankLoader(self._read_spec, self._delivery_spec, Options()), method)(**arguments)

        def whole_epoch() -> Iterator[Any]:
            process.check_context(self._context)
            session = self._take_idle() or Session(self._read_spec, Options())
            loader = RankLoader(self._read_spec, self._delivery_spec, Options(), session=session, is_recorded=False)
            loader.set_epoch(epoch)
            self.running.add(loader)
            try:
                with contextlib.closing(iter(getattr(loader, method)(**arguments))) as batches:
                    for batch in batches:
                        if loader.epoch != epoch:  # it moves on with the last batch
                            what = f"a handle of {self._read_spec.source.uri!r}, which has no position,"
                            self._whole_passes.add(epoch, self._delivery_spec, what, _MOVES)
                        yield batch
            finally:
                if loader in self.running:  # else close() ended it
                    self.running.remove(loader)
                    if self._idle is not None:  # another pass ended meanwhile
                        self._idle.close()
                    self._idle = session

        return Batches(whole_epoch, first.__len__, f"{method}() of {whose}, epoch {epoch}", None)

    def close(self) -> None:
        """Ends the passes and their helpers."""
        for loader in self.running:
            loader.close()
        self.running = set()
        if (idle := self._take_idle()) is not None:
            idle.close()

    def _take_idle(self) -> Session | None:
        session, self._idle = self._idle, None
        return session
