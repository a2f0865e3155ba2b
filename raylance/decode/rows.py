"""Owns what happens to rows between reading and collating: columns decoded, the user's transform applied; reads
nothing, and draws nothing from a global generator.
"""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import COMPONENT_SHIFT, DRAW, OFFSET_MASK, ROW_OFFSET, TRANSFORM, VALID, describe_rows
from raylance.decode.arrays import blank_row, is_bytes, to_arrow
from raylance.decode.decoder import Decoder, RowDecoder, check_decoder_output
from raylance.decode.transforms import Transform, Transformer, TransformError, describe_exception, error_of_no_row
from raylance.errors import BadRowError, ConfigError, DatasetError, HelperError
from raylance.observe import Receipt, clock
from raylance.orders.permutation import BoolArray, UInt64Array, derive_key, mix64, subkeys, uniform
from raylance.source.memory import own_memory, take_rows

BadRows = list[tuple[int, str, str]]  # offset with component bits, column, reason

_BAD_ROWS = 8  # most bad rows of one table that are named,
_REASON = 200  # with so many characters each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """What happens to rows between reading and collating; picklable, and opened where it happens.

    Attributes:
        mask_bad_rows: Whether a row that cannot be decoded becomes zeros with `_valid` False, instead of an error.
        max_bad_rows: How many of the rows that a rank is handed may be bad: a count of different rows, or a fraction.
            None for any number.
        transform: As `raylance.dataset` takes it. A row on which it fails by itself is a bad row.
        blank: One row of zeros, of the schema that the transform returned at the opening. Every piece is cast to that
            schema, and the row replaces one that the transform fails on. The transform is not called for no row.
        datasets: Names of the dataset for errors; in a mixture, of the datasets by component.
    """

    decoders: tuple[Decoder, ...]
    seed: int
    mask_bad_rows: bool
    max_bad_rows: int | float | None = None
    transform: Transform | None = None
    blank: pa.Table | None = None
    datasets: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are decoded."""
        return [decoder.column for decoder in self.decoders]

    @property
    def channels_last(self) -> frozenset[str]:
        """Names of the decoded columns whose channels torch batches have first."""
        return frozenset(decoder.column for decoder in self.decoders if decoder.channels_last)

    @property
    def row_bytes(self) -> int:
        """Bytes of the decoded columns of a row."""
        return sum(math.prod(decoder.shape) * np.dtype(decoder.dtype).itemsize for decoder in self.decoders)

    def open(self) -> "OpenDecoding":
        """Opens it in this process, and refuses decoders with a shape, a dtype or draws that no column can have."""
        return OpenDecoding(self)


class OpenDecoding:
    """Decodes and transforms tables; keeps output memory between calls, and a row decoder for each thread."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        # Columns that others follow come first: a damaged image is not the fault of its mask.
        ordered = sorted(decoding.decoders, key=lambda decoder: decoder.like is not None)
        self._columns = [_Column(decoder) for decoder in ordered]
        self._transformer = Transformer(decoding.transform, decoding.blank, decoding.datasets)

    def apply(
        self, table: pa.Table, epoch: int, executor: Executor | None = None, *, own_memory: bool = False
    ) -> tuple[pa.Table, Receipt]:
        """Decodes and transforms the rows of a table, in the threads of `executor`, or in this one.

        The table has the encoded columns and `_rowoffset`; with a transform, all columns; where rows repeat, `_draw`
        too. The result has `_valid` (bool) in place of `_rowoffset` and `_draw`. Without `own_memory`, the next call
        overwrites it: copy it (as sending it through Ray does) before then.

        Raises:
            BadRowError: For a bad row, unless bad rows are masked.
            ConfigError: For a row that the settings cannot decode, and a transform that does not return a batch.
            HelperError: If the transform fails on rows together only.
        """
        if executor is None and table.num_rows:
            for column in self._columns:  # not counted as decoding: a model is loaded once
                with contextlib.suppress(ConfigError):  # decoding a row raises it again, and names the row
                    _ = column.local.decode_into
        begin, fallbacks, bad_rows = clock.now(), -self.fallbacks, BadRows()
        made, valid = self._decode(table, epoch, bad_rows, executor, own_memory=own_memory)
        blank = self._decoding.blank
        if blank is not None and table.num_rows == 0:
            made = blank.slice(0, 0)
        elif self._decoding.transform is not None:
            made = self._transform(made, table, epoch, valid, bad_rows)
        hidden = [name for name in (ROW_OFFSET, DRAW) if name in made.column_names]
        done = made.drop_columns(hidden).append_column(VALID, pa.array(valid))
        return done, Receipt(
            nbytes=done.nbytes,
            decode_s=clock.now() - begin,
            fallback_rows=fallbacks + self.fallbacks,
            bad_rows=tuple(bad_rows[:_BAD_ROWS]),
        )

    @property
    def fallbacks(self) -> int:
        """Rows so far that a fast codec left to a slow one."""
        return sum(int(getattr(opened, "fallbacks", 0)) for column in self._columns for opened in column.opened)

    def _decode(
        self,
        table: pa.Table,
        epoch: int,
        bad_rows: BadRows,
        executor: Executor | None = None,
        *,
        own_memory: bool = True,
    ) -> tuple[pa.Table, BoolArray]:
        """Decodes columns; returns also which rows are good, bool (n,), and adds the others to `bad_rows`.

        A transform may change its input in place, but not `table`: some of its rows may have to be decoded again.
        """
        encoded, valid = table, np.ones(table.num_rows, dtype=np.bool_)
        for column in self._columns:
            out, name = column.buffer(table.num_rows, own_memory), column.decoder.column
            decode_row = self._row_decoder(column, encoded, epoch, out, valid, bad_rows)
            for _ in (map if executor is None else executor.map)(decode_row, range(table.num_rows)):
                pass
            table = table.set_column(table.column_names.index(name), name, to_arrow(out))
        return (table if self._decoding.transform is None else self._copy_plain(table)), valid

    def _copy_plain(self, table: pa.Table) -> pa.Table:
        """Copies the columns that were not decoded, and that a transform could change in place."""
        kept = {*self._decoding.columns, ROW_OFFSET, DRAW}
        names = [field.name for field in table.schema if field.name not in kept and not is_bytes(field.type)]
        copied = own_memory(table.select(names))
        return pa.table({name: (copied if name in names else table)[name] for name in table.column_names})

    def _transform(
        self, decoded: pa.Table, encoded: pa.Table, epoch: int, valid: BoolArray, bad_rows: BadRows
    ) -> pa.Table:
        """Transforms decoded rows. Where that fails, each row is tried by itself: those that fail again are bad rows,
        for which `valid` is cleared.

        Raises:
            HelperError: If the transform fails on rows together, and on none of them by itself.
        """
        try:
            return self._call(decoded, epoch)
        except TransformError as error:
            failed = error
        errors = self._errors_of_rows(encoded, epoch, failed)
        for row, why in errors.items():
            if valid[row]:  # else decoding has added it
                self._add_bad(bad_rows, TRANSFORM, int(encoded[ROW_OFFSET][row].as_py()), why)
        valid[list(errors)] = False
        good, blank = np.setdiff1d(np.arange(len(encoded)), list(errors)), self._decoding.blank
        if not len(good):
            if blank is None:
                raise ConfigError(
                    f"transform fails on each of the {len(encoded)} rows sampled at the opening, "
                    f"{self._transformer.describe(encoded)} ({describe_exception(failed.error)}); nothing was started. "
                    "Correct the transform."
                ) from failed.error
            return blank.take(np.zeros(len(encoded), dtype=np.int64))
        rest = take_rows(encoded, good)
        try:
            if not errors:
                raise failed
            made = self._call(self._decode(rest, epoch, [])[0], epoch)
        except TransformError as together:
            raise HelperError(
                f"transform fails on {self._transformer.describe(rest)} together "
                f"({describe_exception(together.error)}), and on none of these {len(rest)} rows by itself; the epoch "
                "stops here. It gets pieces of batches, of any number of rows: what it does to a row must not depend "
                "on the others."
            ) from together.error
        places = np.full(len(encoded), len(made))
        places[good] = np.arange(len(made))
        return take_rows(pa.concat_tables([made, blank_row(made) if blank is None else blank]), places)

    def _errors_of_rows(self, encoded: pa.Table, epoch: int, failed: TransformError) -> dict[int, Exception]:
        """Tries the transform on each row by itself, after it failed on all together; its errors by row."""
        if len(encoded) == 1:
            return {0: failed.error}
        errors = {}
        for row in range(len(encoded)):
            try:
                self._call(self._decode(encoded.slice(row, 1), epoch, [])[0], epoch)
            except TransformError as alone:
                errors[row] = alone.error
                if not self._decoding.mask_bad_rows:
                    break
        return errors

    def _call(self, table: pa.Table, epoch: int) -> pa.Table:
        return self._transformer(table, self._keys(table, epoch, "transform"))

    def _keys(self, table: pa.Table, epoch: int, *purpose: str) -> UInt64Array:
        """One key for each row; where rows repeat, one for each draw, or all copies of a row would look the same."""
        keys = subkeys(derive_key(self._decoding.seed, epoch, *purpose), table[ROW_OFFSET].to_numpy())
        return mix64(keys ^ subkeys(derive_key("draw"), table[DRAW].to_numpy())) if DRAW in table.column_names else keys

    def _row_decoder(
        self,
        column: "_Column",
        table: pa.Table,
        epoch: int,
        out: npt.NDArray[Any],
        valid: BoolArray,
        bad_rows: BadRows,
    ) -> Callable[[int], None]:
        """Returns a function that decodes row i of a column to `out[i]`; of a bad row it clears `valid[i]`."""
        decoder, offsets = column.decoder, table[ROW_OFFSET].to_numpy()
        name, like = decoder.column, decoder.like
        draws = uniform(self._keys(table, epoch, "augment", like or name), decoder.draws)  # (rows, draws)
        encoded, others = _read_only(table[name]), None if like is None else _read_only(table[like])

        def decode_row(row: int) -> None:
            if like is not None and not valid[row]:  # the column that it follows may be the bad one
                out[row] = 0
                return
            decode_into, check_like = column.local.decode_into, column.local.check_like
            try:
                value = encoded[row]
                if value is None:
                    raise ValueError("is null")
                if others is not None and check_like is not None:
                    if (other := others[row]) is None:
                        raise ValueError(f"has nothing to be like: {like!r} is null")
                    check_like(value, other)
                made = decode_into(value, draws[row], out[row, ...])  # an array also where a row is a number
                if made is not None:
                    raise ConfigError(f"was returned as {type(made).__name__}: decode_into must write it into `out`.")
            except ConfigError as error:  # a good row that the settings do not fit
                rows = describe_rows(offsets[row : row + 1], self._decoding.datasets)
                raise ConfigError(f"column {name!r} of {rows} {error}") from error
            except (ImportError, MemoryError) as error:
                raise error_of_no_row(f"{type(decoder).__name__}({name!r}) cannot decode", error) from error
            except Exception as error:  # a codec may raise anything for damaged bytes
                self._add_bad(bad_rows, name, int(offsets[row]), error)
                out[row] = 0
                valid[row] = False

        return decode_row

    def _add_bad(self, bad_rows: BadRows, column: str, offset: int, error: Exception) -> None:
        """Adds a bad row, or raises for it where bad rows are not masked."""
        reason = describe_exception(error)
        if not self._decoding.mask_bad_rows:
            dataset = next(iter(self._decoding.datasets[offset >> COMPONENT_SHIFT :]), None)
            name = None if column == TRANSFORM else column
            raise BadRowError(name, offset & OFFSET_MASK, reason, dataset) from error
        bad_rows.append((offset, column, reason[:_REASON]))


class _Column:
    """A column that is decoded: its output memory, and the row decoder of each thread."""

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
    """The row decoder of the current thread, opened at its first use; all of them end with this object."""

    def __init__(self, decoder: Decoder, all_opened: list[RowDecoder]) -> None:
        try:
            opened = decoder.open()
            self.decode_into, self.check_like = opened.decode_into, getattr(opened, "check_like", None)
            all_opened.append(opened)
        except Exception as error:
            raise ConfigError(
                f"{type(decoder).__name__}({decoder.column!r}) cannot be opened ({describe_exception(error)}): "
                "open() must return an object with decode_into(encoded, draws, out)."
            ) from error


def _read_only(column: pa.ChunkedArray) -> list[memoryview | None]:
    """The bytes of each row, read-only: Arrow's memory may be writable, and rows may be decoded again."""
    return [memoryview(value.as_buffer()).cast("B").toreadonly() if value.is_valid else None for value in column]


def resolve_decoder(decoder: Decoder, probe: pa.Table) -> Decoder:
    """Fills what a decoder leaves open from a few rows with `_rowoffset`.

    A damaged row among good ones is left to `on_bad_row`.

    Raises:
        ConfigError: If a decoder does not fit good rows, or its `resolve` returns something else.
        DatasetError: If none of the rows can be decoded.
    """
    failures: list[Exception] = []
    for row in range(probe.num_rows):
        try:
            encoded = probe[decoder.column][row].as_py()
            if encoded is None:
                raise ValueError("is null")
            resolved = decoder.resolve(memoryview(encoded))
            if not isinstance(resolved, Decoder) or resolved.column != decoder.column:
                raise ConfigError(f"{decoder!r}.resolve() gave {resolved!r}: it must return a decoder of its column.")
            Decoding(decoders=(resolved,), seed=0, mask_bad_rows=False).open().apply(probe.slice(row, 1), 0)
            return resolved
        except ConfigError:
            raise
        except Exception as error:  # a codec may raise anything for damaged bytes; another row may be good
            failures.append(error)
    raise DatasetError(
        f"column {decoder.column!r} holds no {decoder.content}: none of {len(failures)} sampled rows can be decoded "
        f"(the first: {describe_exception(failures[0])}); nothing was started. Name a column of {decoder.content} in "
        "decode=."
    ) from failures[0]
