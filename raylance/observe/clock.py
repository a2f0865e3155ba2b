"""Owns the one clock by which all that is shown is measured; never waits, and never decides when a thing is done.

Callers say `clock.now()`, so that a test can put virtual time in its place for all of them at once.
"""

import time

_BEGUN = time.time() - time.monotonic()


def now() -> float:
    """Seconds of a clock that never goes back."""
    return time.monotonic()


def now_s() -> float:
    """Seconds since 1970, by a clock that does not jump while the process lives."""
    return _BEGUN + now()
