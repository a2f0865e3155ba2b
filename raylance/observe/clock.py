"""Owns the one clock by which all that is shown is measured; never waits, and never decides when a thing is done.

Callers say `clock.now()`, so that a test can put virtual time in its place for all of them at once.
"""

import time


def now() -> float:
    """Seconds of a clock that never goes back."""
    return time.monotonic()
