"""Owns what a mixture reads: its components as one selection and one reader; never deals positions to them.

A row offset on its way carries its component in the high bits.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raylance.columns import COMPONENT_SHIFT, OFFSET_MASK, ROW_OFFSET
from raylance.orders.permutation import Int64Array
from raylance.source.rows import RowReader, RowSource, Selected
from raylance.store import Shared


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
                tables.append(reader.read(mine & OFFSET_MASK))
        table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        return table.set_column(table.column_names.index(ROW_OFFSET), ROW_OFFSET, pa.array(offsets))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedRows:
    """What a shard actor of a mixture serves; see `RowSource`.

    Attributes:
        names: Names of the components.
        parts: Their feeds.
    """

    names: tuple[str, ...]
    parts: tuple[RowSource, ...]

    @property
    def uri(self) -> Any:
        """URIs by component."""
        return {name: part.uri for name, part in zip(self.names, self.parts, strict=True)}

    @property
    def branch(self) -> Any:
        """Branches by component."""
        return {name: part.branch for name, part in zip(self.names, self.parts, strict=True)}

    @property
    def version(self) -> Any:
        """Versions by component."""
        return {name: part.version for name, part in zip(self.names, self.parts, strict=True)}

    @property
    def identity(self) -> Any:
        """Hashes of the files by component."""
        return {name: part.identity for name, part in zip(self.names, self.parts, strict=True)}

    @property
    def columns(self) -> Sequence[str]:
        """Columns to read."""
        return self.parts[0].columns

    @property
    def row_bytes(self) -> float:
        """Bytes of a row as it is read, of the widest component."""
        return max(part.row_bytes for part in self.parts)

    @property
    def likely_row_bytes(self) -> float:
        """The best guess of the same."""
        return max(part.likely_row_bytes for part in self.parts)

    @property
    def measure(self) -> str:
        """How it is known."""
        return f"{max(self.parts, key=lambda part: part.likely_row_bytes).measure} of the widest component"

    def load_selection(self) -> Selected:
        """The components' selections as one."""
        return MixSelection(tuple(part.load_selection() for part in self.parts))

    def open_reader(self, retry_s: float = 0.0) -> RowReader:
        """Opens the components."""
        return _MixReader(tuple(part.open_reader(retry_s) for part in self.parts))

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> "MixedRows":
        """See `RowSource.map_shared`."""
        return dataclasses.replace(self, parts=tuple(part.map_shared(change) for part in self.parts))
