"""Owns what any step's rows of one rank cost at 10¹⁰ rows on 1,024 ranks; never reads, never plans by itself."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .figures import Figure
from .setting import Setting

RANKS = 1024
_ROOT = Path(__file__).parents[2]
_PROGRAM = "tests.simulation.scale.planner"


def measure(_: Setting) -> list[dict[str, Any]]:
    """The costs of each built-in order, by a program of the checkout, in a process of its own."""
    if not (_ROOT / _PROGRAM.replace(".", "/")).with_suffix(".py").exists():
        raise ImportError(f"{_PROGRAM} is in the repository alone")
    command = [sys.executable, "-m", _PROGRAM, str(RANKS)]
    return json.loads(subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, check=True).stdout)


def figures(found: list[dict[str, Any]]) -> Iterator[Figure]:
    """The longest step of each order, and the most bytes."""
    for cost in found:
        order = short(cost["order"])
        yield Figure(f"rows of a step, 10¹⁰ on {RANKS}, {order}", [1000 * cost["longest_s"]], "ms", at_most=5.0)
        yield Figure(f"…most memory, {order}", [cost["peak_bytes"] / 1e6], "MB", at_most=50.0)


def short(order: str) -> str:
    """The name of an order, with its shards."""
    name, _, fields = order.partition("(")
    shard = next((field for field in fields.rstrip(")").split(", ") if field.startswith("shard_rows=")), "")
    return f"{name} {shard}".strip()
