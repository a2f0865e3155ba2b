"""The files with a checkpoint's position and state: writes, finds, reads and checks them."""

import contextlib
import errno
import io
import json
import logging
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch
from ray.train import CheckpointUploadMode

from raylance.environment import process, temporary
from raylance.errors import ConfigError, RaylanceError, StateError
from raylance.observe.record import open_folder
from raylance.planning.state import FILE_NAME, parse_state, read_state, write_state
from raylance.secrets import public_uri

logger = logging.getLogger(__name__)

STATE_FILE = "state.pt"
_LIST = "raylance_files-{:05d}.json"  # by rank: which files of its directory belong to the checkpoint
_LISTS = "raylance_files-*.json"
FILES = frozenset({FILE_NAME, STATE_FILE, _LIST.format(0)})  # written by raylance, if `report` has no checkpoint=
_NAMED = 5  # most files that a warning names
_RESERVE_BYTES = 4 << 20  # for Ray Train's list of checkpoints, overwritten in place, and for raylance's records


def as_checkpoint(path: str | os.PathLike[str]) -> ray.train.Checkpoint:
    """Returns a checkpoint for a local directory or a URI. Raises ConfigError if the directory does not exist."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"checkpoint={path!r} is not a directory: pass a path, a URI or a ray.train.Checkpoint.")
    if "://" in str(path):
        filesystem, inside = open_folder(path)
        return ray.train.Checkpoint(inside, filesystem=filesystem)
    if not Path(path).is_dir():
        raise ConfigError(
            f"checkpoint={public_uri(str(path))!r} is not a directory: write this rank's files there before report()."
        )
    return ray.train.Checkpoint(str(path))


@contextlib.contextmanager
def own_directory(mode: CheckpointUploadMode) -> Iterator[ray.train.Checkpoint]:
    """Makes a directory on this machine for a checkpoint. It is removed when Ray Train needs it no longer."""
    before = ray.train.get_checkpoint() if process.in_local_mode() else None
    directory = _make_directory()
    try:
        yield ray.train.Checkpoint.from_directory(directory)
    except BaseException:
        temporary.remove(directory)
        raise
    if process.in_local_mode():
        # In local mode Ray Train does not upload: the directory is the checkpoint until the next report or process end.
        if before is not None:
            temporary.remove(before.path)  # does nothing to a directory of the user
    elif mode is not CheckpointUploadMode.ASYNC:
        temporary.remove(directory)  # Ray Train does not remove the directory if it skipped the report


@contextlib.contextmanager
def fetched(checkpoint: ray.train.Checkpoint) -> Iterator[str]:
    """Yields a checkpoint's directory on this machine, downloaded if necessary."""
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(checkpoint.as_directory())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            target = tempfile.gettempdir()
            raise RaylanceError(
                f"the checkpoint {checkpoint.path} can't be fetched to {target} ({os.strerror(error.errno)}): "
                f"{shutil.disk_usage(target).free:,} bytes are free there. Nothing was restored. Free space there, or "
                "set TMPDIR, in the environment of all workers, to a directory with more."
            ) from error
        yield directory


def newest_checkpoint(path: str | os.PathLike[str], storage_filesystem: Any = None) -> ray.train.Checkpoint:
    """Returns the newest whole checkpoint in the folder of a run, without Ray Train's list of checkpoints.

    Use it if Ray Train cannot continue a run because a full disk left Ray Train's list,
    `checkpoint_manager_snapshot.json`, empty. Start another run, with a new name, whose training function calls
    `restore(loader, ray.train.get_checkpoint() or newest_checkpoint(folder))`. Here, `folder` is the old run's folder.

    A checkpoint is whole if `raylance_state.json` and `state.pt` can be read. `state.pt` may be missing if there are
    files that you reported with `checkpoint=`. raylance does not check your files.

    Args:
        path: The run's folder: the storage path, followed by the run's name.
        storage_filesystem: A file system of pyarrow, as in `ray.train.RunConfig`; then `path` lies in it.

    Raises:
        ConfigError: If pyarrow does not support the URI.
        StateError: If the folder does not exist, or none of its checkpoints is whole.
    """
    filesystem, folder = open_folder(path, storage_filesystem)
    is_folder = filesystem.get_file_info(folder).type is pyarrow.fs.FileType.Directory
    inside = filesystem.get_file_info(pyarrow.fs.FileSelector(folder)) if is_folder else []
    names = [f"{info.path}/{FILE_NAME}" for info in inside if info.type is pyarrow.fs.FileType.Directory]
    states = [info for info in filesystem.get_file_info(names) if info.is_file]
    for info in sorted(states, key=lambda info: (info.mtime_ns or 0, info.path), reverse=True):
        checkpoint = ray.train.Checkpoint(os.path.dirname(info.path), filesystem=filesystem)
        try:
            _check_whole(checkpoint)
        except (StateError, FileNotFoundError) as error:  # num_to_keep= may have just deleted it
            logger.warning("%s is not whole, and an earlier checkpoint is taken: %s", checkpoint.path, error)
        else:
            return checkpoint
    raise StateError(
        f"{public_uri(os.fspath(path))!r} has no whole checkpoint, of {len(states)} with a {FILE_NAME}; nothing was "
        "restored. Give the folder of a run, which is its storage path and in it its name, or start from the beginning."
    )


def _check_whole(checkpoint: ray.train.Checkpoint) -> None:
    with fetched(checkpoint) as directory:
        parse_state(read_state(directory))
        path = Path(directory, STATE_FILE)
        if load_state_file(path) is None and set(os.listdir(directory)) <= FILES:
            raise StateError(f"it has neither {STATE_FILE} nor files of your own.")
        # torch does not check the checksums that it writes, so it would load wrong values from a damaged file.
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                if damaged := file.testzip():
                    raise StateError(f"{STATE_FILE} is damaged: {damaged} in it has another checksum.")


def check_room(checkpoint: ray.train.Checkpoint) -> None:
    """Raises RaylanceError if a checkpoint does not fit into the run's storage, a file system of this machine. Without
    room, Ray Train's controller would end the run, and leave an empty list of checkpoints.
    """
    storage = process.train_storage()
    if storage is None:
        return
    filesystem, folder, _ = storage
    if not all(isinstance(one, pyarrow.fs.LocalFileSystem) for one in (filesystem, checkpoint.filesystem)):
        return
    if Path(checkpoint.path).resolve().is_relative_to(Path(folder).resolve()):  # it lies there already
        return
    needed = 0
    for path in _walk(checkpoint.path):
        with contextlib.suppress(FileNotFoundError):  # the user may have removed the file
            needed += os.stat(path).st_size
    os.makedirs(folder, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed + _RESERVE_BYTES > free:
        raise RaylanceError(
            f"report() has no room for its checkpoint in {folder}: it has {needed:,} bytes, and {free:,} bytes are "
            f"free there, of which {_RESERVE_BYTES:,} are kept for Ray Train's list of checkpoints. This checkpoint "
            "was not reported; the ones before it are whole, and the run continues from the newest. Free space there, "
            "keep fewer checkpoints by ray.train.CheckpointConfig(num_to_keep=…), or use a storage_path with more."
        )


def _walk(directory: str | Path) -> Iterator[str]:
    """Yields the paths of all files in a directory, also in linked directories, which Ray Train copies."""
    for parent, _, names in os.walk(directory, followlinks=True):
        yield from (os.path.join(parent, name) for name in names)


def list_files(
    checkpoint: ray.train.Checkpoint, rank: int, world_size: int, steps: Mapping[str, Any], report: str
) -> None:
    """Writes which files of a rank's directory belong to a report, into the directory, if that is on this machine.

    Ray Train copies the directories of all ranks into one folder. If an earlier report had the same name, and more
    ranks or other files, its files stay beside the new ones. Lists of one world size belong together if the steps of
    their loaders are the same, or `report`, which names the report on all ranks: ranks of a pipeline may take no steps,
    and a rank that Ray Train replaced has made other reports.
    """
    if not isinstance(checkpoint.filesystem, pyarrow.fs.LocalFileSystem):
        return
    folder = Path(checkpoint.path)
    content = {"world_size": world_size, "steps": steps, "report": report, "files": sorted(_files_in(folder))}
    try:
        (folder / _LIST.format(rank)).write_text(json.dumps(content))
    except OSError as error:
        raise _unwritten(checkpoint.path, error) from error


@contextlib.contextmanager
def only_listed(directory: str, steps: Mapping[str, Any]) -> Iterator[Path]:
    """Yields the directory of a checkpoint at these steps; or, if files of an earlier report lie there, another one
    with links to the files of this one. If rank 0 has no list for these steps, or a list is damaged, all files belong
    to this one.
    """
    folder = Path(directory)
    lists = {path.name: _read_list(path) for path in folder.glob(_LISTS)}
    first = lists.get(_LIST.format(0), {})
    mine = [each for each in lists.values() if each.get("world_size") == first.get("world_size") is not None]
    mine = [each for each in mine if each["steps"] == steps or each["report"] == first["report"]]
    listed = {name for each in mine for name in each["files"]}
    if not all(lists.values()) or first.get("steps") != steps or not (stale := sorted(_files_in(folder) - listed)):
        yield folder
        return
    logger.warning(
        "%s also holds files of an earlier report with the same name, which are left out: %s%s. Give each report a "
        "name of its own, and remove these files.",
        directory,
        ", ".join(stale[:_NAMED]),
        ", …" * (len(stale) > _NAMED),
    )
    with tempfile.TemporaryDirectory(prefix="raylance-restore-") as made:
        for name in _files_in(folder) & listed:
            link = Path(made, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((folder / name).resolve())
        yield Path(made)


def _files_in(folder: Path) -> set[str]:
    """Returns the relative paths of all files in a directory but the lists."""
    return {os.path.relpath(path, folder) for path in _walk(folder)} - {path.name for path in folder.glob(_LISTS)}


def _read_list(path: Path) -> dict[str, Any]:
    """Returns the content of a list; an empty one if it is damaged."""
    try:
        content = json.loads(path.read_text())
        names = content["files"]
        if {*content} == {"world_size", "steps", "report", "files"} and all(isinstance(name, str) for name in names):
            return dict(content)
    except (ValueError, TypeError):
        logger.warning("%s is damaged: which files belong to the checkpoint is not known", path)
    return {}


def load_state_file(path: Path) -> dict[str, Any] | None:
    """Returns the state in a checkpoint's `state.pt`; None if the file does not exist. Raises StateError if damaged."""
    try:
        with zipfile.ZipFile(path) as file:  # torch writes none that would unpack to more bytes, and fill the memory
            if sum(info.file_size for info in file.infolist()) > path.stat().st_size:
                raise ValueError("its parts are compressed, or overlap")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}")
    except FileNotFoundError:
        return None
    except Exception as error:  # torch raises many kinds of errors for a file that was cut or overwritten
        raise StateError(
            f"{path.name} of the checkpoint is damaged, or no state of raylance.report() ({type(error).__name__}); "
            "nothing was restored. Continue from an earlier checkpoint by checkpoint=, or start under a new run name."
        ) from error
    return state


def write_files(checkpoint: ray.train.Checkpoint, position: Mapping[str, Any], state: dict[str, Any] | None) -> None:
    """Writes the files of position and state into a checkpoint, local or remote; no `state.pt` if `state` is None."""
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
                _save(state, Path(directory, STATE_FILE))
        except OSError as error:
            Path(directory, STATE_FILE).unlink(missing_ok=True)  # it may be written in part
            raise _unwritten(directory, error, _size(state or {})) from error
        if not is_here:
            pyarrow.fs.copy_files(directory, checkpoint.path, destination_filesystem=checkpoint.filesystem)


def _check_name(checkpoint: ray.train.Checkpoint, *, has_state: bool) -> None:
    """Raises ConfigError if a report would overwrite a user's state.pt, or if `restore` would return an older one."""
    names = [f"{checkpoint.path}/{name}" for name in (FILE_NAME, STATE_FILE)]
    filesystem: Any = checkpoint.filesystem
    is_used, has_file = (info.is_file for info in filesystem.get_file_info(names))
    if has_file and not (has_state and is_used):
        raise ConfigError(
            f"checkpoint={checkpoint.path} holds a {STATE_FILE}, of yours or of an earlier report; under this name "
            "restore() gives back the state= of this one. Give your own file another name, or use a fresh directory."
        )


def _make_directory() -> str:
    try:
        return temporary.make(FILES)
    except OSError as error:
        raise _unwritten(os.environ.get("TMPDIR") or "the directory for temporary files", error) from error


def _unwritten(directory: str, error: OSError, needed: int = 0) -> RaylanceError:
    """Returns the error for a checkpoint that cannot be written because the disk is full or fails."""
    room = f"{shutil.disk_usage(directory).free:,} bytes are free there" if Path(directory).exists() else ""
    figures = ", and ".join(filter(None, [room, f"the state needs {needed:,}" if needed else ""]))
    return RaylanceError(
        f"report() can't write its checkpoint to {directory} ({error.strerror or error}){figures and ': '}{figures}. "
        "This checkpoint was not reported; the ones before it are whole. Free space there, or set TMPDIR, in the "
        "environment of all workers, to a directory with more; or pass checkpoint= with one of your own."
    )


def _size(state: dict[str, Any]) -> int:
    """Returns the number of bytes that a state takes when it is saved."""
    counter = _Counter()
    _dump(state, counter)
    return counter.count


class _Counter(io.RawIOBase):
    """A file that stores nothing, and counts the bytes that are written to it."""

    count = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.count += size
        return size


def _save(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        _dump(state, file)
    with _refusing():
        # The file is loaded now, because otherwise an error would show only when a run resumes.
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _dump(state: dict[str, Any], file: Any) -> None:
    """Writes a state to an open file. Raises ConfigError if the state cannot be saved; and OSError if the file cannot
    be written, although torch raises RuntimeError then.
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
    """Raises a ConfigError that names the cause if torch cannot save or load a state."""
    try:
        yield
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "report(state=…) holds something that torch.save and torch.load(weights_only=True) do not take, so no run "
            f"could resume from this checkpoint: {(str(error).splitlines() or [repr(error)])[0]} Pass state dicts, "
            "tensors, numbers, strings, lists, dicts."
        ) from error
