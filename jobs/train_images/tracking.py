"""Owns experiment tracking: what is asked for, where it goes, what rank 0 logs; never how a tracker is spoken to.

A run that goes on is the same run to its trackers: what names it there lies in its folder. Points that are logged
already are not logged again; no tracker is ever given a storage option.
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
from jobs.train_images.places import Place
from jobs.train_images.trackers import TRACKERS, Mlflow, plain

NOTES = "tracking.json"  # in the run's folder
_LEFT_OUT = ("storage_options", "command", "leaving", "stopped_by", "log", "track")  # of the arguments
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
    """The job's arguments, for those who look at the run later; no storage options."""
    given = {name: value for name, value in vars(args).items() if name not in _LEFT_OUT}
    return {name: plain(value) if isinstance(value, str) else value for name, value in given.items()}


def settle(args: argparse.Namespace, at: Place) -> dict[str, dict[str, Any]]:
    """Returns the trackers of the run by name, each with what it needs to know; without secrets.

    Raises:
        ConfigError: If one that is asked for is not installed, does not answer, or has no place.
    """
    asked = list(dict.fromkeys(args.track or (["tensorboard"] if is_there("tensorboard") else [])))
    if asked == ["none"]:
        return {}
    if "none" in asked:
        raise raylance.ConfigError(
            f"--track {','.join(asked)} asks for none and for others: leave none out, or the others"
        )
    for name in asked:
        if not is_there(name):
            raise raylance.ConfigError(
                f"--track {name}: {name} is not installed, so the run would not be tracked; pip install "
                f"{TRACKERS[name].package} on every node, or leave it out"
            )
    before = read_notes(at)
    notes = {"id": uuid.uuid4().hex[:16], **before}
    settled = {name: TRACKERS[name].settle(at, notes) for name in asked}
    if notes != before:  # whoever is killed while it is written makes the run another one at its trackers
        write_notes(at, notes)
    return settled


def is_there(name: str) -> bool:
    """Whether a tracker is installed."""
    return importlib.util.find_spec(TRACKERS[name].module) is not None


def read_notes(at: Place) -> dict[str, Any]:
    """What names the run at its trackers; empty where it is new."""
    filesystem, path = at.opened
    try:
        with filesystem.open_input_file(f"{path}/{NOTES}") as file:
            found = json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_notes(at: Place, notes: Mapping[str, Any]) -> None:
    """Keeps what names the run."""
    filesystem, path = at.opened
    with filesystem.open_output_stream(f"{path}/{NOTES}") as file:
        file.write(json.dumps(notes).encode())


def told(settled: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each tracker: where to look."""
    return [f"{name}: {TRACKERS[name].told(settings)}" for name, settings in settled.items()]


def end(settled: Mapping[str, Mapping[str, Any]], how: str) -> None:
    """Tells trackers that cannot know it themselves how the run ended: FINISHED, FAILED or KILLED."""
    if "mlflow" in settled:
        try:
            Mlflow.close(settled["mlflow"], how)
        except Exception as error:
            logger.warning("MLflow could not be told that the run ended (%s: %s)", type(error).__name__, error)


class Tracking:
    """What rank 0 logs; a thread of its own speaks to the trackers, so that none holds training up."""

    def __init__(
        self,
        settled: Mapping[str, Mapping[str, Any]] | None = None,
        behind: int = 0,
        facts: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Begins, or goes on.

        Args:
            settled: What `settle` gave; none tracks nothing.
            behind: The step that the checkpoint was made at, 0 for none.
            facts: What to say of the run, by group.
        """
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._kept = threading.Event()  # unless it is being kept
        self._kept.set()
        self._thread: threading.Thread | None = None
        if settled:
            given = (dict(settled), behind, dict(facts or {}))
            self._thread = threading.Thread(target=self._run, args=given, name="tracking", daemon=True)
            self._thread.start()

    def __bool__(self) -> bool:
        """Whether anything is tracked."""
        return self._thread is not None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs figures of a step; those that are no numbers are left out."""
        numbers = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        if self._thread is not None and numbers:
            self._queue.put(("log", (step, numbers)))

    def keep(self) -> None:
        """Has what was logged so far kept, before a checkpoint is made: a run that goes on from it begins behind it."""
        if self._thread is not None and self._kept.is_set():
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

    def _run(self, settled: dict[str, Any], behind: int, facts: dict[str, Any]) -> None:
        there = {
            name: made for name in settled if (made := self._try(name, TRACKERS[name], settled[name], behind, facts))
        }
        while (task := self._queue.get()) is not None:
            what, given = task
            for name in list(there):
                if self._try(name, getattr(there[name], what), *given) is False:
                    del there[name]
            if what == "keep":
                self._kept.set()

    @staticmethod
    def _try(name: str, call: Any, *given: Any) -> Any:
        """Calls a tracker; False, and a warning, if it fails: then it is not called again."""
        try:
            return call(*given)
        except (Exception, SystemExit) as error:
            logger.warning(
                "%s fails, and is told nothing more (%s: %s); the run goes on without",
                name,
                type(error).__name__,
                plain(str(error)),
            )
            return False
