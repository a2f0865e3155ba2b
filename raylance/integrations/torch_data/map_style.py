"""Map-style datasets: selected rows by index, and the sampler of one rank's batches."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from raylance.api.dataset import Dataset
from raylance.batches.bad_rows import MaskedRows, rows_with_bad_values
from raylance.batches.conversion import hidden_columns, to_torch
from raylance.batches.lookup import Lookup
from raylance.columns import VALID
from raylance.decode.arrays import to_numpy
from raylance.environment import process
from raylance.errors import ConfigError
from raylance.integrations.torch_data.handed_out import Note, RowsRead
from raylance.integrations.torch_data.steps import HandleCopy, Pass, RankSteps
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.digest import Digest
from raylance.planning.plan import Plan

RAYS_WRAPPER = "ray.train.torch.train_loop_utils"
"""The module of Ray's `prepare_data_loader` that iterates over a DataLoader."""
WITHOUT_RAYS_WRAPPER = (
    "Leave prepare_data_loader out: a raylance.torch_data.Loader with dist_info='ray' gives each worker its own rows. "
    "Move a batch to the device in the loop; ray.train.get_dataset_shard(name).batches(…) does that itself."
)

Keys = tuple[int, BoolArray, Int64Array | None]  # epoch; False for rows of padding; positions if rows repeat


class _Indices(list[int]):
    """The indices of one batch, as a list that also carries the `Keys` by which `MapDataset` reads them."""

    keys: Keys


class PlacedSampler(torch.utils.data.DistributedSampler[Any]):
    """Stands for a `RowSampler` as the attribute `sampler` of `Loader`. Lightning, Fabric and Ray replace any sampler
    that is not a DistributedSampler, and call its `set_epoch`; `Loader` itself moves from epoch to epoch.
    """

    def __init__(self, steps: "RowSampler") -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing, because going to the start of an epoch would give up the position of a resume."""


class MapDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Returns selected rows by index, counted in storage order. The attribute `epoch` chooses the random
    augmentation, and the documents of packed sequences; it is 0 unless you set it. If a `RowSampler` gives the indices,
    the sampler's epoch is used instead.
    """

    def __init__(self, handle: Dataset, *, with_row_offset: bool = False) -> None:
        """Takes the handle of `raylance.dataset`; `with_row_offset` adds `_rowoffset` to each row."""
        self._opened, self.epoch, self.note = HandleCopy(handle), 0, Note()
        delivery_spec = self._opened.spec.delivery
        self._hidden = hidden_columns(delivery_spec, delivery_spec.remainder, with_row_offset)
        self._lookup: Lookup | None = None
        self._masked = MaskedRows(self._opened.spec.read)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lookup": None}

    def __len__(self) -> int:
        """Number of selected rows."""
        return self._opened.spec.delivery.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Reads one selected row; `__getitems__` costs only a fraction of this for each row."""
        if process.is_called_by(RAYS_WRAPPER):
            raise ConfigError(
                "Ray's prepare_data_loader replaces the RowSampler by a sampler of its own, so single rows would come "
                f"in place of the plan's batches. {WITHOUT_RAYS_WRAPPER}"
            )
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Reads several rows at once.

        Args:
            indices: Indices of selected rows, in any order; they may repeat. Negative ones count from the end.

        Returns:
            A dict by column for each index: NumPy scalars, tensors for lists and bfloat16, uint8 images (3, H, W),
            strings, bytes.

        Raises:
            IndexError: If an index is outside the selection.
            RaylanceError: In a forked process.
            BadRowError: If a row cannot be decoded, or too many rows were masked.
        """
        if not all(-len(self) <= index < len(self) for index in indices):
            raise IndexError(f"indices from {min(indices)} to {max(indices)} lie outside of {len(self)} rows")
        self._opened.check_process()
        read_spec = self._opened.spec.read
        self._lookup = self._lookup or Lookup(read_spec)
        keys: Keys = (self.epoch, np.ones(len(indices), dtype=np.bool_), None)
        epoch, real, draws = getattr(indices, "keys", keys)
        rows = np.array(indices, dtype=np.int64) % len(self)
        offsets = read_spec.source.load_selection().offsets(rows)
        table = self._lookup.read(offsets, epoch, draws)
        decoded = table[VALID].to_numpy()
        reasons = {offset: (column, why) for offset, column, why in self._lookup.bad_rows}
        is_bad = ~decoded | rows_with_bad_values(table, read_spec.of_lists)
        self._masked.add(len(rows), offsets[is_bad], reasons.get)
        if self.note.is_wanted and isinstance(indices, _Indices):  # other rows are not of the plan
            bad_rows, masked = self._lookup.bad_rows, int(len(rows) - decoded.sum())
            digest = Digest.of(offsets, real)
            self.note.rows = RowsRead(digest=digest, nbytes=table.nbytes, masked=masked, bad_rows=bad_rows)
        valid = real & decoded
        table = table.drop_columns([VALID]).append_column(VALID, [valid]).drop_columns(self._hidden)
        arrays, last = to_numpy(table, as_bits=True), read_spec.channels_last
        batch = to_torch(arrays, table.schema, dtypes={}, channels_last=last)
        columns = {name: _scalars(values) for name, values in batch.items()}
        return [{name: values[row] for name, values in columns.items()} for row in range(len(indices))]


def _scalars(values: Any) -> Any:
    """Returns a tensor of numbers as an array, so that a row has NumPy scalars; NumPy has no bfloat16."""
    is_scalars = isinstance(values, torch.Tensor) and values.ndim == 1 and values.dtype != torch.bfloat16
    return values.numpy() if is_scalars else values


class RowSampler(RankSteps, torch.utils.data.Sampler[list[int]]):
    """Yields a list of row indices for each batch of one rank, so that a DataLoader takes the rank's rows in the order
    of the plan: `DataLoader(MapDataset(handle), batch_sampler=RowSampler(handle, …))`.
    """

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates from the consumed position to the end of the epoch, without moving the position."""
        plan, dp_rank = self.begin()
        return Pass(
            lambda epoch, position: self._indices(plan, dp_rank, epoch, position),
            self.epoch,
            self.position,
            plan.global_batch_size,
            self._key(plan),
        )

    def _indices(self, plan: Plan, dp_rank: int, epoch: int, position: int) -> Iterator[list[int]]:
        size = plan.global_batch_size
        starts = range(position, position + plan.steps(epoch, position) * size, size)
        last = plan.step_size(epoch, starts[-1]) if starts else plan.dp_size
        if last < plan.dp_size:
            raise ConfigError(
                f"a step of {last} rows leaves some of {plan.dp_size} data-parallel ranks an "
                'empty batch, which torch cannot collate. Use remainder="drop" or "pad" and more rows, or an '
                "IterableDataset."
            )
        for start in starts:
            positions = plan.positions(epoch, start, *plan.rank_slice(epoch, start, dp_rank))
            batch = _Indices(plan.select(epoch, positions).tolist())
            if position == 0 and start == starts[-1]:
                self._has_passed(epoch)
            batch.keys = (epoch, positions < plan.rows_of(epoch), positions if plan.order.repeats else None)
            yield batch
