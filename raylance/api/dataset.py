"""The handle of an opened dataset: it shows facts, reads single rows and makes loaders."""

import contextlib
import dataclasses
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from raylance.api.batches import Batches, NoAttributeError
from raylance.api.display import describe, describe_rows, display_batch, display_sample, how_read
from raylance.api.loader import RankLoader
from raylance.api.passes import HandlePasses
from raylance.api.whole_loader import WholeLoader
from raylance.arguments import check_integer, listed
from raylance.batches.lookup import Lookup
from raylance.batches.shown_rows import Display
from raylance.columns import ROW_OFFSET, VALID, join_offsets
from raylance.decode.arrays import NumpyBatch, list_lengths, to_numpy
from raylance.environment import process
from raylance.environment.shared import Shared
from raylance.errors import ConfigError
from raylance.opened import Opened
from raylance.orders.order import COST
from raylance.orders.permutation import Int64Array
from raylance.planning.delivery_spec import make_plan
from raylance.planning.shard_context import PlacedBy, ShardContext, arrange_replicas
from raylance.planning.step_size import Budget, read_size, require_size
from raylance.planning.summary import PlanSummary, summarise
from raylance.settings import OptionArguments, Options, make_options
from raylance.source.filters import short_text

Made = TypeVar("Made", bound=RankLoader)


class Dataset:
    """A pinned, filtered, ordered Lance dataset, or a mixture of several.

    A handle is a value: it can be sent to any process, and using it does not change it. Without a trainer, each
    iteration is over one whole epoch as rank 0 of 1, and all iterations give the same batches.

    Ray Train gets loaders of the handle, each at the start of epoch 0: one for each rank; in its local mode
    (`num_workers=0`), one of all rows.
    """

    def __init__(self, spec: Opened) -> None:
        self._spec, self._passes = spec, HandlePasses(spec)
        self._loaders: list[weakref.ref[RankLoader]] = []  # made from this handle in this process
        self._lookup: Lookup | None = None
        self._context = ShardContext()

    def __call__(self) -> WholeLoader:
        """Called by Ray Train, once for each run, as it calls any function given to a trainer in place of a dataset."""
        return self._known(WholeLoader(self._spec))

    def _known(self, loader: Made) -> Made:
        """Lets `close` close a loader."""
        self._loaders.append(weakref.ref(loader, self._loaders.remove))
        return loader

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(RankLoader, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NoAttributeError(
            f"{name!r} of a handle: a handle is a value, which has no position. Position, epoch and state belong to "
            "loaders: ray.train.get_dataset_shard(name) in a training function of Ray Train, handle.loader() elsewhere."
        )

    def __len__(self) -> int:
        """Number of selected rows; `dataset[i]` takes each i below it. An epoch of a mixture, or of an order that draws
        rows, may have another length.
        """
        return self._spec.delivery.rows

    def __repr__(self) -> str:
        source, filter = self._spec.read.source, self._spec.read.filter
        shown = short_text(filter) if isinstance(filter, str) else filter
        opened = f"dataset({source.uri!r}, version={source.version}, filter={shown!r})"
        if isinstance(source.uri, dict):
            opened = f"mix({source.uri})"
        return f"raylance.{opened}: {describe_rows(self._spec.delivery)} of {listed(self._spec.read.delivers)}"

    def _repr_html_(self) -> str:
        return describe(self, self._spec.read, self._spec.delivery)._repr_html_()

    def show(self, rows: "int | Mapping[str, Any]" = 8) -> Display:
        """Shows rows in a notebook, with images as thumbnails. If there is a column of labels, also counts how often
        each label occurs in 2,000 rows.

        Args:
            rows: Number of rows, spread over the selection. Or a batch: then its first 16 rows are shown, and the
                labels of all its rows are counted.

        Returns:
            HTML in a notebook, text elsewhere.
        """
        if isinstance(rows, Mapping):
            return display_batch(self, rows)
        return display_sample(self, self._spec.read.source, check_integer("show(): rows", rows, 0))

    @property
    def version(self) -> Any:
        """The pinned version; for a mixture, a dict of versions by the name of each dataset."""
        return self._spec.read.source.version

    @property
    def schema(self) -> pa.Schema:
        """Schema of the delivered rows; decoded columns have their `Decoder.arrow_type`. The schema has the metadata of
        the Lance dataset, except for mixtures and packed rows.
        """
        if self._spec.read.schema is not None:
            return self._spec.read.schema
        delivered = self._read(np.empty(0, dtype=np.int64)).select(list(self._spec.read.delivers))
        return delivered.schema.remove_metadata()

    @property
    def costs(self) -> npt.NDArray[np.int32] | dict[str, npt.NDArray[np.int32]] | None:
        """The cost of each selected row, in storage order: int32, (n,), read-only; of several costs, a dict by name.
        None without `cost=`.
        """
        order = self._spec.delivery.resolved_order
        if not order.cost_names:
            return None
        costs = order.costs(np.arange(len(self), dtype=np.int64))
        costs.flags.writeable = False
        by_name: dict[str, npt.NDArray[np.int32]] = dict(zip(order.cost_names, costs.T, strict=True))
        return by_name.get(COST, by_name)

    def head(self, rows: int = 5) -> NumpyBatch:
        """Reads the first selected rows in storage order, in this process; needs no Ray.

        Returns:
            Rows as `take` returns them: NumPy arrays, in which images have their channels last, (n, H, W, 3). Torch
            batches have them first.
        """
        return self[: check_integer("head(): rows", rows, 0)]

    def take(self, offsets: npt.ArrayLike, component: int | str | None = None) -> NumpyBatch:
        """Reads rows by their row offsets in the dataset, as batches carry them under `_rowoffset`; needs no Ray.

        Args:
            offsets: Integers of shape (k,), in any order, also with duplicates; the rows need not be selected, unless
                windows leave out samples that are not whole.
            component: For a mixture, the dataset to which the offsets belong: its name, or its index, which batches
                have in the column `_component`.

        Returns:
            The columns that `iter_batches` gives, k rows in the order of `offsets`, and `_rowoffset`. They are NumPy
            arrays, in which images have their channels last, (k, H, W, 3); `iter_torch_batches` has them first. With
            `on_bad_row="mask"` also `_valid`, which is False for rows that could not be decoded. Images are augmented
            as in epoch 0.

        Raises:
            ConfigError: If the offsets are not integers, or the component is missing or unknown.
            DatasetError: If the pinned version has no row, or no sample, at one of the offsets.
        """
        wanted = np.atleast_1d(np.asarray(offsets))
        if wanted.size and (wanted.ndim != 1 or wanted.dtype.kind not in "iu"):
            raise ConfigError(f"take({offsets!r}): give row offsets, a list of integers.")
        names = list(self.version) if isinstance(self.version, dict) else []
        number: Any = names.index(component) if component in names else component
        with contextlib.suppress(TypeError):
            number = operator.index(number)
        if names and not (isinstance(number, int) and 0 <= number < len(names)):
            raise ConfigError(
                f"take(component={component!r}): each dataset of a mixture counts its own rows, so say which one is "
                f"meant: {', '.join(map(repr, names))}, or its number as under `_component`."
            )
        if not names and component is not None:
            raise ConfigError(f"take(component={component!r}): this is not a mixture; leave component= out.")
        return _to_numpy(self._read(join_offsets(number if names else 0, wanted.astype(np.int64))))

    def __getitem__(self, index: int | slice | Sequence[int] | npt.NDArray[np.integer[Any]]) -> dict[str, Any]:
        """Reads selected rows by their number in storage order, from 0; needs no Ray.

        Args:
            index: An integer for one row; a slice or integers of shape (k,) for several.

        Returns:
            Rows as `take` returns them, with the channels of images last; for an integer, the row's values instead of
            arrays.

        Raises:
            IndexError: If an integer is outside the selection.
        """
        asked = np.arange(*index.indices(len(self))) if isinstance(index, slice) else np.asarray(index)
        rows = np.atleast_1d(asked)
        if rows.ndim > 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise ConfigError(f"dataset[{index!r}]: give an integer, a slice, or a list of integers.")
        outside = rows[(rows < -len(self)) | (rows >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside[0]} lies outside of {len(self)} selected rows")
        rows = rows.astype(np.int64) % len(self)
        batch = _to_numpy(self._read(self._spec.read.source.load_selection().offsets(rows)))
        return batch if asked.ndim else {name: values[0] for name, values in batch.items()}

    def to_pandas(self, rows: int = 1000) -> pd.DataFrame:
        """Reads the first selected rows, in storage order, into a frame; see `head`.

        Args:
            rows: Maximum number of rows to read.

        Returns:
            A frame with one line for each row; tensors and lists are arrays in a column of objects.
        """
        return pd.DataFrame({k: v if v.ndim == 1 else list(v) for k, v in self.head(rows).items()})

    def _read(self, offsets: Int64Array) -> pa.Table:
        """Reads rows in the order of `offsets`, decoded and packed as in epoch 0; the table has `_rowoffset`."""
        process.check_context(self._context)
        self._lookup = self._lookup or Lookup(self._spec.read)
        marks = [VALID] if self._spec.delivery.masks_bad_rows else []
        return self._lookup.read(offsets, epoch=0).select([*self._spec.read.delivers, ROW_OFFSET, *marks])

    def plan(
        self,
        global_batch_size: int | None = None,
        world_size: int = 1,
        *,
        budget: Budget | None = None,
        **older: Any,
    ) -> PlanSummary:
        """Plans an epoch without reading anything.

        Args:
            global_batch_size: Rows of one step over all ranks; 256 if nothing else is given.
            world_size: Number of ranks that share the rows; if some ranks are peers, number of data-parallel ranks.
            budget: Cost of one step, in place of `global_batch_size`.
            **older: Arguments that `budget` has replaced.

        Returns:
            A summary whose repr shows rows, shards, lanes, steps, rows dropped or repeated, and bytes of a window; for
            a mixture also each dataset's share, and how many of its rows are used, left out and repeated.

        Raises:
            ConfigError: If the epoch has no step, or a rank gets no row.
        """
        world_size = check_integer("plan(): world_size", world_size, 1)
        found = read_size(
            "plan()",
            world_size,
            global_batch_size=global_batch_size,
            budget=budget,
            others=older,
            known=("global_batch_size", "world_size", "budget"),
        )
        size = 256 if found is None else found.size
        limit, source = Options().reader_bytes, self._spec.read.source
        plan = make_plan(self._spec.delivery, size=size, dp_size=world_size, reader_bytes=limit)
        return summarise(plan, source.likely_row_bytes, how_read(source, plan), limit, source.measure)

    def steps_per_epoch(
        self,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        budget: Budget | None = None,
        **older: Any,
    ) -> int:
        """Returns the number of steps of a whole epoch if one rank gets all rows, so `batch_size` means the same as
        `global_batch_size`. If steps have a cost, it is the number of epoch 0. See `RankLoader.steps_per_epoch` for
        several ranks.
        """
        sizes: dict[str, Any] = {"global_batch_size": global_batch_size, "batch_size": batch_size, "budget": budget}
        found = require_size(read_size("steps_per_epoch()", 1, **sizes, others=older, known=sizes))
        limit = Options().reader_bytes
        return make_plan(self._spec.delivery, size=found.size, dp_size=1, reader_bytes=limit).steps(0)

    def loader(
        self,
        *,
        rank: int | Literal["auto"] | None = None,
        world_size: int | None = None,
        ranks_per_replica: int = 1,
        **options: Unpack[OptionArguments],
    ) -> RankLoader:
        """Makes a loader at the start of epoch 0. Use it outside of Ray Train, or in a training function for a dataset
        that was not passed to the trainer. The loader is recorded like any other loader. Closing the handle closes the
        loader, too.

        Args:
            rank: The rank that the loader serves. "auto" takes rank and world size from torch.distributed if it is
                initialised, else from Ray Train, else from the environment variables of torchrun, MPI or Slurm. None
                for rank 0 of 1, which is refused if one of these shows that there are more processes.
            world_size: Number of ranks.
            ranks_per_replica: Number of contiguous ranks that get the same rows; see `raylance.DataConfig`.
            **options: Fields of `raylance.Options`, such as `num_decoders=2`.

        Raises:
            ConfigError: If the rank is outside the world, the ranks do not divide into replicas, or an option is
                unknown or impossible; if no rank is given in one of several processes, as in a worker of Ray Train.
        """
        placed_by: PlacedBy = "nobody" if rank is None else "found" if rank == "auto" else "somebody"
        if rank == "auto":
            rank, found = process.find_place("auto", "rank")
            if world_size not in (None, found):
                raise ConfigError(
                    f'loader(rank="auto", world_size={world_size!r}) in a world of {found}: rows would come twice or '
                    "never. Leave world_size out, or give both numbers."
                )
            world_size = found
        size = check_integer("world_size", 1 if world_size is None else world_size, 1)
        if rank is None:
            process.refuse_larger_world()
            if size != 1:
                raise ConfigError(
                    f"loader(world_size={world_size!r}) without rank=: every process would be rank 0, and the rows of "
                    "the others would never come. Say which rank this is."
                )
        checked = make_options("loader()", options, ("rank", "world_size", "ranks_per_replica"))
        rank = check_integer("rank", 0 if rank is None else rank, 0)
        context = ShardContext(rank=rank, world_size=size, placed_by=placed_by)
        pairs = arrange_replicas(ranks_per_replica, size)
        context = dataclasses.replace(context, data_parallel=pairs[context.rank])
        return self._known(RankLoader(self._spec, checked, context))

    def iter_torch_batches(self, *, epoch: int = 0, **arguments: Any) -> Batches:
        """Returns an iterable over the torch batches of a whole epoch, as rank 0 of 1, the same in each iteration.

        Args:
            epoch: Number of the epoch, from 0.
            **arguments: Arguments of `RankLoader.iter_torch_batches`.

        Raises:
            ConfigError: If it is called in one of several processes, as in a worker of Ray Train; also as
                `RankLoader.iter_torch_batches`.
        """
        return self._whole("iter_torch_batches", epoch, arguments)

    def iter_batches(self, *, epoch: int = 0, **arguments: Any) -> Batches:
        """Returns an iterable over the NumPy, pyarrow or pandas batches of an epoch; see `RankLoader.iter_batches`."""
        return self._whole("iter_batches", epoch, arguments)

    def _whole(self, method: str, epoch: int, arguments: dict[str, Any]) -> Batches:
        process.refuse_larger_world()
        epoch = check_integer("epoch", epoch, 0)
        return self._passes.iterate(method, epoch, arguments, repr(self))

    def to_ray_dataset(self, *, epoch: int | None = None, global_batch_size: int = 256, **options: Any) -> Any:
        """Returns the rows as a dataset of Ray Data, for offline jobs, evaluation and inference. Nothing is read yet.

        Tasks of Ray Data read and decode the rows, as the handle was opened: open it without decoders for encoded
        values. Each row comes once, but no promise of training holds: there are no ranks, steps or checkpoints.

        Tasks wait until CPUs are free. Helpers of this handle whose pass has ended free theirs now; close loaders that
        are not needed any more.

        Args:
            epoch: The epoch whose order and augmentation the rows get. Rows that its order leaves out or repeats are
                left out or repeated. None for the selected rows in storage order, augmented and packed as in epoch 0.
            global_batch_size: From which an order takes sizes that are "auto", as in training.
            **options: Options of `ray.data.read_datasource`, such as `concurrency` and `override_num_blocks`.

        Returns:
            A `ray.data.Dataset` of the columns that `take` gives, `_rowoffset` included; nulls among tensors, or lists
            of one size, are a `DatasetError` of its tasks. Its blocks keep the order of
            the rows, but Ray Data may deliver blocks in another order, unless `preserve_order` of
            `ray.data.DataContext.get_current().execution_options` is True.

        Raises:
            ConfigError: If an argument has a wrong type or value.
        """
        from raylance.api.ray_data import to_ray_dataset  # Ray Data takes a second to import

        process.check_context(self._context)
        plan = None
        if epoch is not None:
            epoch, size = check_integer("epoch", epoch, 0), check_integer("global_batch_size", global_batch_size, 1)
            limit = Options().reader_bytes
            plan = make_plan(self._spec.delivery, size=size, dp_size=1, reader_bytes=limit, remainder="ragged")
        self._passes.end_idle()
        return to_ray_dataset(self._spec, self.schema, plan, epoch or 0, options)

    def share(self) -> None:
        """Puts large values, such as the selection or weights, into Ray's object store, so that all ranks read one
        copy. Does nothing if Ray does not run.
        """
        self._spec.map_shared(Shared.of_run)

    def close(self) -> None:
        """Ends the passes and helpers of the handle and of the loaders that its method `loader` made. This frees the
        CPUs of the helpers.

        Loaders keep their position, and another pass starts new helpers.
        """
        self._passes.close()
        for loader in [made for ref in list(self._loaders) if (made := ref()) is not None]:
            loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaders": [], "_lookup": None}

    def __iter__(self) -> NoReturn:
        raise ConfigError(
            "a handle is not iterated itself, because it does not know the batch size: iterate over "
            "handle.iter_torch_batches(batch_size=…) or iter_batches(…)."
        )

    def __getitems__(self, indices: Any) -> NoReturn:
        # torch's DataLoader looks for this method before it takes rows one by one, in its own order, ignoring ranks.
        raise ConfigError(
            "a handle under torch's DataLoader would give every rank all rows, in another order than the plan's. Use "
            "raylance.torch_data.MapDataset(handle) with its RowSampler, or IterableDataset(handle)."
        )


def opened_of(handle: Dataset) -> Opened:
    """Returns the spec of a handle; for raylance's own modules only.

    Raises:
        ConfigError: If it is not a handle.
    """
    if not isinstance(handle, Dataset):
        raise ConfigError(f"{handle!r} is a {type(handle).__name__}: give the handle that raylance.dataset returns.")
    return handle._spec  # noqa: SLF001


def context_of(handle: Dataset) -> ShardContext:
    """Returns the `ShardContext` of a handle; see `opened_of`."""
    opened_of(handle)
    return handle._context  # noqa: SLF001


def _to_numpy(table: pa.Table) -> NumpyBatch:
    """Converts a table as `iter_batches` does, but lists become one array if they have one length in this table."""
    return to_numpy(table, list_lengths(table))
