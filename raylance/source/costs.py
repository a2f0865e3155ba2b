"""Reads the cost of each selected row, such as its number of tokens, once for a version, and keeps it in a file.

The file holds one int32 for each selected row. While it is made, a second file says which pieces are done, so that
another process continues where one was killed. Finished files are mapped, not read: opening one takes no time.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raylance.arguments import check_integer
from raylance.descriptions import CLASS, OMIT_DEFAULT, Setting, is_description, read_description
from raylance.environment.shared import Shared, SharedTables
from raylance.errors import ConfigError, DatasetError, filter_of_nulls
from raylance.orders.order import COST, Tables, cost_table
from raylance.orders.permutation import Int32Array, Int64Array
from raylance.source.fields import find_field, is_blob, select_fields
from raylance.source.kept_files import KeptFiles
from raylance.source.lance_errors import LANCE_ERRORS, readable_text
from raylance.source.limits import Calls, requests_of
from raylance.source.live_rows import LiveRows
from raylance.source.retrying import patiently
from raylance.source.selection import Selection
from raylance.source.version import Source

logger = logging.getLogger(__name__)

_PIECE_ROWS = 1 << 16  # rows of one read, and of one step of progress
FEW_ROWS = 1 << 16  # costs of up to this number of rows are read again by each process that opens the dataset
_NOTED = 16  # pieces that are noted as done together
_AT_ONCE = 4  # pieces that are read at once; Lance itself decodes in parallel
_FIRST_ROWS = 64  # that are measured together at first
_HEADS = 1 << 10, 1 << 16  # bytes of blobs that are read at first, and then; the header of a JPEG follows its EXIF
_HEADS_AT_ONCE = 1 << 10  # in one call, which a store may answer by as many requests, before its deadline
_READ_BYTES = 32 << 20  # about what is read at once of values that are measured
_DENSE = 0.1  # from this share of selected rows on, a whole range is read
_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class TokensOf(Setting):
    """The number of tokens of each row, for `cost` of `raylance.dataset`: the length of the list in a column.

    Lance computes it while it scans the column. So tokens are read from storage once, but are not converted to Arrow.

    Attributes:
        column: Name of a column of lists.
        multiple: Each number is rounded up to a multiple of this one, as `raylance.Pad(multiple=…)` rounds.
    """

    column: str
    multiple: int = dataclasses.field(default=1, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if not (isinstance(self.column, str) and self.column):
            raise ConfigError(f"TokensOf(column={self.column!r}): give the name of the column of tokens.")
        object.__setattr__(self, "multiple", check_integer("TokensOf: multiple", self.multiple, 1))


class MeasuredCost(Protocol):
    """A cost that is computed from values of the rows, such as a `raylance.Patches`. Its `repr` has all that its
    numbers depend on.
    """

    @property
    def reads(self) -> Sequence[str]:
        """The columns that it is computed of."""

    def measure(self, rows: pa.Table, *, heads: bool = False) -> Int64Array:
        """Returns the cost of some rows, at least 0, int64 (n,). With `heads`, values of blobs are cut off, and -1 asks
        for more of a row's.
        """


Cost = str | TokensOf | MeasuredCost


def cost_of_saved(saved: Any) -> Cost | dict[str, Cost] | None:
    """Returns the `cost` of `raylance.dataset` whose description a state holds."""
    found = costs_of_saved(saved)
    return found.get(COST, found) or None


def costs_of_saved(saved: Any) -> dict[str, Cost]:
    """Returns the costs whose description a state holds, by name. A subclass counts as the class that it is made of."""
    if isinstance(saved, Mapping) and CLASS not in saved:
        return {name: costs_of_saved(each)[COST] for name, each in saved.items()}
    if isinstance(saved, Mapping) and not is_description(saved):
        saved = TokensOf(saved["column"], saved.get("multiple", 1))
    return {} if saved is None else {COST: read_description(saved)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The setting of one of the costs of a dataset, checked.

    Attributes:
        text: What the user gave, for states and errors.
        expression: The SQL expression that Lance computes for each row; if it is measured, what the file is named by.
        multiple: Each value is rounded up to a multiple of this number.
        measured: What computes it in place of Lance; None if it is an expression.
        may_be_zero: Whether all rows may cost nothing, as texts without images in one of several costs.
        files: Where the file is kept.
        argument: The argument of `raylance.dataset` that needs the costs, for errors.
    """

    text: str
    expression: str
    multiple: int
    files: KeptFiles
    argument: str
    measured: MeasuredCost | None = None
    may_be_zero: bool = False

    def name(self, source: Source, selection: Selection) -> str:
        """Returns the name of the finished file."""
        parts = (source.uri, source.branch, source.version, source.identity, selection.fingerprint, self.expression)
        name = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        return f"{name}{f'.{self.multiple}' * (self.multiple > 1)}.int32"


def check_costs(dataset: lance.LanceDataset, cost: Any, folder: str | os.PathLike[str] | None) -> dict[str, Costs]:
    """Checks the arguments `cost` and `cost_folder` of `raylance.dataset`, and tries the expressions on a few rows.
    Returns the costs by name. Raises as `check_cost`.
    """
    if not isinstance(cost, Mapping):
        return {} if cost is None else {COST: check_cost(dataset, cost, folder)}
    for name in cost:
        if not (isinstance(name, str) and name.isidentifier() and name not in (COST, CLASS)):
            raise ConfigError(
                f"cost={{{name!r}: …}}: this cannot be the name of a cost; nothing was started. Give a word such as "
                f'"tokens", but not "{COST}" or "{CLASS}".'
            )
    if not cost:
        raise ConfigError("cost={}: there is no cost in it; nothing was started. Leave cost= out, or name costs.")
    checked = {name: check_cost(dataset, each, folder, f"cost[{name!r}]={each}") for name, each in cost.items()}
    return {name: dataclasses.replace(each, may_be_zero=len(cost) > 1) for name, each in checked.items()}


def check_cost(
    dataset: lance.LanceDataset, cost: Any, folder: str | os.PathLike[str] | None, argument: str = ""
) -> Costs:
    """Checks one cost, and tries the expression on a few rows. `argument` is what needs it, if it is not `cost`.

    Raises:
        ConfigError: If an argument has a wrong type, or the expression is wrong or gives no numbers.
        DatasetError: If a column is missing, or the storage fails.
    """
    multiple, measured = 1, None
    if not isinstance(cost, str | type) and hasattr(cost, "measure") and hasattr(cost, "reads"):
        text = expression = str(cost)
        measured = cost
        for name in cost.reads:
            if find_field(dataset.schema, name) is None:
                raise DatasetError(
                    f"{argument or cost}: column {name!r} of {dataset.uri!r} does not exist; nothing was started. Its "
                    f"columns are {', '.join(dataset.schema.names)}."
                )
    elif isinstance(cost, TokensOf):
        field = find_field(dataset.schema, cost.column)
        kind = None if field is None else field.type
        if kind is None or not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            found = "does not exist" if kind is None else f"is {kind}"
            raise DatasetError(
                f"{argument or cost}: column {cost.column!r} of {dataset.uri!r} {found}; nothing was started. Name a "
                "column of lists. Rows of one length need no cost."
            )
        text, expression, multiple = str(cost), f"array_length({_quoted(cost.column)})", cost.multiple
    elif isinstance(cost, str) and cost:
        # Without parentheses, Lance would ignore what follows a complete expression.
        text, expression = cost, _quoted(cost) if cost in dataset.schema.names else f"({cost})"
    else:
        raise ConfigError(
            f"{argument or f'cost={cost!r}'}: give the name of a column of numbers, an SQL expression over such "
            'columns, or raylance.TokensOf("input_ids"); or a dict of several of these by name.'
        )
    costs = Costs(
        text=text,
        expression=expression,
        multiple=multiple,
        files=KeptFiles.of(folder),
        argument=argument or f"cost={text!r}",
        measured=measured,
    )
    _as_costs(_scan(dataset, costs, 0, 1), costs, dataset.uri, lambda _: 0)
    return costs


def share_costs(
    source: Source, dataset: lance.LanceDataset, costs: Mapping[str, Costs], rows: Shared[Selection]
) -> Tables:
    """Returns the tables of the costs of the selected rows as a value that all processes of a run share; reads them if
    no file has them.

    Raises:
        DatasetError: If a row has no cost, a negative one or one of 2³¹ or more; or the storage fails.
    """
    if not costs:
        return {}
    found = _load_tables(source, dataset, costs, rows)
    make = functools.partial(_load_again, source, costs, rows)
    nbytes = sum(each.nbytes for each in found.values())
    return SharedTables(Shared(f"costs of {source.uri}", found, nbytes, make))


def _load_again(source: Source, costs: Mapping[str, Costs], rows: Shared[Selection]) -> dict[str, Int32Array]:
    return _load_tables(source, source.open(), costs, rows)


def _load_tables(
    source: Source, dataset: lance.LanceDataset, costs: Mapping[str, Costs], rows: Shared[Selection]
) -> dict[str, Int32Array]:
    return {cost_table(name): load_costs(source, dataset, each, rows.get()) for name, each in costs.items()}


def load_costs(source: Source, dataset: lance.LanceDataset, costs: Costs, rows: Selection) -> Int32Array:
    """Returns the costs of the selected rows, int32, (N,); see `share_costs`."""
    if rows.rows > FEW_ROWS or costs.measured is not None:
        try:
            return _load_from_file(dataset, costs, rows, costs.name(source, rows))
        except OSError as error:
            logger.warning(
                "the costs of %s rows of %s cannot be kept in %s (%s), so each start reads them again. Give a folder "
                "with room for %s bytes: cost_folder=.",
                f"{rows.rows:,}",
                source.uri,
                costs.files.folder,
                error,
                f"{4 * rows.rows:,}",
            )
    found = np.empty(rows.rows, dtype=np.int32)
    _fill(dataset, costs, rows, found, list(_pieces(rows.rows)), lambda _: None)
    return _checked(found, costs, dataset.uri)


def _load_from_file(dataset: lance.LanceDataset, costs: Costs, rows: Selection, name: str) -> Int32Array:
    """Maps the file of costs; makes it first, or continues to make it, if it is not there. Raises OSError."""
    path = costs.files.find(name)
    if path is None:
        path = costs.files.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial, journal = path.with_suffix(".partial"), path.with_suffix(".done")
        _make_file(dataset, costs, rows, partial, journal)
        # First the journal: another process must not find it beside a new, empty file.
        journal.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process has just finished the same file
            os.replace(partial, path)
        costs.files.send(name)
    found = np.asarray(np.memmap(path, dtype=np.int32, mode="r"))
    if len(found) != rows.rows:
        raise OSError(f"{path} has {len(found):,} numbers")
    return _checked(found, costs, dataset.uri)


def _make_file(dataset: lance.LanceDataset, costs: Costs, rows: Selection, partial: Path, journal: Path) -> None:
    """Computes the pieces that the journal does not name. Several processes may do this at once: all write the same."""
    with open(partial, "a+b") as file, open(journal, "a+b") as done:
        file.truncate(4 * rows.rows)
        done.seek(0)
        content = done.read()
        known = set(np.frombuffer(content[: len(content) // 8 * 8], dtype="<i8").tolist())
        found = np.memmap(partial, dtype=np.int32, mode="r+")

        begins: list[int] = []

        def note(least: int) -> None:
            if len(begins) >= least:
                found.flush()  # a journal must not name a piece that a crash of the machine may lose
                done.write(np.array(begins, dtype="<i8").tobytes())
                done.flush()
                begins.clear()

        def keep(begin: int) -> None:
            begins.append(begin)
            note(_NOTED)

        _fill(dataset, costs, rows, found, [each for each in _pieces(rows.rows) if each.start not in known], keep)
        note(0)


def _pieces(rows: int) -> list[range]:
    return [range(begin, min(begin + _PIECE_ROWS, rows)) for begin in range(0, rows, _PIECE_ROWS)]


def _fill(
    dataset: lance.LanceDataset,
    costs: Costs,
    rows: Selection,
    found: Int32Array,
    pieces: list[range],
    keep: Callable[[int], None],
) -> None:
    """Computes the costs of pieces of the selected rows, several at once; calls `keep` when one is done."""
    calls, running = Calls(_AT_ONCE, "raylance-costs"), deque[tuple[range, Future[Int32Array]]]()
    waiting = deque(pieces)
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            piece = waiting.popleft()
            running.append((piece, calls.submit(_read_piece, dataset, costs, rows, piece)))
        piece, future = running.popleft()
        found[piece.start : piece.stop] = future.result()
        keep(piece.start)


def _read_piece(dataset: lance.LanceDataset, costs: Costs, rows: Selection, piece: range) -> Int32Array:
    offsets = rows.offsets(np.arange(piece.start, piece.stop, dtype=np.int64))
    first, span = int(offsets[0]), int(offsets[-1] - offsets[0]) + 1
    if costs.measured is not None:
        return _measure(dataset, costs, offsets)
    if len(offsets) >= _DENSE * span or LiveRows(dataset).has_deletions:
        column = _scan(dataset, costs, first, span)
        column = column if span == len(offsets) else column.take(pa.array(offsets - first))
    else:
        column = _ask(dataset, costs, lambda: dataset.take(offsets.tolist(), columns={COST: costs.expression})[COST])
    return _as_costs(column, costs, dataset.uri, lambda at: int(offsets[at]))


def _measure(dataset: lance.LanceDataset, costs: Costs, offsets: Int64Array) -> Int32Array:
    """Measures rows, some at a time, because their values may be large."""
    measured, found, at = cast("MeasuredCost", costs.measured), np.empty(len(offsets), dtype=np.int32), 0
    few, columns = _FIRST_ROWS, list(measured.reads)
    if len(columns) == 1 and is_blob(find_field(dataset.schema, columns[0])):
        return _measure_heads(dataset, costs, columns[0], offsets)
    while at < len(offsets):
        part = offsets[at : at + few].tolist()
        rows = select_fields(_ask(dataset, costs, functools.partial(dataset.take, part, columns=columns)), columns)
        numbers = pa.chunked_array([measured.measure(rows)])
        found[at : at + len(part)] = _as_costs(numbers, costs, dataset.uri, part.__getitem__)
        at, few = at + len(part), max(1, int(len(part) * min(8, _READ_BYTES / max(1, rows.nbytes))))
    return found


def _measure_heads(dataset: lance.LanceDataset, costs: Costs, column: str, offsets: Int64Array) -> Int32Array:
    """Measures blobs by their first bytes, of which more are read for those that need more."""
    measured, found = cast("MeasuredCost", costs.measured), np.full(len(offsets), -1, dtype=np.int64)
    stored = _ask(dataset, costs, functools.partial(dataset.take, offsets.tolist(), columns=[column]))[column]
    sizes = np.asarray(pc.struct_field(stored, "size").fill_null(0).to_numpy(), dtype=np.int64)
    for most in (*_HEADS, int(sizes.max(initial=0))):
        left = np.flatnonzero(found < 0)
        together = min(_HEADS_AT_ONCE, max(1, _READ_BYTES // max(1, most)))
        for rows in np.split(left, range(together, len(left), together)):
            asked = [(int(offsets[row]), 0, int(min(sizes[row], most))) for row in rows]
            read = functools.partial(dataset.read_blob_ranges, column, asked, selector="indices", preserve_order=True)
            heads = pa.table({column: pa.array([each[2] for each in _ask(dataset, costs, read)], pa.large_binary())})
            found[rows] = measured.measure(heads, heads=True)
            is_whole = sizes[rows] <= most
            if is_whole.any():
                found[rows[is_whole]] = measured.measure(heads.filter(pa.array(is_whole)))
    return _as_costs(pa.chunked_array([found]), costs, dataset.uri, lambda row: int(offsets[row]))


def _scan(dataset: lance.LanceDataset, costs: Costs, first: int, rows: int) -> pa.ChunkedArray:
    if costs.measured is not None:
        found = _measure(dataset, costs, np.arange(first, min(first + rows, dataset.count_rows()), dtype=np.int64))
        return pa.chunked_array([found])

    def scan() -> pa.ChunkedArray:
        scanner = dataset.scanner(columns={COST: costs.expression}, offset=first, limit=rows, scan_in_order=True)
        return scanner.to_table()[COST]

    return _ask(dataset, costs, scan)


def _ask(dataset: lance.LanceDataset, costs: Costs, ask: Callable[[], Any]) -> Any:
    try:
        return patiently(ask, functools.partial(requests_of, dataset))
    except LANCE_ERRORS as error:
        raise DatasetError(
            f"{costs.argument} cannot be computed for {dataset.uri!r} ({readable_text(error)}); nothing was "
            f"started. Its columns are {', '.join(dataset.schema.names)}; names that are not plain words take "
            "backticks."
        ) from error


def _as_costs(column: pa.ChunkedArray, costs: Costs, uri: str, offset_of: Callable[[int], int]) -> Int32Array:
    """Converts the values of the expression, rounded up; `offset_of` gives the row offset of one of them."""
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ConfigError(
            f"{costs.argument} of {uri!r} is {kind}, and a cost is a number; nothing was started. Name a column of "
            'numbers, or raylance.TokensOf("…") for the length of lists.'
        )
    if column.null_count:
        at = pc.index(column.is_null(), True).as_py()
        raise DatasetError(
            f"{costs.argument}: the row at offset {offset_of(at)} of {uri!r} has no cost, because a value is null; "
            f"nothing was started. Leave such rows out, as by {filter_of_nulls('…')}; an expression may also have "
            "coalesce(…, 0)."
        )
    values: npt.NDArray[Any] = column.to_numpy()
    if values.dtype.kind == "f":
        values = np.ceil(values.astype(np.float64))  # a float32 cannot hold the limit
    if costs.multiple > 1:
        values = -(-values.astype(np.int64) // costs.multiple) * costs.multiple
    is_wrong = ~((values >= 0) & (values <= _MOST))  # also NaN
    if is_wrong.any():
        at = int(np.argmax(is_wrong))
        raise DatasetError(
            f"{costs.argument}: the row at offset {offset_of(at)} of {uri!r} costs {values[at]}, and a cost lies "
            f"between 0 and {_MOST:,}; nothing was started. Correct the value, or leave the row out by filter=."
        )
    return values.astype(np.int32)


def _checked(found: Int32Array, costs: Costs, uri: str) -> Int32Array:
    if not (costs.may_be_zero or found[:_PIECE_ROWS].any() or found.any()):
        raise DatasetError(f"{costs.argument} is 0 for all selected rows of {uri!r}; nothing was started.")
    return found


def _quoted(name: str) -> str:
    """Quotes a name of a column, or of a field inside a struct, for an expression."""
    return ".".join(f"`{part}`" for part in name.split("."))
