"""Owns the directories that raylance makes on this machine for a while, and their end; never what is written there.

The process that makes one locks it. The kernel ends the lock with the process, however that ends: so the next process
knows which directories nobody uses. A file system without such locks (some network ones) keeps its directories.
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
_locks: dict[str, int | None] = {}  # open descriptors by the directories of this process; None where nothing locks


def make(files: Collection[str]) -> str:
    """Makes a directory, which is this process's until `remove`; the first call removes what dead processes left.

    Args:
        files: The names that any such directory holds: one that holds others is not ours, and stays.
    """
    sweep(frozenset(files))
    for directory in [path for path in _locks if not os.path.lexists(path)]:  # Ray Train has uploaded and removed it
        remove(directory)
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        lock = _lock(directory, wait=True)
        if lock is not None or os.path.lexists(directory):
            _locks[directory] = lock
            return directory
        # Another process that sweeps was faster than the lock.


def remove(directory: str) -> None:
    """Removes a directory, if this process has made it; leaves any other."""
    if directory in _locks:
        lock = _locks.pop(directory)
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@functools.cache
def sweep(files: frozenset[str]) -> None:
    """Removes what processes that have died left behind, once a process; see `make`."""
    # Python takes another place where these are full, such as of what has been left there.
    places = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    with contextlib.suppress(OSError):
        places.append(tempfile.gettempdir())
    for directory in [found for place in dict.fromkeys(places) for found in Path(place).glob(f"{_PREFIX}*")]:
        if (lock := _lock(str(directory), wait=False)) is not None:
            with contextlib.suppress(OSError):  # whatever can't be removed stays, and is no concern of this run
                if {file.name for file in directory.iterdir()} <= files:
                    shutil.rmtree(directory)
            os.close(lock)


def _lock(directory: str, *, wait: bool) -> int | None:
    """An open descriptor that holds the lock; None where there is none, or the directory is gone or another user's."""
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


def _remove_all() -> None:
    for directory in list(_locks):
        remove(directory)


atexit.register(_remove_all)
os.register_at_fork(after_in_child=_locks.clear)  # they stay the parent's
