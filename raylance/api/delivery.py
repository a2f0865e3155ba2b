"""One pass of a loader: the batches of the rest of an epoch."""

import functools
from collections.abc import Iterator
from typing import Any

from raylance.api.consumer import Consumer, Stretch
from raylance.api.recorder import Recorder
from raylance.batches.assembly import DeliveredStep
from raylance.batches.conversion import BatchSpec
from raylance.batches.lookup import name_file
from raylance.dispatch.states import DeliveryState, change
from raylance.errors import RaylanceError
from raylance.runtime import notes
from raylance.runtime.feeder import Feeder


class Delivery(Iterator[Any]):
    """The batches of the rest of an epoch. Each moves the loader to the next step; the last one, to the next epoch."""

    def __init__(self, consumer: Consumer, spec: BatchSpec) -> None:
        """Begins nothing before the first batch."""
        self._consumer, self._spec = consumer, spec
        self._state = DeliveryState.NEW
        self._holder: object = self  # what `Cursor.hold` returned, once the pass has begun
        self._stretch: Stretch | None = None
        self._last: DeliveredStep | None = None  # the step that was handed out last
        self._handed_out: float | None = None  # when

    def __next__(self) -> Any:
        consumer, recorder, place = self._consumer, self._consumer.recorder, None
        self._take_back()
        try:
            with recorder.waiting(is_first=self._state is DeliveryState.NEW):
                found = self._take()
                if found is not None:
                    stretch, batch, step = found
                    place = consumer.cursor.place
                    consumer.count(stretch, step)
            if found is not None:
                del found
                self._handed_out, self._last = recorder.hand_out(), step
                consumer.move(stretch, step)
                if step.is_last:
                    self._hand_over(stretch)
                return batch
        except BaseException:
            if place is not None and self._is_holding:
                consumer.return_to(place)
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the pass."""
        if self._state is not DeliveryState.OVER:
            self._state = change(self._state, DeliveryState.OVER)
        self._take_back()
        self._end_stretch()

    def _take_back(self) -> None:
        handed_out, self._handed_out = self._handed_out, None
        self._consumer.recorder.take_back(handed_out)

    @property
    def _is_holding(self) -> bool:
        """Whether nothing but this pass has moved the loader since it began."""
        return self._holder is self._consumer.cursor.holder

    def _hand_over(self, stretch: Stretch) -> None:
        """Leaves the feeder to the pass over the next epoch, if it has begun that already."""
        if stretch.ending is not None and self._consumer.session.follow():
            stretch.ending.forget()
            stretch.ending = notes.Ending(self, functools.partial(self._consumer.recorder.flush, may_wait=False))

    def _end_stretch(self) -> None:
        stretch, self._stretch = self._stretch, None
        if stretch is not None and stretch.ending is not None:
            stretch.ending.end()

    def _begin_stretch(self) -> Stretch | None:
        self._stretch = stretch = self._consumer.begin_stretch(self._spec)
        if stretch is not None:
            self._state = change(self._state, DeliveryState.TAKING)
            stretch.ending = notes.Ending(self, functools.partial(_end_pass, stretch.feeder, self._consumer.recorder))
        return stretch

    def _take(self) -> tuple[Stretch, Any, DeliveredStep] | None:
        """Waits for the next batch; None at the end of the pass."""
        last, self._last = self._last, None
        if self._state is DeliveryState.OVER:
            return None
        if self._state is DeliveryState.NEW:
            self._holder = self._consumer.begin_pass(self._spec)
        elif self._stretch is not None and last is not None and not self._goes_on(self._stretch, last):
            return None
        stretch = self._stretch or self._begin_stretch()
        if stretch is None:
            return None
        try:
            found = stretch.feeder.take()
            if found is not None and self._is_holding:
                self._consumer.look_at_others(at_once=found[1].is_last)
        except RaylanceError as error:
            name_file(error, self._consumer.read_spec.source)
            self._consumer.recorder.on_error(error)
            raise
        if found is None or not self._is_holding:
            raise _superseded()
        return stretch, *found

    def _goes_on(self, stretch: Stretch, last: DeliveredStep) -> bool:
        """Returns whether a batch follows the last one; ends the stretch if it is of another one.

        Raises:
            RaylanceError: If something else has moved the loader.
        """
        cursor = self._consumer.cursor
        if last.is_last and (not self._is_holding or cursor.epoch != stretch.epoch):
            return False
        if not self._is_holding:
            raise _superseded()
        place = cursor.epoch, cursor.position, self._consumer.context.share
        has_other_order = stretch.plan.order.settings is not cursor.delivery_spec.order  # weights have changed
        # It was taken back, or shares have changed.
        if last.is_last or has_other_order or place != (stretch.epoch, last.after, stretch.share):
            self._end_stretch()
            self._state = change(self._state, DeliveryState.BETWEEN)
        return True


def _superseded() -> RaylanceError:
    return RaylanceError(
        "this iteration was superseded: the loader was iterated again, moved or closed meanwhile, and two "
        "iterations cannot share one position. Use one iteration at a time."
    )


def _end_pass(feeder: Feeder, recorder: Recorder) -> None:
    feeder.close()
    recorder.flush(may_wait=False)  # a training function that leaves a pass may end now
