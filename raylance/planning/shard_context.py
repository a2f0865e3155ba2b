"""Owns which share of a dataset one loader serves, and how it got it; never asks the process that it runs in."""

import dataclasses
import os

from raylance.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """How Ray Train assigned a dataset to the workers of a run.

    Attributes:
        name: Name of the dataset in the run, or None where Ray does not report it.
        is_split: Whether the ranks share the dataset; otherwise each rank sees the whole of it.
        datasets_to_split: Names that the user gave, or None for all.
    """

    name: str | None
    is_split: bool
    datasets_to_split: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardContext:
    """Which rank a loader serves, of how many, and in which process.

    Attributes:
        world_size: Ranks that share the epoch.
        assignment: How Ray Train assigned the dataset; None for a loader that was made by hand.
        pid: The process that it was made in or sent to; a fork keeps its parent's.
    """

    rank: int = 0
    world_size: int = 1
    assignment: Assignment | None = None
    pid: int = dataclasses.field(default_factory=os.getpid, compare=False, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} lies outside a world of {self.world_size}: it must be in [0, {self.world_size})."
            )

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, pid=os.getpid())

    @property
    def name(self) -> str | None:
        """See `Assignment.name`."""
        return None if self.assignment is None else self.assignment.name
