"""Owns what raylance asks of the process it runs in: Ray Train, torch's DataLoader; never starts either."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed
import torch.utils.data

from raylance.errors import ConfigError
from raylance.planning.shard_context import ShardContext

RankAndSize = tuple[int, int]
DistInfo = Literal["torch", "jax", "ray"] | RankAndSize | Callable[[], RankAndSize] | None
_CONTEXT = "ray.train.v2._internal.execution.context"
_TRAIN_FN_UTILS = "ray.train.v2._internal.execution.train_fn_utils"
_LOCAL_MODE = "ray.train.v2._internal.execution.local_mode"
_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def train_rank() -> RankAndSize | None:
    """(world rank, world size) of this Ray Train worker, or None outside of a training function."""
    if "ray.train" not in sys.modules:  # every Ray Train worker has imported it
        return None
    try:
        context = importlib.import_module("ray.train").get_context()
    except (RuntimeError, DeprecationWarning):  # no training function runs here; in Ray Tune, Ray says so by a warning
        return None
    return context.get_world_rank(), context.get_world_size()


def train_storage() -> tuple[Any, str, str] | None:
    """File system and folder of this Ray Train run, and its name; None outside of a training function."""
    if train_rank() is None:
        return None
    context = importlib.import_module("ray.train").get_context()
    try:
        storage = context.get_storage()
    except (NotImplementedError, RuntimeError):  # local mode has none
        return None
    return storage.storage_filesystem, storage.experiment_fs_path, context.get_experiment_name()


def in_local_mode() -> bool:
    """Whether Ray Train's local mode (`num_workers=0`) called what calls this, in this thread."""
    return any(frame.f_globals.get("__name__", "").startswith(_LOCAL_MODE) for frame, _ in traceback.walk_stack(None))


def local_run(dataset: object) -> object | None:
    """The run of Ray Train's local mode (`num_workers=0`) in this thread, if a dataset is one of those it handed out.

    Local mode calls the training function where `fit()` was called, and `get_dataset_shard` gives what was passed to
    the trainer. Ray has no public way to ask whether it is running; without this one, a handle stays a value there.

    Args:
        dataset: What may have been handed out.

    Returns:
        The run, another object for each; None where there is none, or where the dataset is not one of the run's.
    """
    if train_rank() is None or not in_local_mode():
        return None
    try:
        run: object = importlib.import_module(_TRAIN_FN_UTILS).get_train_fn_utils()
        datasets = vars(run).get("_dataset_shards") or {}
    except (ImportError, AttributeError, RuntimeError):
        return None
    return run if any(dataset is found for found in datasets.values()) else None


def train_datasets() -> frozenset[str] | None:
    """Names of the datasets of this Ray Train run, or None where Ray does not report them.

    Ray has no public way to ask. Without this one, `datasets_to_split` is not checked.
    """
    if train_rank() is None:
        return None
    try:
        internal = importlib.import_module(_CONTEXT)
        return frozenset(vars(internal.get_train_context().dataset_shard_provider)["_dataset_names"])
    except (ImportError, AttributeError, KeyError, RuntimeError):
        return None


def _named_by_ray() -> tuple[str, ...]:
    """Names that Ray's own DataConfig splits; () for all, and where Ray does not report them."""
    try:
        config = importlib.import_module(_CONTEXT).get_train_context().train_run_context.dataset_config
        named = vars(config)["_datasets_to_split"]
    except (ImportError, AttributeError, KeyError, RuntimeError):
        return ()
    return () if named == "all" else tuple(named)


def default_device() -> torch.device:
    """The device of this Ray Train worker, or the CPU outside of one."""
    if train_rank() is None:
        return torch.device("cpu")
    device = importlib.import_module("ray.train.torch").get_device()
    return device if isinstance(device, torch.device) else torch.device(device)


def check_process(pid: int) -> None:
    """Checks that Ray and Lance work in this process, for what was made in process `pid`, or sent to it.

    Raises:
        ConfigError: In a worker of torch's DataLoader, or in a forked process.
    """
    if torch.utils.data.get_worker_info() is not None or pid != os.getpid():
        raise ConfigError(
            f"this is process {os.getpid()}, a worker of torch's DataLoader or a fork (of {pid}), in which neither Ray "
            "nor Lance works: the loader would hang. Its helpers decode in parallel already: iterate over it without a "
            "DataLoader; or use raylance.torch_data with one."
        )


def check_context(context: ShardContext) -> None:
    """Checks that a loader can deliver batches in this process.

    Raises:
        ConfigError: As `check_process`; and in a run of Ray Train whose every rank sees the dataset whole by mistake.
    """
    check_process(context.pid)
    assignment = context.assignment
    if assignment is None or assignment.is_split:
        return
    named, names = assignment.datasets_to_split or _named_by_ray(), train_datasets()
    missing = sorted(set(named) - names) if names is not None else []
    if missing:
        raise ConfigError(
            f"datasets_to_split={list(named)} names {', '.join(map(repr, missing))}, which is no "
            f"dataset of this run, and so every rank sees all rows of {assignment.name!r}. The run has "
            f"{', '.join(map(repr, sorted(names or ())))}: name those that the ranks shall share."
        )


def find_place(dist_info: DistInfo = None) -> RankAndSize:
    """Finds (rank, world size) of this process, never by a silent guess.

    Args:
        dist_info: "torch" asks torch.distributed, "jax" jax, "ray" Ray Train; or the pair, or a function that returns
            it. None asks torch.distributed where it is initialised; else it is (0, 1), if nothing shows more ranks.

    Raises:
        ConfigError: If what is asked gives no answer, or the rank lies outside the world.
    """
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        found: Any = dist_info() if callable(dist_info) else (0, 1) if dist_info is None else dist_info
        if dist_info == "torch" or (dist_info is None and ready):
            found = torch.distributed.get_rank(), torch.distributed.get_world_size()
        elif dist_info == "jax":
            jax = importlib.import_module("jax")
            found = jax.process_index(), jax.process_count()
        elif dist_info == "ray":
            context = importlib.import_module("ray.train").get_context()
            found = context.get_world_rank(), context.get_world_size()
        if found == (0, 1) and dist_info in (None, "jax") and not ready:
            sizes = {name: int(os.environ.get(name) or 1) for name in _LAUNCHERS}
            sizes["Ray Train"] = (train_rank() or found)[1]
            if max(sizes.values()) > 1:
                raise ValueError(f"there are more processes, but none of them knows of the others here: {sizes}")
        rank, world_size = found
        if not (type(rank) is type(world_size) is int and 0 <= rank < world_size):
            raise ValueError(f"rank {rank!r} of {world_size!r}: 0 <= rank < world size must hold")
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"dist_info={dist_info!r} does not give the rank of this process ({error}), without which every rank would "
            'deliver every row. Initialise torch.distributed ("torch") or jax ("jax") before the first batch, iterate '
            'inside of a Ray Train worker ("ray"), or pass (rank, world size): (0, 1) for a process that is alone.'
        ) from error
    return rank, world_size
