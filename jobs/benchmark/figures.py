"""Owns the figures that raylance wants to reach, and how tables are printed; never measures, never asserts a speed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .measuring import Result, fault, median, ratio
from .readers import PEERS, Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A measured number beside its target.

    Attributes:
        told: What it is.
        values: What was measured, once or more.
        at_least: The target, where more is better.
        at_most: The target, where less is better.
        unit: Of all of them, "" for ratios.
    """

    told: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    @property
    def median(self) -> float:
        """Of what was measured."""
        return statistics.median(self.values)

    @property
    def is_reached(self) -> bool | None:
        """Whether the median reaches the target; None where there is none."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return None if self.at_most is None else self.median <= self.at_most

    def line(self) -> str:
        """A line of the table."""
        spread = f"{_short(min(self.values))}–{_short(max(self.values))}" if len(self.values) > 1 else ""
        target = "" if self.at_least is None else f"≥ {_short(self.at_least)}"
        target = target if self.at_most is None else f"≤ {_short(self.at_most)}"
        verdict = {True: "reached", False: "missed", None: ""}[self.is_reached]
        return f"{self.told:<66} {_short(self.median):>8} {spread:>15} {self.unit:<9} {target:>8}  {verdict}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        target = self.at_most if self.at_least is None else self.at_least
        told = {"figure": self.told, "median": self.median, "values": list(self.values), "unit": self.unit}
        return told | {"target": target, "reached": self.is_reached}


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def print_figures(figures: Iterable[Figure]) -> None:
    """Prints all, one a line."""
    print(f"\n{'figure':<66} {'median':>8} {'min–max':>15} {'':<9} {'target':>8}")
    for figure in figures:
        print(figure.line())


def print_table(kind: str, entries: dict[str, Entry], results: dict[str, Result]) -> bool:
    """Prints one table; False when a reader delivered other rows than it claims, or other values."""
    print(f"\n{'':<61} first batch, seconds  after it            consumer's")
    print(
        f"{kind:<20} workers   rows/s        min–max / ceiling / raylance  of a pass  at turn   rows/s / ceiling"
        "  CPU ms a batch"
    )
    sound = True
    for name, result in results.items():
        ceiling = entries[name].ceiling
        peer = next(other for key, other in results.items() if entries[key].ceiling == ceiling)
        rates = [one["rows_per_s"] for one in result["passes"]]
        remark = fault(result, peer)
        sound = sound and not remark
        print(
            f"{name:<20} {result['warm_up']['workers']:>7} {median(result, 'rows_per_s'):>8.0f}"
            f" {f'{min(rates):.0f}–{max(rates):.0f}':>15} {_ratio(result, results.get(ceiling)):>9}"
            f" {_ratio(result, results.get('raylance')):>10} {median(result, 'first_batch_s'):>10.2f}"
            f" {median(result, 'turn_s'):>8.3f} {median(result, 'later_rows_per_s'):>9.0f}"
            f" {_ratio(result, results.get(ceiling), 'later_rows_per_s'):>9} {median(result, 'thread_ms'):>16.2f}"
            f"  {remark}".rstrip()
        )
    return sound


def _ratio(result: Result, other: Result | None, key: str = "rows_per_s") -> str:
    return "–" if other is None else f"{ratio(result, other, key)[0]:.2f}"


def of_images(results: dict[str, Result]) -> list[Figure]:
    """What the table of images says of raylance."""
    figures = []
    if {"raylance", "decode"} <= results.keys():
        figures.append(
            _pair("images, one decode function for all: share of decoding alone", results, "raylance", "decode", 0.97)
        )
    peers = {name: result for name, result in results.items() if name in PEERS}
    best = max(peers, key=lambda name: median(peers[name], "rows_per_s"), default="")
    if "raylance" in results and best:
        figures.append(
            _pair(f"images, one decode function: times the best peer ({best})", results, "raylance", best, 1.0)
        )
    if "raylance-own" in results and best:
        figures.append(
            _pair(f"images, built-in decoder: times the best peer ({best})", results, "raylance-own", best, 2.2)
        )
    if {"raylance-own", "decode-own"} <= results.keys():
        figures.append(
            _pair("images, built-in decoder: share of decoding alone", results, "raylance-own", "decode-own", 0.85)
        )
    for name, told in (("raylance", "one decode function"), ("raylance-own", "built-in decoder")):
        if name in results:
            figures.append(
                _passes(
                    f"first batch of an epoch that was not expected, {told}", results[name], "first_batch_s", "s", 0.15
                )
            )
            figures.append(_passes(f"first batch of the next epoch, {told}", results[name], "turn_s", "s", 0.15))
    for name, rows in (("raylance-own", "64"), ("raylance-own-256", "256")):
        if name in results:
            figures.append(
                _passes(f"training thread, CPU a batch of {rows} images", results[name], "thread_ms", "ms", 1.0)
            )
    if "raylance-free" in results:
        rates = tuple(one["rows_per_s"] for one in results["raylance-free"]["passes"])
        figures.append(Figure(told="one rank, decoding free", values=rates, at_least=11_000, unit="images/s"))
    return figures


def of_vectors(results: dict[str, Result]) -> list[Figure]:
    """What the table of vectors says of raylance."""
    if "raylance" not in results:
        return []
    figures = []
    for name, told, target in (
        ("lance-torch", "share of the scan in order", 0.65),
        ("ray-data", "times Ray Data", 4.5),
    ):
        if name in results:
            figures.append(_pair(f"768 floats a row, shuffled: {told}", results, "raylance", name, target))
    return figures


def _pair(told: str, results: dict[str, Result], one: str, two: str, target: float) -> Figure:
    pairs = zip(results[one]["passes"], results[two]["passes"], strict=True)
    values = tuple(mine["rows_per_s"] / other["rows_per_s"] for mine, other in pairs)
    return Figure(told=told, values=values, at_least=target)


def _passes(told: str, result: Result, key: str, unit: str, target: float) -> Figure:
    return Figure(told=told, values=tuple(one[key] for one in result["passes"]), at_most=target, unit=unit)
