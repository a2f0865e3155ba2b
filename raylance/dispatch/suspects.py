"""The search for a row that ends the process of its decoder: what to do with an item after its decoder has died."""

import dataclasses
from enum import Enum, auto

MAX_DEATHS = 3  # deaths of decoders with one row, two of them fresh; a fourth is not a coincidence
SUSPECT_DEATHS = 2  # if this number of helpers died with the same rows, the rows may be the cause


class Advice(Enum):
    """What to do with an item whose decoder has died."""

    AGAIN = auto()  # give it to another decoder; if it is suspect, to a fresh one
    STEPS = auto()  # replace it by its single steps
    HALVES = auto()  # replace it by two halves
    BAD = auto()  # its only row is the cause: give that row up
    WAIT = auto()  # its only row is the cause, or decoders always die: decode another row first
    END = auto()  # end the pass: decoders die with any row


@dataclasses.dataclass(slots=True)
class Suspicion:
    """What is known against the rows of an item.

    Attributes:
        deaths: Number of helpers whose process ended by itself while it decoded these rows.
        given_up: Why the item's only row is not decoded any more; else "".
        waits: Whether it waits until another row was decoded.
        faults: Number of machine faults that have hit it, if it is a block, or blocks of it, if it is a chunk.
    """

    deaths: int = 0
    given_up: str = ""
    waits: bool = False
    faults: int = 0

    def of_part(self) -> "Suspicion":
        """Returns what is known against a part of the item: which of its rows is the cause is not known."""
        return Suspicion(min(self.deaths, SUSPECT_DEATHS))

    @property
    def is_searched(self) -> bool:
        """Whether the rows may have ended two or more helpers, or one has."""
        return self.deaths >= SUSPECT_DEATHS or bool(self.given_up)

    @property
    def rank(self) -> int:
        """The rank in which rows are tried: at first those given up, which take no time; then those searched."""
        return 0 if self.given_up else 1 if self.is_searched else 2

    def needs_fresh(self, rows: int) -> bool:
        """Whether a fresh decoder must try the item: one row that may have ended two or more helpers."""
        return rows == 1 and self.is_searched and not self.given_up


class Suspects:
    """Halves items until one row is left that ends its decoders. Outlives passes.

    A row is bad after more than `MAX_DEATHS` deaths, two of them of fresh decoders. If no row at all was decoded by
    then, decoders may die for another reason, so other rows are tried first.

    Attributes:
        has_decoded: Whether any helper has decoded rows.
    """

    def __init__(self) -> None:
        self.has_decoded = False

    def after_death(self, known: Suspicion, *, steps: int, rows: int, waiting: int, has_others: bool) -> Advice:
        """Returns what to do with an item after a death of its decoder, and records the death.

        Args:
            known: What was known against its rows.
            steps: Number of its steps.
            rows: Number of its rows.
            waiting: Number of items that wait until another row was decoded.
            has_others: Whether there are other rows with which decoders may show that they work.
        """
        was_fresh = known.needs_fresh(rows)
        known.deaths += 1
        if steps > 1:
            return Advice.STEPS
        if known.deaths >= SUSPECT_DEATHS and rows > 1:
            return Advice.HALVES
        if not was_fresh or known.deaths <= MAX_DEATHS:
            return Advice.AGAIN
        waiting += not known.waits
        known.waits = not self.has_decoded
        if self.has_decoded:
            return Advice.BAD
        return Advice.WAIT if waiting <= MAX_DEATHS and has_others else Advice.END
