"""Owns an epoch in numbers, as a notebook prints it; never plans one."""

import dataclasses

from raylance.plan import Plan
from raylance.quality import Labels, ShuffleQuality, shuffle_quality


def summarise(plan: Plan, row_bytes: float, reads: str) -> "PlanSummary":
    """What an epoch of a plan is, in numbers.

    Args:
        plan: The plan.
        row_bytes: Bytes of a row as it is read, about.
        reads: How its first rows are read.
    """
    tail = plan.epoch_rows % plan.global_batch_size
    return PlanSummary(
        plan=plan,
        steps=plan.steps(),
        rows_dropped=tail if plan.remainder == "drop" else 0,
        rows_repeated=plan.global_batch_size - tail if plan.remainder == "pad" and tail else 0,
        shards=len(plan.order.completed_shards(0, plan.rows, plan.seed, 0)),
        reads=reads,
        window_bytes=int(plan.chunk_positions / plan.world_size * row_bytes),
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
        window_bytes: Bytes of raw rows that one rank reads together; it holds up to twice that.
    """

    plan: Plan
    steps: int
    rows_dropped: int
    rows_repeated: int
    shards: int
    reads: str
    window_bytes: int

    def shuffle_quality(self, labels: Labels = None, epochs: int = 1, sample_steps: int = 256) -> ShuffleQuality:
        """Measures how far the order is from a row shuffle; see `raylance.quality.shuffle_quality`."""
        return shuffle_quality(self.plan, labels, epochs, sample_steps)

    def __repr__(self) -> str:
        plan, order = self.plan, self.plan.order
        fields = ", ".join(f"{key}={value}" for key, value in order.params().items() if key != "name")
        return "\n".join(
            [
                f"{plan.rows:,} rows in {self.shards:,} shards of {order.shard_rows}, order {order.name} ({fields})",
                f"{order.lane_count} lanes, {plan.world_size} ranks, global batch {plan.global_batch_size:,}",
                f"{self.steps:,} steps an epoch on every rank; {self.rows_dropped:,} rows dropped, "
                f"{self.rows_repeated:,} repeated (remainder={plan.remainder!r})",
                f"{self.window_bytes / 2**20:,.1f} MiB a window and rank, two of them held; read by {self.reads}",
            ]
        )
