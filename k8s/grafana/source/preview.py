"""Owns a picture of the dashboard with what a Prometheus knows, where no Grafana is; never quite what Grafana draws.

    python -m k8s.grafana.source.preview --prometheus http://127.0.0.1:9090 --run food101 --out dashboard.png
    python -m k8s.grafana.source.preview --run before --run after --sections 1    # the first section of both

Panels lie where Grafana puts them, ask its queries and have its colours and units. It needs matplotlib.
"""

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from k8s.grafana.source.asking import Prometheus, filled, legend
from k8s.grafana.source.command import FOLDER

mpl.use("agg")

INK, PAPER, PANEL, GREY = "#D8D9DA", "#111217", "#181B1F", "#8E8E8E"
SERIES = ("#73BF69", "#F2CC0C", "#5794F2", "#FF9830", "#F2495C", "#B877D9", "#8AB8FF", "#C4A000")  # Grafana's classic
COLUMN, LINE = 0.62, 0.36  # inches of a grid unit

Panel = dict[str, Any]
Named = list[tuple[str, list[tuple[float, float]]]]


def figure(value: float, unit: str) -> str:
    """A value as Grafana writes it."""
    if not np.isfinite(value):
        return "∞"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        steps = ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    elif unit in ("bytes", "Bps"):
        tail = "/s" if unit == "Bps" else ""
        steps = ((2**30, "GiB" + tail), (2**20, "MiB" + tail), (2**10, "KiB" + tail), (1, "B" + tail))
    else:
        steps = ((1e6, "Mil"), (1e3, "K"), (1, ""))
    size, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / size:.3g} {name}".strip() if value else f"0 {name}".strip()


class Drawing:
    """A dashboard, panel by panel, of one run after the other."""

    def __init__(self, panels: list[Panel], source: Prometheus) -> None:
        self._panels, self._source, self._values = panels, source, {"run": ""}

    def draw(self, runs: list[str], path: Path, dpi: int) -> None:
        """Draws runs, one below the other, as PNG."""
        lines = 1 + max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in self._panels)
        high = lines * len(runs)
        page = Figure(figsize=(24 * COLUMN, high * LINE), facecolor=PAPER)
        for at, run in enumerate(runs):
            self._values["run"] = run
            above = at * lines + 1  # the line in which Grafana has its variables
            page.text(0.004, 1 - (above - 0.5) / high, f"Run  {run}", color=INK, va="center", size=12, weight="bold")
            for panel in self._panels:
                place = panel["gridPos"]
                bottom = 1 - (above + place["y"] + place["h"]) / high
                self._panel(page, panel, (place["x"] / 24, bottom, place["w"] / 24, place["h"] / high))
        page.savefig(path, dpi=dpi)

    def _panel(self, page: Figure, panel: Panel, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        gap, line = 0.002, LINE / (page.get_figheight())
        if panel["type"] == "row":
            page.text(left + 0.004, bottom + height / 2, "⌄ " + panel["title"], color=INK, va="center", weight="bold")
            return
        frame = page.add_axes((left + gap, bottom + 0.1 * line, width - 2 * gap, height - 0.2 * line), facecolor=PANEL)
        frame.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
        page.text(left + 0.006, bottom + height - 0.25 * line, panel["title"], color=INK, va="top", size=9)
        drawn: dict[str, Callable[[], None]] = {
            "stat": lambda: self._stat(page, panel, frame, box),
            "text": lambda: _words(panel, frame),
            "bargauge": lambda: self._bars(page, panel, (left, bottom, width, height)),
            "timeseries": lambda: self._lines(page, panel, (left, bottom, width, height)),
        }
        drawn[panel["type"]]()

    def _data(self, panel: Panel) -> Named:
        found: Named = []
        for target in panel["targets"]:
            expr = filled(target["expr"], self._values)
            for labels, values in self._source.values(expr, now=target["instant"]):
                known = [(at, value) for at, value in values if np.isfinite(value)]
                found += [(legend(target, labels), known)] if known else []
        return found

    def _stat(self, page: Figure, panel: Panel, frame: Axes, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        data, defaults = self._data(panel), panel["fieldConfig"]["defaults"]
        if not data:
            frame.text(0.5, 0.4, defaults["noValue"], color=GREY, ha="center", va="center", size=13)
            return
        name, values = data[0]
        if panel["options"]["textMode"] == "name":
            frame.set_facecolor(_own_colour(panel, name) or GREY)
            frame.text(0.5, 0.42, name, color="white", ha="center", va="center", size=26, weight="bold")
            return
        steps = defaults["thresholds"]["steps"]
        last = values[-1][1]
        colour = [step["color"] for step in steps if step["value"] is None or last >= step["value"]][-1]
        frame.text(0.5, 0.45, figure(last, defaults["unit"]), color=colour, ha="center", va="center", size=22)
        if panel["options"]["graphMode"] == "area":
            axes = page.add_axes((left + 0.003, bottom + 0.05 * height, width - 0.006, 0.3 * height), zorder=-1)
            axes.axis("off")
            frame.patch.set_alpha(0)
            axes.fill_between([at for at, _ in values], [value for _, value in values], color=colour, alpha=0.25)

    def _bars(self, page: Figure, panel: Panel, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        data, unit = self._data(panel), panel["fieldConfig"]["defaults"]["unit"]
        axes = page.add_axes(
            (left + 0.25 * width, bottom + 0.06 * height, 0.56 * width, 0.78 * height), facecolor=PANEL
        )
        axes.axis("off")
        most = max((values[-1][1] for _, values in data), default=1.0)
        for at, (name, values) in enumerate(data):
            last, colour = values[-1][1], _own_colour(panel, name) or GREY
            axes.barh(-at, most, color="#22252B", height=0.72)
            axes.barh(-at, last, color=colour, height=0.72)
            axes.text(-0.03 * most, -at, name, color=INK, ha="right", va="center", size=10)
            axes.text(1.03 * most, -at, figure(last, unit), color=colour, va="center", size=12)
        axes.set_xlim(0, most)

    def _lines(self, page: Figure, panel: Panel, box: tuple[float, float, float, float]) -> None:
        left, bottom, width, height = box
        inch = width * 24 * COLUMN
        aside, below = 0.62 / inch, 0.55 / (height * page.get_figheight())
        size = (left + aside * width, bottom + below * height, width * (0.98 - aside), height * (0.86 - below))
        axes = page.add_axes(size, facecolor=PANEL)
        data, defaults = self._data(panel), panel["fieldConfig"]["defaults"]
        _plot(axes, panel, data)
        axes.tick_params(colors=GREY, labelsize=7, length=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value, defaults["unit"])))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: time.strftime("%H:%M", time.gmtime(at))))
        axes.locator_params(axis="both", nbins=5)
        axes.grid(color="#2C3235", linewidth=0.5)
        axes.spines[:].set_visible(False)
        top = defaults.get("max") or (1.08 * axes.dataLim.ymax if data else 0)
        axes.set(xlim=(self._source.start, self._source.end), ylim=(0, top or 1))
        if not data:
            axes.text(0.5, 0.5, "No data", transform=axes.transAxes, color=GREY, ha="center")
            return
        shown = axes.get_legend_handles_labels()
        axes.legend(
            *(part[:6] for part in shown), ncols=6, loc="upper left", bbox_to_anchor=(-0.02, -0.12), fontsize=7,
            labelcolor=INK, frameon=False, handlelength=1.2, columnspacing=1.0, borderpad=0,
        )  # fmt: skip


def _plot(axes: Axes, panel: Panel, data: Named) -> None:
    """Series as lines, or upon each other."""
    custom = panel["fieldConfig"]["defaults"]["custom"]
    colours = [_own_colour(panel, name) or SERIES[at % len(SERIES)] for at, (name, _) in enumerate(data)]
    if custom["stacking"]["mode"] == "normal":
        times = sorted({at for _, values in data for at, _ in values})
        heights = [[dict(values).get(at, 0.0) for at in times] for _, values in data]
        axes.stackplot(times, heights, colors=colours, labels=[name for name, _ in data], alpha=0.85)
        return
    for (name, values), colour in zip(data, colours, strict=True):
        is_limit = any(one["id"] == "custom.lineStyle" for one in _overrides(panel, name))
        points = [at for at, _ in values], [value for _, value in values]
        axes.plot(*points, color=colour, label=name, lw=1.6 if is_limit else 1.2, ls="--" if is_limit else "-")


def _overrides(panel: Panel, name: str) -> list[dict[str, Any]]:
    found = [one["properties"] for one in panel["fieldConfig"]["overrides"] if one["matcher"]["options"] == name]
    return [one for properties in found for one in properties]


def _own_colour(panel: Panel, name: str) -> str | None:
    colours = [one["value"]["fixedColor"] for one in _overrides(panel, name) if one["id"] == "color"]
    return colours[-1] if colours else None


def _words(panel: Panel, frame: Axes) -> None:
    """A text panel: its table as lines, its words wrapped."""
    lines = []
    for line in panel["options"]["content"].splitlines():
        cells = [cell.strip().replace("**", "").replace("`", "") for cell in line.strip("|").split("|")]
        if line.startswith("|--") or not line:
            continue
        text = f"{cells[0]:<9} {' · '.join(cells[1:])}" if len(cells) > 1 else cells[0].replace("*", "")
        lines += textwrap.wrap(text, 76, subsequent_indent=" " * 10 if len(cells) > 1 else "")
    frame.text(0.02, 0.87, "\n".join(lines), color=INK, va="top", size=7.2, family="monospace", linespacing=1.5)


def main(argv: list[str] | None = None) -> int:
    """Draws; returns the exit status."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m k8s.grafana.source.preview", description=__doc__, formatter_class=as_written
    )
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL", help="(%(default)s)")
    parser.add_argument("--run", required=True, action="append", metavar="NAME", help="as Ray Train calls it; several")
    parser.add_argument(
        "--dashboard", type=Path, default=FOLDER / "raylance.json", metavar="FILE", help="(%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=15, metavar="M", help="how much is shown (%(default)s)")
    parser.add_argument("--end", type=float, metavar="S", help="up to when, in seconds since 1970; now by default")
    parser.add_argument("--sections", type=int, metavar="N", help="how many, from the top; all by default")
    parser.add_argument("--dpi", type=int, default=90, metavar="N", help="pixels of an inch (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("dashboard.png"), metavar="FILE", help="(%(default)s)")
    args = parser.parse_args(argv)
    end = args.end or time.time()
    source = Prometheus(url=args.prometheus.rstrip("/"), start=end - 60 * args.minutes, end=end)
    panels = json.loads(args.dashboard.read_text(encoding="utf-8"))["panels"]
    heads = [index for index, panel in enumerate(panels) if panel["type"] == "row"] + [len(panels)]
    panels = panels[: heads[min(args.sections or len(heads), len(heads) - 1)]]
    try:
        Drawing(panels, source).draw(args.run, args.out, args.dpi)
    except OSError as error:
        print(f"nothing is drawn: {error}; is a Prometheus there, and does --prometheus name it?", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
