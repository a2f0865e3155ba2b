"""Functions that only a notebook or a script has, in workers of DataLoader; frameworks; Ray Train."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from jupyter_client.manager import start_new_kernel

import raylance
from raylance.errors import ConfigError
from raylance.torch_data import IterableDataset, Loader, find_place
from tests.helpers.cluster import free_ports
from tests.helpers.data_loaders import STYLES, make, numbered_texts, open_dataset, shorten_waits


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch)


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(numbered_texts(), max_rows_per_file=150)


def planned(handle: raylance.Dataset, epoch: int, size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """What the plan says; rows of `uri` are numbered by their offset."""
    plan = handle.plan(size, world_size).plan
    starts = range(0, plan.steps(0) * size, size)
    return [plan.select(epoch, plan.positions(0, at, *plan.rank_slice(0, at, rank))).tolist() for at in starts]


OF_NO_FILE = """
import sys, raylance
from raylance.torch_data import IterableDataset, Loader

class Twice:
    def __call__(self, batch):
        return batch | {"id": batch["id"] * FACTOR}

FACTOR = 2
def collate(batch):
    return batch["id"] + OFFSET

def begin(worker):
    assert OFFSET == 1

OFFSET = 1
handle = raylance.dataset(URI, columns=["id"], order="sequential", transform=Twice())
loader = Loader(IterableDataset(handle, global_batch_size=3, collate_fn=collate), num_workers=1, worker_init_fn=begin)
print(next(iter(loader)).tolist())
"""


def test_functions_of_a_notebook_reach_workers(uri: str) -> None:
    kernel, client = start_new_kernel()
    shown: list[str] = []
    text = OF_NO_FILE.replace("URI", repr(uri))
    client.execute_interactive(text, output_hook=lambda said: shown.append(str(said["content"])), timeout=120)
    client.stop_channels()
    kernel.shutdown_kernel()
    assert "".join(shown).count("[1, 3, 5]") == 1, shown


WRAPPED = """
import importlib, os, sys, torch, torch.distributed as dist, torch.multiprocessing as processes
import raylance
from raylance.torch_data import IterableDataset, Loader, MapDataset, RowSampler

def with_accelerate(make, loader, folder):
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    with_state, seen = accelerator.prepare(loader), []
    for step, batch in enumerate(with_state):
        seen += batch["id"].tolist()
        if step == 4:
            accelerator.save_state(folder)
            saved = len(seen)
    accelerator.wait_for_everyone()  # else one may read what the other is writing
    accelerator.load_state(folder)
    assert [number for batch in with_state for number in batch["id"].tolist()] == seen[saved:]
    plain = accelerator.prepare(make(torch.utils.data.DataLoader))
    try:
        next(iter(plain))
    except raylance.errors.ConfigError as error:
        assert "torch_data.Loader" in str(error)
    else:
        raise SystemExit("not refused")
    return seen

def with_lightning(make, loader, folder):
    lightning = importlib.import_module("lightning")
    seen = []
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
        def training_step(self, batch, step):
            seen.extend(batch["id"].tolist())
            return self.layer(batch["id"].float()[:, None]).mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)
    options = dict(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, default_root_dir=folder)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    lightning.Trainer(**options, **quiet).fit(Model(), loader)
    return seen

def run(rank, uri, style, wrapper, folder, port):
    torchrun = dict(RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=2, GROUP_RANK=0, MASTER_ADDR="127.0.0.1")
    more = dict(MASTER_PORT=port, TORCHELASTIC_RUN_ID="test")
    os.environ.update({name: str(value) for name, value in (torchrun | more).items()})
    handle = raylance.dataset(uri, columns=["id"], remainder="ragged")
    size = dict(global_batch_size=100, dist_info="auto")
    def make(kind):
        if style == "map":
            return kind(MapDataset(handle), batch_sampler=RowSampler(handle, **size))
        return kind(IterableDataset(handle, **size), **({} if kind is Loader else {"batch_size": None}))
    seen, both = globals()[f"with_{wrapper}"](make, make(Loader), folder), [None, None]
    dist.all_gather_object(both, seen)
    dist.destroy_process_group()  # else torch itself aborts at times as the process ends
    assert sorted(both[0] + both[1]) == list(range(1003)), (len(both[0] + both[1]), len(set(both[0] + both[1])))

if __name__ == "__main__":
    processes.spawn(run, (*sys.argv[1:5], int(sys.argv[5])), nprocs=2)
    print("each row once")
"""


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("wrapper", ["accelerate", "lightning"])
def test_frameworks_do_not_share_the_rows_again(uri: str, wrapper: str, style: str, tmp_path: Path) -> None:
    pytest.importorskip(wrapper, reason=f"{wrapper} is not installed: bash tests/examples")
    script = tmp_path / "script.py"
    script.write_text(WRAPPED)
    arguments = [uri, style, wrapper, str(tmp_path), str(free_ports(1)[0])]
    ran = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=200)
    assert ran.stdout.endswith("each row once\n"), ran.stderr[-3000:]


def test_ray_train_gives_the_place(uri: str, tmp_path: Path, ray_session: None) -> None:
    """In workers without torch.distributed, "ray" gives the place, and None is refused."""
    import ray.train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    folder = str(tmp_path)

    def train_fn() -> None:
        handle = raylance.dataset(uri, columns=["id"], remainder="ragged")
        try:
            find_place()
        except ConfigError as error:
            refusal = str(error)
        loader = Loader(IterableDataset(handle, global_batch_size=60, dist_info="ray"), record=True)
        rank = ray.train.get_context().get_world_rank()
        found = [batch["id"].tolist() for batch in loader]
        Path(folder, f"{rank}.json").write_text(json.dumps([refusal, found]))

    trainer = DataParallelTrainer(
        train_fn,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="place", storage_path=folder),
    )
    trainer.fit()
    for rank in range(2):
        refusal, found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert f"Ray Train has rank {rank} of 2" in refusal
        assert found == planned(open_dataset(uri), 0, 60, rank, 2)
    assert "every selected row exactly once" in raylance.prove_run(tmp_path / "place").verdict


def make_loader(*arguments: Any, **options: Any) -> Loader:
    return make(Loader, *arguments, **options)[1]


def test_spawned_workers_and_images(images_uri: str) -> None:
    """`Loader`'s own workers give the very bytes of this process, augmented by epoch and row."""
    image = raylance.Image("image", size=16, augment=raylance.RandomResizedCrop(), hflip=0.5)
    handle = open_dataset(images_uri, columns=["image", "id"], decode=image, filter="id < 300")
    here = make_loader(handle, "iterable", 50)
    spawned = Loader(IterableDataset(handle, global_batch_size=50), num_workers=1, persistent_workers=True)
    starting = iter(spawned)  # its worker takes a second to start
    first = [batch["image"] for batch in here]
    assert torch.equal(next(starting)["image"], first[0])
    for loader in (here, spawned):
        loader.set_epoch(1)
    for one, other in zip(here, spawned, strict=True):
        assert (one["image"].shape, one["image"].dtype) == ((50, 3, 16, 16), torch.uint8)
        assert all(torch.equal(one[name], other[name]) for name in ("image", "id"))
    assert not torch.equal(first[0], one["image"])
