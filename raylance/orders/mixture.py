"""Mixtures combine several datasets in one order by fixed shares.

A mixture is one order over the concatenated selections of its components. So everything else (steps, ranks, resume,
lost helpers) works as with one dataset. Which component a position belongs to, and which of its rows, in the
component's own order, is computed by arithmetic: see `_Tree`.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from raylance.errors import ConfigError
from raylance.orders.checking import select_rows
from raylance.orders.order import Auto, Epoch, Facts, Order, PicklesFields, Resolved, Tables, join_tables
from raylance.orders.permutation import Int32Array, Int64Array, UInt64Array
from raylance.orders.shuffles import stack, stacked_kind, stacked_rows

Floats = npt.NDArray[np.float64]

_SAMPLED = 1 << 16  # drawn rows whose costs give the mean
_MOST_SHARES = 2**31  # so that the product of two shares is an int64
_AS_WEIGHTS = 0.011  # of a share: how far the quotas of raylance 0.10 are from the weights, 1 % or half a thousandth
_MOST_TOGETHER, _MOST_ALONE = 4096, 512  # most own epochs of components that an epoch of the mixture keeps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One dataset of a mixture, with its own order and seed."""

    name: str
    order: Order
    seed: int
    rows: int
    quota: int  # share of the positions, in parts of the sum of all quotas
    epoch_rows: int | Auto = "auto"  # positions of its own epoch; "auto" takes those of its order
    tables: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)
    costs: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def params(self) -> dict[str, Any]:
        """Returns the component's values for checkpoints, without `epoch_rows` if that is known to be `rows`."""
        params = {"quota": self.quota, "rows": self.rows, "seed": self.seed, "order": self.order.params()}
        if self.epoch_rows == self.rows or (self.epoch_rows == "auto" and not self.order.repeats):
            return params
        return params | {"epoch_rows": self.epoch_rows}

    def adopt(self, params: Mapping[str, Any]) -> "Component":
        """Returns the component with the values of `params` for the fields that are "auto"."""
        adopted = dataclasses.replace(self, order=self.order.adopt(params["order"]))
        if self.epoch_rows != "auto":
            return adopted
        return dataclasses.replace(adopted, epoch_rows=params.get("epoch_rows", self.rows))

    def resolve(self, facts: Facts) -> Resolved:
        """Resolves the component's order from the facts of the mixture, with its own rows, seed and tables."""
        tables = join_tables(self.tables, self.costs)
        resolved = self.order.resolve(dataclasses.replace(facts, rows=self.rows, seed=self.seed, tables=tables))
        if isinstance(self.epoch_rows, str):
            return resolved
        return dataclasses.replace(resolved, epoch_rows=self.epoch_rows)


def quotas(weights: Sequence[float], row_costs: Sequence[Fraction] | None = None) -> list[int]:
    """Returns the components' shares of the rows as whole numbers, at least 1, whose sum is at most 2**31. Weights are
    taken as they are written: 0.7 and 0.3 are 7 and 3. If no such numbers are exact, each is off by one part of the sum
    at most. With `row_costs`, the mean cost of a row of each component, weights are shares of the cost.
    """
    exact = list(map(_exact, weights))
    if row_costs is not None:
        exact = [weight / cost for weight, cost in zip(exact, row_costs, strict=True)]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor, total = math.gcd(*whole), sum(whole)
    if total // divisor <= _MOST_SHARES:
        return [number // divisor for number in whole]
    return [max(1, number * (_MOST_SHARES - len(whole)) // total) for number in whole]


def _exact(weight: Any) -> Fraction:
    """Returns a weight as it is written, also of 32 bits: 0.7, not the nearest float."""
    if isinstance(weight, numbers.Rational):
        return Fraction(int(weight.numerator), int(weight.denominator))
    return Fraction(str(weight if isinstance(weight, np.floating) else float(weight)))


class _Tree:
    """Deals positions to components by a binary tree: of the first p positions of a node, its left half gets
    floor(p * left / total + 1/2), and its right half the others.

    Such a split is a Sturmian word, the most even sequence of two letters. So at any position each component has its
    share, give or take a few rows, and neither size nor cost depends on the weights.
    """

    def __init__(self, quotas: tuple[int, ...]) -> None:
        self.size = sum(quotas)
        # By node, the root first: quota of the left half, quota of both, and the nodes of the halves. A component is a
        # node that goes to itself.
        nodes: list[tuple[int, int, int, int]] = []
        owners: list[int] = []
        self._paths: list[list[tuple[int, int, bool]]] = [[] for _ in quotas]  # (left, total, is left), the root last

        def add(low: int, high: int) -> int:
            number, total, middle = len(nodes), sum(quotas[low:high]), (low + high) // 2
            nodes.append((total, total, number, number))
            owners.append(low)
            if high - low > 1:
                left = sum(quotas[low:middle])
                nodes[number] = left, total, add(low, middle), add(middle, high)
                for index in range(low, high):
                    self._paths[index].append((left, total, index < middle))
            return number

        add(0, len(quotas))
        self._nodes, self._owners = np.array(nodes, dtype=np.int64).T, np.array(owners, dtype=np.int64)
        self._depth = max(map(len, self._paths))

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns the component of each position, and how many earlier positions belong to the same component."""
        node, place = np.zeros(len(positions), dtype=np.int64), positions
        for _ in range(self._depth):
            left, total, left_node, right_node = self._nodes[:, node]
            turn, rest = np.divmod(place, total)
            before, over = np.divmod(rest * left + total // 2, total)
            before += turn * left
            is_left = over + left >= total
            node, place = np.where(is_left, left_node, right_node), np.where(is_left, before, place - before)
        return self._owners[node], place

    def counts(self, position: int) -> list[int]:
        """Returns how many of the first positions belong to each component."""
        found = []
        for path in self._paths:
            count = position
            for left, total, is_left in reversed(path):
                first = (count * left + total // 2) // total
                count = first if is_left else count - first
            found.append(count)
        return found

    def position(self, component: int, index: int) -> int:
        """Returns the position of a component's row with this index."""
        for left, total, is_left in self._paths[component]:
            half = total // 2
            first = -((half - (index + 1) * total) // left) - 1  # before its next one, the left half has index + 1
            index = first if is_left else (index * total + half) // (total - left)
        return index


class _Pattern:
    """Deals positions by a repeated pattern, which has the quotas. Checkpoints of raylance 0.10 continue by it."""

    def __init__(self, quotas: tuple[int, ...]) -> None:
        due = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
        owner = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
        self._pattern = owner[np.lexsort((owner, due))]
        self._places = np.argsort(self._pattern, kind="stable")  # the places in a repetition, sorted by component
        self._rank = np.empty_like(self._pattern)
        self._rank[self._places] = np.concatenate([np.arange(quota) for quota in quotas])
        self._quotas, self.size = np.array(quotas, dtype=np.int64), len(owner)

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `_Tree.place`."""
        turn, place = np.divmod(positions, self.size)
        which = self._pattern[place]
        return which, turn * self._quotas[which] + self._rank[place]

    def counts(self, position: int) -> list[int]:
        """See `_Tree.counts`."""
        turn, rest = divmod(position, self.size)
        part = np.bincount(self._pattern[:rest], minlength=len(self._quotas))
        return [turn * quota + count for quota, count in zip(self._quotas.tolist(), part.tolist(), strict=True)]

    def position(self, component: int, index: int) -> int:
        """See `_Tree.position`."""
        turn, place = divmod(index, int(self._quotas[component]))
        first = int(self._quotas[:component].sum())
        return turn * self.size + int(self._places[first + place])


@functools.lru_cache(maxsize=16)
def _dealing(spread: str, quotas: tuple[int, ...]) -> _Tree | _Pattern:
    return _Tree(quotas) if spread == "tree" else _Pattern(quotas)


@functools.lru_cache(maxsize=64)
def _epoch_rows(spread: str, quotas: tuple[int, ...], rows: tuple[int, ...], stop: str) -> int:
    dealing, is_first = _dealing(spread, quotas), stop == "first_exhausted"
    # For each component: the position at which its next epoch would begin, or the position after its last row.
    ends = [dealing.position(index, count if is_first else count - 1) for index, count in enumerate(rows)]
    found = min(ends) if is_first else max(ends) + 1
    if found >= 2**63:
        raise ConfigError(
            f'mix(): with stop="{stop}" an epoch has {found:.3g} rows, and positions have 63 bits. Raise the smallest '
            "weight, or give stop= as a number of rows."
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixOrder(Order):
    """Gives each position to a component, which begins its next epoch, in that epoch's order, after its last row."""

    name: ClassVar[str] = "mix"
    repeats: ClassVar[bool] = True
    components: tuple[Component, ...]
    # "first_exhausted" ends the epoch before any component begins its next epoch; "all_exhausted" when each was
    # delivered whole; a number is the epoch's number of rows.
    stop: str | int
    # Positions to read together. "auto": one window of each component or more, within half of `window_bytes`
    chunk_positions: int | Auto = "auto"
    spread: str = "pattern"  # "tree", or "pattern" for checkpoints of raylance 0.10 and before

    def __post_init__(self) -> None:
        words = ("first_exhausted", "all_exhausted")
        is_count = isinstance(self.stop, int) and not isinstance(self.stop, bool) and 1 <= self.stop < 2**63
        if self.stop not in words and not is_count:
            raise ConfigError(
                f'stop={self.stop!r}: must be "first_exhausted", "all_exhausted", or a number of rows, less than '
                "2**63. No mixture was made."
            )

    @property
    def quotas(self) -> tuple[int, ...]:
        """The quota of each component."""
        return tuple(part.quota for part in self.components)

    def params(self) -> dict[str, Any]:
        """See `Order.params`. Components are listed by name, with their quotas and orders."""
        components = {part.name: part.params() for part in self.components}
        params = {
            "name": self.name,
            "stop": self.stop,
            "chunk_positions": self.chunk_positions,
            "components": components,
        }
        return params if self.spread == "pattern" else params | {"spread": self.spread}

    def dealt_as(self, params: Mapping[str, Any]) -> Self:
        """See `Order.dealt_as`. A mixture that raylance 0.10 recorded keeps its pattern, if it has these weights."""
        saved = params.get("components")
        names = [part.name for part in self.components]
        if self.spread == "pattern" or "spread" in params or not isinstance(saved, Mapping) or [*saved] != names:
            return self
        quotas = [part.get("quota") for part in saved.values()]
        if not all(isinstance(quota, int) and quota > 0 for quota in quotas):
            return self
        shares, wanted = (np.array(each) / sum(each) for each in (quotas, self.quotas))
        if (np.abs(shares - wanted) > np.maximum(_AS_WEIGHTS * wanted, 0.0005)).any():
            return self
        parts = (dataclasses.replace(part, quota=quota) for part, quota in zip(self.components, quotas, strict=True))
        return dataclasses.replace(self, components=tuple(parts), spread="pattern")

    def adopt(self, params: Any) -> Self:
        """See `Order.adopt`."""
        parts = tuple(part.adopt(params["components"][part.name]) for part in self.components)
        chunk = params["chunk_positions"] if self.chunk_positions == "auto" else self.chunk_positions
        return dataclasses.replace(self, components=parts, chunk_positions=chunk)

    def resolve(self, facts: Facts) -> Resolved:
        """See `Order.resolve`. Each component gets a part of `window_bytes` in proportion to its quota."""
        size = sum(self.quotas)
        parts = []
        for part in self.components:
            share = max(1, facts.window_bytes * part.quota // size)
            parts.append(part.resolve(dataclasses.replace(facts, window_bytes=share)))
        windows = [(part.read_positions or 1) * size // of for part, of in zip(parts, self.quotas, strict=True)]
        limit = int(facts.window_bytes / 2 / max(facts.row_bytes, 1))
        auto = max(1, min(max(windows), limit))
        chunk = auto if isinstance(self.chunk_positions, str) else self.chunk_positions
        components = tuple(
            dataclasses.replace(part, order=resolved.settings, epoch_rows=resolved.epoch_rows)
            for part, resolved in zip(self.components, parts, strict=True)
        )
        rows, stop = tuple(part.epoch_rows for part in parts), self.stop
        return _MixResolved(
            settings=dataclasses.replace(self, components=components, chunk_positions=chunk),
            rows=facts.rows,
            seed=facts.seed,
            epoch_rows=_epoch_rows(self.spread, self.quotas, rows, stop) if isinstance(stop, str) else stop,
            shard_rows=1,
            read_positions=chunk,
            parts=tuple(parts),
        )

    def standings(self, position: int) -> dict[str, dict[str, int]]:
        """Returns the progress of each component in this epoch, by name: the number of consumed rows, of its own epochs
        that ended ("passes"), and the position in its current own epoch.
        """
        standings = {}
        for part, rows in zip(self.components, _dealing(self.spread, self.quotas).counts(position), strict=True):
            # The first iteration resolves "auto". Before it no row is consumed, so any divisor is right.
            passes, own = divmod(rows, part.rows if isinstance(part.epoch_rows, str) else part.epoch_rows)
            standings[part.name] = {"rows": rows, "passes": passes, "position": own}
        return standings


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MixResolved(PicklesFields, Resolved):
    """A resolved mixture. Its `parts` are the resolved orders of the components."""

    settings: MixOrder
    parts: tuple[Resolved, ...]

    def epoch(self, number: int) -> "_MixEpoch":
        return self._epoch(number)

    @functools.cached_property
    def _epoch(self) -> "Callable[[int], _MixEpoch]":
        """A function that returns an epoch by number. It keeps the last two, because each step and chunk asks again."""
        return functools.lru_cache(maxsize=2)(functools.partial(_MixEpoch, self))

    def custom_parts(self) -> list[Resolved]:
        return [own for part in self.parts for own in part.custom_parts()]

    @property
    def cost_names(self) -> tuple[str, ...]:
        names = [part.cost_names for part in self.parts]
        return names[0] if len(set(names)) == 1 else ()

    def costs(self, rows: Int64Array) -> Int32Array:
        starts = self.numbers[1]
        found = np.empty((*rows.shape, len(self.cost_names)), dtype=np.int32)
        which = np.searchsorted(starts, rows, side="right") - 1
        for index in np.unique(which).tolist():
            mine = which == index
            found[mine] = self.parts[index].costs(rows[mine] - starts[index])
        return found

    @functools.cached_property
    def numbers(self) -> tuple[Int64Array, Int64Array]:
        """For each component: the positions of its own epoch, and the rows of all components before it."""
        rows = np.array([part.rows for part in self.parts], dtype=np.int64)
        own = np.array([part.epoch_rows for part in self.parts], dtype=np.int64)
        return own, np.cumsum(rows) - rows

    @functools.cached_property
    def kinds(self) -> tuple[list[type[Order] | None], Int64Array]:
        """The kinds of the components' orders, None for those computed alone; and each component's index in them."""
        by_part = [stacked_kind(part) for part in self.parts]
        found = list(dict.fromkeys(by_part))
        return found, np.array([found.index(kind) for kind in by_part], dtype=np.int64)


def mean_costs(order: Resolved) -> list[Floats]:
    """Returns the mean costs of a row that each component of a resolved mixture delivers, float64, (costs,) each; none
    if rows have no costs.
    """
    if not isinstance(order, _MixResolved) or not order.cost_names:
        return []
    means = []
    for part in order.parts:
        rows = np.arange(part.rows)
        if part.settings.repeats:  # drawn rows are sampled
            rows = part.epoch(0).rows(np.linspace(0, part.epoch_rows - 1, _SAMPLED).astype(np.int64))
        means.append(part.costs(rows).mean(axis=0, dtype=np.float64))
    return means


class _MixEpoch(Epoch):
    """One epoch of a mixture. Its rows are numbered through the concatenated selections of the components.

    A step has few rows of each of many components, so components with the same kind of order are computed together. Own
    epochs of components are numbered: with C components, own epoch n of component c within this epoch of the mixture
    has the number n·C + c; n and c count from 0.
    """

    order: _MixResolved

    def rows(self, positions: Int64Array) -> Int64Array:
        (own_rows, starts), (kinds, kind_of_part) = self.order.numbers, self.order.kinds
        settings = self.order.settings
        which, counted = _dealing(settings.spread, settings.quotas).place(positions)
        passes, within = np.divmod(counted, own_rows[which])
        own_epochs, out = passes * len(starts) + which, starts[which]
        for index, kind in enumerate(kinds):
            mine = np.flatnonzero(kind_of_part[which] == index)
            if not len(mine):
                continue
            asked, of = np.unique(own_epochs[mine], return_inverse=True)
            if kind is not None:
                out[mine] += stacked_rows(kind, self._numbers(kind, asked)[:, of], within[mine])
                continue
            by_epoch = np.split(mine[np.argsort(of, kind="stable")], np.cumsum(np.bincount(of))[:-1])
            for number, those in zip(asked.tolist(), by_epoch, strict=True):
                out[those] += select_rows(self._alone(number), within[those])
        return out

    def _own_epoch(self, own_epoch: int) -> Epoch:
        passes, index = divmod(own_epoch, len(self.order.parts))
        part = self.order.parts[index]
        wraps = -(-(self.order.epoch_rows + 1) // part.epoch_rows)
        return part.epoch(self.number * wraps + passes)

    @functools.cached_property
    def _alone(self) -> "Callable[[int], Epoch]":
        return functools.lru_cache(maxsize=_MOST_ALONE)(self._own_epoch)

    @functools.cached_property
    def _known(self) -> dict[type[Order], tuple[Int64Array, UInt64Array]]:
        """By kind of order: its own epochs, ascending, and the column that `stack` made for each. An entry is only
        replaced as a whole, because several threads may read it.
        """
        return {}

    def _numbers(self, kind: type[Order], asked: Int64Array) -> UInt64Array:
        """Returns the numbers that `stacked_rows` takes: one column, kept for later, for each of `asked`, ascending."""
        epochs, numbers = self._known.get(kind) or (asked, self._stack(kind, asked))
        new = asked[~np.isin(asked, epochs)]
        if len(new):
            kept = np.isin(epochs, asked) | (len(epochs) + len(new) <= _MOST_TOGETHER)
            epochs = np.concatenate([epochs[kept], new])
            numbers = np.concatenate([numbers[:, kept], self._stack(kind, new)], axis=1)
            ascending = np.argsort(epochs)
            epochs, numbers = epochs[ascending], numbers[:, ascending]
        self._known[kind] = epochs, numbers
        return numbers[:, np.searchsorted(epochs, asked)]

    def _stack(self, kind: type[Order], epochs: Int64Array) -> UInt64Array:
        return stack(kind, [self._own_epoch(own_epoch) for own_epoch in epochs.tolist()])
