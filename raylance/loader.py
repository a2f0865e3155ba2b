"""Owns one rank's loader: its position, its helpers and the batches it hands out; never plans, reads or decodes.

A batch is consumed when it is handed out. The position is the same on every rank, because all ranks take the same
steps.
"""

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

import pyarrow as pa
import torch

from raylance import collate
from raylance.columns import COMPONENT, ROW_OFFSET, VALID
from raylance.errors import ConfigError, RaylanceError, StateError
from raylance.metrics import Stats
from raylance.mixing import MixOrder
from raylance.plan import Plan, Remainder
from raylance.pool import Helpers
from raylance.spec import Feed, Options, Spec, check_batch_size, make_plan, make_state
from raylance.state import State, check_state, parse_state
from raylance.stream import Stream

logger = logging.getLogger(__name__)

BatchFormat = Literal["numpy", "pyarrow", "pandas"]


class RankLoader:
    """One rank's loader. `ray.train.get_dataset_shard` returns it; picklable until it is iterated.

    Attributes:
        rank: This rank.
        world_size: Ranks that share the epoch.
    """

    def __init__(self, feed: Feed, spec: Spec, options: Options, rank: int = 0, world_size: int = 1) -> None:
        """Makes a loader; nothing is started before the first iteration.

        Args:
            feed: What the shard actor serves.
            spec: What is delivered.
            options: How the machine is used.
            rank: This rank.
            world_size: Ranks that share the epoch.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} lies outside a world of {world_size}: it must be in [0, {world_size}).")
        self.rank, self.world_size = rank, world_size
        self._stats = Stats()
        self._feed, self._spec, self._options = feed, spec, options
        self._epoch, self._position = 0, 0
        self._batch_size: int | None = None
        self._plan: Plan | None = None
        self._plan_key = ""
        self._helpers = Helpers(options, world_size)
        self._key = uuid.uuid4().hex
        self._iteration = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads, or goes on with; moves on when an iteration ends."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, also of the current one.

        Raises:
            ConfigError: If the epoch is negative.
        """
        if epoch < 0:
            raise ConfigError(f"set_epoch({epoch}): epochs are counted from 0.")
        if epoch == self._epoch and self._position:
            logger.warning(
                "set_epoch(%d) gives up position %d of this epoch: rows before it come again. To go on after a "
                "restore, leave set_epoch out: epochs move on by themselves.",
                epoch,
                self._position,
            )
        self._epoch, self._position = epoch, 0
        self._iteration += 1

    def steps_per_epoch(self, *, global_batch_size: int | None = None, batch_size: int | None = None) -> int:
        """Steps of a whole epoch, the same on every rank.

        Args:
            global_batch_size: Rows of one step over all ranks.
            batch_size: Or rows of one step of each rank.

        Raises:
            ConfigError: Unless exactly one of them is given and positive.
        """
        return self._make_plan(global_batch_size, batch_size, self._spec.remainder).steps()

    def iter_torch_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        prefetch_batches: int = 2,
        dtypes: collate.Dtypes = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[collate.NumpyBatch], Any] | None = None,
        drop_last: bool | None = None,
        pin_memory: bool = False,
        with_row_offset: bool = False,
        pad_lists: collate.Paddings | None = None,
    ) -> Iterator[Any]:
        """Iterates over the rest of the epoch in torch batches.

        Args:
            global_batch_size: Rows of one step over all ranks; the ranks' shares differ by at most one row.
            batch_size: Instead, rows of one step of each rank.
            prefetch_batches: Steps to keep in flight at the least.
            dtypes: dtype of all tensors, or by column; None keeps what is stored.
            device: Where the tensors go. "auto" is the device of the Ray Train worker, or the CPU outside of one. On
                CUDA, batches go through pinned memory on a side stream, one ahead.
            collate_fn: Makes the batch from a dict of NumPy arrays, instead of the dict of tensors.
            drop_last: Overrides the dataset's remainder: True is "drop", False is "ragged".
            pin_memory: Put batches that stay on the CPU into pinned memory.
            with_row_offset: Add the column `_rowoffset`, int64: rows as `dataset.take` addresses them.
            pad_lists: For columns of lists of numbers, by name: the value to pad them with to one length.

        Yields:
            Dicts by column: tensors (n, …), images as uint8 (n, 3, H, W) in channels-last memory, strings, binary and
            unpadded lists as Python lists. `_valid` (bool) is there when rows may be padding or masked. n is the rank's
            share of the step. Tensors on the CPU are views of received memory. A batch belongs to its consumer, who may
            change it in place, as `collate_fn` may what it is given: nothing of it is read again.

        Raises:
            ConfigError, BadRowError, PlacementError, HelperError: As their docstrings say.
        """
        target = self._default_device() if device == "auto" else collate.torch_device(device)
        images = frozenset(self._feed.decoding.columns if self._feed.decoding else ())
        paddings = pad_lists or {}

        def convert(table: pa.Table) -> Any:
            if collate_fn is not None:
                return collate_fn(collate.to_numpy(table, paddings))
            return collate.to_torch(table, paddings=paddings, dtypes=dtypes, images=images)

        tables = self._tables(global_batch_size, batch_size, prefetch_batches, drop_last, with_row_offset, convert)
        return self._consume(collate.on_device(tables, target, pin_memory), self._iteration)

    def iter_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        batch_format: BatchFormat = "numpy",
        prefetch_batches: int = 2,
        drop_last: bool | None = None,
        with_row_offset: bool = False,
        pad_lists: collate.Paddings | None = None,
    ) -> Iterator[Any]:
        """Iterates over the rest of the epoch in NumPy, pyarrow or pandas batches.

        Args:
            global_batch_size: As in `iter_torch_batches`, as all that is not named here.
            batch_size: Likewise.
            batch_format: "numpy" for dicts of arrays, images (n, H, W, 3); "pyarrow" for tables; "pandas" for frames.
            prefetch_batches: Likewise.
            drop_last: Likewise.
            with_row_offset: Likewise.
            pad_lists: Likewise, for "numpy".

        Yields:
            Batches that belong to their consumer: NumPy arrays may be changed in place, as tensors may; tables and
            frames as far as pyarrow and pandas allow it.

        Raises:
            ConfigError, BadRowError, PlacementError, HelperError: As their docstrings say.
        """
        converts: Mapping[str, Callable[[pa.Table], Any]] = {
            "numpy": lambda table: collate.to_numpy(table, pad_lists or {}),
            "pyarrow": lambda table: table,
            "pandas": lambda table: table.to_pandas(),
        }
        if batch_format not in converts:
            raise ConfigError(f"batch_format={batch_format!r}: must be one of {', '.join(map(repr, converts))}.")
        convert = converts[batch_format]
        tables = self._tables(global_batch_size, batch_size, prefetch_batches, drop_last, with_row_offset, convert)
        return self._consume(tables, self._iteration)

    def stats(self) -> dict[str, Any]:
        """Timings and counters since the loader was made; `raylance.metrics.Stats` tells how to read each."""
        return self._stats.as_dict()

    def state_dict(self) -> dict[str, Any]:
        """The consumed position and what it refers to: JSON-able, the same on every rank; see `state.State`."""
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; world size, batch size and decoders may have changed since.

        Raises:
            StateError: If the state is damaged, newer, or belongs to other rows or another order.
        """
        saved = parse_state(state)
        check_state(saved, self._state())
        order = self._spec.order.adopt(saved.order)
        if saved.position > order.epoch_rows(saved.rows):
            rows = order.epoch_rows(saved.rows)
            raise StateError(
                f"the state is damaged: position {saved.position} of an epoch of {rows}. Use an earlier checkpoint."
            )
        # What was left to "auto" is taken from the state: another batch size must not change the order.
        self._spec = dataclasses.replace(self._spec, order=order)
        self._batch_size = saved.global_batch_size
        self._epoch, self._position = saved.epoch, saved.position
        self._iteration += 1

    def close(self) -> None:
        """Ends the helpers. The position stays; another iteration starts new ones."""
        self._iteration += 1
        self._helpers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._helpers.shard is not None:
            raise RaylanceError(
                "this loader has started helpers, which belong to this process, so it cannot be sent to another. Send "
                "it before the first batch, or make one there."
            )
        return self.__dict__

    def _default_device(self) -> torch.device:
        return torch.device("cpu")

    def _state(self) -> State:
        return make_state(
            self._feed,
            self._spec,
            epoch=self._epoch,
            position=self._position,
            global_batch_size=self._batch_size,
            world_size=self.world_size,
        )

    def _make_plan(self, global_batch_size: int | None, batch_size: int | None, remainder: Remainder) -> Plan:
        size = check_batch_size(global_batch_size, batch_size, self.world_size)
        return make_plan(self._feed, self._spec, self._options, size, self.world_size, remainder)

    def _tables(
        self,
        global_batch_size: int | None,
        batch_size: int | None,
        prefetch_batches: int,
        drop_last: bool | None,
        with_row_offset: bool,
        convert: Callable[[pa.Table], Any],
    ) -> Iterator[tuple[Any, int]]:
        """Checks the arguments now, and returns converted batches, each with the position behind it."""
        remainder = self._spec.remainder
        if drop_last is not None:
            remainder = "drop" if drop_last else "ragged"
        if prefetch_batches < 0:
            raise ConfigError(f"prefetch_batches={prefetch_batches}: must not be negative.")
        plan = self._make_plan(global_batch_size, batch_size, remainder)
        # The first iteration settles what was left to "auto", for good.
        if plan != self._plan:
            self._plan, self._plan_key = plan, uuid.uuid4().hex
        self._batch_size, self._spec = plan.global_batch_size, dataclasses.replace(self._spec, order=plan.order)
        hidden = [] if with_row_offset else [ROW_OFFSET]
        mixed = isinstance(plan.order, MixOrder)
        if not (mixed and with_row_offset):
            hidden.append(COMPONENT)
        if remainder != "pad" and not self._spec.masks_bad_rows:
            hidden.append(VALID)
        epoch, position = self._epoch, self._position
        self._iteration += 1

        def produce() -> Iterator[tuple[Any, int]]:
            if plan.steps(position) <= 0:
                return
            after = position
            stream = Stream(
                feed=self._feed,
                plan=plan,
                plan_key=self._plan_key,
                rank=self.rank,
                helpers=self._helpers,
                decoding_key=self._key,
                options=self._options,
                stats=self._stats,
            )
            for table in stream.tables(epoch, position, prefetch_batches):
                after = plan.after(after)
                with self._stats.timed("collate_s"):
                    self._stats.rows += table.num_rows
                    self._stats.nbytes += table.nbytes
                    batch = convert(table.drop_columns(hidden))
                yield batch, after
            self._stats.epoch_certificate = {
                "verdict": "every planned row exactly once",
                "epoch": epoch,
                "rank": self.rank,
                "world_size": self.world_size,
                "positions": [position, after],
                **dataclasses.asdict(stream.coverage),
            }

        return produce()

    def _consume(self, batches: Iterator[tuple[Any, int]], iteration: int) -> Iterator[Any]:
        """Hands batches out, moves the position with each, and the epoch at the end."""
        first = True
        while True:
            begin = time.perf_counter()
            batch, after = next(batches, (None, None)) if iteration == self._iteration else (None, None)
            self._stats.wait_s += time.perf_counter() - begin
            if iteration != self._iteration:
                raise RaylanceError(
                    "this iteration was superseded: the loader was iterated again, moved or closed meanwhile, and two "
                    "iterations cannot share one position. Use one iteration at a time."
                )
            if after is None:
                self._epoch, self._position = self._epoch + 1, 0
                self._iteration += 1
                return
            if first:
                self._stats.first_batch_s += time.perf_counter() - begin
                first = False
            self._position = after
            self._stats.batches += 1
            begin = time.perf_counter()
            yield batch
            self._stats.user_s += time.perf_counter() - begin
