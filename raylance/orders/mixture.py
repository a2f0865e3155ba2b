"""Owns mixtures, which combine several datasets in one order by fixed quotas; never changes a component's own order.

A mixture is one order over the concatenated selections of its components. So everything else (steps, ranks, resume,
lost helpers) works as with one dataset. A pattern of B components repeats: position p belongs to the component at index
p mod B, so every stretch of B positions has the quotas. The position within the component is computed by arithmetic.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from raylance.errors import ConfigError
from raylance.orders.checking import select_rows
from raylance.orders.order import Auto, Epoch, Facts, Order, Resolved, Tables
from raylance.orders.permutation import Int64Array, UInt64Array
from raylance.orders.shuffles import stack, stacked_kind, stacked_rows

logger = logging.getLogger(__name__)

_SHORT_PATTERN = 1000
_LONGEST_PATTERN = 1_000_000  # two arrays of 8 MB, which take a fraction of a second once per process
_NEAR = 0.01
_MOST_TOGETHER, _MOST_ALONE = 4096, 512  # most own epochs of components that an epoch of the mixture keeps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One dataset of a mixture, with its own order and seed.

    Attributes:
        quota: Number of positions that the component gets in each repetition of the pattern.
        epoch_rows: Number of positions of the component's own epoch, after which its next epoch begins. "auto" takes
            the number from the component's order.
    """

    name: str
    order: Order
    seed: int
    rows: int
    quota: int
    epoch_rows: int | Auto = "auto"
    tables: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)

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
        """Resolves the component's order from the facts of the mixture, with the component's rows, seed and tables. If
        `epoch_rows` is a number, it replaces the length that the order gives.
        """
        resolved = self.order.resolve(dataclasses.replace(facts, rows=self.rows, seed=self.seed, tables=self.tables))
        if isinstance(self.epoch_rows, str):
            return resolved
        return dataclasses.replace(resolved, epoch_rows=self.epoch_rows)


def quotas(weights: Sequence[float]) -> list[int]:
    """Returns the number of positions of each component in a stretch, which is one repetition of the pattern.

    A stretch has up to 1,000 positions. The quotas match the weights exactly if possible, otherwise to a thousandth of
    the stretch. If a weight is less than a thousandth of their sum, the stretch has up to 1,000,000 positions, and the
    quotas match exactly if possible, otherwise within 1 % of each weight.

    Raises:
        ConfigError: If no stretch of up to 1,000,000 positions has such quotas.
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
            f"mix(): the weights {list(weights)} give the rarest dataset {shares.min():.3g} of all rows. No "
            f"stretch of {_LONGEST_PATTERN:,} positions comes within {_NEAR:.0%} of all weights. Raise its weight to "
            f"at least {1 / _LONGEST_PATTERN:g} of their sum, make the small weights multiples of one another, or "
            "leave the dataset out."
        )
    return [int(quota) for quota in np.rint(shares * size)]


def _first_stretch(shares: npt.NDArray[np.float64], least: int, most: int, tolerance: float) -> int:
    """Returns the size, from `least` to `most`, of the shortest stretch whose quotas are at least 1 and within the
    relative `tolerance` of their shares; 0 if there is none.
    """
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
    """Spreads the components over a stretch as evenly as the quotas allow. Returns the component of each position, and
    the position's index among the positions of that component.
    """
    due = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
    owner = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
    pattern = owner[np.lexsort((owner, due))]
    rank = np.empty_like(pattern)
    rank[np.argsort(pattern, kind="stable")] = np.concatenate([np.arange(quota) for quota in quotas])
    pattern.flags.writeable = rank.flags.writeable = False
    return pattern, rank


@functools.lru_cache(maxsize=64)
def _epoch_rows(quotas: tuple[int, ...], rows: tuple[int, ...], stop: str) -> int:
    pattern, each, count = _deal(quotas)[0], np.array(quotas, dtype=np.int64), np.array(rows, dtype=np.int64)
    places = np.argsort(pattern, kind="stable")  # the places in a stretch, sorted by component
    # For each component: the position at which its next epoch would begin, or the position of its last row.
    stretch, place = np.divmod(count if stop == "first_exhausted" else count - 1, each)
    ends = stretch * len(pattern) + places[np.cumsum(each) - each + place]
    return int(ends.min()) if stop == "first_exhausted" else int(ends.max()) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixOrder(Order):
    """Gives each position to a component. After its last row, a component begins its next epoch, in that epoch's order.

    Attributes:
        stop: "first_exhausted" ends the epoch before any component begins its next epoch; "all_exhausted" ends it when
            each component was delivered whole; a number is the epoch's number of rows.
        chunk_positions: Number of positions to read together. "auto": enough for at least one window of each component,
            but at most the number of rows that fit half of `window_bytes`.
    """

    name: ClassVar[str] = "mix"
    repeats: ClassVar[bool] = True
    components: tuple[Component, ...]
    stop: str | int
    chunk_positions: int | Auto = "auto"

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
        return {"name": self.name, "stop": self.stop, "chunk_positions": self.chunk_positions, "components": components}

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
            epoch_rows=_epoch_rows(self.quotas, rows, stop) if isinstance(stop, str) else stop,
            shard_rows=1,
            read_positions=chunk,
            parts=tuple(parts),
        )

    def standings(self, position: int) -> dict[str, dict[str, int]]:
        """Returns the progress of each component, by name, in this epoch of the mixture: the number of consumed rows,
        the number of its own epochs that ended ("passes"), and the position in its current own epoch.
        """
        pattern, _ = _deal(self.quotas)
        stretch, rest = divmod(position, len(pattern))
        counts = np.bincount(pattern[:rest], minlength=len(self.components)).tolist()
        standings = {}
        for part, count in zip(self.components, counts, strict=True):
            rows = stretch * part.quota + count
            # The first iteration resolves "auto". Before it no row is consumed, so any divisor is right.
            passes, own = divmod(rows, part.rows if isinstance(part.epoch_rows, str) else part.epoch_rows)
            standings[part.name] = {"rows": rows, "passes": passes, "position": own}
        return standings


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MixResolved(Resolved):
    """A resolved mixture. Its `parts` are the resolved orders of the components."""

    settings: MixOrder
    parts: tuple[Resolved, ...]

    def epoch(self, number: int) -> "_MixEpoch":
        return self._epoch(number)

    @functools.cached_property
    def _epoch(self) -> "Callable[[int], _MixEpoch]":
        """A function that returns an epoch by number. It keeps the last two epochs with their caches, because each step
        and each chunk asks for its epoch again.
        """
        return functools.lru_cache(maxsize=2)(functools.partial(_MixEpoch, self))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def custom_parts(self) -> list[Resolved]:
        return [own for part in self.parts for own in part.custom_parts()]

    @functools.cached_property
    def numbers(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """For each component: its quota, the positions of its own epoch, and the rows of all components before it."""
        rows = np.array([part.rows for part in self.parts], dtype=np.int64)
        own = np.array([part.epoch_rows for part in self.parts], dtype=np.int64)
        return np.array(self.settings.quotas, dtype=np.int64), own, np.cumsum(rows) - rows

    @functools.cached_property
    def kinds(self) -> tuple[list[type[Order] | None], Int64Array]:
        """The different kinds of the components' orders, with None for orders whose epochs are computed alone; and for
        each component, the index of its kind in this list.
        """
        by_part = [stacked_kind(part) for part in self.parts]
        found = list(dict.fromkeys(by_part))
        return found, np.array([found.index(kind) for kind in by_part], dtype=np.int64)


class _MixEpoch(Epoch):
    """One epoch of a mixture. Its rows are numbered through the concatenated selections of the components.

    A step has few rows of each of many components, so components with the same kind of order are computed together. Own
    epochs of components are numbered: with C components, own epoch n of component c within this epoch of the mixture
    has the number n·C + c; n and c count from 0.
    """

    order: _MixResolved

    def rows(self, positions: Int64Array) -> Int64Array:
        (quotas, own_rows, starts), (kinds, kind_of_part) = self.order.numbers, self.order.kinds
        pattern, rank = _deal(self.order.settings.quotas)
        stretch, place = np.divmod(positions, len(pattern))
        which = pattern[place]
        passes, within = np.divmod(stretch * quotas[which] + rank[place], own_rows[which])
        own_epochs, out = passes * len(quotas) + which, starts[which]
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
        """For each kind of order: the own epochs, ascending, and the column of numbers that `stack` made for each. An
        entry is only replaced as a whole, because several threads may read it.
        """
        return {}

    def _numbers(self, kind: type[Order], asked: Int64Array) -> UInt64Array:
        """Returns the numbers that `stacked_rows` takes: one column for each own epoch in `asked`, which ascends. Keeps
        the columns for later calls.
        """
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
