"""Reads a run's records, during or after the run."""

import dataclasses
import html
import html.parser
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset
import pyarrow.feather
import pyarrow.fs

from raylance.errors import ConfigError
from raylance.observe.diagnoses.starting import describe_late_start
from raylance.observe.figures import RankFigures, RunFigures
from raylance.observe.record import COLUMNS, FOLDER, FORMAT, STANDING, open_folder
from raylance.observe.stats import COST_COUNTERS, GAUGES, NUMBERS
from raylance.observe.verdict import Verdict, judge_beside
from raylance.planning.state import renew
from raylance.secrets import public_uri
from raylance.settings import RENAMED

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float64]

_MOST_BYTES = 64 << 20  # most bytes of a file; a record has some hundreds of kB
_MOST_SAMPLES = 1 << 16  # most samples of a record; a long run has some thousands
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # characters that control a terminal
_TAGS = ("div", "table", "tr", "th", "td")  # allowed in a table of the first rows
_READS = 16  # files read at once: an object store may hold those of a thousand ranks
_SIDE_BY_SIDE = 0.25  # share of the time between batches: datasets that share less are not trained on together


class Version(NamedTuple):
    """When a file was last written, in seconds since 1970 by the clock of its storage, and its size in bytes."""

    written_s: float
    size: int


@dataclasses.dataclass(kw_only=True, eq=False)
class LoaderRecord:
    """The record of one loader, from its start to its end or to its last known sample."""

    name: str  # the file's name, without its extension
    facts: Mapping[str, Any]  # facts of the loader: its run, its data, options and limits
    events: Sequence[tuple[float, str, Any]]  # seconds since 1970, kind, content
    bad_rows: Sequence[tuple[int, str, str]]  # row offset (with the component of a mixture), column, reason
    ended: float | None  # when it was closed, in seconds since 1970; None if it is open, or its process was killed
    # By name, (samples,): counters since the loader was made, and `time_s`, seconds since 1970
    series: Mapping[str, FloatArray]
    written_s: float = 0.0  # when its file was last written, by the clock of the storage
    digest: Mapping[str, Any] | None = None  # made by `Ledger.to_dict`; None in records of an older raylance
    # By the name of another dataset: seconds in which both were iterated side by side; empty in records of an older
    # raylance.
    shared_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def dataset(self) -> str:
        """The name of the loader's dataset in the run."""
        return str(self.facts["dataset"])

    @property
    def rank(self) -> int:
        """The loader's rank."""
        return int(self.facts["rank"])

    @property
    def peers(self) -> int:
        """Number of ranks that got the same rows, this one included."""
        return int(self.facts.get("peers", 1))

    @property
    def start(self) -> str:
        """A name of its start of the run, the same for all loaders of that start; "" if unknown."""
        return str(self.facts.get("start") or "")

    @property
    def started(self) -> float:
        """When the loader began, in seconds since 1970."""
        return float(self.facts["started"])

    @property
    def begun_s(self) -> float:
        """When the record's file was first written, by the clock of the storage, as stored in it. Starts are sorted by
        this time, because the clocks of machines differ.
        """
        return float(self.facts.get("begun_s") or self.written_s)

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and position in the last sample. The start of an epoch is shown as the end of the one before."""
        epoch, position = int(self.latest("epoch")), int(self.latest("position"))
        return (epoch - 1, int(self.facts["limits"]["epoch_rows"])) if epoch and not position else (epoch, position)

    @property
    def has_decoders(self) -> bool:
        """Whether decoders ran or were wanted; otherwise shard actors decode, if rows are decoded."""
        return bool(max(self.series[name].max(initial=0.0) for name in ("decoders", "decoders_wanted")))

    @property
    def last(self) -> float:
        """When the loader was last sampled, in seconds since 1970."""
        times = self.series["time_s"]
        return float(times[-1]) if len(times) else self.started

    def at(self, name: str, times: "float | FloatArray") -> Any:
        """Returns a figure at some times: counters are interpolated, from 0 at the start; others keep their value."""
        known = self.series["time_s"]
        if not len(known):
            return np.zeros_like(times, dtype=np.float64)
        if name in STANDING:
            return self.series[name][np.clip(np.searchsorted(known, times, side="right") - 1, 0, len(known) - 1)]
        begun, nothing = np.array([self.started]), np.zeros(1)
        values = self.series.get(name, np.zeros(len(known)))  # a start without a batch knows no name of a cost
        return np.interp(times, np.concatenate((begun, known)), np.concatenate((nothing, values)), left=0.0)

    def latest(self, name: str) -> float:
        """Returns a figure in the last sample."""
        values = self.series[name]
        return float(values[-1]) if len(values) else 0.0

    def rank_figures(self, begin: float = -np.inf) -> RankFigures:
        """Returns the figures for verdicts: the growth of counters since `begin`, and the last values of gauges."""
        figures = {name: self.latest(name) for name in self.series if name in NUMBERS or "." in name}
        if begin >= self.started:  # nothing was counted before the start
            figures |= {name: figures[name] - float(self.at(name, begin)) for name in figures.keys() - GAUGES}
        reports = [what for _, kind, what in self.events if kind == "report" and isinstance(what, dict)]
        uploads_async = any(what.get("uploads_async") for what in reports)
        facts = {**self.facts, "uploads_async": uploads_async}  # the record begins before the first report
        return RankFigures(figures=figures, facts=facts, peers=self.peers)


@dataclasses.dataclass(kw_only=True)
class Run:
    """The records of a run."""

    uri: str  # path or URI of the run's folder
    records: Sequence[LoaderRecord]  # those of all its loaders, later starts after earlier ones

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.records[-1].facts["run"] or os.path.basename(self.uri.rstrip("/")))

    @property
    def datasets(self) -> list[str]:
        """Names of its datasets, sorted."""
        return sorted({record.dataset for record in self.records})

    @property
    def main(self) -> str:
        """The dataset that is trained on; if several are iterated side by side, the one that trainers wait for most."""
        return self.trained_on[0]

    @cached_property
    def trained_on(self) -> list[str]:
        """The dataset whose steps take the most time, and those that are iterated side by side with it, as by zip();
        the one that the trainers wait for most comes first.
        """
        spent: dict[str, float] = {}
        for record in self.records:
            seconds = record.latest("user_s") - record.latest("other_s") + 1e-9 * record.facts["split"]
            spent[record.dataset] = spent.get(record.dataset, 0.0) + seconds
        longest = max(spent, key=lambda name: spent[name])
        records = self.of(longest)
        shared = {name: sum(record.shared_s.get(name, 0.0) for record in records) for name in spent if name != longest}
        beside = sorted(name for name in shared if shared[name] > _SIDE_BY_SIDE * spent[longest])
        waited = {name: sum(rank.waited_s for rank in self.ranks(name)) for name in (longest, *beside)}
        return sorted(waited, key=lambda name: -waited[name])

    def of(self, dataset: str) -> list[LoaderRecord]:
        """Returns the records of a dataset's loaders, later starts after earlier ones."""
        return [record for record in self.records if record.dataset == dataset]

    def newest(self, dataset: str) -> list[LoaderRecord]:
        """Returns the newest record of each rank of a dataset, by rank; leaves out ranks beyond the last world size."""
        by_rank = {record.rank: record for record in self.of(dataset)}
        ranks = self.of(dataset)[-1].facts["world_size"]
        return [by_rank[rank] for rank in sorted(by_rank) if rank < ranks]

    def verdict(self, dataset: str, last_s: float | None = None) -> Verdict:
        """Judges a dataset's ranks over the last `last_s` seconds of each by its own clock; None: the whole run."""
        trained_on = self.trained_on if dataset in self.trained_on else [dataset]
        if last_s is not None:
            latest = {name: [r.rank_figures(r.last - last_s) for r in self.newest(name)] for name in self.datasets}
            beside = {name: latest[name] for name in trained_on}
            return judge_beside(dataset, beside, self._others_s(dataset, latest))
        ranks = {name: self.ranks(name) for name in self.datasets}
        verdict = judge_beside(dataset, {name: ranks[name] for name in trained_on}, self._others_s(dataset, ranks))
        total_s = sum(verdict.seconds.values())
        late_starts = [
            describe_late_start(RunFigures(ranks[other]), other, total_s, is_trained_on=other in trained_on)
            for other in self.datasets
            if other != dataset
        ]
        return dataclasses.replace(verdict, advice=(*verdict.advice, *filter(None, late_starts)))

    def _others_s(self, dataset: str, ranks: Mapping[str, Sequence[RankFigures]]) -> float:
        """Returns the seconds that went to datasets other than one that is trained on; 0 for another one, because the
        time between its passes is not its own. Of a dataset that is iterated side by side with it, only the waits.
        """
        if dataset not in self.trained_on:
            return 0.0
        parts = [(name, one.figures) for name, others in ranks.items() for one in others if name != dataset]
        waited_s = sum(figures["wait_s"] for _, figures in parts)
        return waited_s + sum(
            figures["user_s"] - figures["save_s"] for name, figures in parts if name not in self.trained_on
        )

    def ranks(self, dataset: str) -> list[RankFigures]:
        """Returns the figures of each rank of a dataset, over all starts; by rank."""
        by_rank: dict[int, RankFigures] = {}
        for record in self.of(dataset):
            found = record.rank_figures()
            if (before := by_rank.get(record.rank)) is not None:
                figures = dict.fromkeys(before.figures, 0.0) | dict(
                    found.figures
                )  # a start without a batch has no names
                summed = {k: v if k in GAUGES else v + before.figures.get(k, 0.0) for k, v in figures.items()}
                starts = before.starts + (record.start != before.facts.get("start") or not record.start)
                rows = [(one.figures["rows"], one.peers) for one in (before, found)]
                counted = sum(number / peers for number, peers in rows)
                peers = summed["rows"] / counted if counted else found.peers
                found = dataclasses.replace(found, figures=summed, starts=starts, peers=peers)
            by_rank[record.rank] = found
        ranks = [by_rank[rank] for rank in sorted(by_rank)]
        if len({record.facts["world_size"] for record in self.of(dataset)}) > 1:
            longest = max(1e-9, *(rank.steady_s for rank in ranks))
            ranks = [dataclasses.replace(rank, presence=rank.steady_s / longest) for rank in ranks]
        return ranks


class RunFolder:
    """The folder of a run, for repeated reads: a file that has not changed is read once."""

    def __init__(self, path: str | os.PathLike[str], storage_filesystem: Any = None) -> None:
        """Reads nothing yet. See `open_folder` for the arguments."""
        self.filesystem, self._folder = open_folder(path, storage_filesystem)
        self.path = os.fspath(path)
        self._known: dict[str, tuple[Version, LoaderRecord | None]] = {}

    def list(self) -> dict[str, Version]:
        """Returns the present record files, each with its version, which shows whether the file has changed."""
        found = self.filesystem.get_file_info(pa.fs.FileSelector(f"{self._folder}/{FOLDER}", allow_not_found=True))
        return {
            info.path: Version(written_s=(info.mtime_ns or 0) / 1e9, size=info.size)
            for info in found
            if info.path.endswith(".arrow") and not info.base_name.startswith(".")
        }

    def load(self, files: Mapping[str, Version]) -> Run:
        """Reads the records of some files of `list`; leaves out damaged and missing files."""

        def read(path: str) -> LoaderRecord | None:
            return _read(self.filesystem, path, files[path])

        changed = [
            path
            for path, version in files.items()
            if self._known.get(path, (None,))[0] != version or not version.written_s
        ]
        with ThreadPoolExecutor(_READS) as threads:
            found = list(threads.map(read, changed))
        self._known |= {path: (files[path], record) for path, record in zip(changed, found, strict=True)}
        records = [record for path in files if (record := self._known[path][1]) is not None]
        return Run(uri=self.path, records=sorted(records, key=lambda record: (record.begun_s, record.started)))

    def read(self) -> Run:
        """Reads the present records. Raises ConfigError if there are none."""
        run = self.load(self.list())
        if not run.records and self.filesystem.get_file_info(self._folder).is_file:
            raise ConfigError(
                f"{public_uri(self.path)} is a file: give the folder of a run, <storage path>/<run name>."
            )
        if not run.records:
            raise ConfigError(
                f"{public_uri(self.path)} holds no record of a loader ({FOLDER}/*.arrow), so there is nothing to show."
                f"{self._others()} Give the folder of a run, <storage path>/<run name>; a record begins with the first "
                "batch, unless record=False."
            )
        return run

    def _others(self) -> str:
        """Names the runs in this folder, if it is a folder of several runs."""
        files = self.filesystem
        runs = sorted(
            info.path.rsplit("/", 1)[-1]
            for info in files.get_file_info(pa.fs.FileSelector(self._folder, allow_not_found=True))
            if info.type == pa.fs.FileType.Directory
            and files.get_file_info(f"{info.path}/{FOLDER}").type == pa.fs.FileType.Directory
        )
        return f" The runs in it: {', '.join(runs[:10])}; add one of the names." if runs else ""


def read_run(path: str | os.PathLike[str], storage_filesystem: Any = None) -> Run:
    """Reads the records of a run; see `RunFolder`. Raises ConfigError if there are none."""
    return RunFolder(path, storage_filesystem).read()


def _read(filesystem: Any, path: str, version: Version) -> LoaderRecord | None:
    """Reads a record; None, so that the others are shown, if another raylance wrote it, or it is gone or damaged."""
    try:
        if version.size > _MOST_BYTES:
            raise ValueError(f"it has {version.size:,} bytes")
        with filesystem.open_input_file(path) as file:
            content = pa.BufferReader(file.read(_MOST_BYTES))
        # Rows are counted before anything is decompressed: a kB may hold a GB.
        rows = pyarrow.dataset.IpcFileFormat().make_fragment(content).count_rows()
        if rows > _MOST_SAMPLES:
            raise ValueError(f"it has {rows:,} samples")
        content.seek(0)
        return _parse(pa.feather.read_table(content), os.path.basename(path).removesuffix(".arrow"), version.written_s)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        logger.warning("the record %r is damaged, and left out (%s: %s)", path, type(error).__name__, error)
        return None


def _printable(value: Any) -> Any:
    """Returns JSON without the characters that control a terminal, because others may write to a run's folder."""
    match value:
        case str():
            return _CONTROL.sub("�", value)
        case list():
            return [_printable(item) for item in value]
        case dict():
            return {_printable(key): _printable(item) for key, item in value.items()}
    return value


# Names in records of 0.11 and before, and the present ones.
_RENAMED = RENAMED | {"window_bytes": "reader_bytes", "window_limit_bytes": "reader_limit_bytes"}


def _is_known(column: str) -> bool:
    """Whether a record may have a column: one that all have, or a counter of a cost that has a name."""
    counter, has_name, name = column.partition(".")
    return column in COLUMNS or (counter in COST_COUNTERS and bool(has_name) and name.isidentifier())


def _parse(table: pa.Table, name: str, written_s: float) -> LoaderRecord | None:
    facts = _printable(json.loads((table.schema.metadata or {}).get(b"raylance", b"{}")))
    if facts.get("format") != FORMAT:
        return None
    if isinstance(facts.get("state"), dict):
        facts["state"] = renew(facts["state"])
    for part in ("options", "limits"):
        facts[part] = {_RENAMED.get(key, key): value for key, value in (facts.get(part) or {}).items()}
    table = table.rename_columns([_RENAMED.get(column, column) for column in table.column_names])
    known = [field.name for field in table.schema if _is_known(field.name) and field.type == pa.float64()]
    # Other types are left out: `to_numpy` would unpickle one of Ray Data's types.
    columns = {column: table[column].to_numpy() for column in known}
    record = LoaderRecord(
        name=name,
        facts=facts,
        events=[tuple(event) for event in facts.pop("events", None) or ()],
        bad_rows=[tuple(row) for row in facts.pop("bad_rows", None) or ()],
        ended=facts.pop("ended", None),
        digest=facts.pop("digest", None),
        shared_s=facts.pop("shared_s", None) or {},
        written_s=written_s,
        series={name: columns.get(name, np.zeros(table.num_rows)) for name in COLUMNS}
        | {name: values for name, values in columns.items() if "." in name},
    )
    # Records are sorted and grouped by these values: if they are wrong, the record is damaged.
    if not np.isfinite([record.rank, record.peers, record.begun_s, record.started]).all() or not record.dataset:
        raise ValueError("its facts hold a number that is not finite, or no dataset")
    return record


def read_first_rows(run: Run, record: LoaderRecord, storage_filesystem: Any = None) -> str:
    """Returns HTML of the first rows that a loader handed out: only tables and pictures; "" if there is none."""
    filesystem, folder = open_folder(run.uri, storage_filesystem)
    try:
        with filesystem.open_input_file(f"{folder}/{FOLDER}/{record.name}.html") as file:
            content = bytes(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return ""
    table = _Table()
    table.feed(content.decode(errors="replace"))
    return "".join(table.parts)


class _Table(html.parser.HTMLParser):
    """Copies only tables and pictures, without scripts, links and any other content that a stranger may have added."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        source = dict(attrs).get("src") or ""
        if tag == "img" and source.startswith("data:image/png;base64,"):
            self.parts.append(f'<img src="{html.escape(source)}">')
        elif tag in _TAGS:
            self.parts.append(f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if tag in _TAGS:
            self.parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.parts.append(html.escape(data))
