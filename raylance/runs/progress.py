"""Owns how a run stands, in a line and in a table, from its records; never reads them, and never prints."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from raylance.runs.reading import LoaderRecord, Run
from raylance.telemetry.stats import WAITS

RECENT_S = 15.0
"""Seconds that rates and shares of a run that goes on are taken over."""

_SILENT_S = 60.0  # without a sample: the process is gone
_CAUSES = {"making batches" if cause == "finishing" else cause: field for cause, field in WAITS.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        epoch: The epoch, from 0.
        rows: Rows of the epoch that were handed out, over all ranks.
        epoch_rows: Rows of an epoch.
        rate: Rows a second over all ranks, lately.
        waiting: Share of the trainers' time that they waited, lately, in [0, 1].
        cause: What they waited for most.
    """

    epoch: int
    rows: int
    epoch_rows: int
    rate: float
    waiting: float
    cause: str

    def left_s(self, epochs: int | None = None) -> float | None:
        """Seconds to the end of the epoch, or of so many epochs, at this rate; None where there is none."""
        behind = self.epoch_rows * ((self.epoch + 1 if epochs is None else epochs) - self.epoch) - self.rows
        return max(0, behind) / self.rate if self.rate else None

    def told(self) -> str:
        """Rate and waiting, in words."""
        of = f" (for {self.cause})" if self.waiting >= 0.01 else ""
        return f"{self.rate:,.0f} rows/s, waiting {self.waiting:.0%}{of}"


def progress(run: Run, since: float = 0.0) -> Progress | None:
    """How far the dataset that is trained on is; None before its first batch.

    Args:
        run: The run.
        since: Records that began before this do not count, in seconds since 1970.
    """
    records = [record for record in run.newest(run.main) if record.started >= since and len(record.series["time_s"])]
    if not records:
        return None
    ahead = max(records, key=lambda record: (record.at("epoch", record.last), record.at("position", record.last)))
    now = max(record.last for record in records)
    seconds = min(RECENT_S, max(1e-9, now - min(record.started for record in records)))
    recent = [record.since(now - seconds) for record in records]
    spent = {cause: sum(figures[name] for figures in recent) for cause, name in _CAUSES.items()}
    return Progress(
        epoch=int(ahead.at("epoch", now)),
        rows=int(ahead.at("position", now)),
        epoch_rows=int(ahead.facts["limits"]["epoch_rows"]),
        rate=sum(figures["rows"] for figures in recent) / seconds,
        waiting=min(1.0, sum(figures["wait_s"] for figures in recent) / (seconds * len(records))),
        cause=max(spent, key=lambda cause: spent[cause]),
    )


def news(run: Run, since: float) -> list[tuple[float, LoaderRecord, str, Any]]:
    """What happened behind a time, oldest first: when, whose record, kind, what."""
    found = {}
    for record in run.records:  # two of them may tell of the same, where a loader was closed and went on
        for when, kind, what in record.events:
            if when > since:
                found[when, record.facts["dataset"], record.rank, kind] = (when, record, kind, what)
    return sorted(found.values(), key=lambda event: event[0])


_HEADS = (
    "dataset", "rank", "host", "epoch", "position", "rows/s", "waiting", "mostly for", "decoders", "busy", "ready",
    "in flight", "window", "replaced", "bad rows", "state",
)  # fmt: skip


def table(run: Run, now: float, most: int = 32) -> str:
    """All loaders of a run as they stand, one line each.

    Args:
        run: The run.
        now: Seconds since 1970.
        most: Lines at the most; the ranks that wait most come first where there are more.
    """
    datasets = dict.fromkeys(str(record.facts["dataset"]) for record in run.records)
    lines: list[tuple[float, tuple[str, ...]]] = []
    for dataset in datasets:
        lines += [_line(record, now) for record in run.newest(dataset) if len(record.series["time_s"])]
    left = len(lines) - most
    if left > 0:
        lines = sorted(lines, key=lambda line: -line[0])[:most]
    rows = [_HEADS, *(cells for _, cells in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*text, *([f"… and {left} more, which wait less"] if left > 0 else [])])


def _line(record: LoaderRecord, now: float) -> tuple[float, tuple[str, ...]]:
    """How long it waited, and its cells."""
    last = record.last
    seconds = min(RECENT_S, max(1e-9, last - record.started))
    recent = record.since(last - seconds)
    waiting = min(1.0, recent["wait_s"] / seconds)
    cause = max(_CAUSES, key=lambda name: recent[_CAUSES[name]])
    limits = record.facts["limits"]
    state = "ended" if record.ended else "goes on" if now - last < _SILENT_S else f"silent for {now - last:,.0f} s"
    return waiting, (
        str(record.facts["dataset"]),
        str(record.rank),
        str(record.facts["host"])[:20],
        f"{record.at('epoch', last):.0f}",
        f"{record.at('position', last):,.0f}/{limits['epoch_rows']:,.0f}",
        f"{recent['rows'] / seconds:,.0f}",
        f"{waiting:.0%}",
        cause if waiting >= 0.01 else "-",
        f"{recent['decoders']:.0f}/{recent['decoders_wanted']:.0f}",
        f"{recent['decoders_busy']:.0f}",
        f"{recent['ready_batches']:.0f}",
        _share(recent["inflight_bytes"], limits["inflight_limit_bytes"]),
        _share(recent["window_bytes"], limits["window_limit_bytes"]),
        f"{record.at('helpers_replaced', last):.0f}",
        f"{record.at('masked_rows', last):.0f}",
        state,
    )


def _share(used: float, limit: float) -> str:
    return f"{used / 2**20:,.0f}/{limit / 2**20:,.0f} MiB"


def told_report(what: dict[str, Any], names: Sequence[str] = ("epoch", "step")) -> str:
    """A report to Ray Train in a line: what says where it is, and the other numbers."""
    metrics = what["metrics"]
    where = ", ".join(f"{name} {metrics[name]:g}" for name in names if name in metrics)
    rest = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name not in names)
    return ": ".join(part for part in (where, rest) if part)
