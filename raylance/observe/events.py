"""Owns the events of one loader, as many as are kept; never what they mean."""

import time
from typing import Any

from raylance.observe import clock

_MOST = 500  # of a kind
_MOST_OLD_REPORTS = 250  # besides, spread over all of the run: reports make a curve
_BEGUN = time.time() - time.monotonic()

Event = tuple[float, str, Any]
"""Seconds since 1970, kind, and what happened, JSON-able."""


def now_s() -> float:
    """Seconds since 1970, by a clock that does not jump while the process lives."""
    return _BEGUN + clock.now()


class EventLog:
    """The last events of each kind, and some of all reports.

    Each kind has room of its own: the reports of a long run must not push out the faults that it survived.
    """

    def __init__(self) -> None:
        self._by_kind: dict[str, list[Event]] = {}
        self._old_reports: list[Event] = []
        self._skipped, self._every = 0, 1  # of old reports, every so many is kept

    def add(self, kind: str, what: Any) -> None:
        """Keeps an event of now."""
        kept = self._by_kind.setdefault(kind, [])
        kept.append((now_s(), kind, what))
        if len(kept) > _MOST:
            oldest = kept.pop(0)
            if kind == "report":
                self._keep_report(oldest)

    def _keep_report(self, report: Event) -> None:
        self._skipped += 1
        if self._skipped == self._every:
            self._old_reports.append(report)
            self._skipped = 0
        if len(self._old_reports) > _MOST_OLD_REPORTS:
            self._old_reports, self._every = self._old_reports[::2], 2 * self._every

    def all(self) -> list[Event]:
        """All that are kept, oldest first."""
        lists = [self._old_reports, *self._by_kind.values()]
        return sorted((event for kept in lists for event in list(kept)), key=lambda event: event[0])
