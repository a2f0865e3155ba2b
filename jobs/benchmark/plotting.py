"""Owns the picture of all that was measured; never measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from .memory import series
from .planning import RANKS, short
from .turns import TURNS, pauses_s

mpl.use("agg")

_COLUMNS = 3
_MINE, _PEER, _CEILING = "tab:blue", "tab:gray", "lightgray"

Draw = Callable[[Axes, Any], None]


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws what the report holds, a panel each, as one PNG; the title names the hardware."""
    panels = [(panel, report[part]) for part, made in PANELS.items() if part in report for panel in made]
    rows = -(-len(panels) // _COLUMNS)
    picture = Picture(figsize=(5.2 * _COLUMNS, 3.6 * rows + 0.6), layout="constrained")
    grid = picture.subplots(rows, _COLUMNS, squeeze=False)
    for axes, (panel, found) in zip(grid.flat, panels, strict=False):
        panel(axes, found)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    env = report["environment"]
    versions = ", ".join(f"{name} {env[name]}" for name in ("raylance", "ray", "pylance", "torch"))
    picture.suptitle(f"{env['cores']} cores of {env['processor']}; {versions}", fontsize=11)
    picture.savefig(path, dpi=90)


def _table(axes: Axes, results: dict[str, Any], title: str, unit: str) -> None:
    """Readers as bars, from the least rate to the greatest of all rounds."""
    for at, (name, result) in enumerate(reversed(results.items())):
        rates = [one["rows_per_s"] for one in result["passes"]]
        middle = statistics.median(rates)
        spread = [[middle - min(rates)], [max(rates) - middle]]
        color = _MINE if name.startswith("raylance") else _CEILING if name.startswith("decode") else _PEER
        axes.barh(at, middle, color=color, xerr=spread, ecolor="black", capsize=2)
    axes.set(title=title, xlabel=f"{unit}/s, whole pass", yticks=range(len(results)), yticklabels=[*results][::-1])


def _images(axes: Axes, results: dict[str, Any]) -> None:
    _table(axes, {name: one for name, one in results.items() if name != "raylance-free"}, "JPEG to 224²", "images")


def _vectors(axes: Axes, results: dict[str, Any]) -> None:
    _table(axes, results, "768 × float32", "rows")


def _turns(axes: Axes, found: dict[str, Any]) -> None:
    """Each wait of the run, in its place."""
    waited = [(one["kind"], seconds) for one in found["passes"] for seconds in one["waited_s"]]
    for kind, color in (("train", _MINE), ("val", "tab:orange")):
        points = [(at, 1000 * seconds) for at, (of, seconds) in enumerate(waited) if of == kind]
        axes.plot(*zip(*points, strict=True), ".", color=color, markersize=3, label=kind)
    axes.axhline(1000 * found["batch_s"], color="black", linewidth=0.8, label="one batch's time")
    axes.set(title="Model slower than the loader", xlabel="batches, epoch after epoch", ylabel="wait, ms", yscale="log")
    axes.legend(fontsize=7)


def _turn_pauses(axes: Axes, found: dict[str, Any]) -> None:
    for at, turn in enumerate(TURNS):
        pauses = [1000 * seconds for seconds in pauses_s(found, turn)]
        axes.plot([at] * len(pauses), pauses, "o", color=_MINE)
    axes.axhline(1000 * found["batch_s"], color="black", linewidth=0.8, label="one batch's time")
    axes.set(title="Pause at a turn", ylabel="ms", ylim=(0, None), xticks=range(len(TURNS)))
    axes.set_xticklabels(TURNS.values(), fontsize=8)
    axes.legend(fontsize=7)


def _starting(axes: Axes, found: dict[str, Any]) -> None:
    names = []
    for kind, runs in found.items():
        for how, told in (("at_once", "at once"), ("prepared", "behind prepare()")):
            waited = [run["first_batch_s"] for run in runs[how]]
            axes.barh(len(names), statistics.median(waited), color=_MINE)
            axes.plot(waited, [len(names)] * len(waited), ".", color="black")
            names.append(f"{kind}, {told}")
    axes.set(title="First batch of a run", xlabel="wait, s", yticks=range(len(names)), yticklabels=names)


def _resuming(kind: str) -> Draw:
    def panel(axes: Axes, found: dict[str, Any]) -> None:
        for name, by_share in found[kind].items():
            shares = [100 * float(share) for share in by_share]
            axes.plot(shares, [statistics.median(seconds) for seconds in by_share.values()], marker="o", label=name)
        axes.set(title=f"Resume, {kind}", xlabel="of the epoch consumed, %", ylabel="first batch, s", yscale="log")
        axes.legend(fontsize=7)

    return panel


def _planning(axes: Axes, found: list[dict[str, Any]]) -> None:
    names = [short(cost["order"]) for cost in found]
    axes.barh(names, [1000 * cost["longest_s"] for cost in found], color=_CEILING, label="longest")
    axes.barh(names, [1000 * cost["seconds"] for cost in found], color=_MINE, height=0.5, label="median")
    axes.set(title=f"Rows of a step, one of {RANKS} ranks, 10¹⁰ rows", xlabel="ms")
    axes.legend(fontsize=7)


def _memory(axes: Axes, found: dict[str, Any]) -> None:
    for name, values in series(found).items():
        axes.plot([value / 2**20 for value in values], label=name, linewidth=1)
    axes.set(title="Many short epochs", xlabel="epoch", ylabel="memory of its own, MiB", ylim=(0, None))
    axes.legend(fontsize=7)


def _tail(axes: Axes, found: dict[str, Any]) -> None:
    tail = found["tail"]
    bars = {
        "held by the shard actor": tail["held_bytes"],
        "max_window_bytes": tail["max_window_bytes"],
        "object store": tail["store_peak_bytes"],
        "max_inflight_bytes": tail["max_inflight_bytes"],
        "largest row": tail["row_bytes"]["most"],
    }
    colors = [_CEILING if name.startswith("max_") else _MINE for name in bars]
    axes.barh([*bars], [value / 2**20 for value in bars.values()], color=colors)
    axes.invert_yaxis()
    axes.set(title="Heavy-tailed rows: peaks and limits", xlabel="MiB")


def _growing(name: str, key: str, title: str, ylabel: str, scale: float = 1.0) -> Draw:
    def panel(axes: Axes, found: dict[str, Any]) -> None:
        sizes = {int(size): one[key] * scale for size, one in found[name].items()}
        axes.plot([*sizes], [*sizes.values()], marker="o", color=_MINE)
        axes.set(title=title, xlabel=_SIZES[name], ylabel=ylabel, ylim=(0, None), xscale="log", xticks=[*sizes])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_minor_formatter(lambda *_: "")
        axes.set_ylim(0, 1.15 * max(sizes.values()))

    return panel


_SIZES = {
    "rows": "rows of 768 floats",
    "image side": "side of square JPEGs, pixels",
    "decoders": "decoders, 20 ms a row",
    "ranks": "ranks, of 2 decoders each, 20 ms a row",
}
_MIB = 2**-20
# By part of the report.
PANELS: dict[str, list[Draw]] = {
    "images": [_images],
    "vectors": [_vectors],
    "turns": [_turns, _turn_pauses],
    "starting": [_starting],
    "resuming": [_resuming("images"), _resuming("vectors")],
    "planning": [_planning],
    "memory": [_memory, _tail],
    "sizes": [
        panel
        for name, rows in (("rows", "rows"), ("image side", "images"))
        for panel in (
            _growing(name, "rows_per_s", "Throughput", f"{rows}/s"),
            _growing(name, "first_batch_s", "First batch", "s"),
            _growing(name, "own_bytes", "Memory of all processes", "MiB", _MIB),
        )
    ] + [
        panel
        for name in ("decoders", "ranks")
        for panel in (
            _growing(name, "rows_per_s", "Throughput", "rows/s"),
            _growing(name, "of_linear", "Share of decoding alone", "ratio"),
            _growing(name, "first_batch_s", "First batch", "s"),
        )
    ],
}  # fmt: skip
