"""The DataConfig that gives Ray Train's workers their loaders."""

from typing import Any, Literal, Unpack

import ray.train

from raylance.api.dataset import Dataset
from raylance.api.whole_loader import WholeLoader
from raylance.arguments import check_integer
from raylance.errors import ConfigError
from raylance.planning.shard_context import Assignment, arrange_replicas
from raylance.runtime.ray.num_decoders import options_of_ranks
from raylance.settings import OptionArguments, make_options


class DataConfig(ray.train.DataConfig):
    """Gives each worker of Ray Train its `raylance.RankLoader`.

        trainer = TorchTrainer(
            train_fn,  # in it, ray.train.get_dataset_shard("train") is this rank's loader
            datasets={"train": train, "val": val},  # what raylance.dataset returned
            dataset_config=raylance.DataConfig(["train"], num_decoders=4),
            scaling_config=ray.train.ScalingConfig(num_workers=8, use_gpu=True),
        )

    Here the ranks share the rows of "train", and each rank gets all rows of "val". Each rank's loaders have helpers of
    their own, 4 decode actors a loader here, outside of the CPUs that the trainer reserves. `ray.train.DataConfig`
    divides the rows alike, with default options and without peers. Datasets of Ray Data in the same run are treated as
    by `ray.train.DataConfig`.
    """

    def __init__(
        self,
        datasets_to_split: Literal["all"] | list[str] = "all",
        *,
        ranks_per_replica: int = 1,
        **options: Unpack[OptionArguments],
    ) -> None:
        """Sets the datasets that the ranks share, and the options of their loaders.

        Args:
            datasets_to_split: Names of the datasets that the ranks share; each rank sees the other datasets whole.
            ranks_per_replica: Number of contiguous ranks that are peers, which get the same rows: the ranks of one
                replica of the model, under tensor, pipeline or context parallelism. `batch_size` counts the rows of a
                replica. For any other arrangement, call `reshard` in the training function.
            **options: Fields of `raylance.Options`, such as `num_decoders=2`, for the loaders of all datasets and
                ranks. `num_decoders="auto"` takes the CPUs that the trainer leaves free. A dataset without
                `window_bytes` takes `reader_bytes` for it.

        Raises:
            ConfigError: If an option is unknown, or a value is not allowed.
        """
        if not isinstance(datasets_to_split, list) and datasets_to_split != "all":
            raise ConfigError(f'datasets_to_split={datasets_to_split!r}: give a list of names, or "all".')
        super().__init__(datasets_to_split=datasets_to_split)
        self._split = datasets_to_split
        self._ranks_per_replica = check_integer("ranks_per_replica", ranks_per_replica, 1)
        self._options = make_options("DataConfig()", options, ["datasets_to_split", "ranks_per_replica"])

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Returns a dict for each rank: its loaders by dataset name. Ray Train calls this method when the workers run.

        Raises:
            ConfigError: If `ranks_per_replica` does not divide the world size.
        """
        pairs = arrange_replicas(self._ranks_per_replica, world_size)
        made = {name: data() if isinstance(data, Dataset) else data for name, data in datasets.items()}
        ours = {name: data for name, data in made.items() if isinstance(data, WholeLoader)}
        theirs: dict[str, Any] = {name: data for name, data in made.items() if name not in ours}
        output: list[dict[str, Any]] = [{} for _ in range(world_size)]
        if theirs:
            output = super().configure(theirs, world_size, worker_handles, worker_node_ids, **kwargs)
        options = options_of_ranks(self._options, world_size, worker_node_ids) if ours else []
        named = None if self._split == "all" else tuple(self._split)
        for name, data in ours.items():
            is_split = named is None or name in named
            assignment = Assignment(name=name, is_split=is_split, datasets_to_split=named)
            for rank in range(world_size):
                share = (rank, world_size) if is_split else (0, 1)
                pair = pairs[rank] if is_split else None
                output[rank][name] = data.make_loader(*share, options[rank], assignment, pair)
        return output
