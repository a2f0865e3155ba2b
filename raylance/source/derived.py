"""Columns that readers make of stored ones: under other names, in other shapes, or looked up by number."""

import abc
import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from raylance.arguments import check_integer, check_name
from raylance.columns import ROW_OFFSET
from raylance.descriptions import Setting
from raylance.environment.shared import Shared
from raylance.errors import BadRowError, ConfigError, DatasetError
from raylance.memory.arrow import wanted_rows
from raylance.orders.permutation import Int64Array
from raylance.source.fields import find_field, is_bytes
from raylance.source.reader import PieceReader, Prepare, RowReader
from raylance.source.retrying import Wanted, always
from raylance.source.storage_options import StorageOptions

T = TypeVar("T")
_MOST_CONSTANT_BYTES = 16_384  # of a value that states hold as text of twice this length
_SHOWN_CONSTANT = 60  # most characters of a value that messages show


class Derived(Setting, abc.ABC):
    """A setting: a column that readers make of stored ones. Pass it to `raylance.dataset` in `columns`.

    Attributes:
        column: Name of the column in batches.
    """

    column: str
    channels: ClassVar[int] = 0
    """Channels of its values, if these are pictures that are decoded by block."""

    @property
    @abc.abstractmethod
    def needs(self) -> tuple[str, ...]:
        """The stored columns of which it is made."""

    def check(self, schema: pa.Schema, uri: str) -> None:
        """Checks that a dataset has what it needs.

        Raises:
            DatasetError: If a column is missing, or has another type.
        """
        for name in self.needs:
            if find_field(schema, name) is None:
                raise DatasetError(
                    f"{type(self).__name__}({self.column!r}) needs the column {name!r}, which {uri!r} does not have; "
                    f"nothing was started. Its columns are {', '.join(schema.names)}."
                )

    def gives_bytes(self, schema: pa.Schema) -> bool:
        """Returns whether its values are bytes, which a decoder may decode."""
        return False


class Maker(Protocol):
    """Makes one column; picklable."""

    def make(self, table: pa.Table, dataset: str) -> pa.ChunkedArray | pa.Array:
        """Makes the column of some rows, which have `_rowoffset`; `dataset` is for errors.

        Raises:
            BadRowError: If a row has no such value.
        """


class Made(Derived):
    """A setting whose column follows from values of the row."""

    @abc.abstractmethod
    def open(self, storage_options: StorageOptions | None) -> Maker:
        """Reads what it needs beside the rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Renamed(Made):
    """A stored column under another name, or with another shape. Pass it to `raylance.dataset` in `columns`; a decoder
    may decode it.

    Attributes:
        column: Name in batches.
        stored: Name in the dataset.
        shape: Shape of each value, at least one axis, for values that are stored as lists, or as lists of lists, of
            this number of numbers; None for values as they are stored.
    """

    column: str
    stored: str
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("column", "stored"):
            check_name(f"Renamed: {name}", getattr(self, name))
        if self.shape is not None:
            owner = f"Renamed({self.column!r}).shape"
            given = self.shape if isinstance(self.shape, list | tuple) and self.shape else (None,)
            object.__setattr__(self, "shape", tuple(check_integer(owner, side, 1) for side in given))

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Derived.needs`."""
        return (self.stored,)

    def gives_bytes(self, schema: pa.Schema) -> bool:
        """See `Derived.gives_bytes`."""
        field = find_field(schema, self.stored)
        return field is not None and is_bytes(field)

    def open(self, storage_options: StorageOptions | None) -> "Renamed":
        """See `Made.open`."""
        return self

    def make(self, table: pa.Table, dataset: str) -> pa.ChunkedArray | pa.Array:
        """See `Maker.make`.

        Raises:
            BadRowError: If a value does not have the shape.
        """
        stored = table[self.stored]
        if self.shape is None:
            return stored
        values: pa.Array = stored.combine_chunks()
        size = math.prod(self.shape)
        while isinstance(values, pa.ExtensionArray) or hasattr(values, "flatten"):
            if isinstance(values, pa.ExtensionArray):
                values = values.storage
            elif isinstance(values, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
                values = values.flatten()
            else:
                break
        if len(values) != size * len(stored) or values.null_count:
            lengths = [0 if each is None else np.asarray(each, dtype=object).size for each in stored.to_pylist()]
            wrong = [row for row, length in enumerate(lengths) if length != size] or [0]
            row = int(table[ROW_OFFSET][wrong[0]].as_py())
            raise BadRowError(self.column, row, f"its {self.stored!r} does not have shape {self.shape}", dataset)
        kind = pa.fixed_shape_tensor(values.type, self.shape)
        return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(values, size))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Constant(Made):
    """A column that has one value in all rows, such as one that a dataset of a mixture lacks. In `columns` of
    `raylance.dataset`, a dict of values by name gives such columns.

    Attributes:
        column: Name in batches.
        content: The value as an Arrow stream of one row.
    """

    column: str
    content: bytes

    @classmethod
    def of(cls, column: str, value: Any) -> "Constant":
        """Makes the column of a number, a text, bytes, a scalar of pyarrow, or an array: one axis becomes a list of a
        fixed size, several a tensor.

        Raises:
            ConfigError: If the name is not a text; if Arrow cannot hold the value; if it has nulls, or is larger than
                16 KiB.
        """
        check_name("columns=: the name of a value", column)
        value = value.item() if isinstance(value, np.ndarray) and not value.ndim else value
        try:
            if isinstance(value, np.ndarray):
                flat = pa.array(value.ravel())
                if flat.null_count or (value.ndim > 1 and not pa.types.is_primitive(flat.type)):
                    raise ValueError(f"an array of {flat.type} with {value.ndim} axes and {flat.null_count} nulls")
                one: pa.Array = pa.FixedSizeListArray.from_arrays(flat, value.size)
                if not value.size:
                    one = pa.array([[]], pa.list_(flat.type))
                elif value.ndim > 1:
                    one = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, value.shape), one)
            else:
                scalar = value if isinstance(value, pa.Scalar) else None
                one = pa.array([value if scalar is None else scalar.as_py()], None if scalar is None else scalar.type)
            if one.null_count:
                raise ValueError("a null")
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"columns=: {column!r} has the value {value!r:.200}, which no column can have ({error}). Give a "
                "number, a text, bytes, a NumPy array or a scalar of pyarrow."
            ) from error
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([(column, one.type)])) as stream:
            stream.write_table(pa.table([one], [column]))
        content = sink.getvalue().to_pybytes()
        if len(content) > _MOST_CONSTANT_BYTES:
            raise ConfigError(
                f"columns=: the value of {column!r} takes {len(content):,} bytes of each checkpoint, and at most "
                f"{_MOST_CONSTANT_BYTES:,} are allowed. Give an image as the bytes of its file, and decode it."
            )
        return cls(column, content)

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Derived.needs`."""
        return ()

    def __repr__(self) -> str:
        values = self._value()
        shown = repr(values[0].as_py())
        if len(shown) > _SHOWN_CONSTANT:
            key = hashlib.blake2b(self.content, digest_size=4).hexdigest()
            shown = f"<{values.type}, {len(self.content):,} bytes, {key}>"
        return f"{type(self).__name__}({self.column!r}, {shown})"

    def _value(self) -> pa.ChunkedArray:
        return pa.ipc.open_stream(self.content).read_all().column(0)

    def gives_bytes(self, schema: pa.Schema) -> bool:
        """See `Derived.gives_bytes`."""
        return is_bytes(pa.field(self.column, self._value().type))

    def open(self, storage_options: StorageOptions | None) -> "Constant":
        """See `Made.open`."""
        return self

    def make(self, table: pa.Table, dataset: str) -> pa.ChunkedArray | pa.Array:
        """See `Maker.make`."""
        return self._value().take(pa.array(np.zeros(len(table), dtype=np.int64)))


@dataclasses.dataclass(frozen=True, slots=True)
class LookedUp:
    """Makes a column of texts that rows name by their number.

    Attributes:
        column: Name in batches.
        number: The stored column of numbers.
        values: The texts.
    """

    column: str
    number: str
    values: Shared[pa.Array]

    def make(self, table: pa.Table, dataset: str) -> pa.ChunkedArray | pa.Array:
        """See `Maker.make`."""
        numbers, values = table[self.number].to_numpy(), self.values.get()
        wrong = np.flatnonzero(~((numbers >= 0) & (numbers < len(values))))
        if len(wrong):
            row = int(table[ROW_OFFSET][int(wrong[0])].as_py())
            reason = f"its {self.number!r} is {numbers[wrong[0]]}, and there are {len(values)} texts, numbered from 0"
            raise BadRowError(self.column, row, reason, dataset)
        return values.take(pa.array(numbers.astype(np.int64)))


class DerivingReader(PieceReader):
    """Reads rows together with columns that are made of them. Several threads may use one reader at once."""

    def __init__(self, reader: RowReader, makers: Mapping[str, Maker], drops: Sequence[str], dataset: str) -> None:
        """Takes a reader of stored rows, what makes columns by name, the stored columns that are then left out, and the
        name of the dataset for errors.
        """
        self._reader, self._makers, self._drops, self._dataset = reader, makers, [ROW_OFFSET, *drops], dataset

    def read_pieces(
        self, offsets: Int64Array, prepare: Prepare[T], add: Callable[[T], bool], is_wanted: Wanted = always
    ) -> None:
        """See `RowReader.read_pieces`."""

        def with_columns(first: int, table: pa.Table, places: Int64Array | None) -> T:
            return prepare(first, self._with_columns(wanted_rows(table, places)), None)

        self._reader.read_pieces(offsets, with_columns, add, is_wanted)

    def close(self) -> None:
        """See `RowReader.close`."""
        self._reader.close()

    def _with_columns(self, table: pa.Table) -> pa.Table:
        whole = table.drop_columns(self._drops)
        for name, maker in self._makers.items():
            whole = whole.append_column(name, maker.make(table, self._dataset))
        return whole.append_column(ROW_OFFSET, table[ROW_OFFSET])
