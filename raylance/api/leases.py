"""Leases of rows, for work that ends in any order: rollouts, evaluations, labelling."""

import contextlib
import dataclasses
import importlib
import json
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.api.dataset import Dataset, opened_of
from raylance.arguments import check_integer
from raylance.batches.lookup import Lookup
from raylance.columns import COMPONENT, ROW_OFFSET, VALID, join_offsets
from raylance.decode.arrays import NumpyBatch, to_numpy
from raylance.environment.connection import ray_session
from raylance.errors import ConfigError, HelperError, StateError
from raylance.observe.record import FOLDER, RecordFolder, open_folder
from raylance.opened import Opened
from raylance.orders.checking import select_rows
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.cursor import Cursor
from raylance.planning.digest import Digest
from raylance.planning.leases import LeaseBook, LeaseProgress, read_book
from raylance.settings import Options

T = TypeVar("T")

_BLOCK_ROWS = 1 << 18  # of the plan that a proof computes together
_RETRY_S = 60.0  # for which a call is repeated when the actor is gone
_CALLS = 256  # whose answers may be asked for again
_PAUSES_S = 0.05, 1.0  # first and longest pause between two calls that ask for rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Rows that were handed out, to be reported by `Leases.done` or `Leases.fail`.

    Attributes:
        tickets: A ticket for each row, int64, (n, 3), to be passed on as they are: its number, that of the lease, and
            the offset of the row. The tickets of some rows are `tickets[mask]`.
        rows: The rows by column, as `Dataset.take` gives them; n rows in the order of the tickets.
        epoch: The epoch of each row, int64, (n,), from 0.
    """

    tickets: Int64Array
    rows: NumpyBatch
    epoch: Int64Array

    def __len__(self) -> int:
        return len(self.tickets)


class Leases:
    """Hands out the rows of a dataset in its order, to any process, and takes them back as done in any order.

        prompts = raylance.runs.Leases(raylance.dataset("prompts.lance", order="row"), "runs/rl", most_ahead=4096)
        lease = prompts.lease(64)                  # in any task, actor or trainer of the Ray job
        good = rollout(lease.rows["prompt"])       # whose rows end in any order, or fail
        prompts.done(lease.tickets[good])
        prompts.fail(lease.tickets[~good])         # these rows are handed out again, before new ones

    Each row counts as done once an epoch, whatever ends meanwhile. What was handed out and not done is handed out
    again: when `fail` says so, when the lease is over, or when the run is started again. If two leases of a row are
    done, the first one counts, and `done` returns False for the other one.

    In a Ray job, all objects with one folder and name share one actor; it is made again when it has died. Without Ray,
    those of one process share their work, and only one process at a time may have some. What is handed out and done is
    written to a file in the folder of the run before a call returns. Another job continues from this file, also with
    what `raylance.mix` and `raylance.runs.Newest` allow to change: that holds for rows that were not handed out yet. To
    return to a checkpoint of the model, use `state_dict` and `load_state_dict`.
    """

    def __init__(
        self,
        dataset: Dataset,
        folder: str | os.PathLike[str],
        *,
        name: str = "leases",
        most_ahead: int = 4096,
        lease_s: float | None = 3600.0,
        most_attempts: int | None = None,
        epochs: int | None = None,
        storage_filesystem: Any = None,
    ) -> None:
        """Opens the leases of a run, or begins them.

        Args:
            dataset: What `raylance.dataset` or `raylance.mix` returned. Its order is that of the tickets.
            folder: The folder of the run, as a path or URI.
            name: Name of the leases among those of the run.
            most_ahead: How far the newest ticket may be ahead of the oldest that is not done: a limit of staleness.
                When it is reached, `lease` returns fewer rows, or none.
            lease_s: Seconds after which a row is handed out again that is not done, because who had it may have died.
                Give more than the longest work takes: work that is done later counts only if nobody else has done the
                row. None for never.
            most_attempts: How often a row may fail before it is given up; None for any number.
            epochs: Number of epochs; None for any number.
            storage_filesystem: A file system of pyarrow for the folder, as for `ray.train.RunConfig`.

        Raises:
            ConfigError: If an argument cannot be honoured, or another process has opened the leases with other ones.
            StateError: If the file of the folder is of other rows or another order, or damaged.
        """
        if not isinstance(dataset, Dataset):
            raise ConfigError(f"Leases({dataset!r}): give what raylance.dataset or raylance.mix returns.")
        check_integer("Leases(): most_ahead", most_ahead, 1)
        for what, number in (("most_attempts", most_attempts), ("epochs", epochs)):
            if number is not None:
                check_integer(f"Leases(): {what}", number, 1)
        if lease_s is not None and (not isinstance(lease_s, int | float) or not lease_s > 0):
            raise ConfigError(f"Leases(): lease_s={lease_s!r}; give a positive number of seconds, or None.")
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]{1,100}", name)):
            raise ConfigError(f"Leases(): name={name!r}; give a name of letters, digits, '.', '-' and '_', up to 100.")
        filesystem, path = open_folder(folder, storage_filesystem)
        self._spec = opened_of(dataset)
        self._given = (RecordFolder(filesystem, f"{path}/{FOLDER}"), name, most_ahead, lease_s, most_attempts, epochs)
        self._key = f"raylance leases {path} {name}"
        self._desk: Any = None
        self._session = ""  # in which it is
        self._lookup: Lookup | None = None
        self._call("check", _settings_of(self._spec, self._given[2:]))  # also raises errors of the file

    def __getstate__(self) -> dict[str, Any]:
        if not ray_session():
            raise ConfigError(
                "these leases belong to this process, because Ray is not running here, so they cannot be sent to "
                "another one. Start Ray before, or make the object in one process only."
            )
        return self.__dict__ | {"_desk": None, "_lookup": None}

    def lease(self, rows: int, *, wait_s: float = 0.0) -> Lease:
        """Hands out up to `rows` rows: those first that were handed out before and are not done, the oldest first.

        Args:
            rows: Number of rows, at least 1.
            wait_s: Seconds to wait for the first row if none can be handed out now.

        Returns:
            A lease of up to `rows` rows; of none if all are out or done, or the newest would be too far ahead.

        Raises:
            ConfigError: If an argument cannot be honoured.
            BadRowError: If a row cannot be decoded; its lease stays out.
            DatasetError: If the dataset cannot be read; the lease stays out.
            HelperError: If the actor cannot be reached or made again.
        """
        check_integer("lease(): rows", rows, 1)
        if not isinstance(wait_s, int | float):
            raise ConfigError(f"lease(): wait_s={wait_s!r}; give a number of seconds.")
        begin, pause_s = time.monotonic(), _PAUSES_S[0]
        tickets, epochs, draws = self._call("lease", rows)
        while not len(tickets) and time.monotonic() < begin + wait_s and not self.progress().is_over:
            time.sleep(min(pause_s, max(0.0, begin + wait_s - time.monotonic())))
            pause_s = min(2 * pause_s, _PAUSES_S[1])
            tickets, epochs, draws = self._call("lease", rows)
        tickets, epochs, draws = (each.copy() for each in (tickets, epochs, draws))  # Ray's arrays are read-only
        self._lookup = self._lookup or Lookup(self._spec.read)
        tables = []
        for epoch in np.unique(epochs).tolist() or [0]:
            mine = epochs == epoch
            repeats = self._spec.delivery.order.repeats
            tables.append(self._lookup.read(tickets[mine, 2], epoch, draws[mine] if repeats else None))
        table = pa.concat_tables(tables)
        if VALID in table.column_names and not self._spec.delivery.masks_bad_rows:
            table = table.drop_columns([VALID])
        read = join_offsets(table[COMPONENT].to_numpy(), table[ROW_OFFSET].to_numpy())
        tickets[:, 2] = read  # what the rows themselves say, so that the proof is not of the plan by the plan
        if not isinstance(self._spec.delivery.uri, Mapping):
            table = table.drop_columns([COMPONENT])
        return Lease(tickets=tickets, rows=to_numpy(table), epoch=epochs)

    def done(self, tickets: npt.ArrayLike) -> BoolArray:
        """Reports rows as done, in any order and from any process.

        Args:
            tickets: Tickets of leases, int64, (n, 3).

        Returns:
            Whether each counts: False if another lease of the row was done first, or if the run has returned to a
            checkpoint in which the row was not handed out yet. Bool, (n,).
        """
        return np.array(self._call("done", _checked("done()", tickets)))

    def fail(self, tickets: npt.ArrayLike) -> None:
        """Reports that work on rows has failed: they are handed out again, unless they have failed too often.

        Args:
            tickets: Tickets of leases, int64, (n, 3). Those whose lease is over are ignored.
        """
        self._call("fail", _checked("fail()", tickets))

    def progress(self) -> LeaseProgress:
        """Returns how far the rows are."""
        found: LeaseProgress = self._call("progress")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns what is done, JSON-able, to be saved with the model that was trained on it: some kB, or one bit for
        each row of `most_ahead`.
        """
        found: dict[str, Any] = self._call("state_dict")
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Returns to a checkpoint: what was done since, or was out then, is handed out again.

        Raises:
            StateError: If the state is damaged, or belongs to other rows or another order.
        """
        self._call("load_state_dict", dict(state) if isinstance(state, Mapping) else state)

    def prove(self) -> str:
        """Compares the rows that were reported as done with the plan; takes about a microsecond a row.

        Returns:
            What was found, in words.

        Raises:
            StateError: If the rows are not each row of the plan once.
        """
        found: str = self._call("prove")
        return found

    def _call(self, method: str, *arguments: Any) -> Any:
        """Calls the desk, which is an actor where Ray runs; makes it again if it is gone."""
        session = ray_session()
        if session != self._session:  # Ray was started or ended meanwhile
            self._desk, self._session = None, session
        if not session:
            if self._desk is None:
                with _opening:  # objects of one process share it
                    self._desk = _desks.get(self._key) or LeaseDesk(self._spec, *self._given, session="")
                    _desks[self._key] = self._desk
            return getattr(self._desk, method)(*arguments)
        ray = importlib.import_module("ray")
        call_id, begin = uuid.uuid4().hex, time.monotonic()
        while True:
            try:
                if self._desk is None:
                    self._desk = self._make_actor(ray, session)
                return ray.get(getattr(self._desk, method).remote(*arguments, call_id=call_id))
            except ray.exceptions.RayTaskError as error:
                raise importlib.import_module("raylance.runtime.ray.faults").as_raised(error) from None
            except ray.exceptions.RayActorError as error:
                self._desk = None  # it is made again, by this process or another one
                if time.monotonic() > begin + _RETRY_S:
                    raise HelperError(
                        f"the actor of {self._key!r} was gone for {_RETRY_S:.0f} s ({error}). What is done is in its "
                        "file, and another call may go on."
                    ) from error
                time.sleep(_PAUSES_S[0])

    def _make_actor(self, ray: Any, session: str) -> Any:
        options = {"num_cpus": 0, "max_concurrency": 16, "max_restarts": -1, "get_if_exists": True}
        actor = ray.remote(LeaseDesk).options(name=self._key, **options)
        return actor.remote(self._spec, *self._given, session=session)


_desks: "weakref.WeakValueDictionary[str, LeaseDesk]" = weakref.WeakValueDictionary()
_opening = threading.Lock()


class LeaseDesk:
    """The book of leases with its file; one actor, or an object of one process. Its methods may run at once."""

    def __init__(
        self,
        spec: Opened,
        folder: RecordFolder,
        name: str,
        most_ahead: int,
        lease_s: float | None,
        most_attempts: int | None,
        epochs: int | None,
        *,
        session: str,
    ) -> None:
        """Opens nothing yet: an error here would be the death of an actor, and no answer."""
        self._spec, self._folder, self._file, self._session = spec, folder, f"leases-{name}.json", session
        self._epochs, self._settings = epochs, _settings_of(spec, (most_ahead, lease_s, most_attempts, epochs))
        self._book = LeaseBook(most_ahead=most_ahead, lease_s=lease_s, most_attempts=most_attempts)
        self._cursor: Cursor | None = None
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self._changes = self._written = 0
        self._answered: dict[str, Any] = {}  # the last answers by call, because an answer may be lost
        self._leases: dict[str, int] = {}  # the leases of the last calls, also of an actor that has died

    def _open(self) -> Cursor:
        """Reads the file, if there is one. Leases of the same session stay out; others are handed out again."""
        if self._cursor is None:
            self._selection, content = self._spec.read.source.load_selection(), self._read()
            found = None if content is None else read_book(content)
            cursor = self._at(None if found is None else found["loader"])
            if found is not None:
                self._book.restore(
                    found["book"], keeps_leases=bool(self._session) and found["session"] == self._session
                )
                self._leases = found["leases"]
            self._cursor = cursor
        return self._cursor

    def _at(self, state: Mapping[str, Any] | None) -> Cursor:
        """Returns a cursor at a state of a loader, and takes the order from it: the place of the state is that of the
        first ticket that was never handed out, so that what may change at a restart changes there.
        """
        cursor = Cursor(self._spec.read.origin, self._spec.delivery, self._spec.read.source, keeps_from=0)
        if state is not None:
            cursor.load(state)
        plan = cursor.plan(size=1, dp_size=1, reader_bytes=Options().reader_bytes)
        if cursor.known_from > (0, 0):
            raise StateError(
                f"the rows of earlier tickets of {self._spec.delivery.uri!r} are not known: rows were deleted, updated "
                "or filtered out, or those of a mixture have changed. Leases take appended rows of one dataset only. "
                "Open the data as before, or give another name=."
            )
        cursor.follow(plan)
        self._order, self._ends = plan.order, [0]  # the number of tickets before each epoch
        self._book.rows = None if self._epochs is None else self._before(self._epochs)
        return cursor

    # Calls.

    def check(self, settings: tuple[Any, ...], call_id: str = "") -> None:
        """Raises ConfigError if another process has opened the leases with other settings."""
        with self._lock:
            self._open()
        if settings != self._settings:
            raise ConfigError(
                f"Leases(): another process has opened {self._file!r} with other settings: {self._settings}, and this "
                f"one gives {settings}. Give the same dataset and arguments in all processes, or another name=."
            )

    def lease(self, rows: int, call_id: str = "") -> tuple[Int64Array, Int64Array, Int64Array]:
        """Returns tickets (n, 3), their epochs (n,), and their positions (n,)."""

        def change() -> tuple[Int64Array, Int64Array, Int64Array]:
            if call_id in self._leases:  # the actor died before it could answer
                lease = self._leases[call_id]
                numbers = self._book.held_by(lease)
            else:
                numbers, lease = self._book.lease(rows, time.time())
                if call_id:
                    self._leases = dict([*self._leases.items(), (call_id, lease)][-_CALLS:])
            epochs, positions = self._places(numbers)
            tickets = np.stack([numbers, np.full_like(numbers, lease), self._offsets(epochs, positions)], axis=1)
            return tickets, epochs, positions

        return self._changed(change, call_id)

    def done(self, tickets: Int64Array, call_id: str = "") -> BoolArray:
        """See `Leases.done`."""
        return self._changed(lambda: self._book.done(*tickets.T), call_id)

    def fail(self, tickets: Int64Array, call_id: str = "") -> None:
        """See `Leases.fail`."""
        self._changed(lambda: self._book.fail(*tickets.T[:2]), call_id)

    def progress(self, call_id: str = "") -> LeaseProgress:
        """See `Leases.progress`."""
        with self._lock:
            self._open()
            self._book.expire(time.time())
            return self._book.progress()

    def state_dict(self, call_id: str = "") -> dict[str, Any]:
        """See `Leases.state_dict`."""
        with self._lock:
            self._open()
            return {"format": 1, "loader": self._loader_state(), "book": self._book.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any], call_id: str = "") -> None:
        """See `Leases.load_state_dict`."""
        if not isinstance(state, Mapping) or state.get("format") != 1 or not {"loader", "book"} <= {*state}:
            raise StateError("this is not a state of leases. Give what state_dict() has returned.")

        def change() -> None:
            self._book.check(state["book"])  # before anything is changed
            self._cursor = self._at(state["loader"])
            self._book.load(state["book"])

        self._changed(change, call_id)

    def prove(self, call_id: str = "") -> str:
        """See `Leases.prove`."""
        with self._lock:
            self._open()
            progress, digest = self._book.progress(), self._book.digest
            after, given_up = self._book.done_after_frontier(), np.array(self._book.given_up, dtype=np.int64)
        planned = Digest()
        for at in range(0, progress.frontier, _BLOCK_ROWS):
            numbers = np.arange(at, min(at + _BLOCK_ROWS, progress.frontier), dtype=np.int64)
            planned += Digest.of(self._offsets(*self._places(numbers[~np.isin(numbers, given_up)])))
        planned += Digest.of(self._offsets(*self._places(after)))
        if digest.differs(planned):
            raise StateError(
                f"{digest.rows:,} rows were reported as done, and {planned.rows:,} are due up to ticket "
                f"{progress.frontier:,} and after it: they are not each row of the plan once. Report the tickets as "
                "they were handed out."
            )
        given = f", but for {len(given_up):,} that were given up" if len(given_up) else ""
        beyond = f", and {len(after):,} of those after it" if len(after) else ""
        return f"{digest.rows:,} rows are done: each row up to ticket {progress.frontier:,} once{given}{beyond}"

    # Tickets and rows.

    def _before(self, epoch: int) -> int:
        """Returns the number of tickets before an epoch."""
        while len(self._ends) <= epoch:
            self._ends.append(self._ends[-1] + self._order.epoch(len(self._ends) - 1).epoch_rows)
        return self._ends[epoch]

    def _places(self, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns epoch and position of tickets, (n,) each."""
        while len(numbers) and self._ends[-1] <= int(numbers.max()):
            self._before(len(self._ends))
        ends = np.array(self._ends, dtype=np.int64)
        epochs = np.searchsorted(ends, numbers, side="right") - 1
        return epochs, numbers - ends[epochs]

    def _offsets(self, epochs: Int64Array, positions: Int64Array) -> Int64Array:
        """Returns the joined offsets of the rows at some places, (n,)."""
        found = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            found[mine] = self._selection.offsets(select_rows(self._order.epoch(epoch), positions[mine]))
        return found

    def _loader_state(self) -> dict[str, Any]:
        """Returns the state of a loader at the first ticket that was never handed out; see `_at`."""
        cursor, (epochs, positions) = self._open(), self._places(np.array([self._book.next], dtype=np.int64))
        cursor.epoch, cursor.position = int(epochs[0]), int(positions[0])
        return cursor.state(1, 1).to_dict()

    # The file.

    def _changed(self, change: Callable[[], T], call_id: str) -> T:
        """Makes a change, and returns its result once the file has it. A repeated call gets its first answer."""
        with self._lock:
            self._open()
            if call_id in self._answered:
                found: T = self._answered[call_id]
            else:
                found = change()
                self._changes += 1
                if call_id:
                    self._answered[call_id] = found
                    for old in list(self._answered)[:-_CALLS]:
                        del self._answered[old]
            number = self._changes
        self._write(number)
        return found

    def _write(self, number: int) -> None:
        """Waits until the file has the first `number` changes. Calls that wait together share one write."""
        with self._writing:
            if self._written >= number:
                return
            with self._lock:
                number, book, loader = self._changes, self._book.snapshot(), self._loader_state()
            content = {"session": self._session, "loader": loader, "book": book, "leases": self._leases}
            self._folder.write(self._file, json.dumps(content).encode())
            self._written = number

    def _read(self) -> bytes | None:
        path = f"{self._folder.path}/{self._file}"
        with contextlib.suppress(FileNotFoundError), self._folder.filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())
        return None


def _settings_of(spec: Opened, limits: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what must be the same in all processes that open some leases."""
    delivery = spec.delivery
    return delivery.fingerprint, delivery.seed, json.dumps(delivery.order.params(), sort_keys=True), limits


def _checked(call: str, tickets: npt.ArrayLike) -> Int64Array:
    try:
        found = np.asarray(tickets)
    except ValueError as error:
        raise ConfigError(f"{call}: the tickets are no array ({error}); give those of a lease, (n, 3).") from error
    if found.size == 0:
        return np.empty((0, 3), dtype=np.int64)
    if found.ndim != 2 or found.shape[1] != 3 or found.dtype.kind not in "iu":
        raise ConfigError(
            f"{call}: tickets of shape {found.shape}, {found.dtype}; give those of a lease, (n, 3): lease.tickets, or "
            "lease.tickets[mask] for some of its rows."
        )
    return found.astype(np.int64)
