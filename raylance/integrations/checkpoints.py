"""Raylance's part of Ray Train's checkpoints: the loaders' positions and the run's state."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray.train
from ray.train import CheckpointUploadMode, ValidationTaskConfig

from raylance.api.batches import Batches
from raylance.api.loader import RankLoader, consumer_of
from raylance.api.recorder import all_recorders, assigned_recorders
from raylance.environment import facts, process, temporary
from raylance.errors import ConfigError, StateError
from raylance.integrations.checkpoint_files import (
    FILES,
    STATE_FILE,
    as_checkpoint,
    check_room,
    fetched,
    list_files,
    load_state_file,
    only_listed,
    own_directory,
    write_files,
)
from raylance.planning.state import FORMAT, LOADERS, read_state

_reports = itertools.count(1)  # numbers the calls of report with a loader; equal on all ranks
Reported = RankLoader | Batches


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

    A call waits until all ranks have called `report`, and until Ray Train has collected the previous report. Ray Train
    collects reports only about every two seconds. So call `report` every few hundred steps, not every step.

    Args:
        metrics: Metrics for Ray Train.
        loader: The loader of the training dataset, or the result of the loader's method `batches`. If the run trains on
            several datasets, a dict of loaders by dataset name. None reports metrics only, without a checkpoint.
        state: The dict that `restore` returns, picklable by `torch.save` and loadable with `weights_only=True`: state
            dicts of model and optimizer, numbers, strings. Only rank 0's state is stored.
        checkpoint: A directory that this rank has written, such as its part of a sharded checkpoint. Ray Train merges
            the directories of all ranks, so their files need different names. raylance adds its files to rank 0's
            directory: raylance_state.json, and state.pt if there is a `state`. Do not put a state.pt there yourself.
        checkpoint_dir_name: See `ray.train.report`, also for all arguments that follow.
        checkpoint_upload_mode: With ASYNC, training continues during the upload. NO_UPLOAD needs a `checkpoint` of rank
            0 that lies in the run's storage already.
        delete_local_checkpoint_after_upload: Whether Ray Train deletes the directory given as `checkpoint`. Temporary
            directories that raylance makes are always deleted.
        checkpoint_upload_fn: A function that uploads the checkpoint in place of Ray Train.
        validation: Makes Ray Train validate this checkpoint, see `ray.train.ValidationConfig`. The validation function
            gets the state by `restore(None, checkpoint)`.

    Raises:
        ConfigError: If this is not a training function of Ray Train; if `state` could not be loaded again; if another
            loader of this run has moved and is not given here, so that it would start over after a resume; or if
            `state`, `checkpoint` or `validation` is given without a loader.
        RaylanceError: If raylance's files do not fit on the disk of `checkpoint` or, without this argument, on the disk
            of temporary files (`TMPDIR`); or if the run's storage path is on this machine and has no room for the
            checkpoint. The other ranks wait in their report until Ray Train ends them. Then Ray Train continues the run
            from the newest checkpoint, as after any error.
    """
    if loader is None:
        if state is not None or checkpoint is not None or validation is not False:
            raise ConfigError(
                "report() was given something to checkpoint and no loader: a run that resumes there would repeat rows. "
                "Pass the loader of the training dataset, or several by name."
            )
        require_train("report()", "loader.state_dict(), which you save with the model,")
        with _all(recorder.reporting(metrics, has_checkpoint=False) for recorder in all_recorders()):
            ray.train.report(dict(metrics))
        return
    if not isinstance(state, Mapping | None):
        raise ConfigError(f"state={state!r} is not a dict: restore() could not give it back. Put it into one.")
    loaders = _by_name(loader)
    _check_missing(loaders)
    require_train("report()", "loader.state_dict(), which you save with the model,")
    context = ray.train.get_context()
    is_first = context.get_world_rank() == 0
    given = checkpoint if isinstance(checkpoint, ray.train.Checkpoint | None) else as_checkpoint(checkpoint)
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
    is_async = checkpoint_upload_mode is CheckpointUploadMode.ASYNC
    is_own = is_first and given is None
    number = next(_reports)
    with (
        _all(consumer_of(found).reporting(metrics, uploads_async=is_async) for found in loaders.values()),
        own_directory(checkpoint_upload_mode) if is_own else contextlib.nullcontext(given) as reported,
    ):
        if reported is not None:
            states = {name: found.state_dict() for name, found in loaders.items()}
            position = states.get(None, {"format": FORMAT, LOADERS: states})
            if is_first:
                write_files(reported, position, dict(state or {}) if is_own or state is not None else None)
            _list_files(reported, position, number, options)
        if reported is not None and checkpoint_upload_fn is None:
            check_room(reported)
        if is_own:
            options["delete_local_checkpoint_after_upload"] = not process.in_local_mode()
        if reported is not None:  # Ray Train refuses validation without a checkpoint
            options["validation"] = validation
        ray.train.report(dict(metrics), reported, **options)


def restore(
    loader: Reported | Mapping[str, Reported] | None,
    checkpoint: ray.train.Checkpoint | None = None,
    *,
    load: Callable[[Path], object] | None = None,
) -> dict[str, Any] | None:
    """Moves the loader to the position in Ray Train's newest checkpoint, for any world size, and returns the state.

    Args:
        loader: The loader of the training dataset, or a dict of loaders with the names that `report` was given. With
            None, only the state is restored, for example to validate the checkpoint or to deploy the model.
        checkpoint: Another checkpoint to continue from, such as one of another run; None for Ray Train's newest.
        load: A function that loads the directories reported with `checkpoint=`. It is called on each rank with the
            path of a local copy of the checkpoint, which may be deleted after the call.

    Returns:
        The `state` that was reported, with tensors on the CPU; an empty dict if none was reported. None if there is no
        checkpoint.

    Raises:
        ConfigError: If `checkpoint` is None and this is not a training function of Ray Train; if `loader` is not a
            loader; or if Ray Train gives every rank all rows, because `datasets_to_split` of the run's `DataConfig`
            has a name that is not a dataset of the run.
        StateError: If the checkpoint belongs to other data, another order or other loaders, is damaged, or was written
            by a newer version; or if `load` is None and the checkpoint has no state.pt. Such a checkpoint was
            reported with `checkpoint=` and without a `state`, or not by raylance.
        RaylanceError: If a checkpoint must be downloaded and does not fit on this machine.
    """
    temporary.sweep(FILES)  # makes room for a checkpoint that is downloaded
    loaders = {} if loader is None else _by_name(loader)
    for found in loaders.values():
        process.check_context(consumer_of(found).context)
    if not isinstance(checkpoint, ray.train.Checkpoint | None):
        raise ConfigError(f"restore(): checkpoint={checkpoint!r}: give a ray.train.Checkpoint(path), or None.")
    if checkpoint is None:
        require_train("restore() without checkpoint=", "loader.load_state_dict(…), or restore(loader, checkpoint),")
    checkpoint = ray.train.get_checkpoint() if checkpoint is None else checkpoint
    if checkpoint is None:
        return None
    with fetched(checkpoint) as fetched_to, _of_this_report(fetched_to) as directory:
        states = _saved_states(read_state(directory), loaders) if loaders else {}
        state = load_state_file(directory / STATE_FILE)
        _move_all(loaders, states)
        if load is not None:
            load(directory)
        if state is None and load is None:
            moved = "The loaders stand where it says; load" if loaders else "Load"
            raise StateError(
                f"the checkpoint has no {STATE_FILE}: it was not written by raylance.report(), or with checkpoint= "
                f"alone. {moved} the model from what you saved yourself, in a function that you pass as load=, or "
                "start under a new run name."
            )
        return state or {}


def require_train(call: str, instead: str) -> None:
    """Raises ConfigError if no training function of Ray Train runs in this process."""
    if process.train_rank() is None:
        raise ConfigError(
            f"{call} was called outside of a training function of Ray Train. There is no checkpoint and no storage of "
            f"a run, so nothing was saved or moved. Use {instead} in your own loop; call it in the function "
            "that a trainer of ray.train runs to use Ray Train's checkpoints."
        )


def _list_files(
    checkpoint: ray.train.Checkpoint, position: Mapping[str, Any], number: int, options: Mapping[str, Any]
) -> None:
    """Lists the files of this rank if they are known, and if Ray Train may put them beside others. Without a name, it
    takes a new folder. What a function of the user's uploads, and what ranks write into the storage while others report
    it, is not known.
    """
    is_copied = options["checkpoint_upload_mode"] is not CheckpointUploadMode.NO_UPLOAD
    if options["checkpoint_dir_name"] is None or options["checkpoint_upload_fn"] is not None or not is_copied:
        return
    context = ray.train.get_context()
    place = context.get_world_rank(), context.get_world_size()
    list_files(checkpoint, *place, _steps(position), f"{facts.placement_group()} {number}")


def _steps(position: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the steps of the loaders in the content of a state file."""
    states = position.get(LOADERS, {"": position})
    return {name or "": state.get("global_step") for name, state in states.items()}


def _of_this_report(directory: str) -> contextlib.AbstractContextManager[Path]:
    """Returns a context of a checkpoint's directory without the files of an earlier report of the same name."""
    try:
        return only_listed(directory, _steps(read_state(directory)))
    except (StateError, AttributeError):  # not by raylance, or damaged: reading it says so
        return contextlib.nullcontext(Path(directory))


def _move_all(loaders: Mapping[str | None, RankLoader], states: Mapping[Any, Any]) -> None:
    """Moves all loaders to their states. If one fails, moves all back, because loaders that moved would skip rows."""
    before = {name: found.state_dict() for name, found in loaders.items()} if len(loaders) > 1 else {}
    try:
        for name, found in loaders.items():
            found.load_state_dict(states[name])
    except BaseException:
        for name, state in before.items():
            loaders[name].load_state_dict(state)
        raise


def _by_name(loader: Reported | Mapping[str, Reported]) -> dict[str | None, RankLoader]:
    """Returns the loaders by name. The name of a single loader that was given without a dict is None."""
    given: Mapping[Any, Any] = loader if isinstance(loader, Mapping) else {None: loader}
    loaders: dict[str | None, RankLoader] = {}
    for name, value in given.items():
        found = value.loader if isinstance(value, Batches) else value
        if not isinstance(found, RankLoader) or not (name is None or isinstance(name, str)):
            raise ConfigError(
                f"{name!r}: {type(value).__name__} is not a loader: pass what ray.train.get_dataset_shard(…) returned, "
                "or a dict of names and loaders."
            )
        loaders[name] = found
    if not loaders:
        raise ConfigError("no loader was given: pass the loader of the training dataset, or several by name.")
    _check_names(loaders)
    return loaders


def _check_names(loaders: Mapping[str | None, RankLoader]) -> None:
    """Raises ConfigError if a loader has another loader's dataset name: a resume would exchange their positions."""
    contexts = {name: consumer_of(found).context for name, found in loaders.items()}
    own = {name: context.name for name, context in contexts.items() if context.assignment is not None}
    for name, its_name in own.items():
        if name is not None and name != its_name and name in own.values():
            raise ConfigError(
                f"the loader of {its_name!r} was given as {name!r}, which is another dataset of this run: after a "
                f"resume each would stand where the other one was. Name it as the trainer does: {{{its_name!r}: …}}."
            )


def _saved_states(saved: dict[str, Any], loaders: Mapping[str | None, Any]) -> Mapping[Any, Any]:
    """Returns the saved state of each loader by its name. A single state fits a single loader of any name."""
    several = saved.get(LOADERS)
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


def _check_missing(loaders: Mapping[str | None, RankLoader]) -> None:
    """Raises ConfigError if a loader of this run has moved and is not given: it would start over after a resume."""
    given = [consumer_of(found).recorder for found in loaders.values()]
    for other in assigned_recorders():
        assignment = other.context.assignment
        if assignment and assignment.is_split and other.cursor.has_moved and other not in given:
            name = assignment.name
            raise ConfigError(
                f"the loader of {name!r} stands at epoch {other.cursor.epoch} and is not reported: after a resume it "
                "would start over, and repeat rows. Report the loaders together, by name: report(metrics, {'train': "
                f"…, {name!r}: …}}, state=…); a dataset that is only evaluated is left out of datasets_to_split."
            )


def _all(contexts: Iterable[contextlib.AbstractContextManager[None]]) -> contextlib.ExitStack:
    """Enters all contexts, and returns the stack that leaves them."""
    stack = contextlib.ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
