"""Owns the folder of a run and what it holds: where it is, its newest checkpoint; never trains, never starts Ray."""

import argparse
import dataclasses
import os
from functools import cached_property
from typing import Any

import ray.train

import raylance
from jobs import common
from jobs.train_images.model import check_network


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run is kept."""

    filesystem: Any  # pyarrow's, where storage options are needed: `storage` is a path in it; else None
    storage: str  # of all runs, a path or URI
    name: str

    @property
    def folder(self) -> str:
        """Of the run, a path or URI as `storage` is."""
        return f"{self.storage.rstrip('/')}/{self.name}"

    @property
    def uri(self) -> str:
        """Of the run's folder, as other programs take it."""
        return self.folder if self.filesystem is None else f"s3://{self.folder}"

    @property
    def local(self) -> str | None:
        """The run's folder, where it lies in the file system of this machine."""
        return self.folder if self.filesystem is None and "://" not in self.storage else None

    @cached_property
    def opened(self) -> tuple[Any, str]:
        """The file system of the run's folder, and the path in it."""
        return (self.filesystem, self.folder) if self.filesystem else common.open_filesystem(self.folder, {})

    def make(self) -> None:
        """Makes the folder, or raises a ConfigError."""
        try:
            filesystem, path = self.opened
            filesystem.create_dir(path)
        except OSError as error:
            raise raylance.ConfigError(
                f"--storage-path {self.storage} cannot be written to ({error}). Nothing would be kept. Give another."
            ) from error


def run_folder(args: argparse.Namespace) -> RunFolder:
    """Returns where the run is kept."""
    name = args.run_name or f"{os.path.basename(args.data.rstrip('/')).removesuffix('.lance')}-{args.model}"
    if args.storage_options and args.storage_path.startswith("s3://"):
        return RunFolder(*common.open_filesystem(args.storage_path, common.store_options(args.storage_options)), name)
    return RunFolder(None, common.locate(args.storage_path), name)


def cannot_continue(at: RunFolder, why: str) -> str:
    """A message that names the run."""
    return f"run {at.name} in {at.storage} cannot continue: {why}"


def newest(at: RunFolder) -> ray.train.Result | None:
    """Returns the run as its newest checkpoint left it, None where there is none.

    Raises:
        OSError: The storage cannot be read now.
        StateError: The list of checkpoints is damaged.
    """
    try:
        filesystem, folder = at.opened  # a folder with a space in its name has no URI that Ray Train takes
        found = ray.train.Result.from_path(folder, storage_filesystem=filesystem)
    except RuntimeError:  # no such run, or none with a checkpoint
        return None
    except OSError:
        raise
    except Exception as error:  # Ray Train's own has no public name, and pydantic's come through
        raise raylance.StateError(
            f"Ray Train's list of its checkpoints is damaged, or the newest of them is gone ({type(error).__name__}). "
            f"Restore them from a copy, or give another --run-name and --continue-from {at.uri}, which needs no list."
        ) from error
    return found if found.checkpoint else None


def other_checkpoint(args: argparse.Namespace) -> ray.train.Checkpoint | None:
    """Returns the newest whole checkpoint of the run that --continue-from names; None if it names none."""
    if args.continue_from is None:
        return None
    filesystem, folder = common.open_filesystem(args.continue_from, common.store_options(args.storage_options))
    return raylance.newest_checkpoint(folder, filesystem)


@dataclasses.dataclass(frozen=True)
class Standing:
    """How far a run is that has a checkpoint: the epoch, the step of it and the row of its order."""

    result: ray.train.Result
    epoch: int
    step: int
    position: int


def look_up(args: argparse.Namespace, at: RunFolder, train: raylance.Dataset, network: list[Any]) -> Standing | None:
    """Returns how far the run is; refuses one that cannot continue. Ranks would find out a minute later."""
    try:
        if (found := newest(at)) is None:
            return None
        with train.loader() as loader:
            saved = raylance.restore(loader, found.checkpoint)
            if saved is not None:
                check_network(saved, network)
            position = loader.state_dict()["position"]
            return Standing(found, loader.epoch, position // args.global_batch_size, position)
    except raylance.StateError as error:
        raise raylance.StateError(cannot_continue(at, str(error))) from error
    except OSError as error:
        raise raylance.ConfigError(
            f"the checkpoints in --storage-path {args.storage_path} cannot be read ({error}). The run could neither "
            "continue nor be kept. Try again, or give another."
        ) from error
