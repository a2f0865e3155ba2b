"""Owns one rank's share of what is judged, and the rates that follow from it; never says what they mean."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from raylance.telemetry.stats import WAITS


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
        other datasets, left out. What is called rows/s anywhere is this.
        """
        return self.figures["rows"] / max(1e-9, self.steady_s)

    @property
    def train_rate(self) -> float:
        """Rows a second that this rank's trainer would take if it never waited."""
        return self.figures["rows"] / self.trained_s if self.trained_s else math.inf

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


def saving_share(parts: Sequence[Part]) -> float:
    """Share of the time since the first batch that went to `raylance.report`, over all ranks, in [0, 1]."""
    saving_s = sum(part.figures["save_s"] for part in parts)
    return saving_s / max(1e-9, saving_s + sum(part.steady_s for part in parts))
