"""Owns where a run is kept and what is there of it: its folder, its newest checkpoint, what it is called where it is
tracked; never trains, never starts Ray.
"""

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
class Place:
    """Where a run is kept.

    Attributes:
        filesystem: Of pyarrow, where the path is one in it: where options are needed; else None.
        storage: Where runs are kept, a path or URI.
        name: Of the run.
    """

    filesystem: Any
    storage: str
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
        """Makes the folder.

        Raises:
            ConfigError: If it cannot be made.
        """
        try:
            filesystem, path = self.opened
            filesystem.create_dir(path)
        except OSError as error:
            raise raylance.ConfigError(
                f"--storage-path {self.storage} cannot be written to ({error}), so nothing would be kept; give another"
            ) from error


def place(args: argparse.Namespace) -> Place:
    """Returns where the run is kept."""
    name = args.run_name or f"{os.path.basename(args.data.rstrip('/')).removesuffix('.lance')}-{args.model}"
    if args.storage_options and args.storage_path.startswith("s3://"):
        return Place(*common.open_filesystem(args.storage_path, common.store_options(args.storage_options)), name)
    return Place(None, common.locate(args.storage_path), name)


def cannot_go_on(at: Place, why: str) -> str:
    """Says which run it is that cannot go on."""
    return f"run {at.name} in {at.storage} cannot go on: {why}"


def newest(at: Place) -> ray.train.Result | None:
    """Returns the run as its newest checkpoint left it, None where there is none.

    Raises:
        OSError: If that cannot be told now.
        StateError: If it cannot be told any more.
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
            f"Ray Train's list of its checkpoints is damaged, or the newest of them is gone ({type(error).__name__}); "
            "bring them back from a copy, or give another --run-name"
        ) from error
    return found if found.checkpoint else None


@dataclasses.dataclass(frozen=True)
class Standing:
    """How far a run is that has a checkpoint: the epoch, the step of it and the row of its order."""

    result: ray.train.Result
    epoch: int
    step: int
    position: int


def look_up(args: argparse.Namespace, at: Place, train: raylance.Dataset, network: list[Any]) -> Standing | None:
    """Returns how far the run is; refuses one that cannot go on. Ranks would find both out, a minute later."""
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
        raise raylance.StateError(cannot_go_on(at, str(error))) from error
    except OSError as error:
        raise raylance.ConfigError(
            f"the checkpoints in --storage-path {args.storage_path} cannot be read ({error}), so the run could neither "
            "go on nor be kept; try again, or give another"
        ) from error
