"""Owns one rank's share of what is judged, and the rates that follow from it; never says what they mean."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from raylance.observe.stats import WAITS

MOSTLY = 0.5  # of the time: a rank that was there for less does not stand for others
_IN_STEP = 0.9  # of the slowest one's steps: so long are those of a rank that keeps step with it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's share of what is judged.

    Attributes:
        figures: What `Stats.sample` gives, of the time that is judged: counters as differences.
        facts: The facts of its record: rank, world_size, row_bytes, decodes, order, options, cpus.
        presence: Share of the time that is judged in which it was there, in [0, 1]: not all of it where the world
            size changed. Rates over all ranks count it by this share.
        starts: How often it was started in this time.
    """

    figures: Mapping[str, float]
    facts: Mapping[str, Any]
    presence: float = 1.0
    starts: int = 1

    @property
    def trained_s(self) -> float:
        """Seconds of training: without saving, and without passes over other datasets between two batches."""
        return max(0.0, self.figures["user_s"] - self.figures["save_s"] - self.figures["other_s"])

    @property
    def waited_s(self) -> float:
        """Seconds of waiting, but for the start."""
        return sum(self.figures[name] for limit, name in WAITS.items() if limit != "starting")

    @property
    def steady_s(self) -> float:
        """Seconds of training and waiting, but for the start: what rates are of."""
        return self.trained_s + self.waited_s

    @property
    def rate(self) -> float:
        """Rows a second that it was handed, of the time between its first batch and its last: saving, and passes over
        other datasets, left out. What is called rows/s of a rank is this; 0 where there is no such time.
        """
        return self.figures["rows"] / self.steady_s if self.steady_s else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of training and waiting for each of its batches."""
        return self.steady_s / max(1.0, self.figures["batches"])

    @property
    def trained_step_s(self) -> float:
        """Seconds of training for each of its batches; those in which it waits for other ranks are among them."""
        return self.trained_s / max(1.0, self.figures["batches"])

    @property
    def decode_rate(self) -> float:
        """Rows a second that its decoders deliver when they have work."""
        figures = self.figures
        rows, seconds = figures["decoded_rows"], figures["decode_s"]
        helpers = figures["decoders"] or max(1.0, figures["readers"])
        return max(self._had, helpers * rows / seconds) if seconds else math.inf

    @property
    def read_rate(self) -> float:
        """Rows a second that its shard actors read when they read all the time."""
        rows, seconds = self.figures["read_bytes"] / max(1.0, self.facts["row_bytes"]), self.figures["storage_s"]
        return max(self._had, max(1.0, self.figures["readers"]) * rows / seconds) if seconds else math.inf

    @property
    def _had(self) -> float:
        """Rows a second of all its time: whoever delivered them can."""
        figures = self.figures
        all_s = self.steady_s + figures["wait_start_s"] + figures["save_s"] + figures["other_s"]
        return figures["rows"] / all_s if all_s else 0.0


def delivered_rate(parts: Sequence[Part]) -> float:
    """Rows a second over all ranks: they take the same number of steps, so that all are as fast as the slowest one."""
    return _over_all(parts, max((part.step_s for part in _counted(parts)), default=0.0), 0.0)


def training_rate(parts: Sequence[Part]) -> float:
    """Rows a second over all ranks, if no trainer ever waited for its loader.

    A rank that waits for its loader is waited for by those that keep step with it, in their collective operations: of
    the ranks whose steps take as long as the slowest one's, the one that trains shortest tells how long training takes.
    """
    counted = _counted(parts)
    slowest_s = max((part.step_s for part in counted), default=0.0)
    kept_step = [part.trained_step_s for part in counted if part.step_s >= _IN_STEP * slowest_s]
    return _over_all(parts, min(kept_step, default=0.0), math.inf if counted else 0.0)


def _counted(parts: Sequence[Part]) -> list[Part]:
    """The ranks by which all are judged: those that were there mostly, and have batches."""
    there = [part for part in parts if part.presence and part.figures["batches"]]
    return [part for part in there if part.presence >= MOSTLY] or there


def _over_all(parts: Sequence[Part], step_s: float, at_once: float) -> float:
    """Rows a second where each step takes so long; where it takes no time, what is given."""
    rows = sum(part.presence * part.figures["rows"] / max(1.0, part.figures["batches"]) for part in parts)
    return rows / step_s if step_s else at_once


def saving_share(parts: Sequence[Part]) -> float:
    """Share of the time since the first batch that went to `raylance.report`, over all ranks, in [0, 1]."""
    saving_s = sum(part.figures["save_s"] for part in parts)
    return saving_s / max(1e-9, saving_s + sum(part.steady_s for part in parts))
