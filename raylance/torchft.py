"""Owns the batches of replicas that come and go under torchft: which rows are whose in a step, and which steps count;
never trains, never starts or ends a replica, never loads torchft.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp

from raylance.api.following import Follower
from raylance.api.loader import RankLoader, recorder_of
from raylance.arguments import check_integer
from raylance.batches.device import torch_device
from raylance.environment import process
from raylance.errors import ConfigError, CoverageError
from raylance.planning.digest import Digest

__all__ = ["batches", "report_if_all"]

_HALF = 32  # bits of a hash that travel as one number, so that sums over replicas stay in 64


class Manager(Protocol):
    """What is used of `torchft.Manager`."""

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
    global_batch_size: int,
    epochs: int = 1,
    rank_in_replica: int = 0,
    ranks_in_replica: int = 1,
    **arguments: Any,
) -> Iterator[Any]:
    """Hands out the batches of a training whose replicas come and go, each step's rows to those that take part in it.

    A step is handed out again until it was committed, so that each row of an epoch is in one committed step, although
    replicas die. The global batch of each step is the same rows as in an undisturbed run. The position is the manager's
    step: one that was set by its `load_state_dict` is followed, and a new manager takes that of a loader that was
    restored.

    The body of the loop does one step, and ends with `optimizer.step()` of torchft, or `manager.should_commit()`. The
    quorum is asked for before a batch is made; `zero_grad()` of torchft's optimizer asks for none in the body.

    A replica that heals, or is a spare, has no rows, but has to take part in the reduction of gradients, to which
    torchft lets it add zeros. It gets one batch again and again, of rows that count for nobody.

    Each step costs one reduction of four numbers, by which every replica knows the rows of all: that is what its record
    proves, though others died before they wrote theirs.

    Args:
        loader: Of this rank. The epochs that it has left are trained on.
        manager: A `torchft.Manager`, 0.2 or later.
        global_batch_size: Rows of a step over all replicas, however many take part.
        epochs: Where to end: after this number of epochs, counted from the beginning of the run.
        rank_in_replica: Where the ranks of a replica get rows of their own, as with FSDP inside it: this one's number.
        ranks_in_replica: And how many they are. Where they get the same rows, leave both out.
        **arguments: Others of `RankLoader.iter_torch_batches`.

    Yields:
        Batches, as `RankLoader.iter_torch_batches` makes them.

    Raises:
        ConfigError: For an argument that cannot be honoured; for a dataset that every rank sees whole.
        StateError: If other replicas train on other data.
        CoverageError: If the replicas together do not have all rows of a step.
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
    made = loader.batches(global_batch_size=global_batch_size, **arguments)
    if not manager.current_step() and loader.global_step:
        manager.load_state_dict({"step": loader.global_step, "batches_committed": manager.batches_committed()})
    steps = _Steps(loader, manager, made, global_batch_size, (rank, ranks), target)
    while manager.current_step() < steps.end_of(epochs):
        manager.start_quorum()
        if not steps.begin():
            manager.should_commit()
            continue
        try:
            with _one_quorum(manager):
                yield steps.take_batch()
        finally:
            steps.settle()


def report_if_all(metrics: Mapping[str, Any], loader: Any, manager: Manager, **options: Any) -> bool:
    """Reports as `raylance.report` does, if all ranks of the run took part in the last step; returns whether it did.

    Ray Train waits in a report until each rank has made it. While one is being replaced, that would wait for a rank
    which itself waits for the others to train: so no rank reports such a step, and a later one is reported. With
    spares, no step has all ranks, and nothing is reported.

    Args:
        metrics: As `raylance.report` takes them.
        loader: As `raylance.report` takes it.
        manager: That of `batches`.
        **options: Others of `raylance.report`.

    Raises:
        ConfigError, RaylanceError: As `raylance.report`.
    """
    from raylance.integrations.checkpoints import report  # loads Ray

    _, ranks = process.train_rank() or (0, 1)
    if manager.num_participants() < ranks:
        return False
    report(metrics, loader, **options)
    return True


class _Peers:
    """Position and digests of one loader, which a manager hands from replica to replica beside the model."""

    def __init__(self) -> None:
        self.follower: Follower | None = None
        self.received: str | None = None

    def save(self) -> str:
        return self.follower.known() if self.follower else ""

    def load(self, known: str) -> None:
        self.received = known or None


_known: "weakref.WeakKeyDictionary[Any, dict[str, _Peers]]" = weakref.WeakKeyDictionary()


def _peers_of(manager: Manager, loader: RankLoader, follower: Follower) -> _Peers:
    """Has the manager hand a loader's position over with the model, once for each manager and dataset."""
    name = f"raylance:{recorder_of(loader).stem}"
    of_manager = _known.setdefault(manager, {})
    if name not in of_manager:
        peers = of_manager[name] = _Peers()
        manager.register_state_dict_fn(name, peers.load, peers.save)
    of_manager[name].follower = follower
    return of_manager[name]


@contextlib.contextmanager
def _one_quorum(manager: Any) -> Iterator[None]:
    """Has calls of `start_quorum` do nothing: the step has its quorum, and a second one might have other members."""
    manager.start_quorum = lambda *_, **__: None
    try:
        yield
    finally:
        del manager.start_quorum


class _Steps:
    """The steps of one rank: begun when the quorum is known, settled when it is known whether they count."""

    def __init__(
        self,
        loader: RankLoader,
        manager: Manager,
        made: Iterator[Any],
        global_batch_size: int,
        own: tuple[int, int],
        device: torch.device,
    ) -> None:
        """`own` is this rank among those of its replica."""
        self._follower = Follower(loader, global_batch_size, self.settle)
        self._manager, self._made, self._own, self._device = manager, made, own, device
        self._peers = _peers_of(manager, loader, self._follower)
        self._open: tuple[int, Digest] | None = None  # number and rows of the step that is handed out
        self._stand_in: Any = None  # what a rank is handed that has no rows
        self._batch: Any = None

    def end_of(self, epochs: int) -> int:
        """The number of the first step that is not trained on any more."""
        return self._follower.end_of(epochs)

    def begin(self) -> bool:
        """Takes the batch of the manager's step, in the shares of those that take part; returns whether it is ready on
        all of them. If not, the step cannot be committed, and torchft's DistributedDataParallel would raise.

        Raises:
            CoverageError: If rows of the step are missing.
        """
        self._open = None  # if others committed a step that this rank did not, it learns of it as it is healed
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
            if self._stand_in is None:  # the rows that it may have with the next step: they are being prepared
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
        """The batch that is ready, which only its consumer holds from then on."""
        batch, self._batch = self._batch, None
        return batch

    def settle(self) -> None:
        """Counts the step, once it was committed; one that was not is handed out again."""
        self._join()
        if self._open is not None and self._manager.current_step() > self._open[0]:
            (number, rows), self._open = self._open, None
            self._follower.count(number, rows, self._own)

    def _hand_out(self, number: int, place: int, count: int) -> tuple[Any, Digest]:
        rank, ranks = self._own
        return self._follower.hand_out(self._made, number, (place * ranks + rank, count * ranks))

    def _places(self) -> tuple[int | None, int]:
        """This replica's place among those whose rows count in this step, None for one without; and their number."""
        manager = self._manager
        count = manager.num_participants()
        place = manager.participating_rank() if manager.is_participating() else None
        if manager.current_step():
            return place, count
        # Before the first step, a manager may have all replicas but one take over the weights of that one. Those count
        # as participants, and add zeros: only all replicas together know who they are.
        numbers = self._sum([int(place == each) for each in range(count)])
        present = [each for each, is_there in enumerate(numbers) if is_there]
        return (present.index(place) if place in present else None), len(present)

    def _sum(self, numbers: list[int]) -> list[int]:
        """Adds numbers up over all replicas; those of one that has no rows are taken as zeros."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
        return [int(number) for number in tensor.tolist()]

    def _join(self) -> None:
        """Goes where the replica stood that this one was healed from."""
        received, self._peers.received = self._peers.received, None
        if received is not None:
            self._follower.join(received)
