"""The steps of a loader as spans of OpenTelemetry, on the side of the trainer."""

import contextlib
import importlib.util
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from raylance.errors import ConfigError
from raylance.observe import clock
from raylance.observe.observations import Cause

_NAMES: dict[Cause, str] = {"start": "start", "read": "read", "decode": "decode", "finish": "finish", "there": "read"}


def check_traces() -> None:
    """Raises ConfigError if OpenTelemetry's API is not installed."""
    if importlib.util.find_spec("opentelemetry.trace") is None:
        raise ConfigError(
            "traces=True, and OpenTelemetry is not installed, so there would be no spans. Install it: pip install "
            "raylance[otel], and set up a provider of spans."
        )


class StepSpans:
    """One span for each step, `raylance.step`: from when the consumer asks for a batch until it asks for the next one.

    Its child `raylance.wait` is the wait for the batch. Children of that say for what: `raylance.start` (helpers),
    `raylance.read`, `raylance.decode` and `raylance.finish` (bringing rows here, and making the batch). Spans that the
    user's functions open in this process are children of the step in whose time they run.
    """

    def __init__(self, attributes: Mapping[str, str | int]) -> None:
        """`attributes` are those of each step."""
        from opentelemetry import context, trace

        self._trace, self._tracer, self._context = trace, trace.get_tracer("raylance"), context
        self._within: Any = None  # the last step as a context
        self._attributes = {f"raylance.{name}": value for name, value in attributes.items()}
        self._lock = threading.Lock()  # the feeder reports what a wait is for
        self._step: Any = None
        self._wait: Any = None

    def begin(self, now: float) -> None:
        """Begins a step with its wait. It is a child of the span that the consumer is in."""
        with self._lock:
            self._step = self._tracer.start_span("raylance.step", start_time=_ns(now), attributes=self._attributes)
            self._wait = self._child("raylance.wait", self._step, now)
            self._within = self._trace.set_span_in_context(self._step)

    def waited(self, cause: Cause, begin: float, end: float) -> None:
        """Adds what a part of the wait was for."""
        with self._lock:
            if self._wait is not None and end > begin:
                self._child(f"raylance.{_NAMES[cause]}", self._wait, begin).end(_ns(end))

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """See `Observer.in_step`. Batches are made ahead, so the present step may not be that of the batch."""
        token = self._context.attach(self._within)
        try:
            yield
        finally:
            self._context.detach(token)

    def end_wait(self, now: float) -> None:
        """Ends the wait of the step."""
        with self._lock:
            wait, self._wait = self._wait, None
            if wait is not None:
                wait.end(_ns(now))

    def hand_out(self, attributes: Mapping[str, int]) -> None:
        """Adds attributes to the step whose batch is handed out."""
        if self._step is not None:
            self._step.set_attributes({f"raylance.{name}": value for name, value in attributes.items()})

    def end(self, now: float) -> None:
        """Ends the step."""
        step, self._step = self._step, None
        if step is not None:
            step.end(_ns(now))

    def _child(self, name: str, parent: Any, now: float) -> Any:
        within = self._trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context=within, start_time=_ns(now))


def _ns(now: float) -> int:
    return int(1e9 * clock.since_1970_s(now))
