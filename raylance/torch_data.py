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
import torch
import torch.utils.data

from raylance.arguments import check_integer, refuse_unknown
from raylance.batches.batches import Bound, Dtypes, bind, to_torch, torch_converter
from raylance.batches.lookup import Lookup
from raylance.columns import VALID
from raylance.decode.arrays import NumpyBatch, Paddings
from raylance.errors import ConfigError, RaylanceError
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.plan import Plan, no_step_left
from raylance.planning.resume import Delivery, load_state, make_state
from raylance.planning.state import parse_state
from raylance.process import DistInfo, find_place
from raylance.runtime.helpers import Helpers
from raylance.settings import Options, check_batch_size, make_plan, map_shared
from raylance.store import Shared
from raylance.telemetry import Stats

if TYPE_CHECKING:
    from raylance._dataset.dataset import Dataset

logger = logging.getLogger(__name__)

Told = tuple[int, BoolArray, Int64Array | None]  # epoch; which rows are no padding; where rows repeat, their positions
_ARGUMENTS = ("global_batch_size", "batch_size", "dist_info", "drop_last", "max_window_bytes")
_DEFAULTS = Options()
_lance_pid: int | None = None  # the process that Lance's threads belong to


class _Opened:
    """What a handle stands for, without Ray: DataLoader workers have none, in whose object store it may lie."""

    def __init__(self, handle: "Dataset") -> None:
        if not hasattr(handle, "opened"):
            raise ConfigError(f"a {type(handle).__name__} is no handle: pass what raylance.dataset(…) returned.")
        self.feed, self.delivery = map_shared(*handle.opened, Shared.here)
        self._own_process()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own_process()

    def _own_process(self) -> None:
        global _lance_pid
        _lance_pid = _lance_pid or os.getpid()  # None in a spawned process; in a forked one, its parent's

    def check_process(self) -> None:
        """Refuses to read in a forked process."""
        if _lance_pid != os.getpid():
            raise RaylanceError(
                "forked from a process that uses Lance, whose threads a fork does not copy: the first read would hang. "
                'Start workers with multiprocessing_context="spawn" or "forkserver".'
            )


class _Indices(list[int]):
    """Indices of one batch, and what a plain list cannot say."""

    told: Told


class MapDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Selected rows by index; `epoch` keys random augmentation where no `RowSampler` does, which sends its own."""

    def __init__(self, handle: "Dataset", *, with_row_offset: bool = False) -> None:
        """Takes what `raylance.dataset` returned; `with_row_offset` adds `_rowoffset` to each row."""
        self._opened, self.epoch = _Opened(handle), 0
        self._hidden = bind(self._opened.delivery, 1, 0, None, with_row_offset).hidden
        self._lookup: Lookup | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lookup": None}

    def __len__(self) -> int:
        """Selected rows."""
        return self._opened.delivery.rows

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
        self._opened.check_process()
        feed = self._opened.feed
        self._lookup = self._lookup or Lookup(feed)
        told: Told = (self.epoch, np.ones(len(indices), dtype=np.bool_), None)
        epoch, real, draws = getattr(indices, "told", told)
        rows = np.array(indices, dtype=np.int64) % len(self)
        table = self._lookup.read(feed.source.load_selection().offsets(rows), epoch, draws)
        valid = real & table[VALID].to_numpy()
        table = table.drop_columns([VALID]).append_column(VALID, [valid]).drop_columns(self._hidden)
        channels_last = feed.decoding.channels_last if feed.decoding else frozenset()
        batch = to_torch(table, dtypes={}, channels_last=channels_last)
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
        self._opened = _Opened(handle)
        self._delivery: Delivery = self._opened.delivery
        self._sizes, self._dist_info = (global_batch_size, batch_size), dist_info
        if drop_last is not None:
            self._delivery = dataclasses.replace(self._delivery, remainder="drop" if drop_last else "ragged")
        self._options = Options(
            max_window_bytes=check_integer("max_window_bytes", max_window_bytes, 1), num_decoders=0, runtime="threads"
        )
        self.epoch = self.position = self.moves = 0
        self._start, self._writer = torch.zeros(2, dtype=torch.int64), os.getpid()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; a plain DataLoader needs it before each, `Loader` moves on by itself."""
        epoch = check_integer("set_epoch(): epoch", epoch, 0)
        self.epoch, self.position = epoch, 0
        self.count_move()

    def count_move(self) -> int:
        """Counts a move of the position by anything but a batch, so that an iteration notices that it is superseded."""
        self.moves += 1
        return self.moves

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return self._plan()[0].steps()

    def consumed(self) -> None:
        """Counts one batch as consumed, the last one as the start of the next epoch; `Loader` does it by itself."""
        plan = self._plan()[0]
        self.position = plan.after(self.position)
        if plan.steps(self.position) <= 0:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The consumed position and what it refers to: JSON-able, the same on every rank; see `state.State`."""
        world_size = find_place(self._dist_info)[1]
        return make_state(
            self._opened.feed.origin,
            self._delivery,
            epoch=self.epoch,
            position=self.position,
            global_batch_size=check_batch_size(*self._sizes, world_size),
            world_size=world_size,
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; world size, batch size and workers may have changed since.

        Raises:
            StateError: If the state is damaged, newer, or belongs to other rows or another order.
        """
        self._delivery, saved = load_state(state, parse_state(self.state_dict()), self._delivery)
        self.set_epoch(saved.epoch)
        self.position = saved.position

    def _plan(self) -> tuple[Plan, int]:
        rank, world_size = find_place(self._dist_info)
        size = check_batch_size(*self._sizes, world_size)
        return make_plan(
            self._opened.feed, self._delivery, self._options, size, world_size, self._delivery.remainder
        ), rank

    def begin(self) -> tuple[Plan, int]:
        """What an iteration needs; the first one settles what the order left to "auto", for good."""
        plan, rank = self._plan()
        self._delivery = dataclasses.replace(self._delivery, order=plan.order.settings)
        # Torch sends tensors to workers as shared memory, so those that outlive an epoch see what is written here.
        if self._writer != os.getpid():  # sent here by another process, to which the memory belongs
            self._start, self._writer = self._start.clone(), os.getpid()
        self._start.copy_(torch.tensor([self.epoch, self.position]))
        if plan.steps(self.position) <= 0:
            logger.warning("%s", no_step_left(plan, self.epoch, self.position))
        return plan, rank


class RowSampler(_Steps, torch.utils.data.Sampler[list[int]]):
    """The indices of one rank's batches, for `DataLoader(MapDataset(handle), batch_sampler=RowSampler(handle, …))`."""

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates from the consumed position to the end of the epoch, without moving it."""
        plan, rank = self.begin()
        epoch, position, size = self.epoch, self.position, plan.global_batch_size
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
        self._sent: tuple[Plan, int] | None = None
        self._arguments, self._with_row_offset = (dtypes, collate_fn, pad_lists), with_row_offset
        self._bound()  # what is wrong with them is said now
        self._idle: Helpers | None = None  # of the last pass, for the next one

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_idle": None}
        with contextlib.suppress(ConfigError):  # for DataLoader workers alone: other processes find their own place
            return state | {"_sent": self.begin()}
        return state

    def _bound(self) -> Bound:
        bound = bind(self._delivery, 1, 1, None, self._with_row_offset)
        return dataclasses.replace(bound, convert=torch_converter(self._opened.feed, *self._arguments))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterates from the consumed position to the end of the epoch, without moving it."""
        worker = torch.utils.data.get_worker_info()
        plan, rank = self.begin() if worker is None or self._sent is None else self._sent
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        (epoch, position), mine = self._start.tolist(), dataclasses.replace(plan, every=every)
        position += first * plan.global_batch_size
        self._opened.check_process()
        if mine.steps(position) <= 0:
            return
        helpers, self._idle = self._idle or Helpers(self._opened.feed, self._options), None
        feeder = helpers.start(mine, rank, epoch=epoch, position=position, bound=self._bound(), stats=Stats())
        try:
            for handed, _ in feeder:
                yield handed.pop()
        finally:
            helpers.end_pass()
            self._idle = helpers


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
        self.steps.begin()
        moves = self.steps.count_move()
        epoch = self.steps.epoch
        for batch in super().__iter__():
            self.steps.consumed()
            is_last = self.steps.position == 0
            yield batch
            if is_last:
                return
            if moves != self.steps.moves:
                raise RaylanceError(
                    "the loader was iterated again or moved meanwhile: two iterations cannot share a position. Use one."
                )
        self.steps.set_epoch(epoch + 1)  # no step was left
