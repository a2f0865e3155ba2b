"""Decodes the rows of one column: the open decoders of each thread, and the memory into which they decode."""

import abc
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raylance.columns import VALID
from raylance.decode.arrays import holds_files, to_arrow
from raylance.decode.decoder import CountedDecoder, Decoder, Draws, RowDecoder, wrong_ragged
from raylance.decode.decoding import DecodedRows, bytes_of_value
from raylance.decode.transforms import describe_exception, error_of_no_row
from raylance.errors import ConfigError, HelperError
from raylance.memory.arrow import buffer_bytes, ends_of, layout_of, raw_bytes, values_of, width_of
from raylance.memory.lending import LendFor, fresh_for
from raylance.orders.permutation import Int64Array

Array = npt.NDArray[Any]


class OpenColumn(abc.ABC):
    """Decodes the rows of one column, with one or more decoders that work together."""

    method: ClassVar[str]  # the method that the opened object must have

    def __init__(self, decoders: Sequence[Decoder], like: str | None) -> None:
        """Takes decoders of one class and column. If `like` is given, `check_like` compares rows with that column."""
        self._decoders, self._like = decoders, like
        # Whether all follow another decoder. Then known bad rows are skipped: the column that is followed may be bad.
        self.follows = all(decoder.like is not None for decoder in decoders)
        self.column, self._class = decoders[0].column, type(decoders[0]).__name__
        self._memory = [np.empty((0, *decoder.shape), decoder.dtype) for decoder in decoders]
        self._local = threading.local()

    @abc.abstractmethod
    def decode(self, rows: DecodedRows, executor: Executor | None, lend: LendFor | None) -> dict[str, pa.Array]:
        """Decodes rows in the threads of `executor`, or in this one; returns columns by the decoders' names. A bad row
        becomes zeros, or an empty list. `lend` gives the memory of the columns; without it, the next call overwrites
        them.
        """

    def open(self) -> Any:
        """Opens the decoders for one thread; raises AttributeError if the opened object lacks the required `method`."""
        return self._checked(self._decoders[0].open())

    def _checked(self, opened: Any) -> Any:
        """Returns the opened object; raises AttributeError if it lacks the required `method`."""
        getattr(opened, self.method.partition("(")[0])
        return opened

    @property
    def opened(self) -> Any:
        """The opened object of this thread, which is opened at its first use. Raises ConfigError if that fails."""
        if not hasattr(self._local, "opened"):
            self._local.opened = self._try_to_open()
        return self._local.opened

    def _try_to_open(self) -> Any:
        try:
            return self.open()
        except Exception as error:
            lacks = f" open() must return an object with {self.method}." if isinstance(error, AttributeError) else ""
            raise ConfigError(
                f"{self._class}({self.column!r}) cannot be opened ({describe_exception(error)}).{lacks}"
            ) from error

    def _memory_of(self, count: int, lend: LendFor | None) -> list[Array]:
        """Returns memory for `count` rows of each decoder, (count, *shape)."""
        if lend is not None:
            lent = [lend(each.output_name, count * bytes_of_value(each)) for each in self._decoders]
            made = zip(self._decoders, lent, strict=True)
            return [memory.view(each.dtype).reshape(count, *each.shape) for each, memory in made]
        if len(self._memory[0]) < count:
            self._memory = self._memory_of(count, fresh_for)
        return [memory[:count] for memory in self._memory]

    def _attempt(self, rows: DecodedRows, row: int, work: Callable[[], None], *, stays: bool = False) -> bool:
        """Calls `work` for a row, and notes the row in `rows` if it is bad; returns whether it is good. With `stays`,
        only a value of the row is bad.
        """
        try:
            work()
        except ConfigError as error:  # a good row that does not fit the settings
            raise ConfigError(f"column {self.column!r} of {rows.describe([row])} {error}") from error
        except (ImportError, MemoryError) as error:
            raise error_of_no_row(f"{self._class}({self.column!r}) cannot decode", error) from error
        except Exception as error:  # a codec may raise anything for damaged bytes
            rows.add_bad(row, self.column, error, stays=stays)
            return False
        return True

    def _others(self, rows: DecodedRows, lengths: Int64Array) -> list[memoryview | None] | None:
        """Returns the values of the column that this one is like; None if it is like none. Raises ConfigError if a row
        has another number of values there.
        """
        if self._like is None:
            return None
        other = np.flatnonzero(lengths != lengths_of(rows.table[self._like]))
        if len(other):
            raise ConfigError(
                f"column {self.column!r} of {rows.describe([int(other[0])])} has {lengths[other[0]]} values, and "
                f"{self._like!r}, which it is like, has another number; the epoch stops here. Leave the row out with "
                "filter=, or decode the columns without like=."
            )
        return read_only(rows.table[self._like])

    def _compare(self, opened: Any, value: memoryview, other: memoryview | None) -> None:
        """Raises ValueError, or what `check_like` raises, if a value does not fit that of the column it is like."""
        if (check_like := getattr(opened, "check_like", None)) is not None:
            if other is None:
                raise ValueError(f"has no value to follow: {self._like!r} is null")
            check_like(value, other)

    def _each_row(
        self,
        rows: DecodedRows,
        executor: Executor | None,
        decode: Callable[[int, Any, memoryview], None],
        clear: Callable[[range], None],
        lengths: Int64Array,
    ) -> None:
        """Calls `decode` with each value's number, the opened object of the thread, and the bytes; `clear` with the
        numbers of the values of each bad row. If rows have several values, `lengths` of `lengths_of`, those of a row
        follow one another. In lists of any length, a value is bad by itself.
        """
        encoded = read_only(rows.table[self.column])
        ends = [0, *np.cumsum(lengths).tolist()]
        by_value = holds_files(rows.table.schema.field(self.column).type)
        others = self._others(rows, lengths)
        skips = self.follows or rows.skips_bad
        counter = _Counter()

        def attempt(row: int, numbers: range) -> None:
            opened = self.opened  # outside of `work`: an error of opening is not the fault of a row
            counter.begin(opened)

            def work() -> None:
                for number in numbers:
                    value = encoded[number]
                    if value is None:
                        raise ValueError("is null")
                    if others is not None:
                        self._compare(opened, value, others[number])
                    decode(number, opened, value)

            if (skips and not rows.valid[row]) or not self._attempt(rows, row, work, stays=by_value):
                clear(numbers)

        def decode_row(row: int) -> None:
            attempt(row, range(ends[row], ends[row + 1]))

        def decode_values(row: int) -> None:
            for number in range(ends[row], ends[row + 1]):
                attempt(row, range(number, number + 1))

        _call_each(decode_values if by_value else decode_row, rows.table.num_rows, executor)
        rows.counts += counter.counted()


def _call_each(work: Callable[[int], None], count: int, executor: Executor | None) -> None:
    """Calls `work` with each number below `count`, in the threads of `executor`, or in this one."""
    for _ in (map if executor is None else executor.map)(work, range(count)):
        pass


class RowColumn(OpenColumn):
    """Decodes with row decoders. Each decoder writes its value of a row into memory of the decoder's shape."""

    method = "decode_into(encoded, draws, out)"

    def open(self) -> Any:
        """See `OpenColumn.open`."""
        first, *others = self._decoders
        return (first.open_group(others) if others else None) or _Each([each.open() for each in self._decoders])

    def decode(self, rows: DecodedRows, executor: Executor | None, lend: LendFor | None) -> dict[str, pa.Array]:
        """See `OpenColumn.decode`."""
        kind = rows.table.schema.field(self.column).type
        window, is_list = window_of(kind), holds_files(kind)
        each = window or 1  # values of a row, which all get the same draws
        lengths = lengths_of(rows.table[self.column])
        outs = self._memory_of(int(lengths.sum()), lend)
        draws = [rows.draws(decoder, lengths if is_list else None) for decoder in self._decoders]
        is_good = np.ones(int(lengths.sum()), dtype=np.bool_)

        def decode(number: int, opened: Any, value: memoryview) -> None:
            # `...` gives an array even if a value is a number.
            opened.decode_all(value, [drawn[number // each] for drawn in draws], [out[number, ...] for out in outs])

        def clear(numbers: range) -> None:
            which = slice(numbers.start, numbers.stop)
            is_good[which] = False
            for out in outs:
                out[which] = 0

        self._each_row(rows, executor, decode, clear, lengths)
        if window:
            outs = [out.reshape(-1, window, *out.shape[1:]) for out in outs]
        made = {decoder.output_name: to_arrow(out) for decoder, out in zip(self._decoders, outs, strict=True)}
        if not is_list:
            return made
        marked = [each.output_name for each in self._decoders if rows.marks and each.has_marks]
        made |= {name + VALID: pa.array(is_good) for name in marked}
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        return {name: pa.ListArray.from_arrays(ends, values) for name, values in made.items()}


class RaggedColumn(OpenColumn):
    """Decodes with a ragged decoder, which makes of each row an array of any length."""

    method = "decode(encoded, draws)"

    def decode(self, rows: DecodedRows, executor: Executor | None, lend: LendFor | None) -> dict[str, pa.Array]:
        """See `OpenColumn.decode`."""
        (decoder,), (empty,) = self._decoders, self._memory
        draws, made = rows.draws(decoder), [empty] * rows.table.num_rows

        def decode(row: int, opened: Any, value: memoryview) -> None:
            array = opened.decode(value, draws[row])
            if wrong := wrong_ragged(decoder, array):
                raise ConfigError(f"was decoded to {wrong}.")
            made[row] = array.copy()  # the decoder may reuse its memory

        lengths = lengths_of(rows.table[self.column])
        self._each_row(rows, executor, decode, lambda numbers: None, lengths)
        ends = np.cumsum([0, *map(len, made)], dtype=np.int32)
        return {decoder.output_name: pa.ListArray.from_arrays(ends, to_arrow(np.concatenate([empty, *made])))}


class CountedColumn(OpenColumn):
    """Decodes with a counted decoder, whose arrays of each row follow one another in memory."""

    method = "decode_into(encoded, draws, out)"

    def decode(self, rows: DecodedRows, executor: Executor | None, lend: LendFor | None) -> dict[str, pa.Array]:
        """See `OpenColumn.decode`. A bad value becomes zeros."""
        (decoder,), column = cast("Sequence[CountedDecoder]", self._decoders), rows.table[self.column]
        is_list, lengths = holds_files(column.type), lengths_of(column)
        ends = np.cumsum([0, *map(decoder.count, read_only(column))], dtype=np.int32)
        (out,) = self._memory_of(int(ends[-1]), lend)
        draws, is_good = rows.draws(decoder, lengths if is_list else None), np.ones(len(ends) - 1, dtype=np.bool_)

        def decode(number: int, opened: Any, value: memoryview) -> None:
            opened.decode_into(value, draws[number], out[ends[number] : ends[number + 1]])

        def clear(numbers: range) -> None:
            is_good[numbers.start : numbers.stop] = False
            out[ends[numbers.start] : ends[numbers.stop]] = 0

        self._each_row(rows, executor, decode, clear, lengths)
        by_row = np.cumsum([0, *lengths], dtype=np.int32)
        made = {decoder.output_name: pa.ListArray.from_arrays(ends[by_row], to_arrow(out))}
        if is_list and rows.marks:
            made[decoder.output_name + VALID] = pa.ListArray.from_arrays(by_row, pa.array(is_good))
        return made


class BatchColumn(OpenColumn):
    """Decodes with a batch decoder, which decodes all rows of a call at once."""

    method = "decode_batch(encoded, draws, out)"

    def decode(self, rows: DecodedRows, executor: Executor | None, lend: LendFor | None) -> dict[str, pa.Array]:
        """See `OpenColumn.decode`."""
        (decoder,), (out,) = self._decoders, self._memory_of(rows.table.num_rows, lend)

        def make(count: int) -> Array:
            return np.empty((count, *out.shape[1:]), out.dtype)

        self.decode_together(rows, lambda: read_only(rows.table[self.column]), out, make)
        return {decoder.output_name: to_arrow(out)}

    def decode_together(
        self, rows: DecodedRows, lend: Callable[[], Sequence[Any]], out: Any, make: Callable[[int], Any]
    ) -> None:
        """Decodes rows into `out`, an array or a tensor (n, *shape); some of the rows first into memory from `make`.
        `lend` returns the bytes of each row, None for a null. After a failed call, `lend` is called again, because the
        decoder may have changed the bytes; then each row is decoded alone. Raises HelperError if the decoder fails on
        rows together, but on none alone.
        """
        draws, opened, encoded = rows.draws(self._decoders[0]), self.opened, lend()

        def decode(which: list[int]) -> None:
            made = out if len(which) == len(out) else make(len(which))
            values = [value for row in which if (value := encoded[row]) is not None]
            if len(values) < len(which):
                raise ValueError("is null")
            _refuse_returned(opened.decode_batch(values, draws[which], made), "decode_batch")
            if made is not out:
                out[which] = made

        def attempt(row: int) -> bool:
            return self._attempt(rows, row, lambda: decode([row]))

        skips = self.follows or rows.skips_bad
        wanted = [row for row in range(len(out)) if not skips or rows.valid[row]]
        given = [row for row in wanted if encoded[row] is not None]
        bad = {row for row in wanted if encoded[row] is None and not attempt(row)}
        before = _counts(opened)
        try:
            if given:
                decode(given)
            rows.counts += _counts(opened) - before
        except Exception as together:  # trying each row alone finds the cause
            rows.counts[0] += len(given)
            encoded = lend()
            if not (failed := {row for row in given if not attempt(row)}):
                raise HelperError(
                    f"{self._class}({self.column!r}) fails on {rows.describe(given)} together "
                    f"({describe_exception(together)}), and on none of these {len(given)} rows by itself; the epoch "
                    "stops here. It gets any number of rows at once: what it does to a row must not depend on the "
                    "others."
                ) from together
            bad |= failed
        if cleared := sorted({*range(len(out))} - {*wanted} | bad):
            out[cleared] = 0


class _Each:
    """Row decoders of one column that do not share work, opened for one thread."""

    def __init__(self, decoders: Sequence[RowDecoder]) -> None:
        self._opened = decoders
        self._methods = [opened.decode_into for opened in decoders]
        checks = [getattr(opened, "check_like", None) for opened in decoders]
        if any(checks):
            self.check_like = checks[0]

    @property
    def fallbacks(self) -> int:
        return sum(int(_counts(opened)[0]) for opened in self._opened)

    @property
    def unturned(self) -> int:
        return sum(int(_counts(opened)[1]) for opened in self._opened)

    def decode_all(self, encoded: memoryview, draws: Sequence[Draws], outs: Sequence[Array]) -> None:
        for method, numbers, out in zip(self._methods, draws, outs, strict=True):
            _refuse_returned(method(encoded, numbers, out), "decode_into")


class _Counter:
    """Sums what the opened objects of all threads count during a call. They are asked at its begin and its end, because
    asking for each row costs a fiftieth of decoding a small image.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, Array]] = {}

    def begin(self, opened: Any) -> None:
        """Notes the counts of an opened object, if it was not noted before."""
        if id(opened) not in self._before:
            self._before[id(opened)] = opened, _counts(opened)

    def counted(self) -> Array:
        """Returns the sum over the noted objects, see `_counts`."""
        return sum((_counts(opened) - before for opened, before in self._before.values()), np.zeros(2, np.int64))


def _counts(opened: Any) -> npt.NDArray[np.int64]:
    """Returns the rows that an opened object's fast method left to its slow one, and the images it could not turn."""
    return np.array([getattr(opened, "fallbacks", 0), getattr(opened, "unturned", 0)], dtype=np.int64)


def _refuse_returned(made: Any, method: str) -> None:
    if made is not None:
        raise ConfigError(f"was returned as {type(made).__name__}: {method} must write it into `out`.")


def window_of(kind: pa.DataType) -> int:
    """Returns how many encoded values each row of a column has; 0 if it has one, and no list."""
    is_encoded = pa.types.is_fixed_size_list(kind) and not width_of(kind)
    return int(kind.list_size) if is_encoded else 0


def lengths_of(column: pa.ChunkedArray) -> Int64Array:
    """Returns the number of encoded values of each row, int64 (n,): 0 for a null in place of a list."""
    if not holds_files(column.type):
        return np.full(len(column), window_of(column.type) or 1, dtype=np.int64)
    return np.asarray(pc.list_value_length(column).fill_null(0).to_numpy(), dtype=np.int64)


def encoded_values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns the encoded values in a column of lists, one after another; see `holds_files`."""
    values = pc.list_flatten(column)
    return pc.struct_field(values, "bytes") if pa.types.is_struct(values.type) else values


def read_only(column: pa.ChunkedArray) -> list[memoryview | None]:
    """Returns the bytes of each value, None for a null; several of each row in windows and lists. They are read-only,
    because rows may be decoded again.
    """
    if window_of(column.type):
        column = pa.chunked_array([values_of(chunk) for chunk in column.chunks], column.type.value_type)
    elif holds_files(column.type):
        column = encoded_values(column)
    return [value for chunk in column.chunks for value in _values(chunk)]


def _values(array: pa.Array) -> Iterator[memoryview | None]:
    """Returns the bytes of each value. Arrow's own objects of values cost a fiftieth of decoding a small image."""
    if width := width_of(array.type):  # frames
        raw = raw_bytes(array)
        return (memoryview(row.data).toreadonly() for row in (() if raw is None else raw.reshape(-1, width)))
    if array.null_count or not len(array) or (layout := layout_of(array.type)) is None or layout[1]:
        return (memoryview(each.as_buffer()).cast("B").toreadonly() if each.is_valid else None for each in array)
    data = buffer_bytes(array.buffers()[2]).data.toreadonly()
    return (data[begin:end] for begin, end in itertools.pairwise(ends_of(array).tolist()))
