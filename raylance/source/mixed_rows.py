"""Reads a mixture by one selection and one reader. The high bits of a row offset hold the number of the component."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from raylance.columns import COMPONENT, ROW_OFFSET, join_offsets, split_offsets
from raylance.environment.shared import Shared
from raylance.memory.arrow import take_rows
from raylance.memory.lending import Lend, fresh_memory
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.proof import HasOffsets
from raylance.samples.table import Described, FindingTable, Found, Located, Ranges, ResolvingTable, SampleTable
from raylance.source.derived import Derived
from raylance.source.reader import RowReader
from raylance.source.retrying import Wanted, always
from raylance.source.rows import Completion, RowSource, Selected
from raylance.source.version import Source


@dataclasses.dataclass(frozen=True, slots=True)
class _MixSelection:
    """The selections of the components, joined in the order of the components."""

    parts: tuple[Selected, ...]
    block_ends: ClassVar[None] = None
    tokens: ClassVar[None] = None

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b("".join(part.fingerprint for part in self.parts).encode(), digest_size=16).hexdigest()

    def offsets(self, selected: Int64Array) -> Int64Array:
        ends = np.cumsum([part.rows for part in self.parts])
        which = np.searchsorted(ends, selected, side="right")
        out = np.empty(np.shape(selected), dtype=np.int64)
        for index, part in enumerate(self.parts):
            mine = which == index
            out[mine] = join_offsets(index, part.offsets(selected[mine] - (ends[index] - part.rows)))
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class _PartSelection:
    """The selection of one component, with joined offsets."""

    number: int
    part: HasOffsets

    @property
    def rows(self) -> int:
        return self.part.rows

    def offsets(self, selected: Int64Array) -> Int64Array:
        return join_offsets(self.number, self.part.offsets(selected))


@dataclasses.dataclass(frozen=True)
class _MixSamples(ResolvingTable, FindingTable):
    """The tables of samples of the components, with joined offsets; only their selections have a fingerprint."""

    parts: tuple[SampleTable, ...]
    fingerprint = ""

    @property
    def columns(self) -> Mapping[str, int]:
        return self.parts[0].columns

    def of_epoch(self, epoch: int) -> "_MixSamples":
        return _MixSamples(tuple(part.of_epoch(epoch) for part in self.parts))

    def resolve(self, anchors: Int64Array) -> tuple[Int64Array, Located]:
        which, own = split_offsets(anchors)
        facts = np.zeros((len(anchors), max(part.facts for part in self.parts)), dtype=np.int64)
        at, rows, order = np.empty_like(anchors), [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        parts: list[Ranges] = []
        for number in np.unique(which).tolist() or [0]:
            part, mine, begin = self.parts[number], np.flatnonzero(which == number), sum(map(len, rows))
            stored, located = part.resolve(own[mine])
            at[mine], facts[mine, : part.facts] = located.at + begin, located.facts
            if located.ranges is not None:
                parts.append(located.ranges._replace(at=located.ranges.at + begin))
            rows.append(join_offsets(number, stored))
            order.append(mine)
        ranges = Ranges.of(parts).take(np.argsort(np.concatenate(order))) if parts else None
        return np.concatenate(rows), Located(anchors, at, facts, ranges)

    def describe(self, stored: Int64Array, ranges: Ranges) -> dict[str, Described]:
        return self.parts[0].describe(split_offsets(stored)[1], ranges)  # their columns are alike

    def find(self, stored: Int64Array, located: Located) -> Found:
        windows = {name: np.empty((len(located.at), count), dtype=np.int64) for name, count in self.columns.items()}
        pads: dict[str, BoolArray] = {}
        for part, mine, rows, begin in self._split(stored, located.anchors):
            anchors, at, facts = (each[mine] for each in located[:3])
            found = part.find(rows, Located(split_offsets(anchors)[1], at - begin, facts[:, : part.facts]))
            for name, indices in found.windows.items():
                windows[name][mine] = indices + begin
            for name, is_pad in found.pads.items():
                pads.setdefault(name, np.empty(windows[name].shape, dtype=np.bool_))[mine] = is_pad
        return Found(windows, pads)

    def _split(
        self, stored: Int64Array, anchors: Int64Array
    ) -> Iterator[tuple[SampleTable, BoolArray, Int64Array, int]]:
        """Yields, for each component, its table, which anchors it has, and its stored rows, which begin at an index."""
        which, (components, rows) = split_offsets(anchors)[0], split_offsets(stored)
        for number, part in enumerate(self.parts):
            begin, end = np.searchsorted(components, [number, number + 1]).tolist()
            yield part, which == number, rows[begin:end], begin


@dataclasses.dataclass(frozen=True, slots=True)
class _MixReader(RowReader):
    """Reads the rows of each component with the component's own reader, one component after another."""

    readers: tuple[RowReader, ...]

    def read_into(self, offsets: Int64Array, add: Callable[[pa.Table], None], is_wanted: Wanted = always) -> None:
        which, own = split_offsets(offsets)
        tables = []
        for index, reader in enumerate(self.readers):
            mine = own[which == index]
            if len(mine) or not len(offsets):
                found = reader.read_wanted(mine, is_wanted)
                if found is None:
                    return
                tables.append(found)
        table = pa.concat_tables(tables, promote_options="permissive")
        add(table.set_column(table.column_names.index(ROW_OFFSET), ROW_OFFSET, pa.array(offsets)))

    def widened(self, margin: int) -> "_MixReader":
        return _MixReader(tuple(reader.widened(margin) for reader in self.readers))

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _MixCompletion(Completion):
    """Completes the rows of each component as the component does."""

    parts: tuple[Completion, ...]

    @property
    def rows(self) -> int:
        return min(part.rows for part in self.parts)

    @property
    def added_bytes(self) -> int:
        return max(part.added_bytes for part in self.parts)

    def __call__(self, table: pa.Table, lend: Lend = fresh_memory) -> pa.Table:
        which = table[COMPONENT].to_numpy()
        own = [np.flatnonzero(which == number) for number in range(len(self.parts))]
        made = [part(table.take(pa.array(mine))) for part, mine in zip(self.parts, own, strict=True)]
        return take_rows(pa.concat_tables(made).combine_chunks(), np.argsort(np.concatenate(own)), lend)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedRows(RowSource):
    """The rows of all components of a mixture."""

    parts: tuple[RowSource, ...]

    def load_selection(self) -> Selected:
        """See `RowSource.load_selection`."""
        return _MixSelection(tuple(part.load_selection() for part in self.parts))

    @property
    def sources(self) -> tuple[Source, ...]:
        """See `RowSource.sources`."""
        return tuple(each for part in self.parts for each in part.sources)

    @property
    def run_rows(self) -> int:
        """See `RowSource.run_rows`."""
        return max(part.run_rows for part in self.parts)

    @property
    def loaded_bytes(self) -> float:
        """See `RowSource.loaded_bytes`."""
        return max(part.loaded_bytes for part in self.parts)

    @property
    def rows_each(self) -> float:
        """See `RowSource.rows_each`."""
        return max(part.loaded_bytes * part.rows_each for part in self.parts) / self.loaded_bytes

    @property
    def derived(self) -> tuple[tuple[str, Derived], ...]:
        """See `RowSource.derived`."""
        named = zip(self.uri, self.parts, strict=True)
        return tuple((name, each) for name, part in named for _, each in part.derived)

    def load_samples(self) -> SampleTable | None:
        """See `RowSource.load_samples`."""
        found = [samples for part in self.parts if (samples := part.load_samples()) is not None]
        return _MixSamples(tuple(found)) if found else None  # `mix` takes all or none

    def check_asked(self, offsets: Int64Array) -> None:
        """See `RowSource.check_asked`."""
        which, own = split_offsets(offsets)
        for number, part in enumerate(self.parts):
            part.check_asked(own[which == number])

    def part(self, number: int) -> RowSource:
        """See `RowSource.part`."""
        return self.parts[number]

    def selection_of(self, fields: Mapping[str, Any]) -> HasOffsets:
        """See `RowSource.selection_of`; `fields` are of the dataset whose number they hold under `COMPONENT`."""
        number = fields[COMPONENT]
        return _PartSelection(number, self.parts[number].selection_of(fields))

    def has_rows_of(self, version: Any, identity: Any) -> bool:
        """See `RowSource.has_rows_of`; `version` and `identity` are dicts by name of a component."""
        if not (isinstance(version, Mapping) and isinstance(identity, Mapping)):
            return False
        saved = [(version.get(name), identity.get(name)) for name in self.uri]
        parts = zip(self.parts, saved, strict=True)
        return all((part.version, part.identity) == its or part.has_rows_of(*its) for part, its in parts)

    def open_reader(self, retry_s: float | None = None) -> RowReader:
        """See `RowSource.open_reader`."""
        return _MixReader(tuple(part.open_reader(retry_s) for part in self.parts))

    @property
    def completion(self) -> Completion | None:
        """See `RowSource.completion`."""
        parts = tuple(each for part in self.parts if (each := part.completion) is not None)
        is_one = all(each == parts[0] for each in parts)
        return _MixCompletion(parts) if not is_one else parts[0] if parts else None

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> Self:
        """See `RowSource.map_shared`."""
        return dataclasses.replace(self, parts=tuple(part.map_shared(change) for part in self.parts))


def mix_rows(parts: Mapping[str, RowSource]) -> MixedRows:
    """Makes the rows of a mixture from components by name. The bytes of a row are those of the widest component."""
    widest = max(parts.values(), key=lambda part: part.likely_row_bytes)
    return MixedRows(
        uri={name: part.uri for name, part in parts.items()},
        branch={name: part.branch for name, part in parts.items()},
        version={name: part.version for name, part in parts.items()},
        identity={name: part.identity for name, part in parts.items()},
        windows={name: part.windows for name, part in parts.items()} if widest.windows else None,
        columns=next(iter(parts.values())).columns,
        row_bytes=max(part.row_bytes for part in parts.values()),
        likely_row_bytes=widest.likely_row_bytes,
        measure=f"{widest.measure} of the widest component",
        sample_bytes=max(part.sample_bytes for part in parts.values()),
        parts=tuple(parts.values()),
    )
