"""Owns what a job shows while Ray works for it: what a user must know, and the rest in a file; never decides what is
done.

All that Ray, its helpers and the workers print comes to the driver by `sys.stdout` and `sys.stderr`, with the process
that it is of in front, or by handlers of `logging`. `quietly` puts a sieve there.
"""

import contextlib
import io
import logging
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from tqdm.std import tqdm

MARK = "raylance: "  # before what a worker has to say to the user
# With it: marked lines; of raylance's helpers, whose messages begin with a small letter; the autoscaler's refusals.
_TOLD = re.compile(
    r"(?:\(.*?pid=[^)]*\) )?" + MARK + r"(?P<marked>\S.*)"
    r"|\((?:ShardActor|DecodeActor)\b.*?pid=[^)]*\) (?P<helper>[a-z].*)"
    r"|\(autoscaler [^)]*\) (?P<autoscaler>(?:Error|Warning): .*)"
)
_REPEATED = re.compile(r"\s*(?:\x1b\[\d+m)*\s*\[repeated \d+x across cluster\].*")  # by which Ray folds lines


def told_in(line: str) -> str | None:
    """What a line has to say to the user, without whose it is; None for what concerns nobody."""
    found = _TOLD.fullmatch(_REPEATED.sub("", line.rstrip()))
    return found and found[str(found.lastgroup)]


class Sieve(io.TextIOBase):
    """A stream that writes whole lines to a file, and on to the user those that concern them, each text once."""

    encoding = "utf-8"

    def __init__(self, log: TextIO, to: TextIO, prefix: str) -> None:
        """Writes nothing yet; `prefix` comes before what the user is told."""
        self._log, self._to, self._prefix = log, to, prefix
        self._lock = threading.RLock()  # a signal's handler and a finalizer may print in the midst of a line
        self._rests: dict[int, str] = {}  # of lines, by thread: threads print theirs in pieces
        self._said: set[str] = set()

    def write(self, text: str) -> int:
        """Takes text; what is not a whole line waits for the rest of it."""
        with self._lock:
            if self._log.closed:  # some handler of a library holds it still
                return len(text)
            *lines, rest = (self._rests.pop(threading.get_ident(), "") + text).split("\n")
            if rest:
                self._rests[threading.get_ident()] = rest
            told = [found for line in lines if (found := self._take(line)) is not None]
        for line in told:
            tqdm.write(line, file=self._to)  # above the progress line, where there is one
        return len(text)

    def _take(self, line: str) -> str | None:
        self._log.write(f"{line}\n")
        told = told_in(line)
        told = self._prefix + told if told is not None else line if line.startswith(self._prefix) else None
        if told is None or told in self._said:
            return None
        self._said.add(told)
        return told

    def flush(self) -> None:
        """Has the file written."""
        if not self._log.closed:
            self._log.flush()

    def end(self) -> None:
        """Writes what is left of lines."""
        with self._lock:
            self._log.writelines(f"{rest}\n" for rest in self._rests.values())
            self._rests.clear()

    def fileno(self) -> int:
        """Of the file, for what writes without Python."""
        return self._log.fileno()

    def writable(self) -> bool:
        """It is."""
        return True


class Marked(logging.Formatter):
    """Makes a line that a sieve lets through of a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The message in one line, behind the mark."""
        return MARK + " ".join(record.getMessage().split())


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """What raylance and the jobs log as warnings in this process reaches the user: for workers, and for drivers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Marked())
    loggers = [logging.getLogger(name) for name in ("raylance", "jobs")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


class Quiet:
    """What `quietly` gives: where the user reads."""

    def __init__(self, out: TextIO, user: TextIO) -> None:
        """Of what were stdout and stderr."""
        self.out, self.user = out, user

    def show(self, *lines: str) -> None:
        """Prints lines of the job's result."""
        print(*lines, sep="\n", file=self.out, flush=True)

    def tell(self, line: str) -> None:
        """Tells the user of trouble; above the progress line, where there is one."""
        tqdm.write(line, file=self.user)


def log_file(folder: str | None, name: str) -> str:
    """The path of a file for what Ray prints: in a folder of this machine, else in the one for temporary files."""
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, "output.log")
    handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
    os.close(handle)
    return path


@contextlib.contextmanager
def quietly(path: str, command: Sequence[str] | str, prefix: str) -> Iterator[Quiet]:
    """Keeps what Ray prints out of what the user reads, as long as the body goes on.

    Args:
        path: Of the file that gets it; what is in it stays.
        command: What is being done, for the file's heading.
        prefix: Before what workers tell the user.
    """
    out, user, colour = sys.stdout, sys.stderr, os.environ.get("RAY_COLOR_PREFIX")
    os.environ["RAY_COLOR_PREFIX"] = "0"
    with open(path, "a", buffering=1, encoding="utf-8", errors="replace") as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}: {command}\n")
        sieve: Any = Sieve(log, user, prefix)
        # Ray's handlers hold the stream that there was when they were made.
        moved = [(handler, handler.stream) for handler in _handlers_of_ray()]
        for handler, _ in moved:
            handler.setStream(sieve)
        try:
            with contextlib.redirect_stdout(sieve), contextlib.redirect_stderr(sieve), speaking():
                yield Quiet(out, user)
        except Exception:
            log.write(traceback.format_exc())
            raise
        finally:
            for handler, stream in moved:
                handler.setStream(stream)
            for handler in _handlers_of_ray():  # made meanwhile
                if handler.stream is sieve:
                    handler.setStream(user)
            sieve.end()
            if colour is None:
                del os.environ["RAY_COLOR_PREFIX"]
            else:
                os.environ["RAY_COLOR_PREFIX"] = colour


@contextlib.contextmanager
def quietly_for_once(name: str) -> Iterator[Quiet]:
    """As `quietly`, for a job without a folder of its own: the file is temporary, and only stays where the body fails.

    Raises:
        Exception: Whatever the body raises, with a note that names the file.
    """
    path = log_file(None, name)
    try:
        with quietly(path, name, f"{name}.py: ") as apart:
            yield apart
    except Exception as error:
        error.add_note(f"what Ray and its workers printed is in {path}")
        raise
    except BaseException:
        os.unlink(path)
        raise
    os.unlink(path)


def notes_of(error: BaseException) -> str:
    """What has been added to an error, as the end of a message."""
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def _handlers_of_ray() -> Iterator[logging.StreamHandler[Any]]:
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "ray" and isinstance(logger, logging.Logger):
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                    yield handler
