"""Owns mixtures: several datasets dealt into one order by fixed quotas; never changes a component's own order.

A mixture is an order over the components' selections laid behind one another, so everything else (steps, ranks, resume,
lost helpers) is as with one dataset. Position p belongs to the component that a fixed pattern names for p mod B, which
keeps the quotas in every stretch of B positions, and the position within the component follows by arithmetic.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from raylance.columns import COMPONENT_SHIFT, ROW_OFFSET
from raylance.decoding import Decoding
from raylance.errors import ConfigError
from raylance.order import Facts, Order
from raylance.permutation import Int64Array
from raylance.spec import Feed, RowReader, Selected

_MAX_PATTERN = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One dataset of a mixture.

    Attributes:
        name: Its name.
        order: Its own order.
        seed: The seed of its order.
        rows: Rows of its selection.
        quota: Its positions in each stretch of the pattern.
    """

    name: str
    order: Order
    seed: int
    rows: int
    quota: int


def quotas(weights: Sequence[float]) -> list[int]:
    """Whole positions of each component in a stretch: exact where the weights allow it within 1,000 positions.

    Args:
        weights: Positive numbers; their sum does not matter.
    """
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    for size in range(len(weights), _MAX_PATTERN + 1):
        if np.allclose(shares * size, np.rint(shares * size), rtol=0, atol=1e-9) and np.rint(shares * size).min() >= 1:
            return [int(quota) for quota in np.rint(shares * size)]
    return [max(1, int(quota)) for quota in np.rint(shares * _MAX_PATTERN)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixOrder(Order):
    """Deals positions to components; a component that ends begins its next epoch, in another order.

    Attributes:
        components: The datasets.
        stop: "first_exhausted" ends the epoch before a row of any component comes again, "all_exhausted" when the last
            component has been seen whole, a number after so many rows.
        chunk_positions: Positions to read together; "auto" is the longest window of a component, within the limit.
    """

    name: ClassVar[str] = "mix"
    repeats: ClassVar[bool] = True
    components: tuple[Component, ...]
    stop: str | int
    chunk_positions: int | str = "auto"

    def __post_init__(self) -> None:
        words = ("first_exhausted", "all_exhausted")
        if self.stop not in words and (not isinstance(self.stop, int) or isinstance(self.stop, bool) or self.stop < 1):
            raise ConfigError(f'stop={self.stop!r}: must be "first_exhausted", "all_exhausted" or a number of rows.')

    @property
    def is_resolved(self) -> bool:
        """See `Order.is_resolved`; the components are settled together with it."""
        return self.chunk_positions != "auto"

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

    def resolve(self, facts: Facts) -> Self:
        """See `Order.resolve`; each component gets its share of the memory."""
        size = len(self._pattern())
        parts, windows = [], [1]
        for part in self.components:
            share = dataclasses.replace(
                facts, rows=part.rows, max_window_bytes=max(1, facts.max_window_bytes * part.quota // size)
            )
            order = part.order.resolve(share)
            parts.append(dataclasses.replace(part, order=order))
            windows.append((order.read_positions(part.rows) or 1) * size // part.quota)
        limit = int(facts.max_window_bytes / 2 / max(facts.row_bytes, 1))
        chunk = max(1, min(max(windows), limit)) if self.chunk_positions == "auto" else self.chunk_positions
        return dataclasses.replace(self, components=tuple(parts), chunk_positions=chunk)

    def read_positions(self, n: int) -> int | None:
        """See `Order.read_positions`."""
        return self._int("chunk_positions")

    def epoch_rows(self, n: int) -> int:
        """Positions of an epoch, as `stop` says."""
        if isinstance(self.stop, int):
            return self.stop
        pattern = self._pattern()
        ends = []
        for index, part in enumerate(self.components):
            places = np.flatnonzero(pattern == index)  # of this component, in a stretch
            # The position that would take row `rows` again, or the one behind the last row.
            last = part.rows if self.stop == "first_exhausted" else part.rows - 1
            stretch, place = divmod(last, part.quota)
            ends.append(stretch * len(pattern) + int(places[place]) + (self.stop == "all_exhausted"))
        return min(ends) if self.stop == "first_exhausted" else max(ends)

    def rows(self, positions: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        """See `Order.rows`; rows count through the components, one behind the other."""
        which, within = self._places(positions)
        length = self.epoch_rows(n)
        out = np.empty(len(positions), dtype=np.int64)
        base = 0
        for index, part in enumerate(self.components):
            mine = np.flatnonzero(which == index)
            wraps = -(-(length + 1) // part.rows)
            turn, place = np.divmod(within[mine], part.rows)
            for number in np.unique(turn):
                now = turn == number
                part_epoch = epoch * wraps + int(number)
                out[mine[now]] = base + part.order.rows(place[now], part.rows, part.seed, part_epoch)
            base += part.rows
        return out

    def standings(self, position: int) -> dict[str, dict[str, int]]:
        """Where each component stands: rows consumed in this epoch of the mixture, and of these, of its own epoch."""
        pattern = self._pattern()
        stretch, rest = divmod(position, len(pattern))
        counts = np.bincount(pattern[:rest], minlength=len(self.components))
        taken = {
            part.name: stretch * part.quota + int(count) for part, count in zip(self.components, counts, strict=True)
        }
        sizes = {part.name: part.rows for part in self.components}
        return {
            name: {"rows": rows, "passes": rows // sizes[name], "position": rows % sizes[name]}
            for name, rows in taken.items()
        }

    def _pattern(self) -> Int64Array:
        """Component of each position of a stretch, as evenly spread as the quotas allow."""
        due = np.concatenate([(np.arange(part.quota) + 0.5) / part.quota for part in self.components])
        owner = np.repeat(np.arange(len(self.components)), [part.quota for part in self.components])
        return owner[np.lexsort((owner, due))].astype(np.int64)

    def _places(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Component of each position, and the position within the component, which counts on over its epochs."""
        pattern = self._pattern()
        rank = np.empty_like(pattern)  # how manieth of its component in the stretch
        for index in range(len(self.components)):
            rank[pattern == index] = np.arange((pattern == index).sum())
        stretch, place = np.divmod(positions, len(pattern))
        which = pattern[place]
        sizes = np.array([part.quota for part in self.components], dtype=np.int64)
        return which, stretch * sizes[which] + rank[place]


@dataclasses.dataclass(frozen=True, slots=True)
class MixSelection:
    """The components' selections behind one another; an offset carries its component in the high bits.

    Attributes:
        parts: Their selections.
    """

    parts: tuple[Selected, ...]

    @property
    def rows(self) -> int:
        """Rows of all components."""
        return sum(part.rows for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """Hash of the components' fingerprints."""
        return hashlib.blake2b("".join(part.fingerprint for part in self.parts).encode(), digest_size=16).hexdigest()

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Selected rows to component << 48 | row offset."""
        ends = np.cumsum([part.rows for part in self.parts])
        which = np.searchsorted(ends, selected, side="right")
        out = np.empty(np.shape(selected), dtype=np.int64)
        for index, part in enumerate(self.parts):
            mine = which == index
            out[mine] = (index << COMPONENT_SHIFT) | part.offsets(selected[mine] - (ends[index] - part.rows))
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class _MixReader:
    readers: tuple[RowReader, ...]

    def read(self, offsets: Int64Array) -> pa.Table:
        which = offsets >> COMPONENT_SHIFT
        tables = []
        for index, reader in enumerate(self.readers):
            mine = offsets[which == index]
            if len(mine) or not len(offsets):
                tables.append(reader.read(mine & ((1 << COMPONENT_SHIFT) - 1)))
        table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        return table.set_column(table.column_names.index(ROW_OFFSET), ROW_OFFSET, pa.array(offsets))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixFeed:
    """What a shard actor of a mixture serves; see `raylance.spec.Feed`.

    Attributes:
        names: Names of the components.
        parts: Their feeds.
        decoding: What to do with image columns, the same for all.
    """

    names: tuple[str, ...]
    parts: tuple[Feed, ...]
    decoding: Decoding | None

    @property
    def uri(self) -> Any:
        """URIs by component."""
        return {name: part.uri for name, part in zip(self.names, self.parts, strict=True)}

    @property
    def version(self) -> Any:
        """Versions by component."""
        return {name: part.version for name, part in zip(self.names, self.parts, strict=True)}

    @property
    def columns(self) -> Sequence[str]:
        """Columns to read."""
        return self.parts[0].columns

    @property
    def delivers(self) -> Sequence[str]:
        """Columns of the batches."""
        return self.parts[0].delivers

    @property
    def row_bytes(self) -> float:
        """Bytes of a row as it is read, of the widest component."""
        return max(part.row_bytes for part in self.parts)

    @property
    def read_bytes(self) -> float:
        """The best guess of the same."""
        return max(part.read_bytes for part in self.parts)

    @property
    def measure(self) -> str:
        """How it is known."""
        return f"{max(self.parts, key=lambda part: part.read_bytes).measure} of the widest component"

    def load_selection(self) -> Selected:
        """The components' selections as one."""
        return MixSelection(tuple(part.load_selection() for part in self.parts))

    def open_reader(self) -> RowReader:
        """Opens the components."""
        return _MixReader(tuple(part.open_reader() for part in self.parts))

    def shared(self) -> "MixFeed":
        """The same, with large selections in the object store."""
        return dataclasses.replace(self, parts=tuple(part.shared() for part in self.parts))

    def local(self) -> "MixFeed":
        """The same without the object store."""
        return dataclasses.replace(self, parts=tuple(part.local() for part in self.parts))
