"""The rows of a plan's chunks and items, kept for as long as they are likely to be asked for again."""

from raylance.orders.permutation import Int64Array
from raylance.planning.plan import Chunk, Plan, WorkItem

_KEPT_CHUNKS, _KEPT_ROWS = 4, 1 << 18  # rows are kept for the last four chunks, and for more up to this number of rows
_FEW_ROWS = 1 << 13  # the first item of a chunk of up to this number of rows computes all of them: 2 ms instead of 1 ms


class PlannedRows:
    """Computes which selected rows chunks and items have. Several threads may use one object."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._kept: dict[tuple[Chunk, int], Int64Array] = {}  # by chunk and data-parallel rank

    def of_chunk(self, chunk: Chunk, dp_rank: int) -> Int64Array:
        """Returns the selected rows of a rank's chunk in the order of delivery: int64, read-only."""
        rows = self._kept.get((chunk, dp_rank))
        if rows is None:
            rows = self.plan.chunk_rows(chunk, dp_rank)
            rows.flags.writeable = False
            self._keep(chunk, dp_rank, rows)
        return rows

    def of_item(self, item: WorkItem) -> Int64Array:
        """Returns an item's selected rows in the order of delivery: a part of its chunk's, if these are kept or few."""
        plan, rows = self.plan, self._kept.get((item.chunk, item.dp_rank))
        if rows is None and plan.chunk_size(item.chunk, item.dp_rank) <= _FEW_ROWS:
            rows = self.of_chunk(item.chunk, item.dp_rank)
        if rows is None:
            return plan.item_rows(item)
        first = plan.item_line(item) - plan.first_line(item.chunk, item.dp_rank)
        return rows[first : first + item.rows]

    def _keep(self, chunk: Chunk, dp_rank: int, rows: Int64Array) -> None:
        """Keeps the rows of a chunk, and drops the oldest kept rows if there are too many."""
        if len(rows) > _KEPT_ROWS:
            return
        self._kept[chunk, dp_rank] = rows
        sizes = [(key, len(kept)) for key, kept in list(self._kept.items())]
        over = sum(size for _, size in sizes) - _KEPT_ROWS
        for key, size in sizes[:-_KEPT_CHUNKS]:
            if over > 0:
                self._kept.pop(key, None)
                over -= size
