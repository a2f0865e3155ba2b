"""Owns the one clock that measures all figures shown to users; never waits, and never decides when work is done.

Callers say `clock.now()`, so that a test can replace the clock by virtual time for all of them at once.
"""

import time

_BEGUN = time.time() - time.monotonic()


def now() -> float:
    """Seconds of a clock that never goes back."""
    return time.monotonic()


def now_s() -> float:
    """Seconds since 1970, by a clock that does not jump while the process lives."""
    return _BEGUN + now()
