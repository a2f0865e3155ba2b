"""The one clock of all figures: callers write `clock.now()`, so that a test can replace it by virtual time."""

import time

_BEGUN = time.time() - time.monotonic()


def now() -> float:
    """Returns the seconds of a clock that never goes back."""
    return time.monotonic()


def now_s() -> float:
    """Returns the seconds since 1970, by a clock that does not jump while the process lives."""
    return since_1970_s(now())


def since_1970_s(moment: float) -> float:
    """Converts seconds of `now` to seconds since 1970."""
    return _BEGUN + moment
