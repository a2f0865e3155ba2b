"""The rank that a loader serves and that rank's share of the rows."""

import contextlib
import dataclasses
import operator
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from raylance.arguments import check_integer
from raylance.errors import ConfigError

RankAndSize = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """How Ray Train assigned a dataset to the workers of a run."""

    name: str | None  # the dataset's name in the run; None if Ray does not report it
    is_split: bool  # if not, each rank sees the whole dataset
    datasets_to_split: tuple[str, ...] | None = None  # names that the user gave; None for all


PlacedBy = Literal["somebody", "found", "nobody"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardContext:
    """The rank that a loader serves, the world size, the rank's share of the rows, and the process."""

    rank: int = 0  # the world rank, which says where the process is; records and metrics name it
    world_size: int = 1  # number of ranks of the run
    # Rank and size if several ranks, called peers, get the same rows; None if each rank gets rows of its own
    data_parallel: RankAndSize | None = None
    assignment: Assignment | None = None  # by Ray Train; None for a loader that was made by hand
    # Number of ranks of each replica, which are peers, if replicas come and go; the data-parallel size, which is then
    # the number of replicas that take part, may be any number. None if all ranks of the world take part.
    replica_ranks: int | None = None
    # Who said the rank and the world size: "somebody" gave them; or they were "found", and must stay as they are; or
    # "nobody" did, and the loader must be the only one.
    placed_by: PlacedBy = "somebody"
    # The ID of the process that made or received the context; a fork keeps its parent's
    pid: int = dataclasses.field(default_factory=os.getpid, compare=False, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} lies outside a world of {self.world_size}: it must be in [0, {self.world_size})."
            )
        divides = self.is_elastic or self.world_size % self.dp_size == 0
        if not 0 <= self.dp_rank < self.dp_size or not divides:
            raise ConfigError(
                f"data-parallel rank {self.dp_rank} of {self.dp_size} for rank {self.rank} of {self.world_size}: rows "
                "would come twice or never. The rank must be at least 0 and less than the size, and the size must "
                f"divide the world of {self.world_size}."
            )

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, pid=os.getpid())

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank, which determines the loader's rows."""
        return self.rank if self.data_parallel is None else self.data_parallel[0]

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, which share the epoch."""
        return self.world_size if self.data_parallel is None else self.data_parallel[1]

    @property
    def share(self) -> RankAndSize:
        """Data-parallel rank and size."""
        return self.dp_rank, self.dp_size

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may join and leave during the run."""
        return self.replica_ranks is not None

    @property
    def peers(self) -> int:
        """Number of ranks that get the same rows, this one included."""
        return self.world_size // self.dp_size if self.replica_ranks is None else self.replica_ranks

    def with_share(self, dp_rank: int, dp_size: int, *, is_elastic: bool) -> "ShardContext":
        """Returns a context of the same rank with another share. Raises ConfigError if the rank is not less than the
        size, or if the size does not divide the world and the world is not elastic.
        """
        ranks = self.peers if is_elastic else None
        return dataclasses.replace(self, data_parallel=(dp_rank, dp_size), replica_ranks=ranks, placed_by="somebody")

    def to_dict(self) -> dict[str, int]:
        """Returns the ranks and sizes, for records."""
        return {name: getattr(self, name) for name in ("rank", "world_size", "dp_rank", "dp_size")}

    @property
    def name(self) -> str | None:
        """See `Assignment.name`."""
        return None if self.assignment is None else self.assignment.name

    def __str__(self) -> str:
        """Returns, for example, "rank 1 of 4", or "rank 1 of 4, data-parallel rank 0 of 2"."""
        peers = "" if self.data_parallel is None else f", data-parallel rank {self.dp_rank} of {self.dp_size}"
        return f"rank {self.rank} of {self.world_size}{peers}"


def arrange_replicas(ranks_per_replica: int, world_size: int) -> list[RankAndSize | None]:
    """Returns the data-parallel rank and size of each rank, or None for each if every rank gets rows of its own. Groups
    of `ranks_per_replica` contiguous ranks are peers: the ranks of one replica of the model under tensor, pipeline or
    context parallelism. Raises ConfigError if `ranks_per_replica` is not a positive integer, or does not divide the
    world size.
    """
    peers = check_integer("ranks_per_replica", ranks_per_replica, 1)
    if world_size % peers:
        raise ConfigError(
            f"ranks_per_replica={peers} does not divide the world size, {world_size}: {world_size % peers} of the "
            f"ranks would be no whole replica. Start a multiple of {peers} ranks. An elastic world has sizes that do "
            "not divide: give a fixed num_workers=, or call reshard() on each rank, which arranges any size."
        )
    return [None if peers == 1 else (rank // peers, world_size // peers) for rank in range(world_size)]


def check_pairs(given: Sequence[Any], source: str) -> list[RankAndSize]:
    """Checks the data-parallel rank and size of each rank of a world, and returns them. Errors name the `source`.
    Raises ConfigError if an element of `given` is not a pair of integers, if sizes differ, if a data-parallel rank is
    not in [0, size), or if one data-parallel rank is given to more ranks than another.
    """
    pairs = [_as_pair(pair, f"{source} gave rank {rank} of {len(given)} {pair!r}") for rank, pair in enumerate(given)]
    sizes: dict[int, list[int]] = {}
    for rank, (_, size) in enumerate(pairs):
        sizes.setdefault(size, []).append(rank)
    if len(sizes) > 1:
        by_size = "; ".join(f"{size} for {name_ranks(ranks)}" for size, ranks in sorted(sizes.items()))
        raise ConfigError(
            f"the ranks disagree on how many data-parallel ranks there are: {by_size}. Some rows would come twice, and "
            f"others never. {source} must give all of them the same size."
        )
    size = next(iter(sizes))
    outside = [rank for rank, (dp_rank, _) in enumerate(pairs) if not 0 <= dp_rank < size]
    if outside:
        raise ConfigError(
            f"{source} gave {name_ranks(outside)} the data-parallel rank {pairs[outside[0]][0]} of {size}, which has "
            "no rows. A rank must be at least 0 and less than the size."
        )
    peers = Counter(dp_rank for dp_rank, _ in pairs)
    uneven = [dp_rank for dp_rank in range(size) if peers[dp_rank] * size != len(pairs)]
    if uneven:
        raise ConfigError(
            f"{peers[uneven[0]]} of {len(pairs)} ranks have data-parallel rank {uneven[0]} of {size}: its rows would "
            f"count {'less' if peers[uneven[0]] * size < len(pairs) else 'more'} than others. {source} must give all "
            "data-parallel ranks the same number of ranks."
        )
    return pairs


def _as_pair(given: Any, what: str) -> RankAndSize:
    """Converts a pair of integers, which may be NumPy's."""
    with contextlib.suppress(TypeError, ValueError):
        rank, size = map(operator.index, given)
        return rank, size
    raise ConfigError(
        f"{what}, which does not say which rows it gets. It must be two integers: data-parallel rank and size."
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks in words for errors, such as "rank 3" or "ranks 0, 1"."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
