"""Owns the seam to Ray Train: loaders for its workers, raylance's state in its checkpoints; never the training loop."""

import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ray.train
import torch

from raylance import process
from raylance._dataset.dataset import Dataset
from raylance.batches.batches import Batches
from raylance.errors import ConfigError, StateError
from raylance.loader import RankLoader
from raylance.orders.order import Auto
from raylance.planning.state import FORMAT, read_state, write_state
from raylance.runtime.cluster.decoders import options_of_ranks
from raylance.settings import Options

Reported = RankLoader | Batches | Dataset  # the handle itself in local mode
_STATE_FILE = "state.pt"
_LOADERS = "loaders"  # states by name, where there are several
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


def report(
    metrics: Mapping[str, Any],
    loader: Reported | Mapping[str, Reported],
    state: Mapping[str, Any] | None = None,
) -> None:
    """Reports metrics with a checkpoint that says which rows were consumed. Every rank must call it at the same step.

    Ray Train's report is a barrier that is drained about once in two seconds: call it every some hundred steps, not
    every step.

    Args:
        metrics: For Ray Train.
        loader: The loader of the training dataset, or what its `batches` returned; several by name, where the run
            trains on several datasets.
        state: What `restore` gives back, picklable by `torch.save` and loadable with `weights_only=True`: state dicts
            of model and optimizer, numbers, strings. Only rank 0's is stored.

    Raises:
        ConfigError: If `state` could not be loaded again; or if another loader of this run has moved and is missing,
            and so would start over after a resume.
    """
    loaders = _by_name(loader)
    _check_missing(loaders)
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory(prefix="raylance-") as directory:
        states = {name: found.state_dict() for name, found in loaders.items()}
        write_state(states.get(None, {"format": FORMAT, _LOADERS: states}), directory)
        _save(dict(state or {}), Path(directory, _STATE_FILE))
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(directory))


def restore(
    loader: Reported | Mapping[str, Reported], checkpoint: ray.train.Checkpoint | None = None
) -> dict[str, Any] | None:
    """Puts the loader where Ray Train's newest checkpoint says, on any world size.

    Args:
        loader: The loader of the training dataset, or several by name, as they were reported.
        checkpoint: Another checkpoint to go on from, such as one of another run; None for Ray Train's newest.

    Returns:
        The `state` that was reported, tensors on the CPU; None on a fresh start.

    Raises:
        ConfigError: If Ray Train gives every rank all rows by mistake: see `DataConfig`.
        StateError: If the checkpoint belongs to other data, another order or other loaders, is damaged, or is newer.
    """
    loaders = _by_name(loader)
    for found in loaders.values():
        if isinstance(found, RankLoader):
            found.check_place()
    checkpoint = checkpoint or ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        states = _saved_states(read_state(directory), loaders)
        for name, found in loaders.items():
            found.load_state_dict(states[name])
        try:
            state: dict[str, Any] = torch.load(Path(directory, _STATE_FILE), map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise StateError(
                f"the checkpoint has no {_STATE_FILE}: it was not written by raylance.report(). The loaders stand "
                "where it says; load the model from what you saved yourself, or start under a new run name."
            ) from error
        return state


def _by_name(loader: Reported | Mapping[str, Reported]) -> dict[str | None, RankLoader | Dataset]:
    """Loaders by name; None names the one that was given by itself."""
    given: Mapping[Any, Any] = loader if isinstance(loader, Mapping) else {None: loader}
    loaders: dict[str | None, RankLoader | Dataset] = {}
    for name, value in given.items():
        found = value.loader if isinstance(value, Batches) else value
        if not isinstance(found, RankLoader | Dataset) or not (name is None or isinstance(name, str)):
            raise ConfigError(
                f"{name!r}: {type(value).__name__} is no loader: pass what ray.train.get_dataset_shard(…) returned, or "
                "a dict of names and loaders."
            )
        loaders[name] = found
    if not loaders:
        raise ConfigError("no loader was given: pass the loader of the training dataset, or several by name.")
    return loaders


def _saved_states(saved: dict[str, Any], loaders: Mapping[str | None, Any]) -> Mapping[Any, Any]:
    """The saved states by the names of the loaders; a single one fits any name."""
    several = saved.get(_LOADERS)
    if several is None and len(loaders) == 1:
        return dict.fromkeys(loaders, saved)
    if isinstance(several, Mapping) and set(several) == set(loaders):
        return several
    names = "one loader" if several is None else ", ".join(map(repr, several))
    given = ", ".join("one loader" if name is None else repr(name) for name in loaders)
    raise StateError(
        f"the checkpoint holds the positions of {names}, restore() was given {given}: some would start over. Pass the "
        "same names to report() and restore()."
    )


def _check_missing(loaders: Mapping[str | None, Any]) -> None:
    """Refuses to leave out a loader of this run that would deliver other rows if it started over."""
    given = list(loaders.values())
    for other in process.seated:
        if not any(other is found for found in given) and other.would_start_over:
            name = other.seat.name if other.seat else None
            raise ConfigError(
                f"the loader of {name!r} stands at epoch {other.epoch} and is not reported: after a resume it would "
                "start over, and repeat rows. Report the loaders together, by name: report(metrics, {'train': …, "
                f"{name!r}: …}}, state=…); a dataset that is only evaluated is left out of datasets_to_split."
            )


def _save(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
        # Tried now: a checkpoint that cannot be loaded is noticed when it is needed most.
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "report(state=…) holds something that torch.save and torch.load(weights_only=True) do not take, so no run "
            f"could resume from this checkpoint: {(str(error).splitlines() or [repr(error)])[0]} Pass state dicts, "
            "tensors, numbers, strings, lists, dicts."
        ) from error
