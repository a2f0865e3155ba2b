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

from raylance.collate import NumpyBatch, to_numpy
from raylance.columns import DRAW, ROW_OFFSET, SEED, VALID
from raylance.errors import BadRowError, ConfigError
from raylance.images import DRAWS, Image, Pixels
from raylance.metrics import Receipt
from raylance.permutation import BoolArray, Int64Array, UInt64Array, derive_key, mix64, subkeys, uniform

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
            or `torch.Generator`), and returns such a dict with as many rows. It sees pieces of batches, so what it does
            to a row must not depend on the others.
        transformed: Schema of what the transform returns: it is never called for a step in which a rank has no row.
    """

    images: Sequence[Image]
    seed: int
    mask_bad_rows: bool
    transform: Transform | None = None
    transformed: pa.Schema | None = None
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
            ConfigError: If the transform returns something else than arrays with as many rows.
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
            arrays = to_numpy(table.drop_columns([DRAW] if draws is not None else []), {})
            arrays[SEED] = self._keys(offsets, draws, epoch, "transform")
            table = _checked_table(self.transform(arrays), table.num_rows)
        hidden = [name for name in (ROW_OFFSET, DRAW, SEED) if name in table.column_names]
        done = table.drop_columns(hidden).append_column(VALID, pa.array(valid))
        seconds = time.perf_counter() - begin
        return done, Receipt(nbytes=done.nbytes, decode_s=seconds, masked_rows=int((~valid).sum()))

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
            except Exception as error:  # whatever a codec raises on damaged bytes, it is this row that is bad
                if not self.mask_bad_rows:
                    reason = f"{type(error).__name__}: {error}"
                    raise BadRowError(image.column, int(offsets[row]), reason) from error
                out[row] = 0
                valid[row] = False

        return decode_row

    def _buffer(self, image: Image, rows: int) -> Pixels:
        buffer = self._buffers.get(image.column)
        if buffer is None or len(buffer) < rows:
            self._buffers[image.column] = buffer = np.empty((rows, *image.shape), dtype=np.uint8)
        return buffer[:rows]


def _checked_table(made: Any, rows: int) -> pa.Table:
    """What a transform returned, as a table."""
    if not isinstance(made, dict) or not made:
        raise ConfigError(f"transform returned {type(made).__name__}: it must return a dict of arrays by column.")
    columns: dict[str, Any] = {}
    for name, values in made.items():
        if len(values) != rows:
            raise ConfigError(
                f"transform returned {len(values)} rows in {name!r} for {rows} rows: rows lost or added here would "
                "make ranks uneven. Return one for each; filter rows with filter= instead."
            )
        columns[name] = _arrow(values)
    return pa.table(columns)


def _arrow(values: Any) -> pa.Array:
    array: npt.NDArray[Any] = np.asarray(values) if not isinstance(values, list) else np.array(values, dtype=object)
    if array.dtype == object or array.dtype.kind in "US":
        return pa.array(array.tolist())
    if array.ndim == 1:
        return pa.array(array)
    flat = pa.FixedSizeListArray.from_arrays(
        pa.array(np.ascontiguousarray(array).reshape(-1)), math.prod(array.shape[1:])
    )
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type.value_type, array.shape[1:]), flat)
