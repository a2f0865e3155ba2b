"""Checks that a custom order keeps the promises that raylance relies on.

    raylance.testing.check_order(ShortFirst(column="length"), columns={"length": lengths})

A check raises an AssertionError that has the broken promise, the values, and the fix.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raylance.arguments import check_integer
from raylance.errors import ConfigError
from raylance.orders.order import (
    Column,
    Epoch,
    Facts,
    Order,
    Resolved,
    Tables,
    cost_names,
    cost_table,
    join_tables,
)
from raylance.orders.permutation import Int64Array, permute
from raylance.orders.registry import make_order
from raylance.planning.plan import Plan

_MANY_ROWS = 10**7
_LITTLE_MEMORY = 8 << 20
_READ = "import sys, pickle, numpy; o, at = pickle.loads(sys.stdin.buffer.read()); print(o.epoch(1).rows(at).tolist())"


@dataclasses.dataclass(frozen=True, slots=True)
class _Column:
    """A column in memory; see `raylance.orders.order.Column`."""

    data: npt.NDArray[Any]
    nulls: int = 0

    @property
    def kind(self) -> str:
        return self.data.dtype.name

    def values(self) -> npt.NDArray[Any]:
        return self.data

    def codes(self) -> tuple[Int64Array, list[Any]]:
        classes, codes = np.unique(self.data, return_inverse=True)
        return codes.astype(np.int64), classes.tolist()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """A selection in memory, whose columns an order can look up; see `raylance.orders.order.Rows`.

    Attributes:
        count: Number of rows, n.
        columns: Arrays by name. Only the first n values of each are used.
    """

    count: int
    columns: Mapping[str, npt.ArrayLike] = dataclasses.field(default_factory=dict)

    @property
    def costs(self) -> Mapping[str, str]:
        """The names of the columns of costs: "cost", or "cost.…" for several."""
        return {name: name for name in cost_names({each: np.empty(0) for each in self.columns})}

    @property
    def tables(self) -> Tables:
        """The tables of costs, if there are columns of them."""
        return {name: self.column(name).values().astype(np.int32) for name in map(cost_table, self.costs)}

    def column(self, name: str) -> Column:
        """Returns the column of this name."""
        return _Column(np.asarray(self.columns[name])[: self.count])

    def fragment_ends(self) -> Int64Array:
        """Returns the number of rows up to the end of each fragment. The fragments are invented, and differ in size."""
        ends = np.cumsum(np.arange(self.count) * 7 % 11 + 1, dtype=np.int64)
        return np.append(ends[ends < self.count], self.count)


def check_order(
    order: Order,
    *,
    rows: Sequence[int] = (1, 2, 13, 97, 360),
    columns: Mapping[str, npt.ArrayLike] | None = None,
    other_process: bool = True,
) -> None:
    """Checks the promises of an order, for several sizes of the selection, seeds, epochs and global batch sizes.

    - Its settings can be saved and loaded, and do not change once they are resolved.
    - An epoch has every row exactly once, unless the order `repeats` rows.
    - The row at a position depends only on settings, selection, seed and epoch, in this process and in another.
    - A step has the same rows for every number of ranks.
    - To compute some rows at the end of a long epoch takes little memory. This is not checked if `columns` is given.
    - A shard is reported as complete when all of its rows are consumed, and not before.

    Args:
        order: The order.
        rows: Sizes of the selections on which to check it.
        columns: Columns that the order may look up: arrays by name, with at least as many values as the largest of
            `rows`. "cost" stands for the costs of the rows; "cost.tokens" and so on, if they have several.
        other_process: Whether to check the order in another process, too, which takes a second or two.

    Raises:
        AssertionError: If a promise is broken; the message has the promise, the values, and the fix.
        ConfigError: If `order` is not an order, has no name or no `rows_of`; if `rows` or `columns` have another type.
    """
    make_order(order)
    if not (isinstance(rows, Iterable) and isinstance(columns, Mapping | None)):
        raise ConfigError(f"check_order(rows={rows!r}, columns={columns!r}): give a list of sizes, and a dict or None.")
    rows = [check_integer("check_order(): rows", each, 1) for each in rows]
    resolved = None
    for count in rows:
        selected = SampleRows(count=count, columns=columns or {})
        bound, tables = order.bind(selected)
        for seed, batch in ((0, 1), (3, 12), (2**70, 30)):
            all_tables = join_tables(tables, selected.tables)
            facts = Facts(rows=count, seed=seed, tables=all_tables, row_bytes=100.0, global_batch_size=batch)
            resolved = _check_settings(bound, facts)
            for number in (0, 1, 7):
                _check_epoch(resolved.epoch(number))
            _check_global_batches(resolved, batch)
    if not columns:
        _check_seeking(order, other_process)
    elif other_process and resolved is not None:
        _check_sending(resolved)


def _promise(order: Resolved | Order, kept: bool, promise: str, found: str, fix: str) -> None:
    if not kept:
        settings = order.settings if isinstance(order, Resolved) else order
        raise AssertionError(f"{settings!r}: {promise}; but {found}. {fix}")


def _check_settings(order: Order, facts: Facts) -> Resolved:
    """Checks that settings can be saved and loaded, and stay as they were resolved. Returns the resolved order."""
    promise, resolved = functools.partial(_promise, order), order.resolve(facts)
    params, before = resolved.params(), order.params()
    read = json.loads(json.dumps(params, default=repr))
    promise(
        read == params,
        "a checkpoint holds params(), which comes back from JSON as it was",
        f"{params} comes back as {read}",
        "Make its fields numbers, strings or lists, or leave them out by field(compare=False).",
    )
    promise(
        resolved.settings.is_resolved,
        'resolve() fills every "auto"',
        f"it leaves {[name for name, value in params.items() if value == 'auto']}",
        "Replace them in resolve() by what facts say.",
    )
    given = {name: value for name, value in before.items() if value != "auto" and not isinstance(value, dict)}
    now = {name: params.get(name) for name in given}
    promise(now == given, "resolve() keeps what was given", f"{given} is {now}", 'Replace what is "auto" alone.')
    other = dataclasses.replace(facts, row_bytes=9e5, global_batch_size=7, window_bytes=1 << 20)
    again = resolved.settings.resolve(other)
    promise(
        again == resolved,
        "a resolved order stays as it is for other row bytes and another global batch, as a resumed run may have",
        f"resolved again it is {again}, and was {resolved}",
        'Let only sizes that are "auto" depend on the facts, except for rows and seed.',
    )
    adopted = order.adopt(read)
    promise(
        adopted == resolved.settings,
        "adopt(params()) is the resolved order",
        f"it is {adopted}, and was {resolved.settings}",
        'Make every field that is resolved one that is "auto" before.',
    )
    sizes = {"epoch_rows": resolved.epoch_rows, "shard_rows": resolved.shard_rows, "lane_count": resolved.lane_count}
    sizes |= {} if resolved.read_positions is None else {"read_positions": resolved.read_positions}
    wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
    wrong |= {} if resolved.repeats or resolved.epoch_rows == facts.rows else {"epoch_rows": resolved.epoch_rows}
    promise(
        not wrong and resolved.rows == facts.rows and resolved.seed == facts.seed,
        "a resolved order has sizes of at least 1, int, and an epoch of all rows unless it repeats some",
        f"it has {wrong or (resolved.rows, resolved.seed)} over {facts.rows} rows",
        "Give them in resolve(); int() makes one of a NumPy integer.",
    )
    return resolved


def _check_epoch(epoch: Epoch) -> None:
    """Checks the rows of an epoch, for several ways to ask for them, and `completed_shards`."""
    order, every = epoch.order, np.arange(epoch.order.epoch_rows, dtype=np.int64)
    promise, wanted = functools.partial(_promise, order), every.copy()
    found = epoch.rows(wanted)
    what = f"epoch {epoch.number} of {order.rows} rows with seed {order.seed}"
    promise(
        isinstance(found, np.ndarray) and found.dtype == np.int64 and found.shape == every.shape,
        f"rows at {every.shape} positions are int64 of that shape",
        f"they are {getattr(found, 'dtype', type(found))} of shape {np.shape(found)}",
        "Compute them with NumPy from the positions, and convert them by astype(np.int64).",
    )
    promise(bool((wanted == every).all()), "positions are only read", "they were changed", "Copy them first.")
    outside = found[(found < 0) | (found >= order.rows)]
    promise(not len(outside), f"rows of {what} lie in it", f"{outside[:5]} do not", "Keep them in [0, n) for all n.")
    if not order.repeats:
        seen, times = np.unique(found, return_counts=True)
        missing = np.setdiff1d(every, seen)
        promise(
            not len(missing),
            "every row comes exactly once an epoch",
            f"in {what}, rows {missing[:5]} are missing and {seen[times > 1][:5]} come again",
            "Make it a bijection of [0, n) for every n, or set repeats = True.",
        )
    for number, asked in enumerate(_ways_to_ask(every)):
        again = order.epoch(epoch.number) if number % 2 else epoch
        rows = again.rows(asked)
        differ = np.flatnonzero(np.asarray(rows) != found[asked])
        promise(
            np.shape(rows) == asked.shape and not len(differ),
            "the row at a position depends on settings, selection, seed and epoch alone, not on what else is asked",
            f"in {what}, asked for {asked[:5]} (of {len(asked)}) it is {np.asarray(rows)[:5]}, and was "
            f"{found[asked][:5]}",
            "Keep no state and no generator; take what is random from epoch.key(…).",
        )
        order.epoch(epoch.number + 1).rows(asked)
    if not order.repeats:
        _check_shards(epoch, found)
    else:
        promise(not len(epoch.completed_shards(0)), "no shard is complete if rows repeat", "some are", "")


def _ways_to_ask(every: Int64Array) -> Iterator[Int64Array]:
    yield from (every, every[::-1], every[-1:], every[-3:], every[:0], np.repeat(every[::5], 2))
    shuffled = permute(every, len(every), 1)
    for size in (1, 7, 64):
        yield from (shuffled[low : low + size] for low in range(0, min(len(every), 4 * size), size))


def _check_shards(epoch: Epoch, rows: Int64Array) -> None:
    order = epoch.order
    shards = order.shards_of(rows)
    total = np.bincount(shards, minlength=order.shard_count)
    for position in sorted({0, 1, len(rows) // 3, len(rows) // 2, len(rows) - 1, len(rows)}):
        done, wanted = epoch.completed_shards(position), np.bincount(shards[:position], minlength=len(total)) == total
        _promise(
            order,
            np.array_equal(done, wanted) and done.dtype == np.bool_,
            "completed_shards() finds the shards all of whose rows are consumed",
            f"at position {position} it finds {np.flatnonzero(done)[:9]} of {len(done)}, and those are "
            f"{np.flatnonzero(wanted)[:9]} of {len(wanted)}",
            "Inherit it, or count the rows that are still to come.",
        )


def _check_global_batches(order: Resolved, batch: int) -> None:
    """Checks that a step, which is arranged by lane, has the same rows for every world size."""
    first: list[int] = []
    for world in (1, 2, 3, 8):
        plan = Plan(order=order, global_batch_size=batch, dp_size=world, remainder="ragged", chunk_positions=64)
        steps = range(0, order.epoch_rows, batch)
        slices = [(at, *plan.rank_slice(1, at, rank)) for at in steps for rank in range(world)]
        parts = [plan.positions(1, *each) for each in slices]
        found = plan.select(1, np.concatenate(parts)).tolist()
        first = first or found
        _promise(
            order,
            found == first,
            "global batches are the same on every world size",
            f"on {world} ranks they are not those on 1",
            "Let rows_of() depend on the position alone.",
        )


def _check_seeking(order: Order, other_process: bool) -> None:
    """Checks that rows at the end of a large epoch take little memory, and that the order can be sent to a process."""
    bound, tables = order.bind(SampleRows(count=_MANY_ROWS))
    resolved = bound.resolve(Facts(rows=_MANY_ROWS, seed=0, tables=tables, row_bytes=1e4, global_batch_size=256))
    if other_process:
        _check_sending(resolved)
    if tables:
        return
    tracemalloc.start()
    resolved.epoch(0).rows(np.arange(resolved.epoch_rows - 100, resolved.epoch_rows, dtype=np.int64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    _promise(
        order,
        peak <= _LITTLE_MEMORY,
        "a few rows cost the same memory however long the epoch is, so that a resume at its end is cheap",
        f"100 of {_MANY_ROWS:,} rows took {peak / 2**20:,.0f} MiB",
        "Compute the rows that are asked for, as raylance.orders.permutation.permute() does, not all of them.",
    )


def _check_sending(order: Resolved) -> None:
    """Checks that an order has the same rows in another process, because plans are sent to ranks and their helpers."""
    from ray import cloudpickle

    end = order.epoch_rows
    positions = np.arange(max(0, end - 100), end, dtype=np.int64)
    sent = cloudpickle.dumps((order, positions))  # type: ignore[no-untyped-call]
    done = subprocess.run([sys.executable, "-c", _READ], input=sent, capture_output=True, check=False)
    wanted = order.epoch(1).rows(positions).tolist()
    got = done.stdout.decode().strip()
    _promise(
        order,
        done.returncode == 0 and json.loads(got or "[]") == wanted,
        "an order is sent to other processes and has the same rows there",
        f"it has {got[:60]}, and here {wanted[:5]} {done.stderr.decode()[-300:]}",
        "Hold plain values, and use nothing that differs by process, as hash() of strings does.",
    )
