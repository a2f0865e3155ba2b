"""The summary of an epoch that a notebook prints."""

import dataclasses
import html
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from raylance.errors import ConfigError
from raylance.orders.mixture import MixOrder, mean_costs
from raylance.orders.order import COST
from raylance.planning.plan import Plan, fitting_rows
from raylance.planning.quality import Labels, ShuffleQuality, compare_windows, order_in_words, shuffle_quality
from raylance.planning.step_costs import CostFigures, cost_figures

_RANKS = 16  # most ranks that a legend names


def summarise(
    plan: Plan, row_bytes: float, reads: str, reader_bytes: int = sys.maxsize, measure: str = "as given"
) -> "PlanSummary":
    """Summarises an epoch of a plan. `PlanSummary` explains the arguments."""
    chunk, last = plan.chunk_at(0, 0), plan.dp_size - 1  # no rank has more rows than the last one
    rows = plan.chunk_size(chunk, last) if chunk is not None else 0
    window_bytes = int(fitting_rows(rows, row_bytes, reader_bytes) * row_bytes)
    steps = plan.steps(0)
    end = plan.after(0, 0, steps)
    repeated = max(0, steps * plan.global_batch_size - plan.rows_of(0)) if plan.remainder == "pad" else 0
    return PlanSummary(
        plan=plan,
        steps=steps,
        sources=_sources(plan, end),
        rows_dropped=plan.rows_of(0) - end,
        rows_repeated=repeated if plan.budget is None else 0,
        shards=plan.order.shard_count,
        reads=reads,
        window_bytes=window_bytes,
        held_bytes=min(2 * window_bytes, reader_bytes),
        row_bytes=row_bytes,
        measure=measure,
        costs=cost_figures(plan),
    )


def _sources(plan: Plan, end: int) -> "dict[str, SourceRows]":
    """Returns the rows of each dataset of a mixture in an epoch, up to a position; no rows if it is not a mixture."""
    order = plan.order.settings
    if not isinstance(order, MixOrder):
        return {}
    found, standings = {}, order.standings(0, end)
    costs, names = mean_costs(plan.order), plan.order.cost_names
    totals = sum(mean * standings[part.name]["rows"] for mean, part in zip(costs, order.components, strict=False))
    for number, part in enumerate(order.components):
        delivered = standings[part.name]["rows"]
        used = min(delivered, part.rows)  # all rows of a component come before one comes again
        is_drawn = part.order.repeats
        shares = dict(
            zip(names, (costs[number] * delivered / np.maximum(totals, 1e-9)).tolist() if costs else (), strict=True)
        )
        found[part.name] = SourceRows(
            share=part.quota / sum(order.quotas),
            cost_share=shares.get(COST, shares) or None,
            rows=part.rows,
            delivered=delivered,
            used=None if is_drawn else used,
            left_out=None if is_drawn else part.rows - used,
            repeated=None if is_drawn else delivered - used,
        )
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """The rows of one dataset in an epoch of a mixture. The last three are None if the dataset's order draws rows."""

    share: float  # the share of the positions, which follows from its weight
    # About the share of what the delivered rows cost; of several costs, a dict by name; None if rows have no costs
    cost_share: float | Mapping[str, float] | None
    rows: int  # selected
    delivered: int  # with repeats
    used: int | None  # different rows that are delivered
    left_out: int | None  # selected rows that are not delivered
    repeated: int | None  # delivered rows that are repeats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """The figures of one epoch, which the handle's method `plan` returns. A notebook shows them as text.

    Attributes:
        plan: The plan.
        steps: Number of steps of every rank.
        sources: In a mixture, the rows of each dataset, by name; else empty.
        rows_dropped: With remainder="drop", the number of rows after the last whole step, which no rank gets; else 0.
        rows_repeated: With remainder="pad", the number of rows of padding, which come once more; else 0.
        shards: Number of shards of the selection; 0 if the order repeats rows.
        reads: How rows are read, in words: by "range" (stretches of stored rows) or by "take" (single rows, many in
            one read). Then, for rank 0's first chunk, the number and size of its reads, and which share of the stored
            rows from its first to its last it needs. This part is left out if the chunk has more than two million rows,
            or the dataset is a mixture or packed.
        window_bytes: Approximate bytes of raw rows that one rank reads together.
        held_bytes: Approximate bytes of raw rows that one rank holds: the rows in use and the rows that are read ahead,
            at most `reader_bytes`. Rows that are being read need more memory; see `Options.reader_bytes`.
        row_bytes: Approximate bytes of a row as it is read; `window_bytes` and `held_bytes` follow from it.
        measure: How `row_bytes` was measured.
        costs: What padding and what imbalance follow from the costs of the rows; of several costs, a dict by name; None
            if they have none.
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
    costs: CostFigures | Mapping[str, CostFigures] | None = None

    @property
    def empty_ranks(self) -> int:
        """Number of ranks that get no row in the last step of the epoch."""
        return self.plan.empty_ranks(0, self.plan.after(0, 0, self.steps - 1)) if self.steps else 0

    def shuffle_quality(self, labels: Labels = None, epochs: int = 1, sample_steps: int = 256) -> ShuffleQuality:
        """Measures how far the order is from a row shuffle; see `raylance.planning.quality.shuffle_quality`."""
        return shuffle_quality(self.plan, labels, epochs, sample_steps)

    def compare_windows(self, labels: Labels = None) -> dict[int, dict[int, float]]:
        """Measures how well the order would shuffle with other sizes of windows and other numbers of lanes; see
        `raylance.planning.quality.compare_windows`.
        """
        return compare_windows(self.plan, labels)

    def plot(self, epoch: int = 0, steps: int = 64, axes: Any = None) -> Any:
        """Plots the selected rows of the first steps, in one colour for each rank. Rows in storage order make lines; a
        shuffle makes a cloud.

        Args:
            epoch: The epoch.
            steps: Maximum number of steps to plot.
            axes: Axes of matplotlib to plot into; None creates new ones.

        Returns:
            The axes.

        Raises:
            ConfigError: If matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ConfigError(
                f"plot() needs matplotlib ({error}). Nothing was drawn. Install it: pip install matplotlib"
            ) from error
        plan = self.plan
        axes = plt.subplots(figsize=(7, 4.5), layout="constrained")[1] if axes is None else axes
        starts = list(plan.starts(epoch, 0, min(steps, self.steps)))
        for dp_rank in range(plan.dp_size):
            taken = [plan.positions(epoch, at, *plan.rank_slice(epoch, at, dp_rank)) for at in starts]
            positions = np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)
            label = f"rank {dp_rank}" if plan.dp_size > 1 else None
            axes.plot(positions / plan.global_batch_size, plan.select(epoch, positions), ".", markersize=2, label=label)
        axes.set(
            xlabel="step",
            ylabel="row of the selection, as stored",
            title=f"Rows of the first steps, order {plan.order.name}",
        )
        if 1 < plan.dp_size <= _RANKS:
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
                f"{dealt}{counted(plan.dp_size, 'rank')}, {plan.step_text.removeprefix('a ')}",
                f"{counted(self.steps, 'step')} an epoch on every rank; {self.rows_dropped:,} rows dropped, "
                f"{self.rows_repeated:,} repeated (remainder={plan.remainder!r})",
                *self._empty_in_words(),
                *self._costs_in_words(),
                f"{self.window_bytes / 2**20:,.1f} MiB a window and rank, {self.held_bytes / 2**20:,.1f} MiB held "
                f"({self.row_bytes:,.0f} bytes a row, {self.measure})",
                f"read by {self.reads}",
            ]
        )

    def _rows_in_words(self) -> str:
        plan, settings = self.plan, self.plan.order.settings
        if self.sources:
            return f"{plan.rows_of(0):,} rows an epoch, of {plan.rows:,} in {counted(len(self.sources), 'dataset')}"
        if settings.repeats:  # such an order has no shards
            return f"{plan.rows_of(0):,} rows an epoch, drawn from {plan.rows:,}"
        return f"{plan.rows:,} rows in {counted(self.shards, 'shard')} of {settings.shard_rows}"

    def _costs_in_words(self) -> list[str]:
        """Returns a line for each cost."""
        costs = self.costs if isinstance(self.costs, Mapping) else {COST: self.costs} if self.costs else {}
        return [figures.in_words(name, is_padded=self.plan.pads(name)) for name, figures in costs.items()]

    def _empty_in_words(self) -> list[str]:
        """Returns a line if ranks get no row in each step, or in the last one."""
        size, ranks = self.plan.global_batch_size, self.plan.dp_size
        if size < ranks:
            return [f"each step has {counted(size, 'row')}, none for the same {ranks - size} of {ranks} ranks"]
        if not (empty := self.empty_ranks):
            return []
        last = counted(self.plan.dp_size - empty, "row")
        return [f"the last step has {last}, none for {empty} of {ranks} ranks: add up sums and counts, not means"]

    def _table(self) -> list[str]:
        """Returns headings and a line for each dataset of a mixture; no line if it is not a mixture."""
        if not self.sources:
            return []
        heads = ("share of rows", *(f"share of {name}" for name in self.plan.order.cost_names))
        lines = [("dataset", *heads, "rows", "used", "left out", "repeated")]
        for name, source in self.sources.items():
            of_cost = source.cost_share
            shares = (source.share, *(of_cost.values() if isinstance(of_cost, Mapping) else [of_cost or 0.0]))[
                : len(heads)
            ]
            drawn = (f"drawn {source.delivered:,} times", "", "")
            numbers = [
                f"{number:,}" for number in (source.used, source.left_out, source.repeated) if number is not None
            ]
            percents = (f"{100 * share:.4g}%" for share in shares)
            lines.append((name, *percents, f"{source.rows:,}", *(numbers or drawn)))
        name_width, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        return [
            "".join(
                [f"  {name:{name_width}}", *(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))]
            ).rstrip()
            for name, *cells in lines
        ]


def counted(number: int, what: str) -> str:
    """Returns a number of things in words, with a plural s if needed."""
    return f"{number:,} {what}{'s' * (number != 1)}"
