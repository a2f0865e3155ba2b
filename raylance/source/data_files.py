"""Ranges of rows read directly from data files, at half the cost of a scan, if that is proven to give the same rows and
values.

A data file keeps the names that its columns had when it was written. So its columns are compared with the dataset's by
their field ids. If they differ, or if a file lies outside the dataset, a scan reads the rows instead.
"""

import bisect
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileReader, ReaderResults

from raylance.source.lance_errors import LANCE_ERRORS
from raylance.source.version import unknown_parts

MOST_IDLE = 64  # most open files that are kept
_MOST_FRAGMENTS = 2  # fragments of one read: a scan of several small files costs less than a read of each
_Part = tuple[str, list[str]]  # a path, and the columns to read there
_Begun = tuple[_Part, LanceFileReader, ReaderResults]


class DataFiles:
    """Reads some columns from the data files of an open dataset. Several threads may read at once."""

    def __init__(self, dataset: lance.LanceDataset, columns: Sequence[str]) -> None:
        self.dataset, self._columns = dataset, columns
        schema = dataset.schema  # kept, because each access makes Lance convert it
        is_flat = bool(columns) and {*columns} <= {*schema.names}
        self._fragments = dataset.get_fragments() if is_flat and "://" not in dataset.uri else []
        rows = [fragment.metadata.num_rows for fragment in self._fragments]
        self._bounds = list(itertools.accumulate(rows, initial=0))  # the first row of each fragment, and the end
        self._schema = pa.schema([(name, schema.field(name).type) for name in columns if is_flat])
        fields = {field.name(): field for field in dataset.lance_schema.fields()}
        self._fields = {name: fields[name] for name in columns if is_flat}
        self._parts: dict[int, list[_Part] | None] = {}  # by fragment, after it was examined
        self._idle: deque[tuple[_Part, LanceFileReader]] = deque(maxlen=MOST_IDLE)
        self._lock = threading.Lock()

    def read(self, first: int, rows: int) -> pa.Table | None:
        """Reads rows [first, first + rows), counted over all fragments; None if a scan should read them."""
        lowest, highest = (bisect.bisect(self._bounds, row) - 1 for row in (first, first + rows - 1))
        if not rows or highest == len(self._fragments) or highest - lowest >= _MOST_FRAGMENTS:
            return None
        begun = []
        try:
            for number in range(lowest, highest + 1):
                begin, end = self._bounds[number : number + 2]
                parts = self._find_parts(number)
                if parts is None:
                    return None
                count = min(rows, end - first)
                begun.append([self._begin(part, first - begin, count) for part in parts])
                first, rows = first + count, rows - count
            tables = [self._table(of_fragment) for of_fragment in begun]
            return tables[0] if len(tables) == 1 else pa.concat_tables(tables)
        except (RuntimeError, *LANCE_ERRORS):
            self._parts |= dict.fromkeys(range(lowest, highest + 1))  # the scan will raise the right error
            return None

    def _begin(self, part: _Part, start: int, rows: int) -> _Begun:
        reader = self._take(part)
        return part, reader, reader.read_range(start, rows, batch_size=rows)

    def _table(self, begun: list[_Begun]) -> pa.Table:
        columns: dict[str, pa.ChunkedArray] = {}
        for part, reader, results in begun:
            read = results.to_table()
            columns |= dict(zip(read.schema.names, read.columns, strict=True))
            with self._lock:
                self._idle.append((part, reader))
        return pa.Table.from_arrays([columns[name] for name in self._columns], schema=self._schema)

    def _take(self, part: _Part) -> LanceFileReader:
        """Returns a reader that no other thread uses, because a reader serves only one thread at a time."""
        with self._lock:
            for kept in self._idle:
                if kept[0] == part:
                    self._idle.remove(kept)
                    return kept[1]
        return LanceFileReader(part[0], columns=part[1])

    def _find_parts(self, number: int) -> list[_Part] | None:
        """Returns the files that hold a fragment's columns; None if they are not proven to give the same as a scan."""
        if number not in self._parts:
            self._parts[number] = self._prove(self._fragments[number].metadata)
        return self._parts[number]

    def _prove(self, fragment: Any) -> list[_Part] | None:
        if fragment.num_deletions or unknown_parts(fragment):
            return None
        parts, missing = [], set(self._columns)
        for file in fragment.files:
            listed = set(file.fields)
            here = [name for name in self._columns if not listed.isdisjoint(_ids(self._fields[name], file))]
            if not here:
                continue
            if os.path.basename(file.path) != file.path:  # a manifest may name any path; a scan stays inside
                return None
            path = os.path.join(self.dataset.uri, "data", file.path)
            if file.base_id is not None or file.file_major_version != 2 or not os.path.exists(path):
                return None
            reader = LanceFileReader(path)
            schema = reader.metadata().schema
            if reader.num_rows() != fragment.physical_rows or not missing.issuperset(here):
                return None
            if not self._are_same(here, schema, file):
                return None
            missing.difference_update(here)
            parts.append((path, here))
        return None if missing else parts

    def _are_same(self, names: Sequence[str], schema: pa.Schema, file: Any) -> bool:
        """Whether a file's columns of these names have the same fields and types as the dataset's."""
        try:
            counts = [_count(kind, file) for kind in schema.types]
        except NotImplementedError:
            return False
        ids = iter(file.fields)
        found = {
            name: (kind, list(itertools.islice(ids, count)))
            for name, kind, count in zip(schema.names, schema.types, counts, strict=True)
        }
        if len(found) < len(schema.names) or sum(counts) != len(file.fields):
            return False
        types = dict(zip(self._schema.names, self._schema.types, strict=True))
        return all(found.get(name) == (types[name], _ids(self._fields[name], file)) for name in names)


def _names_parents(file: Any) -> bool:
    """Whether a data file also lists fields that contain others. From format 2.1 on, it lists only the innermost."""
    return bool(file.file_minor_version == 0)


def _ids(field: Any, file: Any) -> list[int]:
    """Returns the ids by which `file` lists a field: of its innermost fields; before format 2.1, of all in it."""
    children = [id for child in field.children() for id in _ids(child, file)]
    return [int(field.id()), *children] if _names_parents(file) or not children else children


def _count(kind: pa.DataType, file: Any) -> int:
    """Returns the number of ids that a file lists for a column of a type. Raises NotImplementedError if unknown."""
    if isinstance(kind, pa.BaseExtensionType):
        return _count(kind.storage_type, file)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _names_parents(file) + _count(kind.value_type, file)
    if pa.types.is_struct(kind) and kind.num_fields:
        inside = sum(_count(kind.field(place).type, file) for place in range(kind.num_fields))
        return _names_parents(file) + inside
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    is_fixed = pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind)
    is_bytes = kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    if is_fixed or is_bytes or pa.types.is_dictionary(kind):
        return 1
    raise NotImplementedError(str(kind))
