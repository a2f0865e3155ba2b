"""The position that a loader shows and saves, with Ray Train and with torch's DataLoader."""

import abc
from collections.abc import Mapping
from typing import Any

from raylance.opened import Opened
from raylance.planning.cursor import Cursor
from raylance.planning.state import State


class Positioned(abc.ABC):
    """Has an epoch and a position, which are the same on every rank, because all ranks take the same steps."""

    def __init__(self, spec: Opened) -> None:
        self._cursor = Cursor(spec.read.origin, spec.delivery, spec.read.source)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; it changes when the last batch of an epoch is handed out."""
        self._cursor.settle()
        return self._cursor.epoch

    @property
    def step(self) -> int:
        """Number of steps of this epoch that were handed out, also before a resume; 0 after the last step."""
        self._cursor.settle()
        return self._cursor.step

    @property
    def global_step(self) -> int:
        """Number of steps handed out since the run began, in all epochs. A resume and `set_epoch` do not reset it."""
        self._cursor.settle()
        return self._cursor.global_step

    def state_dict(self) -> dict[str, Any]:
        """Returns the consumed position, and the data to which it refers: JSON-able, the same on every rank."""
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; world size, batch size, decoders and workers may have changed since.

        Raises:
            StateError: If the state is damaged, made by a newer version, or belongs to other rows or another order.
        """
        self._on_load(self._cursor.load(state))

    @abc.abstractmethod
    def _state(self) -> State: ...

    @abc.abstractmethod
    def _on_load(self, saved: State) -> None: ...
