"""The thread between helpers and consumer: it waits for rows, checks, collates and copies them to the device."""

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from raylance.batches.assembly import Assembly, DeliveredStep, StepRows
from raylance.batches.bad_rows import MaskedRows
from raylance.batches.conversion import BatchSpec, cut_batch
from raylance.batches.device import Sender
from raylance.batches.device_columns import decode_step
from raylance.columns import STEP_COST
from raylance.decode.on_device import DeviceDecoding
from raylance.dispatch.dispatcher import Dispatcher
from raylance.dispatch.messages import (
    Awaited,
    Begin,
    Close,
    Complete,
    Deliver,
    Event,
    GiveUp,
    GiveUpPlacing,
    Log,
    Output,
    Taken,
    Wake,
    Wanted,
)
from raylance.dispatch.states import CHANGES, PassState
from raylance.errors import HelperError, PlacementError, RaylanceError
from raylance.observe.observations import (
    BatchesReady,
    BatchGathered,
    BatchHandedOut,
    Cause,
    FaultSeen,
    Observation,
    Observer,
    Status,
    WaitsFor,
    WorkDone,
)
from raylance.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

_LOOK_S = 5.0  # seconds between checks that the thread is alive
_JOIN_S = 10.0  # seconds that a closing consumer waits at most for user code in the thread

_alive: "weakref.WeakValueDictionary[int, Feeder]" = weakref.WeakValueDictionary()


class Feeder:
    """Makes the batches of one pass in its own thread, a few batches ahead of the consumer. At the end of an epoch, no
    batches are made until the consumer asks for the next epoch; its rows are fetched already if it follows.
    """

    def __init__(
        self, dispatcher: Dispatcher, runtime: Runtime, assembly: Assembly, observer: Observer, masked: MaskedRows
    ) -> None:
        """Starts nothing. From `start` until `has_ended`, no other thread may take the runtime's events."""
        self._dispatcher, self._runtime, self._assembly, self._observer = dispatcher, runtime, assembly, observer
        self._masked = masked
        self._spec: BatchSpec | None = None
        self._on_device: DeviceDecoding | None = None
        self._sender: Sender | None = None
        self._changed = threading.Condition()
        self._said: deque[Event] = deque([Begin()])  # events from the consumer to the dispatcher
        self._sleeps = False  # whether the thread waits for the runtime, and a new event must wake it
        self._finished: deque[tuple[Any, DeliveredStep]] = deque()  # batches to hand out
        self._error: BaseException | None = None
        self._state, self._is_awaited = PassState.RUNNING, False
        self._thread_ends = False  # whether the thread takes no more events
        self._has_shown = False  # whether the rows of the pass's first batch were observed
        self._work: Cause = "finish"  # the part of making a batch that the thread works on
        self._thread = threading.Thread(target=self.run, name="raylance-feeder", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        _alive[id(self)] = self
        self._thread.start()

    # The consumer's side.

    def bind(self, spec: BatchSpec, on_device: DeviceDecoding | None = None) -> None:
        """Lets the thread make the batches of an epoch; `on_device` decodes some of their columns. Before this call,
        only rows are fetched.
        """
        with self._changed:
            self._on_device = on_device
            self._sender = None if spec.device is None else Sender(spec.device, spec.pin_memory)
            self._spec = spec
            self._say(Wanted())
            self._changed.notify_all()  # if all rows are here already, no event wakes the thread

    @property
    def has_ended(self) -> bool:
        """Whether another pass may begin: the runtime is free, and only finished batches are left to hand out."""
        return self._thread_ends and self._error is None and not self._thread.is_alive()

    @property
    def is_closed(self) -> bool:
        """Whether the pass was ended from outside."""
        return self._state is PassState.CLOSED

    @property
    def is_at_turn(self) -> bool:
        """Whether `bind` begins the next epoch: all batches of this one are made, and the pass has another epoch."""
        return self._spec is None and self._state in (PassState.RUNNING, PassState.FAILED)

    def take(self) -> tuple[Any, DeliveredStep] | None:
        """Waits for the next batch; returns it with its step, and keeps no reference to it. None after the last one of
        the epoch.

        Raises:
            Exception: The error that ended the pass, after the last good batch.
        """
        found = self._take()
        if found is None:
            return None
        batch, step = found
        self._masked.add(step.rows, step.masked, self._observer.reason_of)
        self._observe(BatchHandedOut(step.rows, step.nbytes, len(step.masked), step.costs))
        return (batch if self._sender is None else self._sender.receive(batch)), step

    def _take(self) -> tuple[Any, DeliveredStep] | None:
        with self._changed:
            while not self._is_ready():
                self._changed.wait(_LOOK_S)
                if not self._thread.is_alive() and not self._thread_ends:
                    raise RaylanceError(
                        "the thread that makes batches is not in this process: it was forked in the middle of a pass. "
                        "No batch can follow here. Begin another pass in this process, or start processes by spawn."
                    )
            if self._is_awaited:
                self._is_awaited = False
                self._observe(WaitsFor(None))
            if self._finished:
                found = self._finished.popleft()
                self._observe(BatchesReady(len(self._finished)))
                self._say(Taken(found[1].epoch, found[1].after))
                self._changed.notify_all()
                return found
            if self.is_at_turn:
                return None  # an error would be one of the next epoch
            error, self._error = self._error, None
        if isinstance(error, StopIteration):
            where = "".join(f" {note}" for note in getattr(error, "__notes__", []))
            raise HelperError(
                f"StopIteration was raised{where}. A loop over batches would take it for the end of the epoch, which "
                "stops here. Fix the code that raised it, such as a next() without a default."
            ) from error
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it would refer to this frame, and this frame to it, with the rows of the step
        return None

    def _is_ready(self) -> bool:
        """Whether a batch or the end is here; if not, reports that the consumer waits. The caller holds `_changed`."""
        if self._finished or self._thread_ends or self.is_closed or self.is_at_turn:
            return True
        if not self._is_awaited:
            self._is_awaited = True
            self._awaits_here()  # a guess until the dispatcher reports the cause: the thread may be making batches
            self._say(Awaited())
        return False

    def _say(self, event: Event) -> None:
        """Hands an event to the dispatcher. The caller holds `_changed`."""
        self._said.append(event)
        if self._sleeps:
            self._runtime.post(Wake())

    def stop(self) -> None:
        """Ends the pass; drops batches and items that were not handed out."""
        with self._changed:
            self._change(PassState.CLOSED)
            self._finished.clear()
            self._observe(BatchesReady(0))
            self._changed.notify_all()
        self._runtime.post(Wake())

    def close(self) -> bool:
        """Ends the pass and waits for its thread; returns whether the thread has ended, which user code may prevent."""
        if self.is_closed and not self._thread.is_alive():
            return True  # at interpreter exit, a generator may close again when the names below are gone
        self.stop()
        if self._thread is not threading.current_thread():  # user code in it may close its loader
            with contextlib.suppress(RuntimeError):  # an interrupt prevented the start of the thread
                self._thread.join(_JOIN_S)
        _alive.pop(id(self), None)
        return not self._thread.is_alive()

    def _awaits_here(self) -> None:
        """Records that the consumer waits for work in this process, if it waits. The caller holds `_changed`."""
        if self._is_awaited:
            self._observe(WaitsFor(self._work))

    # The thread's side.

    def run(self) -> None:
        """Passes events to the dispatcher, and carries out its outputs, until the pass ends."""
        if self.is_closed:  # closed before it began: the next pass may use the runtime already
            self._thread_ends = True
            return
        try:
            while self._state is PassState.RUNNING:
                self.step()
        except BaseException as raised:  # the consumer gets any error, and the first one if there are several
            self._fail(raised)
        finally:
            self._end()

    def step(self) -> None:
        """Waits for one event, and carries out all its consequences."""
        event = self._next_event()
        now = self._runtime.now()
        if self.is_closed:  # no more work begins, but the event may be about helpers, which outlive the pass
            self._do(self._dispatcher.handle(Close(), now), now)
        if not isinstance(event, Wake):
            outputs = self._dispatcher.handle(event, now)
            del event  # it may hold tables, and the outputs may take long
            self._do(outputs, now)
        while self._assembly and self._has_room():
            if self._spec is not None:  # always: `_has_room` returns False without it
                self._finish(self._spec)

    def _end(self) -> None:
        try:
            now = self._runtime.now()
            self._do(self._dispatcher.handle(Close(), now), now)
        except BaseException as raised:  # as in `run`; the error that ended the pass comes first
            self._error = self._error or raised
        with self._changed:
            self._thread_ends = True
            self._changed.notify_all()

    def _next_event(self) -> Event | Wake | None:
        with self._changed:
            if self._said:
                return self._said.popleft()
            self._sleeps = True
        deadline = self._dispatcher.deadline()
        event = self._runtime.next_event(None if deadline is None else max(0.0, deadline - self._runtime.now()))
        self._sleeps = False
        return event

    def _do(self, outputs: list[Output], now: float) -> None:
        """Carries out outputs, and keeps no reference to them, because some hold tables."""
        try:
            while outputs:
                self._carry_out(outputs, now)
        except BaseException:
            self._runtime.has_failed = True  # the other outputs are not carried out
            raise

    def _carry_out(self, outputs: list[Output], now: float) -> None:
        """Carries out the first output, and removes it."""
        match outputs.pop(0):
            case Log(level, line):
                logger.log(level, "%s", line)
            case FaultSeen(line) as fault:
                logger.warning("%s", line)
                self._observer.observe(fault, now)
            case WorkDone() | Status() as observation:
                self._observer.observe(observation, now)
            case Deliver(item, plain, decoded):
                try:
                    self._assembly.add(item, plain, decoded)
                except Exception as error:  # the other outputs must be carried out, because the pool counts on them
                    self._fail(error)
                del plain, decoded
            case Complete():
                self._change(PassState.COMPLETE)
            case GiveUp(error):
                self._fail(error)
            case GiveUpPlacing(kind, pending, asked):
                self._fail(PlacementError(self._runtime.explain_placing(kind, pending, asked)))
            case command:
                with self._observer.in_step():
                    self._runtime.do(command)

    def _fail(self, error: BaseException) -> None:
        """Ends the pass with an error, unless an earlier one has ended it."""
        self._error = self._error or error
        self._change(PassState.FAILED)

    def _change(self, after: PassState) -> None:
        """Changes the state; a pass that has ended can only be closed, whatever comes."""
        with self._changed:
            if after in CHANGES[self._state]:
                self._state = after

    def _observe(self, observation: Observation) -> None:
        self._observer.observe(observation, self._runtime.now())

    def _has_room(self) -> bool:
        """Returns whether another batch may be made; if no item will follow, waits until the consumer makes room."""
        with self._changed:
            while self._state in (PassState.COMPLETE, PassState.FAILED) and len(self._finished) >= self._room:
                self._changed.wait(_LOOK_S)
            return len(self._finished) < self._room and not self.is_closed

    @property
    def _room(self) -> int:
        return 0 if self._spec is None else max(1, self._spec.prefetch_batches)

    def _finish(self, spec: BatchSpec) -> None:
        rows, step = self._assembly.next_step()
        if not self._has_shown:
            self._has_shown = True
            self._observe(BatchGathered(rows.table()))
        try:
            with self._sender.stream() if self._sender else contextlib.nullcontext():
                decoded: Mapping[str, Any] = {}
                if self._on_device is not None:
                    rows, step, decoded = self._decode(self._on_device, rows, step)
                self._begin("finish")
                with self._observer.in_step(), self._observer.timed("collate_s"):
                    names = [name for name in rows.item.names if name not in spec.hidden]
                    batch = self._convert(spec, rows, names, decoded, step.total_cost)
        except Exception as error:
            error.add_note(f"as a batch was made of {self._assembly.describe(rows.table())}")
            raise
        if self._sender is not None:
            with self._observer.timed("transfer_s"):
                batch = self._sender.send(batch)
        with self._changed:
            if step.is_last:
                self._spec = None  # what it refers to, such as the user's functions, is of this epoch
            if not self.is_closed:
                self._finished.append((batch, step))
                self._observe(BatchesReady(len(self._finished)))
                self._changed.notify_all()

    def _convert(
        self, spec: BatchSpec, rows: StepRows, names: Sequence[str], decoded: Mapping[str, Any], cost: Any
    ) -> Any:
        """Makes the batch of a step, or the list of its micro-batches; adds the cost of the step if it is given."""
        if spec.micro is None:
            batch = spec.convert(rows, names, decoded)
            return batch if cost is None else _with_cost(batch, cost)
        bounds, cost = self._assembly.cut(spec.micro)
        return [_with_cost(each, cost) for each in cut_batch(spec.convert, rows, names, decoded, bounds)]

    def _begin(self, work: Cause) -> None:
        """Records which part of making a batch begins; a consumer that waits now waits for this part."""
        with self._changed:
            self._work = work
            self._awaits_here()

    def _decode(
        self, on_device: DeviceDecoding, rows: StepRows, step: DeliveredStep
    ) -> tuple[StepRows, DeliveredStep, Mapping[str, Any]]:
        """Decodes the columns of a step that are decoded on the device of its batch; see `decode_step`."""
        self._begin("decode")
        try:
            table, step, made = decode_step(on_device, self._assembly, rows.table(), step)
        finally:
            self._work = "finish"
        self._observe(WorkDone(made.receipt, 0 if self._assembly.is_decoded else step.rows))
        return StepRows.of(table), step, made.columns


if hasattr(os, "register_at_fork"):  # else a child could wait at its end for locks of threads that it does not have
    os.register_at_fork(after_in_child=_alive.clear)


@atexit.register
def _close_all() -> None:
    """Ends running passes before the interpreter ends, because their threads must not outlive it or Ray."""
    for alive in _alive.valuerefs():  # a list: other threads may begin passes meanwhile
        if (feeder := alive()) is not None:
            feeder.close()


def _with_cost(batch: Any, cost: int | Mapping[str, int]) -> Any:
    return batch | {STEP_COST: cost} if isinstance(batch, dict) else batch
