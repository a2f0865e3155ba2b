"""A digest of the rows handed out: a count and a hash that add up over ranks, by intervals of positions."""

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from raylance.orders.permutation import BoolArray, Int64Array, mix64
from raylance.planning.shard_context import RankAndSize

_MODULUS = 2**64
_MOST = 1024  # most intervals of a ledger
_RECENT = 256  # the last intervals, which are not joined: a run resumes from one of its last checkpoints

Place = tuple[int, int]
"""(epoch, position). The end of an epoch is the start of the next one, as the loader counts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A multiset of rows, as a count and a hash that does not depend on their order.

    The hash is the sum modulo 2**64 of `mix64` of each row offset. In a mixture, the high bits of an offset hold the
    number of its dataset. For packed documents, the sequence's number takes the place of the offset. Equal multisets
    have equal digests. Different ones have the same digest with a probability of 2**-64.
    """

    rows: int = 0  # without padding. A masked row was delivered, so it counts
    hash: int = 0  # hash of the rows without padding
    padding: int = 0  # number of rows that only fill up a last step

    @classmethod
    def of(cls, offsets: Int64Array, real: BoolArray | None = None) -> Self:
        """Returns the digest of some rows. Rows that are not `real` count as padding only; None if all are real."""
        is_real = np.ones(len(offsets), dtype=np.bool_) if real is None else real
        [found] = cls.of_steps(offsets, is_real, [len(offsets)])
        return found

    @classmethod
    def of_steps(cls, offsets: Int64Array, real: BoolArray, sizes: Sequence[int]) -> list[Self]:
        """Returns the digests of steps of these sizes, whose rows follow one another in `offsets` and `real`."""
        words = np.where(real, mix64(offsets.astype(np.uint64)), np.uint64(0))
        ends = np.cumsum(sizes)
        hashes = np.append(np.uint64(0), np.cumsum(words, dtype=np.uint64))[np.append(0, ends)]
        counts = np.append(0, np.cumsum(real))[np.append(0, ends)]
        return [
            cls(rows=count, hash=hashed, padding=size - count)
            for count, hashed, size in zip(np.diff(counts).tolist(), np.diff(hashes).tolist(), sizes, strict=True)
        ]

    def __add__(self, other: "Digest") -> "Digest":
        return Digest(
            rows=self.rows + other.rows,
            hash=(self.hash + other.hash) % _MODULUS,
            padding=self.padding + other.padding,
        )

    def differs(self, other: "Digest") -> bool:
        """Whether the rows differ. Padding does not count."""
        return (self.rows, self.hash) != (other.rows, other.hash)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The rows that one rank was handed between two positions of an epoch."""

    # How often the loader jumped between its first interval and this one. Intervals with the same number follow one
    # another without a gap.
    jump: int
    epoch: int
    low: int  # position before its first step
    high: int  # position after its last step
    is_last: bool  # whether the epoch ends at `high`; the plan leaves out any rows after that
    digest: Digest
    # Data-parallel rank and size. None for the empty interval of `Ledger.move`, and in records of an older raylance,
    # whose intervals all belong to one share.
    share: RankAndSize | None = None
    is_skipped: bool = False  # whether all ranks passed over it on purpose, so that no row of it was handed out

    @property
    def begin(self) -> Place:
        """The (epoch, position) before its first step."""
        return self.epoch, self.low

    @property
    def end(self) -> Place:
        """The (epoch, position) after its last step: the start of the next epoch if this epoch ends there."""
        return (self.epoch + 1, 0) if self.is_last else (self.epoch, self.high)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two intervals have in common that may be joined."""
        return self.epoch, self.share, self.is_skipped

    def joined(self, after: "Interval") -> "Interval":
        """Returns this interval joined with the interval of its kind that follows it."""
        return dataclasses.replace(after, jump=self.jump, low=self.low, digest=self.digest + after.digest)

    def to_list(self) -> list[int]:
        """Returns JSON-able values that `from_list` reads."""
        numbers = (self.jump, self.epoch, self.low, self.high, int(self.is_last))
        return [*numbers, *dataclasses.astuple(self.digest), *(self.share or ()), *[1] * self.is_skipped]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Self:
        """Reads the values of `to_list`. Raises ValueError if the values are not an interval."""
        if len(values) not in (8, 9, 10, 11) or not all(type(value) is int and value >= 0 for value in values):
            raise ValueError(f"{values!r} is not an interval of a digest")
        jump, epoch, low, high, is_last, rows, hashed, padding, *share = values
        digest = Digest(rows=rows, hash=hashed, padding=padding)
        is_skipped = bool(len(share) % 2 and share.pop())
        pair = (share[0], share[1]) if share else None
        return cls(
            jump=jump,
            epoch=epoch,
            low=low,
            high=high,
            is_last=bool(is_last),
            digest=digest,
            share=pair,
            is_skipped=is_skipped,
        )


class Ledger:
    """The intervals that one loader has handed out since it was made, in bounded memory.

    A ledger is cut at each place, (epoch, position), from which a run may resume: at each report and each end of an
    epoch. So the rows delivered before such a place are known. A ledger keeps only the last cuts. Before them, each
    epoch is one interval, and the oldest epochs are forgotten.
    """

    def __init__(self) -> None:
        self.name = ""  # unique: a loader that was sent to several processes has a ledger in each
        self._intervals: list[Interval] = []
        # By `Interval.jump`, the place of the state that was loaded before it. Other jumps rolled no row back.
        self.restored: dict[int, Place] = {}
        self.forgotten: Place | None = None  # the furthest end of an interval that was dropped to save memory
        self.last = Digest()  # the rows of the last step
        self._is_cut = True
        self._loaded: Place | None = None
        # Values from before the last step: the interval that this step joined, `_is_cut` and `_loaded`.
        self._before: tuple[Interval | None, bool, Place | None] | None = None

    @property
    def intervals(self) -> list[Interval]:
        """The kept intervals, in the order of time."""
        return list(self._intervals)

    def cut(self) -> None:
        """Ends the interval. The next step begins another one."""
        self._is_cut = True

    def load(self, epoch: int, position: int) -> None:
        """Records that a state was loaded. Rows that were handed out after its place are rolled back."""
        self._loaded = epoch, position

    def move(self, epoch: int) -> None:
        """Records a jump by hand to the start of an epoch. A state may be saved there before the first step."""
        if self._intervals and (self._loaded or self._intervals[-1].end) != (epoch, 0):
            self.add(epoch, 0, 0, Digest(), is_last=False)

    def join(self, known: Mapping[str, Any] | None = None) -> None:
        """Records that the loader moved to the place of other ranks, by `seek` or by taking over their model: they were
        handed the rows before it, and no row was rolled back. `known` is the `to_dict` of the ledger of one of them,
        whose intervals replace the own ones. Raises ValueError if `known` is damaged.
        """
        if known is not None:
            self.name = self.name or uuid.uuid4().hex  # a record may be written before the first step
            self._intervals = [Interval.from_list(values) for values in known["intervals"]]
            self.restored = {jump: (epoch, position) for jump, epoch, position in known["restored"]}
            forgotten = known["forgotten"]
            self.forgotten = None if forgotten is None else (forgotten[0], forgotten[1])
        self._loaded, self._is_cut, self._before = None, True, None

    def forget(self) -> None:
        """Forgets what was handed out, because it was of another plan than what follows."""
        places = [interval.end for interval in self._intervals]
        self.forgotten = max([*places, *filter(None, [self.forgotten])], default=None)
        self.name, self._intervals, self.restored = "", [], {}
        self._is_cut, self._before = True, None

    def skip(self, epoch: int, low: int, high: int, *, is_last: bool, share: RankAndSize) -> None:
        """Records that all ranks pass over the positions from `low` to `high` on purpose."""
        self._is_cut = True
        self.add(epoch, low, high, Digest(), is_last=is_last, share=share, is_skipped=True)
        self._is_cut, self._before = True, None

    def add(
        self,
        epoch: int,
        low: int,
        high: int,
        digest: Digest,
        *,
        is_last: bool,
        share: RankAndSize | None = None,
        is_skipped: bool = False,
    ) -> None:
        """Adds a step that was handed out, from position `low` to `high`, with its rows on this rank, and its share."""
        cut, loaded = self._is_cut, self._loaded
        self.name, self.last = self.name or uuid.uuid4().hex, digest
        last = self._intervals[-1] if self._intervals else None
        follows = last is not None and last.end == (epoch, low) and self._loaded in (None, last.end)
        jump = 0 if last is None else last.jump + (not follows)
        if self._loaded is not None and not follows:
            self.restored[jump] = self._loaded
        self._loaded = None
        is_alike = last is not None and last.kind == (epoch, share, is_skipped)
        joined = last if follows and is_alike and not cut else None  # most steps join the interval before them
        if joined is not None:
            low, digest = joined.low, joined.digest + digest
        interval = Interval(
            jump=jump,
            epoch=epoch,
            low=low,
            high=high,
            is_last=is_last,
            digest=digest,
            share=share,
            is_skipped=is_skipped,
        )
        if joined is not None:
            self._intervals[-1], self._before = interval, (joined, cut, loaded)
            return
        self._intervals.append(interval)
        self._before = (None, cut, loaded)
        self._is_cut = False
        if len(self._intervals) > _MOST:
            gone, self._intervals = fold(self._intervals, _RECENT, _MOST // 2)
            if gone:
                self.forgotten = max(self.forgotten or (0, 0), *(interval.end for interval in gone))

    def take_back(self) -> None:
        """Removes the last step, which was handed out but does not count. Only one step can be removed."""
        if self._before is None:
            return
        joined, self._is_cut, self._loaded = self._before
        step, self._before = self._intervals.pop(), None
        if joined is not None:
            self._intervals.append(joined)
        elif not self._intervals or self._intervals[-1].jump != step.jump:
            self.restored.pop(step.jump, None)

    def since(self, epoch: int, position: int) -> Digest | None:
        """Returns the digest of all rows handed out since a place. None if the loader jumped since then, if no interval
        begins there, if steps were skipped, or if this rank's share was not the whole epoch.
        """
        total = Digest()
        for interval in reversed(self._intervals):
            is_alone = interval.share in (None, (0, 1))
            if interval.jump != self._intervals[-1].jump or not is_alone or interval.is_skipped:
                return None
            total += interval.digest
            if interval.begin == (epoch, position):
                return total
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-able values for a record."""
        intervals = self.intervals
        kept = {interval.jump for interval in intervals}
        return {
            "ledger": self.name,
            "intervals": [interval.to_list() for interval in intervals],
            "restored": [[jump, *place] for jump, place in list(self.restored.items()) if jump in kept],
            "forgotten": self.forgotten,
        }


def fold(intervals: Sequence[Interval], recent: int, most: int) -> tuple[list[Interval], list[Interval]]:
    """Joins adjacent intervals of the same kind, but the `recent` last ones. Returns the intervals to
    forget, which are the oldest if the joined ones are more than `most`; and those to keep.
    """
    folded: list[Interval] = []
    for interval in intervals[:-recent]:
        last = folded[-1] if folded else None
        if last is not None and last.kind == interval.kind and last.end == interval.begin:
            folded[-1] = last.joined(interval)
        else:
            folded.append(interval)
    return folded[:-most], [*folded[-most:], *intervals[-recent:]]
