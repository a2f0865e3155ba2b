"""Owns what happens to rows between reading and collating: image columns decoded, the user's transform applied; reads
nothing, and draws nothing from a global generator.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import COMPONENT, COMPONENT_SHIFT, DRAW, OFFSET_MASK, ROW_OFFSET, SEED, VALID, tell_rows
from raylance.decode.arrays import NumpyBatch, to_numpy
from raylance.decode.images import DRAWS, Image, Pixels, image_size
from raylance.errors import BadRowError, ConfigError, DatasetError
from raylance.orders.permutation import BoolArray, Int64Array, UInt64Array, derive_key, mix64, subkeys, uniform
from raylance.telemetry import Receipt

Transform = Callable[[NumpyBatch], dict[str, Any]]


@dataclasses.dataclass(slots=True, kw_only=True)
class Decoding:
    """Decodes the image columns of tables and applies a transform, reusing its output memory from call to call.

    Attributes:
        images: The columns to decode, sizes known.
        seed: Seed of the augmentation.
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

    images: Sequence[Image]
    seed: int
    mask_bad_rows: bool
    transform: Transform | None = None
    transformed: pa.Schema | None = None
    datasets: tuple[str, ...] = ()
    _buffers: dict[str, Pixels] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are decoded."""
        return [image.column for image in self.images]

    @property
    def row_bytes(self) -> int:
        """Bytes of the decoded columns of a row."""
        return sum(math.prod(image.shape) for image in self.images)

    def apply(self, table: pa.Table, epoch: int, executor: Executor | None = None) -> tuple[pa.Table, Receipt]:
        """Decodes.

        The result shares memory that the next call overwrites: copy it (as sending it through Ray does) before then.

        Args:
            table: The encoded columns and `_rowoffset`; with a transform, all columns; where rows repeat, `_draw`.
            epoch: Epoch, part of the key of the augmentation.
            executor: Threads to decode in, or None for the calling thread.

        Returns:
            A table of the columns, images as fixed-shape tensors of uint8 (H, W, 3), and `_valid` (bool); and what the
            work took.

        Raises:
            BadRowError: For the first row that cannot be decoded, unless bad rows are masked.
            ConfigError: If the transform returns something else than arrays with as many rows, of the types that the
                opening found, or if an image is of another size than the first and none was asked for.
        """
        begin = time.perf_counter()
        offsets = table[ROW_OFFSET].to_numpy()
        draws = table[DRAW].to_numpy() if DRAW in table.column_names else None
        valid = np.ones(table.num_rows, dtype=np.bool_)
        for image in self.images:
            out = self._buffer(image, table.num_rows)
            keys = self._keys(offsets, draws, epoch, "augment", image.column)
            decode_row = self._row_decoder(image, table[image.column], offsets, keys, out, valid)
            for _ in (map if executor is None else executor.map)(decode_row, range(table.num_rows)):
                pass
            flat = pa.FixedSizeListArray.from_arrays(pa.array(out.reshape(-1)), math.prod(image.shape))
            column = pa.ExtensionArray.from_storage(image.arrow_type, flat)
            table = table.set_column(table.column_names.index(image.column), image.column, column)
        if self.transformed is not None and table.num_rows == 0:
            table = pa.Table.from_batches([], schema=self.transformed)
        elif self.transform is not None:
            arrays = to_numpy(table.drop_columns([DRAW] if draws is not None else []))
            arrays[ROW_OFFSET] = offsets & OFFSET_MASK  # the row's own, and memory of its own
            arrays[SEED] = self._keys(offsets, draws, epoch, "transform")
            table = self._checked_table(self.transform(arrays), offsets, table.schema)
        hidden = [name for name in (ROW_OFFSET, DRAW) if name in table.column_names]
        done = table.drop_columns(hidden).append_column(VALID, pa.array(valid))
        seconds = time.perf_counter() - begin
        return done, Receipt(nbytes=done.nbytes, decode_s=seconds)

    def _keys(self, offsets: Int64Array, draws: Int64Array | None, epoch: int, *purpose: str) -> UInt64Array:
        """One key for each row; where rows repeat, one for each draw, or all copies of a row would look the same."""
        keys = subkeys(derive_key(self.seed, epoch, *purpose), offsets)
        return keys if draws is None else mix64(keys ^ subkeys(derive_key("draw"), draws))

    def _row_decoder(
        self,
        image: Image,
        column: pa.ChunkedArray,
        offsets: Int64Array,
        keys: UInt64Array,
        out: Pixels,
        valid: BoolArray,
    ) -> Callable[[int], None]:
        """A function that decodes row i of a column to `out[i]`, and clears `valid[i]` where a bad row is masked."""
        draws = uniform(keys, DRAWS)  # (rows, 41)
        encoded = [memoryview(value.as_buffer()) if value.is_valid else None for value in column]

        def decode_row(row: int) -> None:
            try:
                value = encoded[row]
                if value is None:
                    raise ValueError("is null")
                image.decode_into(value, draws[row], out[row])
            except ConfigError as error:  # a good image, which the settings have no place for
                rows = tell_rows(offsets[row : row + 1], self.datasets)
                raise ConfigError(f"column {image.column!r} of {rows} {error}") from error
            except Exception as error:  # whatever a codec raises on damaged bytes, it is this row that is bad
                if not self.mask_bad_rows:
                    reason, offset = f"{type(error).__name__}: {error}", int(offsets[row])
                    dataset = next(iter(self.datasets[offset >> COMPONENT_SHIFT :]), None)
                    raise BadRowError(image.column, offset & OFFSET_MASK, reason, dataset) from error
                out[row] = 0
                valid[row] = False

        return decode_row

    def _buffer(self, image: Image, rows: int) -> Pixels:
        buffer = self._buffers.get(image.column)
        if buffer is None or len(buffer) < rows:
            self._buffers[image.column] = buffer = np.empty((rows, *image.shape), dtype=np.uint8)
        return buffer[:rows]

    def _checked_table(self, made: Any, offsets: Int64Array, given: pa.Schema) -> pa.Table:
        """What the transform made of some rows, as a table of the schema found at the opening, or there of its own."""
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
        names = list(made) if self.transformed is None else self.transformed.names
        if set(names) != set(made):
            raise ConfigError(
                f"transform returned the columns {', '.join(made)} for {tell_rows(offsets, self.datasets)}, at "
                f"the opening it returned {', '.join(names)}; the epoch stops here, because pieces of a step would not "
                "fit together. Return the same columns always."
            )
        return pa.table({name: self._checked_column(name, made[name], offsets, given) for name in names})

    def _checked_column(self, name: str, values: Any, offsets: Int64Array, given: pa.Schema) -> pa.Array:
        rows = _length(values)
        if rows != len(offsets):
            what = type(values).__name__ if rows is None else f"{rows} rows"
            raise ConfigError(
                f"transform returned {what} in {name!r} for {len(offsets)} rows: rows lost or added here would make "
                "ranks uneven. Return one for each; filter rows with filter= instead."
            )
        kind = None if self.transformed is None else self.transformed.field(name).type
        found = type(values).__name__
        try:
            array = _arrow(values)
            found = str(array.type)
            if kind is None and _is_untold(array.type):
                kind = given.field(name).type if name in given.names else None
                if kind is None or _is_untold(kind):
                    raise ConfigError(
                        f"transform returned only None or empty lists in {name!r} for the {rows} rows tried at the "
                        f"opening, which does not tell its type ({found}), and later pieces could be of any; nothing "
                        "was started. Return a pyarrow array, which says it: pa.array(values, pa.string()), say."
                    )
            return array if kind is None else _cast(array, kind)
        except (pa.ArrowException, TypeError) as error:
            raise ConfigError(
                f"transform returned {found} in column {name!r} for {tell_rows(offsets, self.datasets)}, which "
                f"cannot become {'one Arrow type' if kind is None else f'{kind}, as at the opening'} ({error}); it "
                "stops here, because pieces of a step must be of one type. Return the same type always: "
                "values.astype(…), or a pyarrow array such as pa.array(values, pa.string())."
            ) from error


def settle_size(image: Image, probe: pa.Table) -> Image:
    """Checks that a column holds images, and takes the size from them where none is given.

    A damaged row among good ones is left to `on_bad_row`; a column of which no sampled row decodes is refused.

    Args:
        image: How they are decoded.
        probe: A few rows, with `_rowoffset`.

    Raises:
        DatasetError: If none of the rows decodes.
    """
    failures: list[Exception] = []
    for row in range(probe.num_rows):
        try:
            encoded = probe[image.column][row].as_py()
            if encoded is None:
                raise ValueError("is null")
            settled = image
            if image.size is None:
                size = image_size(encoded) if image.decode_fn is None else image.decode_fn(encoded).shape[:2]
                settled = dataclasses.replace(image, size=(int(size[0]), int(size[1])), keeps_size=True)
            Decoding(images=[settled], seed=0, mask_bad_rows=False).apply(probe.slice(row, 1), 0)
            return settled
        except Exception as error:  # whatever a codec raises on damaged bytes; another row may be good
            failures.append(error)
    raise DatasetError(
        f"column {image.column!r} holds no images: of {len(failures)} rows sampled none decodes (the first says: "
        f"{failures[0]}); nothing was started. Name a column of encoded images in decode=."
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
    if array.ndim == 1:
        return pa.array(array)
    flat = pa.FixedSizeListArray.from_arrays(
        pa.array(np.ascontiguousarray(array).reshape(-1)), math.prod(array.shape[1:])
    )
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type.value_type, array.shape[1:]), flat)
