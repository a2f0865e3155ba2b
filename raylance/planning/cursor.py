"""The position of one rank in its training, and the state by which it is saved and loaded."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from raylance.arguments import check_integer
from raylance.errors import ConfigError
from raylance.orders.changed import Changed, as_recorded, can_change, could_change, placed, since, unchanged
from raylance.orders.mixture import MixOrder
from raylance.orders.order import WINDOW_BYTES
from raylance.orders.permutation import Int64Array
from raylance.orders.shuffles import Sequential
from raylance.planning.changes import change_at, waits, with_left_rows
from raylance.planning.delivery_spec import DeliverySpec, make_plan
from raylance.planning.parts import Continued, at_begin, carried, may_differ, origin_of, recorded_in, spec_of, state_of
from raylance.planning.plan import Plan
from raylance.planning.shards import NO_SHARDS, list_shards
from raylance.planning.state import NoVersions, State, Versions, check_state, damaged, parse_state
from raylance.planning.step_size import CostLimit, Remainder, Size

logger = logging.getLogger(__name__)


class Cursor:
    """The consumed position of one rank. It is the same on every rank, because all ranks take the same steps.

    Attributes:
        delivery_spec: The rows to deliver. The first pass or a checkpoint fills in the sizes that its order left to
            "auto".
        epoch: The epoch of the next batch.
        position: Number of positions of this epoch that were consumed.
        step: Number of steps of this epoch that were consumed, including those before a resume.
        global_step: Number of steps since the run began, over all epochs.
        holder: The pass that moves the cursor; None if something else has moved it since, such as `set_epoch`. A pass
            stops if it is no longer the holder.
        settle: Called before the position is shown, saved or reported. With torchft, a step counts only once it is
            committed; there, this function counts the last step if it was committed. By default, it does nothing.
    """

    def __init__(
        self,
        origin: Mapping[str, Any],
        delivery_spec: DeliverySpec,
        versions: Versions | None = None,
        *,
        keeps_from: int | None = None,
        looks_back: bool = False,
    ) -> None:
        """Begins at the start of epoch 0. `origin` holds the fields of a state that `ReadSpec.origin` returns;
        `versions` is the `RowSource` of the rows. States keep the changes from the epoch `keeps_from` on; by default,
        from the present one on. With `looks_back`, the plan also knows the rows before the position; in a mixture,
        those of the present epoch.
        """
        self._origin, self.delivery_spec, self._versions = origin, delivery_spec, versions or NoVersions()
        self._given = delivery_spec  # before a pass or a state has filled in the sizes of its order, or changed it
        self._keeps_from, self._looks_back = keeps_from, looks_back
        self._rows_of: Mapping[str, Any] | None = None
        self._rows_from = 0  # the first epoch whose rows are known; the order may name a later place
        self.epoch = self.position = self.step = self.global_step = 0
        self.holder: object = None
        self.settle: Callable[[], None] = _nothing
        self._plan: tuple[DeliverySpec, tuple[Any, ...], Plan] | None = None  # the last plan, and its arguments
        self._before: tuple[int, int, int, int] | None = None  # the place before the last step

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plan": None}

    def hold(self) -> object:
        """Returns the new holder, for a pass that begins."""
        self.holder = object()
        return self.holder

    def set_epoch(self, epoch: int) -> int:
        """Goes to the start of an epoch. Returns how many positions of this epoch were consumed and come again; 0 if
        the cursor was in another epoch.

        Raises:
            ConfigError: If `epoch` is not an integer from 0 to 2⁶³ - 1.
        """
        epoch = check_integer("set_epoch(): epoch", epoch, 0)
        given_up = self.position if epoch == self.epoch else 0
        order, given = self.delivery_spec.order, self._given
        if (epoch, 0) < self.known_from:  # it has the present rows from its start on
            self._rows_from = 0
            self.delivery_spec = dataclasses.replace(
                self.delivery_spec, order=order.renewed(given.order), tables=given.tables
            )
        self.epoch, self.position, self.step = epoch, 0, 0
        self._before = self.holder = None
        return given_up

    @property
    def known_from(self) -> tuple[int, int]:
        """The first epoch and position whose rows are known: earlier ones were of other data, or in another order."""
        return max(self.delivery_spec.order.known_from, (self._rows_from, 0))

    @property
    def place(self) -> tuple[int, int, int, int]:
        """The epoch, position, step and global step, as one value that can be saved and restored."""
        return self.epoch, self.position, self.step, self.global_step

    @place.setter
    def place(self, place: tuple[int, int, int, int]) -> None:
        self.epoch, self.position, self.step, self.global_step = place

    def advance(self, position: int, *, is_last: bool) -> None:
        """Counts one step as consumed, up to a position. The last step moves to the start of the next epoch."""
        self._before = self.place
        self.global_step += 1
        if is_last:
            self.end_epoch()
        else:
            self.position, self.step = position, self.step + 1

    def end_epoch(self) -> None:
        """Moves to the start of the next epoch, because this one has no step left."""
        self.epoch, self.position, self.step = self.epoch + 1, 0, 0

    def seek(self, plan: Plan, global_step: int) -> bool:
        """Goes to the beginning of the step with the number `global_step`. Assumes that all steps in between have the
        plan's global batch size. Returns False if the cursor was there already.

        Raises:
            ConfigError: If the step lies before the run's first one; or if it lies in an earlier epoch, and the present
                position is not a multiple of the global batch size.
        """
        if global_step == self.global_step:
            return False
        if self._before is not None and self._before[3] == global_step:
            return self.take_back()
        ahead, left = global_step - self.global_step, plan.steps(self.epoch, self.position)
        here, self._before = self.place, None
        if 0 <= ahead < left:
            position = plan.after(self.epoch, self.position, ahead)
            self.place = self.epoch, position, self.step + ahead, global_step
        elif ahead >= left:
            self._go_to(plan, self.epoch + 1, ahead - left, global_step)
        elif plan.budget is None and self.position + ahead * plan.global_batch_size >= 0:
            position = self.position + ahead * plan.global_batch_size
            self.place = self.epoch, position, self.step + ahead, global_step
        else:
            step = plan.steps(self.epoch) - left  # number of the present one
            if plan.after(self.epoch, 0, step) != self.position or not self._go_to(
                plan, self.epoch, step + ahead, global_step
            ):
                raise ConfigError(
                    f"seek({global_step}) from step {self.global_step}, which is position {self.position} of epoch "
                    f"{self.epoch}: with {plan.step_text} no step begins there. Go to a step of this epoch, or load a "
                    "state of that step."
                )
        if self.place[:2] < (known := self.known_from):
            self.place = here
            raise ConfigError(
                f"seek({global_step}) from step {self.global_step}: that step lies before position {known[1]} of epoch "
                f"{known[0]}, where the rows of the run have changed, and its rows may be gone. Go to a later step, or "
                "load a state of that step with the version that it names."
            )
        return True

    def _go_to(self, plan: Plan, epoch: int, step: int, global_step: int) -> bool:
        """Goes to a step that is counted from the start of an epoch, maybe of an earlier or later one. Returns False if
        it lies before the first epoch.
        """
        if plan.budget is None and epoch >= plan.order.alike_from and (step >= 0 or not plan.order.alike_from):
            epochs, step = divmod(step, plan.steps(epoch))  # all these epochs have the same number of steps
            epoch += epochs
        while step < 0 < epoch:
            epoch, step = epoch - 1, step + plan.steps(epoch - 1)
        if epoch < 0 or step < 0:
            return False
        while step >= (whole := plan.steps(epoch)):
            epoch, step = epoch + 1, step - whole
        self.place = epoch, plan.after(epoch, 0, step), step, global_step
        return True

    def return_to(self, place: tuple[int, int, int, int]) -> None:
        """Goes to a place, where a step was not handed out. The step before it cannot be taken back any more."""
        self.place, self._before = place, None

    def take_back(self) -> bool:
        """Moves back to the place before the last step. Returns False if this place is unknown, as after a jump."""
        if self._before is None:
            return False
        self.place, self._before = self._before, None
        return True

    def steps_until(self, plan: Plan, epoch: int) -> int:
        """Returns the number of steps of the plan from here to the start of an epoch; 0 if the start has passed."""
        if epoch <= self.epoch:
            return 0
        first = max(self.epoch + 1, plan.order.alike_from) if plan.budget is None else epoch
        between = sum(map(plan.steps, range(self.epoch + 1, min(first, epoch))))
        alike = max(0, epoch - first) * plan.steps(first) if epoch > first else 0
        return plan.steps(self.epoch, self.position) + between + alike

    def plan(
        self,
        *,
        size: Size,
        dp_size: int,
        reader_bytes: int,
        remainder: Remainder | None = None,
    ) -> Plan:
        """Returns the plan of the epochs, see `make_plan`. It is the same object until an argument changes or a state
        is loaded.
        """
        spec = self.delivery_spec
        sizes = (size, dp_size, reader_bytes, remainder or spec.remainder)
        if self._plan is None or self._plan[0] is not spec or self._plan[1] != sizes:
            plan = make_plan(
                spec,
                size=size,
                dp_size=dp_size,
                reader_bytes=reader_bytes,
                remainder=remainder,
            )
            self._plan = spec, sizes, plan
        return self._plan[2]

    def follow(self, plan: Plan) -> None:
        """Fixes the sizes of the order as the plan resolved them, because another batch size must not change them."""
        self.delivery_spec = dataclasses.replace(self.delivery_spec, order=plan.order.settings)
        if self._plan is not None and self._plan[2] is plan:
            self._plan = self.delivery_spec, *self._plan[1:]

    def reweight(self, weights: Mapping[str, Any], reason: str) -> dict[str, float]:
        """Changes the weights of a mixture from the present position on; returns the share of each dataset there.

        Raises:
            ConfigError: If the rows are not of a mixture, or the weights are not those of its datasets.
        """
        order = self.delivery_spec.order
        if not isinstance(order, MixOrder):
            raise ConfigError(
                "reweight() of a dataset that is no mixture: only datasets of raylance.mix have weights. Give "
                'raylance.mix({"a": (a, 0.5), "b": (b, 0.5)}) to the trainer.'
            )
        moved = order.moved(self.epoch, self.position, weights, reason)
        self.delivery_spec = dataclasses.replace(self.delivery_spec, order=moved)
        return moved.shares_in(moved.segments[-1])

    def state(self, size: Size | None, dp_size: int) -> State:
        """Returns the state for a checkpoint: the position, and the data and order that it refers to. The cost does not
        depend on the number of rows.
        """
        spec, shards = self.delivery_spec, {}
        if spec.order.repeats:
            shards = NO_SHARDS
        elif spec.order.is_resolved:
            shards = list_shards(spec.resolved_order.epoch(self.epoch), self.position)
        return State(
            **self._origin,
            rows=spec.rows,
            fingerprint=spec.fingerprint,
            seed=spec.seed,
            order=spec.order.params(),
            window_bytes=spec.window_bytes or WINDOW_BYTES,
            epoch=self.epoch,
            position=self.position,
            step=self.step,
            global_step=self.global_step,
            completed_shards=shards,
            components=spec.order.standings(self.epoch, self.position),
            global_batch_size=None if isinstance(size, CostLimit) else size,
            dp_size=dp_size,
            budget=dataclasses.asdict(size) if isinstance(size, CostLimit) else None,
            rows_of=self._rows_of,
            rows_from=self._rows_from or None,
        )

    def load(self, state: Mapping[str, Any]) -> State:
        """Goes to a saved position; returns the state from which it continues.

        Raises:
            StateError: If the state is damaged, too old or too new, or belongs to other rows or another order.
        """
        saved, given = parse_state(state), self._given
        if isinstance(given.order, MixOrder):
            saved, given = self._with_parts(saved, given, given.order)
        return self._load(saved, given, is_carried=given is not self._given)[0]

    def _with_parts(self, saved: State, given: DeliverySpec, order: MixOrder) -> tuple[State, DeliverySpec]:
        """Carries the state of a mixture over what has changed in the rows of its datasets since. Returns it, and the
        rows to deliver, with what is left of the datasets' own epochs.
        """
        with _damaging():
            recorded = recorded_in(saved, order)
        if recorded is None:
            return saved, given
        parts = order.components[: len(recorded.components)]
        before, found = recorded.course.epoch(saved.epoch), dict[int, Continued]()
        saved = at_begin(saved, before.end)
        dealt = recorded.course.epoch(saved.epoch)
        first_own = (before if self._looks_back else dealt).first_own
        for number, part in enumerate(parts):
            if not may_differ(part, saved):
                continue
            versions, origin = self._versions.part(number), origin_of(self._origin, part.name)
            keeps_from = first_own[number] if saved.position or self._looks_back else None
            alone, looks_back = spec_of(given, part, versions), self._looks_back
            cursor = Cursor(origin, alone, versions, keeps_from=keeps_from, looks_back=looks_back)
            own = state_of(saved, part, dealt.own_place(number, saved.position), versions, origin)
            _, has_changed = cursor._load(own, alone, f" of {part.name!r}", may_begin=not saved.position)
            spec = cursor.delivery_spec
            now_order = placed(spec.order, saved.epoch, saved.position) if has_changed else spec.order
            now = dataclasses.replace(part, order=now_order, tables=spec.tables)
            found[number] = Continued(now, cursor._rows_of, has_changed, forgets=cursor._rows_from > 0)
        now_parts = (found[number].part if number in found else part for number, part in enumerate(order.components))
        given = dataclasses.replace(given, order=dataclasses.replace(order, components=tuple(now_parts)))
        return carried(saved, recorded, found, given, self._origin), given

    def _load(
        self,
        saved: State,
        given: DeliverySpec,
        of: str = "",
        *,
        may_begin: bool | None = None,
        is_carried: bool = False,
    ) -> tuple[State, bool]:
        """See `load`. Returns also whether the rows or their order differ from those of the state; `of` names them. If
        the state is carried over changes, it is not at the end of an epoch, though nothing may be left of it now.
        """
        present, forgets = self.delivery_spec, False
        first = saved.epoch if self._keeps_from is None else self._keeps_from
        asked = (
            first if self._looks_back else saved.epoch
        )  # the first epoch whose rows are asked for, also if none is left
        with _damaging():
            order = as_recorded(given.order, saved.order)
            if isinstance(order, Changed):
                forgets = order.changes[0].epoch < first
                saved = dataclasses.replace(saved, order=since(saved.order, first))
                order = as_recorded(given.order, saved.order)
        self.delivery_spec = dataclasses.replace(given, order=order)
        try:
            current, may_change = self.state(None, 1), None
            if given.on_new_version != "refuse":
                may_change = (
                    could_change(saved.order, given.order) and saved.windows is None and current.windows is None
                )
                may_change &= can_change(given.order, has_tables=bool(given.tables))
            may_begin = self._keeps_from is None if may_begin is None else may_begin
            moved = check_state(saved, current, self._versions, of, may_change=may_change, may_begin=may_begin)
            with _damaging():
                recorded = order.adopt(saved.order)
            of_saved = dataclasses.replace(self.delivery_spec, order=recorded, rows=saved.rows)
            if not is_carried:
                saved = at_begin(saved, of_saved.resolved_order.epoch(saved.epoch).epoch_rows)
            spec = _adopt(given if isinstance(given.order, MixOrder) else self.delivery_spec, saved)
        finally:
            self.delivery_spec = present
        begins = bool(moved.fields) and not moved.has_changed and moved.rows_of is None
        is_other = moved.has_changed or bool(may_change and waits(order, saved, given.on_new_version))
        if begins:  # what has changed before does not lead to the present rows
            spec = dataclasses.replace(spec, order=unchanged(spec.order))
        elif is_other:
            spec = change_at(spec, saved, self._versions, asked)
        elif isinstance(spec.order, Changed):
            spec = with_left_rows(spec, spec.order, asked, self._versions)
        order, change = spec.order.after(saved.order, saved.epoch, saved.position)
        spec, self._rows_of = dataclasses.replace(spec, order=order), moved.rows_of
        if change:
            logger.warning(
                "the run continues with another mixture from epoch %d, position %d on:\n%s",
                saved.epoch,
                saved.position,
                change,
            )
        self.delivery_spec, self.global_step = spec, saved.global_step
        self.epoch, self.position, self.step = saved.epoch, saved.position, saved.step
        self._before = self.holder = None
        self._rows_from = saved.epoch if begins else first if forgets else saved.rows_from or 0
        return saved, is_other or begins

    def completed_shards(self) -> Int64Array:
        """Returns the IDs of the shards whose rows were all consumed in this epoch: int64, ascending, shape (k,)."""
        if not self.position:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.delivery_spec.resolved_order.epoch(self.epoch).completed_shards(self.position))

    @property
    def has_moved(self) -> bool:
        """Whether a new cursor would begin with other rows than those with which this one continues."""
        return self.position > 0 or (self.epoch > 0 and not isinstance(self.delivery_spec.order, Sequential))


def _nothing() -> None:
    """Does nothing: the default of `Cursor.settle`, because steps count as soon as they are handed out."""


@contextlib.contextmanager
def _damaging() -> Iterator[None]:
    """Raises StateError for settings that no loader has saved."""
    try:
        yield
    except ConfigError as error:
        raise damaged(str(error).removesuffix(".")) from error


def _adopt(spec: DeliverySpec, saved: State) -> DeliverySpec:
    """Takes sizes that are "auto" from the saved state, because another batch size must not change the order."""
    with _damaging():
        spec = dataclasses.replace(spec, order=spec.order.adopt(saved.order))
    if spec.window_bytes not in (None, saved.window_bytes):
        logger.warning(
            "the checkpoint has window_bytes=%d, the dataset %d. The order keeps the sizes of the checkpoint. For "
            "other sizes, start under a new run name.",
            saved.window_bytes,
            spec.window_bytes,
        )
    return dataclasses.replace(spec, window_bytes=saved.window_bytes)
