"""Owns the one place where items become the table of a step, compared with the plan; never waits, never converts."""

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import pyarrow as pa

from raylance.columns import COMPONENT, COMPONENT_SHIFT, OFFSET_MASK, ROW_OFFSET, VALID
from raylance.errors import CoverageError
from raylance.planning.coverage import Coverage
from raylance.planning.plan import Plan, WorkItem
from raylance.settings import Feed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is told of a rank's step: the position behind it, and at the end of an epoch, what the pass has proved."""

    after: int
    rows: int
    nbytes: int
    masked_rows: int
    certificate: dict[str, Any] | None


class Assembly:
    """Puts the items of one rank's pass together, step by step."""

    def __init__(self, feed: Feed, plan: Plan, rank: int, epoch: int, position: int) -> None:
        self._feed, self._plan, self._rank, self._epoch, self._begin = feed, plan, rank, epoch, position
        self._selection = feed.source.load_selection()
        self._after = position
        self._coverage = Coverage()
        self._parts: list[pa.Table] = []
        self._masked = 0
        self._steps: deque[tuple[pa.Table, int]] = deque()

    def add(self, item: WorkItem, plain: pa.Table, decoded: pa.Table | None) -> None:
        """Takes the next item, whose rows must be those of the plan."""
        table, valid = self._merge(item, plain, decoded)
        rows = item.high - item.low
        low, high = self._plan.rank_slice(item.position, self._rank)
        for step in range(item.steps):
            self._parts.append(table if item.steps == 1 else table.slice(step * rows, rows))
            self._masked += int(rows - np.count_nonzero(valid[step * rows : (step + 1) * rows]))
            if item.high == high - low:
                whole = self._parts[0] if len(self._parts) == 1 else pa.concat_tables(self._parts)
                self._steps.append((whole, self._masked))
                self._parts, self._masked = [], 0

    def __bool__(self) -> bool:
        """Whether a step is whole."""
        return bool(self._steps)

    def next_step(self) -> tuple[pa.Table, Step]:
        """Takes the oldest step that is whole: its rows, and what is told of them."""
        table, masked_rows = self._steps.popleft()
        self._after = self._plan.after(self._after)
        certificate = None
        if self._plan.steps(self._after) <= 0:
            certificate = {
                "verdict": "every planned row exactly once",
                "epoch": self._epoch,
                "rank": self._rank,
                "world_size": self._plan.world_size,
                "positions": [self._begin, self._after],
                **dataclasses.asdict(self._coverage),
            }
        return table, Step(
            after=self._after,
            rows=table.num_rows,
            nbytes=table.nbytes,
            masked_rows=masked_rows,
            certificate=certificate,
        )

    def _merge(self, item: WorkItem, plain: pa.Table, decoded: pa.Table | None) -> tuple[pa.Table, Any]:
        """Joins the columns in the feed's order, and says which rows are real and which were decoded."""
        positions = self._plan.item_positions(item)
        wanted = self._selection.offsets(self._plan.select(item.epoch, positions))
        if not np.array_equal(plain[ROW_OFFSET].to_numpy(), wanted):
            raise CoverageError(
                f"the helpers delivered other rows than planned at position {item.position} of epoch {item.epoch}, "
                f"rank {item.rank}. The epoch stops here: going on would lose or repeat rows. "
                "This is raylance's fault: please report it."
            )
        real = positions < self._plan.epoch_rows
        self._coverage.add(wanted[real])
        parts = [plain] if decoded is None else [plain, decoded]
        columns = {name: part[name] for part in parts for name in part.column_names}
        done = columns[VALID].to_numpy() if VALID in columns else np.ones(item.rows, dtype=np.bool_)
        columns[COMPONENT] = pa.chunked_array([wanted >> COMPONENT_SHIFT])
        columns[ROW_OFFSET] = pa.chunked_array([wanted & OFFSET_MASK])
        columns[VALID] = pa.chunked_array([done & real if self._plan.remainder == "pad" else done])
        names = (*self._feed.delivers, COMPONENT, ROW_OFFSET, VALID)
        return pa.table({name: columns[name] for name in names}), done
