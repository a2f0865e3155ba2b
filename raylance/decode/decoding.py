"""Owns the settings of decoding, and the rows of one call with the notes on bad ones; never decodes."""

import dataclasses
import math
import traceback
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from raylance.columns import DRAW, ROW_OFFSET, TRANSFORM, dataset_of, describe_rows, split_offsets
from raylance.decode.decoder import Decoder, Draws, RaggedDecoder, is_on_device, is_users
from raylance.decode.transforms import Transform, describe_exception
from raylance.errors import BadRowError, HelperError
from raylance.orders.permutation import UInt64Array, derive_key, mix64, subkeys, uniform

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
        """Uniform numbers of the rows, (n, decoder.draws)."""
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
