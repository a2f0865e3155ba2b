"""The reports of one loader: its statistics, its verdict and the facts of its record."""

import contextlib
import dataclasses
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pyarrow as pa

from raylance._version import __version__
from raylance.api.naming import choose_name, release_name
from raylance.batches.shown_rows import display_rows
from raylance.columns import COMPONENT, ROW_OFFSET, VALID, dataset_names, dataset_stem
from raylance.decode.arrays import to_numpy
from raylance.environment import facts as surroundings
from raylance.environment import process
from raylance.environment.connection import ray_session
from raylance.errors import ConfigError, DatasetError
from raylance.observe import Stats, clock
from raylance.observe.clock import now_s
from raylance.observe.figures import RankFigures
from raylance.observe.metrics import Publisher
from raylance.observe.record import FOLDER, Record, RecordFolder, open_folder
from raylance.observe.recording import Recording
from raylance.observe.spans import StepSpans
from raylance.observe.verdict import Verdict, judge
from raylance.observe.wait_clock import saving
from raylance.opened import ReadSpec
from raylance.orders.shuffles import Laned
from raylance.planning.cursor import Cursor
from raylance.planning.digest import Digest, Ledger
from raylance.planning.plan import Plan
from raylance.planning.shard_context import ShardContext
from raylance.planning.state import State, subject_of
from raylance.planning.summary import counted
from raylance.secrets import public_uri
from raylance.settings import Options


class Recorder:
    """Keeps the statistics and the record of one loader. Picklable until the loader is iterated.

    Attributes:
        stats: Timings and counters of the loader.
        context: The rank that the loader serves.
        cursor: The position of the loader.
        stem: The dataset's name. Records add a number to it if several loaders have the same name.
        recording: Writes the record and the metrics; None if there are neither now.
        checkpoint: The checkpoint from which Ray Train continued the run when the loader began; None if there was none.
        has_reported: Whether a loader of this process was reported with a checkpoint.
        restored: Fingerprints of the data whose position a loader of this process has loaded.
    """

    has_reported: ClassVar[bool] = False
    restored: ClassVar[set[str]] = set()

    def __init__(
        self,
        read_spec: ReadSpec,
        options: Options,
        context: ShardContext,
        cursor: Cursor,
        ledger: Ledger,
        *,
        is_recorded: bool = True,
        num_workers: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        """Begins with empty counters and no record. If `is_recorded` is False, as for a pass over a handle, there is
        never a record. The record shows `ledger`, the digests of the rows that the loader handed out. `num_workers` is
        the number of workers if torch's DataLoader makes the batches, and `persistent_workers` whether they stay; its
        record does not show what they wait for.
        """
        self.stats, self.context, self.cursor, self._ledger = Stats(), context, cursor, ledger
        self._read_spec, self._options, self._is_recorded = read_spec, options, is_recorded
        self._num_workers, self._persistent_workers = num_workers, persistent_workers
        self._plan_facts: dict[str, Any] = {}  # about the plan of the last pass
        self._shard_rows = cursor.delivery_spec.order.shard_rows  # as the user gave it; the first pass resolves "auto"
        self._uploads_async = False  # whether reports upload while training continues
        self.stem = context.name or options.name or dataset_stem(read_spec.source.uri)
        self._name, self._number = self.stem, 1  # name in the record; number among loaders of the same data
        self.recording: Recording | None = None
        self.has_checkpoint = False  # whether Ray Train continues from one with this loader's position
        self._spans: StepSpans | None = None  # if the option `traces` is on
        self._restored: tuple[int, int] | None = None  # the place of the state that was loaded last
        self._resharded: tuple[int, str] | None = None  # old dp_size, and where; until the next batch
        self._prepared_after_s: float | None = None  # when prepare() was called, before the first batch
        self._origin: dict[str, Any] = {"elastic": context.is_elastic}  # facts about the process for the digest
        self._enter_process()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enter_process()

    def _enter_process(self) -> None:
        self._made_at_s = clock.now()
        with _entering:
            _recorders.add(self)

    @property
    def is_assigned(self) -> bool:
        """Whether Ray Train gave the loader to this process."""
        return self.context.assignment is not None

    def explain(self) -> Verdict:
        """Judges this rank's figures so far; see `RankLoader.explain`."""
        facts = {**self._facts(), "cluster_cpus": surroundings.cluster_cpus()}
        return judge([RankFigures(figures=self.stats.sample(), facts=facts)])

    def flush(self, *, may_wait: bool = True) -> None:
        """Writes the record, if the loader has one; see `RankLoader.record`."""
        if (recording := self.recording) is not None:  # another thread may end it
            recording.flush(may_wait=may_wait)

    def on_prepare(self) -> None:
        """Notes the time of the user's first call of `prepare`, if it came before the first batch."""
        if not self.stats.batches and self._prepared_after_s is None:
            self._prepared_after_s = clock.now() - self._made_at_s

    def on_resume(self, saved: State) -> None:
        """Records that the loader continues at a saved state."""
        self._restored = saved.epoch, saved.position
        Recorder.restored.add(self.cursor.delivery_spec.fingerprint)
        self.stats.record_event("resume", {"epoch": saved.epoch, "position": saved.position})

    @contextlib.contextmanager
    def waiting(self, *, is_first: bool) -> Iterator[None]:
        """Counts the seconds of the body as waiting for a batch, the first one of a pass or another."""
        stats = self.stats
        begun = stats.begin("wait_s")
        if self._options.traces:
            self._spans = self._spans or self._make_spans()
            self._spans.begin(begun)
            self.stats.on_waited, self.stats.in_step = self._spans.waited, self._spans.in_step
        try:
            yield
        finally:
            waited_s = stats.end("wait_s", begun)
            if self._spans is not None:
                self._spans.end_wait(begun + waited_s)
            stats.first_batch_s += waited_s if is_first else 0.0
            self._count_reshard(waited_s)

    def hand_out(self) -> float:
        """Records that a batch is handed out now; returns the argument of `take_back`."""
        begun = self.stats.begin("user_s")
        if self._spans is not None:
            at = self.cursor
            self._spans.hand_out({"epoch": at.epoch, "position": at.position, "step": at.global_step})
        return begun

    def take_back(self, handed_out: float | None) -> None:
        """Records that the consumer has used the batch that it was handed; None if it was handed none."""
        if handed_out is not None:
            self.stats.end("user_s", handed_out)
        if self._spans is not None:
            self._spans.end(clock.now())

    def _make_spans(self) -> StepSpans:
        return StepSpans({"dataset": self.stem, "rank": self.context.rank})

    def on_reshard(self, context: ShardContext) -> None:
        """Sets the loader's new context. Notes a change of the share, if batches were handed out before."""
        changes = context.is_elastic and context.share != self.context.share
        if changes and self._resharded is None and self.stats.batches:
            since = f"from epoch {self.cursor.epoch}, position {self.cursor.position:,}"
            self._resharded = self.context.dp_size, since
        self.context, self._origin["elastic"] = context, context.is_elastic

    def on_move(self, shares: Mapping[str, float], reason: str, state: dict[str, Any]) -> None:
        """Records that the training function has changed the shares of a mixture, and the loader's new state."""
        place = {"epoch": state["epoch"], "position": state["position"]}
        self.stats.record_event("move", {**place, "shares": dict(shares), "reason": reason})
        if self.recording is not None:
            self.recording.update(state=state)

    def on_skip(self, skip: dict[str, Any]) -> None:
        """Records that the training function has passed over steps, and why."""
        self.stats.record_event("skip", skip)

    def _count_reshard(self, waited_s: float) -> None:
        """Counts the wait for the first batch in a new share; rank 0 also records that ranks joined or left."""
        if self._resharded is None:
            return
        (before, since), self._resharded = self._resharded, None
        self.stats.reshard_s += waited_s
        if self.context.dp_rank == 0 and self.context.dp_size != before:
            ranks = counted(self.context.dp_size, "data-parallel rank")
            happened = f"{since} on, {ranks} share each step in place of {before}; the next batch took {waited_s:.2f} s"
            self.stats.record_event("fault", happened)

    def on_epoch(self, epoch: int, begin: int, end: int, passed: Digest) -> None:
        """Records a certificate of a pass to the end of an epoch: its positions [begin, end), and its rows' digest."""
        certificate = {
            "verdict": "the rows of this rank's plan, each exactly once",
            "epoch": epoch,
            **self.context.to_dict(),
            "positions": [begin, end],
            **dataclasses.asdict(passed),
        }
        self.stats.epoch_certificate = certificate
        self.stats.record_event("epoch", certificate)

    def on_error(self, error: Exception) -> None:
        """Records the error that ends a pass."""
        self.stats.record_event("error", f"{type(error).__name__}: {error}")
        self.flush()

    @contextlib.contextmanager
    def reporting(
        self, metrics: Mapping[str, Any], *, has_checkpoint: bool, uploads_async: bool = False
    ) -> Iterator[None]:
        """Records a report to Ray Train, and counts its time as saving; the body of the context makes the report.
        Writes the record before and after the report, because a run often ends with a report.
        """
        begin = clock.now()
        self._uploads_async |= uploads_async
        self.cursor.settle()
        Recorder.has_reported |= has_checkpoint
        with saving([self.stats]):
            self.flush()
            yield
            numbers = {str(name): value for name, value in metrics.items() if isinstance(value, int | float)}
            report = {"metrics": numbers, "seconds": clock.now() - begin, "has_checkpoint": has_checkpoint}
            report["uploads_async"] = uploads_async
            self.stats.record_event("report", report)
            self.flush()

    def begin_pass(self, plan: Plan, state: Callable[[], dict[str, Any]]) -> None:
        """Begins the record and the metrics at the first pass, if the options ask for them. Epochs of a mixture whose
        weights change have other lengths.
        """
        self._plan_facts = _facts_of(plan, self.cursor.delivery_spec.row_bytes)
        if self.recording is not None:
            self.recording.update(**self._epoch_facts(plan))
        elif self._options.record is not False:
            self._begin_record(plan, state())

    def _epoch_facts(self, plan: Plan) -> dict[str, Any]:
        epoch, has_steps = self.cursor.epoch, plan.budget is None  # steps of a cost take seconds to count
        are_whole = has_steps and plan.remainder != "ragged"
        rows = plan.steps(epoch) * plan.global_batch_size if are_whole else plan.rows_of(epoch)
        return {
            "steps": plan.steps(epoch) if has_steps else None,
            "limits": {
                "inflight_limit_bytes": float(self._options.inflight_bytes),
                "reader_limit_bytes": float(self._options.reader_bytes),
                "epoch_rows": float(rows),
            },
        }

    def _begin_record(self, plan: Plan, state: dict[str, Any]) -> None:
        folder, run = _folder_of(self._options.record, is_recorded=self._is_recorded)
        rank = self._worker[0]
        if folder is not None and not self.is_assigned:
            data = (folder.path, self.stem, f"{subject_of(state)} {self._is_whole}")
            others = {other.context.name or "" for other in assigned_recorders()}
            self._name, self._number = choose_name(self, rank, data, others)
        # The figures are not 0 if the loader was closed before. The wait for the first batch has begun already.
        before, waited_s = self.stats.sample(up_to_now=False), self.stats.timed_s("wait_s")
        publisher = Publisher(run, self._name, rank, before, peers=self.context.peers) if ray_session() else None
        if folder is None:
            self.stats.first_rows = pa.table({})  # nothing would show these rows
        if folder is None and publisher is None:
            return
        start = surroundings.placement_group() if process.train_rank() is not None else ""
        facts = self._facts() | {
            "run": run,
            "start": start,
            "repeats": plan.order.repeats,
            "restored": self._restored,
            "checkpoint": self.has_checkpoint,
            "started": now_s() - waited_s,
            "raylance": __version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "cluster_cpus": surroundings.cluster_cpus(),
            "state": state,
            "begun": {name: state[name] for name in ("epoch", "position", "step")},
            "stem": self.stem,
            "number": self._number,
            "remainder": plan.remainder,
            "global_batch_size": plan.global_batch_size,
            **self._epoch_facts(plan),
        }
        self._origin |= {"start": start, **self.context.to_dict(), "process": surroundings.process_id()}
        origin, ledger = self._origin, self._ledger  # the recording must not hold the recorder, which holds the cursor
        self.stats.called, self.stats.shared_s = self._name, {}
        self.recording = Recording(
            Record(facts, before),
            self.stats,
            self.cursor,
            folder,
            publisher,
            _rows_html,
            lambda: origin | ledger.to_dict(),
        )

    def end(self) -> None:
        """Ends the record and the metrics; another pass begins new ones."""
        recording, self.recording = self.recording, None
        release_name(self)
        if recording is not None:
            recording.end()

    @property
    def _is_whole(self) -> bool:
        """Whether every rank sees the whole dataset, through its own loader."""
        if self.context.assignment is not None:
            return not self.context.assignment.is_split
        return self.context.world_size == 1 and (process.train_rank() or (0, 1))[1] > 1

    @property
    def _worker(self) -> tuple[int, int]:
        """Rank and world size to record. If every rank reads the whole dataset, each loader is rank 0 of 1, so rank and
        world size of the worker are used.
        """
        return (process.train_rank() if self._is_whole else None) or (self.context.rank, self.context.world_size)

    def _facts(self) -> dict[str, Any]:
        """Returns facts that identify the loader, and facts that the verdict needs in addition to the figures."""
        source, decoding, record = self._read_spec.source, self._read_spec.decoding, self._options.record
        rank, ranks = self._worker
        decoders = decoding.decoders if decoding else ()
        images = [each for each in decoders if each.content == "images" and each.channels_last]
        options = dataclasses.asdict(self._options)
        return {
            "sources": list(dataset_names(source.uri)),
            "dataset": self._name,
            "split": not self._is_whole,
            "rank": rank,
            "world_size": ranks,
            "peers": self.context.peers,
            "rows": self.cursor.delivery_spec.rows,
            "row_bytes": float(source.likely_row_bytes),
            "decodes": [each.output_name for each in decoding.made] if decoding else [],
            "videos": [each.column for _, each in source.derived if each.channels],
            "draft": [getattr(each, "draft", True) for each in images],
            "order": self.cursor.delivery_spec.order.name,
            "balances": self.cursor.delivery_spec.balance is not None,
            "columns": len(self._read_spec.delivers),
            "shard_rows": self._shard_rows,
            "window_bytes": self.cursor.delivery_spec.window_bytes,
            **self._plan_facts,
            "poll_s": surroundings.poll_s(),
            "uploads_async": self._uploads_async,
            "num_workers": self._num_workers,
            "persistent_workers": self._persistent_workers,
            "prepared": self._prepared_after_s is not None,
            "prepared_after_s": self._prepared_after_s,
            "options": options | {"record": public_uri(record) if isinstance(record, str) else record},
            "worker_cpus": surroundings.worker_cpus(),
            "cpus": surroundings.node_cpus(),
        }


def _facts_of(plan: Plan, row_bytes: float) -> dict[str, Any]:
    """Returns facts about a plan that the verdict needs: the size of steps, and how windows are read."""
    order = plan.order
    budget = None if plan.budget is None else dataclasses.asdict(plan.budget)
    if not isinstance(order.settings, Laned):
        return {"budget": budget}
    return {
        "budget": budget,
        "in_parts": order.needs_whole_windows and plan.chunk_positions < (order.read_positions or 0),
        "shard_bytes": order.shard_rows * row_bytes,
        "lane_bytes": order.rows / order.lane_count * row_bytes,
    }


_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()  # of this process
_entering = threading.Lock()  # loaders may be made in several threads


def all_recorders() -> list[Recorder]:
    """Returns the recorders of loaders that Ray Train gave to this process, or that have a record or metrics now."""
    with _entering:
        return [recorder for recorder in _recorders if recorder.is_assigned or recorder.recording]


def assigned_recorders() -> list[Recorder]:
    """Returns the recorders of the loaders that Ray Train gave to this process."""
    with _entering:
        return [recorder for recorder in _recorders if recorder.is_assigned]


def _folder_of(wanted: bool | str, *, is_recorded: bool) -> tuple[RecordFolder | None, str]:
    """Returns the folder of a record, None if there is none, and the name of the run."""
    if isinstance(wanted, str):
        filesystem, path = open_folder(wanted)
        return RecordFolder(filesystem, f"{path}/{FOLDER}"), os.path.basename(path)
    found = process.train_storage() if is_recorded else None
    if found is None:
        return None, "interactive"
    filesystem, path, run = found
    return RecordFolder(filesystem, f"{path}/{FOLDER}"), run


def _rows_html(rows: pa.Table) -> str:
    """Returns HTML that shows rows."""
    columns = [name for name in rows.column_names if name not in (COMPONENT, VALID)]
    batch = {name: _values(rows.select([name]))[name] for name in columns}
    shown = {name: values for name, values in batch.items() if name != ROW_OFFSET} | {ROW_OFFSET: batch[ROW_OFFSET]}
    return display_rows(shown, rows.num_rows, "", "", None)._repr_html_()


def _values(column: pa.Table) -> Mapping[str, Any]:
    try:
        return to_numpy(column)
    except (ConfigError, DatasetError):  # the column has nulls, or a type that an array cannot hold
        values: dict[str, Any] = column.to_pydict()
        return values
