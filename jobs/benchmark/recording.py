"""Owns what it costs that a loader is recorded and publishes metrics: rate, and CPU of the training thread, with and
without; never measures anything else.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

from .figures import Figure
from .measuring import ratios, run_rounds
from .readers import Entry, open_raylance
from .setting import Setting


def measure(setting: Setting) -> dict[str, Any]:
    """Passes with and without records and metrics, in turns, by dataset."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="raylance-benchmark-") as folder:
        entries = {
            name: Entry(open=functools.partial(open_raylance, record=record), ceiling="without")
            for name, record in {"without": False, "with": folder}.items()
        }
        for kind in ("images", "vectors"):
            found[kind] = run_rounds(setting.job(kind), entries, setting.rounds)
    return found


def figures(found: dict[str, Any]) -> list[Figure]:
    """Rates with and without as ratios within the rounds, and what the training thread spends on a batch."""
    made = []
    for kind, results in found.items():
        rates = ratios(results["with"], results["without"])
        made.append(Figure(name=f"{kind}: rate with records and metrics / without", values=rates))
        for name in ("without", "with"):
            values = tuple(one["thread_ms"] for one in results[name]["passes"])
            made.append(Figure(name=f"{kind}: training thread, CPU a batch, {name}", values=values, unit="ms"))
    return made
