"""Owns where one rank's training stands: epoch, position, steps, and the order that it follows; never makes a batch."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from raylance.arguments import check_integer
from raylance.orders.permutation import Int64Array
from raylance.orders.shuffles import Sequential
from raylance.planning.delivery_spec import DeliverySpec, make_plan
from raylance.planning.plan import Plan, Remainder
from raylance.planning.resume import load_state, make_state
from raylance.planning.state import State

logger = logging.getLogger(__name__)


class Cursor:
    """The consumed position of one rank, which is the same on every rank, because all ranks take the same steps.

    Attributes:
        delivery_spec: What is delivered; what its order left to "auto" is filled in by the first pass or a checkpoint.
        epoch: The epoch that the next batch is of.
        position: Positions of this epoch that were consumed.
        step: Steps of this epoch that were consumed, also before a resume.
        global_step: Steps since the run began, over all epochs.
        moves: How often anything but a batch has moved it: a pass that finds another count is superseded.
    """

    def __init__(self, origin: Mapping[str, Any], delivery_spec: DeliverySpec) -> None:
        """Stands at the start of epoch 0; `origin` are the fields of a state that `ReadSpec.origin` knows."""
        self._origin, self.delivery_spec = origin, delivery_spec
        self.epoch = self.position = self.step = self.global_step = self.moves = 0
        self._plan: tuple[DeliverySpec, tuple[Any, ...], Plan] | None = None  # the last one, and what it was made of

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plan": None}

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch."""
        self.epoch, self.position, self.step = check_integer("set_epoch(): epoch", epoch, 0), 0, 0
        self.moves += 1

    def advance(self, position: int, *, is_last: bool) -> None:
        """Counts one step as consumed, up to a position; the last one as the start of the next epoch."""
        self.global_step += 1
        if is_last:
            self.end_epoch()
        else:
            self.position, self.step = position, self.step + 1

    def end_epoch(self) -> None:
        """Moves to the start of the next epoch: no step is left of this one."""
        self.epoch, self.position, self.step = self.epoch + 1, 0, 0

    def plan(
        self, *, global_batch_size: int, world_size: int, max_window_bytes: int, remainder: Remainder | None = None
    ) -> Plan:
        """Makes the plan of the epochs, see `make_plan`; the same one for as long as nothing of it has changed."""
        spec, sizes = self.delivery_spec, (global_batch_size, world_size, max_window_bytes, remainder)
        if self._plan is None or self._plan[0] is not spec or self._plan[1] != sizes:
            plan = make_plan(
                spec,
                global_batch_size=global_batch_size,
                world_size=world_size,
                max_window_bytes=max_window_bytes,
                remainder=remainder,
            )
            self._plan = spec, sizes, plan
        return self._plan[2]

    def follow(self, plan: Plan) -> None:
        """Keeps what the plan resolved of the order, for good: another batch size must not change it."""
        self.delivery_spec = dataclasses.replace(self.delivery_spec, order=plan.order.settings)
        if self._plan is not None and self._plan[2] is plan:
            self._plan = self.delivery_spec, *self._plan[1:]

    def state(self, global_batch_size: int | None, world_size: int) -> State:
        """What a checkpoint holds: the position, and the data and the order that it counts in."""
        return make_state(
            self._origin,
            self.delivery_spec,
            epoch=self.epoch,
            position=self.position,
            step=self.step,
            global_step=self.global_step,
            global_batch_size=global_batch_size,
            world_size=world_size,
        )

    def load(self, state: Mapping[str, Any], current: State) -> State:
        """Goes to a saved position, and returns what was saved; `current` is the state before.

        Raises:
            StateError: If the state is damaged, newer, or belongs to other rows or another order.
        """
        self.delivery_spec, saved = load_state(state, current, self.delivery_spec)
        self.epoch, self.position, self.step = saved.epoch, saved.position, saved.step
        self.global_step = saved.global_step
        self.moves += 1
        return saved

    def completed_shards(self) -> Int64Array:
        """IDs of the shards whose rows were all consumed in this epoch: int64, ascending, shape (k,)."""
        if not self.position:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.delivery_spec.resolved_order.epoch(self.epoch).completed_shards(self.position))

    @property
    def has_moved(self) -> bool:
        """Whether a new cursor would deliver other rows than this one continues with."""
        return self.position > 0 or (self.epoch > 0 and not isinstance(self.delivery_spec.order, Sequential))
