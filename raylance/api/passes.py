"""Owns the warning that a whole epoch was handed out twice, in one order; never makes a pass, and never stops one."""

import inspect
import logging
from types import CodeType

import numpy as np

from raylance.planning.delivery_spec import DeliverySpec

logger = logging.getLogger(__name__)

_COMPARED = 1024  # positions of an epoch and the next one


class WholePasses:
    """The whole passes of one process over what has no position, so that each begins at the beginning.

    A program that trains so sees one shuffle in all epochs, and is warned once. A person at a prompt may display a
    dataset twice: passes count together only where one statement at the top level makes them, of a script, a cell or
    a line.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], CodeType | None] = {}  # by identity: the same line comes twice at a prompt
        self._has_warned = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return WholePasses, ()  # another process makes passes of its own

    def add(self, epoch: int, delivery_spec: DeliverySpec, what: str, fix: str) -> None:
        """Counts a pass that has just handed out its last batch; called where the consumer asks for that batch.

        Args:
            epoch: The epoch.
            delivery_spec: What was delivered.
            what: What the passes are over.
            fix: What moves from epoch to epoch.
        """
        statement = _statement()
        made = epoch, id(statement)
        if made in self._seen and not self._has_warned:
            self._has_warned = warn_of_one_order(epoch, delivery_spec, what, fix)
        self._seen[made] = statement


def warn_of_one_order(epoch: int, delivery_spec: DeliverySpec, what: str, fix: str) -> bool:
    """Warns, and returns whether it did: not where the order is the same in every epoch, as for validation."""
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


def _statement() -> CodeType | None:
    """The innermost code that runs at the top level: of a script, of one cell's statement, of a line at a prompt."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame.f_code
        frame = frame.f_back
    return None
