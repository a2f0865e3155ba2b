"""Owns whose turn it is to read: which reader has which chunk, and which chunk it reads ahead; never knows of calls, or
whether readers live.

A chunk is read by one reader, so that it is read once. They take turns in the order of delivery: while one hands out
the rows of its chunk, the others read theirs. All that it says of chunks to come is advice: whoever is asked for a
chunk reads it, and what is delivered does not depend on it.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from raylance.planning.plan import Chunk, Plan

_NOBODY = -1


@dataclasses.dataclass(slots=True, eq=False)
class ChunkAssignment:
    """A chunk, and the number of its reader."""

    chunk: Chunk
    reader: int = _NOBODY


class ReadSchedule:
    """The turns from the chunk that is awaited first to those that are read ahead. They outlive passes, as what is read
    ahead for the next epoch does.
    """

    def __init__(self) -> None:
        """No turn yet."""
        self.turns: deque[ChunkAssignment] = deque()

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
            turn.reader = self._next_reader(readers, place)
        idle = set(readers).difference(other.reader for other in self.turns)
        begin: list[tuple[int, Chunk]] = []
        following: Chunk | None = None
        for other in self._behind(plan, rank, place):
            if other.reader not in readers:
                other.reader = self._next_reader(readers, place)
            if other.reader in idle:
                idle.remove(other.reader)
                begin.append((other.reader, other.chunk))
            if other.reader == turn.reader and following is None:
                following = other.chunk
            if following is not None and not idle:
                break
        return turn.reader, following, begin

    def _place(self, plan: Plan, chunk: Chunk) -> int:
        for place, turn in enumerate(self.turns):
            if _end(plan, turn.chunk) == _end(plan, chunk):
                return place
        self.turns.append(ChunkAssignment(chunk))
        return len(self.turns) - 1

    def _behind(self, plan: Plan, rank: int, place: int) -> Iterator[ChunkAssignment]:
        """The turns behind one, which go on with the next epoch's."""
        while True:
            place += 1
            if place == len(self.turns):
                chunk = plan.chunk_behind(self.turns[-1].chunk, rank)
                if chunk is None:
                    return
                self.turns.append(ChunkAssignment(chunk))
            yield self.turns[place]

    def _next_reader(self, readers: Sequence[int], begin: int) -> int:
        """The reader with the fewest turns from a place on; of several, the one whose last comes first."""
        given = [turn.reader for turn in itertools.islice(self.turns, begin, None)]
        places = {reader: [place for place, other in enumerate(given) if other == reader] for reader in readers}
        return min(readers, key=lambda reader: (len(places[reader]), places[reader][-1:]))


def _end(plan: Plan, chunk: Chunk) -> tuple[int, int]:
    """What a chunk has in common with the rest of it, from where a pass goes on in its middle."""
    return chunk.epoch, chunk.position + chunk.steps * plan.stride
