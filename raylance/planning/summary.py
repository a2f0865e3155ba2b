"""Owns an epoch in numbers, as a notebook prints it; never plans one."""

import dataclasses
import html
import sys
from typing import Any

import numpy as np

from raylance.errors import ConfigError
from raylance.planning.plan import Plan, portion_rows
from raylance.planning.quality import Labels, ShuffleQuality, compare_windows, shuffle_quality

_RANKS = 16  # that a legend names


def summarise(
    plan: Plan, row_bytes: float, reads: str, max_window_bytes: int = sys.maxsize, measure: str = "as given"
) -> "PlanSummary":
    """What an epoch of a plan is, in numbers; its arguments are as `PlanSummary` has them."""
    chunk, last = plan.chunk_at(0, 0), plan.world_size - 1  # no rank has more rows than the last one
    rows = plan.chunk_size(chunk, last) if chunk is not None else 0
    window_bytes = int(portion_rows(rows, row_bytes, max_window_bytes) * row_bytes)
    tail = plan.epoch_rows % plan.global_batch_size
    return PlanSummary(
        plan=plan,
        steps=plan.steps(),
        rows_dropped=tail if plan.remainder == "drop" else 0,
        rows_repeated=plan.global_batch_size - tail if plan.remainder == "pad" and tail else 0,
        shards=plan.order.shard_count,
        reads=reads,
        window_bytes=window_bytes,
        held_bytes=min(2 * window_bytes, max_window_bytes),
        row_bytes=row_bytes,
        measure=measure,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """An epoch in numbers.

    Attributes:
        plan: The plan itself.
        steps: Steps of every rank.
        rows_dropped: Rows that no rank gets in an epoch.
        rows_repeated: Rows of padding, which come twice.
        shards: Shards of the selection.
        reads: How rows are read, "range" or "take", and why.
        window_bytes: Bytes of raw rows that one rank reads together, about.
        held_bytes: Bytes of raw rows that one rank holds, what it uses and what it reads ahead, about; never more than
            `max_window_bytes`, and a sixteenth of it for what is just being read.
        row_bytes: Bytes of a row as it is read, about, from which both follow.
        measure: How that is known.
    """

    plan: Plan
    steps: int
    rows_dropped: int
    rows_repeated: int
    shards: int
    reads: str
    window_bytes: int
    held_bytes: int
    row_bytes: float
    measure: str

    def shuffle_quality(self, labels: Labels = None, epochs: int = 1, sample_steps: int = 256) -> ShuffleQuality:
        """Measures how far the order is from a row shuffle; see `raylance.planning.quality.shuffle_quality`."""
        return shuffle_quality(self.plan, labels, epochs, sample_steps)

    def compare_windows(self, labels: Labels = None) -> dict[int, dict[int, float]]:
        """Measures what other windows and lanes would give; see `raylance.planning.quality.compare_windows`."""
        return compare_windows(self.plan, labels)

    def plot(self, epoch: int = 0, steps: int = 64, axes: Any = None) -> Any:
        """Plots which rows the first steps take, by rank: straight lines are reading in order, a cloud is a shuffle.

        Args:
            epoch: The epoch.
            steps: How many at the most.
            axes: Of matplotlib, to plot into; None makes them.

        Returns:
            The axes.

        Raises:
            ConfigError: If there is no matplotlib.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ConfigError(f"plot() needs matplotlib ({error}): pip install matplotlib") from error
        plan = self.plan
        axes = plt.subplots(figsize=(7, 4.5), layout="constrained")[1] if axes is None else axes
        starts = range(0, min(steps, self.steps) * plan.global_batch_size, plan.global_batch_size)
        for rank in range(plan.world_size):
            taken = [plan.positions(at, *plan.rank_slice(at, rank)) for at in starts]
            positions = np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)
            label = f"rank {rank}" if plan.world_size > 1 else None
            axes.plot(positions / plan.global_batch_size, plan.select(epoch, positions), ".", markersize=2, label=label)
        axes.set(
            xlabel="step",
            ylabel="row of the selection, as stored",
            title=f"Rows of the first steps, order {plan.order.name}",
        )
        if 1 < plan.world_size <= _RANKS:
            axes.legend(loc="upper right", markerscale=4)
        return axes

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def __repr__(self) -> str:
        plan, order, settings = self.plan, self.plan.order, self.plan.order.settings
        fields = ", ".join(f"{key}={value}" for key, value in settings.params().items() if key != "name")
        return "\n".join(
            [
                f"{plan.rows:,} rows in {self.shards:,} shards of {settings.shard_rows}, order {order.name} ({fields})",
                f"{order.lane_count} lanes, {plan.world_size} ranks, global batch {plan.global_batch_size:,}",
                f"{self.steps:,} steps an epoch on every rank; {self.rows_dropped:,} rows dropped, "
                f"{self.rows_repeated:,} repeated (remainder={plan.remainder!r})",
                f"{self.window_bytes / 2**20:,.1f} MiB a window and rank, {self.held_bytes / 2**20:,.1f} MiB held "
                f"({self.row_bytes:,.0f} bytes a row, {self.measure}); read by {self.reads}",
            ]
        )
