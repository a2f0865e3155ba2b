"""Owns the methods with which Ray Train makes loaders of a dataset, also in local mode; never reads rows."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from raylance.api.loader import RankLoader
from raylance.environment import process
from raylance.environment.shared import Shared
from raylance.errors import ConfigError
from raylance.planning.shard_context import Assignment, RankAndSize, ShardContext
from raylance.read_spec import DatasetSpec
from raylance.settings import Options

RAY_DATA_NAMES = frozenset({"name", "context", "set_name", "copy", "streaming_split", "iterator"})
"""Names of methods and attributes that Ray's own DataConfig uses on a dataset."""

LOADER_NAMES = frozenset(
    {
        "batches", "completed_shards", "dp_rank", "dp_size", "epoch", "explain", "global_step", "identity",
        "load_state_dict", "prepare", "rank", "record", "repeat", "reshard", "seek", "set_epoch", "state_dict", "stats",
        "step", "world_size",
    }
)  # fmt: skip
"""Names that a training function uses on a loader. In local mode, Ray Train passes it the handle instead."""


class TrainAdapter:
    """Gives Ray Train the methods that it calls on a dataset.

    With `dataset_config=raylance.DataConfig()`, Ray Train only asks for loaders. Ray's own DataConfig treats every
    dataset like one of Ray Data: it names, copies and splits the dataset, and sets options in its context.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        self.name: str | None = None  # the name in the run, set by Ray's own DataConfig
        self.context = SimpleNamespace(execution_options=None)  # Ray's own DataConfig sets it; nothing reads it
        self._local: tuple[object, RankLoader] | None = None  # a run in local mode, and its loader

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_local": None}

    def set_name(self, name: str | None) -> None:
        """Sets the name, as Ray Data's `set_name` does."""
        self.name = name

    def copy(self, dataset: Any) -> Any:
        """Returns the dataset itself, because it is a value. Ray Data's `copy` has the same argument."""
        return dataset

    def streaming_split(
        self, n: int, *, equal: bool = True, locality_hints: Sequence[str] | None = None
    ) -> list[RankLoader]:
        """Makes loaders for n ranks, which share the dataset in equal steps. `locality_hints` are the nodes of the
        ranks; `equal` is ignored.
        """
        from raylance.runtime.ray.decoders import options_of_ranks  # loads Ray

        assignment = Assignment(name=self.name, is_split=True)
        options = options_of_ranks(Options(), n, locality_hints)
        return [self.make_loader(rank, n, options[rank], assignment) for rank in range(n)]

    def iterator(self) -> RankLoader:
        """Makes a loader that sees the whole dataset."""
        return self.make_loader(0, 1, Options(), Assignment(name=self.name, is_split=False))

    def make_loader(
        self,
        rank: int,
        world_size: int,
        options: Options,
        assignment: Assignment,
        data_parallel: RankAndSize | None = None,
    ) -> RankLoader:
        """Makes the loader of one rank of a run, at the start of epoch 0."""
        # The process that makes the loaders of a run outlives them, so it may own the shared values.
        spec = self._spec.map_shared(Shared.of_run)
        if spec.delivery.window_bytes is None:  # the options of the config, which are the same for all ranks
            spec = spec.with_delivery(window_bytes=options.max_window_bytes)
        context = ShardContext(rank=rank, world_size=world_size, data_parallel=data_parallel, assignment=assignment)
        return RankLoader(spec, options, context)

    def local_loader(self, handle: object) -> RankLoader | None:
        """Returns the handle's loader in the present run in local mode, one for each run; None without such a run."""
        run = process.local_run(handle)
        if run is None:
            return None
        if self._local is None or self._local[0] is not run:
            process.refuse_larger_world()
            self._local = run, self.iterator()
        return self._local[1]

    def require_local_loader(self, handle: object) -> RankLoader:
        """Returns the same loader as `local_loader`.

        Raises:
            ConfigError: If this is not local mode, because a handle has no position.
        """
        loader = self.local_loader(handle)
        if loader is None:
            raise ConfigError(
                "a handle is a value, which has no position: iterating on it begins at the beginning each time. "
                "Position, epoch and state belong to loaders: ray.train.get_dataset_shard(name) in a training function "
                "of Ray Train, handle.loader() elsewhere."
            )
        return loader

    def close(self) -> None:
        """Ends the helpers of the loader of a run in local mode."""
        if self._local is not None:
            self._local[1].close()
