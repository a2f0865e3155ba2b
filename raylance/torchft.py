"""The batches of a run under torchft, in which replicas join and leave: each replica's rows, and which steps count."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp

from raylance.api.following import Follower
from raylance.api.loader import RankLoader, consumer_of
from raylance.arguments import check_integer
from raylance.batches.device import torch_device
from raylance.environment import process
from raylance.errors import ConfigError, CoverageError
from raylance.planning.digest import Digest
from raylance.planning.step_size import OLDER, Budget, Size, read_size, require_size

__all__ = ["batches", "report_if_all"]

_HALF = 32  # bits of a hash that are sent as one number, so that sums over replicas fit 64 bits


class Manager(Protocol):
    """The methods of `torchft.Manager` that this module calls."""

    def start_quorum(self) -> None: ...
    def current_step(self) -> int: ...
    def participating_rank(self) -> int | None: ...
    def num_participants(self) -> int: ...
    def is_participating(self) -> bool: ...
    def batches_committed(self) -> int: ...
    def load_state_dict(self, state_dict: dict[str, int]) -> None: ...
    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None: ...
    def errored(self) -> Any: ...
    def should_commit(self) -> bool: ...
    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any = ...) -> Any: ...


def batches(
    loader: RankLoader,
    manager: Manager,
    *,
    global_batch_size: int | None = None,
    budget: Budget | None = None,
    epochs: int = 1,
    rank_in_replica: int = 0,
    ranks_in_replica: int = 1,
    **arguments: Any,
) -> Iterator[Any]:
    """Hands out the batches of a training in which replicas may join and leave. The rows of each step are divided
    among the replicas that take part in it.

    A step is handed out again until it is committed. So each row of an epoch is in one committed step, even if replicas
    die, and the global batch of each step has the same rows as in an undisturbed run. The manager's step number says
    which step comes next, to which the loader goes. If only the loader was restored, and the manager is at step 0, the
    manager is set to the loader's step.

    Iterate with `for`. The body does one step, and must end with `optimizer.step()` of torchft or with
    `manager.should_commit()`. The quorum is requested before the batch is made; `zero_grad()` of torchft's optimizer
    does not request another one in the body.

    A replica that is healing, or is a spare, gets one batch again and again, because it must take part in the reduction
    of the gradients. That batch does not count: torchft adds zeros in place of the replica's gradients.

    Each step costs one reduction more than that of the gradients. It adds up counts and a hash of the rows over all
    replicas, and each of them records the sums. So the record of one replica proves the rows of the step, even if
    others died before they wrote theirs. The first step costs another reduction, which shows whose rows count.

    Args:
        loader: The loader of this rank.
        manager: A `torchft.Manager`, 0.2 or later.
        global_batch_size: Number of rows of a step over all replicas, however many take part.
        budget: Cost of one step over all replicas, in place of `global_batch_size`.
        epochs: Number of epochs, counted from the beginning of the run, after which the iteration ends.
        rank_in_replica: The number of this rank in its replica, from 0, if the ranks of a replica get different rows,
            as with FSDP inside the replica.
        ranks_in_replica: The number of ranks of a replica. Leave out this argument and `rank_in_replica` if the ranks
            of a replica get the same rows.
        **arguments: Other arguments of `RankLoader.iter_torch_batches`.

    Yields:
        Batches of `RankLoader.iter_torch_batches`.

    Raises:
        ConfigError: If an argument cannot be honoured, or if every rank sees the whole dataset.
        StateError: If other replicas train on other data.
        CoverageError: If the replicas together do not have all rows of a step. This is checked only if
            `ranks_in_replica` is 1.
    """
    if "drop_last" in arguments:
        raise ConfigError("drop_last= is that of all replicas: set remainder= of the dataset in its place.")
    epochs = check_integer("epochs", epochs, 0)
    ranks = check_integer("ranks_in_replica", ranks_in_replica, 1)
    rank = check_integer("rank_in_replica", rank_in_replica, 0)
    if rank >= ranks:
        raise ConfigError(f"rank {rank} of {ranks} ranks in a replica: it must be less than their number.")
    device = arguments.get("device", "auto")
    target = process.default_device() if device == "auto" else torch_device(device)
    sizes: dict[str, Any] = {"global_batch_size": global_batch_size, "budget": budget}
    older = {name: arguments[name] for name in OLDER if name in arguments}
    size = require_size(read_size("torchft.batches()", loader.dp_size, **sizes, others=older)).size
    made = loader.batches(**sizes, **arguments)
    if not manager.current_step() and loader.global_step:
        manager.load_state_dict({"step": loader.global_step, "batches_committed": manager.batches_committed()})
    steps = _Steps(loader, manager, made, size, (rank, ranks), target)
    while manager.current_step() < steps.end_of(epochs):
        manager.start_quorum()
        if not steps.begin():
            manager.should_commit()
            continue
        with _one_quorum(manager):
            yield steps.take_batch()
        steps.settle()  # if the loop was left, the position settles when it is asked for, see `Cursor.settle`


def report_if_all(metrics: Mapping[str, Any], loader: Any, manager: Manager, **options: Any) -> bool:
    """Calls `raylance.report` if all ranks of the run took part in the last step; returns whether it reported.

    Ray Train waits in a report until every rank has made the report. If a rank is being replaced, the others would wait
    for it while it waits for them to train. So a step in which a rank is missing is not reported. With spares, no step
    has all ranks, so nothing is ever reported.

    Args:
        metrics: See `raylance.report`.
        loader: See `raylance.report`.
        manager: The manager that was passed to `raylance.torchft.batches`.
        **options: Other arguments of `raylance.report`.

    Raises:
        ConfigError, RaylanceError: See `raylance.report`.
    """
    from raylance.integrations.checkpoints import report  # loads Ray

    _, ranks = process.train_rank() or (0, 1)
    if manager.num_participants() < ranks:
        return False
    report(metrics, loader, **options)
    return True


class _Peers:
    """Saves and loads position and digests of one loader, which a manager sends to other replicas with the model."""

    def __init__(self) -> None:
        self.follower: Follower | None = None
        self.received: str | None = None

    def save(self) -> str:
        return self.follower.known() if self.follower else ""

    def load(self, known: str) -> None:
        self.received = known or None


_known: "weakref.WeakKeyDictionary[Any, dict[str, _Peers]]" = weakref.WeakKeyDictionary()


def _peers_of(manager: Manager, loader: RankLoader, follower: Follower) -> _Peers:
    """Makes the manager send a loader's position with the model. Registers once for each manager and dataset."""
    name = f"raylance:{consumer_of(loader).recorder.stem}"
    of_manager = _known.setdefault(manager, {})
    if name not in of_manager:
        peers = of_manager[name] = _Peers()
        manager.register_state_dict_fn(name, peers.load, peers.save)
    of_manager[name].follower = follower
    return of_manager[name]


@contextlib.contextmanager
def _one_quorum(manager: Any) -> Iterator[None]:
    """Makes `start_quorum` do nothing: the step already has its quorum, and another quorum might have other members."""
    manager.start_quorum = nothing = lambda *_, **__: None
    try:
        yield
    finally:
        if vars(manager).get("start_quorum") is nothing:  # else this is the late end of batches that were left
            del manager.start_quorum


class _Steps:
    """The steps of one rank. A step begins when its quorum is known, and is settled when its commit is decided."""

    def __init__(
        self,
        loader: RankLoader,
        manager: Manager,
        made: Iterator[Any],
        size: Size,
        own: tuple[int, int],
        device: torch.device,
    ) -> None:
        """Takes `made`, the loader's batches, and `own`: this rank's number in its replica, and the number of ranks."""
        self._follower = Follower(loader, size, self.settle)
        self._manager, self._made, self._own, self._device = manager, made, own, device
        self._peers = _peers_of(manager, loader, self._follower)
        self._open: tuple[int, Digest] | None = None  # number of the present step, and digest for `count`
        self._stand_in: Any = None  # the batch for a rank without rows
        self._batch: Any = None

    def end_of(self, epochs: int) -> int:
        """See `Follower.end_of`."""
        return self._follower.end_of(epochs)

    def begin(self) -> bool:
        """Takes this rank's batch of the manager's step, and adds up the rows of all replicas that take part. Returns
        False if the manager has an error: do not train on the batch then, because the step cannot be committed. Raises
        CoverageError if rows of the step are missing.
        """
        self._open = None  # if only other ranks committed the step, this rank learns it when it is healed
        self._join()
        place, count = self._places()
        if self._manager.errored():
            return False
        number, rows = self._manager.current_step(), Digest()
        due = self._follower.step_rows(number)
        if place is not None:
            self._batch, rows = self._hand_out(number, place, count)
            self._stand_in = None
        else:
            if self._stand_in is None:  # in the share that this rank may get next, so that its batches are prepared
                has_room = (count + 1) * self._own[1] <= due
                self._stand_in, _ = self._hand_out(number, *((count, count + 1) if has_room else (0, count)))
            self._batch = self._stand_in
        numbers = self._sum([rows.rows, rows.padding, rows.hash >> _HALF, rows.hash % (1 << _HALF)])
        if self._manager.errored():
            return False
        hashed = ((numbers[2] << _HALF) + numbers[3]) % (1 << 2 * _HALF)
        self._open = number, Digest(rows=numbers[0], padding=numbers[1], hash=hashed)
        if self._own[1] == 1 and numbers[0] + numbers[1] != due:
            raise CoverageError(
                f"step {number} has {numbers[0] + numbers[1]} rows on all replicas together, and {due} are due: "
                "they do not agree on who takes part. Training stops here, because rows would be lost or come twice. "
                "This is a defect of raylance or of torchft: please report it."
            )
        return True

    def take_batch(self) -> Any:
        """Returns the batch that is ready, and keeps no reference, so that only the consumer holds it."""
        batch, self._batch = self._batch, None
        return batch

    def settle(self) -> None:
        """Counts the step if it was committed; a step that was not committed is handed out again."""
        self._join()
        if self._open is not None and self._manager.current_step() > self._open[0]:
            (number, rows), self._open = self._open, None
            self._follower.count(number, rows, self._own)

    def _hand_out(self, number: int, place: int, count: int) -> tuple[Any, Digest]:
        rank, ranks = self._own
        return self._follower.hand_out(self._made, number, (place * ranks + rank, count * ranks))

    def _places(self) -> tuple[int | None, int]:
        """Returns this replica's place, None if its own rows do not count, among those whose rows count; and their
        number.
        """
        manager = self._manager
        count = manager.num_participants()
        place = manager.participating_rank() if manager.is_participating() else None
        if manager.current_step():
            return place, count
        # Before the first step, a manager may make all replicas but one take over the weights of that replica. Those
        # replicas count as participants, but add zeros to all sums. So only a sum over all replicas shows which do so.
        numbers = self._sum([int(place == each) for each in range(count)])
        present = [each for each, is_there in enumerate(numbers) if is_there]
        return (present.index(place) if place in present else None), len(present)

    def _sum(self, numbers: list[int]) -> list[int]:
        """Returns the sums of numbers over all replicas; a replica without rows adds zeros."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
        return [int(number) for number in tensor.tolist()]

    def _join(self) -> None:
        """If this replica was healed from another one, goes to the position of that replica."""
        received, self._peers.received = self._peers.received, None
        if received is not None:
            self._follower.join(received)
