"""Owns an epoch in numbers, as a notebook prints it; never plans one."""

import dataclasses
import html
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from raylance.errors import ConfigError
from raylance.orders.mixture import MixOrder
from raylance.planning.plan import Plan, portion_rows
from raylance.planning.quality import Labels, ShuffleQuality, compare_windows, order_in_words, shuffle_quality

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
        sources=_sources(plan, plan.epoch_rows - (tail if plan.remainder == "drop" else 0)),
        rows_dropped=tail if plan.remainder == "drop" else 0,
        rows_repeated=plan.global_batch_size - tail if plan.remainder == "pad" and tail else 0,
        shards=plan.order.shard_count,
        reads=reads,
        window_bytes=window_bytes,
        held_bytes=min(2 * window_bytes, max_window_bytes),
        row_bytes=row_bytes,
        measure=measure,
    )


def _sources(plan: Plan, end: int) -> "dict[str, SourceRows]":
    """What an epoch up to a position has of each dataset of a mixture."""
    order = plan.order.settings
    if not isinstance(order, MixOrder):
        return {}
    found, standings = {}, order.standings(end)
    for part in order.components:
        delivered = standings[part.name]["rows"]
        used = min(delivered, part.rows)  # a component comes whole before a row of it comes again
        is_drawn = part.order.repeats
        found[part.name] = SourceRows(
            share=part.quota / sum(order.quotas),
            rows=part.rows,
            delivered=delivered,
            used=None if is_drawn else used,
            left_out=None if is_drawn else part.rows - used,
            repeated=None if is_drawn else delivered - used,
        )
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """What an epoch of a mixture has of one dataset.

    Attributes:
        share: Its share of the positions: what its weight came to.
        rows: Rows of its selection.
        delivered: Rows of it in an epoch, those that come again included.
        used: Different rows of it; None where its order draws, which may repeat any. The next ones, too.
        left_out: Rows of it that do not come.
        repeated: Rows that come again.
    """

    share: float
    rows: int
    delivered: int
    used: int | None
    left_out: int | None
    repeated: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """An epoch in numbers.

    Attributes:
        plan: The plan itself.
        steps: Steps of every rank.
        sources: Of a mixture, what an epoch has of each dataset, by name.
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
    sources: Mapping[str, SourceRows]
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
        plan, lanes = self.plan, self.plan.order.lane_count
        dealt = f"{lanes:,} lanes, " if lanes > 1 else ""
        return "\n".join(
            [
                f"{self._rows_in_words()}, order {order_in_words(plan.order)}",
                *self._table(),
                f"{dealt}{_counted(plan.world_size, 'rank')}, global batch {plan.global_batch_size:,}",
                f"{_counted(self.steps, 'step')} an epoch on every rank; {self.rows_dropped:,} rows dropped, "
                f"{self.rows_repeated:,} repeated (remainder={plan.remainder!r})",
                f"{self.window_bytes / 2**20:,.1f} MiB a window and rank, {self.held_bytes / 2**20:,.1f} MiB held "
                f"({self.row_bytes:,.0f} bytes a row, {self.measure}); read by {self.reads}",
            ]
        )

    def _rows_in_words(self) -> str:
        plan, settings = self.plan, self.plan.order.settings
        if self.sources:
            return f"{plan.epoch_rows:,} rows an epoch, of {plan.rows:,} in {_counted(len(self.sources), 'dataset')}"
        if settings.repeats:  # it has no shards
            return f"{plan.epoch_rows:,} rows an epoch, drawn from {plan.rows:,}"
        return f"{plan.rows:,} rows in {_counted(self.shards, 'shard')} of {settings.shard_rows}"

    def _table(self) -> list[str]:
        """A line for each dataset of a mixture, below one of headings."""
        if not self.sources:
            return []
        lines = [("dataset", "share", "rows", "used", "left out", "repeated")]
        for name, source in self.sources.items():
            drawn = (f"drawn {source.delivered:,} times", "", "")
            numbers = [
                f"{number:,}" for number in (source.used, source.left_out, source.repeated) if number is not None
            ]
            lines.append((name, f"{100 * source.share:.4g}%", f"{source.rows:,}", *(numbers or drawn)))
        name_width, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        return [
            "".join(
                [f"  {name:{name_width}}", *(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))]
            ).rstrip()
            for name, *cells in lines
        ]


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
