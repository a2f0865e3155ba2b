"""Owns what one loader reports about itself: statistics, ledger, verdict, and its record's facts; never moves a
position, and never writes a file itself.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pyarrow as pa

from raylance.batches.assembly import Step
from raylance.batches.display import display_rows
from raylance.columns import COMPONENT, ROW_OFFSET, VALID, dataset_names, dataset_stem
from raylance.decode.arrays import to_numpy
from raylance.decode.images import Image
from raylance.environment import process
from raylance.environment.connection import current_session, long_call, ray_session
from raylance.errors import DatasetError
from raylance.observe import Stats, clock
from raylance.observe.events import now_s
from raylance.observe.figures import RankFigures
from raylance.observe.metrics import Publisher
from raylance.observe.record import FOLDER, Record, RecordFolder, open_folder, public_uri
from raylance.observe.recording import Recording, position_of
from raylance.observe.stats import saving
from raylance.observe.verdict import Verdict, judge
from raylance.planning.cursor import Cursor
from raylance.planning.digest import Digest, Ledger
from raylance.planning.plan import Plan
from raylance.planning.shard_context import ShardContext
from raylance.planning.state import State, subject_of
from raylance.read_spec import ReadSpec
from raylance.settings import Options


class Recorder:
    """Statistics, ledger and record of one loader. Picklable until the loader is iterated.

    Attributes:
        stats: Its timings and counters.
        ledger: Which rows it handed out.
        context: Which rank it serves.
        cursor: Where it stands.
    """

    def __init__(
        self, read_spec: ReadSpec, options: Options, context: ShardContext, cursor: Cursor, *, is_recorded: bool = True
    ) -> None:
        """Starts with empty counters and without a record.

        Args:
            read_spec: What the loader reads.
            options: How the loader uses the machine.
            context: Which rank the loader serves.
            cursor: Where the loader stands.
            is_recorded: Whether a run may have a record of it; not of one pass over a handle.
        """
        self.stats, self.ledger = Stats(), Ledger()
        self.context, self.cursor = context, cursor
        self._read_spec, self._options, self._is_recorded = read_spec, options, is_recorded
        self._called: str | None = None  # its name in the record
        self._number = 1  # among the loaders of the same data that are iterated at one time
        self._recording: Recording | None = None
        self._passed = Digest()  # handed out in this pass
        self._prepared_after_s: float | None = None  # when prepare() was called, before the first batch
        self._enter_process()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enter_process()

    def _enter_process(self) -> None:
        self._made_at_s = clock.now()
        if self.context.assignment is not None:
            _assigned.add(self)

    def explain(self) -> Verdict:
        """Judges this rank's figures so far; see `RankLoader.explain`."""
        facts = {**self._facts(), "cluster_cpus": _cluster_cpus()}
        return judge([RankFigures(figures=self.stats.sample(), facts=facts)])

    def flush(self, *, may_wait: bool = True) -> None:
        """Writes what has been counted so far, where the loader has a record; see `RankLoader.record`."""
        if self._recording is not None:
            self._recording.flush(may_wait=may_wait)

    def on_prepare(self) -> None:
        """Notes when the user prepared the first batch."""
        if not self.stats.batches and self._prepared_after_s is None:
            self._prepared_after_s = clock.now() - self._made_at_s

    def on_resume(self, saved: State) -> None:
        """Records that the loader continues at a saved state."""
        self.stats.record_event("resume", {"epoch": saved.epoch, "position": saved.position})
        self.ledger.load(saved.epoch, saved.position)

    def time(self, batches: Generator[list[Any], None, None]) -> Iterator[Any]:
        """Hands out batches, each in a list, and counts how long each is awaited and kept.

        All that happens while the consumer asks for a batch is waiting.
        """
        stats, is_first = self.stats, True
        try:
            while True:
                begun = stats.begin("wait_s")
                try:
                    handed = next(batches, None)
                finally:
                    waited_s = stats.end("wait_s", begun)
                stats.first_batch_s += waited_s if is_first else 0.0
                is_first = False
                if handed is None:
                    return
                with stats.timed("user_s"):
                    yield handed.pop()
        finally:
            batches.close()

    def on_step(self, epoch: int, step: Step) -> None:
        """Counts the rows of a step that was handed out."""
        self.ledger.add(epoch, step.before, step.after, step.digest, is_last=step.is_last)
        self._passed += step.digest

    def on_epoch(self, epoch: int, begin: int, end: int) -> None:
        """Certifies the pass that has handed out the last step of an epoch, over positions [begin, end)."""
        certificate = {
            "verdict": "the rows of this rank's plan, each exactly once",
            "epoch": epoch,
            "rank": self.context.rank,
            "world_size": self.context.world_size,
            "positions": [begin, end],
            **dataclasses.asdict(self._passed),
        }
        self.stats.epoch_certificate = certificate
        self.stats.record_event("epoch", certificate)

    def on_error(self, error: Exception) -> None:
        """Records the error that ends a pass."""
        self.stats.record_event("error", f"{type(error).__name__}: {error}")
        self.flush()

    @contextlib.contextmanager
    def reporting(self, metrics: Mapping[str, Any], *, has_checkpoint: bool) -> Iterator[None]:
        """Records a report to Ray Train, and writes the record before and after it: a run often ends with one.

        Args:
            metrics: What is reported; numbers among it are recorded.
            has_checkpoint: Whether a checkpoint comes with it.

        Yields:
            Nothing. The body makes the report, and counts as saving.
        """
        begin = clock.now()
        with saving([self.stats]):
            if has_checkpoint:  # from which the run may resume
                self.ledger.cut()
            self.flush()
            yield
            numbers = {str(name): value for name, value in metrics.items() if isinstance(value, int | float)}
            report = {"metrics": numbers, "seconds": clock.now() - begin, "has_checkpoint": has_checkpoint}
            self.stats.record_event("report", report)
            self.flush()

    def begin_pass(self, plan: Plan, state: Callable[[], dict[str, Any]]) -> None:
        """Begins to count a pass; with the first one, begins record and metrics, where there are to be any.

        Args:
            plan: Of the pass.
            state: Gives the loader's state.
        """
        if self._recording is None and self._options.record is not False:
            self._begin_record(plan, state())
        self.ledger.cut()
        self._passed = Digest()

    def _begin_record(self, plan: Plan, state: dict[str, Any]) -> None:
        folder, run = _folder_of(self._options.record, is_recorded=self._is_recorded)
        if folder is not None:
            self._choose_name(folder.path, f"{subject_of(state)} {self._is_whole}")
        # Not 0 where the loader was closed, and continues. The first batch is being waited for already.
        before, waited_s = self.stats.counted(), self.stats.timed_s("wait_s")
        publisher = Publisher(run, self._name, self._worker[0], before) if ray_session() else None
        if folder is None:
            self.stats.first_rows = pa.table({})  # nothing shows them
        if folder is None and publisher is None:
            return
        start = _start_of_run()
        facts = self._facts() | {
            "run": run,
            "start": start,
            "repeats": plan.order.repeats,
            "started": now_s() - waited_s,
            "raylance": importlib.import_module("raylance").__version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "cluster_cpus": _cluster_cpus(),
            "state": state,
            "stem": self._stem,
            "number": self._number,
            "remainder": plan.remainder,
            "global_batch_size": plan.global_batch_size,
            "steps": plan.steps(),
            "limits": {
                "inflight_limit_bytes": float(self._options.max_inflight_bytes),
                "window_limit_bytes": float(self._options.max_window_bytes),
                "epoch_rows": float(
                    plan.steps() * plan.global_batch_size if plan.remainder != "ragged" else plan.epoch_rows
                ),
            },
        }
        origin = {
            "start": start,
            "rank": self.context.rank,
            "world_size": self.context.world_size,
            "process": _process(),
        }
        ledger = self.ledger
        self.stats.called, self.stats.shared_s = self._name, {}
        self._recording = Recording(
            Record(facts, before),
            self.stats,
            position_of(self.cursor),
            folder,
            publisher,
            _rows_html,
            lambda: origin | ledger.to_dict(),
        )
        with _naming:
            _recorded.setdefault(self, (self._worker[0], (), 1))

    def end(self) -> None:
        """Ends the record and the metrics; another pass begins others."""
        recording, self._recording = self._recording, None
        with _naming:
            _recorded.pop(self, None)
        if recording is not None:
            recording.end()

    @property
    def _stem(self) -> str:
        return self.context.name or self._options.name or dataset_stem(self._read_spec.source.uri)

    @property
    def _name(self) -> str:
        return self._called or self._stem

    def _choose_name(self, folder: str, subject: str) -> None:
        """Chooses the loader's name in the record.

        Loaders of different data get different names for as long as the process lives. So do two loaders of the same
        data that one rank iterates at one time: under one name, their figures would be added up.

        Args:
            folder: Of the records.
            subject: Which data the loader reads.
        """
        if self.context.assignment is not None:
            return
        kind, rank = (folder, self._stem, subject), self._worker[0]
        with _naming:
            taken = {number for other, (*of, number) in _recorded.items() if other is not self and of == [rank, kind]}
            self._number = next(number for number in itertools.count(1) if number not in taken)
            _recorded[self] = rank, kind, self._number
            given = {name for (there, *_), name in _names.items() if there == folder}
            given |= {other.context.name for other in _assigned if other.context.name}
            names = itertools.chain([self._stem], (f"{self._stem}-{number}" for number in itertools.count(2)))
            self._called = _names.setdefault((*kind, self._number), next(name for name in names if name not in given))

    @property
    def _is_whole(self) -> bool:
        """Whether every rank sees the dataset whole, through a loader of its own."""
        if self.context.assignment is not None:
            return not self.context.assignment.is_split
        return self.context.world_size == 1 and (process.train_rank() or (0, 1))[1] > 1

    @property
    def _worker(self) -> tuple[int, int]:
        """Rank and world size of the worker: of a dataset that each rank sees whole, all loaders are rank 0 of 1."""
        return (process.train_rank() if self._is_whole else None) or (self.context.rank, self.context.world_size)

    def _facts(self) -> dict[str, Any]:
        """What the verdict needs to know beside the figures, and which loader this is."""
        source, decoding, record = self._read_spec.source, self._read_spec.decoding, self._options.record
        rank, ranks = self._worker
        options = dataclasses.asdict(self._options)
        return {
            "sources": list(dataset_names(source.uri)),
            "dataset": self._name,
            "split": not self._is_whole,
            "rank": rank,
            "world_size": ranks,
            "rows": self.cursor.delivery_spec.rows,
            "row_bytes": float(source.likely_row_bytes),
            "decodes": [decoder.column for decoder in decoding.decoders] if decoding else [],
            "draft": [each.draft for each in decoding.decoders if isinstance(each, Image)] if decoding else [],
            "order": self.cursor.delivery_spec.order.name,
            "prepared": self._prepared_after_s is not None,
            "prepared_after_s": self._prepared_after_s,
            "options": options | {"record": public_uri(record) if isinstance(record, str) else record},
            "worker_cpus": _worker_cpus(),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        }


_assigned: "weakref.WeakSet[Recorder]" = weakref.WeakSet()  # of the loaders that Ray Train gave to this process
_recorded: "weakref.WeakKeyDictionary[Recorder, tuple[int, tuple[str, ...], int]]" = weakref.WeakKeyDictionary()
_names: dict[tuple[Any, ...], str] = {}  # given in this process, by folder, stem, data and number
_naming = threading.Lock()  # loaders may begin in several threads


@functools.cache
def _id_of(pid: int) -> str:
    return f"{uuid.uuid4().hex}-{pid}"


def _process() -> str:
    """This process, and no other one: containers start again with the same host name and process ID."""
    return _id_of(os.getpid())


def all_recorders() -> list[Recorder]:
    """Of the loaders that Ray Train gave to this process, and of those that have a record or metrics now."""
    with _naming:
        return list(dict.fromkeys([*_assigned, *_recorded]))


def assigned_recorders() -> list[Recorder]:
    """Of the loaders that Ray Train gave to this process."""
    return list(_assigned)


def _start_of_run() -> str:
    """What the workers of one start of a Ray Train run have in common, and no others: "" outside of one."""
    if process.train_rank() is None:
        return ""
    with current_session() as session:
        group = importlib.import_module("ray").get_runtime_context().get_placement_group_id() if session else None
    return str(group or "")


def _folder_of(wanted: bool | str, *, is_recorded: bool) -> tuple[RecordFolder | None, str]:
    """Where a record goes, and the name of the run."""
    if isinstance(wanted, str):
        filesystem, path = open_folder(wanted)
        return RecordFolder(filesystem, f"{path}/{FOLDER}"), os.path.basename(path)
    found = process.train_storage() if is_recorded else None
    if found is None:
        return None, "interactive"
    filesystem, path, run = found
    return RecordFolder(filesystem, f"{path}/{FOLDER}"), run


def _cluster_cpus() -> float | None:
    """CPUs of the cluster as Ray counts them; None where no Ray runs."""
    session = ray_session()
    if not session:
        return None
    try:
        resources: dict[str, float] = long_call(session, importlib.import_module("ray").cluster_resources)
    except Exception:  # of a head that is away for a moment, say: no run ends for it
        return None
    return resources.get("CPU")


def _worker_cpus() -> float:
    """CPUs that Ray counts as this worker's; 0 for a driver, and where no Ray runs."""
    with current_session() as session:
        if not session:
            return 0.0
        try:
            assigned = importlib.import_module("ray").get_runtime_context().get_assigned_resources()
        except (AssertionError, AttributeError):  # how Ray says that this is a driver, or the client of one
            return 0.0
    return float(assigned.get("CPU", 0.0))


def _rows_html(rows: pa.Table) -> str:
    """HTML of some rows."""
    columns = [name for name in rows.column_names if name not in (COMPONENT, VALID)]
    batch = {name: _values(rows.select([name]))[name] for name in columns}
    shown = {name: values for name, values in batch.items() if name != ROW_OFFSET} | {ROW_OFFSET: batch[ROW_OFFSET]}
    return display_rows(shown, rows.num_rows, "", "", None)._repr_html_()


def _values(column: pa.Table) -> Mapping[str, Any]:
    try:
        return to_numpy(column)
    except DatasetError:  # of nulls, which no array carries, and a batch of pyarrow does
        values: dict[str, Any] = column.to_pydict()
        return values
