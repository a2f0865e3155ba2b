"""Owns the seam to Ray Train: the loaders that its workers get; never the training loop, never a checkpoint."""

from typing import Any, Literal

import ray.train

from raylance import process
from raylance._dataset.dataset import Dataset
from raylance.checkpoints import report, restore
from raylance.errors import ConfigError
from raylance.orders.order import Auto
from raylance.runtime.cluster.decoders import options_of_ranks
from raylance.settings import Options

__all__ = ["DataConfig", "report", "restore"]  # with what a training function calls, as ray.train has both

_DEFAULTS = Options()


class DataConfig(ray.train.DataConfig):
    """Gives each Train worker its `RankLoader`; Ray Data datasets beside raylance's keep Ray's own treatment."""

    def __init__(
        self,
        datasets_to_split: Literal["all"] | list[str] = "all",
        *,
        num_decoders: int | tuple[int, int] | Auto = "auto",
        num_readers: int | tuple[int, int] | Auto = _DEFAULTS.num_readers,
        decoder_cpus: float = 1.0,
        max_window_bytes: int = _DEFAULTS.max_window_bytes,
        max_inflight_bytes: int = _DEFAULTS.max_inflight_bytes,
        placement_timeout_s: float = _DEFAULTS.placement_timeout_s,
        read_timeout_s: float = _DEFAULTS.read_timeout_s,
        record: bool | str = _DEFAULTS.record,
    ) -> None:
        """Makes a config.

        Args:
            datasets_to_split: Names of the datasets that the ranks share; each rank sees the others whole.
            num_decoders: Decode actors of each rank, shared by its datasets. "auto" takes the CPUs that the trainer
                leaves free, and gives back what has nothing to do; where it leaves none, and with 0, the shard actors
                decode in threads. (min, max) begins with min and asks for more while the trainer waits for decoding.
            num_readers: Shard actors of each rank and dataset. More than one read several windows at once, where the
                trainer waits for reading; each holds `max_window_bytes`. "auto" is (1, 4): (min, max) begins with min
                and asks for more while the trainer waits for reading.
            decoder_cpus: CPUs that a decode actor takes from Ray's count.
            max_window_bytes: Most bytes of raw rows that a shard actor holds.
            max_inflight_bytes: Most bytes of raw and decoded tables on their way to a rank.
            placement_timeout_s: Seconds that helpers may take to find their place.
            read_timeout_s: Seconds that a read is tried again when the storage fails, before that is an error.
            record: Whether the loaders publish metrics, and are recorded beside the run's checkpoints for
                `raylance.report_run`, `raylance.watch` and `python -m raylance.top`; or another folder for that.

        Raises:
            ConfigError: For a value that cannot be honoured.
        """
        if not isinstance(datasets_to_split, list) and datasets_to_split != "all":
            raise ConfigError(f'datasets_to_split={datasets_to_split!r}: give a list of names, or "all".')
        super().__init__(datasets_to_split=datasets_to_split)
        self._split = datasets_to_split
        self._options = Options(
            num_decoders=num_decoders,
            num_readers=num_readers,
            decoder_cpus=decoder_cpus,
            max_window_bytes=max_window_bytes,
            max_inflight_bytes=max_inflight_bytes,
            placement_timeout_s=placement_timeout_s,
            read_timeout_s=read_timeout_s,
            record=record,
        )

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Makes the loaders, one for each rank and dataset; called by Ray Train when the workers run."""
        ours = {name: data for name, data in datasets.items() if isinstance(data, Dataset)}
        theirs = {name: data for name, data in datasets.items() if name not in ours}
        output: list[dict[str, Any]] = [{} for _ in range(world_size)]
        if theirs:
            output = super().configure(theirs, world_size, worker_handles, worker_node_ids, **kwargs)
        options = options_of_ranks(self._options, world_size, worker_node_ids) if ours else []
        named = None if self._split == "all" else tuple(self._split)
        for name, data in ours.items():
            seat = process.Seat(name=name, split=named is None or name in named, datasets_to_split=named)
            for rank in range(world_size):
                place = (rank, world_size) if seat.split else (0, 1)
                output[rank][name] = data.seated(*place, options[rank], seat)
        return output
