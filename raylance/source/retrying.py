"""Owns how what fails in storage is tried again: which failures, how often, and until when; never reads by itself."""

import logging
from collections.abc import Callable
from typing import TypeVar

import tenacity

from raylance.source.lance_errors import Failure, failure_of, readable_text

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPENING_S = 60.0  # where nobody sets how long; as `Options.read_timeout_s`
_LONGEST_PAUSE_S = 10.0
_OPENING_ATTEMPTS = 2  # at the least: a long scan that fails at its end has had no second chance by then


def retrying(retry_s: float, *, missing: bool, attempts: int = 1) -> tenacity.Retrying:
    """Tries again what fails in a way that may pass, with growing random pauses, for about so many seconds.

    Args:
        retry_s: Seconds since the first attempt began, after which no other one begins.
        missing: Whether what is missing counts, too: it does where it was there before, but a wrong path must not be
            waited for.
        attempts: Attempts at the least, however long they take.
    """
    waited_for = (Failure.PASSING, Failure.MISSING) if missing else (Failure.PASSING,)

    def warn(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        pause_s = state.next_action.sleep if state.next_action is not None else 0.0
        said = "" if error is None else readable_text(error.__cause__ or error)
        logger.warning("the storage failed, and is asked again in %.1f s: %s", pause_s, said)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: failure_of(error) in waited_for),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=min(_LONGEST_PAUSE_S, max(retry_s, 0.1) / 4)),
        stop=tenacity.stop_all(tenacity.stop_after_delay(retry_s), tenacity.stop_after_attempt(attempts)),
        before_sleep=warn,
        reraise=True,
    )


def patiently(ask: Callable[[], T]) -> T:
    """What is asked at an opening: a storage that fails is asked again, and what is missing is an error at once."""
    return retrying(OPENING_S, missing=False, attempts=_OPENING_ATTEMPTS)(ask)
