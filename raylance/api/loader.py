"""Owns one rank's loader: its position, its helpers and the batches it hands out; never plans, reads or decodes.

A batch is consumed when it is handed out. The position is the same on every rank, because all ranks take the same
steps.
"""

import dataclasses
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NoReturn, Self

import numpy as np
import torch

from raylance import process
from raylance.api.recording import Recorder
from raylance.arguments import check_flag, check_integer, refuse_unknown
from raylance.batches.assembly import Step
from raylance.batches.batches import (
    Batches,
    BatchFormat,
    BatchSpec,
    Dtypes,
    host_converter,
    make_batch_spec,
    torch_converter,
)
from raylance.batches.device import can_pin, torch_device
from raylance.decode.arrays import NumpyBatch, Paddings
from raylance.errors import ConfigError, CoverageError, RaylanceError
from raylance.observe.recorder import position_of
from raylance.observe.verdict import Verdict
from raylance.orders.permutation import Int64Array
from raylance.orders.shuffles import Sequential
from raylance.planning.digest import Digest
from raylance.planning.plan import Plan, Remainder, no_step_left
from raylance.planning.proof import planned_digest, selected_digest
from raylance.planning.resume import load_state, make_state
from raylance.planning.state import State, identity_of
from raylance.runtime.session import Session
from raylance.settings import DeliverySpec, Options, ReadSpec, check_batch_size, make_plan

logger = logging.getLogger(__name__)

Sizes = tuple[int | None, int | None]  # rows of a step over all ranks, or of each rank


class RankLoader(process.Seated):
    """One rank's loader. `ray.train.get_dataset_shard` returns it; picklable until it is iterated.

    Attributes:
        helpers: Who works for it.
        recorder: Its statistics and its record.
    """

    def __init__(
        self,
        feed: ReadSpec,
        delivery: DeliverySpec,
        options: Options,
        rank: int = 0,
        world_size: int = 1,
        *,
        seat: process.Seat | None = None,
        helpers: Session | None = None,
        leaves_nothing: bool = False,
    ) -> None:
        """Makes a loader; nothing is started before the first iteration.

        Args:
            feed: What the shard actor serves.
            delivery: What is delivered.
            options: How the machine is used.
            rank: This rank.
            world_size: Ranks that share the epoch.
            seat: How Ray Train hands it out, or None.
            helpers: Those of an earlier loader of the same feed, or None for new ones.
            leaves_nothing: Whether it is a pass over a handle, of which a run has no record.
        """
        process.Seated.__init__(self, rank, world_size, seat)
        self.recorder = Recorder(feed, options, rank, world_size, seat, leaves_nothing=leaves_nothing)
        self._feed, self._delivery, self._options = feed, delivery, options
        self._epoch, self._position, self._iteration = 0, 0, 0
        self._step, self._global_step = 0, 0
        self._batch_size: int | None = None
        self.helpers = Session(feed, options, world_size) if helpers is None else helpers
        self._passed = Digest()  # handed out in this pass
        self._prepares = helpers is None  # the next epoch; who lends helpers decides what comes next

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of; moves on when the last batch of an epoch has been handed out."""
        return self._epoch

    @property
    def step(self) -> int:
        """Steps of this epoch that were handed out, also before a resume; 0 when the last one has been."""
        return self._step

    @property
    def global_step(self) -> int:
        """Steps that were handed out since the run began, over all epochs; a resume continues the count, and
        `set_epoch` leaves it as it is.
        """
        return self._global_step

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and position of the next batch."""
        return self._epoch, self._position

    def stats(self) -> dict[str, Any]:
        """Timings and counters since the loader was made; `raylance.observe.Stats` describes each."""
        return self.recorder.stats.as_dict()

    def explain(self) -> Verdict:
        """Says in words what limits this rank so far, and what to change; see `Verdict`.

        The trainer's time between its batches is compared with the time that it waited, and with what reading and
        decoding would deliver by themselves. `explain_run` gives the same for a whole run, over all ranks.
        """
        return self.recorder.explain(self._delivery)

    def identity(self) -> dict[str, Any]:
        """Which data the loader reads and in which order, without the position, for experiment trackers. JSON-able; a
        checkpoint holds the same.
        """
        return identity_of(self.state_dict())

    def record(self, *, may_wait: bool = True) -> None:
        """Writes what has been counted so far to the run's storage, where the loader is recorded: call it before a
        process ends that may be killed. A thread writes the record all the time, some seconds late; `report` and each
        end of an epoch write it, too.

        Args:
            may_wait: Whether to wait for the network where the storage is remote.
        """
        self.recorder.flush(may_wait=may_wait)

    def completed_shards(self) -> Int64Array:
        """IDs of the shards whose rows were all handed out in this epoch: int64, ascending, shape (k,).

        Checkpoints list them by their places in the epoch's sequence of shards. This expands the list, exactly, at a
        cost that grows with the shards: some seconds at 10⁸ rows of an order that completes them at its end. An order
        that repeats rows has no shards.
        """
        if not self._position:
            return np.empty(0, dtype=np.int64)
        order = self._delivery.order.resolve(self._delivery.facts)
        return np.flatnonzero(order.epoch(self._epoch).completed_shards(self._position))

    @property
    def would_start_over(self) -> bool:
        """Whether the ranks share the dataset, and a new loader would deliver other rows than this one goes on with."""
        shared = self.seat is not None and self.seat.split
        return shared and (self._position > 0 or (self._epoch > 0 and not isinstance(self._delivery.order, Sequential)))

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, also of the current one.

        Raises:
            ConfigError: If the epoch is no integer from 0 to 2⁶³ - 1.
        """
        epoch = check_integer("set_epoch(): epoch", epoch, 0)
        if epoch == self._epoch and self._position:
            logger.warning(
                "set_epoch(%d) gives up position %d of this epoch: rows before it come again. To go on after a "
                "restore, leave set_epoch out: epochs move on by themselves.",
                epoch,
                self._position,
            )
        self._epoch, self._position, self._step = epoch, 0, 0
        self.recorder.ledger.move(epoch)
        self._iteration += 1

    def steps_per_epoch(self, *, global_batch_size: int | None = None, batch_size: int | None = None) -> int:
        """Steps of a whole epoch, the same on every rank.

        Args:
            global_batch_size: Rows of one step over all ranks.
            batch_size: Or rows of one step of each rank.

        Raises:
            ConfigError: Unless exactly one of them is given and positive.
        """
        size = check_batch_size(global_batch_size, batch_size, self.world_size)
        return self._make_plan(size, self._delivery.remainder).steps()

    def iter_torch_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        prefetch_batches: int = 2,
        dtypes: Dtypes = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[NumpyBatch], Any] | None = None,
        drop_last: bool | None = None,
        pin_memory: bool = False,
        with_row_offset: bool = False,
        pad_lists: Paddings | None = None,
        **unknown: Any,
    ) -> Batches:
        """Iterates over the rest of the epoch in torch batches; iterated again, over the next epoch.

        Args:
            global_batch_size: Rows of one step over all ranks; the ranks' shares differ by at most one row.
            batch_size: Instead, rows of one step of each rank.
            prefetch_batches: Steps to keep in flight at the least, and batches that wait for the consumer at the most;
                one is made ahead in any case.
            dtypes: dtype of all tensors, or by column; None keeps what is stored. One dtype for all leaves the columns
                that raylance adds as they are.
            device: Where the tensors go. "auto" is the device of the Ray Train worker, or the CPU outside of one. On
                CUDA, batches go through pinned memory on a side stream, and wait there.
            collate_fn: Makes the batch from a dict of NumPy arrays, instead of the dict of tensors; called in a thread
                of the loader's.
            drop_last: Overrides the dataset's remainder: True is "drop", False is "ragged".
            pin_memory: Put batches that stay on the CPU into pinned memory.
            with_row_offset: Add the column `_rowoffset`, int64: rows as `Dataset.take` addresses them.
            pad_lists: For columns of lists of numbers, by name: the value to pad them with to one length, which their
                dtype (and that of `dtypes`) must hold, or None to have them as Python lists. Lists that are all of one
                length need none.
            **unknown: Refused, with what to write instead.

        Returns:
            Dicts by column of tensors (n, …), images as uint8 (n, 3, H, W) in channels-last memory, strings,
            binary and unpadded lists as Python lists. `_valid` (bool) is there when rows may be padding or masked. n is
            the rank's share of the step. Tensors on the CPU are views of received memory. A batch belongs to its
            consumer, who may change it in place, as `collate_fn` may what it is given: nothing of it is read again.

        Raises:
            ConfigError, BadRowError, PlacementError, HelperError: As their docstrings say.
        """
        refuse_unknown("iter_torch_batches()", unknown, RankLoader.iter_torch_batches.__kwdefaults__ or ())
        bound = self._bind((global_batch_size, batch_size), prefetch_batches, drop_last, with_row_offset)
        pin_memory = can_pin(check_flag("pin_memory", pin_memory))
        target = process.default_device() if device == "auto" else torch_device(device)
        if callable(collate_fn):
            collate_fn = self.recorder.stats.timed("collate_fn_s")(collate_fn)
        convert = torch_converter(self._feed, dtypes, collate_fn, pad_lists, pin_memory or target.type == "cuda")
        bound = dataclasses.replace(bound, convert=convert, device=target, pin_memory=pin_memory)
        return self._batches(bound, "torch")

    def iter_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        batch_format: BatchFormat = "numpy",
        prefetch_batches: int = 2,
        drop_last: bool | None = None,
        with_row_offset: bool = False,
        pad_lists: Paddings | None = None,
        **unknown: Any,
    ) -> Batches:
        """Iterates over the rest of the epoch in NumPy, pyarrow or pandas batches; iterated again, over the next epoch.

        Args:
            global_batch_size: As in `iter_torch_batches`, as all that is not named here.
            batch_size: Likewise.
            batch_format: "numpy" for dicts of arrays, images (n, H, W, 3); "pyarrow" for tables; "pandas" for frames.
            prefetch_batches: Likewise.
            drop_last: Likewise.
            with_row_offset: Likewise.
            pad_lists: Likewise, for "numpy".
            **unknown: Refused, with what to write instead.

        Returns:
            Batches that belong to their consumer: NumPy arrays may be changed in place, as tensors may; tables and
            frames as far as pyarrow and pandas allow it.

        Raises:
            ConfigError, BadRowError, PlacementError, HelperError: As their docstrings say.
        """
        refuse_unknown("iter_batches()", unknown, RankLoader.iter_batches.__kwdefaults__ or ())
        bound = self._bind((global_batch_size, batch_size), prefetch_batches, drop_last, with_row_offset)
        bound = dataclasses.replace(bound, convert=host_converter(self._feed, batch_format, pad_lists))
        return self._batches(bound, batch_format)

    def batches(self, **arguments: Any) -> Batches:
        """Binds the arguments of `iter_torch_batches` once, for what expects a DataLoader; see `Batches`.

        Args:
            **arguments: As `iter_torch_batches` takes them.
        """
        return self.iter_torch_batches(**arguments)

    def prepare(self, **arguments: Any) -> Batches:
        """Gives what `batches` gives, and begins at once to start helpers, open the dataset and make the first batches:
        while the model is built, say. Other batches than these find the helpers running.

        Args:
            **arguments: As `iter_torch_batches` takes them.
        """
        batches = self.batches(**arguments)
        batches.prepare()
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The consumed position and what it refers to: JSON-able, the same on every rank."""
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; world size, batch size and decoders may have changed since.

        Raises:
            StateError: If the state is damaged, newer, or belongs to other rows or another order.
        """
        self._delivery, saved = load_state(state, self._state(), self._delivery)
        self.recorder.stats.tell("resume", {"epoch": saved.epoch, "position": saved.position})
        self._batch_size = saved.global_batch_size
        self._epoch, self._position = saved.epoch, saved.position
        self.recorder.ledger.load(saved.epoch, saved.position)
        self._step, self._global_step = saved.step, saved.global_step
        self._iteration += 1

    def close(self) -> None:
        """Ends the helpers. The position stays; another iteration starts new ones."""
        self._iteration += 1
        self.helpers.close()
        self.recorder.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self.helpers.runtime is not None:
            raise RaylanceError(
                "this loader has started helpers, which belong to this process, so it cannot be sent to another. Send "
                "it before the first batch, or make one there; for torch's DataLoader, use raylance.torch_data."
            )
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.enter_process()

    def _is_no_dataset(self, *_: Any) -> NoReturn:
        raise ConfigError(
            "a loader is neither iterated nor indexed itself, because it does not know the batch size: iterate over "
            "loader.batches(global_batch_size=…), iter_torch_batches(…) or iter_batches(…). torch's DataLoader takes "
            "raylance.torch_data.MapDataset or IterableDataset instead."
        )

    __iter__ = __len__ = __getitem__ = _is_no_dataset

    def __bool__(self) -> bool:
        return True

    def _state(self) -> State:
        return make_state(
            self._feed.origin,
            self._delivery,
            epoch=self._epoch,
            position=self._position,
            step=self._step,
            global_step=self._global_step,
            global_batch_size=self._batch_size,
            world_size=self.world_size,
        )

    def _make_plan(self, global_batch_size: int, remainder: Remainder) -> Plan:
        return make_plan(self._feed, self._delivery, self._options, global_batch_size, self.world_size, remainder)

    def _bind(self, sizes: Sizes, prefetch_batches: int, drop_last: bool | None, with_row_offset: bool) -> BatchSpec:
        """Checks what all iterators take; resolves nothing."""
        size = check_batch_size(*sizes, self.world_size)
        bound = make_batch_spec(self._delivery, size, prefetch_batches, drop_last, with_row_offset)
        self._make_plan(size, bound.remainder)
        return bound

    def _batches(self, bound: BatchSpec, kind: str) -> Batches:
        size = bound.global_batch_size
        whose = f"rank {self.rank} of {self.world_size}"
        return Batches(
            lambda: self._pass(bound),
            lambda: self._make_plan(size, bound.remainder).steps(),
            f"{kind} batches of {self._feed.source.uri!r}, global batch {size}, {whose}",
            self,
            lambda: self._prepare(bound, self._epoch, self._position),
        )

    def _prepare(self, bound: BatchSpec, epoch: int, position: int) -> None:
        """Begins to make the first batches of a pass that nobody has asked for yet."""
        self.check_place()
        self.recorder.on_prepare()
        plan = self._make_plan(bound.global_batch_size, bound.remainder)
        if plan.steps(position) > 0:
            plan.check_order(epoch)
            where = {"epoch": epoch, "position": position, "prefetch_batches": bound.prefetch_batches}
            self.helpers.prepare(plan, self.rank, **where, stats=self.recorder.stats)

    def _pass(self, bound: BatchSpec) -> Iterator[Any]:
        """Hands out the rest of the epoch, and counts how long each batch is awaited and kept: whatever is done here
        while the consumer asks is waiting.
        """
        stats, batches, is_first = self.recorder.stats, self._take_all(bound), True
        try:
            while True:
                begun = stats.begin("wait_s")
                try:
                    handed = next(batches, None)
                finally:
                    waited_s = stats.end("wait_s", begun)
                stats.first_batch_s += waited_s if is_first else 0.0
                is_first = False
                if handed is None:
                    return
                with stats.timed("user_s"):
                    yield handed.pop()
        finally:
            batches.close()

    def _take_all(self, bound: BatchSpec) -> Generator[list[Any], None, None]:
        """Takes the rest of the epoch and moves the position with each batch, to the next epoch with the last."""
        self.check_place()
        plan = self._make_plan(bound.global_batch_size, bound.remainder)
        # The first iteration resolves what was left to "auto", for good.
        self._batch_size = plan.global_batch_size
        self._delivery = dataclasses.replace(self._delivery, order=plan.order.settings)
        epoch, position = self._epoch, self._position
        self._iteration += 1
        iteration = self._iteration
        if plan.steps(position) <= 0:
            logger.warning("%s", no_step_left(plan, epoch, position))
            self.recorder.ledger.add(epoch, position, position, Digest(), is_last=True)
            self._epoch, self._position, self._step = epoch + 1, 0, 0
            return
        plan.check_order(epoch)
        self.recorder.begin(plan, self._delivery, self.state_dict, position_of(self))
        self.recorder.ledger.cut()
        self._passed = Digest()
        prepares = self._prepares
        feeder = self.helpers.start(
            plan, self.rank, epoch=epoch, position=position, bound=bound, stats=self.recorder.stats
        )
        try:
            for handed, step in feeder:
                if iteration != self._iteration:
                    break
                self._hand_out(plan, epoch, position, step)
                if prepares and feeder.has_ended:
                    prepares = False
                    self._prepare(bound, epoch + 1, 0)
                yield handed
                if step.is_last:
                    return
                if iteration != self._iteration:
                    break
        except RaylanceError as error:
            self.recorder.on_error(error)
            raise
        finally:
            feeder.close()
            self.record(may_wait=False)  # a training function that leaves a pass may be through with all
        raise RaylanceError(
            "this iteration was superseded: the loader was iterated again, moved or closed meanwhile, and two "
            "iterations cannot share one position. Use one iteration at a time."
        )

    def _hand_out(self, plan: Plan, epoch: int, begin: int, step: Step) -> None:
        """Counts a step as consumed, of a pass that began at a position; at the end of an epoch, certifies the pass."""
        self.recorder.ledger.add(epoch, step.before, step.after, step.digest, is_last=step.is_last)
        self._passed += step.digest
        if step.is_last:
            self._check_epoch(plan, epoch, step.after)
        self._epoch, self._position = (epoch + 1, 0) if step.is_last else (epoch, step.after)
        self._step, self._global_step = 0 if step.is_last else self._step + 1, self._global_step + 1
        if step.is_last:
            certificate = {
                "verdict": "the rows of this rank's plan, each exactly once",
                "epoch": epoch,
                "rank": self.rank,
                "world_size": self.world_size,
                "positions": [begin, step.after],
                **dataclasses.asdict(self._passed),
            }
            self.recorder.stats.epoch_certificate = certificate
            self.recorder.stats.tell("epoch", certificate)

    def _check_epoch(self, plan: Plan, epoch: int, end: int) -> None:
        """Compares an epoch that an order of one's own has ordered with the selection, where this rank saw all of it.

        Raises:
            CoverageError: If rows came twice, and others never.
        """
        handed = self.recorder.ledger.since(epoch, 0) if self.world_size == 1 else None
        if not plan.order.is_custom or plan.order.repeats or handed is None:
            return
        selection, name = self._feed.source.load_selection(), type(plan.order.settings).__name__
        left = planned_digest(plan.order, selection, epoch, end, plan.epoch_rows)
        if (handed + left).differs(selected_digest(selection)):
            raise CoverageError(
                f"the order {name} is no permutation: in epoch {epoch} it gave {handed.rows:,} rows of which some came "
                f"twice, and others of the {plan.rows:,} selected ones never. What was trained on them was trained on "
                f"other data than asked for. Make rows_of() a permutation for every epoch, or set repeats = True in "
                f"{name} if that is meant; raylance.testing.check_order({name}(…)) tries it."
            )
