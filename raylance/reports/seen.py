"""Where a run has seen some rows: by epoch, step and rank, and in which checkpoints."""

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.fs

from raylance.columns import COMPONENT, split_offsets
from raylance.errors import ConfigError, DatasetError
from raylance.observe.record import open_folder
from raylance.orders.order import Resolved
from raylance.orders.permutation import Int64Array
from raylance.planning.history import line_of_history
from raylance.planning.plan import Plan
from raylance.planning.proof import Expected
from raylance.planning.state import FILE_NAME, states_in, subject_of
from raylance.planning.step_size import CostLimit
from raylance.reports.proving import Plans, groups_of, histories_of
from raylance.reports.reading import LoaderRecord, read_run
from raylance.source.mixed_rows import MixedRows
from raylance.source.rows import RowSource, TableRows
from raylance.source.version import Source

_BLOCK_ROWS = 1 << 18  # positions that are compared together

Place = tuple[int, int]


class _Checkpoint(NamedTuple):
    place: Place
    name: str


def seen(
    path: str | os.PathLike[str],
    offsets: npt.ArrayLike,
    *,
    component: str | int = 0,
    version: int | None = None,
    dataset: str | None = None,
    storage_filesystem: Any = None,
    **changes: Any,
) -> pd.DataFrame:
    """Finds where a run's training functions were handed some rows; for example rows that turn out to be bad, or that
    must be forgotten. Takes about a microsecond for each row that the run was handed, however many are asked for.

    Rows of steps that were rolled back do not count: the present model was not trained on them. Positions that came
    again, by `set_epoch` or another loader without a state, are listed once.

    Args:
        path: The run's folder, <storage path>/<run name>, as a path or URI.
        offsets: Row offsets, as batches have them under `_rowoffset`: integers, (k,).
        component: For a mixture, the dataset to which the offsets belong: its name or its number.
        version: The version of the dataset to which the offsets refer; None for that of the last start. If the run has
            had other versions, rows are found in them by their IDs.
        dataset: The name of one dataset of the run; needed if it has several.
        storage_filesystem: A file system of pyarrow, as for `ray.train.RunConfig`; `path` is then a path in it.
        **changes: Arguments of `raylance.dataset` that records do not hold, see `prove_run`.

    Returns:
        A row for each time that a row was handed out, in this order: `row_offset`, `epoch`, `position`, `step` in the
        epoch, `rank` (the data-parallel rank, -1 if a `Balance` has chosen it), and `checkpoint`: the first checkpoint
        in the folder whose model was trained on it, "" if there is none. Checkpoints of steps that were rolled back are
        left out.

    Raises:
        ConfigError: If `path` holds no record of the run; if `dataset` or `component` is missing or unknown; if the
            plan of the run cannot be computed; or if rows cannot be found in a version that the run has had.
    """
    run = read_run(path, storage_filesystem)
    groups = groups_of(run)
    if dataset is None and len(groups) == 1:
        dataset = next(iter(groups))
    if dataset not in groups:
        raise ConfigError(f"seen(dataset={dataset!r}): the run has {', '.join(map(repr, groups))}. Give one of them.")
    records = [record for record in groups[dataset] if record.digest is not None]
    uri = records[-1].facts["state"]["uri"]
    names = [*uri] if isinstance(uri, Mapping) else []
    number = names.index(component) if component in names else component
    if not isinstance(number, int) or not 0 <= number < max(1, len(names)):
        raise ConfigError(f"seen(component={component!r}): the run's datasets are {names}. Give one of their names.")
    asked = np.asarray(offsets).reshape(-1)
    if asked.size and asked.dtype.kind not in "iu":
        raise ConfigError(f"seen({offsets!r}): give row offsets, a list of integers.")
    last = records[-1].facts["state"]["version"]
    last = [*last.values()][number] if isinstance(last, Mapping) else last
    wanted = _Wanted(np.unique(asked.astype(np.int64)), number, version or last)
    plans, checkpoints = Plans(records, changes, None), _checkpoints(path, storage_filesystem, records)
    found: list[tuple[int, int, int, int, int, str]] = []
    for histories in histories_of(records).values():
        for line in line_of_history(histories):
            expected = plans.expected(line.plan)
            if isinstance(expected, str) or expected.order is None:
                why = expected if isinstance(expected, str) else "no record holds the code of its order: give order="
                raise ConfigError(f"seen(): epoch {line.epoch} cannot be computed: {why}")
            for span in (each for each in line.spans if not each.is_skipped):
                for at, offset in _hits(expected, line.epoch, span.low, span.high, wanted):
                    place = line.epoch, at
                    step, rank = _step(expected.order, _start_at(records, place), place)
                    first = next((each.name for each in checkpoints if each.place > place), "")
                    found.append((offset, *place, step, rank, first))
    columns = ["row_offset", "epoch", "position", "step", "rank", "checkpoint"]
    found.sort(key=operator.itemgetter(1, 2))
    return pd.DataFrame(found, columns=columns)


class _Wanted:
    """The rows that are asked for, in the versions that the run has had."""

    def __init__(self, offsets: Int64Array, component: int, version: Any) -> None:
        self._offsets, self._component, self._version = offsets, component, version
        self._known: dict[Any, tuple[Int64Array, Int64Array]] = {}

    def among(
        self, source: RowSource, fields: Mapping[str, Any] | None, joined: Int64Array
    ) -> Iterator[tuple[int, int]]:
        """Yields index and asked offset of those joined offsets that are asked for. They are of the version of a
        source, or of an earlier one that fields of a state name.
        """
        parts = source.parts if isinstance(source, MixedRows) else (source,)
        if self._component >= len(parts) or (fields or {}).get(COMPONENT, self._component) != self._component:
            return  # the dataset has joined later, or the rows are of another one
        part = parts[self._component]
        pinned = part.version_of(fields) if isinstance(part, TableRows) else None
        key = None if pinned is None else pinned.version
        if key not in self._known:
            self._known[key] = self._offsets, self._offsets
            if pinned is not None and pinned.version != self._version:
                self._known[key] = self._found_in(pinned)
        here, asked = self._known[key]
        which, own = split_offsets(joined)
        for index in np.flatnonzero((which == self._component) & np.isin(own, here)).tolist():
            yield index, int(asked[np.searchsorted(here, own[index])])

    def _found_in(self, pinned: Source) -> tuple[Int64Array, Int64Array]:
        """Returns the offsets in a version of the rows that are there, ascending, and their asked offsets."""
        try:
            asked_for = pinned.at(self._version)
        except DatasetError as error:
            raise ConfigError(
                f"seen(version={self._version}): {error} Give a version that is there, as those that the run has had."
            ) from error
        is_later = pinned.version > asked_for.version
        rows = asked_for.open().count_rows()
        asked_rows = self._offsets[(self._offsets >= 0) & (self._offsets < rows)]
        before = asked_rows if is_later else np.arange(pinned.open().count_rows())
        after = pinned.offsets_of(asked_for, before) if is_later else asked_for.offsets_of(pinned, before)
        if after is None:
            raise ConfigError(
                f"seen(version={self._version}): the run has had version {pinned.version}, and the two cannot be "
                "compared row by row. Give the version of the run in which the offsets are known, and keep versions by "
                "raylance.runs.pin."
            )
        here, asked = (after, before) if is_later else (before, after)
        is_asked = (here >= 0) & (asked >= 0) & np.isin(asked, self._offsets)
        ascending = np.argsort(here[is_asked])
        return here[is_asked][ascending], asked[is_asked][ascending]


def _hits(expected: Expected, epoch: int, low: int, high: int, wanted: _Wanted) -> Iterator[tuple[int, int]]:
    """Yields position and asked offset of the wanted rows at positions [low, high)."""
    assert expected.order is not None
    planned = expected.order.epoch(epoch)
    for at in range(low, min(high, planned.epoch_rows), _BLOCK_ROWS):
        positions = np.arange(at, min(at + _BLOCK_ROWS, high, planned.epoch_rows), dtype=np.int64)
        for fields, mine, offsets in expected.by_segment(planned, positions):
            for index, asked in wanted.among(expected.source, fields, offsets):
                yield int(positions[mine][index]), asked


def _start_at(records: Sequence[LoaderRecord], place: Place) -> LoaderRecord:
    """Returns a record of the start that handed out the rows at a place: the last one that began before it."""
    return [record for record in sorted(records, key=lambda each: each.begun_s) if _place_of(record) <= place][-1]


def _place_of(record: LoaderRecord) -> Place:
    """Returns the place at which a record begins."""
    begun = _begun(record)
    return begun["epoch"], begun["position"]


def _begun(record: LoaderRecord) -> Mapping[str, int]:
    """Returns the epoch, the position and the step at which a record begins."""
    found: Mapping[str, int] = record.facts.get("begun", record.facts["state"])
    return found


def _step(order: Resolved, record: LoaderRecord, place: Place) -> tuple[int, int]:
    """Returns the step of its epoch in which a place was handed out, and the data-parallel rank."""
    facts, (epoch, position) = record.facts, place
    begun = _begun(record)
    same = begun["epoch"] == epoch
    first, steps = (begun["position"], begun["step"]) if same else (0, 0)
    budget = facts.get("budget")
    plan = Plan(
        order=order,
        global_batch_size=facts["global_batch_size"],
        budget=None if budget is None else CostLimit(**budget),
        dp_size=int((record.digest or {}).get("dp_size", facts["world_size"])),
        remainder="ragged" if facts["remainder"] == "drop" else facts["remainder"],
        chunk_positions=1,
    )
    number = plan.steps_between(epoch, first, position + 1) - 1
    start = plan.after(epoch, first, number)
    if facts.get("balances"):
        return steps + number, -1
    ranks = range(plan.dp_size)
    rank = next(one for one in ranks if position in plan.positions(epoch, start, *plan.rank_slice(epoch, start, one)))
    return steps + number, rank


def _checkpoints(
    path: str | os.PathLike[str], storage_filesystem: Any, records: Sequence[LoaderRecord]
) -> list[_Checkpoint]:
    """Returns the checkpoints in a run's folder that no later start has rolled back, by the place of the dataset's
    loader, ascending.
    """
    filesystem, folder = open_folder(path, storage_filesystem)
    subjects, found = {subject_of(record.facts["state"]) for record in records}, []
    for info in filesystem.get_file_info(pyarrow.fs.FileSelector(folder)):
        if info.type is not pyarrow.fs.FileType.Directory or not info.base_name.startswith("checkpoint"):
            continue
        name = f"{info.path}/{FILE_NAME}"
        try:
            with filesystem.open_input_stream(name) as stream:
                states = states_in(stream.read())
        except FileNotFoundError:  # num_to_keep= may have just deleted it
            continue
        written_s = (filesystem.get_file_info(name).mtime_ns or 0) / 1e9
        for state in states:
            place = state.get("epoch", 0), state.get("position", 0)
            later = [record for record in records if record.begun_s > written_s]
            if subject_of(state) in subjects and all(_place_of(record) >= place for record in later):
                found.append(_Checkpoint(place, info.base_name))
    return sorted(found)
