"""Owns the position that a loader shows and saves, under Ray Train and torch's DataLoader; never makes a batch."""

import abc
from collections.abc import Mapping
from typing import Any

from raylance.planning.cursor import Cursor
from raylance.planning.state import State
from raylance.read_spec import DatasetSpec


class Positioned(abc.ABC):
    """An epoch and a position, the same on every rank, because all ranks take the same steps."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._cursor = Cursor(spec.read.origin, spec.delivery)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; it changes when the last batch of an epoch is handed out."""
        return self._cursor.epoch

    @property
    def step(self) -> int:
        """Steps of this epoch that were handed out, also before a resume; 0 after the last one."""
        return self._cursor.step

    @property
    def global_step(self) -> int:
        """Steps handed out since the run began, over all epochs. A resume continues the count; `set_epoch` keeps it."""
        return self._cursor.global_step

    def state_dict(self) -> dict[str, Any]:
        """The consumed position and the data it refers to: JSON-able, the same on every rank."""
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
