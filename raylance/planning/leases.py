"""The book of leases: rows that are handed out in the order of an epoch and done in any order, each counted once."""

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from raylance.errors import StateError
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.digest import Digest

Floats = npt.NDArray[np.float64]


class _Status(IntEnum):
    """What has become of a ticket."""

    WAITING = 0  # to be handed out, or handed out again
    OUT = 1
    DONE = 2
    GIVEN_UP = 3  # failed too often


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseProgress:
    """How far the rows of some leases are.

    Attributes:
        frontier: Number of the oldest ticket that is not done; all before it are.
        next: Number of tickets that were handed out at least once.
        done: Number of rows that are done, without those that were given up.
        out: Number of rows that somebody works on.
        waiting: Number of rows that were handed out, and wait to be handed out again.
        given_up: Number of rows that have failed too often.
        is_over: Whether all rows of all epochs are done or given up.
    """

    frontier: int
    next: int
    done: int
    out: int
    waiting: int
    given_up: int
    is_over: bool


class LeaseBook:
    """Which tickets are handed out, done, or have failed. Tickets are numbered from 0 in the order of the epochs.

    Only the tickets around the frontier are kept one by one: those that may be out, and as many before them, whose
    holders may repeat a call whose answer was lost.
    """

    def __init__(
        self, *, most_ahead: int, lease_s: float | None, most_attempts: int | None, rows: int | None = None
    ) -> None:
        """Begins with no ticket handed out; there are `rows` tickets, or any number."""
        self._most_ahead, self._lease_s, self._most_attempts, self.rows = most_ahead, lease_s, most_attempts, rows
        self.frontier, self.next, self._base, self._next_lease = 0, 0, 0, 0
        self.given_up: list[int] = []
        self.digest = Digest()  # of the rows that are done
        # Of the tickets from `_base` to `next`
        self._status = np.empty(0, dtype=np.uint8)
        self._holder = np.empty(0, dtype=np.int64)  # the lease that has the ticket, or has done it
        self._since = np.empty(0, dtype=np.float64)  # when it was handed out last
        self._failures = np.empty(0, dtype=np.int32)

    def lease(self, rows: int, now: float) -> tuple[Int64Array, int]:
        """Hands out up to `rows` tickets: those first that wait to be handed out again, the oldest first; then new
        ones, as long as the newest is less than `most_ahead` ahead of the oldest that is not done.

        Returns:
            The numbers of the tickets, int64, ascending; and the number of the lease.
        """
        self.expire(now)
        again = self._base + np.flatnonzero(self._status == _Status.WAITING)[:rows]
        last = self.frontier + self._most_ahead
        if self.rows is not None:
            last = min(last, self.rows)
        fresh = np.arange(self.next, max(self.next, min(last, self.next + rows - len(again))), dtype=np.int64)
        self._grow(len(fresh))
        numbers, lease = np.concatenate([again, fresh]), self._next_lease
        self._next_lease += 1
        at = numbers - self._base
        self._status[at], self._holder[at], self._since[at] = _Status.OUT, lease, now
        return numbers, lease

    def held_by(self, lease: int) -> Int64Array:
        """Returns the numbers of the tickets that a lease has out, int64, ascending."""
        return self._base + np.flatnonzero((self._status == _Status.OUT) & (self._holder == lease))

    def _grow(self, more: int) -> None:
        self.next += more
        self._status = np.append(self._status, np.zeros(more, dtype=np.uint8))
        self._holder = np.append(self._holder, np.full(more, -1, dtype=np.int64))
        self._since = np.append(self._since, np.zeros(more))
        self._failures = np.append(self._failures, np.zeros(more, dtype=np.int32))

    def expire(self, now: float) -> None:
        """Has tickets wait again whose leases are over."""
        if self._lease_s is not None:
            self._status[(self._status == _Status.OUT) & (self._since + self._lease_s <= now)] = _Status.WAITING

    def done(self, numbers: Int64Array, leases: Int64Array, offsets: Int64Array) -> BoolArray:
        """Counts tickets as done, each once: of several leases of one ticket, the first one counts, also if it was
        over. A lease that says it again gets the same answer.

        Args:
            numbers: Of the tickets, int64, (n,).
            leases: By which they were handed out, int64, (n,).
            offsets: The row offsets that came with them, int64, (n,).

        Returns:
            Whether each counts: False if it counts for another lease, or is not known, bool, (n,).
        """
        counts = np.zeros(len(numbers), dtype=np.bool_)
        known = np.flatnonzero((numbers >= self._base) & (numbers < self.next))
        at = numbers[known] - self._base
        # The first of several in one call
        new = known[(self._status[at] != _Status.DONE)]
        _, first = np.unique(numbers[new], return_index=True)
        new = new[first]
        places = numbers[new] - self._base
        self.given_up = [each for each in self.given_up if each not in numbers[new]]
        self._status[places], self._holder[places] = _Status.DONE, leases[new]
        self.digest += Digest.of(offsets[new])
        counts[known] = (self._status[at] == _Status.DONE) & (self._holder[at] == leases[known])
        self._advance()
        return counts

    def fail(self, numbers: Int64Array, leases: Int64Array) -> None:
        """Has tickets wait again that these leases hold; gives up those that have failed too often."""
        known = np.flatnonzero((numbers >= self._base) & (numbers < self.next))
        at = numbers[known] - self._base
        mine = np.unique(at[(self._status[at] == _Status.OUT) & (self._holder[at] == leases[known])])
        self._failures[mine] += 1
        self._status[mine] = _Status.WAITING
        if self._most_attempts is not None:
            over = mine[self._failures[mine] >= self._most_attempts]
            self._status[over] = _Status.GIVEN_UP
            self.given_up += (over + self._base).tolist()
            self._advance()

    def _advance(self) -> None:
        """Moves the frontier over tickets that are done, and forgets those far before it."""
        rest = self._status[self.frontier - self._base :]
        left = np.flatnonzero(rest < _Status.DONE)
        self.frontier += int(left[0]) if len(left) else len(rest)
        over = self.frontier - self._most_ahead - self._base
        if over > self._most_ahead:  # not each time, because it copies
            self._base += over
            self._status, self._holder = self._status[over:].copy(), self._holder[over:].copy()
            self._since, self._failures = self._since[over:].copy(), self._failures[over:].copy()

    def progress(self) -> LeaseProgress:
        """Returns the numbers of tickets by what has become of them."""
        counts = np.bincount(self._status[self.frontier - self._base :], minlength=4)
        return LeaseProgress(
            frontier=self.frontier,
            next=self.next,
            done=self.digest.rows,
            out=int(counts[_Status.OUT]),
            waiting=int(counts[_Status.WAITING]),
            given_up=len(self.given_up),
            is_over=self.rows is not None and self.frontier >= self.rows,
        )

    def done_after_frontier(self) -> Int64Array:
        """Returns the tickets after the frontier that are done, int64, ascending."""
        rest = self._status[self.frontier - self._base :]
        return self.frontier + np.flatnonzero(rest == _Status.DONE)

    def to_dict(self) -> dict[str, Any]:
        """Returns what is done, JSON-able, for a checkpoint: all else is to be handed out again."""
        done = np.zeros(self.next - self.frontier, dtype=np.bool_)
        done[self.done_after_frontier() - self.frontier] = True
        return {
            "frontier": self.frontier,
            "next": self.next,
            "done": _pack(np.packbits(done)),
            "given_up": self.given_up,
            "digest": dataclasses.astuple(self.digest),
            "next_lease": self._next_lease,
        }

    def check(self, saved: Mapping[str, Any]) -> tuple[int, BoolArray, list[int], Digest, int]:
        """Reads what `to_dict` has returned: the frontier; which tickets from there on are done, bool; which were given
        up; the digest; and the number of the next lease.

        Raises:
            StateError: If it is damaged.
        """
        try:
            frontier, after, next_lease = (_count(saved[name]) for name in ("frontier", "next", "next_lease"))
            bits = _unpack(saved["done"], np.uint8)
            if not frontier <= after <= frontier + 8 * len(bits):
                raise ValueError(f"frontier {frontier}, next {after}")
            done = np.unpackbits(bits, count=after - frontier).astype(np.bool_)
            given_up = [_count(each) for each in saved["given_up"]]
            if given_up and max(given_up) >= after:
                raise ValueError(f"ticket {max(given_up)} was given up")
            rows, hashed, padding = map(_count, saved["digest"])
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise StateError(f"the state of leases is damaged ({error!r}). Use an earlier checkpoint.") from error
        return frontier, done, given_up, Digest(rows=rows, hash=hashed, padding=padding), next_lease

    def load(self, saved: Mapping[str, Any]) -> None:
        """Returns to what was done in a checkpoint. Leases of before stay known by number, and their tickets count
        when they are done, unless another lease was first. Raises StateError if it is damaged.
        """
        frontier, done, self.given_up, self.digest, next_lease = self.check(saved)
        self.frontier = self._base = self.next = frontier
        self._next_lease = max(self._next_lease, next_lease)
        self._status, self._holder = np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.int64)
        self._since, self._failures = np.empty(0), np.empty(0, dtype=np.int32)
        self._grow(len(done))
        self._status[done] = _Status.DONE
        over = np.array([each - frontier for each in self.given_up if each >= frontier], dtype=np.int64)
        self._status[over] = _Status.GIVEN_UP

    def snapshot(self) -> dict[str, Any]:
        """Returns all that is known, JSON-able: also who holds what, and since when."""
        arrays = {name: _pack(getattr(self, f"_{name}")) for name in ("status", "holder", "since", "failures")}
        return {**self.to_dict(), "base": self._base, **arrays}

    def restore(self, snapshot: Mapping[str, Any], *, keeps_leases: bool) -> Self:
        """Returns to a snapshot. Without `keeps_leases`, what was out waits to be handed out again.

        Raises:
            StateError: If the snapshot is damaged.
        """
        self.load(snapshot)
        try:
            self._base = int(snapshot["base"])
            self._status = _unpack(snapshot["status"], np.uint8)
            self._holder, self._since = _unpack(snapshot["holder"], np.int64), _unpack(snapshot["since"], np.float64)
            self._failures = _unpack(snapshot["failures"], np.int32)
            sizes = {len(each) for each in (self._status, self._holder, self._since, self._failures)}
            if sizes != {self.next - self._base} or self._status.max(initial=0) > _Status.GIVEN_UP:
                raise ValueError(f"arrays of {sizes}")
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise StateError(f"the file of leases is damaged ({error!r}). Give another name=.") from error
        if not keeps_leases:
            self._status[self._status == _Status.OUT] = _Status.WAITING
        return self


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is not a count")
    return value


def _pack(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 1)).decode()


def _unpack(text: str, kind: Any) -> npt.NDArray[Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=kind).copy()


def read_book(content: bytes) -> dict[str, Any]:
    """Reads the content of a file of leases. Raises StateError if it is damaged."""
    try:
        found = json.loads(content)
        if not isinstance(found, dict) or not {"session", "loader", "book", "leases"} <= {*found}:
            raise TypeError("not what was written")
        if not isinstance(found["leases"], dict) or not isinstance(found["book"], dict):
            raise TypeError("its books are missing")
    except (TypeError, ValueError) as error:
        raise StateError(f"the file of leases is damaged ({error}). Give another name=, or remove it.") from error
    return found
