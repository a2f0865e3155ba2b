"""Owns how events reach the feeder in this process, and by which clock; never what they mean."""

import queue
import time

from raylance.runtime.messages import Event


class Inbox:
    """What runtimes whose helpers answer into this process have in common."""

    def __init__(self) -> None:
        """Has no event yet."""
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def now(self) -> float:
        """See `Runtime.now`."""
        return time.monotonic()

    def post(self, event: Event) -> None:
        """See `Runtime.post`."""
        self._inbox.put(event)

    def next_event(self, timeout_s: float | None) -> Event | None:
        """See `Runtime.next_event`."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
