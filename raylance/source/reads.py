"""Calls into the storage of one pinned dataset: several at once, with time limits, repeated while the storage fails."""

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import lance

from raylance.errors import DatasetError
from raylance.source.lance_errors import LANCE_ERRORS, Failure, failure_of, readable_text
from raylance.source.limits import Calls, requests_of, result_of, within
from raylance.source.retrying import Outage, Wanted, always, answer_limit_s, retrying
from raylance.source.version import Source, VersionCheck

P = TypeVar("P")
T = TypeVar("T")

_QUEUED = 2  # pieces that wait for a thread, so that no thread waits for the caller, which takes results in order


class Reads:
    """Calls into one pinned dataset. It is opened with the first call, and again before a call is repeated; its version
    is checked from time to time while calls succeed. Several threads may use one object at once.
    """

    def __init__(
        self, pinned: Source, *, at_once: int, retry_s: float, missing: bool, dataset: lance.LanceDataset | None = None
    ) -> None:
        """Opens nothing yet.

        Args:
            pinned: The version that is opened.
            at_once: Number of calls that run at once.
            retry_s: Seconds for which a call is repeated if the storage fails, and which one attempt may take without
                an answer. For `retry_s` after a call gave up, each call gets only one attempt, with less time: else
                each one would wait for the same outage in full.
            missing: Whether a call is also repeated if a file is missing, because the file was there and may come back.
            dataset: The open dataset; None if the first call must open it.
        """
        self.pinned, self.at_once = pinned, at_once
        self._retry_s, self._missing, self._dataset = retry_s, missing, dataset
        self._gave_up = Outage()  # when a call last gave up
        self._is_closed = False
        limit_s = answer_limit_s(retry_s, again=False)
        self._check = VersionCheck(functools.partial(within, limit_s, pinned.check, limit_s))
        self._calls = Calls(at_once, "read")
        self._opening = threading.Lock()

    def run(
        self,
        pieces: Iterator[P],
        make: Callable[[lance.LanceDataset, P], T | None],
        add: Callable[[T], bool],
        name: Callable[[Sequence[P]], str],
        is_wanted: Wanted = always,
    ) -> None:
        """Makes a result of each piece of work, several at once.

        Args:
            pieces: The pieces.
            make: Makes a result with the open dataset; None ends the run. It may run in several threads, and again with
                the same piece.
            add: Takes results in order, in the calling thread; returns whether more may follow.
            name: Names pieces in errors, such as "rows 0 to 9".
            is_wanted: Whether results are still wanted. If not, none is added, no failure is raised, and calls that
                have not begun may never begin. Any thread may call it.

        Raises:
            DatasetError: If the storage failed for too long, or cannot serve the pieces at all. The results before have
                been passed to `add`.
        """
        lasts = time.monotonic() - self._gave_up.until_s < self._retry_s  # whether a call gave up lately
        outage, retry_s = (self._gave_up, 0.0) if lasts else (Outage(), self._retry_s)
        dataset: lance.LanceDataset | None = None
        failed = False
        begun = deque(itertools.islice(pieces, 1))  # pieces whose results were not added yet
        try:
            for attempt in retrying(
                retry_s, missing=self._missing, outage=outage, is_wanted=lambda: not self._is_closed and is_wanted()
            ):
                with attempt:
                    limit_s = answer_limit_s(self._retry_s, again=lasts or failed)
                    failed = True  # unless a result comes
                    dataset = self._open(dataset, limit_s)
                    for made in self._made(dataset, begun, pieces, functools.partial(make, dataset), limit_s):
                        if made is None or not add(made):
                            return
                        failed = False
                        if not lasts:
                            outage.since_s, outage.attempts = time.monotonic(), 1
        except (DatasetError, *LANCE_ERRORS) as error:
            if not is_wanted():  # then a failure says nothing about rows that others want
                return
            if self._dataset is dataset:
                self._dataset = None  # the next call opens it again
            failure = failure_of(error)
            what = f"{name(begun)} of {self.pinned.uri!r}, version {self.pinned.version}, cannot be read"
            cause: Exception = error
            if failure is Failure.PASSING or (self._missing and failure is Failure.MISSING):
                raised = DatasetError(f"{what} ({readable_text(error)}; {outage}). {self._give_up(outage)}")
            else:
                cause = self._why_missing(error) if failure is Failure.MISSING else error
                raised = DatasetError(f"{what} ({readable_text(cause)}). The epoch stops here.")
            raised.is_of_storage = failure is not None
            raise raised from cause

    def close(self) -> None:
        """Lets calls in other threads raise their next failure, and try nothing again: nobody waits for them."""
        self._is_closed = True

    def _give_up(self, outage: Outage) -> str:
        """Records that a call has given up; returns the advice for the user."""
        outage.until_s = time.monotonic()
        self._gave_up = outage
        if not self._missing:
            return "Nothing more is read. Try again when the storage is back."
        return (
            "The epoch stops here. When the storage is back, continue from the last checkpoint, or iterate again; "
            "read_timeout_s sets how long to wait for it."
        )

    def _open(self, failed: lance.LanceDataset | None, limit_s: float) -> lance.LanceDataset:
        """Returns the dataset to read. If none is open, or the open one is `failed`, one thread opens it."""
        with self._opening:
            dataset = self._dataset
            if dataset is None or dataset is failed:
                self._dataset = None  # if this opening fails, the next call opens it again
                self._dataset = dataset = within(limit_s, self._open_once)
                self._check.postpone()
                return dataset
        self._check.run_if_due()
        return dataset

    def _open_once(self) -> lance.LanceDataset:
        return self.pinned.open_once(answer_limit_s(self._retry_s, again=False))

    def _why_missing(self, error: Exception) -> Exception:
        """Returns the reason for a missing file: the version is gone or another dataset has its place; else `error`."""
        try:
            within(answer_limit_s(self._retry_s, again=True), self._open_once)
        except (DatasetError, TimeoutError) as found:
            return found if isinstance(found, DatasetError) else error
        return error

    def _made(
        self,
        dataset: lance.LanceDataset,
        begun: deque[P],
        pieces: Iterator[P],
        make: Callable[[P], T],
        limit_s: float,
    ) -> Iterator[T]:
        """Makes results of the pieces in `begun`, then of further ones, several at once. Yields them in order."""
        calls, progress = self._calls, functools.partial(requests_of, dataset)
        running: deque[Future[T]] = deque()
        again = iter(tuple(begun))
        try:
            while True:
                while len(running) < self.at_once + _QUEUED:
                    piece = next(again, None)
                    if piece is None:
                        if (piece := next(pieces, None)) is None:
                            break
                        begun.append(piece)
                    running.append(calls.submit(make, piece))
                if not running:
                    return
                yield result_of(running.popleft(), limit_s, progress)
                begun.popleft()
        except TimeoutError:
            if self._calls is calls:  # calls that hang keep the old threads
                self._calls = Calls(self.at_once, "read")
            limit_s = 0.0
            raise
        finally:
            # Also after an error. Calls that have not begun never do, and only hung ones outlive this run.
            wait([future for future in running if not future.cancel()], min(limit_s, threading.TIMEOUT_MAX))
