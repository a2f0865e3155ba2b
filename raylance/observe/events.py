"""The events of one loader, as a list of bounded length for a long run."""

from typing import Any, Generic, TypeVar

from raylance.observe.clock import now_s

_MOST = 500  # newest events of each kind
_MOST_OLD_REPORTS = 250  # older reports, spread over the whole run: the HTML report draws a curve of them

Event = tuple[float, str, Any]
"""Seconds since 1970, kind, and content, JSON-able."""

T = TypeVar("T")


class Thinned(Generic[T]):
    """Keeps the newest items and every n-th older one; when there are too many of these, n doubles."""

    def __init__(self, recent: int, old: int) -> None:
        self._most_recent, self._most_old = recent, old
        self._recent: list[T] = []
        self._old: list[T] = []
        self._skipped, self._every = 0, 1  # every `_every`-th old item is kept

    def add(self, item: T) -> None:
        """Adds an item, which is the newest now."""
        self._recent.append(item)
        if len(self._recent) > self._most_recent:
            oldest = self._recent.pop(0)
            self._skipped += 1
            if self._most_old and self._skipped == self._every:
                self._old.append(oldest)
                self._skipped = 0
        if len(self._old) > self._most_old:
            self._old, self._every = self._old[::2], 2 * self._every

    def all(self) -> list[T]:
        """Returns the kept items, oldest first."""
        return [*self._old, *self._recent]


class EventLog:
    """Keeps the last events of each kind, so that reports do not push out faults, and a sample of older reports."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Thinned[Event]] = {}

    def add(self, kind: str, what: Any) -> None:
        """Adds an event at the present time."""
        kept = self._by_kind.setdefault(kind, Thinned(_MOST, _MOST_OLD_REPORTS if kind == "report" else 0))
        kept.add((now_s(), kind, what))

    def all(self) -> list[Event]:
        """Returns the kept events, oldest first."""
        found = [event for kept in list(self._by_kind.values()) for event in kept.all()]
        return sorted(found, key=lambda event: event[0])
