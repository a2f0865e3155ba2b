"""Peers: loaders of several ranks that get the same rows, by threads; resumes with others; what is refused."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raylance
from raylance import torch_data
from raylance.api.loader import consumer_of
from raylance.errors import ConfigError
from raylance.planning.shard_context import Assignment
from raylance.reports.reading import read_run

BATCH = 10  # of a data-parallel rank


@pytest.fixture(scope="module")
def data(images_uri: str) -> raylance.Dataset:
    decode = raylance.Image("image", size=(16, 16), augment=raylance.RandomResizedCrop(), hflip=0.5)
    return raylance.dataset(images_uri, columns=["image", "id"], decode=decode, seed=3, remainder="ragged")


@pytest.fixture(scope="module")
def budgeted(images_uri: str) -> raylance.Dataset:
    return raylance.dataset(
        images_uri, columns=["id"], cost="id % 7 + 1", order="bucket", balance=raylance.Balance(), remainder="ragged"
    )


def make_loaders(data: raylance.Dataset, replicas: int, peers: int) -> list[raylance.RankLoader]:
    world_size = replicas * peers
    return [
        data.loader(rank=rank, world_size=world_size, ranks_per_replica=peers, runtime="threads", num_decoders=0)
        for rank in range(world_size)
    ]


def take(loader: raylance.RankLoader, steps: int | None = None, **arguments: Any) -> list[dict[str, Any]]:
    return list(itertools.islice(loader.iter_batches(**({"batch_size": BATCH} | arguments)), steps))


def rows_of(batches: list[dict[str, Any]]) -> list[int]:
    return [int(row) for batch in batches for row in batch["id"]]


@pytest.mark.parametrize("size", [{"batch_size": BATCH}, {"budget": raylance.Budget(150), "batch_size": None}], ids=str)
def test_peers_get_the_same_bytes_and_resumes_may_change_both_numbers(
    data: raylance.Dataset, budgeted: raylance.Dataset, size: dict[str, Any]
) -> None:
    """Three starts, 2 × 2, 4 × 1 and 1 × 3 ranks: equal on all peers, and every row once over all of them."""
    data = data if size["batch_size"] else budgeted
    state, delivered = None, list[int]()
    for replicas, peers, steps in ((2, 2, 10), (4, 1, 5), (1, 3, None)):
        loaders = make_loaders(data, replicas, peers)
        states = []
        for rank, loader in enumerate(loaders):
            assert (loader.rank, loader.world_size) == (rank, replicas * peers)
            assert (loader.dp_rank, loader.dp_size) == (rank // peers, replicas)
            if state is not None:
                loader.load_state_dict(state)
            with loader:
                batches = take(loader, steps, **size)
            states.append(loader.state_dict())
            if loader.rank % peers == 0:
                first = batches
                delivered += rows_of(batches)
            assert len(batches) == len(first)
            for batch, peer in zip(batches, first, strict=True):
                assert batch.keys() == peer.keys()
                assert all(np.array_equal(batch[name], peer[name]) for name in batch)
        assert all(one == states[0] for one in states), "steps and state are the same on all ranks"
        state = states[0]
        assert state["dp_size"] == replicas
        assert "world_size" not in state, "a state of four ranks said that there are two"
    live = rows_of(list(data.iter_batches(batch_size=100)))
    assert sorted(delivered) == sorted(live)
    assert state["epoch"] == 1


def test_a_mesh_and_a_group_of_a_process_alone(data: raylance.Dataset) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("r", "s", "tp"))
        for given in (mesh["s"], mesh["r", "s"], mesh.get_group("s")):
            with data.loader(runtime="threads", num_decoders=0) as loader:
                loader.reshard(given)
                assert (loader.dp_rank, loader.dp_size) == (0, 1)
                assert len(take(loader, 2)) == 2
            steps = torch_data.IterableDataset(data, batch_size=BATCH, dist_info=given)
            assert len(steps) == 96
            with pytest.raises(ConfigError, match="divide it again"):
                torch_data.IterableDataset(data, batch_size=BATCH, dist_info=given, ranks_per_replica=2)
        outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
        with pytest.raises(ConfigError, match="is not part of the group"):
            data.loader().reshard(outside)
        with pytest.raises(ConfigError, match="is not part of the group"):
            torch_data.IterableDataset(data, batch_size=BATCH, dist_info=outside)
    finally:
        torch.distributed.destroy_process_group()


def test_records_name_ranks_and_count_the_rows_of_peers_once(data: raylance.Dataset, tmp_path: Path) -> None:
    """Two epochs: in one by 2 × 2 ranks, left in the middle and continued by 1 × 3."""
    folder, state, decode = str(tmp_path / "run"), None, {"num_decoders": 0, "runtime": "threads"}
    for replicas, peers, stop in ((2, 2, 20), (1, 3, None)):
        for rank in range(replicas * peers):
            arranged = {"rank": rank, "world_size": replicas * peers, "ranks_per_replica": peers}
            with data.loader(**arranged, record=folder, **decode) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for _ in range(1 if stop else 2):
                    take(loader, stop, batch_size=None, global_batch_size=20)
                with consumer_of(loader).reporting({}):
                    pass
                saved = loader.state_dict()
        state = saved
    run = read_run(folder)
    wanted = {(rank, 2) for rank in range(4)} | {(rank, 3) for rank in range(3)}
    assert {(one.rank, one.peers) for one in run.records} == wanted
    ranks = run.ranks(run.main)
    assert sum(rank.figures["rows"] / rank.peers for rank in ranks) == pytest.approx(2 * 953)
    (proof,) = raylance.prove_run(folder).datasets
    assert [(one.status, one.epochs, one.rows) for one in proof.epochs] == [("proven", 2, 953)]
    page = Path(raylance.report_run(folder, out=tmp_path / "page.html")).read_text()
    assert "3 and 4 ranks" in page
    assert "953 rows were handed out: every selected row exactly once" in page


def test_what_cannot_be_resharded_is_refused(data: raylance.Dataset) -> None:
    loader = data.loader(rank=1, world_size=4)
    for given, message in (
        ((1, 3), "data-parallel rank 1 of 3 for rank 1 of 4"),
        ((2, 2), "data-parallel rank 2 of 2 for rank 1 of 4"),
        ((-1, 2), "data-parallel rank=-1"),
        ((1.5, 2), "data-parallel rank=1.5"),
        ((1,), "1 does not say which rows this rank gets"),
        (("dp",), "'dp' does not say which rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            loader.reshard(*given)
    assert (loader.dp_rank, loader.dp_size) == (1, 4), "nothing was changed"
    with loader, pytest.raises(ConfigError, match="bound by batch_size="):
        loader.batches(batch_size=BATCH)  # whose rows of a step would be those of four ranks
        loader.reshard(0, 2)
    whole = data().make_loader(0, 1, raylance.Options(), Assignment(name="val", is_split=False))
    whole.reshard(0, 1)  # as in Ray Train's local mode
    with pytest.raises(ConfigError, match="data-parallel rank 0 of 2"):
        whole.reshard(0, 2)


def test_loaders_made_by_hand_and_torch_data_take_the_same_arrangements(data: raylance.Dataset) -> None:
    first, second = (rows_of(take(loader, 2)) for loader in make_loaders(data, 2, 1))
    for rank, rows in enumerate((first, first, second, second)):
        with data.loader(rank=rank, world_size=4, ranks_per_replica=2, runtime="threads", num_decoders=0) as loader:
            assert rows_of(take(loader, 2)) == rows
        with data.loader(rank=rank, world_size=4, runtime="threads", num_decoders=0) as loader:
            loader.reshard(np.int64(rank // 2), np.int64(2))
            assert loader.steps_per_epoch(batch_size=BATCH) == 48
            assert rows_of(take(loader, 2)) == rows
        for place in ({"dist_info": (rank, 4), "ranks_per_replica": 2}, {"dist_info": (rank // 2, 2)}):
            arranged = torch_data.IterableDataset(data, batch_size=BATCH, **place)
            batches = iter(torch_data.Loader(arranged))
            assert [int(row) for _ in range(2) for row in next(batches)["id"]] == rows
            assert arranged.state_dict()["dp_size"] == 2
    for peers in (3, 8, 0):
        with pytest.raises(ConfigError, match=f"ranks_per_replica={peers}"):
            data.loader(rank=0, world_size=4, ranks_per_replica=peers)
        with pytest.raises(ConfigError, match=f"ranks_per_replica={peers}"):
            len(torch_data.IterableDataset(data, batch_size=BATCH, dist_info=(0, 4), ranks_per_replica=peers))


def test_a_run_of_ray_train_gives_peers_the_same_share(data: raylance.Dataset) -> None:
    config = raylance.DataConfig(["train"], ranks_per_replica=2, num_decoders=0)
    shards = config.configure({"train": data, "val": data}, 4, None, None)
    trains, vals = ([shard[name] for shard in shards] for name in ("train", "val"))
    places = [(one.rank, one.world_size, one.dp_rank, one.dp_size) for one in trains]
    assert places == [(rank, 4, rank // 2, 2) for rank in range(4)]
    assert [(one.rank, one.world_size, one.dp_rank, one.dp_size) for one in vals] == [(0, 1, 0, 1)] * 4
    for world_size in (3, 5):
        with pytest.raises(ConfigError, match=f"=2 does not divide the world size, {world_size}"):
            config.configure({"train": data}, world_size, None, None)
    with pytest.raises(ConfigError, match=r"did you mean ranks_per_replica=\?"):
        raylance.DataConfig(rank_per_replica=2)
