"""Owns the handle of an opened dataset, a value: it tells, peeks and makes loaders; never holds a position."""

import contextlib
import operator
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from raylance import process
from raylance.api.display import describe, how_read, look, look_at, rows_in_words
from raylance.api.loader import RankLoader
from raylance.api.passes import WholePasses
from raylance.api.train_adapter import TrainData
from raylance.arguments import check_integer
from raylance.batches.batches import Batches
from raylance.batches.display import Display
from raylance.batches.lookup import Lookup
from raylance.columns import COMPONENT_SHIFT, ROW_OFFSET, VALID
from raylance.decode.arrays import Lists, NumpyBatch, list_lengths, to_numpy
from raylance.environment.shared import Shared
from raylance.errors import ConfigError, DatasetError
from raylance.orders.permutation import Int64Array
from raylance.planning.summary import PlanSummary, summarise
from raylance.runtime.session import Session
from raylance.settings import DeliverySpec, ReadSpec, make_options, make_plan, map_shared, takes_options
from raylance.source.packing import PackedRows
from raylance.source.rows import TableRows


class Dataset(TrainData):
    """A pinned, filtered, ordered Lance dataset, or a mixture of several.

    A value: it can be sent anywhere, and nothing that is done with it changes it. Iterating on it makes a pass over a
    whole epoch as rank 0 of 1, the same each time, for use without a trainer.
    """

    def __init__(self, feed: ReadSpec, delivery: DeliverySpec) -> None:
        super().__init__(feed, delivery)
        self._idle: Session | None = None  # of the last pass, for the next one
        self._passes: set[RankLoader] = set()  # that go on
        self._loaders: list[weakref.ref[RankLoader]] = []  # that were made of it here
        self._lookup: Lookup | None = None
        self._whole_passes = WholePasses()
        self._pid = os.getpid()

    def __len__(self) -> int:
        """Selected rows, those that `dataset[…]` counts; of a mixture or of draws, an epoch may have more or fewer."""
        return self._delivery.rows

    def __repr__(self) -> str:
        source = self._feed.source
        opened = f"dataset({source.uri!r}, version={source.version}, filter={self._delivery.filter!r})"
        if isinstance(source.uri, dict):
            opened = f"mix({source.uri})"
        return f"raylance.{opened}: {rows_in_words(self._delivery)} of {', '.join(source.columns)}"

    def _repr_html_(self) -> str:
        return describe(self)._repr_html_()

    def show(self, rows: "int | Mapping[str, Any]" = 8) -> Display:
        """Shows rows in a notebook: images as thumbnails, and how often each class is among 2,000 rows.

        Args:
            rows: How many, spread over the selection; or a batch, whose rows are shown instead.

        Returns:
            HTML in a notebook, text elsewhere.
        """
        return look_at(self, rows) if isinstance(rows, Mapping) else look(self, check_integer("show(): rows", rows, 0))

    @property
    def version(self) -> Any:
        """The pinned version; of a mixture, versions by component."""
        return self._feed.source.version

    @property
    def schema(self) -> pa.Schema:
        """What is delivered, with the dataset's metadata; what is decoded, as `Decoder.arrow_type` says."""
        source = self._feed.source
        delivered = self._read(np.empty(0, dtype=np.int64)).select(list(self._feed.delivers))
        kept = source.pinned.open().schema.metadata if isinstance(source, TableRows) else None
        return delivered.schema.with_metadata(kept)

    def head(self, rows: int = 5) -> NumpyBatch:
        """Reads the first selected rows in storage order, in this process; needs no Ray.

        Args:
            rows: How many.

        Returns:
            By column what `iter_batches` gives, and `_rowoffset`; with `on_bad_row="mask"`, `_valid`, False where a
            row could not be decoded. Images are those of epoch 0.
        """
        return self[: check_integer("head(): rows", rows, 0)]

    def take(self, offsets: npt.ArrayLike, component: int | str | None = None) -> NumpyBatch:
        """Reads rows by their row offsets in the dataset, as batches carry them under `_rowoffset`; needs no Ray.

        Args:
            offsets: Integers of shape (k,), in any order, duplicates included; the rows need not be selected.
            component: Of a mixture, the dataset that they count in: its name, or its place as under `_component`.

        Returns:
            By column what `iter_batches` gives, k rows in the order asked for, and `_rowoffset`; with
            `on_bad_row="mask"`, `_valid`, False where a row could not be decoded. Images are those of epoch 0.

        Raises:
            ConfigError: For offsets that are no integers, or a component that is missing or unknown.
            DatasetError: For an offset that the pinned version does not have.
        """
        wanted = np.atleast_1d(np.asarray(offsets))
        if wanted.size and (wanted.ndim != 1 or wanted.dtype.kind not in "iu"):
            raise ConfigError(f"take({offsets!r}): give row offsets, a list of integers.")
        names = list(self.version) if isinstance(self.version, dict) else []
        place: Any = names.index(component) if component in names else component
        with contextlib.suppress(TypeError):
            place = operator.index(place)
        if names and not (isinstance(place, int) and 0 <= place < len(names)):
            raise ConfigError(
                f"take(component={component!r}): each dataset of a mixture counts its own rows, so say which one is "
                f"meant: {', '.join(map(repr, names))}, or its number as under `_component`."
            )
        if not names and component is not None:
            raise ConfigError(f"take(component={component!r}): this is no mixture; leave component= out.")
        return _to_numpy(self._read(wanted.astype(np.int64) | (place if names else 0) << COMPONENT_SHIFT))

    def __getitem__(self, index: int | slice | Sequence[int] | npt.NDArray[np.integer[Any]]) -> dict[str, Any]:
        """Reads selected rows by their place in storage order, from 0; needs no Ray.

        Args:
            index: An integer for one row; a slice or integers of shape (k,) for several.

        Returns:
            As `take`; for an integer, the values of the row in place of arrays.

        Raises:
            IndexError: For an integer outside of the selection.
        """
        asked = np.arange(*index.indices(len(self))) if isinstance(index, slice) else np.asarray(index)
        rows = np.atleast_1d(asked)
        if rows.ndim > 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise ConfigError(f"dataset[{index!r}]: give an integer, a slice, or a list of integers.")
        outside = rows[(rows < -len(self)) | (rows >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside[0]} lies outside of {len(self)} selected rows")
        rows = rows.astype(np.int64) % len(self)
        batch = _to_numpy(self._read(self._feed.source.load_selection().offsets(rows)))
        return batch if asked.ndim else {name: values[0] for name, values in batch.items()}

    def to_pandas(self, rows: int = 1000) -> pd.DataFrame:
        """Reads the first selected rows, in storage order, into a frame for a look; see `head`.

        Args:
            rows: How many at the most.

        Returns:
            One row each; tensors and lists as arrays in a column of objects.
        """
        return pd.DataFrame({k: v if v.ndim == 1 else list(v) for k, v in self.head(rows).items()})

    def _read(self, offsets: Int64Array) -> pa.Table:
        """Rows in the order asked for, decoded as in epoch 0, with `_rowoffset`."""
        process.check_place(self._pid, None)
        feed = self._feed
        if isinstance(feed.source, PackedRows) and len(offsets) and not 0 <= offsets.min() <= offsets.max() < len(self):
            raise DatasetError(
                f"sequences are numbered from 0 to {len(self) - 1}: {offsets.tolist()[:5]} are not there."
            )
        self._lookup = self._lookup or Lookup(feed)
        marks = [VALID] if self._delivery.masks_bad_rows else []
        return self._lookup.read(offsets).select([*feed.delivers, ROW_OFFSET, *marks])

    @property
    def opened(self) -> tuple[ReadSpec, DeliverySpec]:
        """What is read and what is delivered: for those that make loaders of it."""
        return self._feed, self._delivery

    def plan(self, global_batch_size: int = 256, world_size: int = 1) -> PlanSummary:
        """Plans an epoch without reading anything.

        Args:
            global_batch_size: Rows of one step over all ranks.
            world_size: Ranks.

        Returns:
            A summary whose repr tells rows, shards, lanes, steps, the rows dropped or repeated, and bytes of a window;
            of a mixture, each dataset's share, and how many of its rows are used, left out and repeated.

        Raises:
            ConfigError: If there would be no step, or ranks without a row.
        """
        size = check_integer("plan(): global_batch_size", global_batch_size, 1)
        world_size = check_integer("plan(): world_size", world_size, 1)
        plan = make_plan(self._feed, self._delivery, self._options, size, world_size, self._delivery.remainder)
        feed, limit = self._feed, self._options.max_window_bytes
        return summarise(plan, feed.source.likely_row_bytes, how_read(self, plan), limit, feed.source.measure)

    def steps_per_epoch(self, *, global_batch_size: int | None = None, batch_size: int | None = None) -> int:
        """Steps of a whole epoch of one rank; see `RankLoader.steps_per_epoch`."""
        loader = RankLoader(self._feed, self._delivery, self._options)
        return loader.steps_per_epoch(global_batch_size=global_batch_size, batch_size=batch_size)

    @takes_options
    def loader(self, *, rank: int | None = None, world_size: int | None = None, **options: Any) -> RankLoader:
        """Makes a loader by hand, at the start of epoch 0: outside of Ray Train, or in a training function for data
        that the trainer was not given, where it is recorded as others are. `close` of the handle closes it, too.

        Args:
            rank: The rank it serves; None for 0 of a world of 1.
            world_size: Ranks that share the epoch.
            **options: Fields of `raylance.Options`, such as `num_decoders=2`.

        Raises:
            ConfigError: For a rank outside the world, or an unknown or impossible option; for no rank in a worker of
                Ray Train that is not alone.
        """
        if rank is None:
            self._refuse_in_larger_world()
            if world_size is not None and check_integer("world_size", world_size, 1) != 1:
                raise ConfigError(
                    f"loader(world_size={world_size!r}) without rank=: every process would be rank 0, and the rows of "
                    "the others would never come. Say which rank this is."
                )
        made_of = make_options("loader()", options, ("rank", "world_size"))
        rank = 0 if rank is None else check_integer("rank", rank, 0)
        world_size = 1 if world_size is None else check_integer("world_size", world_size, 1)
        made = RankLoader(self._feed, self._delivery, made_of, rank, world_size)
        self._loaders.append(weakref.ref(made, self._loaders.remove))
        return made

    def iter_torch_batches(self, *, epoch: int = 0, **arguments: Any) -> Batches:
        """Iterates over a whole epoch in torch batches, as rank 0 of 1; iterated again, over the same one.

        Args:
            epoch: The epoch.
            **arguments: As `RankLoader.iter_torch_batches` takes them.

        Raises:
            ConfigError: In a worker of Ray Train that is not alone, and as `RankLoader.iter_torch_batches`.
        """
        return self._whole("iter_torch_batches", epoch, arguments)

    def iter_batches(self, *, epoch: int = 0, **arguments: Any) -> Batches:
        """Iterates over a whole epoch in other batches; see `iter_torch_batches` and `RankLoader.iter_batches`."""
        return self._whole("iter_batches", epoch, arguments)

    def _whole(self, method: str, epoch: int, arguments: dict[str, Any]) -> Batches:
        if process.local_run(self) is not None:
            if epoch:
                raise ConfigError(
                    f"epoch={epoch!r}: this is the loader of a run, which has an epoch: set_epoch() moves it."
                )
            bound: Batches = getattr(self.run_loader(), method)(**arguments)
            return bound
        self._refuse_in_larger_world()
        epoch = check_integer("epoch", epoch, 0)
        # What is wrong with the arguments is said now.
        checked: Batches = getattr(RankLoader(self._feed, self._delivery, self._options), method)(**arguments)

        def whole_epoch() -> Iterator[Any]:
            process.check_place(self._pid, None)
            helpers = self._take_idle()
            loader = RankLoader(self._feed, self._delivery, self._options, helpers=helpers, leaves_nothing=True)
            loader.set_epoch(epoch)
            self._passes.add(loader)
            try:
                with contextlib.closing(iter(getattr(loader, method)(**arguments))) as batches:
                    for batch in batches:
                        if loader.epoch != epoch:  # it moves on with the last batch
                            what = f"a handle of {self._feed.source.uri!r}, which has no position,"
                            self._whole_passes.add(epoch, self._delivery, what, _MOVES)
                        yield batch
            finally:
                if loader in self._passes:  # else close() ended it
                    self._passes.remove(loader)
                    if self._idle is not None:  # another pass ended meanwhile
                        self._idle.close()
                    self._idle = loader.helpers

        return Batches(whole_epoch, checked.__len__, f"{method}() of {self!r}, epoch {epoch}", None)

    def _take_idle(self) -> Session | None:
        helpers, self._idle = self._idle, None
        return helpers

    def _refuse_in_larger_world(self) -> None:
        """In a worker of Ray Train, rank 0 of 1 would give all rows to every rank."""
        _, world_size = process.train_place() or (0, 1)
        if world_size > 1:
            raise ConfigError(
                f"this handle is used in one of {world_size} workers of Ray Train, each of which would get all of its "
                f"{len(self):,} rows. Pass it as datasets={{'train': …}} to the trainer and take this rank's loader by "
                "ray.train.get_dataset_shard('train'); where every rank shall see all rows, leave its name out of "
                "datasets_to_split, or call handle.loader(rank=0, world_size=1)."
            )

    def share(self) -> None:
        """Puts what is large (selection, weights, …) into the object store, so that all ranks read one copy of it."""
        map_shared(self._feed, self._delivery, Shared.of_run)

    def close(self) -> None:
        """Ends passes, its own and those of the loaders that `loader` made, and their helpers, so that their CPUs are
        free for others; another pass starts new ones, and loaders keep their position.
        """
        made = [loader for ref in list(self._loaders) if (loader := ref()) is not None]
        for loader in (*self._passes, *made):
            loader.close()
        if self._idle is not None:
            self._idle.close()
        self._passes, self._idle = set(), None
        if self._run is not None:
            self._run[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_idle": None, "_passes": set(), "_loaders": [], "_lookup": None, "_run": None}
        return self.__dict__ | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pid = os.getpid()

    def __iter__(self) -> NoReturn:
        raise ConfigError(
            "a handle is not iterated itself, because it does not know the batch size: iterate over "
            "handle.iter_torch_batches(batch_size=…) or iter_batches(…)."
        )

    def __getitems__(self, indices: Any) -> NoReturn:
        # torch's DataLoader asks for this before it takes rows one by one, in its own order and without any rank.
        raise ConfigError(
            "a handle under torch's DataLoader would give every rank all rows, in another order than the plan's. Use "
            "raylance.torch_data.MapDataset(handle) with its RowSampler, or IterableDataset(handle)."
        )


def _to_numpy(table: pa.Table) -> NumpyBatch:
    """As `iter_batches` gives it, but lists are one array wherever those of this table are all of one length."""
    return to_numpy(table, Lists(lengths=list_lengths(table)))


_MOVES = (
    "Give the batches of a loader, which moves from epoch to epoch: loader = handle.loader(), then "
    "loader.batches(global_batch_size=…) in place of the handle's; or say which epoch: iter_torch_batches(epoch=…)."
)
