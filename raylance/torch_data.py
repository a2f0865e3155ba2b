"""raylance under `torch.utils.data.DataLoader`, for training without Ray.

`MapDataset` with its `RowSampler`, or `IterableDataset`, gives the batches of `raylance.RankLoader`. `Loader` is a
DataLoader for either, and counts the batches that it hands out, because prefetched batches are not consumed. With a
plain DataLoader, the caller must call `set_epoch()` before each epoch, and `consumed()` for each batch. torchdata's
StatefulDataLoader keeps the position of each worker in its own state, so the caller only needs `set_epoch()`.
"""

import logging
from collections.abc import Generator, Iterator
from typing import Any

import torch.utils.data

from raylance.arguments import check_flag
from raylance.environment.process import find_place, is_called_by
from raylance.errors import ConfigError, RaylanceError
from raylance.integrations.torch_data.handed_out import Counting
from raylance.integrations.torch_data.iterable import IterableDataset
from raylance.integrations.torch_data.map_style import (
    RAYS_WRAPPER,
    WITHOUT_RAYS_WRAPPER,
    MapDataset,
    PlacedSampler,
    RowSampler,
)
from raylance.integrations.torch_data.sending import Function
from raylance.integrations.torch_data.steps import RankSteps

logger = logging.getLogger(__name__)

__all__ = ["IterableDataset", "Loader", "MapDataset", "RowSampler", "find_place"]


class Loader(torch.utils.data.DataLoader[Any]):
    """A DataLoader that keeps an epoch and a position: it counts the batches that it hands out, not those that its
    workers have prefetched. It stores both in its `RowSampler` or `IterableDataset`, which is the attribute `steps`.

    It gives a rank's own rows, so it has the marks by which Accelerate, Lightning and Fabric leave it as it is.
    """

    _is_accelerate_prepared = True  # else Accelerate would divide the rank's batches among all ranks again
    use_stateful_dataloader = True  # Accelerate then keeps its state

    def __init__(
        self,
        dataset: Any,
        batch_sampler: RowSampler | None = None,
        *,
        whole: bool = False,
        record: bool | str = False,
        name: str | None = None,
        **options: Any,
    ) -> None:
        """Workers are spawned, not forked. Unless `persistent_workers=True`, they start again for each epoch, which
        takes seconds.

        Args:
            dataset: An `IterableDataset`, or a `MapDataset`.
            batch_sampler: The sampler of a `MapDataset`.
            whole: Whether each iteration begins at the start of an epoch, also if the iteration before was left early,
                as for validation.
            record: The folder of a run in which to record the rows that this rank is handed, for
                `raylance.prove_run`. True for the folder of the Ray Train run in whose worker the loader is iterated.
                The rows that a worker read for a batch come with it, and count when the batch is handed out. Each state
                that is taken is noted, so that a run that continues there is proven, too. The rows of a batch from
                which a subclass of `MapDataset` left rows out do not count. A plain DataLoader and StatefulDataLoader
                record nothing.
            name: Name of the dataset in the record, see `raylance.Options`.
            **options: Options of DataLoader.

        Raises:
            ConfigError: If the dataset and the sampler do not belong together, or an argument cannot be honoured.
        """
        steps = dataset if batch_sampler is None else batch_sampler
        if not isinstance(steps, RankSteps) or isinstance(steps, RowSampler) != isinstance(dataset, MapDataset):
            raise ConfigError("Loader keeps a state: pass it an IterableDataset, or a MapDataset and its RowSampler.")
        batching: dict[str, Any] = {"batch_size": None} if steps is dataset else {"batch_sampler": steps}
        spawned = {"multiprocessing_context": "spawn"} if options.get("num_workers") else {}
        for option in ("collate_fn", "worker_init_fn"):
            if callable(options.get(option)):
                options[option] = Function(f"{option}=", options[option])
        super().__init__(dataset, in_order=True, **batching, **(spawned | options))
        if isinstance(steps, RowSampler):
            vars(self)["sampler"] = PlacedSampler(steps)  # DataLoader refuses to set it as an attribute
        self._passes, self._whole = 0, check_flag("whole", whole)
        self._record = steps.make_record(
            record, name, num_workers=self.num_workers, persistent_workers=self.persistent_workers
        )
        if self._record is not None:
            dataset.note.is_wanted = True
            self.collate_fn = Counting(dataset.note, self.collate_fn, takes_rows=steps is not dataset)
        self.steps, self.set_epoch = steps, steps.set_epoch
        self.state_dict, self.load_state_dict = steps.state_dict, steps.load_state_dict

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Hands out the rest of the epoch, then moves to the next one.

        Raises:
            ConfigError: Under Ray's `prepare_data_loader`, which takes a batch before it hands out the one before.
        """
        return self._hand_out() if self._record is None else self._record.timed(self._hand_out())

    def _hand_out(self) -> Generator[Any, None, None]:
        if is_called_by(RAYS_WRAPPER):
            raise ConfigError(
                "Ray's prepare_data_loader takes each batch a step early, so a state would count a batch that was not "
                f"trained on, and a resume would lose it. {WITHOUT_RAYS_WRAPPER}"
            )
        if self._whole and self.steps.position:
            self.steps.begin_again()
        plan, _ = self.steps.begin()
        self.steps.begin_record(plan)
        holder = self.steps.hold()
        epoch = self.steps.epoch
        self._passes += 1
        if self._passes == 2 and self.num_workers and not self.persistent_workers:
            logger.warning(
                "a Loader with num_workers=%d starts its workers again for each epoch, because persistent_workers= is "
                "not set. Each start imports torch and opens the dataset, which may take longer than a short epoch. "
                "Write Loader(…, num_workers=%d, persistent_workers=True).",
                self.num_workers,
                self.num_workers,
            )
        for batch in super().__iter__():
            low = self.steps.position
            self.steps.consumed()
            is_last = self.steps.position == 0
            if self._record is not None:
                batch = self._record.hand_out(batch, epoch, low, plan.after(epoch, low), is_last=is_last)
            yield batch
            if is_last:
                return
            if not self.steps.is_held_by(holder):
                raise RaylanceError(
                    "the loader was iterated again or moved meanwhile: two iterations cannot share a position. Use one."
                )
        self.steps.set_epoch(epoch + 1)  # no step was left

    def close(self) -> None:
        """Ends the record, if there is one; another iteration begins a new one. Without this call, the record ends with
        the loader or the process.
        """
        if self._record is not None:
            self._record.end()
