"""The rows of a handle as a dataset of Ray Data, for jobs that need no ranks, steps or checkpoints; and the other way,
a dataset of Ray Data as one of Lance.
"""

import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import ray.data
from lance.fragment import FragmentMetadata, write_fragments
from ray.data import Datasink, Datasource, ReadTask, read_datasource
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.extensions import ArrowTensorArray
from ray.exceptions import RayTaskError

from raylance.arguments import check_flag, check_integer, listed, refuse_unknown
from raylance.batches.lookup import Lookup
from raylance.columns import COMPONENT, ROW_OFFSET, VALID
from raylance.decode.arrays import holds_bfloat16, is_dense, shape_of, to_arrow, to_numpy
from raylance.environment.shared import Shared
from raylance.errors import ConfigError, HelperError
from raylance.memory.arrow import width_of
from raylance.opened import Opened
from raylance.orders.permutation import Int64Array
from raylance.planning.plan import Plan
from raylance.runtime.ray.faults import cause_of

_READ_BYTES = 256 << 20  # stored rows that a task reads and holds together
_BLOCK_BYTES = 32 << 20  # rows that it decodes and gives together
_FILE_BYTES = 256 << 20  # bytes that a task writes at least
_TENSORS = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")  # names of Ray's types
_RAGGED = "ray.data.arrow_variable_shaped_tensor"


class _Rows(Datasource):
    """The selected rows in storage order, or those of an epoch in its order."""

    def __init__(self, spec: Opened, schema: pa.Schema, plan: Plan | None, epoch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spec, self._plan, self._epoch = spec.map_shared(Shared.of_run), plan, epoch
        source = spec.read.source
        widths = [width_of(kind) for kind in schema.types]  # decoded; 0 where values differ in size
        self._row_bytes = max(1.0, sum(widths) + (0.0 if all(widths) else source.row_bytes))
        self._rows = spec.delivery.rows if plan is None else plan.rows_of(epoch)
        # Rows of whole windows are read together, because those of a part of one lie scattered over it.
        window_rows = 1 if plan is None else plan.order.read_positions or 1
        fitting = max(1, int(_READ_BYTES / max(1.0, source.row_bytes)))
        self._read_rows = max(1, fitting // window_rows) * window_rows

    def get_name(self) -> str:
        """Returns the name that Ray shows."""
        return "Raylance"

    def estimate_inmemory_data_size(self) -> int:
        """Returns the bytes of all rows."""
        return int(self._rows * self._row_bytes)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Returns tasks of consecutive rows, of whole reads if there are enough of them."""
        reads = -(-self._rows // self._read_rows)
        unit = self._read_rows if reads >= parallelism else 1
        units = -(-self._rows // unit)
        bounds = [min(self._rows, part * units // parallelism * unit) for part in range(parallelism)] + [self._rows]
        return [
            ReadTask(
                self._task(low, high),
                BlockMetadata(num_rows=high - low, size_bytes=int((high - low) * self._row_bytes), exec_stats=None),
                per_task_row_limit=per_task_row_limit,
            )
            for low, high in itertools.pairwise(bounds)
            if low < high
        ]

    def _task(self, low: int, high: int) -> Callable[[], Iterator[pa.Table]]:
        spec, plan, epoch, each = self._spec, self._plan, self._epoch, self._read_rows
        block_rows = max(1, int(_BLOCK_BYTES / self._row_bytes))

        def read() -> Iterator[pa.Table]:
            lookup = Lookup(spec.read)
            for first in range(low, high, each):
                positions = np.arange(first, min(first + each, high), dtype=np.int64)
                yield from _read(spec, plan, epoch, lookup, positions, block_rows)

        return read


def _read(
    spec: Opened, plan: Plan | None, epoch: int, lookup: Lookup, positions: Int64Array, block_rows: int
) -> Iterator[pa.Table]:
    rows = positions if plan is None else plan.select(epoch, positions)
    draws = positions if plan is not None and plan.order.repeats else None
    offsets = spec.read.source.load_selection().offsets(rows)
    marks = [VALID] if spec.delivery.masks_bad_rows else []
    component = [COMPONENT] if isinstance(spec.read.source.uri, dict) else []
    for table in lookup.read_in_parts(offsets, block_rows, epoch, draws):
        yield _with_tensors(table.select([*spec.read.delivers, *component, ROW_OFFSET, *marks]))


def _with_tensors(table: pa.Table) -> pa.Table:
    """Makes tensors of lists of one size and of tensors, with their axes in order: Ray Data makes arrays of objects of
    such lists, and takes tensors as if their axes were in order. Raises DatasetError if there are nulls among them.
    """
    for place, field in enumerate(table.schema):
        if is_dense(field.type) and shape_of(field.type) and not holds_bfloat16(field.type):
            values = to_numpy(table.select([field.name]))[field.name]
            # Arrow makes no arrays of tensors of bool.
            made = ArrowTensorArray.from_numpy(values) if values.dtype == np.bool_ else to_arrow(values)
            table = table.set_column(place, field.name, made)
    return table


def to_ray_dataset(spec: Opened, schema: pa.Schema, plan: Plan | None, epoch: int, options: Any) -> Any:
    """Returns the rows of a handle as a dataset of Ray Data; see `Dataset.to_ray_dataset`."""
    _check_options("to_ray_dataset()", options, read_datasource, ("epoch", "global_batch_size"))
    return read_datasource(_Rows(spec, schema, plan, epoch), **options)


def _check_options(call: str, options: Any, function: Callable[..., Any], own: Iterable[str]) -> None:
    """Raises ConfigError if a function of Ray has not all options: it may ignore others."""
    parameters = inspect.signature(function).parameters.values()
    known = {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    refuse_unknown(call, {name: options[name] for name in options if name not in known}, {*known, *own})


class _Fragments(Datasink[list[str]]):
    """Writes blocks as fragments of a Lance dataset, which one commit makes visible."""

    def __init__(self, uri: str, schema: pa.Schema, rows_per_file: int | None, options: dict[str, str] | None) -> None:
        self._uri, self._schema, self._rows, self._options = uri, schema, rows_per_file, options

    def get_name(self) -> str:
        """Returns the name that Ray shows."""
        return "Lance"

    @property
    def min_rows_per_write(self) -> int | None:
        """Number of rows that a task gets at least, but for the last one."""
        return self._rows

    @property
    def min_bytes_per_write(self) -> int | None:
        """Bytes that a task gets at least, but for the last one."""
        return _FILE_BYTES if self._rows is None else None

    def write(self, blocks: Iterable[Any], ctx: Any) -> list[str]:
        """Writes the blocks of a task; returns its fragments as JSON. If the task is repeated, the first files are not
        used.
        """
        failures: list[ConfigError] = []

        def make() -> Iterator[pa.RecordBatch]:
            for accessor in map(BlockAccessor.for_block, blocks):
                if accessor.num_rows():  # else it may have no columns
                    try:
                        table = _cast(_stored(accessor.to_arrow()), self._schema)
                    except ConfigError as error:
                        failures.append(error)
                        raise
                    yield from table.to_batches()

        batches = make()
        if (first := next(batches, None)) is None:
            return []
        reader = pa.RecordBatchReader.from_batches(self._schema, itertools.chain([first], batches))
        limits: dict[str, Any] = (
            {"max_bytes_per_file": 2 * _FILE_BYTES} if self._rows is None else {"max_rows_per_file": self._rows}
        )
        try:
            made: Any = write_fragments(reader, self._uri, self._schema, storage_options=self._options, **limits)
        except OSError:
            for error in failures:  # Lance raises an error of its own in place of these
                raise error from None
            raise
        return [json.dumps(fragment.to_json()) for fragment in made]

    def on_write_complete(self, write_result: Any) -> None:
        """Commits all fragments."""
        made = [FragmentMetadata.from_json(each) for part in write_result.write_returns for each in part]
        if sum(fragment.physical_rows for fragment in made) != write_result.num_rows:
            raise HelperError(
                f"{self._uri}: {write_result.num_rows:,} rows were given, and the files have "
                f"{sum(fragment.physical_rows for fragment in made):,}. Nothing was committed. This is a defect: "
                "please report it."
            )
        operation = lance.LanceOperation.Overwrite(self._schema, made)
        lance.LanceDataset.commit(self._uri, operation, storage_options=self._options)


def from_ray_dataset(
    ds: Any,
    uri: str,
    *,
    schema: pa.Schema | None = None,
    rows_per_file: int | None = None,
    overwrite: bool = False,
    storage_options: dict[str, str] | None = None,
    **options: Any,
) -> int:
    """Writes a dataset of Ray Data as a Lance dataset for training. Tasks of Ray Data write fragments; one commit at
    the end makes them visible, so readers see all rows or none.

    Tensors become fixed-shape tensors, or lists of one size if they have one axis; lists of numbers stay lists.

    A write that was killed cannot be continued, because Ray Data may cut other blocks the next time: write again. The
    files of the killed one are in no version; `cleanup_old_versions(delete_unverified=True)` of Lance removes them. To
    make a dataset from files so that a killed run is continued, use `jobs/create_dataset.py`.

    Args:
        ds: The `ray.data.Dataset`.
        uri: Where the Lance dataset goes.
        schema: Columns and types of the Lance dataset; None for those of the first block with rows. Each block must
            have these columns, of types that these hold without loss.
        rows_per_file: Rows of each fragment, or about as many; None for about 256 MiB in each.
        overwrite: Whether a dataset that is there gets a new version with these rows in place of its own.
        storage_options: Options of the object store, as for `raylance.dataset`.
        **options: Options of `ray.data.Dataset.write_datasink`, such as `concurrency`.

    Returns:
        The number of rows.

    Raises:
        ConfigError: If `uri` is a dataset already, an argument has a wrong type, a column has a type that Lance cannot
            store, or a block has other columns or types than the schema. No version is made then.
    """
    own = from_ray_dataset.__kwdefaults__ or ()
    _check_options("from_ray_dataset()", options, ray.data.Dataset.write_datasink, own)
    if not isinstance(ds, ray.data.Dataset):
        raise ConfigError(f"from_ray_dataset({ds!r}, {uri!r}): give a ray.data.Dataset first. Nothing was written.")
    if not isinstance(schema, pa.Schema | None):
        raise ConfigError(f"from_ray_dataset(schema={schema!r}): give a pyarrow.Schema, or None. Nothing was written.")
    if rows_per_file is not None:
        check_integer("rows_per_file", rows_per_file, 1)
    if not check_flag("overwrite", overwrite) and _exists(uri, storage_options):
        raise ConfigError(
            f"from_ray_dataset({uri!r}): a dataset is there already, whose rows would be replaced. Nothing was "
            "written. Give another uri, or overwrite=True, which adds a version."
        )
    sink = _Fragments(uri, _first_schema(ds, uri) if schema is None else schema, rows_per_file, storage_options)
    try:
        ds.write_datasink(sink, **options)
    except RayTaskError as error:
        if isinstance(cause := cause_of(error), ConfigError):
            raise ConfigError(str(cause).partition("\n")[0]) from None  # without what Ray adds
        raise
    return int(lance.dataset(uri, storage_options=storage_options).count_rows())


def _first_schema(ds: Any, uri: str) -> pa.Schema:
    """Returns the schema of the first block with rows, as Lance stores it."""
    found = ds.schema()
    if found is None or not isinstance(found.base_schema, pa.Schema):
        raise ConfigError(
            f"from_ray_dataset({uri!r}): the blocks have no Arrow schema ({found}). Nothing was written. If there are "
            'rows, convert them first: ds.map_batches(lambda table: table, batch_format="pyarrow").'
        )
    return pa.schema([field.with_type(_stored_type(field)) for field in found.base_schema])


def _exists(uri: str, options: dict[str, str] | None) -> bool:
    try:
        lance.dataset(uri, storage_options=options)
    except (OSError, ValueError):  # any other trouble with the place shows on writing
        return False
    return True


def _stored(table: pa.Table) -> pa.Table:
    """Gives tensors the types that Lance stores. Raises ConfigError if there is none."""
    for place, (field, column) in enumerate(zip(table.schema, table.columns, strict=True)):
        kind = _stored_type(field)
        if kind != field.type:
            chunks = [_as_stored(field.name, chunk, kind) for chunk in column.chunks]
            table = table.set_column(place, field.name, pa.chunked_array(chunks, kind))
    return table


def _stored_type(field: pa.Field) -> pa.DataType:
    kind: Any = field.type
    name = kind.extension_name if isinstance(kind, pa.BaseExtensionType) else ""
    if isinstance(kind, pa.FixedShapeTensorType) or name in _TENSORS:
        return pa.list_(kind.value_type, kind.shape[0]) if len(kind.shape) == 1 else _tensor(kind)
    if name == _RAGGED and kind.ndim == 1:
        return kind.storage_type.field("data").type
    if name.startswith("ray."):
        raise ConfigError(
            f"column {field.name!r} is {kind}, for which Lance has no type. Nothing was written. Encode its values "
            "first, as bytes or as tensors of one shape, or leave it out: ds.drop_columns([…])."
        )
    return kind


def _tensor(kind: Any) -> pa.DataType:
    is_native = isinstance(kind, pa.FixedShapeTensorType)
    return kind if is_native else pa.fixed_shape_tensor(kind.value_type, kind.shape)


def _as_stored(name: str, chunk: pa.Array, kind: pa.DataType) -> pa.Array:
    if chunk.null_count:
        raise ConfigError(f"column {name!r} has nulls among tensors. Nothing was written. Leave these rows out.")
    if chunk.type.extension_name == _RAGGED:
        return chunk.storage.field("data")
    lists = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    made = pa.FixedSizeListArray.from_arrays(chunk.storage.flatten(), type=lists)
    return pa.ExtensionArray.from_storage(kind, made) if isinstance(kind, pa.BaseExtensionType) else made


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns a block with the columns and types of the schema.

    Raises:
        ConfigError: If it has other columns, or values that a type of the schema does not hold.
    """
    if other := sorted({*table.column_names} ^ {*schema.names}):
        raise ConfigError(
            f"not all blocks have the column {other[0]!r}: one has {listed(table.column_names)}, the schema "
            f"{listed(schema.names)}. No version was written, as the column would vanish, or lack values. Give all "
            "blocks the same columns by ds.map_batches(…), or take the columns that all have, ds.select_columns(…)."
        )
    columns = []
    for field in schema:
        column = table[field.name]
        if column.type == field.type:
            columns.append(column)
            continue
        try:
            found = pa.schema([pa.field(field.name, column.type)])
            joined = pa.unify_schemas([pa.schema([field.with_nullable(True)]), found], promote_options="permissive")
            if joined.field(0).type != field.type:
                raise pa.ArrowTypeError(f"{joined.field(0).type} holds both")
            columns.append(column.cast(field.type))
        except (pa.ArrowTypeError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ConfigError(
                f"column {field.name!r} is {column.type} in a block, and {field.type} in the schema, which does not "
                f"hold all such values ({str(error).partition(chr(10))[0]}). No version was written. Give a type that "
                "holds those of all blocks, from_ray_dataset(…, schema=…), or cast them by ds.map_batches(…)."
            ) from error
    return pa.Table.from_arrays(columns, schema=schema)
