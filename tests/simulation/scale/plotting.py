"""Owns the picture of the simulated ranks; never simulates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.simulation.fleet import Found
from tests.simulation.scale.studies import Study

mpl.use("agg")

Runs = Mapping[str, Mapping[int, Found]]


def draw(found: Runs, base: Study, path: Path) -> None:
    """Draws what breaks first, and what it costs, as a PNG of some tens of kilobytes."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    decoders = base.run.decoders
    names = {
        "barrier": "barrier alone",
        "storage": "storage, whole slices in a window",
        "uneven": "storage, no whole slices",
        "auto": 'storage, order="window" as it is',
        "elsewhere": "decoders elsewhere, 25 Gbit/s",
    }
    _lines(axes[0, 0], found, names, lambda one: 1 - one.stall)
    axes[0, 0].set(ylabel="rows/s, of those without any stall", ylim=(0, 1.05), title="What breaks first")
    counts = {"fewer": decoders - 1, "barrier": decoders, "more": decoders + 1}
    _lines(axes[0, 1], found, {k: f"{v} decoders a rank" for k, v in counts.items()}, lambda one: 100 * one.stall)
    axes[0, 1].set(ylabel="stall, % of the time", title="The slowest rank holds the others", ylim=(0, None))
    _lines(axes[1, 0], found, {"barrier": "first batch, actors started"}, lambda one: one.first_batch_s)
    for name, label in {"reader-dies": "a shard actor dies", "decoder-dies": "a decoder dies"}.items():
        usual = found.get("barrier", {})
        more = {r: one.seconds - usual[r].seconds for r, one in found.get(name, {}).items() if r in usual}
        if more:
            axes[1, 0].plot(list(more), [max(0.0, value) for value in more.values()], marker=".", label=label)
    axes[1, 0].set(ylabel="seconds", title="To begin, and to continue after a death", ylim=(0, None))
    axes[1, 0].legend()
    _lines(axes[1, 1], found, {"barrier": "in flight"}, lambda one: one.inflight_bytes / 2**20)
    _lines(axes[1, 1], found, {"barrier": "raw rows held by the shard actor"}, lambda one: one.held_bytes / 2**20)
    axes[1, 1].set(ylabel="MiB of one rank", title="Memory", ylim=(0, None))
    for each in axes.flat:
        each.set_xscale("log", base=2)
        each.set_xlabel("ranks")
        each.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        each.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def _lines(axes: Axes, found: Runs, names: Mapping[str, str], value: Callable[[Found], float]) -> None:
    for name, label in names.items():
        if name in found:
            axes.plot(list(found[name]), [value(one) for one in found[name].values()], marker=".", label=label)
    axes.legend()
