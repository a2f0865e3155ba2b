"""Owns what it costs that a loader is recorded and publishes metrics: rate, and CPU of the training thread, with and
without; never measures anything else.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from .figures import Figure
from .measuring import measure
from .readers import open_raylance
from .setting import Setting


def measure_recording(setting: Setting) -> dict[str, Any]:
    """Passes with and without records and metrics, in turns, by dataset: as `measure` tells them."""
    found: dict[str, Any] = {}
    for kind in ("images", "vectors"):
        job = setting.job(kind)
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raylance-benchmark-"))
            wanted = {"without": False, "with": folder}
            sources = {name: open_raylance(job, stack, record=record) for name, record in wanted.items()}
            for source in sources.values():
                measure(source, 0, epochs=1)  # warms up
            passes: dict[str, list[Any]] = {name: [] for name in sources}
            for number in range(1, setting.rounds + 1):
                for name in sorted(sources, reverse=bool(number % 2)):  # so that none always comes first
                    print(f"recording of {kind}, {name}, round {number}", file=sys.stderr)
                    passes[name].append(measure(sources[name], number))
        found[kind] = {name: {"passes": one} for name, one in passes.items()}
    return found


def of_recording(found: dict[str, Any]) -> list[Figure]:
    """Rates with and without as ratios within the rounds, and what the training thread spends on a batch."""
    told = []
    for kind, results in found.items():
        pairs = list(zip(results["with"]["passes"], results["without"]["passes"], strict=True))
        rates = tuple(one["rows_per_s"] / other["rows_per_s"] for one, other in pairs)
        told.append(Figure(told=f"{kind}: rate with records and metrics / without", values=rates))
        told += [
            Figure(
                told=f"{kind}: training thread, CPU a batch, {name}",
                values=tuple(one["thread_ms"] for one in results[name]["passes"]),
                unit="ms",
            )
            for name in ("without", "with")
        ]
    return told
