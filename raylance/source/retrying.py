"""Repeats calls after storage failures: after which ones, how often and how long."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import tenacity

from raylance.source.lance_errors import Failure, asked_pause_s, failure_of, readable_text
from raylance.source.limits import within

logger = logging.getLogger(__name__)

T = TypeVar("T")
Wanted = Callable[[], bool]  # whether somebody still waits for the result; once False, it stays False

OPENING_S = 60.0  # for opening a dataset, which has no option; equal to the default of `Options.read_timeout_s`
_LONGEST_PAUSE_S = 10.0
_LONGEST_PAUSE_MISSING_S = 1.0  # a request for a missing file costs the storage little
_OPENING_ATTEMPTS = 2  # least number: a long scan may fail at its end, when the time for retries is already over
_LEAST_ANSWER_S = 5.0  # least time limit for an answer: a storage that works may need this long
_LEAST_ANSWER_AGAIN_S = 3.0  # least time limit for an answer after a failure


@dataclasses.dataclass(slots=True)
class Outage:
    """A period in which the storage gives no answer, or only failures."""

    # Time of the last answer or, if there was none, of the first attempt; by `time.monotonic`
    since_s: float = dataclasses.field(default_factory=time.monotonic)
    attempts: int = 0  # number of attempts since then
    until_s: float = float("-inf")  # when a read gave up, by the same clock; -inf: none did

    def __str__(self) -> str:
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        return f"tried {times} in {time.monotonic() - self.since_s:.0f} s"


def always() -> bool:
    """Returns True: the result is wanted however long it takes."""
    return True


def answer_limit_s(patience_s: float, *, again: bool) -> float:
    """Returns the seconds within which the storage must answer one attempt: `patience_s`, which the caller waits in
    all, or a quarter of it after a failure (`again`); at least 5 s, or 3 s after a failure.
    """
    return max(patience_s / 4, _LEAST_ANSWER_AGAIN_S) if again else max(patience_s, _LEAST_ANSWER_S)


def retrying(
    retry_s: float,
    *,
    missing: bool,
    attempts: int = 1,
    outage: Outage | None = None,
    is_wanted: Wanted = always,
) -> Iterator[tenacity.AttemptManager]:
    """Yields attempts, each for a `with`, after failures that may pass, with random pauses that grow; the last attempt
    raises its failure.

    Args:
        retry_s: Seconds from the begin of the outage, after which no further attempt begins.
        missing: Whether a missing file, which was there before and may come back, is such a failure.
        attempts: Least number of attempts, however long they take.
        outage: The outage to which the attempts belong, which counts them; None begins a new outage.
        is_wanted: Whether somebody still waits for the result; if not, no further attempt begins.
    """
    outage = outage or Outage()
    waited_for = (Failure.PASSING, Failure.MISSING) if missing else (Failure.PASSING,)
    longest_s = max(retry_s, 0.1) / 4
    pauses = {
        failure: tenacity.wait_random_exponential(multiplier=0.2, max=min(most_s, longest_s))
        for failure, most_s in ((Failure.PASSING, _LONGEST_PAUSE_S), (Failure.MISSING, _LONGEST_PAUSE_MISSING_S))
    }

    def count(_: tenacity.RetryCallState) -> None:
        outage.attempts += 1

    def is_over(state: tenacity.RetryCallState) -> bool:
        is_late = time.monotonic() - outage.since_s >= retry_s and state.attempt_number >= attempts
        return is_late or not is_wanted()

    def warn(state: tenacity.RetryCallState) -> None:
        error = _error_of(state)
        pause_s = state.next_action.sleep if state.next_action is not None else 0.0
        cause = "" if error is None else readable_text(error.__cause__ or error)
        asked_s = 0.0 if error is None else asked_pause_s(error)
        asks = f" It asks to wait {asked_s:.0f} s." if asked_s else ""
        logger.warning("the storage failed (%s).%s The next attempt begins in %.1f s.", cause, asks, pause_s)

    def pause(state: tenacity.RetryCallState) -> float:
        error = _error_of(state)
        if error is None:
            return pauses[Failure.PASSING](state)
        left_s = retry_s - (time.monotonic() - outage.since_s)
        own_s = pauses[failure_of(error) or Failure.PASSING](state)
        return max(own_s, min(asked_pause_s(error), left_s))  # the last attempt comes when the time is over

    retrier = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: failure_of(error) in waited_for),
        wait=pause,
        stop=is_over,
        before=count,
        before_sleep=warn,
        reraise=True,
    )
    try:
        yield from retrier
    finally:
        retrier.iter_state.reset()  # it refers to itself, and would keep all that the functions refer to


def _error_of(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


def patiently(ask: Callable[[], T], progress: Callable[[], object] = lambda: None) -> T:
    """Returns the result of `ask`, a call into Lance; repeats it for about `OPENING_S` if the storage fails, but not if
    a file is missing. Raises TimeoutError if the storage did not answer in time, and `progress` did not change.
    """
    outage = Outage()
    for attempt in retrying(OPENING_S, missing=False, attempts=_OPENING_ATTEMPTS, outage=outage):
        with attempt:
            return within(answer_limit_s(OPENING_S, again=outage.attempts > 1), ask, progress=progress)
    raise RuntimeError("the attempts ended without a result and without a failure")
