"""Owns whose turn it is to read: which reader has which chunk, and which chunk it reads ahead; never knows of calls, or
whether readers live.

A chunk is read by one reader, so that it is read once. They take turns in the order of delivery: while one hands out
the rows of its chunk, the others read theirs. All that it says of chunks to come is advice: whoever is asked for a
chunk reads it, and what is delivered does not depend on it.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

from raylance.planning.plan import Chunk, Plan

_NOBODY = -1


@dataclasses.dataclass(slots=True, eq=False)
class Turn:
    """A chunk, and the number of its reader."""

    chunk: Chunk
    reader: int = _NOBODY


class Turns:
    """The turns from the chunk that is awaited first to those that are read ahead. They outlive passes, as what is read
    ahead for the next epoch does.
    """

    def __init__(self) -> None:
        """No turn yet."""
        self.turns: deque[Turn] = deque()

    def begin_at(self, plan: Plan, chunk: Chunk) -> None:
        """Forgets the turns before a chunk, for which nobody will be asked any more: all, where it is none of them."""
        while self.turns and _end(plan, self.turns[0].chunk) != _end(plan, chunk):
            self.turns.popleft()

    def take(
        self, plan: Plan, rank: int, chunk: Chunk, readers: Sequence[int]
    ) -> tuple[int, Chunk | None, list[tuple[int, Chunk]]]:
        """Whose turn a chunk is.

        Args:
            plan: The plan of the chunk.
            rank: Whose rows are read.
            chunk: The chunk, of those from the one on that `begin_at` was told.
            readers: Numbers of those that run, at least one.

        Returns:
            The reader; the chunk that it reads next, if any; and readers that had nothing to read until now, each with
            the chunk that it can begin with.
        """
        place = self._place(plan, chunk)
        turn = self.turns[place]
        if turn.reader not in readers:
            turn.reader, _ = self._next_reader(readers)
        begin: list[tuple[int, Chunk]] = []
        for other in self._behind(plan, rank, place):
            if other.reader not in readers:
                other.reader, is_idle = self._next_reader(readers)
                if is_idle:
                    begin.append((other.reader, other.chunk))
            if other.reader == turn.reader:
                return turn.reader, other.chunk, begin
        return turn.reader, None, begin

    def _place(self, plan: Plan, chunk: Chunk) -> int:
        for place, turn in enumerate(self.turns):
            if _end(plan, turn.chunk) == _end(plan, chunk):
                return place
        self.turns.append(Turn(chunk))
        return len(self.turns) - 1

    def _behind(self, plan: Plan, rank: int, place: int) -> Iterator[Turn]:
        """The turns behind one, which go on with the next epoch's."""
        while True:
            place += 1
            if place == len(self.turns):
                chunk = plan.chunk_behind(self.turns[-1].chunk, rank)
                if chunk is None:
                    return
                self.turns.append(Turn(chunk))
            yield self.turns[place]

    def _next_reader(self, readers: Sequence[int]) -> tuple[int, bool]:
        """The reader with the fewest turns, of several the one whose last lies first; and whether it has none."""
        turns = {
            reader: [place for place, turn in enumerate(self.turns) if turn.reader == reader] for reader in readers
        }
        chosen = min(readers, key=lambda reader: (len(turns[reader]), turns[reader][-1:]))
        return chosen, not turns[chosen]


def _end(plan: Plan, chunk: Chunk) -> tuple[int, int]:
    """What a chunk has in common with the rest of it, from where a pass goes on in its middle."""
    return chunk.epoch, chunk.position + chunk.steps * plan.stride
