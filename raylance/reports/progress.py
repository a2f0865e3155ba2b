"""The status of a run, as a line and as a table, made from its records."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from raylance.observe.figures import RankFigures, delivered_rate
from raylance.observe.wait_clock import WAITS
from raylance.reports.reading import LoaderRecord, Run

_RECENT_S = 15.0  # rates and shares of a running run are taken over this time
_STEPS = 3  # but over at least this number of steps, even if they take longer
_SAVES = 0.1  # share of the time: less saving is not shown
_PACE_S = 600.0  # the pace is taken over this time
_NOW_S = 3.0  # a dataset counts as iterated now if it was iterated within this time
_SILENT_S = 60.0  # after this time without a sample, the process is gone
_CAUSES = {"making batches" if cause == "finishing" else cause: field for cause, field in WAITS.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run."""

    epoch: int  # the epoch, from 0
    rows: int  # handed out in this epoch, over all ranks
    epoch_rows: int  # number of rows of an epoch
    rate: float  # recent rows a second over all ranks, like "delivered" in `Verdict.rates`
    pace: float  # rows a second in the last ten minutes, with saving and other datasets; 0 if unknown
    # Recent shares of the trainers' time, in [0, 1], as in `Verdict`: of waiting, the start included, and saving
    waiting: float
    cause: str  # the main cause of the waiting
    saving: float = 0.0  # `rate` leaves it out
    beside: str = ""  # progress of another dataset that is iterated now, such as for validation; else ""

    def left_s(self, epochs: int | None = None) -> float | None:
        """Returns the seconds left in this epoch or, if given, in all `epochs`, at `pace`; None if it is unknown."""
        left = self.epoch_rows * ((self.epoch + 1 if epochs is None else epochs) - self.epoch) - self.rows
        return max(0, left) / self.pace if self.pace else None

    def describe(self) -> str:
        """Returns rate, waiting, saving, and another dataset that is iterated now, in words."""
        of = f" (for {self.cause})" if self.waiting >= 0.01 else ""
        saving = f", saving {self.saving:.0%} of the time" if self.saving >= _SAVES else ""
        rate = f"{self.rate:,.0f} rows/s, " if self.rate else ""  # one batch alone has no rate
        return f"{rate}waiting {self.waiting:.0%}{of}{saving}{self.beside and f'; {self.beside}'}"


def progress(run: Run) -> Progress | None:
    """Returns the progress of the dataset that is trained on; None before the first sample."""
    records = [record for record in run.newest(run.main) if len(record.series["time_s"])]
    if not records:
        return None
    epoch, rows = max(record.position for record in records)
    recent = [_recent(record) for record in records]
    spent = {cause: sum(part.figures[name] for part in recent) for cause, name in _CAUSES.items()}
    total_s = max(1e-9, sum(part.total_s for part in recent))
    return Progress(
        epoch=epoch,
        rows=rows,
        epoch_rows=int(records[0].facts["limits"]["epoch_rows"]),
        rate=delivered_rate([part for part in recent if part.figures["batches"] > 1]),
        pace=sum(_pace(record) / record.peers for record in records),
        waiting=sum(spent.values()) / total_s,
        cause=max(spent, key=lambda cause: spent[cause]),
        saving=sum(part.figures["save_s"] for part in recent) / total_s,
        beside=_beside(run),
    )


def recent_s(record: LoaderRecord) -> float:
    """Returns the seconds over which to take a running loader's rates and shares: long enough for some of its steps."""
    begin = max(record.started, record.last - _PACE_S)
    steps = record.rank_figures(begin).figures["batches"]
    return max(_RECENT_S, _STEPS * (record.last - begin) / max(1.0, steps))


def _recent(record: LoaderRecord) -> RankFigures:
    """Returns a loader's figures in its last seconds, or of all its time if it was idle then, as during validation."""
    part = record.rank_figures(record.last - recent_s(record))
    return part if part.figures["rows"] or part.figures["wait_s"] + part.trained_s > 1.0 else record.rank_figures()


def _pace(record: LoaderRecord) -> float:
    """Returns the rows a second by the wall clock: of the last `_PACE_S` seconds, or since the first batch if later."""
    begin = max(record.started + record.latest("wait_start_s"), record.last - _PACE_S)
    rows = record.rank_figures(begin).figures["rows"]
    return rows / (record.last - begin) if record.last - begin > 1.0 else 0.0


def _beside(run: Run) -> str:
    """Returns the progress of another dataset that the process of the first rank iterates now."""
    main = run.newest(run.main)[0]
    for dataset in dict.fromkeys(record.dataset for record in run.records):
        record = run.newest(dataset)[0]
        is_there = not record.ended and all(record.facts.get(name) == main.facts.get(name) for name in ("host", "pid"))
        part = record.rank_figures(record.last - _NOW_S)
        if dataset != run.main and is_there and part.trained_s + part.figures["wait_s"] > 0.1:
            _, rows = record.position
            return f"{dataset} {rows:,}/{record.facts['limits']['epoch_rows']:,.0f}"
    return ""


def events(run: Run) -> list[tuple[float, LoaderRecord, str, Any]]:
    """Returns all events, oldest first: time, record, kind and content."""
    found = {}
    for record in run.records:  # if a loader was closed and continued, two records may hold an event
        for when, kind, what in record.events:
            found[when, record.dataset, record.rank, kind] = (when, record, kind, what)
    return sorted(found.values(), key=lambda event: event[0])


_HEADS = (
    "dataset", "rank", "host", "epoch", "rows", "rows/s", "waiting", "mostly for", "decoders", "busy", "ready",
    "in flight", "window", "replaced", "bad rows", "state",
)  # fmt: skip


def table(run: Run, now: float, most: int = 32) -> str:
    """Returns a line for each loader of a run, or for the `most` that wait most, at a time in seconds since 1970."""
    datasets = dict.fromkeys(record.dataset for record in run.records)
    records = [record for dataset in datasets for record in run.newest(dataset) if len(record.series["time_s"])]
    lines = [_line(record, now) for record in records]
    left = len(lines) - most
    if left > 0:
        lines = sorted(lines, key=lambda line: -line[0])[:most]
    rows = [_HEADS, *(cells for _, cells in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*text, *([f"… and {left} more, which wait less"] if left > 0 else [])])


def _line(record: LoaderRecord, now: float) -> tuple[float, tuple[str, ...]]:
    """Returns the share of its time that a loader waited, and the cells of its line."""
    part, (epoch, rows) = _recent(record), record.position
    recent = part.figures
    waiting = sum(recent[name] for name in _CAUSES.values()) / max(1e-9, part.total_s)
    cause = max(_CAUSES, key=lambda name: recent[_CAUSES[name]])
    limits, silent_s = record.facts["limits"], _silent_s(record, now)
    return waiting, (
        record.dataset,
        str(record.rank),
        str(record.facts["host"])[:20],
        f"{epoch}",
        f"{rows:,}/{limits['epoch_rows']:,.0f}",
        f"{part.rate:,.0f}",
        f"{waiting:.0%}",
        cause if waiting >= 0.01 else "-",
        *_decoders(record, recent),
        f"{recent['ready_batches']:.0f}",
        _share(recent["inflight_bytes"], limits["inflight_limit_bytes"]),
        _share(recent["reader_bytes"], limits["reader_limit_bytes"]),
        f"{record.latest('helpers_replaced'):.0f}",
        f"{record.latest('masked_rows'):.0f}",
        "ended" if has_ended(record, now) else "running" if silent_s < _SILENT_S else f"gone for {silent_s:,.0f} s",
    )


def _decoders(record: LoaderRecord, now: Mapping[str, float]) -> tuple[str, str]:
    """Returns two cells: "<running>/<wanted>" decoders, and those at work; without decoders, what decodes and "-"."""
    if not record.has_decoders:
        is_on_device = record.latest("device_decode_s") > 0
        return "on device" if is_on_device else "in readers" if record.latest("decoded_rows") else "-", "-"
    return f"{now['decoders']:.0f}/{now['decoders_wanted']:.0f}", f"{now['decoders_busy']:.0f}"


def has_ended(record: LoaderRecord, now: float) -> bool:
    """Whether a loader was closed, or its process ended after an epoch, because a training function may return without
    closing its loaders. A process that ended in mid-epoch was killed.
    """
    is_through = record.position[1] >= record.facts["limits"]["epoch_rows"]
    return bool(record.ended) or (is_through and _silent_s(record, now) >= _SILENT_S)


def _silent_s(record: LoaderRecord, now: float) -> float:
    return now - (record.written_s or record.last)


def _share(used: float, limit: float) -> str:
    return f"{used / 2**20:,.0f}/{limit / 2**20:,.0f} MiB"


def describe_report(what: dict[str, Any]) -> str:
    """Describes a report to Ray Train in one line: epoch and step first, then the other numbers."""
    metrics, names = what["metrics"], ("epoch", "step")
    where = ", ".join(f"{name} {metrics[name]:g}" for name in names if name in metrics)
    rest = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name not in names)
    return ": ".join(part for part in (where, rest) if part)
