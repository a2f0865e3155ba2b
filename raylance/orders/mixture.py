"""Owns mixtures: several datasets dealt into one order by fixed quotas; never changes a component's own order.

A mixture is an order over the components' selections laid behind one another, so everything else (steps, ranks, resume,
lost helpers) is as with one dataset. Position p belongs to the component that a fixed pattern names for p mod B, which
keeps the quotas in every stretch of B positions, and the position within the component follows by arithmetic.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from raylance.errors import ConfigError
from raylance.orders.order import Auto, Epoch, Facts, Order, Settled, Tables
from raylance.orders.permutation import Int64Array

_SHORT_PATTERN = 1000
_LONGEST_PATTERN = 1_000_000  # eight megabytes, and a fraction of a second once a process
_NEAR = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One dataset of a mixture, with its own order and seed; its quota is of positions in a stretch of the pattern."""

    name: str
    order: Order
    seed: int
    rows: int
    quota: int
    tables: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)


def quotas(weights: Sequence[float]) -> list[int]:
    """Whole positions of each component in a stretch.

    Exact where the weights allow it within 1,000 positions, else to a thousandth; a longer stretch where a weight is
    less than that: exact where 1,000,000 positions allow it, else within 1 % of each weight.

    Raises:
        ConfigError: If no stretch of 1,000,000 positions keeps the weights.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(sum(weights)):
        shares = shares / max(weights)
    shares = shares / sum(shares.tolist())
    size = _first_stretch(shares, len(weights), _SHORT_PATTERN, 0)
    if not size and shares.min() * _SHORT_PATTERN > 1 - 1e-9:
        size = _SHORT_PATTERN
    for tolerance in (0, _NEAR):
        size = size or _first_stretch(shares, _SHORT_PATTERN + 1, _LONGEST_PATTERN, tolerance)
    if not size:
        raise ConfigError(
            f"mix(): the weights {list(weights)} give the rarest dataset {shares.min():.3g} of all rows, and no "
            f"stretch of {_LONGEST_PATTERN:,} positions comes within {_NEAR:.0%} of all weights. Raise it to at least "
            f"{1 / _LONGEST_PATTERN:g} of their sum, make the small ones multiples of one another, or leave it out."
        )
    return [int(quota) for quota in np.rint(shares * size)]


def _first_stretch(shares: npt.NDArray[np.float64], least: int, most: int, tolerance: float) -> int:
    """The shortest stretch whose quotas are all at least 1 and near their shares, relatively; 0 where there is none."""
    together = (1 << 20) // len(shares) + 1
    for low in range(least, most + 1, together):
        sizes = np.arange(low, min(low + together, most + 1))
        wanted = shares[:, None] * sizes  # (components, sizes)
        off = np.where(wanted < 0.5, np.inf, np.abs(np.rint(wanted) - wanted))
        near = np.flatnonzero((off <= np.maximum(1e-9, tolerance * wanted)).all(axis=0))
        if len(near):
            return int(sizes[near[0]])
    return 0


@functools.lru_cache(maxsize=16)
def _deal(quotas: tuple[int, ...]) -> tuple[Int64Array, Int64Array]:
    """A stretch, as evenly spread as the quotas allow: the component of each position, and how manieth of it it is."""
    due = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
    owner = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
    pattern = owner[np.lexsort((owner, due))]
    rank = np.empty_like(pattern)
    rank[np.argsort(pattern, kind="stable")] = np.concatenate([np.arange(quota) for quota in quotas])
    pattern.flags.writeable = rank.flags.writeable = False
    return pattern, rank


@functools.lru_cache(maxsize=64)
def _epoch_rows(quotas: tuple[int, ...], rows: tuple[int, ...], stop: str) -> int:
    pattern, ends = _deal(quotas)[0], []
    for index, (quota, count) in enumerate(zip(quotas, rows, strict=True)):
        places = np.flatnonzero(pattern == index)  # of this component, in a stretch
        # The position that would take row `count` again, or the one behind the last row.
        stretch, place = divmod(count if stop == "first_exhausted" else count - 1, quota)
        ends.append(stretch * len(pattern) + int(places[place]) + (stop == "all_exhausted"))
    return min(ends) if stop == "first_exhausted" else max(ends)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixOrder(Order):
    """Deals positions to components; a component that ends begins its next epoch, in another order.

    Attributes:
        stop: "first_exhausted" ends the epoch before a row of any component comes again, "all_exhausted" when the last
            component has been seen whole, a number after so many rows.
        chunk_positions: Positions to read together; "auto" is the longest window of a component, within the limit.
    """

    name: ClassVar[str] = "mix"
    repeats: ClassVar[bool] = True
    components: tuple[Component, ...]
    stop: str | int
    chunk_positions: int | Auto = "auto"

    def __post_init__(self) -> None:
        words = ("first_exhausted", "all_exhausted")
        if self.stop not in words and (not isinstance(self.stop, int) or isinstance(self.stop, bool) or self.stop < 1):
            raise ConfigError(f'stop={self.stop!r}: must be "first_exhausted", "all_exhausted" or a number of rows.')

    @property
    def quotas(self) -> tuple[int, ...]:
        """The components' quotas."""
        return tuple(part.quota for part in self.components)

    def params(self) -> dict[str, Any]:
        """See `Order.params`; components by name, with their quotas and their own orders."""
        components = {
            part.name: {"quota": part.quota, "rows": part.rows, "seed": part.seed, "order": part.order.params()}
            for part in self.components
        }
        return {"name": self.name, "stop": self.stop, "chunk_positions": self.chunk_positions, "components": components}

    def adopt(self, params: Any) -> Self:
        """See `Order.adopt`."""
        parts = tuple(
            dataclasses.replace(part, order=part.order.adopt(params["components"][part.name]["order"]))
            for part in self.components
        )
        chunk = params["chunk_positions"] if self.chunk_positions == "auto" else self.chunk_positions
        return dataclasses.replace(self, components=parts, chunk_positions=chunk)

    def settle(self, facts: Facts) -> Settled:
        """See `Order.settle`; each component gets its share of the memory."""
        size = sum(self.quotas)
        parts = []
        for part in self.components:
            share = max(1, facts.max_window_bytes * part.quota // size)
            own = dataclasses.replace(facts, rows=part.rows, seed=part.seed, tables=part.tables, max_window_bytes=share)
            parts.append(part.order.settle(own))
        windows = [(part.read_positions or 1) * size // of for part, of in zip(parts, self.quotas, strict=True)]
        limit = int(facts.max_window_bytes / 2 / max(facts.row_bytes, 1))
        auto = max(1, min(max(windows), limit))
        chunk = auto if isinstance(self.chunk_positions, str) else self.chunk_positions
        components = tuple(
            dataclasses.replace(part, order=settled.settings)
            for part, settled in zip(self.components, parts, strict=True)
        )
        rows, stop = tuple(part.rows for part in parts), self.stop
        return _MixSettled(
            settings=dataclasses.replace(self, components=components, chunk_positions=chunk),
            rows=facts.rows,
            seed=facts.seed,
            epoch_rows=_epoch_rows(self.quotas, rows, stop) if isinstance(stop, str) else stop,
            shard_rows=1,
            read_positions=chunk,
            parts=tuple(parts),
        )

    def standings(self, position: int) -> dict[str, dict[str, int]]:
        """Where each component stands: rows consumed in this epoch of the mixture, and of these, of its own epoch."""
        pattern, _ = _deal(self.quotas)
        stretch, rest = divmod(position, len(pattern))
        counts = np.bincount(pattern[:rest], minlength=len(self.components)).tolist()
        standings = {}
        for part, count in zip(self.components, counts, strict=True):
            rows = stretch * part.quota + count
            standings[part.name] = {"rows": rows, "passes": rows // part.rows, "position": rows % part.rows}
        return standings


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MixSettled(Settled):
    """A mixture, settled, as its parts are."""

    settings: MixOrder
    parts: tuple[Settled, ...]

    def epoch(self, number: int) -> "_MixEpoch":
        return _MixEpoch(self, number)


class _MixEpoch(Epoch):
    """One epoch of a mixture. Its rows count through the components, one behind the other."""

    order: _MixSettled

    def rows(self, positions: Int64Array) -> Int64Array:
        quotas = self.order.settings.quotas
        pattern, rank = _deal(quotas)
        stretch, place = np.divmod(positions, len(pattern))
        which = pattern[place]
        within = stretch * np.array(quotas, dtype=np.int64)[which] + rank[place]  # counts on over a component's epochs
        out = np.empty(len(positions), dtype=np.int64)
        base = 0
        for index, part in enumerate(self.order.parts):
            mine = np.flatnonzero(which == index)
            wraps = -(-(self.order.epoch_rows + 1) // part.rows)
            turn, place = np.divmod(within[mine], part.rows)
            for number in np.unique(turn):
                now = turn == number
                out[mine[now]] = base + part.epoch(self.number * wraps + int(number)).rows(place[now])
            base += part.rows
        return out
