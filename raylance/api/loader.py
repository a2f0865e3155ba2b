"""One rank's loader: its batches, and its position, which moves with the batches.

A batch counts as consumed when it is handed out. The position is the same on every rank, because all ranks take the
same steps.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from raylance.api.batches import Batches
from raylance.api.positioned import Positioned
from raylance.api.recorder import Recorder
from raylance.arguments import check_flag, check_integer, refuse_unknown
from raylance.batches.assembly import DeliveredStep
from raylance.batches.conversion import (
    BatchFormat,
    BatchSpec,
    Dtypes,
    host_converter,
    make_batch_spec,
    torch_converter,
)
from raylance.batches.device import can_pin, torch_device
from raylance.batches.list_padding import check_counted
from raylance.batches.lookup import name_file
from raylance.decode.arrays import NumpyBatch, Paddings
from raylance.environment import agreement, process
from raylance.errors import ConfigError, RaylanceError
from raylance.observe.verdict import Verdict
from raylance.orders.permutation import Int64Array
from raylance.planning.digest import Digest, Ledger
from raylance.planning.plan import Plan, no_step_left
from raylance.planning.proof import check_permutation
from raylance.planning.shard_context import ShardContext
from raylance.planning.state import FILE_NAME, State, identity_of, states_in, subject_of
from raylance.planning.step_size import Remainder, Size, check_size
from raylance.read_spec import DatasetSpec
from raylance.runtime import notes
from raylance.runtime.feeder import Feeder
from raylance.runtime.session import Session
from raylance.secrets import public_uri
from raylance.settings import Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


class RankLoader(Positioned):
    """The loader that `ray.train.get_dataset_shard` returns: it serves one rank. It starts helpers at `prepare` or at
    the first batch; until then it can be pickled.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        options: Options,
        context: ShardContext | None = None,
        *,
        session: Session | None = None,  # helpers of an earlier loader of the same data; the caller closes them
        is_recorded: bool = True,  # whether the run records the loader; False for a pass over a handle
    ) -> None:
        super().__init__(spec)
        self._read_spec, self._options, self._context = spec.read, options, context or ShardContext()
        self._ledger, self._passed = Ledger(), Digest()  # digests of all rows handed out, and of this pass
        self._recorder = Recorder(
            spec.read, options, self._context, self._cursor, self._ledger, is_recorded=is_recorded
        )
        self._size: Size | None = None  # the last pass's
        self._is_resharded = False
        self._is_bound_by_rank = False  # whether the batches bound last were given batch_size=, rows of one rank
        self._remainder: Remainder | None = None  # that of the batches bound last
        self._has_begun = False  # whether a pass has begun
        self._is_placed = False  # whether a state was loaded, or the training function chose the place
        self._agreement: agreement.Agreement | None = None  # between the ranks, since the first pass
        self._session = session or Session(spec.read, options, self._context.world_size)

    @property
    def rank(self) -> int:
        """The rank that the loader serves; 0 if every rank sees the whole dataset."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the run; 1 if every rank sees the whole dataset."""
        return self._context.world_size

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank, which decides the rows that this rank gets. Equals `rank` if no ranks are peers."""
        return self._context.dp_rank

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, which share the epoch; equals `world_size` if no ranks are peers."""
        return self._context.dp_size

    def reshard(
        self, mesh: "DeviceMesh | ProcessGroup | int", dp_size: int | None = None, *, elastic: bool = False
    ) -> None:
        """Sets this rank's data-parallel rank, which decides its rows. Call it if the training function arranges the
        ranks itself, as in a mesh. If `DataConfig(ranks_per_replica=…)` describes the peers, this call is not needed.

        If the ranks stay the same, call it once, on every rank, before `prepare` and the first batch; before or after
        `restore` does not matter. The first batch then waits for the first batches of the other ranks, 30 s at most, so
        that the ranks can compare their settings. This needs a default group of torch.distributed with all ranks.

        If ranks come and go, call it between any two batches, also during a pass. It changes how the rows of the next
        steps are divided among the ranks, but the global batches keep their rows. All ranks that take part must call it
        before the same step; nothing checks this. The helpers of the loader continue to run.

        Args:
            mesh: The data-parallel dimensions of a `DeviceMesh`: `mesh["dp"]`, or `mesh["replicate", "shard"]` for
                HSDP. Or a process group in which each rank gets different rows. Or the data-parallel rank.
            dp_size: The number of data-parallel ranks. Give it if, and only if, `mesh` is a data-parallel rank.
            elastic: Whether ranks come and go from the start. If True, the data-parallel size need not divide the
                world, and the first batch waits for no other rank. A call after the first batch is always elastic.

        Raises:
            ConfigError: If batches were bound by `batch_size=`; if every rank sees the whole dataset; or if this rank
                is not in the mesh or the group. If ranks do not come and go, also if batches were prepared, or if the
                data-parallel size does not divide the world. If the ranks find that their settings differ, or that one
                did not call `reshard`, a batch raises this error, usually the first.
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
        self._context = context.with_share(*found, is_elastic=is_elastic)
        if is_elastic and self._context.share != context.share:
            self._ledger.cut()
        self._recorder.on_reshard(self._context)
        self._is_resharded = True

    def repeat(self) -> None:
        """Takes back the last step, for trainers that may reject a step, such as torchft. The next batch is this step
        again. If `reshard` was called in between, the batch is this rank's new part of the step. Neither the loader's
        state nor the proof of the run counts the rejected step.

        Call it on every rank that was handed the step, before another batch is taken or a state is saved.

        Raises:
            ConfigError: If no step was handed out since the loader was made, moved, or took a step back.
        """
        if not self._cursor.take_back():
            raise ConfigError(
                "repeat() without a step to repeat: none was handed out since the loader was made, moved or took a "
                "step back, and only the last one can be. Call it once, after the step that was not committed; "
                "seek() goes to any other step."
            )
        self._ledger.take_back()

    def seek(
        self,
        global_step: int,
        *,
        global_batch_size: int | None = None,
        global_batch_cost: int | None = None,
        max_rows: int | None = None,
        padded: bool = True,
    ) -> None:
        """Goes to a step, so that the next batch is of this step, also during a pass. Call it if the trainer counts the
        steps, so that a rank that joins other ranks begins at their step.

        In the proof of the run, the skipped rows count neither as handed out nor as lost.

        Args:
            global_step: Number of the step, counted over all epochs like the loader's `global_step`.
            global_batch_size: Rows of each step between the loader's present step and the given step. None for the size
                in the last pass or in the loaded state.
            global_batch_cost: Cost of each of these steps, in place of `global_batch_size`.
            max_rows: Most rows of a step of a cost.
            padded: See `iter_torch_batches`.

        Raises:
            ConfigError: If the global batch size is not known, or if with this size no step has that number.
        """
        size = self._size
        if (global_batch_size, global_batch_cost, max_rows, padded) != (None, None, None, True):
            size = check_size(self.dp_size, global_batch_size, None, global_batch_cost, max_rows, padded=padded)
        self._seek(check_integer("seek(): global_step", global_step, 0), size)

    def _seek(self, global_step: int, size: Size | None) -> None:
        if size is None:
            raise ConfigError(
                f"seek({global_step}) before the first batch: how many rows a step has is not known. Give "
                "global_batch_size= or global_batch_cost=, or load a state."
            )
        plan = self._plan(size, self._remainder)
        if self._cursor.seek(plan, global_step):  # else the step before may still be taken back
            self._ledger.join()
        self._is_placed = True

    def completed_shards(self) -> Int64Array:
        """Returns the IDs of the shards whose rows were all handed out in this epoch: int64, ascending, shape (k,).

        Empty if the order repeats rows, because such an order has no shards. The list in a checkpoint is kept short:
        it may leave out some shards, or be missing. This method finds all, in a time that grows with the number of
        shards. If the order completes most shards only near the end of the epoch, as "row" does, it also searches the
        rows that are still to come, which takes some seconds at 10⁸ rows.
        """
        return self._cursor.completed_shards()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch. This may be the current epoch, whose rows then come again.

        Raises:
            ConfigError: If the epoch is not an integer from 0 to 2⁶³ - 1.
        """
        if given_up := self._cursor.set_epoch(epoch):
            logger.warning(
                "set_epoch(%d) gives up position %d of this epoch: rows before it come again. To continue after a "
                "restore, leave set_epoch out: epochs move on by themselves.",
                epoch,
                given_up,
            )
        self._ledger.move(self.epoch)
        self._is_placed = True

    def steps_per_epoch(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        global_batch_cost: int | None = None,
        max_rows: int | None = None,
        padded: bool = True,
    ) -> int:
        """Returns the number of steps of a whole epoch, the same on every rank. If steps have a cost, it is that of the
        present epoch.

        Args:
            global_batch_size: Rows of one step over all ranks.
            batch_size: Rows of one step on each data-parallel rank, in place of `global_batch_size`.
            global_batch_cost: Cost of one step over all ranks, in place of `global_batch_size`.
            max_rows: Most rows of a step of a cost, over all ranks.
            padded: See `iter_torch_batches`.

        Raises:
            ConfigError: If not exactly one of the sizes is given, or if the size is not positive.
        """
        size = check_size(self.dp_size, global_batch_size, batch_size, global_batch_cost, max_rows, padded=padded)
        return self._plan(size).steps(self.epoch)

    def iter_torch_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        global_batch_cost: int | None = None,
        max_rows: int | None = None,
        padded: bool = True,
        micro_batch_cost: int | None = None,
        prefetch_batches: int = 2,
        dtypes: Dtypes = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[NumpyBatch], Any] | None = None,
        drop_last: bool | None = None,
        pin_memory: bool = False,
        with_row_offset: bool = False,
        pad_lists: Paddings | None = None,
        whole: bool = False,
        **unknown: Any,
    ) -> Batches:
        """Returns an iterable over the torch batches of the rest of the epoch. Iterating it again takes the next epoch.

        Args:
            global_batch_size: Rows of one step over all ranks. The numbers of rows that the ranks get of a step differ
                by at most one, unless a `Balance` has `equal_rows=False`.
            batch_size: Rows of one step on each data-parallel rank, in place of `global_batch_size`.
            global_batch_cost: Cost of one step over all ranks, in place of `global_batch_size`; it needs `cost=` of
                `raylance.dataset`. Steps have about this cost, and never more, unless a row alone costs more. With the
                order "bucket", the rows of a step are alike. The number of steps may differ from epoch to epoch, but
                not from rank to rank. Batches that are dicts have `_step_cost`, an integer: the cost of the step over
                all ranks, by which to divide sums of losses, because ranks get unequal shares of it. So have those of a
                `Balance` with `equal_rows=False`.
            max_rows: Most rows of a step of a cost, over all ranks.
            padded: Whether a step costs its rows times the cost of its dearest row, because rows are padded to the
                longest one. False adds up the costs, for batches that are packed or jagged. With the order "bucket",
                steps are always counted as if they were padded, because their rows are alike.
            micro_batch_cost: Most cost of a micro-batch on one rank, for accumulating gradients. Each step is then
                a list of batches, as many on every rank, of this cost at most, unless a row alone costs more. Each
                has the `_step_cost` of the whole step. A rank with too few rows gets batches of no row. It needs
                `cost=` of `raylance.dataset`, and counts costs as `padded` says.
            prefetch_batches: Number of steps that are read and decoded ahead: more if decoders would be idle, fewer if
                they do not fit in `max_inflight_bytes`. It is also the largest number of finished batches that wait for
                the training loop. 0 acts as 1.
            dtypes: One dtype for all tensors, or dtypes by column; None keeps the stored dtypes. One dtype for all does
                not change columns that raylance adds, such as the `…_length` of a `Pad`; name these to change them. Do
                not name columns without tensors: text, decimals, dates.
            device: The device of the tensors. "auto" is the device of the Ray Train worker; the CPU if there is none.
                Batches for CUDA are copied through pinned memory on a side stream as soon as they are made. So finished
                batches that wait for the training loop take memory of the device.
            collate_fn: A function that makes the batch from a dict of NumPy arrays; without it, a batch is a dict of
                tensors. It is called in a thread of the loader.
            drop_last: Replaces the dataset's `remainder`: True by "drop", False by "ragged". None keeps it.
            pin_memory: Whether batches that stay on the CPU are put into pinned memory.
            with_row_offset: Whether to add the column `_rowoffset`, int64: the row offsets that `Dataset.take` takes.
            pad_lists: By column name, how to convert lists of numbers or tensors, stored or from a ragged decoder. A
                `raylance.Pad` pads the lists as its attributes say, and adds a column of lengths. A number pads them to
                the longest list of the batch, and adds none, as `Pad(0, lengths=False)` does; the dtype of the lists,
                and their dtype in `dtypes`, must be able to hold the number. "jagged" makes one nested tensor of jagged
                layout, (n, j, …). None keeps Python lists. A column without an entry becomes one tensor if its lists,
                or lists of lists, all have one length or shape; if not, it keeps Python lists, with a warning. In steps
                of a cost, `TokensOf` must count what `Pad` adds: see its `multiple`.
            whole: Whether each pass begins at the start of an epoch, also after a pass that was left early: then at
                the start of the same epoch. For validation, which may stop after some batches.
            **unknown: Any other argument is refused; the error names the right argument.

        Returns:
            Dicts by column: tensors (n, …); images as uint8 (n, 3, H, W) in channels-last memory (`iter_batches` and
            `Dataset.head` have them as NumPy arrays, (n, H, W, 3)); strings, binary and
            unpadded lists as Python lists. `_valid` (bool) is present if rows may be padding or masked. n is the number
            of the rank's rows in the step. Tensors on the CPU are views of received memory. The training loop may
            change a batch in place, because raylance does not read that memory again. `collate_fn` may change its
            arrays, too.

        Raises:
            ConfigError: If an argument cannot be honoured.
            BadRowError: If a row cannot be decoded; with `on_bad_row="mask"`, if there are too many such rows.
            PlacementError: If helpers find no free CPUs within `placement_timeout_s`.
            HelperError: If work on the same rows is lost repeatedly.
            CoverageError: If rows do not come as the plan says.
        """
        refuse_unknown("iter_torch_batches()", unknown, RankLoader.iter_torch_batches.__kwdefaults__ or ())
        # Without a budget for steps, `padded` is that of micro-batches alone.
        of_step = padded if global_batch_cost is not None or micro_batch_cost is None else True
        size = self._bind(global_batch_size, batch_size, global_batch_cost, max_rows, padded=of_step)
        pin_memory = can_pin(check_flag("pin_memory", pin_memory))
        target = process.default_device() if device == "auto" else torch_device(device)
        if callable(collate_fn):
            collate_fn = self._recorder.stats.timed("collate_fn_s")(collate_fn)
        convert = torch_converter(self._read_spec, dtypes, collate_fn, pad_lists, pin_memory or target.type == "cuda")
        return self._batches(
            "torch",
            pad_lists,
            size=size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            with_row_offset=with_row_offset,
            convert=convert,
            device=target,
            pin_memory=pin_memory,
            whole=whole,
            micro_batch_cost=micro_batch_cost,
            padded=padded,
        )

    def iter_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        global_batch_cost: int | None = None,
        max_rows: int | None = None,
        padded: bool = True,
        micro_batch_cost: int | None = None,
        batch_format: BatchFormat = "numpy",
        prefetch_batches: int = 2,
        drop_last: bool | None = None,
        with_row_offset: bool = False,
        pad_lists: Paddings | None = None,
        whole: bool = False,
        **unknown: Any,
    ) -> Batches:
        """Returns an iterable over the NumPy, pyarrow or pandas batches of the rest of the epoch. Iterating it again
        takes the next epoch.

        `batch_format` is "numpy" for dicts of arrays, images (n, H, W, 3); "pyarrow" for tables; "pandas" for frames.
        `pad_lists` is only for "numpy"; there, "jagged" gives all values in one array, and their offsets in the column
        `…_offsets`. The other arguments are as in `iter_torch_batches`.

        Returns:
            Batches in this format. The training loop may change NumPy arrays in place, and tables and frames as far as
            pyarrow and pandas allow it.

        Raises:
            ConfigError, BadRowError, PlacementError, HelperError, CoverageError: As `iter_torch_batches`.
        """
        refuse_unknown("iter_batches()", unknown, RankLoader.iter_batches.__kwdefaults__ or ())
        # Without a budget for steps, `padded` is that of micro-batches alone.
        of_step = padded if global_batch_cost is not None or micro_batch_cost is None else True
        size = self._bind(global_batch_size, batch_size, global_batch_cost, max_rows, padded=of_step)
        return self._batches(
            batch_format,
            pad_lists,
            size=size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            with_row_offset=with_row_offset,
            convert=host_converter(self._read_spec, batch_format, pad_lists),
            whole=whole,
            micro_batch_cost=micro_batch_cost,
            padded=padded,
        )

    def batches(self, **arguments: Any) -> Batches:
        """Binds the arguments of `iter_torch_batches` once, for code that expects a DataLoader; see `Batches`.

        Args:
            **arguments: Arguments of `iter_torch_batches`.
        """
        return self.iter_torch_batches(**arguments)

    def prepare(self, **arguments: Any) -> Batches:
        """Returns the same as `batches`, and begins at once to start helpers, open the dataset and make the first
        batches, for example while the model is built. Does nothing during a pass of this loader. If you later iterate
        with other arguments, the same helpers work for that pass.

        Args:
            **arguments: Arguments of `iter_torch_batches`.
        """
        batches = self.batches(**arguments)
        batches.prepare()
        return batches

    def stats(self) -> dict[str, Any]:
        """Returns timings and counters since the loader was made; `raylance.observe.Stats` describes each entry."""
        return self._recorder.stats.as_dict()

    def explain(self) -> Verdict:
        """Explains in words what limits this rank so far, and what to change; see `Verdict`.

        The explanation compares two times of the training loop: the time in which it worked with batches, and the time
        in which it waited for the next batch. It also compares three rates, in rows a second: how fast the loop takes
        rows without waiting, how fast they could be read, and how fast they could be decoded. `explain_run` explains a
        whole run, over all ranks.
        """
        return self._recorder.explain()

    def identity(self) -> dict[str, Any]:
        """Returns a description of the loader's data and their order, without the position, for experiment trackers.
        The description is JSON-able. A checkpoint holds the same values.
        """
        return identity_of(super().state_dict())

    def record(self, *, may_wait: bool = True) -> None:
        """Writes the loader's record to the run's storage now; does nothing if the loader has no record. Call it before
        the process may be killed, because the thread that writes the record is some seconds late.

        `raylance.report` and the end of each epoch write the record, too.

        Args:
            may_wait: Whether to wait for the write if the storage is remote. If not, the process may end before the
                record is written.
        """
        self._recorder.flush(may_wait=may_wait)

    def close(self) -> None:
        """Ends the helpers. The position stays, and another iteration starts new helpers."""
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
        return self.__dict__ | {"_agreement": None}  # another process makes its own

    def _is_no_dataset(self, *_: Any) -> NoReturn:
        raise ConfigError(
            "a loader is neither iterated nor indexed itself, because it does not know the batch size: iterate over "
            "loader.batches(global_batch_size=…), iter_torch_batches(…) or iter_batches(…). torch's DataLoader takes "
            "raylance.torch_data.MapDataset or IterableDataset instead."
        )

    __iter__ = __len__ = __getitem__ = _is_no_dataset

    def __bool__(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the consumed position, and the data to which it refers: JSON-able, the same on every rank.

        If the loader has a record, it then shows which rows were handed out before this position. A run that continues
        there can be proven.
        """
        state = super().state_dict()
        self._ledger.cut()  # a run may continue from here
        if not self._recorder.is_assigned:  # under Ray Train, runs continue at reports, which write the record
            self._recorder.flush(may_wait=False)
        return state

    def _state(self) -> State:
        self._cursor.settle()
        return self._cursor.state(self._size, self.dp_size)

    @contextlib.contextmanager
    def _reporting(self, metrics: Mapping[str, Any], *, uploads_async: bool) -> Iterator[None]:
        """Records a report with a checkpoint; the body of the context makes the report."""
        self._cursor.settle()
        self._ledger.cut()  # the run may resume from here
        with self._recorder.reporting(metrics, has_checkpoint=True, uploads_async=uploads_async):
            yield

    def _join(self, state: Mapping[str, Any]) -> None:
        """Goes to the position in another rank's state; a running pass continues there."""
        moves = self._cursor.moves
        self._cursor.load(state)
        self._cursor.moves = moves

    def _bind(self, global_batch_size: int | None, batch_size: int | None, *budget: int | None, padded: bool) -> Size:
        size = check_size(self.dp_size, global_batch_size, batch_size, *budget, padded=padded)
        self._is_bound_by_rank = batch_size is not None
        return size

    def _on_load(self, saved: State) -> None:
        self._size, self._is_placed = saved.size, True
        self._ledger.load(saved.epoch, saved.position)
        self._recorder.on_resume(saved)

    def _plan(self, size: Size, remainder: Remainder | None = None) -> Plan:
        return self._cursor.plan(
            size=size,
            dp_size=self.dp_size,
            max_window_bytes=self._options.max_window_bytes,
            remainder=remainder,
        )

    def _batches(self, kind: str, pad_lists: Paddings | None, **arguments: Any) -> Batches:
        """Returns batches to which these arguments of `make_batch_spec` are bound."""
        spec = make_batch_spec(self._cursor.delivery_spec, **arguments)
        plan = self._plan(spec.size, spec.remainder)  # raises errors of the plan before anything starts
        if spec.micro is not None and not plan.order.has_costs:
            raise ConfigError(
                f"micro_batch_cost={spec.micro.cost}: the rows have no costs; nothing was started. Give cost= to "
                "raylance.dataset."
            )
        budgets = ((plan.budget, plan.order.has_buckets), (spec.micro, False))
        padded = [each for each, always in budgets if each is not None and (each.padded or always)]
        check_counted(self._read_spec, self._cursor.delivery_spec.cost, pad_lists, padded)
        self._remainder = spec.remainder
        size = plan.step_text.removeprefix("a ")
        text = f"{kind} batches of {self._read_spec.source.uri!r}, {size}, {self._context}"
        return _LoaderBatches(self, spec, text)

    def _prepare(self, spec: BatchSpec, epoch: int, position: int) -> None:
        """Begins to make the first batches of a pass before it is iterated."""
        plan = self._plan(spec.size, spec.remainder)
        process.check_context(self._context)
        self._recorder.on_prepare()
        plan.check_order(epoch)
        if not plan.is_over(epoch, position):
            where = {"epoch": epoch, "position": position, "prefetch_batches": spec.prefetch_batches}
            self._session.prepare(plan, self.dp_rank, **where, observer=self._recorder.stats)

    def _begin_pass(self, spec: BatchSpec) -> int:
        """Checks what can be checked at the begin of a pass only; returns the number of moves so far."""
        process.check_context(self._context)
        if not self._has_begun:
            self._check_restored()
        if spec.whole and self._cursor.position:
            self._cursor.set_epoch(self._cursor.epoch)
            self._ledger.load(self._cursor.epoch, 0)  # the rows of the pass that was left do not count
        self._agree(self._plan(spec.size, spec.remainder))
        self._size, self._has_begun = spec.size, True
        self._cursor.moves += 1
        return self._cursor.moves

    def _begin_stretch(self, spec: BatchSpec) -> "_Stretch | None":
        """Begins to take batches from the present position on, in the present share; None if no step is left."""
        cursor, share = self._cursor, self._context.share
        plan = self._plan(spec.size, spec.remainder)
        cursor.follow(plan)
        epoch, position = cursor.epoch, cursor.position
        plan.check_order(epoch)  # first: steps of a cost are cut by the order
        if plan.is_over(epoch, position):
            logger.warning("%s", no_step_left(plan, epoch, position))
            self._ledger.add(epoch, position, position, Digest(), is_last=True, share=share)
            cursor.end_epoch()
            return None
        self._recorder.begin_pass(plan, super().state_dict)
        self._ledger.cut()
        self._passed = Digest()
        where = {"epoch": epoch, "position": position}
        feeder = self._session.start(plan, share[0], **where, batch_spec=spec, observer=self._recorder.stats)
        return _Stretch(plan, epoch, position, share, feeder)

    def _agree(self, plan: Plan) -> None:
        """Makes the ranks compare the settings of their first passes, if they form one process group."""
        context = self._context
        if context.is_elastic:  # ranks may be gone, so no rank waits for others
            self._agreement = None
            return
        store = agreement.store_of(context.world_size) if self._agreement is None and context.world_size > 1 else None
        if store is None:
            return
        same: dict[str, Any] = {"global_batch_size": plan.global_batch_size, "remainder": plan.remainder}
        if plan.budget is not None:
            same |= {"budget": repr(plan.budget)}
        if context.dp_size > 1:  # else each rank gets all rows, independent of the others
            state = super().state_dict()
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

    def _check_restored(self) -> None:
        """Raises ConfigError if Ray Train continues from a checkpoint with this loader's position, and nobody restored
        it. A run that was not restored on purpose says so by `set_epoch`. If another loader of the same data was
        restored, this one is for something else, such as figures of the training data.
        """
        context = self._context
        is_split = context.world_size > 1 if context.assignment is None else context.assignment.is_split
        is_split &= not context.is_elastic  # a rank that joins others takes their position over
        found = process.train_checkpoint_file(FILE_NAME) if is_split else None
        if found is None:
            return
        path, content = found
        own, states = self._state(), states_in(content)
        if own.fingerprint in Recorder.restored:
            return
        of_these_rows = [state for state in states if state.get("fingerprint") == own.fingerprint]
        subject = subject_of(own.to_dict())
        # A checkpoint without this loader's position, such as that of a validation set, is none to restore. A damaged
        # one may have had it.
        self._recorder.has_checkpoint = bool(of_these_rows or not states or subject in map(subject_of, states))
        if self._is_placed or Recorder.has_reported:
            return
        here = own.epoch, own.position
        if saved := [state for state in of_these_rows if (state.get("epoch"), state.get("position")) != here]:
            raise ConfigError(
                f"Ray Train continues this run from {public_uri(path)}, which holds the position of "
                f"{self._recorder.stem!r}: epoch {saved[0].get('epoch')}, position {saved[0].get('position')}. It was "
                f"not restored, so this loader would begin at epoch {own.epoch}, position {own.position}, and a model "
                "that is loaded from there would be trained on rows again. Call raylance.restore(loader) before the "
                "first batch. To begin there on purpose, call loader.set_epoch(0)."
            )

    def _count(self, stretch: "_Stretch", step: DeliveredStep) -> None:
        """Counts a step that is about to be handed out. At the last step of the epoch, checks a custom order if this
        rank was handed the whole epoch.
        """
        epoch, plan = stretch.epoch, stretch.plan
        self._ledger.add(epoch, step.before, step.after, step.digest, is_last=step.is_last, share=stretch.share)
        self._passed += step.digest
        if not step.rows and not self._cursor.delivery_spec.empty_batches:
            empty = plan.empty_ranks(epoch, step.before)
            _warn_of_no_row(str(self._read_spec.source.uri), plan.dp_size, plan.dp_size - empty)
        if not step.is_last:
            return
        if self.dp_size == 1 and plan.order.is_custom and not plan.order.repeats:
            handed = self._ledger.since(epoch, 0)
            if handed is not None:  # this rank was handed the whole epoch
                check_permutation(plan, self._read_spec.source.load_selection(), epoch, step.after, handed)

    def _move(self, stretch: "_Stretch", step: DeliveredStep) -> None:
        """Moves the position to the end of a step; at the end of an epoch, records the pass."""
        self._cursor.advance(step.after, is_last=step.is_last)
        if step.is_last:
            self._recorder.on_epoch(stretch.epoch, stretch.position, step.after, self._passed)

    def _move_back(self, place: tuple[int, int, int, int], moves: int) -> None:
        """Moves back to a place, because the batch there was not handed out, as after an interrupt."""
        if moves == self._cursor.moves:
            self._cursor.return_to(place)
            self._ledger.load(self._cursor.epoch, self._cursor.position)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive batches of a pass that come from one feeder: those of one share. It begins at `position`."""

    plan: Plan
    epoch: int
    position: int
    share: tuple[int, int]
    feeder: Feeder


class _LoaderPass(Iterator[Any]):
    """The batches of the rest of an epoch. Each moves the loader to the next step; the last one, to the next epoch."""

    def __init__(self, loader: RankLoader, spec: BatchSpec) -> None:
        """Begins nothing before the first batch."""
        self._loader, self._spec, self._recorder = loader, spec, loader._recorder
        self._moves = -1  # those of the loader when the pass began; another number means that something moved it
        self._stretch: _Stretch | None = None
        self._ending: notes.Ending | None = None  # ends the feeder of the stretch
        self._last: DeliveredStep | None = None  # the step that was handed out last
        self._handed_out: float | None = None
        self._is_over = False

    def __next__(self) -> Any:
        loader, place = self._loader, None
        self._recorder.take_back(self._handed_out)
        self._handed_out = None
        try:
            with self._recorder.waiting(is_first=self._moves < 0):
                found = None if self._is_over else self._take()
                if found is not None:
                    stretch, batch, step = found
                    place = loader._cursor.place
                    loader._count(stretch, step)
            if found is not None:
                del found
                self._handed_out, self._last = self._recorder.hand_out(), step
                loader._move(stretch, step)
                if step.is_last:
                    self._hand_over()
                return batch
        except BaseException:
            if place is not None:
                loader._move_back(place, self._moves)
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the pass."""
        self._is_over = True
        self._recorder.take_back(self._handed_out)
        self._end_stretch()

    def _begin_stretch(self) -> _Stretch | None:
        self._stretch = stretch = self._loader._begin_stretch(self._spec)
        if stretch is not None:
            self._ending = notes.Ending(self, functools.partial(_end_pass, stretch.feeder, self._recorder))
        return stretch

    def _hand_over(self) -> None:
        """Leaves the feeder to the pass over the next epoch, if it has begun that already."""
        if self._ending is not None and self._loader._session.follow():
            self._ending.forget()
            self._ending = notes.Ending(self, functools.partial(self._recorder.flush, may_wait=False))

    def _end_stretch(self) -> None:
        self._stretch = None
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.end()

    def _take(self) -> tuple[_Stretch, Any, DeliveredStep] | None:
        """Waits for the next batch; None at the end of the pass."""
        loader = self._loader
        if self._moves < 0:
            self._moves = loader._begin_pass(self._spec)
        elif self._last is not None and self._stretch is not None and not self._goes_on(self._stretch, self._last):
            return None
        stretch, self._last = self._stretch or self._begin_stretch(), None
        if stretch is None:
            return None
        try:
            found = stretch.feeder.take()
            if loader._agreement is not None and found is not None and self._moves == loader._cursor.moves:
                loader._agreement.look(at_once=found[1].is_last)
        except RaylanceError as error:
            name_file(error, loader._read_spec.source)
            self._recorder.on_error(error)
            raise
        if found is None or self._moves != loader._cursor.moves:
            raise _superseded()
        return stretch, *found

    def _goes_on(self, stretch: _Stretch, last: DeliveredStep) -> bool:
        """Returns whether a batch follows the last one; ends the stretch if it is of another one.

        Raises:
            RaylanceError: If something else has moved the loader.
        """
        cursor, has_moved = self._loader._cursor, self._moves != self._loader._cursor.moves
        if last.is_last and (has_moved or cursor.epoch != stretch.epoch):
            return False
        if has_moved:
            raise _superseded()
        place = cursor.epoch, cursor.position, self._loader._context.share
        if last.is_last or place != (stretch.epoch, last.after, stretch.share):  # it was taken back, or shares changed
            self._end_stretch()
        return True


def _superseded() -> RaylanceError:
    return RaylanceError(
        "this iteration was superseded: the loader was iterated again, moved or closed meanwhile, and two "
        "iterations cannot share one position. Use one iteration at a time."
    )


@functools.cache
def _warn_of_no_row(uri: str, ranks: int, rows: int) -> None:
    """Warns, once per process, that a batch without a row is handed out."""
    logger.warning(
        "%s: a step has fewer rows, %d, than there are ranks, %d, so this rank gets a batch of no row. It is the last "
        'step of remainder="ragged", or a step of global_batch_cost=. The mean of its losses is NaN, and so is a mean '
        "over all ranks. Add up sums and counts, divide them after the last batch, and open the dataset with "
        'empty_batches=True; or use remainder="pad", whose repeated rows have _valid False, or a larger cost.',
        uri,
        rows,
        ranks,
    )


def _end_pass(feeder: Feeder, recorder: Recorder) -> None:
    feeder.close()
    recorder.flush(may_wait=False)  # a training function that leaves a pass may end now


class _LoaderBatches(Batches):
    """The batches of a loader. A pass begins at the loader's position and ends with the epoch."""

    def __init__(self, loader: RankLoader, spec: BatchSpec, description: str) -> None:
        super().__init__(description)
        self._loader, self._spec = loader, spec

    @property
    def loader(self) -> RankLoader:
        """The loader of the batches."""
        return self._loader

    def prepare(self) -> None:
        """See `Batches.prepare`."""
        cursor = self._loader._cursor
        self._loader._prepare(self._spec, cursor.epoch, 0 if self._spec.whole else cursor.position)

    def __len__(self) -> int:
        return self._loader._plan(self._spec.size, self._spec.remainder).steps(self._loader.epoch)

    def _begin(self) -> Iterator[Any]:
        return _LoaderPass(self._loader, self._spec)


def recorder_of(loader: RankLoader) -> Recorder:
    """Returns the recorder of a loader; for raylance's own modules only."""
    return loader._recorder


def reporting(
    loader: RankLoader, metrics: Mapping[str, Any], *, uploads_async: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Records a report that has a checkpoint, which the body of the context makes; for raylance's own modules only."""
    return loader._reporting(metrics, uploads_async=uploads_async)
