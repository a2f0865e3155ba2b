"""Owns the steps between reading and collating: decoding of columns, and the user's transform; never reads storage, and
never draws from a global generator.
"""

import contextlib
import dataclasses
import math
import traceback
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from raylance.columns import DRAW, ROW_OFFSET, TRANSFORM, VALID, dataset_of, describe_rows, split_offsets
from raylance.decode.arrays import blank_row, is_bytes
from raylance.decode.decoder import Decoder, Draws, RaggedDecoder, is_on_device, is_users
from raylance.decode.opened import open_columns
from raylance.decode.transforms import (
    Transform,
    Transformer,
    TransformError,
    describe_exception,
    error_of_no_row,
    place_of,
)
from raylance.errors import BadRowError, ConfigError, DatasetError, HelperError
from raylance.observe import Receipt, clock
from raylance.orders.permutation import UInt64Array, derive_key, mix64, subkeys, uniform
from raylance.source.memory import own_memory, take_rows

BadRows = list[tuple[int, str, str]]  # offset with component bits, column, reason

_BAD_ROWS = 8  # most bad rows of one table that are named
_REASON = 200  # most characters of the reason for each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Settings of decoding and transform; picklable, and opened in the process that decodes.

    Attributes:
        mask_bad_rows: Whether a row that cannot be decoded becomes zeros with `_valid` False, instead of an error.
        max_bad_rows: Most bad rows among those handed to a rank: a number of different rows, or a fraction. None for no
            limit.
        transform: As in `raylance.dataset`. A row on which it fails alone is a bad row.
        blank: One row of zeros, with the schema that the transform returned at the opening. Every piece is cast to that
            schema, and the row replaces each row on which the transform fails. The transform never gets an empty table.
        datasets: Name of the dataset for errors; in a mixture, names of the datasets by component.
        ragged_bytes: Bytes of the ragged columns of one row, the mean over the rows sampled at the opening.
    """

    decoders: tuple[Decoder, ...]
    seed: int
    mask_bad_rows: bool
    max_bad_rows: int | float | None = None
    transform: Transform | None = None
    blank: pa.Table | None = None
    datasets: tuple[str, ...] = ()
    ragged_bytes: float = 0.0

    @property
    def columns(self) -> list[str]:
        """Names of the columns that decoders read."""
        return list(dict.fromkeys(decoder.column for decoder in self.decoders))

    @property
    def names(self) -> list[str]:
        """Names of the decoded columns."""
        return [decoder.output_name for decoder in self.decoders]

    @property
    def channels_last(self) -> frozenset[str]:
        """Names of decoded columns whose channels come first in torch batches; they have three axes or more."""
        return frozenset(each.output_name for each in self.decoders if each.channels_last and len(each.shape) > 2)

    @property
    def in_helpers(self) -> "Decoding | None":
        """The part done in decode actors; None if there is none."""
        decoders = tuple(decoder for decoder in self.decoders if not is_on_device(decoder))
        return dataclasses.replace(self, decoders=decoders) if decoders or self.transform is not None else None

    @property
    def on_device(self) -> "Decoding | None":
        """The part done on the trainer's device; None if there is none."""
        decoders = tuple(decoder for decoder in self.decoders if is_on_device(decoder))
        return dataclasses.replace(self, decoders=decoders, transform=None, blank=None) if decoders else None

    @property
    def ragged(self) -> list[str]:
        """Names of the decoded columns whose rows differ in length."""
        return [decoder.output_name for decoder in self.decoders if isinstance(decoder, RaggedDecoder)]

    @property
    def row_bytes(self) -> float:
        """Bytes of one row's decoded columns."""
        fixed = [decoder for decoder in self.decoders if not isinstance(decoder, RaggedDecoder)]
        sizes = (math.prod(decoder.shape) * np.dtype(decoder.dtype).itemsize for decoder in fixed)
        return sum(sizes) + self.ragged_bytes

    def delivered(self, columns: Sequence[str]) -> list[str]:
        """Names of the columns after decoding, in order; decoded columns take the place of their encoded column."""
        made = {name: [each.output_name for each in self.decoders if each.column == name] for name in self.columns}
        return [name for column in columns for name in made.get(column, [column])]

    def open(self) -> "OpenDecoding":
        """Opens the decoders in this process; refuses a shape, a dtype or draws that no column can have."""
        return OpenDecoding(self)


class OpenDecoding:
    """Decodes and transforms tables; keeps output memory between calls, and the open decoders of each thread."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._columns = open_columns(decoding.decoders)
        self._transformer = Transformer(decoding.transform, decoding.blank, decoding.datasets)

    def apply(
        self,
        table: pa.Table,
        epoch: int,
        executor: Executor | None = None,
        *,
        own_memory: bool = False,
        given_up: str = "",
    ) -> tuple[pa.Table, Receipt]:
        """Decodes and transforms the rows of a table, in the threads of `executor`, or in this one.

        The table has the encoded columns and `_rowoffset`; with a transform, all columns; if rows repeat, also `_draw`.
        The result has `_valid` (bool) in place of `_rowoffset` and `_draw`. Without `own_memory`, the next call
        overwrites the result, so copy it before (sending it through Ray copies it). If `given_up` gives a reason, all
        rows count as bad and are not tried, because trying them has ended a process.

        Raises:
            BadRowError: If a row is bad, unless bad rows are masked.
            ConfigError: If a good row does not fit the settings, or the transform does not return a batch.
            HelperError: If the transform or a batch decoder fails on rows together, but on none alone.
        """
        if executor is None and table.num_rows:
            for column in self._columns:  # not timed as decoding: a model is loaded once
                with contextlib.suppress(ConfigError):  # decoding a row raises it again, and names the row
                    _ = column.opened
        begin, rows = clock.now(), DecodedRows(self._decoding, table, epoch)
        if given_up:
            rows.give_up(given_up)
        made = self._decode(rows, executor, own_memory=own_memory)
        blank = self._decoding.blank
        if blank is not None and (given_up or table.num_rows == 0):
            made = blank.take(np.zeros(table.num_rows, dtype=np.int64))
        elif self._decoding.transform is not None:
            made = self._transform(made, rows)
        hidden = [name for name in (ROW_OFFSET, DRAW) if name in made.column_names]
        done = made.drop_columns(hidden).append_column(VALID, pa.array(rows.valid))
        return done, Receipt(
            nbytes=done.nbytes,
            decode_s=clock.now() - begin,
            fallback_rows=rows.fallbacks,
            bad_rows=rows.named_bad_rows,
        )

    def _decode(self, rows: "DecodedRows", executor: Executor | None = None, *, own_memory: bool = True) -> pa.Table:
        """Decodes columns, and notes bad rows.

        A transform may change its input in place, but not `rows.table`, whose rows may have to be decoded again.
        """
        made: dict[str, pa.Array] = {}
        for column in self._columns:
            made |= column.decode(rows, executor, own_memory=own_memory)
        names = self._decoding.delivered(rows.table.column_names)
        table = pa.table({name: made[name] if name in made else rows.table[name] for name in names})
        return table if self._decoding.transform is None else self._copy_plain(table)

    def _copy_plain(self, table: pa.Table) -> pa.Table:
        """Copies the columns that are not decoded and that a transform could change in place."""
        kept = {*self._decoding.names, ROW_OFFSET, DRAW}
        names = [field.name for field in table.schema if field.name not in kept and not is_bytes(field.type)]
        copied = own_memory(table.select(names))
        return pa.table({name: (copied if name in names else table)[name] for name in table.column_names})

    def _transform(self, decoded: pa.Table, rows: "DecodedRows") -> pa.Table:
        """Transforms decoded rows. If that fails, tries each row alone; rows that fail again are bad.

        Raises:
            HelperError: If the transform fails on rows together, but on none alone.
        """
        try:
            return self._call(decoded, rows)
        except TransformError as error:
            failed = error
        encoded, errors = rows.table, self._errors_of_rows(rows, failed)
        for row, why in errors.items():
            if rows.valid[row]:  # else decoding has added it
                rows.add_bad(row, TRANSFORM, why)
        good, blank = np.setdiff1d(np.arange(len(encoded)), list(errors)), self._decoding.blank
        if not len(good):
            if blank is None:
                raise ConfigError(
                    f"transform fails on each of the {len(encoded)} rows sampled at the opening, "
                    f"{self._transformer.describe(encoded)} ({describe_exception(failed.error)}); nothing was started. "
                    "Correct the transform."
                ) from failed.error
            return blank.take(np.zeros(len(encoded), dtype=np.int64))
        rest = rows.part(take_rows(encoded, good))
        try:
            if not errors:
                raise failed
            made = self._call(self._decode(rest), rest)
        except TransformError as together:
            raise HelperError(
                f"transform fails on {self._transformer.describe(rest.table)} together "
                f"({describe_exception(together.error)}), and on none of these {len(good)} rows by itself; the epoch "
                "stops here. It gets pieces of batches, of any number of rows: what it does to a row must not depend "
                "on the others."
            ) from together.error
        places = np.full(len(encoded), len(made))
        places[good] = np.arange(len(made))
        return take_rows(pa.concat_tables([made, blank_row(made) if blank is None else blank]), places)

    def _errors_of_rows(self, rows: "DecodedRows", failed: TransformError) -> dict[int, Exception]:
        """Tries the transform on each row alone, after it failed on all together; returns errors by row."""
        if len(rows.table) == 1:
            return {0: failed.error}
        errors = {}
        for row in range(len(rows.table)):
            alone_row = rows.part(rows.table.slice(row, 1))
            try:
                self._call(self._decode(alone_row), alone_row)
            except TransformError as alone:
                errors[row] = alone.error
                if not self._decoding.mask_bad_rows:
                    break
        return errors

    def _call(self, table: pa.Table, rows: "DecodedRows") -> pa.Table:
        return self._transformer(table, rows.keys("transform"))


class DecodedRows:
    """The rows of one call, good and bad.

    Attributes:
        table: The columns before decoding.
        valid: Whether each row is good so far, bool (n,).
        bad_rows: The bad rows, in the order in which they were found.
        fallbacks: Rows that a fast method left to a slow one, counted once for each column.
        skips_bad: Whether decoders skip rows already known to be bad.
    """

    def __init__(self, decoding: Decoding, table: pa.Table, epoch: int) -> None:
        self._decoding, self._epoch, self.table = decoding, epoch, table
        self.valid = np.ones(table.num_rows, dtype=np.bool_)
        self.bad_rows, self.fallbacks, self.skips_bad = BadRows(), 0, False

    @property
    def named_bad_rows(self) -> tuple[tuple[int, str, str], ...]:
        """Some of the bad rows, for a receipt."""
        return tuple(self.bad_rows[:_BAD_ROWS])

    def part(self, table: pa.Table) -> "DecodedRows":
        """Some of these rows, to be decoded again."""
        return DecodedRows(self._decoding, table, self._epoch)

    def keys(self, *purpose: str) -> UInt64Array:
        """One key for each row; if rows repeat, one for each draw, so that copies of a row look different."""
        offsets = self.table[ROW_OFFSET].to_numpy()
        keys = subkeys(derive_key(self._decoding.seed, self._epoch, *purpose), offsets)
        if DRAW not in self.table.column_names:
            return keys
        return mix64(keys ^ subkeys(derive_key("draw"), self.table[DRAW].to_numpy()))

    def draws(self, decoder: Decoder) -> Draws:
        """See `raylance.decode.opened.Rows`."""
        return uniform(self.keys("augment", decoder.like or decoder.output_name), decoder.draws)

    def describe(self, rows: Sequence[int]) -> str:
        """Names some of the rows, for an error."""
        return describe_rows(self.table[ROW_OFFSET].to_numpy()[rows], self._decoding.datasets)

    def give_up(self, why: str) -> None:
        """Marks all rows as bad, so that no decoder tries them. Names the first column, because the failing one is not
        known.

        Raises:
            BadRowError: If bad rows are not masked.
        """
        self.skips_bad = True
        for row in range(self.table.num_rows):
            self.add_bad(row, next(iter(self._decoding.columns), TRANSFORM), HelperError(why))

    def add_bad(self, row: int, column: str, error: Exception) -> None:
        """Notes a bad row.

        Raises:
            BadRowError: If bad rows are not masked.
        """
        reason, offset = describe_exception(error), int(self.table[ROW_OFFSET][row].as_py())
        if not self._decoding.mask_bad_rows:
            name, (_, own) = None if column == TRANSFORM else column, split_offsets(offset)
            bad = BadRowError(name, own, reason, dataset_of(offset, self._decoding.datasets))
            if name is None or any(is_users(each) for each in self._decoding.decoders if each.column == column):
                bad.add_note("".join(traceback.format_exception(error)))  # the cause is lost between processes
            raise bad from error
        if self.valid[row] or (offset, column) not in {bad[:2] for bad in self.bad_rows}:
            self.bad_rows.append((offset, column, reason[:_REASON]))
        self.valid[row] = False


def resolve_decoder(decoder: Decoder, probe: pa.Table, leader: Decoder | None = None) -> Decoder:
    """Fills a decoder's open settings from a few rows with `_rowoffset`; `leader` is the decoder that `like` names.

    One good row is enough; damaged rows are left to `on_bad_row`.

    Raises:
        ConfigError: If a decoder does not fit good rows, or its `resolve` does not return a decoder of its column.
        DatasetError: If none of the rows can be decoded.
        HelperError: If this machine has too little memory for it.
    """
    failures: list[Exception] = []
    for row in range(probe.num_rows):
        try:
            encoded = probe[decoder.column][row].as_py()
            if encoded is None:
                raise ValueError("is null")
            resolved = decoder.resolve(memoryview(encoded))
            if not isinstance(resolved, Decoder) or (resolved.column, resolved.name) != (decoder.column, decoder.name):
                raise ConfigError(f"{decoder!r}.resolve() gave {resolved!r}: it must return a decoder of its column.")
            decoders = (resolved,) if leader is None else (leader, resolved)
            Decoding(decoders=decoders, seed=0, mask_bad_rows=False).open().apply(probe.slice(row, 1), 0)
            return resolved
        except (ConfigError, HelperError):
            raise
        except (ImportError, MemoryError) as error:
            raise error_of_no_row(f"{type(decoder).__name__}({decoder.column!r}) cannot decode", error) from error
        except Exception as error:  # a codec may raise anything for damaged bytes; another row may be good
            failures.append(error)
    first = failures[0].__cause__ if isinstance(failures[0], BadRowError) and failures[0].__cause__ else failures[0]
    what = f"column {decoder.column!r} holds no {decoder.content}"
    fix = f"Name a column of {decoder.content} in decode=."
    if is_users(decoder):
        what = f"{type(decoder).__name__} has an error, or {what}"
        fix = f"The traceback of the first one is above. Correct the decoder, or name a column of {decoder.content}."
    raise DatasetError(
        f"{what}: none of {len(failures)} sampled rows can be decoded (the first: {describe_exception(first)}"
        f"{place_of(first) if is_users(decoder) else ''}); nothing was started. {fix}"
    ) from first
