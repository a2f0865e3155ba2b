"""Owns one rank's loader: which batches it makes, and how the position moves with them; never reads or decodes.

A batch is consumed when it is handed out. The position is the same on every rank, because all ranks take the same
steps.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from raylance.api.positioned import Positioned
from raylance.api.recording import Recorder
from raylance.arguments import check_batch_size, check_flag, check_integer, refuse_unknown
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
from raylance.environment import agreement, process
from raylance.errors import ConfigError, RaylanceError
from raylance.observe.verdict import Verdict
from raylance.orders.permutation import Int64Array
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.digest import Digest
from raylance.planning.plan import Plan, Remainder, no_step_left
from raylance.planning.proof import check_permutation
from raylance.planning.shard_context import ShardContext
from raylance.planning.state import State, identity_of
from raylance.read_spec import ReadSpec
from raylance.runtime.session import Session
from raylance.settings import Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


class RankLoader(Positioned):
    """One rank's loader. `ray.train.get_dataset_shard` returns it; picklable until it is iterated."""

    def __init__(
        self,
        read_spec: ReadSpec,
        delivery_spec: DeliverySpec,
        options: Options,
        context: ShardContext | None = None,
        *,
        session: Session | None = None,  # the helpers of an earlier loader of the same data, which the caller keeps
        is_recorded: bool = True,  # whether a run has a record of it; not where it is a pass over a handle
    ) -> None:
        super().__init__(read_spec, delivery_spec)
        context = context or ShardContext()
        self._read_spec, self._options = read_spec, options
        self._recorder = Recorder(read_spec, options, context, self._cursor, is_recorded=is_recorded)
        self._batch_size: int | None = None  # of the last pass
        self._is_resharded = False
        self._is_bound_by_rank = False  # whether the batches that were bound last have a size of each rank
        self._remainder: Remainder | None = None  # that these batches have
        self._has_begun = False  # a pass
        self._agreement: agreement.Agreement | None = None  # of the ranks, since the first pass
        self._session = session or Session(read_spec, options, context.world_size)
        self._prepares = session is None  # the next epoch; the owner of a session decides what comes next

    @property
    def _context(self) -> ShardContext:
        return self._recorder.context

    @property
    def rank(self) -> int:
        """The rank that it serves; of a dataset that every rank sees whole, 0."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Ranks of the run; of a dataset that every rank sees whole, 1."""
        return self._context.world_size

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank, which says which rows come: `rank`, where no ranks are peers."""
        return self._context.dp_rank

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, which share the epoch: `world_size`, where no ranks are peers."""
        return self._context.dp_size

    def reshard(
        self, mesh: "DeviceMesh | ProcessGroup | int", dp_size: int | None = None, *, elastic: bool = False
    ) -> None:
        """Sets which rows this rank gets, where the training function arranges the ranks. Ranks of one data-parallel
        rank are peers: they get the same rows.

        Call it on every rank, before the first batch; before or after `restore`. If the default group of
        torch.distributed has all ranks of the run, the first batch waits up to 30 s until each rank has asked for its
        own, and the ranks compare what they begin with. `DataConfig(ranks_per_replica=…)` needs no call.

        Later, between any two batches, it changes the shares, where ranks come and go: the next batch is the next step
        in the new shares, also of a pass that is under way. The global batch of each step stays the same rows. All
        ranks that take part have to change at the same step; nothing compares them. Helpers stay.

        Args:
            mesh: The data-parallel dimensions of a `DeviceMesh`: `mesh["dp"]`, or `mesh["replicate", "shard"]` for
                HSDP. Or a process group whose ranks all get other rows. Or the data-parallel rank.
            dp_size: With a data-parallel rank, how many there are.
            elastic: Whether the first shares, too, are of ranks that come and go: then their number need not divide the
                world, and the first batch waits for nobody. Shares that change later always are.

        Raises:
            ConfigError: If batches were bound by `batch_size=` or prepared; if every rank sees the dataset whole; if
                this rank is not in the mesh or the group; if the data-parallel size does not divide the world. With one
                of the first batches, if the ranks disagree, or one of them did not call.
        """
        context = self._context
        is_elastic = check_flag("elastic", elastic) or self._has_begun or context.is_elastic
        if self._is_bound_by_rank:
            raise ConfigError(
                "reshard() after batches were bound by batch_size=, rows of one rank: with other shares, the global "
                "batch would be another one. Bind them by global_batch_size=, or call reshard() on every rank before."
            )
        if self._session.is_prepared and not is_elastic:
            raise ConfigError(
                "reshard() after prepare(): batches that this rank has were made for other shares. Call it on every "
                "rank before prepare()."
            )
        found = process.data_parallel_of(mesh, dp_size)
        if context.assignment is not None and not context.assignment.is_split and found != (0, 1):
            raise ConfigError(
                f"reshard() to data-parallel rank {found[0]} of {found[1]}, for a dataset that every rank sees whole: "
                "it has no shares. Name it in datasets_to_split of DataConfig, or leave reshard() out."
            )
        self._recorder.on_reshard(context.with_share(*found, is_elastic=is_elastic))
        self._is_resharded = True

    def repeat(self) -> None:
        """Takes the last step back, because it was not committed: the next batch is this step again, in the shares that
        are set then. State and proof do not count what was taken back.

        Call it on every rank that was handed the step, before anything else is taken or saved.

        Raises:
            ConfigError: If no step was handed out since the loader was made, moved, or took a step back.
        """
        if not self._cursor.take_back():
            raise ConfigError(
                "repeat() without a step to repeat: none was handed out since the loader was made, moved or took a "
                "step back, and only the last one can be. Call it once, after the step that was not committed; "
                "seek() goes to any other step."
            )
        self._recorder.ledger.take_back()

    def seek(self, global_step: int, *, global_batch_size: int | None = None) -> None:
        """Goes to the step that has this number in the count of `global_step`, over all epochs; in a pass, the next
        batch is that step. For trainers that count steps themselves: a rank that joins others begins where they are.

        Rows between are counted neither as handed out nor as lost: other ranks, or nobody, had them.

        Args:
            global_step: Its number.
            global_batch_size: Of the steps between; None for that of the last pass or of the state that was loaded.

        Raises:
            ConfigError: If no size is known; if no step begins there.
        """
        size = self._batch_size if global_batch_size is None else global_batch_size
        if size is None:
            raise ConfigError(
                f"seek({global_step}) before the first batch: how many rows a step has is not known. Give "
                "global_batch_size=."
            )
        self._cursor.seek(self._plan(size, self._remainder), check_integer("seek(): global_step", global_step, 0))
        self._recorder.ledger.join()

    def completed_shards(self) -> Int64Array:
        """IDs of the shards whose rows were all handed out in this epoch: int64, ascending, shape (k,).

        Checkpoints list them by their numbers in the epoch's sequence of shards. This expands the list, exactly, at a
        cost that grows with the shards: some seconds at 10⁸ rows of an order that completes them at its end. An order
        that repeats rows has no shards.
        """
        return self._cursor.completed_shards()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, also of the current one.

        Raises:
            ConfigError: If the epoch is no integer from 0 to 2⁶³ - 1.
        """
        if given_up := self._cursor.set_epoch(epoch):
            logger.warning(
                "set_epoch(%d) gives up position %d of this epoch: rows before it come again. To continue after a "
                "restore, leave set_epoch out: epochs move on by themselves.",
                epoch,
                given_up,
            )
        self._recorder.ledger.move(self.epoch)

    def steps_per_epoch(self, *, global_batch_size: int | None = None, batch_size: int | None = None) -> int:
        """Steps of a whole epoch, the same on every rank.

        Args:
            global_batch_size: Rows of one step over all ranks.
            batch_size: Or rows of one step of each rank.

        Raises:
            ConfigError: Unless exactly one of them is given and positive.
        """
        return self._plan(check_batch_size(global_batch_size, batch_size, self.dp_size)).steps()

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
                that raylance adds as they are, such as the `…_length` of a `Pad`; by column, they may be named.
            device: Where the tensors go. "auto" is the device of the Ray Train worker, or the CPU outside of one. On
                CUDA, batches go through pinned memory on a side stream, and wait there.
            collate_fn: Makes the batch from a dict of NumPy arrays, instead of the dict of tensors; called in a thread
                of the loader's.
            drop_last: Overrides the dataset's remainder: True is "drop", False is "ragged".
            pin_memory: Put batches that stay on the CPU into pinned memory.
            with_row_offset: Add the column `_rowoffset`, int64: rows as `Dataset.take` addresses them.
            pad_lists: For columns of lists of numbers or tensors, ragged decoders' among them, by name: a
                `raylance.Pad`, or the number alone to pad to the longest list of the batch without lengths, which the
                lists' dtype (and that of `dtypes`) must hold; "jagged" for one nested tensor of jagged layout,
                (n, j, …); or None to have Python lists. Lists that are all of one length need none.
            **unknown: Refused, with what to write instead.

        Returns:
            Dicts by column of tensors (n, …), images as uint8 (n, 3, H, W) in channels-last memory, strings,
            binary and unpadded lists as Python lists. `_valid` (bool) is there when rows may be padding or masked. n is
            the rank's share of the step. Tensors on the CPU are views of received memory. A batch belongs to its
            consumer, who may change it in place, as `collate_fn` may what it is given: nothing of it is read again.

        Raises:
            ConfigError: For an argument that cannot be honoured.
            BadRowError: For a row that cannot be decoded, or for too many of them.
            PlacementError: If helpers find no free CPUs within `placement_timeout_s`.
            HelperError: If work on the same rows is lost again and again.
        """
        refuse_unknown("iter_torch_batches()", unknown, RankLoader.iter_torch_batches.__kwdefaults__ or ())
        size = self._bind(global_batch_size, batch_size)
        pin_memory = can_pin(check_flag("pin_memory", pin_memory))
        target = process.default_device() if device == "auto" else torch_device(device)
        if callable(collate_fn):
            collate_fn = self._recorder.stats.timed("collate_fn_s")(collate_fn)
        convert = torch_converter(self._read_spec, dtypes, collate_fn, pad_lists, pin_memory or target.type == "cuda")
        spec = make_batch_spec(self._cursor.delivery_spec, size, prefetch_batches, drop_last, with_row_offset)
        spec = dataclasses.replace(spec, convert=convert, device=target, pin_memory=pin_memory)
        return self._batches(spec, "torch")

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

        `batch_format` is "numpy" for dicts of arrays, images (n, H, W, 3); "pyarrow" for tables; "pandas" for frames.
        `pad_lists` is for "numpy" alone. The other arguments are those of `iter_torch_batches`.

        Returns:
            Batches that belong to their consumer: NumPy arrays may be changed in place, as tensors may; tables and
            frames as far as pyarrow and pandas allow it.

        Raises:
            ConfigError, BadRowError, PlacementError, HelperError: As `iter_torch_batches`.
        """
        refuse_unknown("iter_batches()", unknown, RankLoader.iter_batches.__kwdefaults__ or ())
        size = self._bind(global_batch_size, batch_size)
        spec = make_batch_spec(self._cursor.delivery_spec, size, prefetch_batches, drop_last, with_row_offset)
        convert = host_converter(self._read_spec, batch_format, pad_lists)
        return self._batches(dataclasses.replace(spec, convert=convert), batch_format)

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

    def stats(self) -> dict[str, Any]:
        """Timings and counters since the loader was made; `raylance.observe.Stats` describes each."""
        return self._recorder.stats.as_dict()

    def explain(self) -> Verdict:
        """Says in words what limits this rank so far, and what to change; see `Verdict`.

        The trainer's time between its batches is compared with the time that it waited, and with what reading and
        decoding would deliver by themselves. `explain_run` gives the same for a whole run, over all ranks.
        """
        return self._recorder.explain()

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
        self._recorder.flush(may_wait=may_wait)

    def close(self) -> None:
        """Ends the helpers. The position stays; another iteration starts new ones."""
        self._cursor.moves += 1
        self._session.close()
        self._recorder.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._session.runtime is not None:
            raise RaylanceError(
                "this loader has started helpers, which belong to this process, so it cannot be sent to another. Send "
                "it before the first batch, or make one there; for torch's DataLoader, use raylance.torch_data."
            )
        return self.__dict__ | {"_agreement": None}  # another process begins its own

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
        self._recorder.settle()
        return self._cursor.state(self._batch_size, self.dp_size)

    def _join(self, state: Mapping[str, Any]) -> None:
        """Goes to the place of a peer's state; a pass that is under way continues there."""
        moves = self._cursor.moves
        self._cursor.load(state)
        self._cursor.moves = moves

    def _bind(self, global_batch_size: int | None, batch_size: int | None) -> int:
        size = check_batch_size(global_batch_size, batch_size, self.dp_size)
        self._is_bound_by_rank = global_batch_size is None
        return size

    def _on_load(self, saved: State) -> None:
        self._batch_size = saved.global_batch_size
        self._recorder.on_resume(saved)

    def _plan(self, global_batch_size: int, remainder: Remainder | None = None) -> Plan:
        return self._cursor.plan(
            global_batch_size=global_batch_size,
            dp_size=self.dp_size,
            max_window_bytes=self._options.max_window_bytes,
            remainder=remainder,
        )

    def _batches(self, spec: BatchSpec, kind: str) -> Batches:
        def plan() -> Plan:
            return self._plan(spec.global_batch_size, spec.remainder)

        plan()  # or an error, before anything starts
        self._remainder = spec.remainder
        return Batches(
            lambda: self._recorder.time(self._take_all(spec)),
            lambda: plan().steps(),
            f"{kind} batches of {self._read_spec.source.uri!r}, global batch {spec.global_batch_size}, {self._context}",
            self,
            lambda: self._prepare(spec, plan(), self.epoch, self._cursor.position),
        )

    def _prepare(self, spec: BatchSpec, plan: Plan, epoch: int, position: int) -> None:
        """Begins to make the first batches of a pass that has not been asked for yet."""
        process.check_context(self._context)
        self._recorder.on_prepare()
        if plan.steps(position) > 0:
            plan.check_order(epoch)
            where = {"epoch": epoch, "position": position, "prefetch_batches": spec.prefetch_batches}
            self._session.prepare(plan, self.dp_rank, **where, observer=self._recorder.stats)

    def _take_all(self, spec: BatchSpec) -> Generator[list[Any], None, None]:
        """Takes the rest of the epoch and moves the cursor with each batch, to the next epoch with the last."""
        process.check_context(self._context)
        self._agree(self._plan(spec.global_batch_size, spec.remainder))
        self._batch_size, self._has_begun = spec.global_batch_size, True
        self._cursor.moves += 1
        moves = self._cursor.moves
        while not (yield from self._take_in_one_share(spec, moves)):
            pass

    def _take_in_one_share(self, spec: BatchSpec, moves: int) -> Generator[list[Any], None, bool]:
        """Takes steps until the share changes, or the place but by a step; returns whether the pass is over."""
        cursor, recorder, share = self._cursor, self._recorder, self._context.share
        plan = self._plan(spec.global_batch_size, spec.remainder)
        cursor.follow(plan)
        epoch, position = cursor.epoch, cursor.position
        if plan.steps(position) <= 0:
            logger.warning("%s", no_step_left(plan, epoch, position))
            recorder.ledger.add(epoch, position, position, Digest(), is_last=True, share=share)
            cursor.end_epoch()
            return True
        plan.check_order(epoch)
        recorder.begin_pass(plan, self.state_dict)
        prepares = self._prepares
        where = {"epoch": epoch, "position": position}
        feeder = self._session.start(plan, share[0], **where, batch_spec=spec, observer=recorder.stats)
        try:
            for handed, step in feeder:
                if moves != cursor.moves:
                    break
                if self._agreement is not None:
                    self._agreement.look(at_once=step.is_last)
                with self._counts_if_taken(handed):
                    self._consume(plan, position, step)
                    if prepares and feeder.has_ended:
                        prepares = False
                        self._prepare(spec, plan, epoch + 1, 0)
                    yield handed
                if step.is_last:
                    return moves != cursor.moves or cursor.epoch != epoch  # or steps of it are handed out again
                if moves != cursor.moves:
                    break
                if (cursor.epoch, cursor.position, self._context.share) != (epoch, step.after, share):
                    return False
        except RaylanceError as error:
            recorder.on_error(error)
            raise
        finally:
            feeder.close()
            recorder.flush(may_wait=False)  # a training function that leaves a pass may be through with all
        raise RaylanceError(
            "this iteration was superseded: the loader was iterated again, moved or closed meanwhile, and two "
            "iterations cannot share one position. Use one iteration at a time."
        )

    def _agree(self, plan: Plan) -> None:
        """Has the ranks compare what they begin their first passes with, if they are one process group."""
        context = self._context
        if context.is_elastic:  # nobody waits for ranks that may be gone
            self._agreement = None
            return
        store = agreement.store_of(context.world_size) if self._agreement is None and context.world_size > 1 else None
        if store is None:
            return
        same = {"global_batch_size": plan.global_batch_size, "remainder": plan.remainder}
        if context.dp_size > 1:  # else each rank has all rows, whatever the others do
            state = self.state_dict()
            same |= {name: state[name] for name in ("rows", "fingerprint", "seed", "epoch", "position")}
        terms = agreement.Terms(
            dp_rank=context.dp_rank,
            dp_size=context.dp_size,
            same=same,
            has_called=self._is_resharded,
            is_arranged=context.assignment is not None or context.peers > 1,
        )
        self._agreement = agreement.Agreement(store, context, self._recorder.stem, terms)
        self._agreement.wait()

    @contextlib.contextmanager
    def _counts_if_taken(self, handed: list[Any]) -> Iterator[None]:
        """Moves back to where the loader stands now if the body ends before its batch is taken out of the list: an
        interrupt may come as it is handed out.
        """
        cursor = self._cursor
        place, moves = cursor.place, cursor.moves
        try:
            yield
        finally:
            if handed and moves == cursor.moves:
                cursor.place = place
                self._recorder.ledger.load(cursor.epoch, cursor.position)

    def _consume(self, plan: Plan, begin: int, step: Step) -> None:
        """Counts a step of a pass that began at a position; at the end of an epoch, certifies the pass."""
        epoch, recorder = self._cursor.epoch, self._recorder
        recorder.on_step(epoch, step)
        if step.is_last and self.dp_size == 1 and plan.order.is_custom and not plan.order.repeats:
            handed = recorder.ledger.since(epoch, 0)
            if handed is not None:  # this rank saw all of the epoch
                check_permutation(plan, self._read_spec.source.load_selection(), epoch, step.after, handed)
        self._cursor.advance(step.after, is_last=step.is_last)
        if step.is_last:
            recorder.on_epoch(epoch, begin, step.after)


def recorder_of(loader: RankLoader) -> Recorder:
    """What counts and records a loader: for raylance's own modules, and of no use to others."""
    return loader._recorder  # noqa: SLF001
