"""Owns what any step's rows of one rank cost at 10¹⁰ rows on 1,024 ranks; never reads, never plans by itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .figures import Figure
from .setting import Setting

RANKS = 1024
_RUNS = 5


def measure_planning(_: Setting) -> list[dict[str, Any]]:
    """The costs of each built-in order, as `tests.simulation.planner` says; they lie in the checkout, not in `jobs`."""
    from tests.simulation import planner

    return [min(_costs(planner, order), key=lambda cost: cost["longest_s"]) for order in planner.ORDERS]


def _costs(planner: Any, order: Any) -> list[dict[str, Any]]:
    """Some runs, all of the same steps: the one whose longest step is shortest, others did not disturb."""
    return [asdict(planner.cost(order, RANKS)) for _ in range(_RUNS)]


def of_planning(found: list[dict[str, Any]]) -> list[Figure]:
    """The longest step of each order, and the most bytes."""
    told = []
    for cost in found:
        order = short(cost["order"])
        longest = (1000 * cost["longest_s"],)
        told.append(Figure(told=f"rows of a step, 10¹⁰ on {RANKS}, {order}", values=longest, at_most=5.0, unit="ms"))
        peak = (cost["peak_bytes"] / 1e6,)
        told.append(Figure(told=f"…most memory, {order}", values=peak, at_most=50.0, unit="MB"))
    return told


def short(order: str) -> str:
    """The name of an order, with its shards."""
    name, _, fields = order.partition("(")
    shard = next((field for field in fields.rstrip(")").split(", ") if field.startswith("shard_rows=")), "")
    return f"{name} {shard}".strip()
