"""Values that a run computes for a column of its dataset: first kept in part files, then written in one commit.

A value belongs to a row offset of the version that the run reads. Other writers may commit meanwhile. So values are
written by Lance's row ids, and only into fragments that both this version and the newest version have.
"""

import functools
import io
import os
import uuid
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import tenacity
from lance.commit import CommitConflictError
from lance.fragment import FragmentMetadata, LanceFragment

from raylance.arguments import check_integer, check_name, check_path
from raylance.columns import ROW_OFFSET
from raylance.errors import ConfigError, CoverageError, DatasetError
from raylance.observe.record import RecordFolder, open_folder
from raylance.orders.permutation import Int64Array
from raylance.secrets import public_uri
from raylance.source.pickled import refuse_pickled
from raylance.source.storage_options import StorageOptions, current
from raylance.source.version import Source, Version, pin

_VALUE = "value"
_ATTEMPTS = 5


def add_column(
    uri: str | os.PathLike[str], column: str, type: pa.DataType, *, storage_options: StorageOptions | None = None
) -> None:
    """Adds a column of nulls to a dataset, without writing data. Does nothing if the dataset has the column with this
    type.

    Call `add_column` before the first value is computed. If the column has another type already, the error then comes
    before hours of work.

    Args:
        uri: Path or URI of the dataset.
        column: Name of the column.
        type: Arrow type of the values, such as `pa.int64()`, or `pa.list_(pa.float32(), 768)` for embeddings.
        storage_options: Options of the object store; see `raylance.dataset`.

    Raises:
        ConfigError: If the dataset has the column with another type; the error shows both. Also if the name is empty or
            has a dot or a backtick, which filters cannot address.
        DatasetError: If the dataset cannot be opened.
    """
    if not (isinstance(column, str) and column) or {*column} & {*".`"}:
        raise ConfigError(f"a column cannot be named {column!r}: nothing was added. Leave out dots and backticks.")
    if not isinstance(type, pa.DataType):
        raise ConfigError(f"add_column(): type={type!r}: give an Arrow type, such as pa.int64(). Nothing was added.")
    dataset = pin(uri, None, storage_options).open()
    if column in dataset.schema.names:
        _check_type(dataset, column, type)
    else:
        dataset.add_columns(pa.field(column, type))


def write_values(
    folder: str | os.PathLike[str], offsets: npt.ArrayLike, values: npt.ArrayLike | pa.Array, type: pa.DataType
) -> None:
    """Writes a part, which is one file with computed values and their row offsets, into a folder.

    On each rank, call `write_values` before each checkpoint with the values computed since the last checkpoint, then
    call `raylance.report`. A run that resumes computes the values after its last checkpoint again, so the folder may
    hold several values of a row. `read_values` returns one of them.

    Args:
        folder: Path or URI of a folder that all nodes reach. It must hold only the parts of this run.
        offsets: Row offsets, int64 (n,): the column `_rowoffset` of batches.
        values: One value per row: an array or CPU tensor (n,), or (n, …) for lists of a fixed size; a list; or an Arrow
            array.
        type: Arrow type of the column.

    Raises:
        ConfigError: If the offsets are not integers (n,), if there are not n values, if the type cannot hold the
            values, or if the URI of the folder cannot be opened.
    """
    check_path("write_values(): folder", folder)
    rows = np.asarray(offsets.detach() if hasattr(offsets, "detach") else offsets)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ConfigError(
            f"row offsets of shape {rows.shape} and type {rows.dtype}: no part was written. Give integers, (n,): the "
            "column _rowoffset of a batch."
        )
    if not isinstance(type, pa.DataType):
        raise ConfigError(
            f"write_values(): type={type!r}: give an Arrow type, such as pa.int64(). No part was written."
        )
    rows, array = rows.astype(np.int64), _as_arrow(values, type)
    if len(rows) != len(array):
        raise ConfigError(
            f"{len(array):,} values are for {len(rows):,} row offsets: no part was written. Give each row one value."
        )
    part = pa.table({ROW_OFFSET: rows, _VALUE: array})
    content = io.BytesIO()
    with pa.ipc.new_file(content, part.schema) as file:
        file.write_table(part)
    RecordFolder(*open_folder(folder)).write(f"{uuid.uuid4().hex}.arrow", content.getvalue())


def read_values(folder: str | os.PathLike[str], rows: int) -> pa.Table:
    """Reads all parts that `write_values` wrote into a folder.

    Args:
        folder: The folder of `write_values`.
        rows: Number of rows that must have a value: `len(dataset)` of the dataset that the run read.

    Returns:
        A table of `_rowoffset`, int64 in ascending order, and `value`. A row with several values occurs once.

    Raises:
        ConfigError: If the URI of the folder cannot be opened.
        CoverageError: If the number of rows with a value is not `rows`.
        DatasetError: If the values are pickled objects.
    """
    check_path("read_values(): folder", folder)
    check_integer("read_values(): rows", rows, 0)
    filesystem, path = open_folder(folder)
    found = filesystem.get_file_info(pa.fs.FileSelector(path, allow_not_found=True))
    parts = [file.path for file in found if file.extension == "arrow"]
    table = pa.table({ROW_OFFSET: pa.array([], pa.int64()), _VALUE: pa.nulls(0)})
    if parts:
        stored = pyarrow.dataset.dataset(parts, format="arrow", filesystem=filesystem)
        refuse_pickled(stored.schema, repr(public_uri(os.fspath(folder))))
        table = stored.to_table()
    offsets, first = np.unique(table[ROW_OFFSET].to_numpy(), return_index=True)
    if len(offsets) != rows:
        raise CoverageError(
            f"{public_uri(os.fspath(folder))!r} has values of {len(offsets):,} rows, and {rows:,} rows must have "
            "one: nothing was read. Let the run reach its end, and give each run a folder of its own."
        )
    return table.take(pa.array(first))


def write_column(
    uri: str | os.PathLike[str],
    column: str,
    values: pa.Table,
    *,
    version: Version,
    storage_options: StorageOptions | None = None,
) -> int:
    """Writes values into a column of the newest version of a dataset, in one commit.

    Rows that were added after `version` keep their values, and so do rows of fragments that were compacted or rewritten
    since then. If another writer commits first, the values are written again, into the version that is newest then.

    Args:
        uri: Path or URI of the dataset.
        column: Name of an existing column, see `add_column`.
        values: A table of `_rowoffset` and `value`, as `read_values` returns it. Rows that are not in this table keep
            their values.
        version: The version that the row offsets refer to: a number, a tag, or a pair of branch (None for the trunk)
            and number (None for the newest). A tag is best, because a clean-up keeps only tagged versions.
        storage_options: Options of the object store; see `raylance.dataset`.

    Returns:
        Number of values that were not written, because the fragments of their rows were compacted, rewritten or removed
        after the version. 0 if all were written.

    Raises:
        ConfigError: If the column has another type than the values, or a row offset is not in the version.
        DatasetError: If the dataset, its version or the column is missing, or if other writers always commit first.
    """
    check_name("write_column(): column", column)
    if not (isinstance(values, pa.Table) and {ROW_OFFSET, _VALUE} <= {*values.column_names}):
        found = values.column_names if isinstance(values, pa.Table) else type(values).__name__
        raise ConfigError(
            f"write_column(): values is {found}: give a table of {ROW_OFFSET} and {_VALUE}, as read_values returns it. "
            "Nothing was written."
        )
    pinned = pin(uri, version, storage_options)
    retried = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(CommitConflictError),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=5.0),
        reraise=True,
    )
    try:
        return retried(functools.partial(_write, pinned, column, values))
    except CommitConflictError as error:
        raise DatasetError(
            f"other writers committed to {pinned.uri!r} in each of {_ATTEMPTS} attempts to write column {column!r} "
            f"({error}). Nothing was written. Call write_column again when they pause."
        ) from error


def _write(pinned: Source, column: str, values: pa.Table) -> int:
    newest = pinned.newest().open()
    if column not in newest.schema.names:
        raise DatasetError(
            f"{pinned.uri!r} has no column {column!r}: nothing was written. Add it with writing.add_column, or name "
            f"one of {', '.join(newest.schema.names)}."
        )
    if len(values):  # the type of an empty table is not known
        _check_type(newest, column, values[_VALUE].type)
    found = values[_VALUE].cast(newest.schema.field(column).type)  # equal but for names of inner fields
    kept = {fragment.fragment_id: fragment for fragment in newest.get_fragments()}
    offsets, first = np.unique(values[ROW_OFFSET].to_numpy(), return_index=True)
    changed: list[FragmentMetadata] = []
    fields, start, left = set[int](), 0, 0
    for old in pinned.open().get_fragments():
        end = start + old.count_rows()
        low, high = np.searchsorted(offsets, [start, end])
        fragment = kept.get(old.fragment_id)
        if fragment is None or not _files(old) & _files(fragment):
            left += int(high - low)
        elif low < high:
            rows = old.scanner(columns=[], with_row_id=True).to_table()["_rowid"]
            here = {
                "_rowid": rows.take(pa.array(offsets[low:high] - start)),
                column: found.take(pa.array(first[low:high])),
            }
            metadata, modified = fragment.update_columns(pa.table(here))
            changed.append(metadata)
            fields |= {*modified}
        start = end
    _check_offsets(offsets, start, pinned)
    if changed:
        operation = lance.LanceOperation.Update(updated_fragments=changed, fields_modified=sorted(fields))
        options = current(pinned.storage_options)
        lance.LanceDataset.commit(newest, operation, read_version=newest.version, storage_options=options)
    return left


def _files(fragment: LanceFragment) -> set[str]:
    """Returns the names of a fragment's data files, which identify it: its number is used again after an overwrite."""
    return {file.path for file in fragment.data_files()}


def _check_offsets(offsets: Int64Array, rows: int, pinned: Source) -> None:
    if len(offsets) and not 0 <= offsets[0] <= offsets[-1] < rows:
        raise ConfigError(
            f"the values are for row offsets {offsets[0]:,} to {offsets[-1]:,}, and version {pinned.version} of "
            f"{pinned.uri!r} has {rows:,} rows: nothing was written. Name the version that the run read."
        )


def _check_type(dataset: lance.LanceDataset, column: str, type: pa.DataType) -> None:
    has = dataset.schema.field(column).type
    if has != type:
        raise ConfigError(
            f"column {column!r} of {dataset.uri!r} is {has}, and the values are {type}: nothing was written. Compute "
            f"values of {has}, or name another column."
        )


def _as_arrow(values: Any, type: pa.DataType) -> pa.Array:
    """Converts values of any form into an Arrow array of a type."""
    try:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return values.cast(type)
        if not hasattr(values, "__array__"):
            return pa.array(values).cast(type)
        rows = np.asarray(values.detach() if hasattr(values, "detach") else values)
        if pa.types.is_fixed_size_list(type):
            flat = rows.reshape(len(rows) * type.list_size, *rows.shape[2:])
            return pa.FixedSizeListArray.from_arrays(_as_arrow(flat, type.value_type), type=type)
        return pa.array(rows).cast(type)
    except (pa.ArrowException, ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"the values do not fit the type {type} ({error}): no part was written. Convert them, or add the column "
            "with another type."
        ) from error
