"""Loaders that follow torchft's count of committed steps: replicas in threads, with a lighthouse, managers and
reductions by gloo that are real; that processes are killed is tested in tests/faults.
"""

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raylance
import raylance.torchft
from raylance.api.following import Follower
from raylance.api.loader import consumer_of
from raylance.errors import ConfigError
from raylance.planning.digest import Digest
from tests.faults.replicas import (
    BATCH,
    STEPS,
    TIMEOUTS,
    DiedError,
    Setting,
    check,
    committed,
    events_of,
    train,
    write_data,
)

pytestmark = pytest.mark.promise("P1", "P3", "P6")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def lighthouse() -> Any:
    from torchft.coordination import LighthouseServer

    return LighthouseServer(bind="[::]:0", min_replicas=1, **TIMEOUTS)


def train_all(setting: Setting, folder: Path, lighthouse: Any, dies_at: dict[int, int] | None = None) -> None:
    """Trains replicas in threads; each that dies is replaced once."""

    def train_one(number: int, rank: int, store: Any) -> None:
        place = {"store_addr": "localhost", "store_port": store.port, "lighthouse_addr": lighthouse.address()}
        try:
            train(setting, number, folder, rank=rank, dies_at=(dies_at or {}).get(number), **place)
        except DiedError:
            new = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            train(setting, number, folder, rank=rank, **place | {"store_port": new.port})

    stores = [
        torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for _ in range(setting.replicas)
    ]
    with concurrent.futures.ThreadPoolExecutor(setting.replicas * setting.ranks) as pool:
        ranks = [(number, rank) for number in range(setting.replicas) for rank in range(setting.ranks)]
        for each in [pool.submit(train_one, number, rank, stores[number]) for number, rank in ranks]:
            each.result()


@pytest.mark.parametrize("is_async", [True, False])
def test_a_replica_that_dies_is_replaced_and_no_row_is_lost_or_comes_twice(
    uri: str, lighthouse: Any, tmp_path: Path, is_async: bool
) -> None:
    setting = Setting(uri=uri, replicas=3, is_async=is_async, epochs=2, step_s=0.02, reduce_s=2.0)
    train_all(setting, tmp_path, lighthouse, dies_at={1: 20})
    check(tmp_path, setting)
    healed = {event["file"] for event in events_of(tmp_path, "healed")}
    assert any(file.startswith("rank-1") for file in healed)


@pytest.mark.parametrize("samples", [{}, {"windows": True}, {"by_cost": True}], ids=str)
def test_ranks_of_a_replica_have_rows_of_their_own(
    uri: str, lighthouse: Any, tmp_path: Path, samples: dict[str, bool]
) -> None:
    """As under FSDP inside of a replica: two replicas of two ranks deal the global batch out to four; also a batch of
    samples of several rows, and steps of a cost.
    """
    setting = Setting(uri=uri, replicas=2, least=2, ranks=2, epochs=1, step_s=0.0, **samples)  # type: ignore[arg-type]
    train_all(setting, tmp_path, lighthouse)
    assert len(committed(tmp_path)) == STEPS or samples == {"by_cost": True}
    check(tmp_path, setting)
    assert {event["share"][1] for event in events_of(tmp_path, "handed")} >= {4}


@pytest.fixture
def loaders(uri: str) -> Iterator[list[raylance.RankLoader]]:
    data = raylance.dataset(uri, order="window", seed=3)
    made = [data.loader(rank=rank, world_size=2, runtime="threads", num_decoders=0) for rank in range(2)]
    yield made
    for loader in made:
        loader.close()


def test_what_a_replica_takes_over_is_checked(loaders: list[raylance.RankLoader], uri: str) -> None:
    first, second = loaders
    other = raylance.dataset(uri, order="window", seed=4).loader()
    called: list[int] = []
    follower, joining = Follower(first, BATCH, lambda: called.append(0)), Follower(second, BATCH, lambda: None)
    follower.count(6, Digest(rows=BATCH, hash=5), (0, 1))
    joining.join(follower.known())
    assert called, "what was committed is counted before a state is taken"
    assert second.state_dict() == first.state_dict()
    assert second.state_dict()["position"] == 7 * BATCH
    assert consumer_of(second).ledger.intervals == consumer_of(first).ledger.intervals
    with pytest.raises(raylance.StateError, match="seed"):
        Follower(other, BATCH, lambda: None).join(follower.known())
    with pytest.raises(raylance.StateError, match="sent no state of this version of raylance"):
        joining.join('{"ledger": 3}')


class Alone:
    """A manager of one replica, whose steps are all committed."""

    def __init__(self) -> None:
        self.step = 0

    def start_quorum(self) -> None: ...
    def current_step(self) -> int:
        return self.step

    def participating_rank(self) -> int:
        return 0

    def num_participants(self) -> int:
        return 1

    def is_participating(self) -> bool:
        return True

    def batches_committed(self) -> int:
        return self.step

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]

    def register_state_dict_fn(self, *_: Any) -> None: ...
    def errored(self) -> None: ...
    def allreduce(self, *_: Any, **__: Any) -> "concurrent.futures.Future[None]":
        done = concurrent.futures.Future[None]()
        done.set_result(None)
        done.wait = done.result  # type: ignore[attr-defined]
        return done

    def should_commit(self) -> bool:
        self.step += 1
        return True


def test_the_late_end_of_batches_that_were_left_moves_nothing(loaders: list[raylance.RankLoader]) -> None:
    """An exception that is kept keeps a loop's batches; the garbage collector ends them whenever it likes."""
    loader, manager = loaders[0], Alone()
    left = raylance.torchft.batches(loader, manager, global_batch_size=BATCH)
    for _ in range(2):
        next(left)
        manager.should_commit()
    assert loader.global_step == 2, "what was committed counts as soon as the position is asked for"
    following = raylance.torchft.batches(loader, manager, global_batch_size=BATCH)
    for _ in range(3):
        next(following)
        manager.should_commit()
    assert loader.global_step == 5
    del left
    assert (loader.global_step, loader.state_dict()["position"]) == (5, 5 * BATCH)
    next(following)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drop_last": True}, "drop_last= is that of all replicas"),
        ({"rank_in_replica": 2, "ranks_in_replica": 2}, "it must be less than their number"),
        ({"epochs": -1}, "epochs"),
        ({"batch_size": 3}, "exactly one"),
    ],
)
def test_arguments_that_cannot_be_honoured(
    loaders: list[raylance.RankLoader], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        next(raylance.torchft.batches(loaders[0], None, global_batch_size=BATCH, **arguments))  # type: ignore[arg-type]
