"""Owns the assignment of chunks to readers, also of chunks to read ahead; never knows calls, or which readers run.

Each chunk has one reader, so that it is read once. Readers take turns in the order of delivery: while one reader
gathers rows from its chunk, the others read theirs. For later chunks the schedule is only advice: a reader reads any
chunk that it is asked for, and the rows delivered do not depend on the schedule.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from raylance.planning.plan import Chunk, Plan

_NO_READER = -1


@dataclasses.dataclass(slots=True, eq=False)
class ChunkAssignment:
    """A chunk, and the number of its reader."""

    chunk: Chunk
    reader: int = _NO_READER


class ReadSchedule:
    """Assigns chunks to readers, from the next chunk needed to the last chunk read ahead. The assignments outlive
    passes, because the next epoch is read ahead, too.
    """

    def __init__(self) -> None:
        self.assignments: deque[ChunkAssignment] = deque()
        self._plan: Plan | None = None

    def begin_at(self, plan: Plan, chunk: Chunk) -> None:
        """Drops the assignments before a chunk, because those chunks will not be read any more. Drops all assignments
        if the chunk has none, or if they belong to another plan, as after a change of the number of ranks.
        """
        if self._plan not in (None, plan):
            self.assignments.clear()
        self._plan = plan
        while self.assignments and _end(plan, self.assignments[0].chunk) != _end(plan, chunk):
            self.assignments.popleft()

    def take(
        self, plan: Plan, dp_rank: int, chunk: Chunk, readers: Sequence[int]
    ) -> tuple[int, Chunk | None, list[tuple[int, Chunk]]]:
        """Assigns a chunk, which the last `begin_at` did not drop, to one of the running `readers`, at least one.

        Returns the reader; the chunk that it reads next, if any; and readers that had no chunk until now, each with its
        first chunk.
        """
        at = self._find(plan, chunk)
        wanted = self.assignments[at]
        if wanted.reader not in readers:
            wanted.reader = self._next_reader(readers, at)
        idle = set(readers).difference(other.reader for other in self.assignments)
        begin: list[tuple[int, Chunk]] = []
        following: Chunk | None = None
        for other in self._after(plan, dp_rank, at):
            if other.reader not in readers:
                other.reader = self._next_reader(readers, at)
            if other.reader in idle:
                idle.remove(other.reader)
                begin.append((other.reader, other.chunk))
            if other.reader == wanted.reader and following is None:
                following = other.chunk
            if following is not None and not idle:
                break
        return wanted.reader, following, begin

    def _find(self, plan: Plan, chunk: Chunk) -> int:
        for at, other in enumerate(self.assignments):
            if _end(plan, other.chunk) == _end(plan, chunk):
                return at
        self.assignments.append(ChunkAssignment(chunk))
        return len(self.assignments) - 1

    def _after(self, plan: Plan, dp_rank: int, at: int) -> Iterator[ChunkAssignment]:
        """Yields the assignments after the index `at`; adds those of the chunks that are likely to follow."""
        while True:
            at += 1
            if at == len(self.assignments):
                chunk = plan.likely_next_chunk(self.assignments[-1].chunk, dp_rank)
                if chunk is None:
                    return
                self.assignments.append(ChunkAssignment(chunk))
            yield self.assignments[at]

    def _next_reader(self, readers: Sequence[int], begin: int) -> int:
        """Returns the reader with the fewest chunks from `begin` on; if tied, the one whose last chunk comes first."""
        given = [other.reader for other in itertools.islice(self.assignments, begin, None)]
        places = {reader: [at for at, other in enumerate(given) if other == reader] for reader in readers}
        return min(readers, key=lambda reader: (len(places[reader]), places[reader][-1:]))


def _end(plan: Plan, chunk: Chunk) -> tuple[int, int]:
    """Returns a chunk's end, which identifies it: if a pass begins inside a chunk, the rest has the same end."""
    return chunk.epoch, chunk.position + chunk.steps * plan.stride
