"""Owns reading the records of a run, while it goes on or after it; never writes one, never says what they mean."""

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.feather
import pyarrow.fs

from raylance.errors import ConfigError
from raylance.telemetry.record import COLUMNS, FOLDER, FORMAT, STANDING, open_folder
from raylance.telemetry.stats import GAUGES, NUMBERS
from raylance.telemetry.verdict import Part, Verdict, judge

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(kw_only=True)
class LoaderRecord:
    """What was recorded of one loader, from its start to its end or to the last that is known of it.

    Attributes:
        name: The file's name, without its end.
        facts: Who it was, of which run, what it read, within which limits.
        events: What happened: seconds since 1970, kind, what.
        bad_rows: The first rows that were masked: row offset with a mixture's component, column, why.
        ended: When it was closed, in seconds since 1970; None where it is not, or its process was killed.
        series: By name, float64 (samples,): counters since the loader was made, and `time_s`, seconds since 1970.
    """

    name: str
    facts: Mapping[str, Any]
    events: Sequence[tuple[float, str, Any]]
    bad_rows: Sequence[tuple[int, str, str]]
    ended: float | None
    series: Mapping[str, FloatArray]

    @property
    def rank(self) -> int:
        """Its rank."""
        return int(self.facts["rank"])

    @property
    def started(self) -> float:
        """Seconds since 1970."""
        return float(self.facts["started"])

    @property
    def last(self) -> float:
        """When it was sampled last, in seconds since 1970."""
        times = self.series["time_s"]
        return float(times[-1]) if len(times) else self.started

    def at(self, name: str, times: "float | FloatArray") -> Any:
        """A figure at some times: counters grow steadily between samples, and from 0 at the start; others hold."""
        known = self.series["time_s"]
        if not len(known):
            return np.zeros_like(times, dtype=np.float64)
        if name in STANDING:
            return self.series[name][np.clip(np.searchsorted(known, times, side="right") - 1, 0, len(known) - 1)]
        begun, nothing = np.array([self.started]), np.zeros(1)
        return np.interp(times, np.concatenate((begun, known)), np.concatenate((nothing, self.series[name])), left=0.0)

    def since(self, begin: float) -> dict[str, float]:
        """What was counted from a time on; other figures as they are last."""
        now = {name: float(self.at(name, self.last)) for name in NUMBERS}
        return {name: value if name in GAUGES else value - float(self.at(name, begin)) for name, value in now.items()}


@dataclasses.dataclass(kw_only=True)
class Run:
    """The records of a run.

    Attributes:
        uri: Where it is kept.
        records: Those of all its loaders, by their start.
    """

    uri: str
    records: Sequence[LoaderRecord]

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.records[-1].facts["run"] or os.path.basename(self.uri.rstrip("/")))

    @cached_property
    def main(self) -> str:
        """The dataset that is trained on: the one between whose batches most time passes."""
        spent: dict[str, float] = {}
        for record in self.records:
            dataset = str(record.facts["dataset"])
            spent[dataset] = (
                spent.get(dataset, 0.0) + float(record.at("user_s", record.last)) + 1e-9 * record.facts["split"]
            )
        return max(spent, key=lambda name: spent[name])

    def of(self, dataset: str) -> list[LoaderRecord]:
        """The records of a dataset's loaders, by their start."""
        return [record for record in self.records if record.facts["dataset"] == dataset]

    def newest(self, dataset: str) -> list[LoaderRecord]:
        """The newest record of each rank of a dataset, as many ranks as there were last; by rank."""
        by_rank = {record.rank: record for record in self.of(dataset)}
        ranks = self.of(dataset)[-1].facts["world_size"]
        return [by_rank[rank] for rank in sorted(by_rank) if rank < ranks]

    def verdict(self, dataset: str, since: float | None = None) -> Verdict:
        """What limits a dataset's ranks.

        Args:
            dataset: Its name in the run.
            since: From when on, in seconds since 1970; None judges all of the run.
        """
        records = self.of(dataset) if since is None else self.newest(dataset)
        parts: dict[int, Part] = {}
        for record in records:
            figures = record.since(-np.inf if since is None else since)
            if (before := parts.get(record.rank)) is not None:
                figures = {k: v if k in GAUGES else v + before.figures[k] for k, v in figures.items()}
            parts[record.rank] = Part(figures=figures, facts=record.facts)
        return judge([parts[rank] for rank in sorted(parts)])


def read_run(path: str, storage_filesystem: Any = None) -> Run:
    """Reads the records of a run.

    Args:
        path: The run's folder, in which its checkpoints are: <storage path>/<run name>, as a path or URI.
        storage_filesystem: Of pyarrow, as `ray.train.RunConfig` takes it; then `path` is one in it.

    Raises:
        ConfigError: If there are none.
    """
    filesystem, folder = open_folder(path, storage_filesystem)
    found = filesystem.get_file_info(pa.fs.FileSelector(f"{folder}/{FOLDER}", allow_not_found=True))
    names = [info.path for info in found if info.path.endswith(".arrow") and not info.base_name.startswith(".")]
    records = [record for name in names if (record := _read_whole(filesystem, name)) is not None]
    if not records:
        runs = sorted(
            info.path.rsplit("/", 1)[-1]
            for info in filesystem.get_file_info(pa.fs.FileSelector(folder, allow_not_found=True))
            if info.type == pa.fs.FileType.Directory
            and filesystem.get_file_info(f"{info.path}/{FOLDER}").type == pa.fs.FileType.Directory
        )
        there = f" The runs in it: {', '.join(runs[:10])}; add one of the names." if runs else ""
        raise ConfigError(
            f"{path} holds no record of a loader ({FOLDER}/*.arrow), so there is nothing to show.{there} Give the "
            "folder of a run, <storage path>/<run name>; a record begins with the first batch, unless record=False."
        )
    return Run(uri=path, records=sorted(records, key=lambda record: record.started))


def explain_run(path: str, storage_filesystem: Any = None) -> Verdict:
    """Says in words what limits a run, over all ranks and starts, and what to change; see `Verdict`.

    Args:
        path: The run's folder, <storage path>/<run name>, as a path or URI.
        storage_filesystem: Of pyarrow, as `ray.train.RunConfig` takes it; then `path` is one in it.

    Raises:
        ConfigError: If there is no record of the run.
    """
    run = read_run(path, storage_filesystem)
    return run.verdict(run.main)


def _read_whole(filesystem: Any, path: str) -> LoaderRecord | None:
    """A record; None for one that is damaged, as by a machine that lost its power: others are still shown."""
    try:
        return _read(filesystem, path)
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the record %s is damaged, and left out (%s: %s)", path, type(error).__name__, error)
        return None


def _read(filesystem: Any, path: str) -> LoaderRecord | None:
    """A record; None for one of a newer raylance, or that was moved away meanwhile."""
    try:
        with filesystem.open_input_file(path) as file:
            table = pa.feather.read_table(pa.BufferReader(file.read()))
    except FileNotFoundError:
        return None
    facts = json.loads((table.schema.metadata or {}).get(b"raylance", b"{}"))
    if facts.get("format") != FORMAT:
        return None
    told = {name: facts.pop(name, None) for name in ("events", "bad_rows", "ended")}
    columns = {name: table[name].to_numpy() for name in COLUMNS if name in table.column_names}
    return LoaderRecord(
        name=os.path.basename(path).removesuffix(".arrow"),
        facts=facts,
        events=[tuple(event) for event in told["events"] or ()],
        bad_rows=[tuple(row) for row in told["bad_rows"] or ()],
        ended=told["ended"],
        series={name: columns.get(name, np.zeros(table.num_rows)) for name in COLUMNS},
    )


def read_look(run: Run, record: LoaderRecord, storage_filesystem: Any = None) -> str:
    """HTML of the first rows that a loader handed out; "" where there is none."""
    filesystem, folder = open_folder(run.uri, storage_filesystem)
    try:
        with filesystem.open_input_file(f"{folder}/{FOLDER}/{record.name}.html") as file:
            return bytes(file.read()).decode()
    except FileNotFoundError:
        return ""
