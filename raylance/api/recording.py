"""Owns what a loader tells of itself: its counters, the verdict in words, and what its record says of it; never moves
a position, and never writes anything itself.
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from raylance import process
from raylance.batches.display import display_rows
from raylance.columns import COMPONENT, ROW_OFFSET, VALID, dataset_names, dataset_stem
from raylance.decode.arrays import to_numpy
from raylance.decode.images import Image
from raylance.environment.connection import current_session, long_call, ray_session
from raylance.errors import DatasetError
from raylance.observe import Stats, clock
from raylance.observe.metrics import Publisher
from raylance.observe.parts import Part
from raylance.observe.record import FOLDER, Place, Record, open_folder, told_uri
from raylance.observe.recorder import Recording, position_of
from raylance.observe.stats import now_s, saving
from raylance.observe.verdict import Verdict, judge
from raylance.planning.digest import Ledger
from raylance.planning.plan import Plan
from raylance.planning.state import identity_of, subject_of
from raylance.settings import DeliverySpec, Options, ReadSpec


class Recorded:
    """What is counted of a loader, and where that goes."""

    _feed: ReadSpec
    _delivery: DeliverySpec
    _options: Options
    rank: int
    world_size: int
    seat: process.Seat | None
    _epoch: int
    _position: int
    state_dict: Callable[[], dict[str, Any]]

    def __init__(self, *, leaves_nothing: bool = False) -> None:
        """Counts nothing yet; of a pass over a handle, which leaves nothing behind, no run has a record."""
        self._leaves_nothing = leaves_nothing
        self._called: str | None = None  # what its record calls it
        self._number = 1  # among those of its data that are iterated at one time
        self._stats = Stats()
        self._ledger = Ledger()
        self._recording: Recording | None = None
        self._made_at_s = clock.now()  # in this process
        self._prepared_after_s: float | None = None  # by its user, before the first batch was asked for

    def stats(self) -> dict[str, Any]:
        """Timings and counters since the loader was made; `raylance.observe.Stats` tells how to read each."""
        return self._stats.as_dict()

    def explain(self) -> Verdict:
        """Says in words what limits this rank so far, and what to change; see `Verdict`.

        The trainer's time between its batches is compared with what it waited for, and with what reading and decoding
        would deliver by themselves. Of a whole run, `explain_run` says the same over all ranks.
        """
        facts = {**self._facts(), "cluster_cpus": _cluster_cpus()}
        return judge([Part(figures=self._stats.sample(), facts=facts)])

    def identity(self) -> dict[str, Any]:
        """Which data these are, and in which order they come, as checkpoints say it, without the position: for what a
        run is tracked by. JSON-able.
        """
        return identity_of(self.state_dict())

    def record(self, *, may_wait: bool = True) -> None:
        """Writes what has been counted so far to the run's storage, where the loader is recorded: before a process
        that may be killed ends, say. A thread does it all the time, some seconds late; `report` does it, too, and each
        end of an epoch.

        Args:
            may_wait: Whether to wait for the network where the storage is remote.
        """
        if self._recording is not None:
            self._recording.flush(may_wait=may_wait)

    @contextlib.contextmanager
    def reporting(self, metrics: Mapping[str, Any], *, has_checkpoint: bool) -> Iterator[None]:
        """Notes a report to Ray Train, and writes the record before and after it: a run often ends with one. All that
        the report does belongs into the body, which counts as saving.

        Args:
            metrics: What is reported; numbers among it are noted.
            has_checkpoint: Whether a checkpoint comes with it.
        """
        begin = clock.now()
        with saving([self._stats]):
            if has_checkpoint:  # from which the run may resume
                self._ledger.cut()
            self.record()
            yield
            numbers = {str(name): value for name, value in metrics.items() if isinstance(value, int | float)}
            told = {"metrics": numbers, "seconds": clock.now() - begin, "has_checkpoint": has_checkpoint}
            self._stats.tell("report", told)
            self.record()

    def _begin_record(self, plan: Plan) -> None:
        """Begins the record, where there is to be one."""
        if self._recording is not None or self._options.record is False:
            return
        place, run = _place_of(self._options.record, leaves_nothing=self._leaves_nothing)
        state = self.state_dict()
        if place is not None:
            self._name_apart(place.path, f"{subject_of(state)} {self._is_whole}")
        # Not 0 where the loader was closed, and continues. The first batch is being waited for already.
        before, waited_s = self._stats.counted(), self._stats.timed_s("wait_s")
        publisher = Publisher(run, self._name, self._worker[0], before) if ray_session() else None
        if place is None:
            self._stats.first_rows = pa.table({})  # nobody looks at them
        if place is None and publisher is None:
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
        who = {"start": start, "rank": self.rank, "world_size": self.world_size, "process": _process()}
        ledger = self._ledger
        self._stats.called, self._stats.shared_s = self._name, {}
        self._recording = Recording(
            Record(facts, before),
            self._stats,
            position_of(self),
            place,
            publisher,
            _look,
            lambda: who | ledger.to_dict(),
        )
        with _naming:
            _recorded.setdefault(self, (self._worker[0], (), 1))

    def _tell_error(self, error: Exception) -> None:
        self._stats.tell("error", f"{type(error).__name__}: {error}")
        self.record()

    def _end_record(self) -> None:
        recording, self._recording = self._recording, None
        with _naming:
            _recorded.pop(self, None)
        if recording is not None:
            recording.end()

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and position of the next batch."""
        return self._epoch, self._position

    @property
    def _stem(self) -> str:
        seated = self.seat.name if self.seat is not None else None
        return seated or self._options.name or dataset_stem(self._feed.source.uri)

    @property
    def _name(self) -> str:
        return self._called or self._stem

    def _name_apart(self, folder: str, subject: str) -> None:
        """Settles what the record calls the loader. Loaders of unlike data have unlike names, as long as the process
        lives; and so have two of the same data that a rank iterates at one time, or what one of them did would be taken
        for what the other did.

        Args:
            folder: Of the records.
            subject: Which data it is of.
        """
        if self.seat is not None:
            return
        kind, rank = (folder, self._stem, subject), self._worker[0]
        with _naming:
            taken = {number for other, (*of, number) in _recorded.items() if other is not self and of == [rank, kind]}
            self._number = next(number for number in itertools.count(1) if number not in taken)
            _recorded[self] = rank, kind, self._number
            given = {name for (there, *_), name in _names.items() if there == folder}
            given |= {other.seat.name for other in process.seated if other.seat}
            names = itertools.chain([self._stem], (f"{self._stem}-{number}" for number in itertools.count(2)))
            self._called = _names.setdefault((*kind, self._number), next(name for name in names if name not in given))

    @property
    def _is_whole(self) -> bool:
        """Whether every rank sees the dataset whole, through a loader of its own."""
        if self.seat is not None:
            return not self.seat.split
        return self.world_size == 1 and (process.train_place() or (0, 1))[1] > 1

    @property
    def _worker(self) -> tuple[int, int]:
        """Rank and world size of the worker: of a dataset that each rank sees whole, all loaders are rank 0 of 1."""
        return (process.train_place() if self._is_whole else None) or (self.rank, self.world_size)

    def _facts(self) -> dict[str, Any]:
        """What the verdict needs to know beside the figures, and who this is."""
        source, decoding, record = self._feed.source, self._feed.decoding, self._options.record
        rank, ranks = self._worker
        options = dataclasses.asdict(self._options)
        return {
            "sources": list(dataset_names(source.uri)),
            "dataset": self._name,
            "split": not self._is_whole,
            "rank": rank,
            "world_size": ranks,
            "rows": self._delivery.rows,
            "row_bytes": float(source.likely_row_bytes),
            "decodes": [decoder.column for decoder in decoding.decoders] if decoding else [],
            "draft": [each.draft for each in decoding.decoders if isinstance(each, Image)] if decoding else [],
            "order": self._delivery.order.name,
            "prepared": self._prepared_after_s is not None,
            "prepared_after_s": self._prepared_after_s,
            "options": options | {"record": told_uri(record) if isinstance(record, str) else record},
            "worker_cpus": _worker_cpus(),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        }


_recorded: "weakref.WeakKeyDictionary[Recorded, tuple[int, tuple[str, ...], int]]" = weakref.WeakKeyDictionary()
_names: dict[tuple[Any, ...], str] = {}  # given in this process, by folder, stem, data and number
_naming = threading.Lock()  # loaders may begin in several threads


@functools.cache
def _id_of(pid: int) -> str:
    return f"{uuid.uuid4().hex}-{pid}"


def _process() -> str:
    """This process, and no other one: containers start again with the same host name and process ID."""
    return _id_of(os.getpid())


def recorded() -> list[Recorded]:
    """The loaders of this process that have a record or metrics now."""
    with _naming:
        return list(_recorded)


def _start_of_run() -> str:
    """What the workers of one start of a Ray Train run have in common, and no others: "" outside of one."""
    if process.train_place() is None:
        return ""
    with current_session() as session:
        group = importlib.import_module("ray").get_runtime_context().get_placement_group_id() if session else None
    return str(group or "")


def _place_of(wanted: bool | str, *, leaves_nothing: bool) -> tuple[Place | None, str]:
    """Where a record goes, and the name of the run."""
    if isinstance(wanted, str):
        filesystem, path = open_folder(wanted)
        return Place(filesystem, f"{path}/{FOLDER}"), os.path.basename(path)
    found = None if leaves_nothing else process.train_storage()
    if found is None:
        return None, "interactive"
    filesystem, path, run = found
    return Place(filesystem, f"{path}/{FOLDER}"), run


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


def _look(rows: pa.Table) -> str:
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
