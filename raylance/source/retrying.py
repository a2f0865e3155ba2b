"""Owns the retries after storage failures: which failures, how often, and how long; never reads by itself."""

import logging
from collections.abc import Callable
from typing import TypeVar

import tenacity

from raylance.source.lance_errors import Failure, failure_of, readable_text

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPENING_S = 60.0  # for openings, which have no option; as the default of `Options.read_timeout_s`
_LONGEST_PAUSE_S = 10.0
_OPENING_ATTEMPTS = 2  # at least: a long scan may fail at its end, when its time is over


def retrying(retry_s: float, *, missing: bool, attempts: int = 1) -> tenacity.Retrying:
    """Makes attempts, with growing random pauses, while they fail by failures that may pass.

    Args:
        retry_s: Seconds after the start of the first attempt in which further attempts begin.
        missing: Whether a missing file is such a failure: a file that was there before may come back, but a wrong path
            must be an error at once.
        attempts: Least number of attempts, however long they take.
    """
    waited_for = (Failure.PASSING, Failure.MISSING) if missing else (Failure.PASSING,)

    def warn(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        pause_s = state.next_action.sleep if state.next_action is not None else 0.0
        cause = "" if error is None else readable_text(error.__cause__ or error)
        logger.warning("the storage failed (%s). The next attempt begins in %.1f s.", cause, pause_s)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: failure_of(error) in waited_for),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=min(_LONGEST_PAUSE_S, max(retry_s, 0.1) / 4)),
        stop=tenacity.stop_all(tenacity.stop_after_delay(retry_s), tenacity.stop_after_attempt(attempts)),
        before_sleep=warn,
        reraise=True,
    )


def patiently(ask: Callable[[], T]) -> T:
    """Calls `ask`, and again while the storage fails; a missing file is an error at once. For openings."""
    return retrying(OPENING_S, missing=False, attempts=_OPENING_ATTEMPTS)(ask)
