"""One rank's loader: its batches, and its position, which moves with the batches.

A batch counts as consumed when it is handed out. The position is the same on every rank, because all ranks take the
same steps.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from raylance.api.batches import Batches
from raylance.api.consumer import Consumer
from raylance.api.delivery import Delivery
from raylance.api.positioned import Positioned
from raylance.arguments import check_flag, check_integer
from raylance.batches.conversion import (
    BatchFormat,
    BatchSpec,
    Dtypes,
    collate_format,
    host_converter,
    make_batch_spec,
    torch_converter,
)
from raylance.batches.device import can_pin, torch_device
from raylance.batches.list_padding import check_counted
from raylance.decode.arrays import Paddings
from raylance.environment import process
from raylance.errors import ConfigError, RaylanceError
from raylance.observe.verdict import Verdict
from raylance.opened import Opened
from raylance.orders.permutation import Int64Array
from raylance.planning.delivery_spec import check_costs
from raylance.planning.shard_context import ShardContext
from raylance.planning.state import State, identity_of
from raylance.planning.step_size import Budget, Size, read_size, require_size
from raylance.runtime.session import Session
from raylance.settings import Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class RankLoader(Positioned):
    """The loader that `ray.train.get_dataset_shard` returns: it serves one rank. It starts helpers at `prepare` or at
    the first batch; until then it can be pickled.
    """

    def __init__(
        self,
        spec: Opened,
        options: Options,
        context: ShardContext | None = None,
        *,
        session: Session | None = None,  # helpers of an earlier loader of the same data; the caller closes them
        is_recorded: bool = True,  # whether the run records the loader; False for a pass over a handle
    ) -> None:
        super().__init__(spec)
        whose = context or ShardContext()
        self._consumer = Consumer(spec.read, options, whose, self._cursor, session, is_recorded=is_recorded)

    @property
    def rank(self) -> int:
        """The rank that the loader serves; 0 if every rank sees the whole dataset."""
        return self._consumer.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the run; 1 if every rank sees the whole dataset."""
        return self._consumer.context.world_size

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank, which decides the rows that this rank gets. Equals `rank` if no ranks are peers."""
        return self._consumer.context.dp_rank

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, which share the epoch; equals `world_size` if no ranks are peers."""
        return self._consumer.context.dp_size

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
        share = process.data_parallel_of(mesh, dp_size)
        self._consumer.reshard(share, is_elastic=check_flag("elastic", elastic))

    def repeat(self) -> None:
        """Takes back the last step, for trainers that may reject a step, such as torchft. The next batch is this step
        again. If `reshard` was called in between, the batch is this rank's new part of the step. Neither the loader's
        state nor the proof of the run counts the rejected step.

        Call it on every rank that was handed the step, before another batch is taken or a state is saved.

        Raises:
            ConfigError: If no step was handed out since the loader was made, moved, or took a step back.
        """
        if not self._consumer.take_back():
            raise ConfigError(
                "repeat() without a step to repeat: none was handed out since the loader was made, moved or took a "
                "step back, and only the last one can be. Call it once, after the step that was not committed; "
                "seek() goes to any other step."
            )

    def seek(
        self,
        global_step: int,
        *,
        global_batch_size: int | None = None,
        budget: Budget | None = None,
        **older: Any,
    ) -> None:
        """Goes to a step, so that the next batch is of this step, also during a pass. Call it if the trainer counts the
        steps, so that a rank that joins other ranks begins at their step: they were handed the rows before it. To leave
        out steps on purpose, call `skip`.

        Args:
            global_step: Number of the step, counted over all epochs like the loader's `global_step`.
            global_batch_size: Rows of each step between the loader's present step and the given step. None for the size
                in the last pass or in the loaded state.
            budget: Cost of each of these steps, in place of `global_batch_size`.
            **older: Arguments that `budget` has replaced.

        Raises:
            ConfigError: If the global batch size is not known, or if with this size no step has that number.
        """
        found = read_size(
            "seek()",
            self.dp_size,
            global_batch_size=global_batch_size,
            budget=budget,
            others=older,
            known=("global_batch_size", "budget"),
        )
        step = check_integer("seek(): global_step", global_step, 0)
        self._consumer.seek(step, self._known_size(f"seek({step})", found))

    def skip(
        self,
        steps: int,
        *,
        global_batch_size: int | None = None,
        budget: Budget | None = None,
        reason: str = "",
    ) -> None:
        """Passes over the next steps on purpose, also during a pass: for example those of a spike of the loss, after a
        return to a checkpoint before it. Call it on every rank before the same step, with the same number.

        Proofs count the rows as passed over, the record has a note of it, and the report a mark. It holds for this
        start: call it again after a restart from a checkpoint before it.

        Args:
            steps: Number of steps, at least 1.
            global_batch_size: As in `seek`, like `budget`.
            budget: Cost of each of these steps, in place of `global_batch_size`.
            reason: Why, such as "loss spike".

        Raises:
            ConfigError: If an argument cannot be honoured, or the global batch size is not known.
        """
        sizes: dict[str, Any] = {"global_batch_size": global_batch_size, "budget": budget}
        found = read_size("skip()", self.dp_size, **sizes, others={}, known=sizes)
        steps = check_integer("skip(): steps", steps, 1)
        self._consumer.skip(steps, self._known_size(f"skip({steps})", found), _checked_reason("skip()", reason))

    def _known_size(self, call: str, found: Any) -> Size:
        size = self._consumer.size if found is None else found.size
        if size is None:
            raise ConfigError(
                f"{call} before the first batch: how many rows a step has is not known. Give global_batch_size= or "
                "budget=, or load a state."
            )
        return size

    def reweight(self, weights: Mapping[str, float], *, reason: str = "") -> None:
        """Changes the weights of a mixture from the next batch on, also during a pass: for example by the losses of the
        last steps. Each dataset goes on where it is in its own order. The change is a part of the loader's state, so it
        holds after a restart, too, until the arguments of `raylance.mix` have changed. It ends the schedule, if any.

        Call it on every rank before the same step, with the same weights, such as a mean of losses over all ranks. If
        torch.distributed is initialised, the ranks compare their weights before the next batch, and wait for each other
        up to 30 s. What was read ahead is read again.

        Args:
            weights: The weights of all datasets by name, shares of what `weigh` of `raylance.mix` says; 0 for a dataset
                that hands out no row from here on.
            reason: Why they change, for the state and the report.

        Raises:
            ConfigError: If the dataset is not a mixture; if `weights` are not those of its datasets, or all are 0. If
                ranks change their weights differently, the next batch raises this error.
        """
        self._consumer.reweight(weights, _checked_reason("reweight()", reason))

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
        self._consumer.set_epoch(epoch)

    def steps_per_epoch(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        budget: Budget | None = None,
        **older: Any,
    ) -> int:
        """Returns the number of steps of a whole epoch, the same on every rank. If steps have a cost, it is that of the
        present epoch.

        Args:
            global_batch_size: Rows of one step over all ranks.
            batch_size: Rows of one step on each data-parallel rank, in place of `global_batch_size`.
            budget: Cost of one step, in place of `global_batch_size`.
            **older: Arguments that `budget` has replaced.

        Raises:
            ConfigError: If not exactly one of the sizes is given, or if the size is not positive.
        """
        sizes: dict[str, Any] = {"global_batch_size": global_batch_size, "batch_size": batch_size, "budget": budget}
        size = read_size("steps_per_epoch()", self.dp_size, **sizes, others=older, known=sizes)
        return self._consumer.plan(require_size(size).size).steps(self.epoch)

    def iter_torch_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        budget: Budget | None = None,
        prefetch_batches: int = 2,
        dtypes: Dtypes = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool | None = None,
        pin_memory: bool = False,
        with_row_offset: bool = False,
        pad_lists: Paddings | None = None,
        whole: bool = False,
        **others: Any,
    ) -> Batches:
        """Returns an iterable over the torch batches of the rest of the epoch. Iterating it again takes the next epoch.

        Args:
            global_batch_size: Rows of one step over all ranks. The numbers of rows that the ranks get of a step differ
                by at most one, unless a `Balance` has `equal_rows=False`.
            batch_size: Rows of one step on each data-parallel rank, in place of `global_batch_size`.
            budget: Cost of one step, in place of `global_batch_size`, and of micro-batches: a `raylance.Budget`. It
                needs `cost=` of `raylance.dataset`.
            prefetch_batches: Number of steps that are read and decoded ahead: more if decoders would be idle, fewer if
                they do not fit in `inflight_bytes`. It is also the largest number of finished batches that wait for
                the training loop. 0 acts as 1.
            dtypes: One dtype for all tensors, or dtypes by column; None keeps the stored dtypes. One dtype for all does
                not change columns that raylance adds, such as the `…_length` of a `Pad`; name these to change them. Do
                not name columns without tensors: text, decimals, dates.
            device: The device of the tensors. "auto" is the device of the Ray Train worker; the CPU if there is none.
                Batches for CUDA are copied through pinned memory on a side stream as soon as they are made. So finished
                batches that wait for the training loop take memory of the device.
            collate_fn: A function that makes the batch from a dict of NumPy arrays; or an object of Ray Data's
                `ArrowBatchCollateFn`, `NumpyBatchCollateFn` or `PandasBatchCollateFn`, which takes what its name says.
                Without it, a batch is a dict of tensors. It is called in a thread of the loader.
            drop_last: Replaces the dataset's `remainder`: True by "drop", False by "ragged". None keeps it.
            pin_memory: Whether batches that stay on the CPU are put into pinned memory.
            with_row_offset: Whether to add the column `_rowoffset`, int64: the row offsets that `Dataset.take` takes.
            pad_lists: By column name, how to convert lists of numbers or tensors, stored or from a ragged decoder. A
                `raylance.Pad` pads the lists as its attributes say, and adds a column of lengths. A number pads them to
                the longest list of the batch, and adds none, as `Pad(0, lengths=False)` does; the dtype of the lists,
                and their dtype in `dtypes`, must be able to hold the number. "jagged" makes one nested tensor of jagged
                layout, (n, j, …). "flat" gives the values of all rows one after another, (m, …), and a column of
                lengths `…_length`, int64 (n,), that add up to m: the default for images that a decoder made of lists.
                None keeps Python lists. Another column without an entry becomes one tensor if its lists, or lists of
                lists, all have one length or shape; if not, it keeps Python lists, with a warning. In steps of a cost,
                `TokensOf` must count what `Pad` adds: see its `multiple`.
            whole: Whether each pass begins at the start of an epoch, also after a pass that was left early: then at
                the start of the same epoch. For validation, which may stop after some batches.
            **others: Arguments that `budget` has replaced. Any other one is refused, and the error names the right one.

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
        sizes: dict[str, Any] = {"global_batch_size": global_batch_size, "batch_size": batch_size, "budget": budget}
        known = RankLoader.iter_torch_batches.__kwdefaults__ or ()
        step = require_size(read_size("iter_torch_batches()", self.dp_size, **sizes, others=others, known=known))
        pin_memory = can_pin(check_flag("pin_memory", pin_memory))
        target = process.default_device() if device == "auto" else torch_device(device)
        takes = collate_format(collate_fn)
        if callable(collate_fn):
            collate_fn = self._consumer.recorder.stats.timed("collate_fn_s")(collate_fn)
        pins = pin_memory or target.type == "cuda"
        convert = torch_converter(self._consumer.read_spec, dtypes, collate_fn, pad_lists, pins, takes)
        return self._batches(
            "torch",
            pad_lists,
            is_by_rank=batch_size is not None,
            step=step,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            with_row_offset=with_row_offset,
            convert=convert,
            device=target,
            pin_memory=pin_memory,
            whole=whole,
        )

    def iter_batches(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        budget: Budget | None = None,
        batch_format: BatchFormat = "numpy",
        prefetch_batches: int = 2,
        drop_last: bool | None = None,
        with_row_offset: bool = False,
        pad_lists: Paddings | None = None,
        whole: bool = False,
        **others: Any,
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
        sizes: dict[str, Any] = {"global_batch_size": global_batch_size, "batch_size": batch_size, "budget": budget}
        known = RankLoader.iter_batches.__kwdefaults__ or ()
        step = require_size(read_size("iter_batches()", self.dp_size, **sizes, others=others, known=known))
        return self._batches(
            batch_format,
            pad_lists,
            is_by_rank=batch_size is not None,
            step=step,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            with_row_offset=with_row_offset,
            convert=host_converter(self._consumer.read_spec, batch_format, pad_lists),
            whole=whole,
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
        return self._consumer.recorder.stats.as_dict()

    def explain(self) -> Verdict:
        """Explains in words what limits this rank so far, and what to change; see `Verdict`.

        The explanation compares two times of the training loop: the time in which it worked with batches, and the time
        in which it waited for the next batch. It also compares three rates, in rows a second: how fast the loop takes
        rows without waiting, how fast they could be read, and how fast they could be decoded. `explain_run` explains a
        whole run, over all ranks.
        """
        return self._consumer.recorder.explain()

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
        self._consumer.recorder.flush(may_wait=may_wait)

    def close(self) -> None:
        """Ends the helpers. The position stays, and another iteration starts new helpers."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._consumer.session.runtime is not None:
            raise RaylanceError(
                "this loader has started helpers, which belong to this process, so it cannot be sent to another. Send "
                "it before the first batch, or make one there; for torch's DataLoader, use raylance.torch_data."
            )
        return self.__dict__

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
        state, consumer = super().state_dict(), self._consumer
        consumer.ledger.cut()  # a run may continue from here
        if not consumer.recorder.is_assigned:  # under Ray Train, runs continue at reports, which write the record
            consumer.recorder.flush(may_wait=False)
        return state

    def _state(self) -> State:
        return self._consumer.saved()

    def _on_load(self, saved: State) -> None:
        self._consumer.on_load(saved)

    def _batches(self, kind: str, pad_lists: Paddings | None, *, is_by_rank: bool, **arguments: Any) -> Batches:
        """Returns batches to which these arguments of `make_batch_spec` are bound."""
        delivery, consumer = self._cursor.delivery_spec, self._consumer
        spec = make_batch_spec(delivery, **arguments)
        plan = consumer.plan(spec.size, spec.remainder)  # raises errors of the plan before anything starts
        if spec.micro is not None:
            check_costs(plan.order.cost_names, spec.micro, "micro=")
        padded = {
            name: most
            for limit, by in ((plan.budget, plan.order.buckets_by), (spec.micro, None))
            if limit is not None
            for name, most in limit.most.items()
            if name == by or limit.pads(name)
        }
        check_counted(consumer.read_spec, pad_lists, padded)
        consumer.remainder, consumer.is_bound_by_rank = spec.remainder, is_by_rank
        size = plan.step_text.removeprefix("a ")
        text = f"{kind} batches of {consumer.read_spec.source.uri!r}, {size}, {consumer.context}"
        return _LoaderBatches(self, spec, text)


class _LoaderBatches(Batches):
    """The batches of a loader. A pass begins at the loader's position and ends with the epoch."""

    def __init__(self, loader: RankLoader, spec: BatchSpec, description: str) -> None:
        super().__init__(description)
        self._loader, self._spec, self._consumer = loader, spec, consumer_of(loader)

    @property
    def loader(self) -> RankLoader:
        """The loader of the batches."""
        return self._loader

    def prepare(self) -> None:
        """See `Batches.prepare`."""
        self._consumer.prepare(self._spec)

    def __len__(self) -> int:
        return self._consumer.plan(self._spec.size, self._spec.remainder).steps(self._loader.epoch)

    def _begin(self) -> Iterator[Any]:
        return Delivery(self._consumer, self._spec)


def _checked_reason(call: str, reason: Any) -> str:
    if not isinstance(reason, str):
        raise ConfigError(f"{call}: reason={reason!r}; give a text.")
    return " ".join(reason.split())  # in one line


def consumer_of(loader: RankLoader) -> Consumer:
    """Returns the inside of a loader; for raylance's own modules only."""
    return loader._consumer  # noqa: SLF001
