"""The progress line of a run, in the process that started it, or in any other."""

import contextlib
import importlib.util
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import numpy as np
from tqdm.std import tqdm as text_bar

from raylance.columns import describe_rows
from raylance.errors import ConfigError
from raylance.reports.progress import Progress, describe_report, events, progress
from raylance.reports.reading import LoaderRecord, Run, RunFolder, Version
from raylance.secrets import public_uri

_LOCAL_S, _REMOTE_S = 1.0, 10.0  # seconds between two looks at a local or a remote storage
_PATIENCE_S = 30.0  # seconds to wait for the first look, and for the last one
_LOG_S = 30.0  # seconds between two lines in a log
_RETRY_S = 1.0  # seconds between two tries of the first look
_TOGETHER_S = 120.0  # all ranks of a start write their records within this time
_BAD_ROWS = 3  # most bad rows that one look names
_SAME_S = 5.0  # most seconds between the times at which several datasets record one report
_BAR = "{percentage:3.0f}%|{bar:20}| {unit}"  # a postfix would begin with a comma

logger = logging.getLogger(__name__)

Tell = Callable[[Mapping[str, Any]], str]


@contextlib.contextmanager
def watch(
    path: str | os.PathLike[str],
    *,
    epochs: int | None = None,
    storage_filesystem: Any = None,
    tell: Tell | None = None,
    file: TextIO | None = None,
) -> Iterator[None]:
    """Shows one progress line of a run while the body runs: `with raylance.watch(path): trainer.fit()`.

    The line shows rows, rate, the share of time that the trainer waits, the cause of waiting, and the time left. In a
    terminal and in a notebook the line is updated in place; a log gets a new line twice a minute. Reports to Ray Train,
    survived faults and rows that could not be decoded appear as lines above it. All of this comes, some seconds late,
    from the records that loaders write next to the checkpoints: no process of the run is asked.

    Args:
        path: The run's folder, <storage path>/<run name>, as a path or URI; it need not exist yet.
        epochs: Number of epochs of the run, to show the time left of the run; None shows the time left of the epoch.
        storage_filesystem: A file system of pyarrow, as for `ray.train.RunConfig`; `path` is then a path in it.
        tell: Makes a line from the metrics of a report, "" for no line; None shows the numbers of the report.
        file: The stream to write to; None for stderr.

    Raises:
        ConfigError: If `path` cannot be a folder.
    """
    if not (file is None or hasattr(file, "write")):
        raise ConfigError(f"watch(): file={file!r}: give a stream, or None for stderr.")
    folder = RunFolder(path, storage_filesystem)
    least_s = _LOCAL_S if folder.filesystem.type_name == "local" else _REMOTE_S
    watcher = _Watcher(folder, epochs, tell, file or sys.stderr)
    has_begun, ended = threading.Event(), threading.Event()

    def look_on() -> None:
        watcher.begin_safely()
        has_begun.set()
        seconds = 0.0
        while not ended.wait(max(least_s, 10 * seconds)):  # reading hundreds of ranks takes time
            begin = time.monotonic()
            watcher.look_safely()
            seconds = time.monotonic() - begin
        watcher.look_safely()

    thread = threading.Thread(target=look_on, name="raylance-watch", daemon=True)
    thread.start()
    has_begun.wait(_PATIENCE_S)  # records of earlier starts must be known first; but a storage may hang
    try:
        yield
    finally:
        ended.set()
        thread.join(_PATIENCE_S)  # a storage may hang, but that must not end the run
        watcher.close()


class _Watcher:
    """Reads the records of a run again and again, and shows new events and the progress."""

    def __init__(self, folder: RunFolder, epochs: int | None, tell: Tell | None, file: TextIO) -> None:
        self._folder, self._epochs, self._tell, self._file = folder, epochs, tell, file
        self._before: dict[str, Version] = {}  # files at the beginning, to find those that change
        self._logged, self._begun = -_LOG_S, time.monotonic()
        self._bad_rows: set[tuple[str, int, str]] = set()
        self._happened: set[tuple[Any, ...]] = set()
        self._errors: set[str] = set()  # shown errors: a later start may fail by the same error
        self._reports: dict[str, tuple[float, str]] = {}  # by line: time and dataset of the last event with it
        self._has_failed = self._has_seen = False
        self._bar: Any = None

    def begin_safely(self) -> None:
        """Reads the present records, so that events of earlier starts are not shown."""
        for is_last in (False, False, True):
            try:
                self._before = self._folder.list()
                run = self._folder.load(_newest(self._before))
            except Exception as error:  # any error of a storage: the run continues
                if is_last:
                    logger.warning(
                        "the records of earlier starts cannot be read (%s). Their events may be shown again.", error
                    )
                time.sleep(_RETRY_S)
                continue
            self._happened = {_key(*event) for event in events(run)}
            self._bad_rows = {(r.dataset, *row[:2]) for r in run.records for row in r.bad_rows}
            return

    def look_safely(self) -> None:
        """Calls `look`. No failure ends the run, not even one of the user's `tell` or of a lost terminal."""
        try:
            self.look()
        except Exception:
            if not self._has_failed:
                logger.warning("the progress line has failed; the run continues without it", exc_info=True)
            self._has_failed = True

    def look(self) -> None:
        """Reads the records that have changed, and shows new events and the progress."""
        try:
            listed = self._folder.list()
            changed = {path: version for path, version in listed.items() if self._before.get(path) != version}
            if self._before.keys() & changed.keys():  # the run continues: all its ranks count, not only changed ones
                changed |= _newest({path: version for path, version in listed.items() if path in self._before})
            run = self._folder.load(changed)
        except OSError:  # a storage that fails now may work the next time
            return
        if not run.records:
            return
        self._has_seen = True
        for when, record, kind, what in events(run):
            # All events are remembered. The time of the last one is not enough: records come late, and clocks differ.
            event = _key(when, record, kind, what)
            if event in self._happened:
                continue
            self._happened.add(event)
            line = self._line(run, record, kind, what)
            if line and not (kind == "report" and self._is_repeated(line, when, record.dataset)):
                self._write(line)
        self._show_bad_rows(run)
        if (found := progress(run)) is not None:
            self._show(found)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if not self._has_seen:
            why = " meanwhile: its run may have ended before" if self._before else ": is that the run's folder?"
            self._write(f"no record of a loader came to {public_uri(self._folder.path)}{why}")

    def _line(self, run: Run, record: LoaderRecord, kind: str, what: Any) -> str:
        if kind == "report":
            if record.rank:  # rank 0 reports for all
                return ""
            return describe_report(what) if self._tell is None else self._tell(what["metrics"])
        if kind == "error":
            if what in self._errors:
                return ""
            self._errors.add(what)
        if kind in ("fault", "error"):
            return f"{record.dataset}, rank {record.rank}: {what}"
        if kind == "move" and not record.rank:
            weights = ", ".join(f"{name} {share:.4g}" for name, share in what["shares"].items())
            place = f"epoch {what['epoch']}, position {what['position']:,}"
            why = f" ({what['reason']})" if what["reason"] else ""
            return f"{record.dataset} has the shares {weights} from {place} on{why}"
        if kind == "skip" and not record.rank:
            place = f"epoch {what['epoch']}, position {what['position']:,}"
            why = f" ({what['reason']})" if what["reason"] else ""
            return f"{record.dataset} passes over {what['steps']:,} steps from {place} on{why}"
        # Users know at which row a run begins, but not at which row it continues after a fault: only that gets a line.
        earlier = itertools.takewhile(lambda each: each is not record, run.of(record.dataset))
        if kind == "resume" and any(each.rank == record.rank == 0 for each in earlier):
            return f"{record.dataset} continues in epoch {what['epoch']} after {what['position']:,} rows"
        return ""

    def _show_bad_rows(self, run: Run) -> None:
        """Names the masked rows, each only once, because the same rows come again in each epoch."""
        new: dict[tuple[str, int, str], str] = {}
        for record in run.records:
            sources = tuple(record.facts.get("sources", ()))
            for offset, column, why in record.bad_rows:
                row = record.dataset, offset, column
                if row not in self._bad_rows:
                    new[row] = f"{row[0]}: {column} of {describe_rows(np.array([offset]), sources)} is masked, {why}"
        self._bad_rows |= new.keys()
        for line in list(new.values())[:_BAD_ROWS]:
            self._write(line)
        if len(new) > _BAD_ROWS:
            self._write(f"and {len(new) - _BAD_ROWS:,} more rows that cannot be decoded are masked: see the report")

    def _is_repeated(self, line: str, when: float, dataset: str) -> bool:
        """Returns whether another dataset has recorded the same report: each dataset of a run records every report."""
        last, of = self._reports.get(line, (-np.inf, dataset))
        self._reports[line] = when, dataset
        return of != dataset and abs(when - last) < _SAME_S

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._file)
        else:
            print(line, file=self._file, flush=True)

    def _show(self, found: Progress) -> None:
        left_s = found.left_s(self._epochs)
        of = f" of {self._epochs}" if self._epochs else ""
        epoch, rows = found.epoch, found.rows
        is_done = rows == found.epoch_rows and epoch + 1 == (self._epochs or epoch + 1)
        left = "" if left_s is None or is_done else f"{text_bar.format_interval(left_s)} left, "
        # A narrow terminal cuts the end off, so the important parts come first.
        text = f"epoch {epoch}{of}: {rows:,}/{found.epoch_rows:,} rows, {left}{found.describe()}"
        if not (self._file.isatty() or _in_notebook()):
            # A start that continues has a position before it has a batch: it says nothing yet, unless that takes long.
            now, has_begun = time.monotonic(), found.pace > 0 or found.rate > 0
            if (has_begun or now - self._begun >= _LOG_S) and now - self._logged >= _LOG_S:
                self._logged = now
                print(text, file=self._file, flush=True)
            return
        if self._bar is None:
            self._bar = _make_bar(self._file)
        whole = self._epochs or 1  # without `epochs`, the bar shows the epoch
        before = epoch if self._epochs else 0
        self._bar.n = min(100, 100 * (before + rows / found.epoch_rows) / whole)
        self._bar.unit = text
        self._bar.refresh()


def _newest(files: Mapping[str, Version]) -> dict[str, Version]:
    """Returns the files that may be of the last start, whose ranks all write at about the same time."""
    last_s = max((version.written_s for version in files.values()), default=0.0)
    return {path: version for path, version in files.items() if version.written_s > last_s - _TOGETHER_S}


def _key(when: float, record: LoaderRecord, kind: str, what: Any) -> tuple[Any, ...]:
    """Returns the key by which an event is recognised."""
    return when, record.dataset, record.rank, kind


def _make_bar(file: TextIO) -> Any:
    if _in_notebook() and importlib.util.find_spec("ipywidgets") is not None:  # without ipywidgets tqdm warns
        widget: Any = importlib.import_module("tqdm.notebook")
        return widget.tqdm(total=100, unit="", bar_format=_BAR.replace("{bar:20}", "{bar}"))
    return text_bar(total=100, unit="", bar_format=_BAR, file=file, dynamic_ncols=True)


def _in_notebook() -> bool:
    """Returns whether this process is a notebook that shows widgets."""
    shell: Any = sys.modules.get("IPython")
    kind = type(shell.get_ipython()).__name__ if shell is not None else ""
    return kind == "ZMQInteractiveShell"
