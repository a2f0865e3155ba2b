"""The facts of this process: its rank and device, the Ray Train run that it belongs to, and whether it is a worker of
torch's DataLoader.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed
import torch.utils.data
from torch.distributed.device_mesh import DeviceMesh

from raylance.arguments import check_integer
from raylance.errors import ConfigError, StateError
from raylance.planning.shard_context import RankAndSize, ShardContext

DistInfo = Literal["torch", "jax", "ray", "auto"] | RankAndSize | Callable[[], RankAndSize] | None
Mesh = DeviceMesh | torch.distributed.ProcessGroup
NO_GROUP: Any = torch.distributed.GroupMember.NON_GROUP_MEMBER
"""The object that torch.distributed returns in place of a group to a process outside that group."""
_LATER = (
    "Make the loader when torch.distributed is initialised: under Lightning in train_dataloader() and its like, not "
    "before fit()"
)
_INTERNAL = "ray.train.v2._internal.execution"
# Environment variables in which launchers say world size and rank: torchrun and Lightning, MPI, Horovod, Flux, Slurm,
# LSF. Lightning sets no RANK. torchrun may run once on each node of an outer launcher, so it comes first.
_LAUNCHERS = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "HOROVOD_SIZE": "HOROVOD_RANK",
    "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "JSM_NAMESPACE_SIZE": "JSM_NAMESPACE_RANK",
}


def train_rank() -> RankAndSize | None:
    """Returns (world rank, world size) of this Ray Train worker; None outside of a training function."""
    if "ray.train" not in sys.modules:  # every Ray Train worker has imported it
        return None
    try:
        context = importlib.import_module("ray.train").get_context()
    except (RuntimeError, DeprecationWarning):  # no training function runs here; in Ray Tune, Ray raises a warning
        return None
    return context.get_world_rank(), context.get_world_size()


def train_storage() -> tuple[Any, str, str] | None:
    """Returns file system, folder and name of this Ray Train run; None outside of one, and in local mode."""
    if train_rank() is None:
        return None
    context = importlib.import_module("ray.train").get_context()
    try:
        storage = context.get_storage()
    except (NotImplementedError, RuntimeError):  # local mode has none
        return None
    return storage.storage_filesystem, storage.experiment_fs_path, context.get_experiment_name()


def train_checkpoint_file(name: str) -> tuple[str, bytes] | None:
    """Returns the path of Ray Train's newest checkpoint and the content of a file in it, 64 MiB at most; None outside
    of a training function, without a checkpoint, and if the checkpoint has no such file.

    Raises:
        StateError: If the storage does not give the file.
    """
    if train_rank() is None:
        return None
    checkpoint = importlib.import_module("ray.train").get_checkpoint()
    if checkpoint is None:
        return None
    try:
        with checkpoint.filesystem.open_input_stream(f"{checkpoint.path}/{name}") as file:
            return checkpoint.path, bytes(file.read(64 << 20))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(
            f"{name} in Ray Train's checkpoint {checkpoint.path} cannot be read ({error}), so it is unknown whether "
            "this run was restored from it, and no batch is handed out. Give the workers access to the storage of the "
            "run, or see why it fails; Ray Train then continues from the same checkpoint."
        ) from error


def in_local_mode() -> bool:
    """Whether the last training function of Ray Train in this process, running or not, is one of its local mode
    (`num_workers=0`). False if this version of Ray Train does not show it.
    """
    return bool(_ask_train("train_fn_utils", lambda of: isinstance(of.get_train_fn_utils(), of.LocalTrainFnUtils)))


def _ask_train(module: str, ask: Callable[[Any], Any]) -> Any:
    """Returns a fact from an internal module of Ray Train; None if this version of Ray does not have it."""
    try:
        return ask(importlib.import_module(f"{_INTERNAL}.{module}"))
    except (ImportError, AttributeError, KeyError, RuntimeError):
        return None


def data_parallel_of(mesh: Any, dp_size: int | None = None) -> RankAndSize:
    """Returns data-parallel rank and size of this process, from a mesh, a process group, or two integers.

    Args:
        mesh: A `DeviceMesh`, all of whose dimensions are data-parallel, the first one outermost; a process group; or
            the data-parallel rank.
        dp_size: The data-parallel size if `mesh` is the rank; otherwise None.

    Raises:
        ConfigError: If `mesh` is none of these, or this process is not part of it.
    """
    if isinstance(mesh, DeviceMesh) and dp_size is None:
        if (coordinate := mesh.get_coordinate()) is None:
            raise ConfigError(f"this process is not part of {mesh!r}: it would get no row. Give the mesh of its ranks.")
        rank = 0
        for at, size in zip(coordinate, mesh.shape, strict=True):
            rank = rank * size + at
        return rank, mesh.size()
    if mesh is NO_GROUP and dp_size is None:
        raise ConfigError("this process is not part of the group: it would get no row. Give the group of its rank.")
    if isinstance(mesh, torch.distributed.ProcessGroup) and dp_size is None:
        return torch.distributed.get_rank(mesh), torch.distributed.get_world_size(mesh)
    if dp_size is None:
        raise ConfigError(
            f"{mesh!r} does not say which rows this rank gets. Give the data-parallel dimensions of a DeviceMesh, a "
            "process group, or two integers: data-parallel rank and data-parallel size."
        )
    return check_integer("data-parallel rank", mesh, 0), check_integer("data-parallel size", dp_size, 1)


def default_device() -> torch.device:
    """Returns the device of this Ray Train worker; outside of a worker, the CPU."""
    if train_rank() is None:
        return torch.device("cpu")
    device = importlib.import_module("ray.train.torch").get_device()
    return device if isinstance(device, torch.device) else torch.device(device)


def check_process(pid: int) -> None:
    """Checks that Ray and Lance work in this process, for an object that was made or received in process `pid`.

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
        ConfigError: As `check_process`; as `refuse_larger_world`, if nobody gave the rank; if the rank that was found
            is another one now; and if, by mistake, every rank of a Ray Train run sees the whole dataset.
    """
    check_process(context.pid)
    if context.placed_by == "nobody":
        refuse_larger_world()
    if context.placed_by == "found":
        _refuse_another_place(context)
    assignment = context.assignment
    if assignment is None or assignment.is_split or train_rank() is None:
        return
    names = _ask_train("context", lambda of: vars(of.get_train_context().dataset_shard_provider)["_dataset_names"])
    named = assignment.datasets_to_split or _ask_train(  # otherwise the datasets that Ray's own DataConfig splits
        "context", lambda of: vars(of.get_train_context().train_run_context.dataset_config)["_datasets_to_split"]
    )
    if names is None or named in (None, "all"):
        return
    missing = sorted(set(named) - set(names))
    if missing:
        raise ConfigError(
            f"datasets_to_split={list(named)} names {', '.join(map(repr, missing))}, which is not "
            f"a dataset of this run, and so every rank sees all rows of {assignment.name!r}. The run has "
            f"{', '.join(map(repr, sorted(names)))}: name those that the ranks shall share."
        )


def _known_places() -> dict[str, tuple[int | None, int]]:
    """Returns rank, None if unknown, and world size of this process, by who says so, the most trusted first."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # by the program itself
        return {"torch.distributed": (torch.distributed.get_rank(), torch.distributed.get_world_size())}
    places: dict[str, tuple[int | None, int]] = {}
    if (in_train := train_rank()) is not None:
        places["Ray Train"] = in_train
    for size_name, rank_name in _LAUNCHERS.items():
        rank, size = (os.environ.get(name, "") for name in (rank_name, size_name))
        if size.isdecimal():
            places[size_name] = (int(rank) if rank.isdecimal() else None, int(size))
    return places


def _in_words(said: str, place: tuple[int | None, int]) -> str:
    rank, size = place
    return f"{said} has rank {'unknown' if rank is None else rank} of {size}"


def refuse_larger_world() -> None:
    """Checks that a loader of all rows, for which nobody gave a rank, is the only one.

    Raises:
        ConfigError: If torch.distributed, Ray Train or the environment of a launcher shows more than one process.
    """
    larger = {name: place for name, place in _known_places().items() if place[1] > 1}
    if not larger:
        return
    said, (rank, size) = next(iter(larger.items()))
    is_worker = train_rank() is not None and not in_local_mode()
    shard = "pass the handle to the trainer as datasets={'train': …} and take ray.train.get_dataset_shard('train'); or "
    auto = 'handle.loader(rank="auto"), which takes the place that is found so'
    if rank is None:
        auto = f'handle.loader(rank="auto") later. {_LATER}'
    raise ConfigError(
        f"this is one of {size} processes ({_in_words(said, (rank, size))}), and without a rank each of them would "
        f"get all rows. To share them, {shard if is_worker else ''}give the loader its place: "
        f"handle.loader(rank={'…' if rank is None else rank}, world_size={size}), or {auto}. "
        "For all rows in each process: handle.loader(rank=0, world_size=1)."
    )


def _refuse_another_place(context: ShardContext) -> None:
    before = context.rank, context.world_size
    said, place = next(iter(_known_places().items()), ("", before))
    if place != before:
        raise ConfigError(
            f'rank="auto" gave this loader rank {context.rank} of {context.world_size} when it was made, and now '
            f"{_in_words(said, place)}: some rows would come twice, or never. {_LATER}."
        )


def is_called_by(module: str) -> bool:
    """Returns whether a function of a module is on the call stack of this thread."""
    return any(frame.f_globals.get("__name__") == module for frame, _ in traceback.walk_stack(None))


def find_place(dist_info: DistInfo = None, argument: str = "dist_info") -> RankAndSize:
    """Returns (rank, world size) of this process.

    Args:
        dist_info: "torch", "jax" or "ray" to ask torch.distributed, jax or Ray Train; or the pair (rank, world size);
            or a function that returns the pair. "auto" asks torch.distributed if it is initialised, else Ray Train,
            else the environment variables of torchrun, MPI or Slurm. None asks only torch.distributed. Both return
            (0, 1) if nobody answers.
        argument: Name of the argument in errors.

    Raises:
        ConfigError: If `dist_info` does not give a rank and a world size; if the rank is not less than the world size;
            or if None, "jax" or "auto" gives (0, 1), although environment variables of a launcher, or Ray Train, show
            that there are more processes.
    """
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        found: Any = dist_info() if callable(dist_info) else (0, 1) if dist_info is None else dist_info
        if dist_info == "auto":
            said, found = next(iter(_known_places().items()), ("", (0, 1)))
            if found[0] is None:
                raise ValueError(f"{_in_words(said, found)}: Lightning's launcher, for one, sets no rank")
        elif dist_info == "torch" or (dist_info is None and ready):
            found = torch.distributed.get_rank(), torch.distributed.get_world_size()
        elif dist_info == "jax":
            jax = importlib.import_module("jax")
            found = jax.process_index(), jax.process_count()
        elif dist_info == "ray":
            context = importlib.import_module("ray.train").get_context()
            found = context.get_world_rank(), context.get_world_size()
        if found == (0, 1) and dist_info in (None, "jax", "auto") and not ready:
            larger = [_in_words(name, place) for name, place in _known_places().items() if place[1] > 1]
            if larger:
                raise ValueError(f"there are more processes, but this one knows of no others: {'; '.join(larger)}")
        rank, world_size = found
        if not (type(rank) is type(world_size) is int and 0 <= rank < world_size):
            raise ValueError(f"rank {rank!r} of {world_size!r}: 0 <= rank < world size must hold")
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{argument}={dist_info!r} does not give the rank of this process ({error}), without which every rank "
            f"would deliver every row. {_how_to_place(dist_info)}, or pass rank and world size: 0 and 1 for a process "
            "that is alone."
        ) from error
    return rank, world_size


def _how_to_place(dist_info: DistInfo) -> str:
    if train_rank() is not None:
        return 'This is a worker of Ray Train: pass dist_info="ray"'
    if dist_info == "auto":
        return _LATER
    return (
        'Initialise torch.distributed ("torch") or jax ("jax") before the first batch, iterate inside of a Ray Train '
        'worker ("ray"), take the place that a launcher sets in the environment ("auto")'
    )
