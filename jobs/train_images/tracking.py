"""Owns experiment tracking: which trackers, where they write, what rank 0 logs; never how a tracker is called.

A run that continues is the same run to its trackers: a file in its folder names it there. Points that are logged are
not logged again; no tracker is ever given a storage option.
"""

import argparse
import importlib.util
import json
import logging
import math
import queue
import threading
import uuid
from collections.abc import Mapping
from typing import Any, Self

import raylance
from jobs.train_images.run_folder import RunFolder
from jobs.train_images.trackers import TRACKERS, Facts, Mlflow, Settings, plain

NOTES = "tracking.json"  # in the run's folder
_LEFT_OUT = ("storage_options", "command", "stopping", "stopped_by", "log", "track")  # of the arguments
_KEEP_S = 30.0  # that training waits for the trackers at a checkpoint, once where they do not catch up
_CLOSE_S = 60.0  # that the last points may take

logger = logging.getLogger(__name__)


def trackers(text: str) -> list[str]:
    """Parses names of trackers, with commas between them."""
    names = text.split(",")
    if unknown := [name for name in names if name not in (*TRACKERS, "none")]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(TRACKERS)}, none")
    return names


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The job's arguments, for the trackers' pages; no storage options."""
    given = {name: value for name, value in vars(args).items() if name not in _LEFT_OUT}
    return {name: plain(value) if isinstance(value, str) else value for name, value in given.items()}


def resolve(args: argparse.Namespace, at: RunFolder) -> dict[str, Settings]:
    """Returns the trackers of the run by name, each with its settings, without secrets.

    Raises:
        ConfigError: If one that is asked for is not installed, does not answer, or has no place to write.
    """
    asked = list(dict.fromkeys(args.track or (["tensorboard"] if is_installed("tensorboard") else [])))
    if asked == ["none"]:
        return {}
    if "none" in asked:
        raise raylance.ConfigError(
            f"--track {','.join(asked)} asks for none and for others. Both cannot be. Leave none out, or the others."
        )
    for name in asked:
        if not is_installed(name):
            raise raylance.ConfigError(
                f"--track {name}: {name} is not installed. The run would not be tracked. pip install {name} on every "
                "node, or leave it out."
            )
    before = read_notes(at)
    notes = {"id": uuid.uuid4().hex[:16], **before}
    resolved = {name: TRACKERS[name].resolve(at, notes) for name in asked}
    if notes != before:  # a kill during this write makes the run another one at its trackers
        write_notes(at, notes)
    return resolved


def is_installed(name: str) -> bool:
    """Whether a tracker is installed."""
    return importlib.util.find_spec(TRACKERS[name].module) is not None


def read_notes(at: RunFolder) -> dict[str, Any]:
    """What names the run at its trackers; empty for a new run."""
    filesystem, path = at.opened
    try:
        with filesystem.open_input_file(f"{path}/{NOTES}") as file:
            found = json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_notes(at: RunFolder, notes: Mapping[str, Any]) -> None:
    """Keeps what names the run."""
    filesystem, path = at.opened
    with filesystem.open_output_stream(f"{path}/{NOTES}") as file:
        file.write(json.dumps(notes).encode())


def describe(resolved: Mapping[str, Settings]) -> list[str]:
    """A line for each tracker: where to look."""
    return [f"{name}: {TRACKERS[name].describe(settings)}" for name, settings in resolved.items()]


def end(resolved: Mapping[str, Settings], status: str) -> None:
    """Records at trackers that cannot know it how the run ended: FINISHED, FAILED or KILLED."""
    if "mlflow" in resolved:
        try:
            Mlflow.close(resolved["mlflow"], status)
        except Exception as error:
            logger.warning("MLflow did not record the end of the run (%s: %s)", type(error).__name__, error)


class Tracking:
    """What rank 0 logs; a thread calls the trackers, so that none holds training up."""

    def __init__(
        self, resolved: Mapping[str, Settings] | None = None, step: int = 0, facts: Facts | None = None
    ) -> None:
        """`step` is that of the checkpoint, 0 for none; no trackers track nothing."""
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._kept = threading.Event()  # unless it is being kept
        self._kept.set()
        self._thread: threading.Thread | None = None
        if resolved:
            given = (dict(resolved), step, dict(facts or {}))
            self._thread = threading.Thread(target=self._run, args=given, name="tracking", daemon=True)
            self._thread.start()

    def __bool__(self) -> bool:
        return self._thread is not None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs the figures of a step that are finite."""
        numbers = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        if self and numbers:
            self._queue.put(("log", (step, numbers)))

    def keep(self) -> None:
        """Has everything logged so far kept before a checkpoint is made: a run that continues from it begins there."""
        if self and self._kept.is_set():
            self._kept.clear()
            self._queue.put(("keep", ()))
            self._kept.wait(_KEEP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is not None:
            self._queue.put(("end", (kind is None,)))
            self._queue.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self, resolved: dict[str, Settings], step: int, facts: Facts) -> None:
        opened = {}
        for name, settings in resolved.items():
            if tracker := self._try(name, TRACKERS[name], settings, step, facts):
                opened[name] = tracker
        while (task := self._queue.get()) is not None:
            method, given = task
            for name in list(opened):
                if self._try(name, getattr(opened[name], method), *given) is False:
                    del opened[name]
            if method == "keep":
                self._kept.set()

    @staticmethod
    def _try(name: str, call: Any, *given: Any) -> Any:
        """Calls a tracker; False, and a warning, if it fails: then it is not called again."""
        try:
            return call(*given)
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {plain(str(error))}"
            logger.warning("%s failed and gets no more points (%s); the run continues without it", name, why)
            return False
