"""The pictures of a report."""

import base64
import importlib
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raylance.errors import ConfigError
from raylance.observe.figures import PARTS, percents_of
from raylance.observe.wait_clock import WAITS
from raylance.reports.reading import FloatArray, LoaderRecord
from raylance.reports.timeline import Timeline

COLORS = {
    "training": "#3f9b6c",
    "saving": "#8a8f98",
    "starting": "#e3c13b",
    "reading": "#2f6fcf",
    "decoding": "#e8792b",
    "finishing": "#9457c4",
    "other datasets": "#b9dcc9",
}
"""The colours of the parts of a rank's time in all pictures; causes of waiting have strong colours."""

_MARKS = {
    "report": ("v", "#333333"),
    "fault": ("X", "#c8102e"),
    "error": ("X", "#c8102e"),
    "resume": (">", "#333333"),
    "move": ("D", "#9457c4"),
    "skip": ("|", "#9457c4"),
}
_SHOWN = {
    "report": "report",
    "fault": "fault survived",
    "resume": "continues",
    "move": "weights change",
    "skip": "steps passed over",
}
_WIDTH = 9.6  # inches, of all pictures
_MOST_LABELS = 24  # if there are more ranks, only every eighth is named


def picture(figure: Any, text: str, *, is_cloud: bool = False) -> str:
    """Returns a figure as HTML, with `text` as its alternative text. A cloud of points becomes a PNG, others an SVG."""
    matplotlib, kind = of_report_extra("matplotlib"), "png" if is_cloud else "svg"
    sink = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "raylance"}):
        figure.savefig(sink, format=kind, dpi=100, metadata={} if is_cloud else {"Date": None})
    content = base64.b64encode(sink.getvalue()).decode()
    return f'<img alt="{text}" src="data:image/{"png" if is_cloud else "svg+xml"};base64,{content}">'


def draw_shares(seconds: Mapping[str, float]) -> str:
    """Draws one bar: the time of all ranks by `PARTS`."""
    figure, axes = _figure(1.15)
    total, left, percents = max(1e-9, sum(seconds.values())), 0.0, percents_of(seconds)
    for part, spent_s in seconds.items():
        share = 100 * spent_s / total
        axes.barh([0], [share], left=left, color=COLORS[part], height=0.6)
        if share >= max(6, 0.7 * len(part)):
            text, dark = f"{part}\n{percents[part]} %", part in ("starting", "other datasets")
            axes.text(
                left + share / 2, 0, text, ha="center", va="center", color="black" if dark else "white", fontsize=9
            )
        left += share
    axes.set(xlim=(0, 100), yticks=[], xlabel="% of the time of all ranks")
    return picture(figure, "share of time by what it went to")


def draw_timeline(found: Timeline, events: Sequence[tuple[float, int, str]], ranks: Sequence[int]) -> str:
    """Draws a strip of each rank's time by `PARTS`, the first on top; and events: seconds since 1970, rank, kind."""
    figure, axes = _figure(1.3 + 0.42 * len(ranks))
    for row, rank in enumerate(ranks):
        below = np.full(len(found.edges), row + 0.4)
        for part in PARTS:
            share = found.shares[rank][part]
            above = below - 0.8 * np.append(share, share[-1])
            axes.fill_between(found.edges, below, above, step="post", color=COLORS[part], linewidth=0)
            below = above
    for kind, (marker, color) in _MARKS.items():  # one call for all events of a kind: a long run has thousands
        shown = [
            (found.run_s(when), ranks.index(rank) - 0.5) for when, rank, of in events if of == kind and rank in ranks
        ]
        axes.plot(*np.array(shown).reshape(-1, 2).T, marker, color=color, markersize=5, clip_on=False, zorder=5)
    for cut in found.cuts:
        axes.axvline(cut, color="#333333", linewidth=1, linestyle=(0, (2, 2)))
    named = list(range(len(ranks))) if len(ranks) <= _MOST_LABELS else list(range(0, len(ranks), 8))
    axes.set_yticks(named, [f"rank {ranks[row]}" for row in named])
    axes.set(ylim=(len(ranks) - 0.4, -0.75), xlim=(0, found.edges[-1]), xlabel="s since the start, restarts joined")
    _legend(figure)
    return picture(figure, "what the time of each rank went to, over time")


def draw_rate(found: Timeline) -> str:
    """Draws rows a second over time."""
    figure, axes = _figure(1.9)
    middles = (found.edges[:-1] + found.edges[1:]) / 2
    axes.fill_between(middles, found.rate, step="mid", color="#3f9b6c", alpha=0.25, linewidth=0)
    axes.step(middles, found.rate, where="mid", color="#3f9b6c", linewidth=1.2)
    axes.set(ylim=(0, None), xlim=(0, found.edges[-1]), xlabel="s", ylabel="rows/s")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return picture(figure, "rows a second over time")


def draw_rates(rates: Mapping[str, float], limit: str) -> str:
    """Draws a bar for each of `Verdict.rates`; the bars of the delivered rate and of `limit` stand out."""
    known = {name: rate for name, rate in rates.items() if rate < 1e7}
    figure, axes = _figure(0.7 + 0.34 * len(rates))
    most = max(known.values(), default=1.0)
    # A part that is far ahead of the others must not make them invisible.
    shown = min(most, 4 * min((rate for rate in known.values() if rate), default=most)) or 1.0
    for row, (name, rate) in enumerate(rates.items()):
        color, alpha = COLORS.get(name, "#555b66"), 1.0 if name in (limit, "delivered") else 0.45
        axes.barh([row], [min(rate, shown)], color=color, height=0.66, alpha=alpha)
        text = f"  {rate:,.0f} rows/s" if rate < 1e7 else "  takes no time"
        axes.text(min(rate, shown), row, text + (" →" if shown < rate < 1e7 else ""), va="center", fontsize=9)
    names = [name if name == "delivered" else f"{name} alone" for name in rates]
    axes.set_yticks(range(len(rates)), names)
    axes.set(xlim=(0, 1.25 * shown), ylim=(len(rates) - 0.5, -0.5), xticks=[])
    return picture(figure, "rows a second that each part could do by itself")


def draw_helpers(found: Timeline, records: Sequence[LoaderRecord]) -> str:
    """Draws decoders (or shard actors, if these decode) and memory of all ranks over time, with limits."""
    figure, all_axes = _figure(2.2, columns=2)
    helpers, memory = all_axes
    middles, times = (found.edges[:-1] + found.edges[1:]) / 2, (found.times[:-1] + found.times[1:]) / 2

    def total(name: str) -> FloatArray:
        values = [np.where((times >= r.started) & (times <= r.last), r.at(name, times), 0.0) for r in records]
        return np.asarray(sum(values, np.zeros(len(times))))

    lines = [("readers_wanted", "shard actors wanted", "#bbbbbb"), ("readers", "there", "#555b66")]
    if any(record.has_decoders for record in records):
        lines = [("decoders_wanted", "decoders wanted", "#bbbbbb"), ("decoders", "there", "#555b66")]
        lines.append(("decoders_busy", "at work", "#e8792b"))
    for name, label, color in lines:
        helpers.step(middles, total(name), where="mid", color=color, linewidth=1.4, label=label)
    helpers.set(ylim=(0, None), xlabel="s", ylabel="of all ranks")
    most = max(1, *(record.facts["world_size"] for record in records))
    for name, limit, label, color in (
        ("inflight_bytes", "inflight_limit_bytes", "in flight", "#2f6fcf"),
        ("reader_bytes", "reader_limit_bytes", "readers", "#9457c4"),
    ):
        memory.step(middles, total(name) / 2**20, where="mid", color=color, linewidth=1.4, label=label)
        allowed = most * records[-1].facts["limits"][limit] / 2**20
        memory.axhline(allowed, color=color, linewidth=1, linestyle=(0, (2, 2)), label=f"{label}, limit")
    memory.set(ylim=(0, None), xlabel="s", ylabel="MiB of all ranks")
    for axes in all_axes:
        axes.set_xlim(0, found.edges[-1])
        axes.legend(loc="upper left", bbox_to_anchor=(0, 1.22), ncols=4, frameon=False, fontsize=8, handlelength=1.2)
    return picture(figure, "helpers and bytes over time")


def draw_costs(found: Timeline) -> str:
    """Draws padding and imbalance over time, of each cost; "" if rows have no costs."""
    if not any(np.isfinite(padding).any() for padding, _ in found.costs.values()):
        return ""
    figure, axes = _figure(1.9)
    middles = (found.edges[:-1] + found.edges[1:]) / 2
    for (cost, shares), style in zip(found.costs.items(), itertools.cycle(["-", "--", ":"])):
        labels = ("padding, if batches are padded", "costliest rank, over the mean of the ranks")
        for values, label, color in zip(shares, labels, ("#9457c4", "#e8792b"), strict=True):
            label = f"{cost[1:]}: {label}" if cost else label
            axes.step(middles, 100 * values, where="mid", color=color, linewidth=1.4, linestyle=style, label=label)
    axes.set(ylim=(0, None), xlim=(0, found.edges[-1]), xlabel="s", ylabel="%")
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.22), ncols=2, frameon=False, fontsize=8, handlelength=1.2)
    return picture(figure, "padding and imbalance over time")


def draw_metrics(reports: Sequence[tuple[float, Mapping[str, float]]]) -> str:
    """Draws a small plot of each of the first four numbers that were reported more than once; "" if there is none."""
    names = dict.fromkeys(name for _, metrics in reports for name in metrics if name not in ("epoch", "epochs", "step"))
    series = {name: [(at, metrics[name]) for at, metrics in reports if name in metrics] for name in names}
    series = {name: points for name, points in series.items() if len(points) > 1}
    if not series:
        return ""
    shown = list(series.items())[:4]
    figure, all_axes = _figure(1.7, columns=len(shown))
    for axes, (name, points) in zip(np.atleast_1d(all_axes), shown, strict=True):
        axes.plot(*zip(*points, strict=True), ".-", color="#333333", linewidth=1.2, markersize=4)
        axes.set_title(name, fontsize=9, parse_math=False)
        axes.set_xlabel("s")
    return picture(figure, "what was reported to Ray Train")


def draw_plan(summary: Any) -> str:
    """Draws the rows of the first steps; see `PlanSummary.plot`."""
    figure, axes = _figure(3.2)
    summary.plot(axes=axes)
    axes.set_title("")
    return picture(figure, "rows that the first steps take", is_cloud=True)


def of_report_extra(module: str) -> Any:
    """Imports a module that `raylance[report]` installs. Raises ConfigError if the module cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module} cannot be imported ({error}). A report needs it. Install it: pip install raylance[report]"
        ) from error


def _figure(height: float, columns: int = 1) -> Any:
    """Makes a figure of the page's width; returns the figure and its axes."""
    of_report_extra("matplotlib")
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(_WIDTH, height), layout="constrained")
    all_axes = figure.subplots(1, columns)
    for axes in np.atleast_1d(all_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, all_axes


def _legend(figure: Any) -> None:
    patch = importlib.import_module("matplotlib.patches").Patch
    line = importlib.import_module("matplotlib.lines").Line2D
    handles = [patch(color=COLORS[part], label=f"waiting: {part}" if part in WAITS else part) for part in PARTS]
    for kind, label in _SHOWN.items():
        marker, color = _MARKS[kind]
        handles.append(line([], [], linestyle="", marker=marker, color=color, label=label))
    figure.legend(handles=handles, loc="outside upper left", ncols=5, frameon=False, fontsize=8, handlelength=1.2)
