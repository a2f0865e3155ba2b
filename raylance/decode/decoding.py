"""The settings of decoding, and the rows of one decoding call with the notes on bad rows."""

import dataclasses
import math
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pyarrow as pa

from raylance.columns import DRAW, ROW_OFFSET, TRANSFORM, VALID, dataset_of, describe_rows, split_offsets
from raylance.decode.decoder import BatchDecoder, Decoder, Draws, RaggedDecoder, is_on_device, is_users
from raylance.decode.transforms import Transform, describe_exception
from raylance.errors import BadRowError, HelperError
from raylance.observe import Receipt, clock
from raylance.orders.permutation import Int64Array, UInt64Array, derive_key, mix64, subkeys, uniform

BadRows = list[tuple[int, str, str]]  # offset as `join_offsets` joins it, column, reason


@dataclasses.dataclass(frozen=True, slots=True)
class VideoFrames:
    """A column of frames of videos, which blocks bring encoded; picklable.

    Attributes:
        column: Its name, encoded and decoded.
        shape: Height, width and channels.
        dtype: The dtype of a pixel.
    """

    column: str
    shape: tuple[int, int, int]
    dtype: "np.dtype[Any]"

    @property
    def output_name(self) -> str:
        """The name, as a `Decoder` has it."""
        return self.column

    @property
    def arrow_type(self) -> pa.DataType:
        """Arrow type of the decoded column."""
        return pa.fixed_shape_tensor(pa.from_numpy_dtype(self.dtype), self.shape)


_BAD_ROWS = 8  # maximum number of bad rows of one table that are named
_REASON = 200  # maximum length of the reason of each, in characters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Settings of decoding and of the transform; picklable. The process that decodes opens them."""

    decoders: tuple[Decoder, ...]
    seed: int
    mask_bad_rows: bool  # whether a bad row becomes zeros with `_valid` False, not an error
    # Most bad rows handed out to a rank: a number of different rows, or a fraction
    max_bad_rows: int | float | None = None
    transform: Transform | None = None  # as in `raylance.dataset`; a row is bad if it fails on this row alone
    # One row of zeros with the schema that the transform returned at the opening, to which each of its results is cast.
    # It replaces rows on which the transform fails. None at the opening, and without a transform.
    blank: pa.Table | None = None
    frames: tuple[VideoFrames, ...] = ()  # columns of videos, which are always decoded by block
    windows: Mapping[str, int] = dataclasses.field(default_factory=dict)  # values of a sample, by column of decoders
    lists: tuple[str, ...] = ()  # columns of decoders whose rows have any number of values, see `holds_files`
    marks: bool = False  # whether lists come with marks of their good values, because bad ones are masked
    shares: bool = False  # whether samples that are loaded together have rows in common, see `of_blocks`
    datasets: tuple[str, ...] = ()  # name of the dataset for errors; in a mixture, by component
    ragged_bytes: float = 0.0  # mean bytes of the ragged columns of one sampled row

    @property
    def columns(self) -> list[str]:
        """Names of the columns that decoders read."""
        return list(dict.fromkeys(decoder.column for decoder in self.decoders))

    @property
    def names(self) -> list[str]:
        """Names of the decoded columns."""
        return [decoder.output_name for decoder in self.decoders]

    @property
    def made(self) -> "tuple[Decoder | VideoFrames, ...]":
        """What makes columns: decoders and videos."""
        return (*self.decoders, *self.frames)

    @property
    def channels_last(self) -> dict[str, int]:
        """Decoded columns with three axes or more, whose channels come before height and width in torch: the number of
        channels by name.
        """
        return {
            each.output_name: each.shape[-1] for each in self.decoders if each.channels_last and len(each.shape) > 2
        }

    @property
    def in_helpers(self) -> "Decoding | None":
        """The decoders that decode actors run, and the transform; None if there are neither."""
        decoders = tuple(decoder for decoder in self.decoders if not is_on_device(decoder))
        is_needed = decoders or self.frames or self.transform is not None
        return dataclasses.replace(self, decoders=decoders) if is_needed else None

    @property
    def of_blocks(self) -> "Decoding | None":
        """The videos, and the decoders of columns whose values several samples share, so that each value is decoded
        once for a chunk of samples; None if there are none. These decoders read columns of several rows a sample, a
        value at a time, and none is random, which would differ between samples.
        """
        followed = {decoder.like for decoder in self.decoders}
        alone = [
            decoder.column
            for decoder in self.decoders
            if decoder.like is not None
            or decoder.output_name in followed
            or decoder.is_random
            or isinstance(decoder, RaggedDecoder | BatchDecoder)
            or np.dtype(decoder.dtype) == np.bool_  # Arrow packs them to bits, and samples are copied by bytes
        ]
        videos = [each.column for each in self.frames]
        shared = self.windows.keys() - alone - {*videos} if self.shares else ()
        decoders = tuple(decoder for decoder in self.decoders if decoder.column in shared)
        if not decoders and not videos:
            return None
        return dataclasses.replace(self, decoders=decoders, transform=None, blank=None, ragged_bytes=0.0)

    @property
    def of_frames(self) -> "Decoding | None":
        """The videos alone; None if there are none."""
        alone = dataclasses.replace(self, decoders=(), transform=None, blank=None, ragged_bytes=0.0)
        return alone if self.frames else None

    @property
    def names_by_column(self) -> dict[str, list[str]]:
        """Names of the decoded columns, by the encoded column of which they are made."""
        columns = dict.fromkeys(each.column for each in self.made)
        made = {name: [each.output_name for each in self.made if each.column == name] for name in columns}
        if not self.marks:
            return made
        marked = {each.output_name for each in self.decoders if each.has_marks}
        return {
            column: [*names, *(name + VALID for name in names if name in marked)] if column in self.lists else names
            for column, names in made.items()
        }

    @property
    def of_items(self) -> "Decoding | None":
        """The decoders that decode samples one by one in helpers, and the transform; None if there are neither."""
        whole, shared = self.in_helpers, self.of_blocks
        if whole is None or shared is None:
            return whole
        others = tuple(decoder for decoder in whole.decoders if decoder not in shared.decoders)
        return dataclasses.replace(whole, decoders=others, frames=()).in_helpers

    @property
    def of_samples(self) -> "Decoding | None":
        """All decoders, those of the device included, and the transform, without the videos; None if there are none."""
        alone = dataclasses.replace(self, frames=())
        return alone if alone.decoders or alone.transform is not None else None

    @property
    def on_device(self) -> "Decoding | None":
        """The decoders that run on the trainer's device; None if there are none."""
        decoders = tuple(decoder for decoder in self.decoders if is_on_device(decoder))
        if not decoders:
            return None
        return dataclasses.replace(self, decoders=decoders, transform=None, blank=None, frames=())

    @property
    def ragged(self) -> list[str]:
        """Names of the decoded columns whose rows differ in length."""
        ragged = [each.output_name for each in self.decoders if isinstance(each, RaggedDecoder)]
        return list(dict.fromkeys([*ragged, *self.of_lists]))

    @property
    def of_lists(self) -> list[str]:
        """Names of the decoded columns whose rows have any number of decoded values, or of parts of one."""
        return [each.output_name for each in self.decoders if each.column in self.lists or each.takes_lists]

    @property
    def value_bytes(self) -> dict[str, int]:
        """Bytes of one value of each decoded column, 0 for ragged ones."""
        sizes = {each.output_name: bytes_of_value(each) for each in self.made}
        return sizes | dict.fromkeys(self.ragged, 0)

    @property
    def row_bytes(self) -> float:
        """Mean bytes of the decoded columns of one row, without videos."""
        sizes = self.value_bytes
        made = (sizes[each.output_name] * self.windows.get(each.column, 1) for each in self.decoders)
        return sum(made) + self.ragged_bytes

    def delivered(self, columns: Sequence[str]) -> list[str]:
        """Returns the names of `columns` after decoding, in order; decoded columns replace their encoded column."""
        made = self.names_by_column
        return [name for column in columns for name in made.get(column, [column])]


def bytes_of_value(made: Decoder | VideoFrames) -> int:
    """Returns the bytes of one decoded value."""
    return math.prod(made.shape) * np.dtype(made.dtype).itemsize


class DecodeClock:
    """Measures one decoding call, from its begin on."""

    def __init__(self, executor: Executor | None) -> None:
        # Helpers' threads run at once: only in a helper that decodes in several threads is it the whole process.
        self._cpu_s = time.thread_time if executor is None else time.process_time
        self._begin, self._cpu_begin = clock.now(), self._cpu_s()

    def receipt(self, done: Iterable["DecodedRows"], **others: Any) -> Receipt:
        """Returns the receipt of the call, which has decoded these rows; `others` are further fields."""
        rows = list(done)
        counts = sum((each.counts for each in rows), np.zeros(2, dtype=np.int64))
        return Receipt(
            decode_s=clock.now() - self._begin,
            decode_cpu_s=self._cpu_s() - self._cpu_begin,
            fallback_rows=int(counts[0]),
            unturned_rows=int(counts[1]),
            bad_rows=tuple(bad for each in rows for bad in each.named_bad_rows)[:_BAD_ROWS],
            **others,
        )


class DecodedRows:
    """The rows of one decoding call, and the notes on which of them are bad."""

    def __init__(self, decoding: Decoding, table: pa.Table, epoch: int) -> None:
        self._decoding, self._epoch, self.table = decoding, epoch, table
        self.valid = np.ones(table.num_rows, dtype=np.bool_)  # whether each row is good so far
        self.bad_rows = BadRows()  # in the order in which they were found
        self.counts = np.zeros(2, dtype=np.int64)  # rows left to a slow method, and images that could not be turned
        self.skips_bad = False  # whether all decoders skip the rows that are already known to be bad, or not needed

    @property
    def marks(self) -> bool:
        """See `Decoding.marks`."""
        return self._decoding.marks

    @property
    def named_bad_rows(self) -> tuple[tuple[int, str, str], ...]:
        """The first bad rows, for a receipt."""
        return tuple(self.bad_rows[:_BAD_ROWS])

    def part(self, table: pa.Table) -> "DecodedRows":
        """Returns `DecodedRows` of a table with some of these rows, so that they can be decoded again."""
        return DecodedRows(self._decoding, table, self._epoch)

    def keys(self, *purpose: str) -> UInt64Array:
        """Returns one key for each row, uint64 (n,), from seed, epoch, `purpose` and row offset. If the order repeats
        rows, also from the position, so that each repetition is augmented differently.
        """
        offsets = self.table[ROW_OFFSET].to_numpy()
        keys = subkeys(derive_key(self._decoding.seed, self._epoch, *purpose), offsets)
        if DRAW not in self.table.column_names:
            return keys
        return mix64(keys ^ subkeys(derive_key("draw"), self.table[DRAW].to_numpy()))

    def draws(self, decoder: Decoder, lengths: Int64Array | None = None) -> Draws:
        """Returns the uniform random numbers of each row for a decoder, float64 (n, decoder.draws); with `lengths`, of
        each of the values of each row, keyed also by the number of the value in its row.
        """
        keys = self.keys("augment", decoder.like or decoder.output_name)
        if lengths is not None:
            numbers = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            keys = mix64(np.repeat(keys, lengths) ^ subkeys(derive_key("value"), numbers))
        return uniform(keys, decoder.draws)

    def describe(self, rows: Sequence[int]) -> str:
        """Names some of the rows in an error text."""
        return describe_rows(self.table[ROW_OFFSET].to_numpy()[rows], self._decoding.datasets)

    def give_up(self, why: str) -> None:
        """Marks all rows as bad, so that no decoder tries them; in the notes by the first column, as none is known to
        fail. Raises BadRowError if bad rows are not masked.
        """
        self.skips_bad = True
        for row in range(self.table.num_rows):
            self.add_bad(row, next(iter(self._decoding.names_by_column), TRANSFORM), HelperError(why))

    def add_bad(self, row: int, column: str, error: Exception, *, stays: bool = False) -> None:
        """Notes that a row is bad, or, if it `stays`, that one of its values is. Raises BadRowError if bad rows are not
        masked.
        """
        reason, offset = describe_exception(error), int(self.table[ROW_OFFSET][row].as_py())
        if not self._decoding.mask_bad_rows:
            name, (_, own) = None if column == TRANSFORM else column, split_offsets(offset)
            bad = BadRowError(name, own, reason, dataset_of(offset, self._decoding.datasets))
            bad.joined_offset = offset
            if name is None or any(is_users(each) for each in self._decoding.decoders if each.column == column):
                bad.add_note("".join(traceback.format_exception(error)))  # the cause is lost between processes
            raise bad from error
        if self.valid[row] or (offset, column) not in {bad[:2] for bad in self.bad_rows}:
            self.bad_rows.append((offset, column, reason[:_REASON]))
        self.valid[row] &= stays
