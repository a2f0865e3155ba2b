"""Owns how a dataset becomes the loaders of a Ray Train run, by any DataConfig or in local mode; never reads."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

from raylance import process
from raylance.api.loader import RankLoader
from raylance.batches.batches import Batches
from raylance.environment.shared import Shared
from raylance.errors import ConfigError
from raylance.observe.verdict import Verdict
from raylance.orders.permutation import Int64Array
from raylance.settings import DeliverySpec, Options, ReadSpec, map_shared


class TrainData:
    """What Ray Train asks of a dataset.

    With `dataset_config=raylance.DataConfig()`, nothing but loaders. Ray's own DataConfig treats every dataset as one
    of Ray Data: it names it, copies it, sets its context, and splits it. Local mode hands the dataset itself to the
    training function, which takes it for a loader.
    """

    def __init__(self, feed: ReadSpec, delivery: DeliverySpec) -> None:
        self._feed, self._delivery, self._options = feed, delivery, Options()
        self.name: str | None = None
        self.context = SimpleNamespace(execution_options=None)
        self._run: tuple[Any, RankLoader] | None = None

    def set_name(self, name: str | None) -> None:
        """Takes the name that the dataset has in a run."""
        self.name = name

    def copy(self, dataset: "TrainData | None" = None) -> Self:
        """The dataset itself, since it is a value; the argument is Ray Data's habit."""
        return self

    def streaming_split(
        self, n: int, *, equal: bool = True, locality_hints: Sequence[str] | None = None
    ) -> list[RankLoader]:
        """The loaders of n ranks on these nodes, which share the dataset; always in equal steps, whatever `equal`."""
        from raylance.runtime.ray.decoders import options_of_ranks  # loads Ray

        seat = process.Seat(name=self.name, split=True)
        options = options_of_ranks(self._options, n, locality_hints)
        return [self.seated(rank, n, options[rank], seat) for rank in range(n)]

    def iterator(self) -> RankLoader:
        """A loader that sees the dataset whole."""
        return self.seated(0, 1, self._options, process.Seat(name=self.name, split=False))

    def seated(self, rank: int, world_size: int, options: Options, seat: process.Seat) -> RankLoader:
        """The loader of one rank of a run, at the start of epoch 0."""
        # The process that makes the loaders of a run outlives them.
        feed, delivery = map_shared(self._feed, self._delivery, Shared.of_run)
        if delivery.window_bytes is None:  # the config's options are the same for all ranks
            delivery = dataclasses.replace(delivery, window_bytes=options.max_window_bytes)
        return RankLoader(feed, delivery, options, rank, world_size, seat=seat)

    def run_loader(self) -> RankLoader:
        """The loader of the run that is going on in local mode; refused elsewhere, since a handle has no position."""
        run = process.local_run(self)
        if run is None:
            raise ConfigError(
                "a handle is a value, which has no position: iterating on it begins at the beginning each time. "
                "Position, epoch and state belong to loaders: ray.train.get_dataset_shard(name) in a training function "
                "of Ray Train, handle.loader() elsewhere."
            )
        if self._run is None or self._run[0] is not run:
            self._run = (run, self.iterator())
        return self._run[1]

    @property
    def rank(self) -> int:
        """In local mode as `RankLoader.rank`; refused elsewhere, as the following."""
        return self.run_loader().rank

    @property
    def world_size(self) -> int:
        """In local mode as `RankLoader.world_size`."""
        return self.run_loader().world_size

    @property
    def epoch(self) -> int:
        """In local mode as `RankLoader.epoch`."""
        return self.run_loader().epoch

    @property
    def step(self) -> int:
        """In local mode as `RankLoader.step`."""
        return self.run_loader().step

    @property
    def global_step(self) -> int:
        """In local mode as `RankLoader.global_step`."""
        return self.run_loader().global_step

    def completed_shards(self) -> Int64Array:
        """In local mode as `RankLoader.completed_shards`."""
        return self.run_loader().completed_shards()

    def set_epoch(self, epoch: int) -> None:
        """In local mode as `RankLoader.set_epoch`."""
        self.run_loader().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """In local mode as `RankLoader.state_dict`."""
        return self.run_loader().state_dict()

    def identity(self) -> dict[str, Any]:
        """In local mode as `RankLoader.identity`."""
        return self.run_loader().identity()

    def load_state_dict(self, state: Any) -> None:
        """In local mode as `RankLoader.load_state_dict`."""
        self.run_loader().load_state_dict(state)

    def stats(self) -> dict[str, Any]:
        """In local mode as `RankLoader.stats`."""
        return self.run_loader().stats()

    def explain(self) -> Verdict:
        """In local mode as `RankLoader.explain`."""
        return self.run_loader().explain()

    def batches(self, **arguments: Any) -> Batches:
        """In local mode as `RankLoader.batches`."""
        return self.run_loader().batches(**arguments)

    def prepare(self, **arguments: Any) -> Batches:
        """In local mode as `RankLoader.prepare`."""
        return self.run_loader().prepare(**arguments)
