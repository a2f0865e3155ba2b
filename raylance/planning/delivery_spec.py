"""The description of the rows that a loader delivers and of their order, from which it makes the plan."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raylance.errors import ConfigError
from raylance.orders.order import COST, WINDOW_BYTES, Facts, Order, Resolved, Tables, costs_in_words, join_tables
from raylance.planning.balance import Balance
from raylance.planning.plan import Plan
from raylance.planning.step_size import CostLimit, Remainder, Size

logger = logging.getLogger(__name__)

_SAMPLED = 1 << 16  # rows whose costs give the number of lanes
_LINES = 4  # least rows of each lane in a step, if the number of lanes is "auto"
_CHUNK_BYTES = 32 << 20  # bytes of a chunk of one rank, if the order has no windows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySpec:
    """The rows to deliver and their order, which must agree with a checkpoint; and how last and bad rows are treated.

    Attributes:
        uri: Path or URI of the dataset; in a mixture, a dict by component.
        rows: Number of selected rows.
        row_bytes: Bytes of a raw row, as measured when the dataset was opened.
        fingerprint: Hash of the selection's row offsets.
        order: The order, whose fields may be "auto"; `tables` holds its look-ups in the selection.
        costs: The table of the rows' costs; empty if they have none, and in a mixture, because each component has its
            own.
        balance: How the rows of a step are divided among the ranks by their costs; None for their order alone.
        empty_batches: Whether data-parallel ranks may get empty batches in each step.
        masks_bad_rows: Whether rows that cannot be decoded come as zeros with `_valid` False.
        window_bytes: Determines the sizes that the order leaves to "auto"; None for the run's value, or the default.
        run_rows: See `Facts`.
        on_new_version: What becomes of the rest of an epoch if rows or order have changed since a checkpoint: see
            `raylance.runs.Newest`.
    """

    uri: Any
    rows: int
    row_bytes: float
    fingerprint: str
    order: Order
    tables: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)
    costs: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)
    balance: Balance | None = None
    seed: int
    remainder: Remainder
    empty_batches: bool
    masks_bad_rows: bool
    window_bytes: int | None = None
    run_rows: int = 1
    on_new_version: str = "refuse"

    @property
    def facts(self) -> Facts:
        """The facts that resolve the order, without those that only "auto" sizes need."""
        return Facts(rows=self.rows, seed=self.seed, tables=join_tables(self.tables, self.costs))

    @property
    def resolved_order(self) -> Resolved:
        """The order of this selection, for uses that do not depend on sizes that are still "auto"."""
        return self.order.resolve(self.facts)


def make_plan(
    spec: DeliverySpec,
    *,
    size: Size,
    dp_size: int,
    reader_bytes: int,
    remainder: Remainder | None = None,
) -> Plan:
    """Makes the plan of all epochs.

    Sizes that the order leaves to "auto" follow from the dataset and the global batch alone, never from the world size
    or a limit of one rank, so that all ranks have the same order. Chunks that do not fit `reader_bytes` of a rank
    are read in parts. If `remainder` is None, that of `spec` is used.

    Raises:
        ConfigError: If there would be no step; or if some ranks would have no row in a step, and `spec` does not allow
            it; or if batches have a cost, and rows have none.
    """
    remainder = remainder or spec.remainder
    budget = size if isinstance(size, CostLimit) else None
    if isinstance(size, CostLimit):
        rows, lanes = _check_budget(spec, size, dp_size)
    else:
        rows = lanes = _check_rows(spec, size, dp_size)
    row_bytes = max(spec.row_bytes, 1)
    order = spec.order.resolve(
        dataclasses.replace(
            spec.facts,
            row_bytes=spec.row_bytes,
            run_rows=spec.run_rows,
            global_batch_size=lanes,
            global_batch_cost={} if budget is None else budget.most,
            window_bytes=spec.window_bytes or WINDOW_BYTES,
        )
    )
    chunk_positions = order.read_positions
    if chunk_positions is None:
        chunk_positions = max(1, int(_CHUNK_BYTES / row_bytes)) * dp_size
    # Two chunks are held at a time. A chunk that does not fit is read in parts, in the same order.
    fitting = max(order.lane_count, int(reader_bytes / 2 * dp_size / row_bytes))
    if chunk_positions > fitting:
        if order.needs_whole_windows:
            window_bytes = int(chunk_positions / dp_size * spec.row_bytes)
            _warn_of_parts(str(spec.uri), str(order.settings), window_bytes, reader_bytes)
        chunk_positions = -(-chunk_positions // -(-chunk_positions // fitting))
    return Plan(
        order=order,
        global_batch_size=rows,
        budget=budget,
        balance=spec.balance,
        dp_size=dp_size,
        remainder=remainder,
        chunk_positions=chunk_positions,
    )


def _check_rows(spec: DeliverySpec, global_batch_size: int, dp_size: int) -> int:
    """Returns the number of rows of a step. Raises ConfigError if some ranks would get none."""
    if global_batch_size < dp_size and not spec.empty_batches:
        raise ConfigError(
            f"a global batch of {global_batch_size} rows on {dp_size} data-parallel ranks: some would have no row in "
            f"any step, and their loss no value. Use global_batch_size={dp_size} or more, or fewer data-parallel "
            'ranks. If your loop adds up sums and counts, open the dataset with remainder="ragged_or_empty".'
        )
    return global_batch_size


def _check_budget(spec: DeliverySpec, budget: CostLimit, dp_size: int) -> tuple[int, int]:
    """Returns the mean number of rows of a step, from a sample; and the number of lanes that is best, a power of two:
    few enough that a step of the costliest rows takes some rows of each lane.

    Raises:
        ConfigError: If rows have no costs, or some ranks would get no row of a step of the costliest rows.
    """
    order = spec.resolved_order
    check_costs(order.cost_names, budget)
    if order.buckets_by is not None and order.buckets_by not in budget.most:
        raise ConfigError(
            f"Budget({budget.cost}): the order brings rows of similar {order.buckets_by} together, and no limit says "
            f"how many; nothing was started. Limit {order.buckets_by}, too, or give Buckets(by=…) one of the costs "
            "that the budget limits."
        )
    sample = np.linspace(0, spec.rows - 1, min(spec.rows, _SAMPLED)).astype(np.int64)
    costs, limits = order.costs(sample).astype(np.int64), budget.of(order.cost_names)
    highest = costs.max(axis=0)
    fewest = limits.rows_of(highest)
    if fewest < dp_size and not spec.empty_batches:
        most = dict(zip(order.cost_names, highest.tolist(), strict=True))
        enough: Any = {name: dp_size * most[name] for name in budget.most}
        raise ConfigError(
            f"Budget({budget.cost}, max_rows={budget.max_rows}) on {dp_size} data-parallel ranks: a step of rows that "
            f"cost {costs_in_words(most)} has {fewest}, so some ranks would have none, and their loss no value. Use "
            f"Budget({enough if isinstance(budget.cost, Mapping) else enough[COST]}) or more, or fewer ranks; or, if "
            'your loop adds up sums and counts, open the dataset with remainder="ragged_or_empty".'
        )
    rows = max(1, int((limits.most / np.maximum(1, costs.mean(axis=0))).min()))
    return min(rows, budget.max_rows or rows), 1 << max(0, min(5, (fewest // _LINES).bit_length() - 1))


def check_costs(names: Sequence[str], budget: CostLimit, argument: str = "") -> None:
    """Raises ConfigError if a budget limits a cost that rows do not have; `argument` is its place in a `Budget`."""
    call = f"Budget({argument}{budget.cost})"
    if not names:
        raise ConfigError(
            f"{call}: the rows have no costs; nothing was started. Give cost= to "
            'raylance.dataset, such as cost="length" or cost=raylance.TokensOf("input_ids"); in a mixture, the same '
            "costs to all datasets. Or give global_batch_size=, as for packs, whose samples have one length and need "
            "no cost=."
        )
    if set(budget.most) <= set(names):
        return
    if isinstance(budget.cost, Mapping):
        found = f"the costs of the rows are {', '.join(names)}" if names != (COST,) else "the rows have one cost"
    else:
        found = f"the costs of the rows have names: {', '.join(names)}"
    fix = "a number" if names == (COST,) else "a dict of some of these names"
    raise ConfigError(f"{call}: {found}; nothing was started. Give {fix}.")


@functools.cache
def _warn_of_parts(uri: str, order: str, window_bytes: int, reader_bytes: int) -> None:
    """Warns that windows are read in parts; only once per process, although each loader makes a plan."""
    logger.warning(
        "%s: a window of %s has %s MiB of raw rows on each rank, and reader_bytes=%d has room for two of %s MiB. "
        "Each window is read in parts, whose rows lie scattered over it: the same batches, more slowly. Raise "
        "reader_bytes, or start the run with a smaller window_bytes= of raylance.dataset, or smaller sizes of the "
        "order.",
        uri,
        order,
        f"{window_bytes / 2**20:,.1f}",
        reader_bytes,
        f"{reader_bytes / 2**21:,.1f}",
    )
