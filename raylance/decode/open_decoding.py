"""The steps between reading and collating: decoding of columns, and the user's transform."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raylance.columns import DRAW, ROW_OFFSET, TRANSFORM, VALID
from raylance.decode.arrays import blank_row, is_bytes
from raylance.decode.column import BatchColumn, CountedColumn, OpenColumn, RaggedColumn, RowColumn
from raylance.decode.decoder import (
    BatchDecoder,
    CountedDecoder,
    Decoder,
    RaggedDecoder,
    check_decoder_output,
    is_on_device,
    is_users,
)
from raylance.decode.decoding import DecodeClock, DecodedRows, Decoding
from raylance.decode.transforms import Transformer, TransformError, describe_exception, error_of_no_row, place_of
from raylance.errors import NULL, BadRowError, ConfigError, DatasetError, HelperError, filter_of_nulls
from raylance.memory.arrow import own_memory, take_rows
from raylance.memory.lending import LendFor, fresh_for
from raylance.observe import Receipt, clock

if TYPE_CHECKING:
    import torch


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

        The table has the encoded columns and `_rowoffset`; with a transform, all columns; if rows repeat, also `_draw`;
        and `_valid` if some rows are bad already, which have zeros.
        The result has `_valid` (bool) in place of `_rowoffset` and `_draw`. Without `own_memory`, the next call
        overwrites the result, so copy it before (sending it through Ray copies it). If `given_up` gives a reason, the
        rows count as bad and are not decoded, because an attempt to decode them has ended a process.

        Raises:
            BadRowError: If a row is bad, unless bad rows are masked.
            ConfigError: If a good row does not fit the settings, or the transform does not return a batch.
            HelperError: If the transform or a batch decoder fails on rows together, but on none alone.
        """
        if executor is None and table.num_rows:
            open_here(self._columns)
        watch, is_valid = DecodeClock(executor), None
        if VALID in table.column_names:
            is_valid, table = table[VALID].to_numpy(), table.drop_columns([VALID])
        rows = DecodedRows(self._decoding, table, epoch)
        if is_valid is not None:
            rows.valid &= is_valid
        if given_up:
            rows.give_up(given_up)
        made = self._decode(rows, executor, fresh_for if own_memory else None)
        transform_begin = transform_end = clock.now()
        blank = self._decoding.blank
        if blank is not None and (given_up or table.num_rows == 0):
            made = blank.take(np.zeros(table.num_rows, dtype=np.int64))
        elif self._decoding.transform is not None:
            made = self._transform(made, rows)
            transform_end = clock.now()
        hidden = [name for name in (ROW_OFFSET, DRAW) if name in made.column_names]
        done = made.drop_columns(hidden).append_column(VALID, pa.array(rows.valid))
        return done, watch.receipt([rows], nbytes=done.nbytes, transform_s=transform_end - transform_begin)

    def _decode(
        self, rows: DecodedRows, executor: Executor | None = None, lend: LendFor | None = fresh_for
    ) -> pa.Table:
        """Decodes columns, and notes bad rows in `rows`. A transform may change the result in place, but not
        `rows.table`, whose rows may have to be decoded again.
        """
        made: dict[str, pa.Array] = {}
        for column in self._columns:
            made |= column.decode(rows, executor, lend)
        names = self._decoding.delivered(rows.table.column_names)
        table = pa.table({name: made[name] if name in made else rows.table[name] for name in names})
        return table if self._decoding.transform is None else self._copy_plain(table)

    def _copy_plain(self, table: pa.Table) -> pa.Table:
        """Copies the columns that were not decoded and that a transform could change in place."""
        kept = {*self._decoding.names, ROW_OFFSET, DRAW}
        names = [field.name for field in table.schema if field.name not in kept and not is_bytes(field.type)]
        copied = own_memory(table.select(names))
        return pa.table({name: (copied if name in names else table)[name] for name in table.column_names})

    def _transform(self, decoded: pa.Table, rows: DecodedRows) -> pa.Table:
        """Transforms decoded rows. If that fails, tries each row alone; rows that fail again are bad."""
        try:
            return self._call(decoded, rows)
        except TransformError as error:
            failed = error
        encoded, errors = rows.table, self._errors_of_rows(rows, failed)
        for row, why in errors.items():
            if rows.valid[row]:  # else decoding has noted it
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

    def _errors_of_rows(self, rows: DecodedRows, failed: TransformError) -> dict[int, Exception]:
        """Calls the transform with each row alone, after it failed on all rows together; returns the errors by row."""
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

    def _call(self, table: pa.Table, rows: DecodedRows) -> pa.Table:
        return self._transformer(table, rows.keys("transform"))


def _first_bytes(value: Any) -> Any:
    """Returns the first bytes of a value, which may have several, in a window or a list; None if there are none."""
    if not isinstance(value, list):
        return value
    inside = (each.get("bytes") if isinstance(each, dict) else each for each in value)
    return next((each for each in inside if each is not None), None)


def open_here(columns: Sequence[OpenColumn]) -> None:
    """Opens decoders for this thread before the clock starts: loading a model is not decoding."""
    for column in columns:
        with contextlib.suppress(ConfigError):  # decoding raises this error again, and names the row
            _ = column.opened


def open_columns(decoders: Sequence[Decoder], device: "torch.device | None" = None) -> list[OpenColumn]:
    """Groups decoders into columns, in the order of decoding: those that follow another one come last, so that a
    damaged image is not blamed on its mask. Row decoders of one class and column may share their work. `device`, None
    for the CPU, is for decoders with `on_device`. Raises ConfigError if a decoder's shape, dtype or draws are
    impossible.
    """
    columns = {decoder.output_name: decoder.column for decoder in decoders}
    groups: dict[Any, tuple[str | None, list[Decoder]]] = {}
    for number, decoder in enumerate(decoders):
        check_decoder_output(decoder)
        like = None if decoder.like is None else columns.get(decoder.like, decoder.like)
        if like == decoder.column:  # both decoders read the same bytes
            like = None
        alone = number if isinstance(decoder, RaggedDecoder | BatchDecoder) else None
        groups.setdefault((type(decoder), decoder.column, like, alone), (like, []))[1].append(decoder)
    opened = [_open_column(group, like, device) for like, group in groups.values()]
    return sorted(opened, key=lambda column: column.follows)


def _open_column(group: Sequence[Decoder], like: str | None, device: "torch.device | None") -> OpenColumn:
    if isinstance(group[0], CountedDecoder):
        return CountedColumn(group, like)
    if isinstance(group[0], RaggedDecoder):
        return RaggedColumn(group, like)
    if not isinstance(group[0], BatchDecoder):
        return RowColumn(group, like)
    if not is_on_device(group[0]):
        return BatchColumn(group, like)
    from raylance.decode.device_column import DeviceColumn  # loads torch, which helpers may do without

    return DeviceColumn(group, like, device)


def resolve_decoder(decoder: Decoder, probe: pa.Table, leader: Decoder | None = None) -> Decoder:
    """Returns a decoder whose open settings are filled from one of a few sampled rows; `leader` is the decoder that
    `like` names. `probe` has the rows, with `_rowoffset`.

    One good row is enough; `on_bad_row` decides later about damaged rows.

    Raises:
        ConfigError: If a decoder does not fit good rows, or its `resolve` does not return a decoder of its column.
        DatasetError: If none of the rows can be decoded.
        HelperError: If this machine has too little memory for decoding.
    """
    failures: list[Exception] = []
    for row in range(probe.num_rows):
        try:
            encoded = _first_bytes(probe[decoder.column][row].as_py())
            if encoded is None:
                raise ValueError("is null")
            resolved = decoder.resolve(memoryview(encoded))
            if not isinstance(resolved, Decoder) or (resolved.column, resolved.name) != (decoder.column, decoder.name):
                raise ConfigError(f"{decoder!r}.resolve() gave {resolved!r}: it must return a decoder of its column.")
            decoders = (resolved,) if leader is None else (leader, resolved)
            OpenDecoding(Decoding(decoders=decoders, seed=0, mask_bad_rows=False)).apply(probe.slice(row, 1), 0)
            return resolved
        except (ConfigError, HelperError):
            raise
        except (ImportError, MemoryError) as error:
            raise error_of_no_row(f"{type(decoder).__name__}({decoder.column!r}) cannot decode", error) from error
        except Exception as error:  # a codec may raise anything for damaged bytes; another row may be good
            failures.append(error)
    if decoder.may_lack_samples and all(describe_exception(each) == NULL for each in failures):
        return decoder
    first = failures[0].__cause__ if isinstance(failures[0], BadRowError) and failures[0].__cause__ else failures[0]
    what = f"column {decoder.column!r} holds no {decoder.content}"
    fix = f"Name a column of {decoder.content}."
    if all(describe_exception(each) == NULL for each in failures):
        fix = f"Leave rows without a value out, {filter_of_nulls(decoder.column)}, if others have one."
    if is_users(decoder):
        what = f"{type(decoder).__name__} has an error, or {what}"
        fix = f"The traceback of the first one is above. Correct the decoder, or name a column of {decoder.content}."
    raise DatasetError(
        f"{what}: none of {len(failures)} sampled rows can be decoded (the first: {describe_exception(first)}"
        f"{place_of(first) if is_users(decoder) else ''}); nothing was started. {fix}"
    ) from first
