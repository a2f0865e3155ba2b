"""Keeps files that are made once for a version of a dataset, in a folder of this machine or in an object store.

Files are mapped into memory, which an object store cannot do. So a folder there has a copy in the user's cache: a file
that the cache lacks is fetched, and one that was made is sent.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.fs

from raylance.errors import ConfigError
from raylance.observe.record import open_folder
from raylance.secrets import public_uri

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=npt.NDArray[Any])


@dataclasses.dataclass(frozen=True)
class KeptFiles:
    """A folder of files that do not change once they are there.

    Attributes:
        folder: The folder on this machine.
        uri: Folder of an object store that has the same files; None if there is none.
    """

    folder: Path
    uri: str | None = None

    @classmethod
    def of(cls, given: str | os.PathLike[str] | None) -> "KeptFiles":
        """Returns the folder that a user gave as `cost_folder`; None for the one in the user's cache.

        Raises:
            ConfigError: If it is neither a path nor a URI that pyarrow can open.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "raylance", "costs")
        if given is None:
            return cls(cache)
        if not isinstance(given, str | os.PathLike):
            raise ConfigError(f"cost_folder={given!r}: give the path or the URI of a folder.")
        if "://" not in (text := os.fspath(given)):
            return cls(Path(text).absolute())
        filesystem, inside = open_folder(text)
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            return cls(Path(inside))
        return cls(cache / hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), text)

    def __str__(self) -> str:
        return public_uri(self.uri or str(self.folder))

    def find(self, name: str) -> Path | None:
        """Returns the path of a file, fetched if only the object store has it; None if there is none."""
        path = self.folder / name
        if path.exists():
            return path
        if self.uri is None:
            return None
        filesystem, inside = open_folder(self.uri)
        try:
            if filesystem.get_file_info(f"{inside}/{name}").type is not pyarrow.fs.FileType.File:
                return None
            with _finished(path) as partial:
                pyarrow.fs.copy_files(f"{inside}/{name}", str(partial), filesystem, pyarrow.fs.LocalFileSystem())
        except OSError as error:
            logger.warning("%s/%s cannot be fetched (%s), so this start makes it again.", self, name, _said(error))
            return None
        return path

    def send(self, name: str) -> None:
        """Copies a file that was made to the object store, if there is one."""
        if self.uri is None:
            return
        filesystem, inside = open_folder(self.uri)
        copy = functools.partial(
            pyarrow.fs.copy_files,
            str(self.folder / name),
            f"{inside}/{name}",
            pyarrow.fs.LocalFileSystem(),
            filesystem,
        )
        try:
            try:
                copy()
            except FileNotFoundError:  # a file system with folders
                filesystem.create_dir(inside, recursive=True)
                copy()
        except OSError as error:
            logger.warning(
                "%s/%s cannot be written (%s), so another machine makes it again. Give a folder that can be written: "
                "cost_folder=.",
                self,
                name,
                _said(error),
            )

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """Returns the array in a file, mapped; makes it first, and keeps it if the folder can be written."""
        path = self.find(name)
        if path is not None:
            return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
        made, path = make(), self.folder / name
        try:
            with _finished(path) as partial, open(partial, "wb") as file:
                np.save(file, made)
        except OSError as error:
            logger.warning(
                "%s cannot be kept (%s), so each start makes it again: cost_folder= gives a folder.", path, error
            )
            return made
        self.send(name)
        return made


@contextlib.contextmanager
def _finished(path: Path) -> Iterator[Path]:
    """Yields the path at which to write a file. It is renamed to `path` on success, and deleted otherwise."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _said(error: OSError) -> str:
    return public_uri(str(error))
