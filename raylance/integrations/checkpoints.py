"""Owns raylance's part of Ray Train's checkpoints: where loaders stand, and a run's state; never the training loop."""

import contextlib
import errno
import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch
from ray.train import CheckpointUploadMode, ValidationTaskConfig

from raylance import process
from raylance.api.dataset import Dataset
from raylance.api.loader import RankLoader
from raylance.api.recording import Recorder, recorded
from raylance.batches.batches import Batches
from raylance.environment import temporary
from raylance.errors import ConfigError, RaylanceError, StateError
from raylance.planning.state import FILE_NAME, FORMAT, read_state, write_state

Reported = RankLoader | Batches | Dataset  # the handle itself in local mode
_STATE_FILE = "state.pt"
_LOADERS = "loaders"  # states by name, where there are several
_FILES = frozenset({FILE_NAME, _STATE_FILE})  # that raylance writes


def report(
    metrics: Mapping[str, Any],
    loader: Reported | Mapping[str, Reported] | None = None,
    state: Mapping[str, Any] | None = None,
    *,
    checkpoint: ray.train.Checkpoint | str | os.PathLike[str] | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[ray.train.Checkpoint, str], ray.train.Checkpoint] | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> None:
    """Reports metrics with a checkpoint that says which rows were consumed. Every rank must call it at the same step.

    Ray Train's report is a barrier that is drained about once in two seconds: call it every some hundred steps, not
    every step.

    Args:
        metrics: For Ray Train.
        loader: The loader of the training dataset, or what its `batches` returned; several by name, where the run
            trains on several datasets. None reports metrics alone, without a checkpoint.
        state: What `restore` gives back, picklable by `torch.save` and loadable with `weights_only=True`: state dicts
            of model and optimizer, numbers, strings. Only rank 0's is stored.
        checkpoint: A directory that this rank has written, such as its part of a sharded checkpoint; Ray Train puts
            those of all ranks into one, so that their files need different names. Rank 0's gets raylance's files, too:
            raylance_state.json, and state.pt where there is a `state`; it may hold no state.pt of its own.
        checkpoint_dir_name: As Ray Train takes it, like all that follows.
        checkpoint_upload_mode: ASYNC goes on training meanwhile; NO_UPLOAD needs a `checkpoint` of rank 0 that lies in
            the run's storage already.
        delete_local_checkpoint_after_upload: Of `checkpoint`; what raylance writes by itself is always deleted.
        checkpoint_upload_fn: Uploads instead of Ray Train.
        validation: Has Ray Train validate this checkpoint, see `ray.train.ValidationConfig`; `restore(None,
            checkpoint)` gives its function the state.

    Raises:
        ConfigError: If `state` could not be loaded again; if another loader of this run has moved and is missing, and
            so would start over after a resume; or if there is a checkpoint to report and no loader.
    """
    if loader is None:
        if state is not None or checkpoint is not None or validation is not False:
            raise ConfigError(
                "report() was given something to checkpoint and no loader: a run that resumes there would repeat rows. "
                "Pass the loader of the training dataset, or several by name."
            )
        with _reporting(dict.fromkeys([*_recorders(process.seated), *recorded()]), metrics, has_checkpoint=False):
            ray.train.report(dict(metrics))
        return
    if not isinstance(state, Mapping | None):
        raise ConfigError(f"state={state!r} is no dict: restore() could not give it back. Put it into one.")
    loaders = _by_name(loader)
    _check_missing(loaders)
    is_first = ray.train.get_context().get_world_rank() == 0
    given = checkpoint if isinstance(checkpoint, ray.train.Checkpoint | None) else _directory(checkpoint)
    if is_first and given is None and checkpoint_upload_mode is CheckpointUploadMode.NO_UPLOAD:
        raise ConfigError(
            "checkpoint_upload_mode=NO_UPLOAD says that the checkpoint lies in the run's storage already, and rank 0 "
            "gave none: raylance's own files would stay on this machine. Pass checkpoint=, or another mode."
        )
    options: dict[str, Any] = {
        "checkpoint_dir_name": checkpoint_dir_name,
        "checkpoint_upload_mode": checkpoint_upload_mode,
        "checkpoint_upload_fn": checkpoint_upload_fn,
        "delete_local_checkpoint_after_upload": delete_local_checkpoint_after_upload,
    }
    is_own = is_first and given is None
    with (
        _reporting(_recorders(loaders.values()), metrics, has_checkpoint=True),
        _own_directory(checkpoint_upload_mode) if is_own else contextlib.nullcontext(given) as reported,
    ):
        if is_first and reported is not None:
            states = {name: found.state_dict() for name, found in loaders.items()}
            position = states.get(None, {"format": FORMAT, _LOADERS: states})
            _write(reported, position, dict(state or {}) if is_own or state is not None else None)
        if is_own:
            options["delete_local_checkpoint_after_upload"] = not process.in_local_mode()
        if reported is not None:  # Ray Train refuses to validate what is none
            options["validation"] = validation
        ray.train.report(dict(metrics), reported, **options)


def restore(
    loader: Reported | Mapping[str, Reported] | None,
    checkpoint: ray.train.Checkpoint | None = None,
    *,
    load: Callable[[Path], object] | None = None,
) -> dict[str, Any] | None:
    """Puts the loader where Ray Train's newest checkpoint says, on any world size.

    Args:
        loader: The loader of the training dataset, or several by name, as they were reported. None restores the state
            alone, to validate a checkpoint or to serve it.
        checkpoint: Another checkpoint to go on from, such as one of another run; None for Ray Train's newest.
        load: Called on each rank with the checkpoint's directory, while it lies on this machine: what loads the
            directories that were reported with `checkpoint=`.

    Returns:
        The `state` that was reported, tensors on the CPU, empty where directories were reported without one; None on a
        fresh start.

    Raises:
        ConfigError: If Ray Train gives every rank all rows by mistake: see `DataConfig`.
        StateError: If the checkpoint belongs to other data, another order or other loaders, is damaged, or is newer; if
            it holds no `state` and there is no `load`.
        RaylanceError: If there is no room on this machine for a checkpoint that lies elsewhere.
    """
    temporary.sweep(_FILES)  # a checkpoint that is downloaded needs room, too
    loaders = {} if loader is None else _by_name(loader)
    for found in loaders.values():
        if isinstance(found, RankLoader):
            found.check_place()
    checkpoint = checkpoint or ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with _fetched(checkpoint) as directory:
        states = _saved_states(read_state(directory), loaders) if loaders else {}
        state = _load(Path(directory, _STATE_FILE))
        _move_all(loaders, states)
        if load is not None:
            load(Path(directory))
        if state is None and load is None:
            moved = "The loaders stand where it says; load" if loaders else "Load"
            raise StateError(
                f"the checkpoint has no {_STATE_FILE}: it was not written by raylance.report(), or with checkpoint= "
                f"alone. {moved} the model from what you saved yourself, in a function that you pass as load=, or "
                "start under a new run name."
            )
        return state or {}


@contextlib.contextmanager
def _fetched(checkpoint: ray.train.Checkpoint) -> Iterator[str]:
    """A checkpoint's directory on this machine."""
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(checkpoint.as_directory())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            place = tempfile.gettempdir()
            raise RaylanceError(
                f"the checkpoint {checkpoint.path} can't be fetched to {place} ({os.strerror(error.errno)}): "
                f"{shutil.disk_usage(place).free:,} bytes are free there. Nothing was restored. Free space there, or "
                "set TMPDIR, in the environment of all workers, to a directory with more."
            ) from error
        yield directory


def _load(path: Path) -> dict[str, Any] | None:
    """The state in a checkpoint's directory, None where there is none."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (pickle.PickleError, EOFError, RuntimeError, ValueError) as error:
        raise StateError(
            f"{path.name} of the checkpoint is damaged, or no state of raylance.report() ({type(error).__name__}); "
            "nothing was restored. Go on from an earlier checkpoint by checkpoint=, or start under a new run name."
        ) from error
    return state


def _move_all(loaders: Mapping[str | None, RankLoader | Dataset], states: Mapping[Any, Any]) -> None:
    """Puts all loaders where the states say, or none: one that has moved alone would skip rows."""
    before = {name: found.state_dict() for name, found in loaders.items()} if len(loaders) > 1 else {}
    try:
        for name, found in loaders.items():
            found.load_state_dict(states[name])
    except BaseException:
        for name, state in before.items():
            loaders[name].load_state_dict(state)
        raise


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
    _check_names(loaders)
    return loaders


def _check_names(loaders: Mapping[str | None, Any]) -> None:
    """Refuses a loader under the name of another dataset of the run: a resume would exchange their positions."""
    own = {name: found.seat.name for name, found in loaders.items() if isinstance(found, RankLoader) and found.seat}
    for name, its_name in own.items():
        if name is not None and name != its_name and name in own.values():
            raise ConfigError(
                f"the loader of {its_name!r} was given as {name!r}, which is another dataset of this run: after a "
                f"resume each would stand where the other one was. Name it as the trainer does: {{{its_name!r}: …}}."
            )


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


def _recorders(loaders: Iterable[Any]) -> list[Recorder]:
    """The recorders of loaders, and of handles in local mode; what delivers batches by other means has none."""
    found = [loader.run_loader() if isinstance(loader, Dataset) else loader for loader in loaders]
    return [loader.recorder for loader in found if isinstance(loader, RankLoader)]


def _reporting(
    recorders: Iterable[Recorder], metrics: Mapping[str, Any], *, has_checkpoint: bool
) -> contextlib.ExitStack:
    """Records a report in several records; the body counts as saving."""
    stack = contextlib.ExitStack()
    for recorder in recorders:
        stack.enter_context(recorder.reporting(metrics, has_checkpoint=has_checkpoint))
    return stack


@contextlib.contextmanager
def _own_directory(mode: CheckpointUploadMode) -> Iterator[ray.train.Checkpoint]:
    """A directory of this machine for a checkpoint; it is gone when Ray Train has what is in it."""
    before = ray.train.get_checkpoint() if process.in_local_mode() else None
    directory = _make_directory()
    try:
        yield ray.train.Checkpoint.from_directory(directory)
    except BaseException:
        temporary.remove(directory)
        raise
    if process.in_local_mode():
        # Ray Train stores nothing there: it is the run's checkpoint itself, until the next one or the process's end.
        if before is not None:
            temporary.remove(before.path)  # not a directory of the user's
    elif mode is not CheckpointUploadMode.ASYNC:
        temporary.remove(directory)  # Ray Train has left it where the report was skipped


def _directory(path: str | os.PathLike[str]) -> ray.train.Checkpoint:
    """A checkpoint from a path or URI."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"checkpoint={path!r} is no directory: pass a path, a URI or a ray.train.Checkpoint.")
    if "://" not in str(path) and not Path(path).is_dir():
        raise ConfigError(f"checkpoint={str(path)!r} is no directory: write this rank's files there before report().")
    return ray.train.Checkpoint(str(path))


def _write(checkpoint: ray.train.Checkpoint, position: Mapping[str, Any], state: dict[str, Any] | None) -> None:
    """Writes raylance's files into a checkpoint, wherever it lies."""
    with contextlib.ExitStack() as stack:
        directory = checkpoint.path
        is_here = isinstance(checkpoint.filesystem, pyarrow.fs.LocalFileSystem)
        if not is_here:
            directory = _make_directory()
            stack.callback(temporary.remove, directory)
        _check_name(checkpoint, has_state=state is not None)
        try:
            write_state(position, directory)
            if state is not None:
                _save(state, Path(directory, _STATE_FILE))
        except OSError as error:
            Path(directory, _STATE_FILE).unlink(missing_ok=True)  # the part that was written
            raise _unwritten(directory, error, _size(state or {})) from error
        if not is_here:
            pyarrow.fs.copy_files(directory, checkpoint.path, destination_filesystem=checkpoint.filesystem)


def _check_name(checkpoint: ray.train.Checkpoint, *, has_state: bool) -> None:
    """Refuses a directory whose state.pt would be overwritten, or be restored as what was reported now."""
    names = [f"{checkpoint.path}/{name}" for name in (FILE_NAME, _STATE_FILE)]
    filesystem: Any = checkpoint.filesystem
    is_used, has_file = (info.is_file for info in filesystem.get_file_info(names))
    if has_file and not (has_state and is_used):
        raise ConfigError(
            f"checkpoint={checkpoint.path} holds a {_STATE_FILE}, of yours or of an earlier report; under this name "
            "restore() gives back the state= of this one. Give your own file another name, or use a fresh directory."
        )


def _make_directory() -> str:
    try:
        return temporary.make(_FILES)
    except OSError as error:
        raise _unwritten(os.environ.get("TMPDIR") or "the directory for temporary files", error) from error


def _unwritten(directory: str, error: OSError, needed: int = 0) -> RaylanceError:
    """The error where a checkpoint finds no room, or a disk that fails."""
    room = f"{shutil.disk_usage(directory).free:,} bytes are free there" if Path(directory).exists() else ""
    figures = ", and ".join(filter(None, [room, f"the state needs {needed:,}" if needed else ""]))
    return RaylanceError(
        f"report() can't write its checkpoint to {directory} ({error.strerror or error}){figures and ': '}{figures}. "
        "This checkpoint was not reported; the ones before it are whole. Free space there, or set TMPDIR, in the "
        "environment of all workers, to a directory with more; or pass checkpoint= with one of your own."
    )


def _size(state: dict[str, Any]) -> int:
    """The bytes that a state needs."""
    counter = _Counter()
    _dump(state, counter)
    return counter.count


class _Counter(io.RawIOBase):
    """A file that keeps nothing but how much was written."""

    count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.count += size
        return size


def _save(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        _dump(state, file)
    with _refusing():
        # Tried now: a checkpoint that cannot be loaded is noticed when it is needed most.
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _dump(state: dict[str, Any], file: Any) -> None:
    """Writes a state to an open file.

    Raises:
        OSError: What the file raised: torch says of it only that it stands elsewhere than it should.
        ConfigError: If the state is not one that can be saved.
    """
    with _refusing():
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Names the fault of a state that PyTorch does not take."""
    try:
        yield
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "report(state=…) holds something that torch.save and torch.load(weights_only=True) do not take, so no run "
            f"could resume from this checkpoint: {(str(error).splitlines() or [repr(error)])[0]} Pass state dicts, "
            "tensors, numbers, strings, lists, dicts."
        ) from error
