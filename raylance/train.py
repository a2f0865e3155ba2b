"""Owns the seam to Ray Train: loaders for its workers, raylance's state in its checkpoints; never the training loop."""

import dataclasses
import pickle
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ray
import ray.train
import ray.train.torch
import torch

from raylance.errors import ConfigError
from raylance.handle import Dataset
from raylance.loader import RankLoader
from raylance.order import Auto
from raylance.pool import auto_decoders
from raylance.spec import Options
from raylance.state import read_state, write_state

_STATE_FILE = "state.pt"
_DEFAULTS = Options()


class DataConfig(ray.train.DataConfig):
    """Gives each Train worker its `RankLoader`; Ray Data datasets beside raylance's keep Ray's own treatment."""

    def __init__(
        self,
        datasets_to_split: Literal["all"] | list[str] = "all",
        *,
        num_decoders: int | Auto = "auto",
        decoder_cpus: float = 1.0,
        max_window_bytes: int = _DEFAULTS.max_window_bytes,
        max_inflight_bytes: int = _DEFAULTS.max_inflight_bytes,
        placement_timeout_s: float = _DEFAULTS.placement_timeout_s,
    ) -> None:
        """Makes a config.

        Args:
            datasets_to_split: Names of the datasets that the ranks share; each rank sees the others whole.
            num_decoders: Decode actors of each rank, shared by its datasets. "auto" takes the CPUs that the trainer
                leaves free; where it leaves none, and with 0, the shard actors decode in threads.
            decoder_cpus: CPUs that a decode actor takes from Ray's count.
            max_window_bytes: Most bytes of raw rows that a rank's shard actor holds.
            max_inflight_bytes: Most bytes of raw and decoded tables on their way to a rank.
            placement_timeout_s: Seconds that helpers may take to find their place.

        Raises:
            ConfigError: For a value that cannot be honoured.
        """
        super().__init__(datasets_to_split=datasets_to_split)
        self._split = datasets_to_split
        self._options = Options(
            num_decoders=num_decoders,
            decoder_cpus=decoder_cpus,
            max_window_bytes=max_window_bytes,
            max_inflight_bytes=max_inflight_bytes,
            placement_timeout_s=placement_timeout_s,
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
        for name, data in ours.items():
            split = self._split == "all" or name in self._split
            for rank in range(world_size):
                options = self._options_of(rank, world_size, worker_node_ids)
                place = (rank, world_size) if split else (0, 1)
                output[rank][name] = data.shard(*place, options, kind=_TrainLoader)
        return output

    def _options_of(self, rank: int, world_size: int, node_ids: list[str] | None) -> Options:
        """The options, with what depends on the cluster settled."""
        options = self._options
        if options.num_decoders == "auto":  # anew each time: a restarted run may find other CPUs free
            options = dataclasses.replace(options, auto_decoders=auto_decoders(world_size, options.decoder_cpus))
        if not node_ids:
            return options
        cpus = {node["NodeID"]: node["Resources"].get("CPU", 1) for node in ray.nodes()}  # type: ignore[no-untyped-call]
        ranks_here = Counter(node_ids)[node_ids[rank]]
        return dataclasses.replace(options, decode_threads=max(1, int(cpus.get(node_ids[rank], 1) / ranks_here)))


class _TrainLoader(RankLoader):
    """A loader whose batches go to the device of its Train worker."""

    def _default_device(self) -> torch.device:
        device = ray.train.torch.get_device()
        assert isinstance(device, torch.device)
        return device


def report(metrics: Mapping[str, Any], loader: RankLoader, state: Mapping[str, Any] | None = None) -> None:
    """Reports metrics with a checkpoint that says which rows were consumed. Every rank must call it at the same step.

    Ray Train's report is a barrier that is drained about once in two seconds: call it every some hundred steps, not
    every step.

    Args:
        metrics: For Ray Train.
        loader: The loader of the training dataset.
        state: What `restore` gives back, picklable by `torch.save` and loadable with `weights_only=True`: state dicts
            of model and optimizer, numbers, strings. Only rank 0's is stored.

    Raises:
        ConfigError: If `state` could not be loaded again.
    """
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory(prefix="raylance-") as directory:
        write_state(loader.state_dict(), directory)
        _save(dict(state or {}), Path(directory, _STATE_FILE))
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(directory))


def restore(loader: RankLoader) -> dict[str, Any] | None:
    """Puts the loader where Ray Train's newest checkpoint says, on any world size.

    Args:
        loader: The loader of the training dataset.

    Returns:
        The `state` that was reported, tensors on the CPU; None on a fresh start.

    Raises:
        StateError: If the checkpoint belongs to other data or another order, is damaged, or is newer.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        loader.load_state_dict(read_state(directory))
        state: dict[str, Any] = torch.load(Path(directory, _STATE_FILE), map_location="cpu", weights_only=True)
        return state


def _save(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)
    try:
        # Tried now, without reading the tensors: a checkpoint that cannot be loaded is noticed when it is needed most.
        torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            "report(state=…) holds something that torch.load(weights_only=True) refuses, so no run could resume from "
            f"this checkpoint: {str(error).splitlines()[0]} Pass state dicts, tensors, numbers, strings, lists, dicts."
        ) from error
