"""Owns what a loader says of its position, under Ray Train and under torch's DataLoader; never makes a batch."""

import abc
from collections.abc import Mapping
from typing import Any

from raylance.planning.cursor import Cursor
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.state import State
from raylance.read_spec import ReadSpec


class Positioned(abc.ABC):
    """What has an epoch and a position, the same on every rank, because all ranks take the same steps."""

    def __init__(self, read_spec: ReadSpec, delivery_spec: DeliverySpec) -> None:
        self._cursor = Cursor(read_spec.origin, delivery_spec)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of; moves on when the last batch of an epoch has been handed out."""
        return self._cursor.epoch

    @property
    def step(self) -> int:
        """Steps of this epoch that were handed out, also before a resume; 0 when the last one has been."""
        return self._cursor.step

    @property
    def global_step(self) -> int:
        """Steps that were handed out since the run began, over all epochs; a resume continues the count, and
        `set_epoch` leaves it as it is.
        """
        return self._cursor.global_step

    def state_dict(self) -> dict[str, Any]:
        """The consumed position and what it refers to: JSON-able, the same on every rank."""
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; world size, batch size, decoders and workers may have changed since.

        Raises:
            StateError: If the state is damaged, newer, or belongs to other rows or another order.
        """
        self._on_load(self._cursor.load(state))

    @abc.abstractmethod
    def _state(self) -> State: ...

    @abc.abstractmethod
    def _on_load(self, saved: State) -> None: ...
