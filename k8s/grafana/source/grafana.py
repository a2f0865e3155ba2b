"""Owns the forms of Grafana's JSON, for 9 to 12; never knows what is shown.

Schema 36 is Grafana 9's; later ones raise it to their own when they load it.
"""

from collections.abc import Sequence
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLOURS = {
    "training": "#3D9E6D", "saving": "#9AA0A6", "starting": "#B877D9", "reading": "#3274D9", "decoding": "#FF9830",
    "finishing": "#F2CC0C", "delivered": "#C8C9CA", "limit": "#E02F44", "wanted": "#E02F44",
}  # fmt: skip
GREEN, ORANGE, RED = "#3D9E6D", "#FF9830", "#E02F44"

Panel = dict[str, Any]
Query = dict[str, Any]

_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}  # of each series


def query(expr: str, legend: str = "", *, now: bool = False) -> Query:
    """A query in PromQL; its legend has {{label}} for a label. `now` asks for the last value alone."""
    return {
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": expr,
        "instant": now,
        "legendFormat": legend or "__auto",
        "range": not now,
    }


def stat(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str = "short",
    steps: Sequence[tuple[float, str]] = (),
    names: bool = False,
    decimals: int | None = None,
    empty: str = "–",
) -> Panel:
    """A tile with the last value, in the colour of the step that the value has reached; or with `names`, the name of
    its series in the colour of that name. Without data, it shows `empty`.
    """
    options = {
        "colorMode": "background" if names else "value",
        "graphMode": "none" if names or queries[0]["instant"] else "area",
        "justifyMode": "center" if names else "auto",
        "orientation": "auto",
        "reduceOptions": _LAST,
        "textMode": "name" if names else "auto",
    }
    defaults: dict[str, Any] = {"unit": unit, "noValue": empty, "color": {"mode": "thresholds"}}
    defaults["thresholds"] = _thresholds(steps)
    if decimals is not None:
        defaults["decimals"] = decimals
    return _panel("stat", title, description, queries, options, defaults, _colours() if names else [])


def bars(title: str, description: str, queries: Sequence[Query], *, unit: str = "short") -> Panel:
    """Horizontal bars of last values, each in the colour of its name."""
    options = {
        "displayMode": "basic",
        "minVizHeight": 10,
        "minVizWidth": 0,
        "orientation": "horizontal",
        "reduceOptions": _LAST,
        "showUnfilled": True,
    }
    defaults = {"unit": unit, "min": 0, "color": {"mode": "thresholds"}, "thresholds": _thresholds(())}
    return _panel("bargauge", title, description, queries, options, defaults, _colours())


def lines(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str = "short",
    stacked: bool = False,
    most: float | None = None,
    dashed: Sequence[str] = (),
) -> Panel:
    """Values over time, on an axis that ends at `most`. The series named in `dashed` are limits: red and not filled."""
    custom = {
        "drawStyle": "line",
        "fillOpacity": 70 if stacked else 8,
        "lineInterpolation": "linear",
        "lineWidth": 0 if stacked else 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
    }
    defaults: dict[str, Any] = {"unit": unit, "min": 0, "color": {"mode": "palette-classic"}, "custom": custom}
    if most is not None:
        defaults["max"] = most
    options = {
        "legend": {"calcs": ["lastNotNull"], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    dashes = [
        {"id": "custom.lineStyle", "value": {"dash": [8, 6], "fill": "dash"}},
        {"id": "custom.fillOpacity", "value": 0},
        {"id": "custom.lineWidth", "value": 2},
        {"id": "color", "value": {"mode": "fixed", "fixedColor": RED}},
    ]
    named = [_override(name, dashes) for name in dashed]
    return _panel("timeseries", title, description, queries, options, defaults, _colours() + named)


def text(title: str, markdown: str) -> Panel:
    """Words."""
    options = {"mode": "markdown", "content": markdown, "code": {"language": "plaintext", "showLineNumbers": False}}
    return {"type": "text", "title": title, "description": "", "options": options}


def row(title: str) -> Panel:
    """A heading."""
    return {"type": "row", "title": title, "collapsed": False, "panels": []}


def source_variable() -> dict[str, Any]:
    """The choice of a Prometheus."""
    return {
        "name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1,
        "hide": 0, "includeAll": False, "multi": False, "regex": "", "options": [], "current": {},
    }  # fmt: skip


def label_variable(name: str, label: str, asked: str, *, several: bool, help: str) -> dict[str, Any]:
    """The choice of a label's values, which Grafana asks Prometheus for; of `several`, all are chosen at first."""
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return {
        "name": name, "label": label, "description": help, "type": "query", "datasource": SOURCE, "definition": asked,
        "query": {"query": asked, "refId": "StandardVariableQuery"}, "refresh": 2, "sort": 3, "hide": 0, "regex": "",
        "includeAll": several, "multi": several, "allValue": ".*" if several else None, "options": [],
        "current": everything if several else {},
    }  # fmt: skip


def place(panels: Sequence[tuple[Panel, int, int]]) -> list[Panel]:
    """Lays panels, each with its width and height, from left to right, 24 columns wide, and numbers them.

    Raises:
        ValueError: Where a line is not filled: there would be a hole.
    """
    placed, x, y = [], 0, 0
    for number, (panel, width, height) in enumerate(panels, start=1):
        if x + width > 24:
            raise ValueError(f"{panel['title']!r} goes past column 24: its line has {x + width}; change widths")
        placed.append({"id": number, **panel, "gridPos": {"x": x, "y": y, "w": width, "h": height}})
        x += width
        if x == 24:
            x, y = 0, y + height
    if x:
        raise ValueError(f"the last line ends at column {x}, not 24; change widths")
    return placed


def page(title: str, uid: str, panels: list[Panel], variables: list[dict[str, Any]], description: str) -> Panel:
    """A whole dashboard."""
    note = {
        "builtIn": 1, "datasource": {"type": "grafana", "uid": "-- Grafana --"}, "enable": True, "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)", "name": "Annotations & Alerts", "type": "dashboard",
    }  # fmt: skip
    return {
        "annotations": {"list": [note]},
        "description": description,
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [],
        "panels": panels,
        "refresh": "30s",
        "schemaVersion": 36,
        "tags": ["ray", "raylance"],
        "templating": {"list": variables},
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "title": title,
        "uid": uid,
        "version": 1,
        "weekStart": "",
    }


def _panel(
    kind: str,
    title: str,
    description: str,
    queries: Sequence[Query],
    options: dict[str, Any],
    defaults: dict[str, Any],
    overrides: list[dict[str, Any]],
) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": options,
        "targets": [{"refId": chr(ord("A") + index), **one} for index, one in enumerate(queries)],
    }


def _thresholds(steps: Sequence[tuple[float, str]]) -> dict[str, Any]:
    found = list(steps) or [(0.0, COLOURS["delivered"])]
    values = [{"color": colour, "value": at if index else None} for index, (at, colour) in enumerate(found)]
    return {"mode": "absolute", "steps": values}


def _override(name: str, properties: list[dict[str, Any]]) -> dict[str, Any]:
    return {"matcher": {"id": "byName", "options": name}, "properties": properties}


def _colours() -> list[dict[str, Any]]:
    return [
        _override(name, [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}])
        for name, colour in COLOURS.items()
        if name not in ("limit", "wanted")
    ]
