"""Owns what happens to rows between reading and collating: columns decoded, the user's transform applied; reads
nothing, and draws nothing from a global generator.
"""

import dataclasses
import math
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import COMPONENT, COMPONENT_SHIFT, DRAW, OFFSET_MASK, ROW_OFFSET, SEED, VALID, tell_rows
from raylance.decode.arrays import NumpyBatch, to_arrow, to_numpy
from raylance.decode.decoder import Decoder, RowDecoder, check_decoder_output
from raylance.errors import BadRowError, ConfigError, DatasetError
from raylance.orders.permutation import BoolArray, UInt64Array, derive_key, mix64, subkeys, uniform
from raylance.telemetry import Receipt

_OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>")  # which Pillow names, and nobody knows
_BAD_ROWS = 8  # of one piece of work that are named,
_REASON = 200  # in so many characters

Transform = Callable[[NumpyBatch], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """What happens to rows between reading and collating; picklable, and opened where it happens.

    Attributes:
        mask_bad_rows: Whether a row that cannot be decoded becomes zeros with `_valid` False, instead of an error.
        transform: The user's function, or None. It gets a dict of arrays by column, as `iter_batches` gives them, with
            `_rowoffset` (int64) and `_seed` (uint64, of the row, the epoch and the seed: for `numpy.random.default_rng`
            or `torch.Generator`), which it may change in place, and returns such a dict with as many rows; a pyarrow
            array says what type a column is. It sees pieces of batches, so what it does to a row must not depend on
            the others.
        transformed: Schema of what the transform returned at the opening, which every piece is cast to; it is never
            called for a step in which a rank has no row.
        datasets: What errors call the dataset; in a mixture, the datasets by component.
    """

    decoders: tuple[Decoder, ...]
    seed: int
    mask_bad_rows: bool
    transform: Transform | None = None
    transformed: pa.Schema | None = None
    datasets: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are decoded."""
        return [decoder.column for decoder in self.decoders]

    @property
    def channels_last(self) -> frozenset[str]:
        """Names of those whose channels torch batches have first."""
        return frozenset(decoder.column for decoder in self.decoders if decoder.channels_last)

    @property
    def row_bytes(self) -> int:
        """Bytes of the decoded columns of a row."""
        return sum(math.prod(decoder.shape) * np.dtype(decoder.dtype).itemsize for decoder in self.decoders)

    def open(self) -> "OpenDecoding":
        """Opens it in this process; refuses a decoder that says of itself what no column can have."""
        return OpenDecoding(self)


class OpenDecoding:
    """Decodes and transforms tables; holds output memory from call to call, and row decoders of the threads."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._columns = [_Column(decoder) for decoder in decoding.decoders]
        self._bad_rows: list[tuple[int, str, str]] = []  # masked since the last call: offset, column, why

    def apply(
        self, table: pa.Table, epoch: int, executor: Executor | None = None, *, own_memory: bool = False
    ) -> tuple[pa.Table, Receipt]:
        """Decodes a table of the encoded columns and `_rowoffset`; with a transform, of all columns; where rows repeat,
        of `_draw` too. Adds `_valid` (bool). An executor lends its threads.

        Unless it shall have memory of its own, the next call overwrites the result: copy it (as sending it through Ray
        does) before then.
        """
        begin = time.perf_counter()
        transform, transformed = self._decoding.transform, self._decoding.transformed
        valid, fallbacks = np.ones(table.num_rows, dtype=np.bool_), -self.fallbacks
        for column in self._columns:
            out, name = column.buffer(table.num_rows, own_memory), column.decoder.column
            decode_row = self._row_decoder(column, table, epoch, out, valid)
            for _ in (map if executor is None else executor.map)(decode_row, range(table.num_rows)):
                pass
            table = table.set_column(table.column_names.index(name), name, to_arrow(out))
        if transformed is not None and table.num_rows == 0:
            table = pa.Table.from_batches([], schema=transformed)
        elif transform is not None:
            arrays = to_numpy(table)
            arrays.pop(DRAW, None)
            arrays[ROW_OFFSET] = table[ROW_OFFSET].to_numpy() & OFFSET_MASK  # the row's own, and memory of its own
            arrays[SEED] = self._keys(table, epoch, "transform")
            table = self._to_table(transform(arrays), table)
        hidden = [name for name in (ROW_OFFSET, DRAW) if name in table.column_names]
        done = table.drop_columns(hidden).append_column(VALID, pa.array(valid))
        seconds = time.perf_counter() - begin
        bad, self._bad_rows = tuple(self._bad_rows[:_BAD_ROWS]), []
        fallbacks += self.fallbacks
        return done, Receipt(nbytes=done.nbytes, decode_s=seconds, fallback_rows=fallbacks, bad_rows=bad)

    @property
    def fallbacks(self) -> int:
        """Rows so far that a fast codec left to a slow one."""
        return sum(int(getattr(opened, "fallbacks", 0)) for column in self._columns for opened in column.opened)

    def _keys(self, table: pa.Table, epoch: int, *purpose: str) -> UInt64Array:
        """One key for each row; where rows repeat, one for each draw, or all copies of a row would look the same."""
        keys = subkeys(derive_key(self._decoding.seed, epoch, *purpose), table[ROW_OFFSET].to_numpy())
        return mix64(keys ^ subkeys(derive_key("draw"), table[DRAW].to_numpy())) if DRAW in table.column_names else keys

    def _row_decoder(
        self, column: "_Column", table: pa.Table, epoch: int, out: npt.NDArray[Any], valid: BoolArray
    ) -> Callable[[int], None]:
        """A function that decodes row i of a column to `out[i]`, and clears `valid[i]` where a bad row is masked."""
        name, datasets, offsets = column.decoder.column, self._decoding.datasets, table[ROW_OFFSET].to_numpy()
        draws = uniform(self._keys(table, epoch, "augment", name), column.decoder.draws)  # (rows, draws)
        # Read-only: Arrow's memory is not always, and these rows may be decoded again.
        encoded = [
            memoryview(value.as_buffer()).cast("B").toreadonly() if value.is_valid else None for value in table[name]
        ]

        def decode_row(row: int) -> None:
            decode_into = column.local.decode_into
            try:
                value = encoded[row]
                if value is None:
                    raise ValueError("is null")
                made = decode_into(value, draws[row], out[row, ...])  # an array also where a row is a number
                if made is not None:
                    raise ConfigError(f"was returned as {type(made).__name__}: decode_into must write it into `out`.")
            except ConfigError as error:  # a good row, which the settings have no place for
                rows = tell_rows(offsets[row : row + 1], datasets)
                raise ConfigError(f"column {name!r} of {rows} {error}") from error
            except ImportError as error:  # here no row can be decoded, good or bad
                raise ConfigError(
                    f"{type(column.decoder).__name__}({name!r}) cannot decode on {socket.gethostname()} "
                    f"({type(error).__name__}: {error}): no row is bad for that. Install it wherever helpers run."
                ) from error
            except Exception as error:  # whatever a codec raises on damaged bytes, it is this row that is bad
                offset = int(offsets[row])
                reason = _OBJECT.sub("", f"{type(error).__name__}: {error}").strip()
                if not self._decoding.mask_bad_rows:
                    dataset = next(iter(datasets[offset >> COMPONENT_SHIFT :]), None)
                    raise BadRowError(name, offset & OFFSET_MASK, reason, dataset) from error
                out[row] = 0
                valid[row] = False
                self._bad_rows.append((offset, name, reason[:_REASON]))

        return decode_row

    def _to_table(self, made: Any, given: pa.Table) -> pa.Table:
        """What the transform made of a table; its columns are those of the opening, and of their types, but there."""
        schema = self._decoding.transformed
        if not isinstance(made, dict) or not made:
            raise ConfigError(f"transform returned {type(made).__name__}: it must return a dict of arrays by column.")
        made = {name: values for name, values in made.items() if name not in (ROW_OFFSET, SEED)}
        added = sorted({COMPONENT, DRAW, VALID} & set(made))
        if added or not made:
            raise ConfigError(
                f"transform returned {', '.join(added) or 'no column of its own'}: {VALID}, {COMPONENT} and {DRAW} are "
                f"columns that raylance adds, {ROW_OFFSET} and {SEED} are left out of what it returns. Return columns "
                "under names of their own."
            )
        names = list(made) if schema is None else schema.names
        if set(names) != set(made):
            raise ConfigError(
                f"transform returned the columns {', '.join(made)} for {self._tell(given)}, at the opening it returned "
                f"{', '.join(names)}; the epoch stops here, because pieces of a step would not fit together. Return "
                "the same columns always."
            )
        return pa.table({name: self._to_column(name, made[name], given) for name in names})

    def _to_column(self, name: str, values: Any, given: pa.Table) -> pa.Array:
        rows, schema = _length(values), self._decoding.transformed
        if rows != len(given):
            what = type(values).__name__ if rows is None else f"{rows} rows"
            raise ConfigError(
                f"transform returned {what} in {name!r} for {len(given)} rows: rows lost or added here would make "
                "ranks uneven. Return one for each; filter rows with filter= instead."
            )
        kind = None if schema is None else schema.field(name).type
        found = type(values).__name__
        try:
            array = _arrow(values)
            found = str(array.type)
            if kind is None and _is_untold(array.type):
                kind = given[name].type if name in given.column_names else None
                if kind is None or _is_untold(kind):
                    raise ConfigError(
                        f"transform returned only None or empty lists in {name!r} for the {rows} rows tried at the "
                        f"opening, which does not tell its type ({found}), and later pieces could be of any; nothing "
                        "was started. Return a pyarrow array, which says it: pa.array(values, pa.string()), say."
                    )
            return array if kind is None else _cast(array, kind)
        except (pa.ArrowException, TypeError) as error:
            raise ConfigError(
                f"transform returned {found} in column {name!r} for {self._tell(given)}, which cannot become "
                f"{'one Arrow type' if kind is None else f'{kind}, as at the opening'} ({error}); it stops here, "
                "because pieces of a step must be of one type. Return the same type always: values.astype(…), or a "
                "pyarrow array such as pa.array(values, pa.string())."
            ) from error

    def _tell(self, table: pa.Table) -> str:
        return tell_rows(table[ROW_OFFSET].to_numpy(), self._decoding.datasets)


class _Column:
    """A column that is decoded: its output memory, and the row decoders of the threads."""

    def __init__(self, decoder: Decoder) -> None:
        check_decoder_output(decoder)
        self.decoder = decoder
        self.opened: list[RowDecoder] = []  # of all threads
        self.local = _Local(decoder, self.opened)
        self._buffer: npt.NDArray[Any] = np.empty((0, *decoder.shape), decoder.dtype)

    def buffer(self, rows: int, own_memory: bool) -> npt.NDArray[Any]:
        """Memory for so many rows, (rows, *shape)."""
        if own_memory:
            return np.empty((rows, *self._buffer.shape[1:]), self._buffer.dtype)
        if len(self._buffer) < rows:
            self._buffer = self.buffer(rows, True)
        return self._buffer[:rows]


class _Local(threading.local):
    """The row decoder of the thread that asks, opened when it asks first; all of them go with this object."""

    def __init__(self, decoder: Decoder, all_opened: list[RowDecoder]) -> None:
        try:
            opened = decoder.open()
            self.decode_into = opened.decode_into
            all_opened.append(opened)
        except Exception as error:
            raise ConfigError(
                f"{type(decoder).__name__}({decoder.column!r}) cannot be opened ({type(error).__name__}: {error}): "
                "open() must return an object with decode_into(encoded, draws, out)."
            ) from error


def settle(decoder: Decoder, probe: pa.Table) -> Decoder:
    """Settles what a decoder leaves open, by a few rows with `_rowoffset`.

    A damaged row among good ones is left to `on_bad_row`; a column of which no sampled row decodes is refused.
    """
    failures: list[Exception] = []
    for row in range(probe.num_rows):
        try:
            encoded = probe[decoder.column][row].as_py()
            if encoded is None:
                raise ValueError("is null")
            settled = decoder.settle(memoryview(encoded))
            if not isinstance(settled, Decoder) or settled.column != decoder.column:
                raise ConfigError(f"{decoder!r}.settle() gave {settled!r}: it must return a decoder of its column.")
            Decoding(decoders=(settled,), seed=0, mask_bad_rows=False).open().apply(probe.slice(row, 1), 0)
            return settled
        except ConfigError:
            raise
        except Exception as error:  # whatever a codec raises on damaged bytes; another row may be good
            failures.append(error)
    raise DatasetError(
        f"column {decoder.column!r} holds no {decoder.content}: of {len(failures)} rows sampled none decodes (the "
        f"first says: {failures[0]}); nothing was started. Name a column of {decoder.content} in decode=."
    ) from failures[0]


def _length(values: Any) -> int | None:
    """Rows of a column, or None for what is no column."""
    try:
        return None if isinstance(values, str | bytes) else len(values)
    except TypeError:
        return None


def _is_untold(kind: pa.DataType) -> bool:
    """Whether a type was inferred from nothing but None or empty lists, in it or somewhere inside."""
    return pa.types.is_null(kind) or any(_is_untold(kind.field(index).type) for index in range(kind.num_fields))


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array as another type, where no value is lost; tensors of one shape by their numbers."""
    if array.type == kind:
        return array
    tensors = isinstance(kind, pa.FixedShapeTensorType) and isinstance(array.type, pa.FixedShapeTensorType)
    if tensors and (array.type.shape, array.type.permutation) == (kind.shape, kind.permutation):
        return pa.ExtensionArray.from_storage(kind, array.storage.cast(kind.storage_type))
    return array.cast(kind)


def _arrow(values: Any) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    array: npt.NDArray[Any] = np.asarray(values) if not isinstance(values, list) else np.array(values, dtype=object)
    if array.dtype == object or array.dtype.kind in "US":
        return pa.array(array.tolist())
    return to_arrow(array)
