"""What a handle gives Ray Train: a loader of all rows, from which a DataConfig makes the loaders of the ranks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from raylance.api.loader import RankLoader
from raylance.environment.shared import Shared
from raylance.opened import Opened
from raylance.planning.shard_context import Assignment, RankAndSize, ShardContext
from raylance.settings import Options


class WholeLoader(RankLoader):
    """The loader of all rows in one run of Ray Train, at the start of epoch 0.

    Ray Train calls each of its datasets that can be called, once for each run, and takes what it returns: a handle
    returns an object of this class. In local mode (`num_workers=0`), `get_dataset_shard` returns this object. Otherwise
    a DataConfig makes the loaders of the ranks from it: `raylance.DataConfig` by `make_loader`; Ray's own DataConfig,
    which names, copies and splits every dataset like one of Ray Data, and sets options in its context, by the others.

    Attributes:
        name: The name in the run, set by Ray's own DataConfig.
        context: Where Ray's own DataConfig sets options; nothing reads it.
    """

    def __init__(self, spec: Opened) -> None:
        self._whole, self.context = spec, SimpleNamespace(execution_options=None)
        self.name: str | None = None
        whole = Assignment(name=None, is_split=False)
        super().__init__(_for_run(spec, Options()), Options(), ShardContext(placed_by="nobody", assignment=whole))

    def set_name(self, name: str | None) -> None:
        """Sets the name, as Ray Data's `set_name` does."""
        self.name = name

    def copy(self, dataset: Any) -> Any:
        """Returns the dataset itself. Ray Data's `copy` has the same argument."""
        return dataset

    def streaming_split(
        self, n: int, *, equal: bool = True, locality_hints: Sequence[str] | None = None
    ) -> list[RankLoader]:
        """Makes loaders for n ranks, which share the dataset in equal steps. `locality_hints` are the nodes of the
        ranks; `equal` is ignored.
        """
        from raylance.runtime.ray.num_decoders import options_of_ranks  # loads Ray

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
        spec = _for_run(self._whole.map_shared(Shared.of_run), options)
        context = ShardContext(rank=rank, world_size=world_size, data_parallel=data_parallel, assignment=assignment)
        return RankLoader(spec, options, context)


def _for_run(spec: Opened, options: Options) -> Opened:
    """Returns the spec with `window_bytes` as the options of the run say, which are the same for all ranks."""
    is_open = spec.delivery.window_bytes is None
    return spec.with_delivery(window_bytes=options.reader_bytes) if is_open else spec
