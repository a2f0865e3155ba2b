"""The assembly of work items to the rows of a step, and the comparison of the rows with the plan."""

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from raylance.batches.bad_rows import rows_with_bad_values
from raylance.columns import COMPONENT, ROW_OFFSET, VALID, dataset_names, describe_rows, join_offsets, split_offsets
from raylance.decode.arrays import Join, Lists, NumpyBatch, to_numpy, to_sliceable
from raylance.errors import CoverageError
from raylance.memory.arrow import TableSize
from raylance.memory.lending import FadingLender
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.digest import Digest
from raylance.planning.plan import WorkItem
from raylance.planning.planned_rows import PlannedRows
from raylance.planning.step_costs import RowCosts, StepCosts, cut_step, row_costs
from raylance.planning.step_size import CostLimit

if TYPE_CHECKING:
    from raylance.opened import ReadSpec  # loads Lance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredStep:
    """A step of one rank, from position `before` to `after` of an epoch.

    Attributes:
        rows: Rows of this rank, padding included.
        nbytes: Bytes of the rows; if several steps came in one item, their mean.
        masked: Offsets of the rows that could not be decoded, joined as by `join_offsets`, int64.
        costs: The costs of the step, by name; None if rows have none.
        total_cost: The cost of the step over all ranks; None if rows have none, or if each step has a number of rows,
            and each rank about the same part of it.
    """

    epoch: int
    before: int
    after: int
    is_last: bool
    rows: int
    nbytes: int
    masked: Int64Array
    digest: Digest
    costs: Mapping[str, StepCosts] | None = None
    total_cost: int | Mapping[str, int] | None = None


class ItemRows:
    """Rows of one or more steps that came together. Their columns are converted to arrays once for all steps."""

    def __init__(self, table: pa.Table, complete: Callable[[pa.Table], pa.Table] | None = None) -> None:
        """Takes the rows, and what completes them when they are first used, if they lack columns."""
        self._table, self._complete = table, complete
        self.count: int = table.num_rows
        self._sliceable: NumpyBatch | None = None

    @functools.cached_property
    def table(self) -> pa.Table:
        """The rows with all columns."""
        return self._table if self._complete is None else self._complete(self._table)

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the columns; kept, as the schema is, because pyarrow makes a new object each time."""
        return list(self.table.column_names)

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """Schema of the table."""
        return self.table.schema

    def sliceable(self, names: Sequence[str], lists: Lists, as_bits: bool = False) -> NumpyBatch:
        """See `to_sliceable`. All calls must have the same arguments."""
        if self._sliceable is None:
            self._sliceable = to_sliceable(self.table.select(names), lists, as_bits=as_bits)
        return self._sliceable


@dataclasses.dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step: rows [begin, begin + count) of those that came together."""

    item: ItemRows
    begin: int
    count: int

    @classmethod
    def of(cls, table: pa.Table) -> "StepRows":
        """Returns all rows of a table as those of one step."""
        return cls(ItemRows(table), 0, table.num_rows)

    def table(self, names: Sequence[str] | None = None) -> pa.Table:
        """Returns some columns of the rows, or all columns."""
        table = self.item.table if names is None else self.item.table.select(names)
        return table if self.count == self.item.count else table.slice(self.begin, self.count)

    def to_numpy(self, names: Sequence[str], lists: Lists, join: Join, *, as_bits: bool = False) -> NumpyBatch:
        """Converts some columns of the rows; see `raylance.decode.arrays.to_numpy`."""
        if self.count == self.item.count:
            return to_numpy(self.table(names), lists, join, as_bits=as_bits)
        sliceable, end = self.item.sliceable(names, lists, as_bits), self.begin + self.count
        batch: NumpyBatch = {}
        for name in names:
            array = sliceable.get(name)
            if array is None:
                batch |= to_numpy(self.table([name]), lists, join, as_bits=as_bits)
            else:
                batch[name] = array[self.begin : end]
        return batch


class Assembly:
    """Assembles the steps of one rank's pass from its items, also those of epochs that follow.

    Attributes:
        is_decoded: Whether helpers decode or transform the rows.
    """

    def __init__(self, read_spec: "ReadSpec", planned: PlannedRows, dp_rank: int, epoch: int, position: int) -> None:
        self._read_spec, self._planned, self._dp_rank, self._epoch = read_spec, planned, dp_rank, epoch
        self._plan = planned.plan
        self.is_decoded = read_spec.in_helpers is not None
        self._selection, self._completion = read_spec.source.load_selection(), read_spec.source.completion
        self._lender = FadingLender()
        self._after = position
        self._parts: list[StepRows] = []
        self._masked: list[Int64Array] = []
        self._digest, self._nbytes, self._size = Digest(), 0, TableSize()
        self._costs: RowCosts | None = None  # the costs of the last step that `next_step` returned
        self._steps: deque[tuple[StepRows, int, Int64Array, Digest]] = deque()

    def add(self, item: WorkItem, plain: pa.Table, decoded: pa.Table | None) -> None:
        """Adds the next item.

        Args:
            item: The planned rows.
            plain: The columns that helpers do not decode, and `_rowoffset`.
            decoded: The decoded or transformed columns and `_valid`; None if helpers do neither.

        Raises:
            CoverageError: If the rows are not the planned rows.
        """
        offsets = self._selection.offsets(self._planned.of_item(item))
        came = plain[ROW_OFFSET].to_numpy()
        if not np.array_equal(came, offsets):
            raise self._other_rows(item)
        real = self._plan.is_real(item)
        table, bad = self._merge(offsets, real, plain, decoded)
        has_bad = bool(bad.any())
        sizes, begin = self._plan.rows_by_step(item), 0
        nbytes, ends_step = self._size.of(table), self._plan.ends_step(item)
        if self._completion is not None:
            nbytes += self._completion.added_bytes * item.rows
        nbytes //= item.steps
        for part, digest in zip(self._cut(table, sizes), Digest.of_steps(came, real, sizes), strict=True):
            own, begin = slice(begin, begin + part.count), begin + part.count
            self._parts.append(part)
            self._masked.append(offsets[own][bad[own]] if has_bad else offsets[:0])
            self._digest += digest
            self._nbytes += nbytes
            if ends_step:
                [whole, *more] = self._parts
                if more:
                    whole = StepRows.of(pa.concat_tables(part.table() for part in self._parts))
                self._steps.append((whole, self._nbytes, np.concatenate(self._masked), self._digest))
                self._parts, self._masked, self._digest, self._nbytes = [], [], Digest(), 0

    def _cut(self, table: pa.Table, sizes: Sequence[int]) -> Iterator[StepRows]:
        """Yields the rows of steps of these sizes. Rows that lack columns are completed some steps at a time, because
        these columns are written, and read again, while they are in the processor's cache.
        """
        completion, complete, together_rows = self._completion, None, max(1, table.num_rows)
        if completion is not None:
            complete, together_rows = functools.partial(completion, lend=self._lender.lend), completion.rows
        bounds = itertools.pairwise([0, *itertools.accumulate(sizes)])
        for _, steps in itertools.groupby(bounds, lambda step: (step[1] - 1) // together_rows):
            group = list(steps)
            first, last = group[0][0], group[-1][1]
            together = ItemRows(table if last - first == table.num_rows else table.slice(first, last - first), complete)
            yield from (StepRows(together, begin - first, end - begin) for begin, end in group)

    def __bool__(self) -> bool:
        """Whether a whole step is ready."""
        return bool(self._steps)

    def next_step(self) -> tuple[StepRows, DeliveredStep]:
        """Takes the oldest whole step: its rows, and their description."""
        rows, nbytes, masked, digest = self._steps.popleft()
        plan = self._plan
        if plan.is_over(self._epoch, self._after):
            self._epoch, self._after = self._epoch + 1, 0
        before = self._after
        self._after = plan.after(self._epoch, before)
        self._costs = row_costs(plan, self._epoch, before) if plan.order.cost_names else None
        is_even = plan.budget is None and (plan.balance is None or plan.balance.equal_rows)
        return rows, DeliveredStep(
            epoch=self._epoch,
            before=before,
            after=self._after,
            is_last=plan.is_over(self._epoch, self._after),
            rows=rows.count,
            nbytes=nbytes,
            masked=masked,
            digest=digest,
            costs=self._costs and StepCosts.of(self._costs, self._dp_rank),
            total_cost=None if is_even or self._costs is None else self._costs.total,
        )

    @property
    def repeats(self) -> bool:
        """Whether a row may come more than once in an epoch."""
        return self._plan.order.repeats

    def positions(self, step: DeliveredStep) -> Int64Array:
        """Returns the epoch positions of the rows of a step."""
        own = self._plan.rank_slice(step.epoch, step.before, self._dp_rank)
        return self._plan.positions(step.epoch, step.before, *own)

    def cut(self, micro: CostLimit) -> tuple[list[int], int | Mapping[str, int]]:
        """Returns the bounds of the micro-batches of the last step that `next_step` returned, and the cost of the step;
        see `cut_step`.
        """
        if self._costs is None:
            raise RuntimeError("rows without costs have no micro-batches")  # the loader refuses them
        return cut_step(self._costs, self._dp_rank, micro)

    def offsets(self, table: pa.Table) -> Int64Array:
        """Returns the row offsets of the rows of a step, as `join_offsets` joins them."""
        return join_offsets(table[COMPONENT].to_numpy(), table[ROW_OFFSET].to_numpy())

    def describe(self, table: pa.Table) -> str:
        """Names the rows of a step in an error text."""
        names = dataset_names(self._read_spec.source.uri)
        return describe_rows(self.offsets(table), names) if len(table) else f"no row of {', '.join(names)}"

    def _merge(
        self, offsets: Int64Array, real: BoolArray, plain: pa.Table, decoded: pa.Table | None
    ) -> tuple[pa.Table, BoolArray]:
        """Returns the columns in the order of delivery, and which rows, or values in them, could not be decoded, bool
        (n,).
        """
        carries = self._read_spec.carries
        if self._completion is not None:
            names = [*plain.column_names, *(decoded.column_names if decoded is not None else ())]
            carries = [name for name in names if name not in (ROW_OFFSET, VALID)]
        if decoded is None:
            columns = plain.select(carries).columns
        else:
            found = {name: part[name] for part in (plain, decoded) for name in part.column_names}
            columns = [found[name] for name in carries]
        good = np.ones(len(offsets), dtype=np.bool_)
        for part in (plain, decoded):
            if part is not None and VALID in part.column_names:
                good &= part[VALID].to_numpy()
        components, own = split_offsets(offsets)
        valid = good & real if self._plan.remainder == "pad" else good
        added = {COMPONENT: components, ROW_OFFSET: own, VALID: valid}
        merged = pa.Table.from_arrays([*columns, *map(pa.array, added.values())], names=[*carries, *added])
        return merged, ~good | rows_with_bad_values(merged, self._read_spec.of_lists)

    def _other_rows(self, item: WorkItem) -> CoverageError:
        """Returns the error to raise if helpers delivered other rows than planned."""
        custom = sorted({type(part.settings).__name__ for part in self._plan.order.custom_parts()})
        fix = "This is a defect of raylance: please report it."
        if custom:
            fix = (
                f"The order {', '.join(custom)} most likely depends on more than settings, selection, seed, epoch and "
                "position, such as a generator or earlier calls: take random numbers from epoch.key(…). "
                "raylance.testing.check_order() finds such a dependence."
            )
        return CoverageError(
            f"the helpers delivered other rows than planned at position {item.position} of epoch {item.epoch}, "
            f"data-parallel rank {item.dp_rank}. The epoch stops here, because rows would be lost or repeated. {fix}"
        )
