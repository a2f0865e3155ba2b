"""Owns the picture of all that was measured; never measures."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from .measuring import values_of
from .memory import series
from .planning import RANKS, short
from .turns import TURNS, pauses_s

mpl.use("agg")

_COLUMNS, _MIB = 3, 2**-20
_MINE, _PEER, _CEILING = "tab:blue", "tab:gray", "lightgray"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws what the report holds, a panel each, as one PNG; the title names the hardware."""
    panels = [(panel, report[part]) for part, made in PANELS.items() if part in report for panel in made]
    rows = -(-len(panels) // _COLUMNS)
    picture = Picture(figsize=(5.2 * _COLUMNS, 3.6 * rows + 0.6), layout="constrained")
    grid = picture.subplots(rows, _COLUMNS, squeeze=False)
    for axes, (panel, found) in zip(grid.flat, panels, strict=False):
        panel(axes, found)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    env = report["environment"]
    versions = ", ".join(f"{name} {env[name]}" for name in ("raylance", "ray", "pylance", "torch"))
    picture.suptitle(f"{env['cores']} cores of {env['processor']}; {versions}", fontsize=11)
    picture.savefig(path, dpi=90)


def _table(title: str, unit: str, axes: Axes, results: dict[str, Any]) -> None:
    """Readers as bars, from the least rate to the greatest of all rounds."""
    readers = [name for name in results if name != "raylance-free"][::-1]
    rates = pd.DataFrame({name: values_of(results[name], "rows_per_s") for name in readers})
    middle = rates.median()
    kinds = {"raylance": _MINE, "decode": _CEILING}
    axes.barh(
        readers, middle, xerr=[middle - rates.min(), rates.max() - middle], ecolor="black", capsize=2,
        color=[kinds.get(name.partition("-")[0], _PEER) for name in readers],
    )  # fmt: skip
    axes.set(title=title, xlabel=f"{unit}/s, whole pass")


def _turns(axes: Axes, found: dict[str, Any]) -> None:
    """Each wait of the run, in its place."""
    waited = pd.DataFrame([(one["kind"], 1000 * s) for one in found["passes"] for s in one["waited_s"]])
    for kind, color in (("train", _MINE), ("val", "tab:orange")):
        axes.plot(waited[1][waited[0] == kind], ".", color=color, markersize=3, label=kind)
    _one_batch(axes, found)
    axes.set(title="Model slower than the loader", xlabel="batches, epoch after epoch", ylabel="wait, ms", yscale="log")


def _turn_pauses(axes: Axes, found: dict[str, Any]) -> None:
    for turn, name in TURNS.items():
        pauses = [1000 * seconds for seconds in pauses_s(found, turn)]
        axes.plot([name] * len(pauses), pauses, "o", color=_MINE)
    _one_batch(axes, found)
    axes.set(title="Pause at a turn", ylabel="ms", ylim=(0, None))
    axes.tick_params("x", labelsize=8)


def _one_batch(axes: Axes, found: dict[str, Any]) -> None:
    axes.axhline(1000 * found["batch_s"], color="black", linewidth=0.8, label="one batch's time")


def _starting(axes: Axes, found: dict[str, Any]) -> None:
    for kind, runs in found.items():
        for how, name in (("at_once", "at once"), ("prepared", "after prepare()")):
            waited = [run["first_batch_s"] for run in runs[how]]
            axes.barh(f"{kind}, {name}", statistics.median(waited), color=_MINE)
            axes.plot(waited, [f"{kind}, {name}"] * len(waited), ".", color="black")
    axes.set(title="First batch of a run", xlabel="wait, s")


def _resuming(kind: str, axes: Axes, found: dict[str, Any]) -> None:
    table = pd.DataFrame({name: pd.DataFrame(by_share).median() for name, by_share in found[kind].items()})
    table.set_axis(100 * table.index.astype(float)).plot(ax=axes, marker="o")
    axes.set(title=f"Resume, {kind}", xlabel="of the epoch consumed, %", ylabel="first batch, s", yscale="log")


def _planning(axes: Axes, found: list[dict[str, Any]]) -> None:
    names = [short(cost["order"]) for cost in found]
    axes.barh(names, [1000 * cost["longest_s"] for cost in found], color=_CEILING, label="longest")
    axes.barh(names, [1000 * cost["seconds"] for cost in found], color=_MINE, height=0.5, label="median")
    axes.set(title=f"Rows of a step, one of {RANKS} ranks, 10¹⁰ rows", xlabel="ms")


def _memory(axes: Axes, found: dict[str, Any]) -> None:
    (pd.DataFrame(series(found)) * _MIB).plot(ax=axes, linewidth=1)
    axes.set(title="Many short epochs", xlabel="epoch", ylabel="memory of its own, MiB", ylim=(0, None))


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
    axes.barh([*bars], [value * _MIB for value in bars.values()], color=colors)
    axes.invert_yaxis()
    axes.set(title="Heavy-tailed rows: peaks and limits", xlabel="MiB")


def _growing(name: str, key: str, title: str, ylabel: str, axes: Axes, found: dict[str, Any]) -> None:
    sizes = pd.Series({int(size): one[key] for size, one in found[name].items()})
    sizes *= _MIB if key == "own_bytes" else 1
    sizes.plot(ax=axes, marker="o", color=_MINE, logx=True, xticks=sizes.index, ylim=(0, 1.15 * sizes.max()))
    axes.set(title=title, xlabel=_SIZES[name], ylabel=ylabel)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")


_SIZES = {
    "rows": "rows of 768 floats",
    "image side": "side of square JPEGs, pixels",
    "decoders": "decoders, 20 ms a row",
    "ranks": "ranks, of 2 decoders each, 20 ms a row",
}
_SHOWN = {
    "first_batch_s": ("First batch", "s"),
    "own_bytes": ("Memory of all processes", "MiB"),
    "of_linear": ("Share of decoding alone", "ratio"),
}
# By part of the report.
PANELS: dict[str, list[Callable[[Axes, Any], None]]] = {
    "images": [partial(_table, "JPEG to 224²", "images")],
    "vectors": [partial(_table, "768 × float32", "rows")],
    "turns": [_turns, _turn_pauses],
    "starting": [_starting],
    "resuming": [partial(_resuming, "images"), partial(_resuming, "vectors")],
    "planning": [_planning],
    "memory": [_memory, _tail],
    "sizes": [
        partial(_growing, name, key, *_SHOWN.get(key, ("Throughput", f"{rows}/s")))
        for name, rows, keys in (
            ("rows", "rows", ("rows_per_s", "first_batch_s", "own_bytes")),
            ("image side", "images", ("rows_per_s", "first_batch_s", "own_bytes")),
            ("decoders", "rows", ("rows_per_s", "of_linear", "first_batch_s")),
            ("ranks", "rows", ("rows_per_s", "of_linear", "first_batch_s")),
        )
        for key in keys
    ],
}
