"""Makes and removes temporary directories of raylance on this machine.

The process that makes a directory locks it. The kernel releases the lock when the process ends, even if it is killed,
so the next process knows which directories are unused. On a file system without such locks (some network ones), the
directories of killed processes stay.
"""

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

_PREFIX = "raylance-report-"
_locks: dict[str, int | None] = {}  # this process's directories, each with its lock's descriptor, or None


def make(files: Collection[str]) -> str:
    """Makes a directory, which belongs to this process until `remove`, for files with names in `files`. The first call
    also runs `sweep`. Raises OSError if it fails.
    """
    sweep(frozenset(files))
    for directory in list(_locks):  # a copy, because another thread may add one
        if not os.path.lexists(directory):  # Ray Train has uploaded and removed it
            remove(directory)
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        lock = _lock(directory, wait=True)
        if lock is not None or os.path.lexists(directory):
            _locks[directory] = lock
            return directory
        # Another process removed the directory before it was locked.


def remove(directory: str) -> None:
    """Removes a directory if this process made it; otherwise does nothing."""
    if directory in _locks:
        lock = _locks.pop(directory, None)  # another thread may remove it, too
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@functools.cache
def sweep(files: frozenset[str]) -> None:
    """Removes dead processes' directories with no other files than `files`; runs once in each process."""
    # tempfile.gettempdir() alone would skip a full disk, which may be full of such directories.
    places = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    with contextlib.suppress(OSError):
        places.append(tempfile.gettempdir())
    for directory in [found for place in dict.fromkeys(places) for found in Path(place).glob(f"{_PREFIX}*")]:
        if (lock := _lock(str(directory), wait=False)) is not None:
            with contextlib.suppress(OSError):  # this run does not depend on the removal
                if {file.name for file in directory.iterdir()} <= files:
                    shutil.rmtree(directory)
            os.close(lock)


def _lock(directory: str, *, wait: bool) -> int | None:
    """Locks a directory, and returns the lock's descriptor; None if this fails, or it is another user's directory."""
    with contextlib.ExitStack() as undo:
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            held, named = os.fstat(lock), os.stat(directory, follow_symlinks=False)
        except OSError:
            return None
        is_private = held.st_uid == os.geteuid() and stat.S_IMODE(held.st_mode) == stat.S_IRWXU  # as mkdtemp makes it
        if not is_private or (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino):
            return None
        undo.pop_all()
        return lock


@atexit.register
def _remove_all() -> None:
    for directory in list(_locks):
        remove(directory)


os.register_at_fork(after_in_child=_locks.clear)  # the directories still belong to the parent
