"""The position of a loader whose trainer counts the steps."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from raylance.api.loader import RankLoader, consumer_of
from raylance.errors import StateError
from raylance.planning.digest import Digest
from raylance.planning.plan import Plan
from raylance.planning.step_size import Size


class Follower:
    """Makes a loader follow a trainer's count of steps. A step that was handed out counts when `count` is called."""

    def __init__(self, loader: RankLoader, size: Size, settle: Callable[[], None]) -> None:
        """Takes `settle`, which is called before a state is read, and calls `count` if the last step was committed."""
        self._loader, self._size, self._consumer = loader, size, consumer_of(loader)
        self._cursor, self._ledger = self._consumer.cursor, self._consumer.ledger
        self._cursor.settle = settle

    @property
    def _plan(self) -> Plan:
        return self._consumer.plan(self._size)

    def end_of(self, epochs: int) -> int:
        """Returns the global number of the first step of epoch `epochs`, before which training ends."""
        return self._cursor.global_step + self._cursor.steps_until(self._plan, epochs)

    def hand_out(self, made: Iterator[Any], number: int, share: tuple[int, int]) -> tuple[Any, Digest]:
        """Returns the batch of a step for a share, (dp_rank, dp_size), and its digest. Does not count the step."""
        context = self._consumer.context
        if share != context.share or not context.is_elastic:
            self._loader.reshard(*share, elastic=True)
        self._go_to(number)
        try:
            batch = next(made)
        except StopIteration:  # at the end of an epoch
            batch = next(made)
        digest = self._ledger.last
        self._loader.repeat()
        return batch, digest

    def count(self, number: int, digest: Digest, share: tuple[int, int]) -> None:
        """Counts a step as committed. `share` is this rank's number in its replica, and the replica's number of ranks;
        `digest` adds up the rows that the ranks with this number got in all replicas.
        """
        plan, cursor = self._plan, self._cursor
        self._go_to(number)
        epoch, before = cursor.epoch, cursor.position
        after = plan.after(epoch, before)
        self._ledger.add(epoch, before, after, digest, is_last=plan.is_over(epoch, after), share=share)
        cursor.seek(plan, number + 1)

    def step_rows(self, number: int) -> int:
        """Goes to a step, and returns its number of rows over all ranks, padding included."""
        self._go_to(number)
        return self._plan.step_size(self._cursor.epoch, self._cursor.position)

    def known(self) -> str:
        """Returns state and digests as JSON, for a rank that takes over the model."""
        return json.dumps({"state": self._loader.state_dict(), "ledger": self._ledger.to_dict()})

    def join(self, known: str) -> None:
        """Takes over the state and the digests of the rank from which this rank took over the model.

        Raises:
            StateError: If the other rank trains on other data, or has another version of raylance.
        """
        try:
            found = json.loads(known)
            self._consumer.join(found["state"])
            self._ledger.join(found["ledger"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"a replica sent no state of this version of raylance ({type(error).__name__}: {error}), so that "
                "this one cannot take its place. Run one version of raylance on all replicas."
            ) from error

    def _go_to(self, number: int) -> None:
        if self._cursor.global_step != number:
            self._consumer.seek(number, self._size)
