"""Owns the DataLoader that counts what it hands out; never makes a batch itself."""

from collections.abc import Iterator
from typing import Any

import torch.utils.data

from raylance.errors import ConfigError, RaylanceError
from raylance.integrations.torch_data.map_style import MapDataset, RowSampler
from raylance.integrations.torch_data.steps import Steps


class Loader(torch.utils.data.DataLoader[Any]):
    """A DataLoader that counts what it hands out; its `steps`, sampler or iterable dataset, have epoch and state."""

    def __init__(self, dataset: Any, batch_sampler: RowSampler | None = None, **options: Any) -> None:
        """Takes an `IterableDataset`, or a `MapDataset` and its sampler; options are DataLoader's, workers spawned."""
        steps = dataset if batch_sampler is None else batch_sampler
        if not isinstance(steps, Steps) or isinstance(steps, RowSampler) != isinstance(dataset, MapDataset):
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
