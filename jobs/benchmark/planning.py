"""Owns what any step's rows of one rank cost at 10¹⁰ rows on 1,024 ranks; never reads, never plans by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .figures import Figure
from .setting import Setting

RANKS = 1024
_ROOT = Path(__file__).parents[2]
_PROGRAM = "tests.simulation.scale.planner"


def measure(_: Setting) -> list[dict[str, Any]]:
    """The costs of each built-in order, by a program of the checkout, in a process of its own.

    Raises:
        ImportError: This is no checkout.
    """
    if not (_ROOT / _PROGRAM.replace(".", "/")).with_suffix(".py").exists():
        raise ImportError(f"{_PROGRAM} is in the repository alone")
    command = [sys.executable, "-m", _PROGRAM, str(RANKS)]
    return json.loads(subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, check=True).stdout)


def figures(found: list[dict[str, Any]]) -> list[Figure]:
    """The longest step of each order, and the most bytes."""
    made = []
    for cost in found:
        order = short(cost["order"])
        name, longest = f"rows of a step, 10¹⁰ on {RANKS}, {order}", 1000 * cost["longest_s"]
        made.append(Figure(name=name, values=(longest,), at_most=5.0, unit="ms"))
        peak = cost["peak_bytes"] / 1e6
        made.append(Figure(name=f"…most memory, {order}", values=(peak,), at_most=50.0, unit="MB"))
    return made


def short(order: str) -> str:
    """The name of an order, with its shards."""
    name, _, fields = order.partition("(")
    shard = next((field for field in fields.rstrip(")").split(", ") if field.startswith("shard_rows=")), "")
    return f"{name} {shard}".strip()
