"""The objects that `iter_torch_batches` and `iter_batches` return."""

import abc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from raylance.errors import ConfigError

if TYPE_CHECKING:
    from raylance.api.loader import RankLoader


class NoAttributeError(ConfigError, AttributeError):
    """Raised if an object is asked for what it leaves out on purpose: a handle for a position, batches for a sampler.
    `hasattr` takes it for False.
    """


class Batches(abc.ABC):
    """The batches that a call such as `iter_torch_batches` returns. They can be iterated repeatedly.

    Each `for` makes one pass. A pass of a loader goes from its position to the end of the epoch; a pass of a handle is
    one whole epoch, the same each time. `len()` is the number of steps of a whole epoch. All calls of `next()` share
    one pass; when it has ended, the call after `StopIteration` begins another pass.

    `state_dict`, `load_state_dict`, `set_epoch` and `epoch` do the same as on the loader, so that a framework can use
    this object as a stateful DataLoader. A handle has no position, so its batches raise `ConfigError` for these four.
    """

    def __init__(self, description: str) -> None:
        self._description = description
        self._current: Iterator[Any] | None = None

    @abc.abstractmethod
    def _begin(self) -> Iterator[Any]:
        """Begins a pass."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of steps of a whole epoch, the same on every rank. The first pass after a resume may have fewer."""

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass, which reads the position when its first batch is requested."""
        return self._begin()

    def __next__(self) -> Any:
        """Takes the next batch of a pass that only `next()` uses.

        Raises:
            StopIteration: At the end of the epoch; the call after that begins the next pass.
        """
        self._current = self._begin() if self._current is None else self._current
        try:
            return next(self._current)
        except BaseException:  # an error ends the pass, so that the next call does not raise StopIteration
            self._current = None
            raise

    def prepare(self) -> None:  # noqa: B027
        """Begins to make the first batches of the next pass, and returns at once; see `RankLoader.prepare`. For batches
        of a handle, it does nothing.
        """

    def __repr__(self) -> str:
        return f"{self._description}: {len(self):,} steps an epoch, one epoch each time that it is iterated"

    def __getitem__(self, index: Any) -> NoReturn:
        raise ConfigError(
            "batches come in the order of the plan and have no index. Iterate over them; for torch's DataLoader, use "
            "raylance.torch_data.MapDataset or IterableDataset."
        )

    def __getstate__(self) -> NoReturn:
        raise ConfigError(
            "batches belong to the process that iterates over them: their helpers would hang in another. Send the "
            "handle, and make a loader there; for torch's DataLoader with num_workers, use raylance.torch_data."
        )

    @property
    def sampler(self) -> NoReturn:
        """Batches have no sampler; frameworks that look for one find none.

        Raises:
            AttributeError: Always, also as a ConfigError.
        """
        raise NoAttributeError(
            "batches have no sampler that could be replaced, because they are this rank's rows already, on its device. "
            "Leave prepare_data_loader out, and iterate over them."
        )

    @property
    def loader(self) -> "RankLoader":
        """The `RankLoader` of the batches.

        Raises:
            ConfigError: If the batches belong to a handle, which has no position.
        """
        raise ConfigError(
            "these are a handle's batches, which begin at the start of an epoch each time: there is no position to "
            "save or to move. Make a loader: handle.loader().batches(…), or ray.train.get_dataset_shard(name) in "
            "training."
        )

    @property
    def epoch(self) -> int:
        """See `RankLoader.epoch`."""
        return self.loader.epoch

    def set_epoch(self, epoch: int) -> None:
        """See `RankLoader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See `RankLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RankLoader.load_state_dict`."""
        self.loader.load_state_dict(state)
