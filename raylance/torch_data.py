"""Owns raylance under `torch.utils.data.DataLoader`, for training without Ray; never starts Ray or an actor.

Two styles, with the batches of `raylance.RankLoader`: `MapDataset` and its `RowSampler`, or `IterableDataset`. `Loader`
is a DataLoader for either, and counts what it hands out: what workers prefetch is not consumed. With a plain DataLoader
that is the caller's: `set_epoch()` before each epoch, and `consumed()` for each batch.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
import torch.utils.data

from raylance.arguments import check_integer, refuse_unknown
from raylance.batches.batches import torch_converter
from raylance.batches.convert import Dtypes, to_torch
from raylance.columns import COMPONENT, COMPONENT_SHIFT, DRAW, OFFSET_MASK, ROW_OFFSET, VALID
from raylance.decode.arrays import NumpyBatch, Paddings
from raylance.decode.rows import OpenDecoding
from raylance.errors import ConfigError, RaylanceError
from raylance.orders.mixture import MixOrder
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.plan import Plan, no_step_left
from raylance.planning.resume import load_state, make_state
from raylance.planning.state import parse_state
from raylance.process import DistInfo, find_place
from raylance.settings import Options, Spec, check_batch_size, make_plan
from raylance.source.rows import RowReader

if TYPE_CHECKING:
    from raylance._dataset.handle import Dataset

logger = logging.getLogger(__name__)

Told = tuple[int, BoolArray, Int64Array | None]  # epoch; which rows are no padding; where rows repeat, their positions
_READ_BYTES = 16 << 20  # that a worker reads together
_ARGUMENTS = ("global_batch_size", "batch_size", "dist_info", "drop_last", "max_window_bytes")
_DEFAULTS = Options()
_lance_pid: int | None = None  # the process that Lance's threads belong to


class _Rows:
    """Reads and decodes selected rows; opened on first use in each process."""

    def __init__(self, handle: "Dataset") -> None:
        if not hasattr(handle, "_feed"):
            raise ConfigError(f"a {type(handle).__name__} is no handle: pass what raylance.dataset(…) returned.")
        # Workers have no Ray, in whose object store the selection may lie.
        self.feed = dataclasses.replace(handle._feed, source=handle._feed.source.local())
        self.spec: Spec = handle._spec
        self._selection = self.feed.source.load_selection()
        self.channels_last = self.feed.decoding.channels_last if self.feed.decoding else frozenset()
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None, "_decoding": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        global _lance_pid
        _lance_pid = _lance_pid or os.getpid()  # None in a spawned process; in a forked one, its parent's
        self.__dict__.update(state)
        self._reader: RowReader | None = None
        self._decoding: OpenDecoding | None = None

    def read(self, rows: Int64Array) -> pa.Table:
        """Reads selected rows, each from storage once; returns them in the order asked for, duplicates included."""
        if _lance_pid != os.getpid():
            raise RaylanceError(
                "forked from a process that uses Lance, whose threads a fork does not copy: the first read would hang. "
                'Start workers with multiprocessing_context="spawn" or "forkserver".'
            )
        self._reader = self._reader or self.feed.source.open_reader()
        stored, places = np.unique(rows, return_inverse=True)
        return self._reader.read(self._selection.offsets(stored)).take(pa.array(places))

    def decode(self, table: pa.Table, told: Told, with_row_offset: bool) -> pa.Table:
        """Decodes; adds `_valid`, False for padding and masked rows, where there can be such rows."""
        (epoch, real, draws), offsets, extra = told, table[ROW_OFFSET].to_numpy(), {}
        if self.feed.decoding is not None:
            # Output memory of its own: the batch may still wait in a queue when the next one is decoded.
            drawn = table if draws is None else table.append_column(DRAW, pa.array(draws))
            self._decoding = self._decoding or self.feed.decoding.open()
            table, _ = self._decoding.apply(drawn, epoch, own_memory=True)
            real = real & table[VALID].to_numpy()
        if with_row_offset:
            extra[ROW_OFFSET] = offsets & OFFSET_MASK
            extra |= {COMPONENT: offsets >> COMPONENT_SHIFT} if isinstance(self.spec.order, MixOrder) else {}
        if self.spec.masks_bad_rows or self.spec.remainder == "pad":
            extra[VALID] = real
        return pa.table({name: table[name] for name in self.feed.delivers} | extra)


class _Indices(list[int]):
    """Indices of one batch, and what a plain list cannot say."""

    told: Told


class MapDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Selected rows by index; `epoch` keys random augmentation where no `RowSampler` does, which sends its own."""

    def __init__(self, handle: "Dataset", *, with_row_offset: bool = False) -> None:
        """Takes what `raylance.dataset` returned; `with_row_offset` adds `_rowoffset` to each row."""
        self._rows, self._with_row_offset, self.epoch = _Rows(handle), with_row_offset, 0

    def __len__(self) -> int:
        """Selected rows."""
        return self._rows.spec.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One selected row; see `__getitems__`, which costs a fraction of it for each row."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Reads rows together.

        Args:
            indices: Selected rows, in any order and as often as wanted; negative ones count from the end.

        Returns:
            For each index, by column: NumPy scalars, tensors for lists, images as uint8 (3, H, W), strings, bytes.

        Raises:
            IndexError: For an index outside of the selection.
            RaylanceError: In a forked process, or as `BadRowError` for a row that cannot be decoded.
        """
        if not all(-len(self) <= index < len(self) for index in indices):
            raise IndexError(f"indices from {min(indices)} to {max(indices)} lie outside of {len(self)} rows")
        told: Told = (self.epoch, np.ones(len(indices), dtype=np.bool_), None)
        table = self._rows.read(np.array(indices, dtype=np.int64) % len(self))
        table = self._rows.decode(table, getattr(indices, "told", told), self._with_row_offset)
        batch = to_torch(table, dtypes={}, channels_last=self._rows.channels_last)
        columns = {k: v.numpy() if isinstance(v, torch.Tensor) and v.ndim == 1 else v for k, v in batch.items()}
        return [{name: values[row] for name, values in columns.items()} for row in range(len(indices))]


class _Steps:
    """One rank's steps: its place in the world, the plan, and the consumed position in `epoch`."""

    def __init__(
        self,
        handle: "Dataset",
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        dist_info: DistInfo = None,
        drop_last: bool | None = None,
        max_window_bytes: int = _DEFAULTS.max_window_bytes,
        **unknown: Any,
    ) -> None:
        """Starts at epoch 0.

        Args:
            handle: What `raylance.dataset` returned.
            global_batch_size: Rows of one step over all ranks.
            batch_size: Instead, rows of one step of each rank.
            dist_info: Who tells rank and world size, see `find_place`; asked at iteration, in the main process.
            drop_last: Overrides the dataset's remainder: True is "drop", False is "ragged".
            max_window_bytes: What the order's "auto" fields are settled from; as in `raylance.DataConfig`, with whose
                loaders the batches then agree.
            **unknown: Refused, with what to write instead.
        """
        refuse_unknown(f"torch_data.{type(self).__name__}()", unknown, _ARGUMENTS)
        check_batch_size(global_batch_size, batch_size, 1)
        if isinstance(dist_info, tuple):
            find_place(dist_info)
        self._rows = _Rows(handle)
        self._spec, self._sizes, self._dist_info = self._rows.spec, (global_batch_size, batch_size), dist_info
        if drop_last is not None:
            self._spec = dataclasses.replace(self._spec, remainder="drop" if drop_last else "ragged")
        self._options = Options(max_window_bytes=check_integer("max_window_bytes", max_window_bytes, 1))
        self.epoch = self._position = self._moves = 0
        self._start, self._writer = torch.zeros(2, dtype=torch.int64), os.getpid()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; a plain DataLoader needs it before each, `Loader` moves on by itself."""
        epoch = check_integer("set_epoch(): epoch", epoch, 0)
        self.epoch, self._position, self._moves = epoch, 0, self._moves + 1

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return self._plan()[0].steps()

    def consumed(self) -> None:
        """Counts one batch as consumed, the last one as the start of the next epoch; `Loader` does it by itself."""
        plan = self._plan()[0]
        self._position = plan.after(self._position)
        if plan.steps(self._position) <= 0:
            self.epoch, self._position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The consumed position and what it refers to: JSON-able, the same on every rank; see `state.State`."""
        world_size = find_place(self._dist_info)[1]
        return make_state(
            self._rows.feed.origin,
            self._spec,
            epoch=self.epoch,
            position=self._position,
            global_batch_size=check_batch_size(*self._sizes, world_size),
            world_size=world_size,
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; world size, batch size and workers may have changed since.

        Raises:
            StateError: If the state is damaged, newer, or belongs to other rows or another order.
        """
        self._spec, saved = load_state(state, parse_state(self.state_dict()), self._spec)
        self.set_epoch(saved.epoch)
        self._position = saved.position

    def _plan(self) -> tuple[Plan, int]:
        rank, world_size = find_place(self._dist_info)
        size = check_batch_size(*self._sizes, world_size)
        return make_plan(self._rows.feed, self._spec, self._options, size, world_size, self._spec.remainder), rank

    def _begin(self) -> tuple[Plan, int]:
        """What an iteration needs; the first one settles what the order left to "auto", for good."""
        plan, rank = self._plan()
        self._spec = dataclasses.replace(self._spec, order=plan.order.settings)
        # Torch sends tensors to workers as shared memory, so those that outlive an epoch see what is written here.
        if self._writer != os.getpid():  # sent here by another process, to which the memory belongs
            self._start, self._writer = self._start.clone(), os.getpid()
        self._start.copy_(torch.tensor([self.epoch, self._position]))
        if plan.steps(self._position) <= 0:
            logger.warning("%s", no_step_left(plan, self.epoch, self._position))
        return plan, rank


class RowSampler(_Steps, torch.utils.data.Sampler[list[int]]):
    """The indices of one rank's batches, for `DataLoader(MapDataset(handle), batch_sampler=RowSampler(handle, …))`."""

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates from the consumed position to the end of the epoch, without moving it."""
        plan, rank = self._begin()
        epoch, position, size = self.epoch, self._position, plan.global_batch_size
        starts = range(position, position + plan.steps(position) * size, size)
        if starts and plan.step_size(starts[-1]) < plan.world_size:
            raise ConfigError(
                f"a step of {plan.step_size(starts[-1])} rows leaves some of {plan.world_size} ranks an empty batch, "
                'which torch cannot collate. Use remainder="drop" or "pad" and more rows, or an IterableDataset.'
            )
        for start in starts:
            positions = plan.positions(start, *plan.rank_slice(start, rank))
            batch = _Indices(plan.select(epoch, positions).tolist())
            batch.told = (epoch, positions < plan.epoch_rows, positions if plan.order.repeats else None)
            yield batch


class IterableDataset(_Steps, torch.utils.data.IterableDataset[dict[str, Any]]):
    """One rank's batches, whole, for `DataLoader(IterableDataset(handle, …), batch_size=None)`.

    Of k workers, worker w makes steps w, w + k, …: DataLoader asks its workers in turn, so the steps come in the order
    of the plan for every k, their number alone is the position, and each row belongs to one (rank, worker).
    """

    def __init__(
        self,
        handle: "Dataset",
        *,
        with_row_offset: bool = False,
        pad_lists: Paddings | None = None,
        dtypes: Dtypes = None,
        collate_fn: Callable[[NumpyBatch], Any] | None = None,
        **steps: Any,
    ) -> None:
        """Takes what `RowSampler` takes; the other arguments are those of `RankLoader.iter_torch_batches`."""
        super().__init__(handle, **steps)
        self._with_row_offset, self._sent = with_row_offset, None
        self._arguments = (dtypes, collate_fn, pad_lists)
        torch_converter(self._rows.feed, *self._arguments)  # what is wrong with them is said now

    def __getstate__(self) -> dict[str, Any]:
        with contextlib.suppress(ConfigError):  # for DataLoader workers alone: other processes find their own place
            return self.__dict__ | {"_sent": self._begin()}
        return self.__dict__

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterates from the consumed position to the end of the epoch, without moving it."""
        worker = torch.utils.data.get_worker_info()
        plan, rank = self._begin() if worker is None or self._sent is None else self._sent
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        (epoch, position), size = self._start.tolist(), plan.global_batch_size
        convert = torch_converter(self._rows.feed, *self._arguments)
        starts = range(position + first * size, position + plan.steps(position) * size, every * size)
        together = 1  # one step first, so that a start waits for no more; then twice as many each time
        while starts:
            parts = [plan.positions(start, *plan.rank_slice(start, rank)) for start in starts[:together]]
            table, low = self._rows.read(plan.select(epoch, np.concatenate(parts))), 0
            starts = starts[together:]
            together = max(1, min(2 * together, int(_READ_BYTES * len(parts) / max(table.nbytes, 1))))
            for positions in parts:
                piece, low = table.slice(low, len(positions)), low + len(positions)
                told = (epoch, positions < plan.epoch_rows, positions if plan.order.repeats else None)
                piece = self._rows.decode(piece, told, self._with_row_offset)
                yield convert(piece)


class Loader(torch.utils.data.DataLoader[Any]):
    """A DataLoader that counts what it hands out; its `steps`, sampler or iterable dataset, have epoch and state."""

    def __init__(self, dataset: Any, batch_sampler: RowSampler | None = None, **options: Any) -> None:
        """Takes an `IterableDataset`, or a `MapDataset` and its sampler; options are DataLoader's, workers spawned."""
        steps = dataset if batch_sampler is None else batch_sampler
        if not isinstance(steps, _Steps) or isinstance(steps, RowSampler) != isinstance(dataset, MapDataset):
            raise ConfigError("Loader keeps a state: pass it an IterableDataset, or a MapDataset and its RowSampler.")
        batching: dict[str, Any] = {"batch_size": None} if steps is dataset else {"batch_sampler": steps}
        spawned = {"multiprocessing_context": "spawn"} if options.get("num_workers") else {}
        super().__init__(dataset, in_order=True, **batching, **(spawned | options))
        self.steps, self.set_epoch = steps, steps.set_epoch
        self.state_dict, self.load_state_dict = steps.state_dict, steps.load_state_dict

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Hands out the rest of the epoch, then moves on to the next one."""
        self.steps._begin()
        self.steps._moves = moves = self.steps._moves + 1
        epoch = self.steps.epoch
        for batch in super().__iter__():
            self.steps.consumed()
            is_last = self.steps._position == 0
            yield batch
            if is_last:
                return
            if moves != self.steps._moves:
                raise RaylanceError(
                    "the loader was iterated again or moved meanwhile: two iterations cannot share a position. Use one."
                )
        self.steps.set_epoch(epoch + 1)  # no step was left
