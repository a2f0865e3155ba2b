"""Owns what records and metrics cost: rate, and CPU of the training thread; never measures anything else."""

import functools
import tempfile
from collections.abc import Iterator
from typing import Any

from .figures import Figure
from .measuring import ratios, run_rounds, values_of
from .readers import Entry, open_raylance
from .setting import Setting


def measure(setting: Setting) -> dict[str, Any]:
    """Passes with and without records and metrics, in turns, by dataset."""
    with tempfile.TemporaryDirectory(prefix="raylance-benchmark-") as folder:
        entries = {
            name: Entry(open=functools.partial(open_raylance, record=record), ceiling="without")
            for name, record in {"without": False, "with": folder}.items()
        }
        return {kind: run_rounds(setting.job(kind), entries, setting.rounds) for kind in ("images", "vectors")}


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """Rates with and without as ratios within the rounds, and what the training thread spends on a batch."""
    for kind, results in found.items():
        rates = ratios(results["with"], results["without"])
        yield Figure(f"{kind}: rate with records and metrics / without", rates)
        for name, result in results.items():
            yield Figure(f"{kind}: training thread, CPU a batch, {name}", values_of(result, "thread_ms"), "ms")
