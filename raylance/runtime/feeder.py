"""Owns the thread between helpers and consumer: it waits, compares, collates and copies to the device, so that the
training thread takes finished batches; never decides which work is done where, never holds a loader's position.
"""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from raylance.batches.assembly import Assembly, Step
from raylance.batches.batches import BatchSpec
from raylance.batches.device import Sender
from raylance.batches.masking import MaskedRows
from raylance.dispatch.dispatcher import Dispatcher
from raylance.dispatch.messages import Command, Deliver, Event, GiveUp, Taken, Wake
from raylance.errors import HelperError, RaylanceError
from raylance.observe import Stats
from raylance.runtime.runtime import Runtime

_LOOK_S = 5.0  # between looks whether the thread still lives
FIRST_ROWS = 16  # of the first batch that are kept to be looked at,
_FIRST_BYTES = 16 << 20  # as far as they have no more together
_JOIN_S = 10.0  # that a closing consumer waits for user code in the thread to end

_alive: "weakref.WeakSet[Feeder]" = weakref.WeakSet()


class Feeder:
    """The batches of one pass, made by a thread of its own, a few ahead of the consumer."""

    def __init__(
        self, dispatcher: Dispatcher, runtime: Runtime, assembly: Assembly, stats: Stats, masked: MaskedRows
    ) -> None:
        """Starts the thread; until it has ended, nobody else may take the events of the runtime."""
        self._dispatcher, self._runtime, self._assembly, self._stats = dispatcher, runtime, assembly, stats
        self._masked = masked
        self._bound: BatchSpec | None = None
        self._sender: Sender | None = None
        dispatcher.is_wanted = False
        self._changed = threading.Condition()
        self._finished: deque[tuple[Any, Step]] = deque()  # batches to hand out
        self._taken: int | None = None
        self._error: BaseException | None = None
        self._has_ended = self._is_closed = self._is_awaited = False
        self._thread = threading.Thread(target=self._run, name="raylance-feeder", daemon=True)
        _alive.add(self)
        self._thread.start()

    # The consumer's side.

    def bind(self, bound: BatchSpec) -> None:
        """Has batches made: until then, only the rows of the first ones are brought here."""
        with self._changed:
            self._sender = None if bound.device is None else Sender(bound.device, bound.pin_memory)
            self._bound = bound
            self._changed.notify_all()
        self._runtime.post(Wake())

    @property
    def has_ended(self) -> bool:
        """Whether the runtime is free for another pass: what is left are batches to hand out."""
        return self._has_ended and not self._thread.is_alive()  # in a fork no thread lives, and this one has not ended

    def __iter__(self) -> Iterator[tuple[list[Any], Step]]:
        """Hands out batches with what is known of each; who takes them says how long they are awaited and kept.

        Each lies in a list, to be taken out of it: so that nobody but the consumer holds on to what it has let go.

        Raises:
            Exception: What ended the pass, behind the last good batch.
        """
        stats = self._stats
        while (found := self._take()) is not None:
            batch, step = found
            self._masked.add(step.rows, step.masked, stats)
            stats.batches += 1
            stats.rows += step.rows
            stats.nbytes += step.nbytes
            stats.masked_rows += len(step.masked)
            handed = [batch if self._sender is None else self._sender.receive(batch)]
            del found, batch
            yield handed, step

    def _take(self) -> tuple[Any, Step] | None:
        with self._changed:
            while not (self._finished or self._has_ended):
                if not self._is_awaited:
                    self._is_awaited = True
                    self._awaits_here()  # until the thread looks again, which may be making batches of what is here
                    self._runtime.post(Wake())
                self._changed.wait(_LOOK_S)
                if not self._thread.is_alive() and not self._has_ended:
                    raise RaylanceError(
                        "the thread that makes batches is not in this process: it was forked in the middle of a pass. "
                        "Begin another pass here, or start processes by spawn."
                    )
            if self._is_awaited:
                self._is_awaited = False
                self._stats.awaits(None, self._runtime.now())
            if self._finished:
                found = self._finished.popleft()
                self._stats.ready_batches = len(self._finished)
                self._taken = found[1].after
                self._changed.notify_all()
                self._runtime.post(Wake())
                return found
            error, self._error = self._error, None
        if isinstance(error, StopIteration):  # in a generator, Python makes another error of it
            where = "".join(f" {note}" for note in getattr(error, "__notes__", []))
            raise HelperError(
                f"StopIteration was raised{where}: a loop over batches would take it for the end of the epoch, which "
                "stops here. Mend what raised it: a next() without a default, say."
            ) from error
        if error is not None:
            raise error
        return None

    def stop(self) -> None:
        """Ends the pass: what is on its way comes to nobody."""
        with self._changed:
            self._is_closed = self._has_ended = True
            self._finished.clear()
            self._stats.ready_batches = 0
            self._changed.notify_all()
        self._runtime.post(Wake())

    def close(self) -> bool:
        """The same, and waits: tells whether the thread has ended, as it does unless user code hangs in it."""
        if self._is_closed and not self._thread.is_alive():
            return True  # a generator that the interpreter ends last closes once more, when the names below are gone
        self.stop()
        if self._thread is not threading.current_thread():  # the garbage collector runs anywhere
            self._thread.join(_JOIN_S)
        _alive.discard(self)
        return not self._thread.is_alive()

    def _awaits_here(self) -> None:
        """Notes that what the consumer waits for, if it does, is in this process; `_changed` is held."""
        if self._is_awaited:
            self._stats.awaits("finish" if self._stats.batches else "start", self._runtime.now())

    # The thread's side.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            error = self._pump()
        except BaseException as raised:  # whatever it is, it is the consumer's to hear
            error = raised
        finally:
            for command in self._dispatcher.close():
                self._runtime.do(command)
            with self._changed:
                self._error, self._has_ended = error, True
                self._changed.notify_all()

    def _pump(self) -> BaseException | None:
        """Carries events and commands to and fro until the pass is over; returns what ended it, if an error did."""
        commands = self._dispatcher.begin(self._runtime.now())
        while True:
            error = self._do(commands)
            while self._assembly and self._has_room(error is not None or self._dispatcher.is_over):
                if self._bound is not None:
                    self._finish(self._bound)
            if error is not None or (self._dispatcher.is_over and not self._assembly):
                return error
            event = self._next_event()
            if self._is_closed:
                self._dispatcher.is_awaited = False
                # Nothing more is decided; but the event may be about helpers, which outlive the pass
                self._do([*self._dispatcher.close(), *self._dispatcher.handle(event, self._runtime.now())])
                return None
            self._dispatcher.is_wanted, self._dispatcher.is_awaited = self._bound is not None, self._is_awaited
            commands = self._dispatcher.handle(event, self._runtime.now())
            del event  # it may hold tables, and the next one may take its time

    def _do(self, commands: list[Command]) -> BaseException | None:
        """Carries commands out, and keeps none: some hold tables."""
        while commands:
            command = commands.pop(0)
            if isinstance(command, Deliver):
                self._assembly.add(command.item, command.plain, command.decoded)
            elif isinstance(command, GiveUp):
                return command.error
            else:
                self._runtime.do(command)
        return None

    def _next_event(self) -> Event | None:
        with self._changed:
            taken, self._taken = self._taken, None
        if taken is not None:
            return Taken(taken)
        deadline = self._dispatcher.deadline()
        return self._runtime.next_event(None if deadline is None else max(0.0, deadline - self._runtime.now()))

    def _has_room(self, is_last: bool) -> bool:
        """Whether one more batch may be made; at the end of a pass, waits for the consumer."""
        with self._changed:
            while is_last and len(self._finished) >= self._room and not self._is_closed:
                self._changed.wait(_LOOK_S)
            return len(self._finished) < self._room and not self._is_closed

    @property
    def _room(self) -> int:
        return 0 if self._bound is None else max(1, self._bound.prefetch_batches)

    def _finish(self, bound: BatchSpec) -> None:
        table, step = self._assembly.next_step()
        with self._changed:
            self._awaits_here()
        if self._stats.first_rows is None:
            row_bytes = max(1, table.nbytes // max(1, table.num_rows))
            rows = min(FIRST_ROWS, table.num_rows, _FIRST_BYTES // row_bytes)
            self._stats.first_rows = table.take(np.arange(rows))  # a copy
        try:
            with self._stats.timed("collate_s"):
                batch = bound.convert(table.drop_columns(bound.hidden))
        except Exception as error:
            error.add_note(f"as a batch was made of {self._assembly.describe(table)}")
            raise
        if self._sender is not None:
            with self._stats.timed("transfer_s"):
                batch = self._sender.send(batch)
        with self._changed:
            if not self._is_closed:
                self._finished.append((batch, step))
                self._stats.ready_batches = len(self._finished)
                self._changed.notify_all()


@atexit.register
def _close_all() -> None:
    """Ends what is under way before the interpreter does: its threads must not outlive it, nor Ray."""
    for feeder in list(_alive):
        feeder.close()
