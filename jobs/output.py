"""What a job shows while Ray works for it: what a user must know, and the rest in a file.

Everything that Ray, its helpers and the workers print reaches the driver by `sys.stdout` and `sys.stderr`, with the
name of the process in front, or by handlers of `logging`. Ray's own settings can drop these lines (`log_to_driver`) or
shorten them, and cannot write them to a file of the run: `separate_output` puts a `LogFilter` there.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from tqdm.std import tqdm

MARK = "raylance: "  # before what a worker has to say to the user
# With it: marked lines; of raylance's helpers, whose messages begin with a small letter; the autoscaler's refusals.
_FOR_USERS = re.compile(
    r"(?:\(.*?pid=[^)]*\) )?" + MARK + r"(?P<marked>\S.*)"
    r"|\((?:ShardActor|DecodeActor)\b.*?pid=[^)]*\) (?P<helper>[a-z].*)"
    r"|\(autoscaler [^)]*\) (?P<autoscaler>(?:Error|Warning): .*)"
)
_REPEATED = re.compile(r"\s*(?:\x1b\[\d+m)*\s*\[repeated \d+x across cluster\].*")  # by which Ray folds lines


def message_in(line: str) -> str | None:
    """What a line says to the user, without the process's name; None for a line that does not concern users."""
    found = _FOR_USERS.fullmatch(_REPEATED.sub("", line.rstrip()))
    return found and found[str(found.lastgroup)]


class LogFilter(io.TextIOBase):
    """A stream that writes whole lines to a file, and passes those that concern users on to them, each text once."""

    encoding = "utf-8"

    def __init__(self, log: TextIO, user: TextIO, prefix: str, spell: Callable[[str], str] = str) -> None:
        """Writes nothing yet; `prefix` comes before each message to the user, and `spell` gives it the job's words."""
        self._log, self._user, self._prefix, self._spell = log, user, prefix, spell
        self._lock = threading.RLock()  # a signal's handler and a finalizer may print during a write
        self._rests: dict[int, str] = {}  # of lines, by thread: threads print theirs in pieces
        self._shown: set[str] = set()

    def write(self, text: str) -> int:
        """Takes text; an incomplete line waits for the rest of it."""
        with self._lock:
            if self._log.closed:  # some handler of a library holds it still
                return len(text)
            *lines, rest = (self._rests.pop(threading.get_ident(), "") + text).split("\n")
            if rest:
                self._rests[threading.get_ident()] = rest
            messages = [message for line in lines if (message := self._take(line)) is not None]
        for message in messages:
            tqdm.write(message, file=self._user)  # above the progress line, where there is one
        return len(text)

    def _take(self, line: str) -> str | None:
        self._log.write(f"{line}\n")
        message = message_in(line)
        shown = line if message is None else self._prefix + self._spell(message)
        if not shown.startswith(self._prefix) or shown in self._shown:
            return None
        self._shown.add(shown)
        return shown

    def flush(self) -> None:
        """Has the file written."""
        if not self._log.closed:
            self._log.flush()

    def end(self) -> None:
        """Writes incomplete lines."""
        with self._lock:
            self._log.writelines(f"{rest}\n" for rest in self._rests.values())
            self._rests.clear()

    def fileno(self) -> int:
        """Of the file, for what writes without Python."""
        return self._log.fileno()

    def writable(self) -> bool:
        """It is."""
        return True


class _Marked(logging.Formatter):
    """Makes a record one line that a `LogFilter` passes on."""

    def format(self, record: logging.LogRecord) -> str:
        return MARK + " ".join(record.getMessage().split())


@contextlib.contextmanager
def warnings_to_user() -> Iterator[None]:
    """Warnings that raylance and the jobs log in this process reach the user: for workers, and for drivers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Marked())
    propagates = {logging.getLogger(name): logging.getLogger(name).propagate for name in ("raylance", "jobs")}
    for logger in propagates:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in propagates.items():
            logger.removeHandler(handler)
            logger.propagate = propagate


class UserStreams(NamedTuple):
    """Where the user reads: the process's stdout and stderr."""

    out: TextIO
    err: TextIO

    def show(self, *lines: str) -> None:
        """Prints lines of the job's result."""
        print(*lines, sep="\n", file=self.out, flush=True)

    def warn(self, line: str) -> None:
        """Prints a warning, above the progress line where there is one."""
        tqdm.write(line, file=self.err)


def log_file(folder: str | None, name: str) -> str:
    """The path of a file for what Ray prints: in a folder of this machine, else in the one for temporary files."""
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, "output.log")
    handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
    os.close(handle)
    return path


@contextlib.contextmanager
def separate_output(
    path: str, command: Sequence[str] | str, prefix: str, spell: Callable[[str], str] = str
) -> Iterator[UserStreams]:
    """Keeps what Ray prints out of what the user reads, while the body runs.

    Args:
        path: Of the file that gets it; its content stays.
        command: What is being done, for the file's heading.
        prefix: Before what workers say to the user.
        spell: Returns what they say in the words of the job.
    """
    user = UserStreams(sys.stdout, sys.stderr)
    os.environ["RAY_COLOR_PREFIX"] = "0"
    with open(path, "a", buffering=1, encoding="utf-8", errors="replace") as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}: {command}\n")
        log_filter: Any = LogFilter(log, user.err, prefix, spell)
        # Ray's handlers hold the stream that was there when they were made.
        streams = {handler: handler.stream for handler in _handlers_of_ray()}
        for handler in streams:
            handler.setStream(log_filter)
        try:
            with (
                contextlib.redirect_stdout(log_filter),
                contextlib.redirect_stderr(log_filter),
                warnings_to_user(),
            ):
                yield user
        except Exception:
            log.write(traceback.format_exc())
            raise
        finally:
            for handler in _handlers_of_ray():
                if handler.stream is log_filter:  # that, too, which was made meanwhile
                    handler.setStream(streams.get(handler, user.err))
            log_filter.end()


@contextlib.contextmanager
def separate_output_once(name: str) -> Iterator[UserStreams]:
    """As `separate_output`, for a job without a folder: the file is temporary, and stays only where the body fails.

    Raises:
        Exception: What the body raises, with a note that names the file.
    """
    path = log_file(None, name)
    try:
        with separate_output(path, name, f"{name}.py: ") as user:
            yield user
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
