"""The figures that raylance wants to reach, and how tables are printed."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from .measuring import Result, fault, median, ratios, values_of
from .readers import PEERS, Entry


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, once or more often, beside its target."""

    name: str
    values: Sequence[float]
    unit: str = ""  # none for ratios
    at_least: float | None = None  # the target, where more is better
    at_most: float | None = None  # the target, where less is better

    @property
    def median(self) -> float:
        """The middle one of the values."""
        return statistics.median(self.values)

    @property
    def is_reached(self) -> bool | None:
        """Whether the median reaches the target; None without a target."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return None if self.at_most is None else self.median <= self.at_most

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        target = self.at_most if self.at_least is None else self.at_least
        fields = {"figure": self.name, "median": self.median, "values": list(self.values), "unit": self.unit}
        return fields | {"target": target, "reached": self.is_reached}


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def print_figures(figures: Iterable[Figure]) -> None:
    """Prints a table with a figure in each row."""
    rows = []
    for figure in figures:
        spread = f"{_short(min(figure.values))}–{_short(max(figure.values))}"
        target = "" if figure.at_least is None else f"≥ {_short(figure.at_least)}"
        rows.append({
            "figure": figure.name,
            "median": _short(figure.median),
            "min–max": spread if len(figure.values) > 1 else "",
            "unit": figure.unit,
            "target": target if figure.at_most is None else f"≤ {_short(figure.at_most)}",
            "verdict": {True: "reached", False: "missed", None: ""}[figure.is_reached],
        })  # fmt: skip
    _print("figure", rows)


def print_table(kind: str, entries: dict[str, Entry], results: dict[str, Result]) -> bool:
    """Prints the readers of one dataset; False when a reader delivered other rows than it claims, or other values."""
    rows = []
    for name, result in results.items():
        ceiling = entries[name].ceiling
        peer = next(other for key, other in results.items() if entries[key].ceiling == ceiling)
        rates = values_of(result, "rows_per_s")
        rows.append({
            kind: name,
            "workers": result["warm_up"]["workers"],
            "rows/s": f"{median(result, 'rows_per_s'):.0f}",
            "min–max": f"{min(rates):.0f}–{max(rates):.0f}",
            "/ ceiling": _ratio(result, results.get(ceiling)),
            "/ raylance": _ratio(result, results.get("raylance")),
            "first batch s": f"{median(result, 'first_batch_s'):.2f}",
            "at turn s": f"{median(result, 'turn_s'):.3f}",
            "rows/s after it": f"{median(result, 'later_rows_per_s'):.0f}",
            "/ ceiling after it": _ratio(result, results.get(ceiling), "later_rows_per_s"),
            "CPU ms a batch": f"{median(result, 'thread_ms'):.2f}",
            "fault": fault(result, peer),
        })  # fmt: skip
    _print(kind, rows)
    return not any(row["fault"] for row in rows)


def _print(name: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        table = pd.DataFrame(rows).set_index(name).rename_axis(index=None, columns=name)
        print(f"\n{table.to_string()}")


def _ratio(result: Result, other: Result | None, key: str = "rows_per_s") -> str:
    return "–" if other is None else f"{statistics.median(ratios(result, other, key)):.2f}"


def images(results: dict[str, Result]) -> Iterator[Figure]:
    """What the table of images shows of raylance."""
    peers = [name for name in results if name in PEERS]
    best = max(peers, key=lambda name: median(results[name], "rows_per_s"), default="")
    yield from _comparisons(results, {
        "images, one decode function for all: share of decoding alone": ("raylance", "decode", 0.97),
        f"images, one decode function: times the best peer ({best})": ("raylance", best, 1.0),
        f"images, built-in decoder: times the best peer ({best})": ("raylance-own", best, 2.0),
        "images, built-in decoder: share of decoding alone": ("raylance-own", "decode-own", 0.8),
    })  # fmt: skip
    for name, reader, key, unit, target in (
        ("first batch of an epoch that was not expected, one decode function", "raylance", "first_batch_s", "s", 0.1),
        ("first batch of an epoch that was not expected, built-in decoder", "raylance-own", "first_batch_s", "s", 0.1),
        ("training thread, CPU a batch of 64 images", "raylance-own", "thread_ms", "ms", 1.0),
        ("training thread, CPU a batch of 256 images", "raylance-own-256", "thread_ms", "ms", 1.0),
    ):
        if reader in results:
            yield Figure(name, values_of(results[reader], key), unit, at_most=target)
    if "raylance-free" in results:
        rates = values_of(results["raylance-free"], "rows_per_s")
        yield Figure("one rank, decoding free", rates, "images/s", at_least=12_000)


def vectors(results: dict[str, Result]) -> Iterator[Figure]:
    """What the table of vectors shows of raylance."""
    return _comparisons(results, {
        "768 floats a row, shuffled: share of the scan in order": ("raylance", "lance-torch", 0.7),
        "768 floats a row, shuffled, by threads: share of the scan in order": ("raylance-threads", "lance-torch", 1.0),
        "768 floats a row, shuffled: times Ray Data": ("raylance", "ray-data", 4.5),
    })  # fmt: skip


def _comparisons(results: dict[str, Result], asked: dict[str, tuple[str, str, float]]) -> Iterator[Figure]:
    """Ratios of rates within the rounds, of those two readers that both took part."""
    for name, (one, other, target) in asked.items():
        if {one, other} <= results.keys():
            yield Figure(name, ratios(results[one], results[other]), at_least=target)
