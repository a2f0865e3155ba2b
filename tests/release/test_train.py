"""Mistakes under a real TorchTrainer, loaders that are made by hand, and local mode."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train
import torch
from ray.train.torch import TorchTrainer

import raylance
from raylance.errors import ConfigError
from raylance.reports.progress import events
from raylance.reports.reading import read_run
from tests.helpers.cluster import CPUS, wait_for_free_cpus
from tests.helpers.reporting import report_slowly

pytestmark = pytest.mark.usefixtures("ray_session")

BATCH = 48


def open_train(uri: str, **changes: Any) -> raylance.Dataset:
    image = raylance.Image("image", size=(16, 16), augment=raylance.RandomResizedCrop(), hflip=0.5)
    order = raylance.WindowShuffle(shard_rows=20, window_shards=2, lanes=12)
    arguments = {"columns": ["image", "id"], "decode": image, "order": order, "seed": 11, "remainder": "ragged"}
    return raylance.dataset(uri, **(arguments | changes))


def make_trainer(
    train_fn: Any,
    storage: Path,
    *,
    name: str | None = None,
    workers: int = 2,
    cpus: float = 1,
    failures: int = 0,
    callbacks: list[ray.train.UserCallback] | None = None,
    **options: Any,
) -> TorchTrainer:
    return TorchTrainer(
        train_fn,
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": cpus}),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=failures),
            callbacks=callbacks,
        ),
        **options,
    )


def forgetful_fn(config: dict[str, Any]) -> None:
    """Loads the model as Ray's guides do, and forgets the loader, also while the storage does not give its state; then
    begins at row 0 on purpose.
    """
    loader, checkpoint = ray.train.get_dataset_shard("train"), ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            assert torch.load(Path(directory, "state.pt"))["step"] == 3
        state = Path(checkpoint.path, "raylance_state.json")
        kept = state.rename(state.with_suffix(".kept"))
        state.mkdir()
        with pytest.raises(raylance.StateError, match=f"{state.name} in .*{checkpoint.path} cannot be read"):
            next(iter(loader.iter_batches(global_batch_size=BATCH)))
        state.rmdir()
        kept.rename(state)
        try:
            next(iter(loader.iter_batches(global_batch_size=BATCH)))
        except ConfigError as error:
            Path(config["log"]).write_text(str(error))
        loader.set_epoch(0)
    for step, batch in enumerate(loader.iter_batches(global_batch_size=BATCH), 1):
        del batch
        if step == 3:
            raylance.report({"step": step}, loader, state={"step": step})
        if step == 5 and checkpoint is None:
            raise RuntimeError("the first start ends here")


@pytest.mark.promise("P8")
def test_a_restore_that_was_forgotten_is_refused_and_shown(images_uri: str, tmp_path: Path) -> None:
    """The loader began at row 0, and the proof said that every row came exactly once."""
    log = tmp_path / "refused"
    make_trainer(
        forgetful_fn,
        tmp_path,
        name="forgetful",
        workers=1,
        failures=1,
        train_loop_config={"log": str(log)},
        datasets={"train": open_train(images_uri, decode=None, columns=["id"])},
        dataset_config=raylance.DataConfig(num_decoders=0),
    ).fit()
    refused = log.read_text()
    assert f"epoch 0, position {3 * BATCH}" in refused
    assert "raylance.restore(loader)" in refused
    proof = raylance.prove_run(tmp_path / "forgetful")
    assert not proof.ok
    assert [line for line in str(proof).splitlines() if "start" in line] == [
        "train, start 1 of 2: began at epoch 0, position 0; there was no checkpoint of it",
        "train, start 2 of 2: began at epoch 0, position 0, though there was a checkpoint: it was not restored",
    ]


def careful_fn(config: dict[str, Any]) -> None:
    """Saves before the first batch, and begins there without a restore; then restores, and makes another loader."""
    loader, checkpoint = ray.train.get_dataset_shard("train"), ray.train.get_checkpoint()
    if checkpoint is None:
        raylance.report({"step": 0}, loader, state={"step": 0})
        raise RuntimeError("the first start ends here")
    with checkpoint.as_directory() as directory:
        begin = torch.load(Path(directory, "state.pt"))["step"]
    if begin:
        raylance.restore(loader)
        with config["train"].loader(rank=0, world_size=2, runtime="threads") as figures:
            assert sum(len(batch["id"]) for batch in figures.iter_batches(global_batch_size=BATCH)) > 0
    for step, batch in enumerate(loader.iter_batches(global_batch_size=BATCH), begin + 1):
        del batch
        if step == 3:
            raylance.report({"step": step}, loader, state={"step": step})
            raise RuntimeError("the second start ends here")
    Path(config["log"]).write_text(str(step))


def test_a_loader_that_need_not_be_restored_is_not_refused(images_uri: str, tmp_path: Path) -> None:
    """A run that was saved before its first batch, or that also reads its figures from the training data, ended."""
    train = open_train(images_uri, decode=None, columns=["id"])
    make_trainer(
        careful_fn,
        tmp_path,
        name="careful",
        workers=1,
        failures=2,
        train_loop_config={"log": str(tmp_path / "done"), "train": train},
        datasets={"train": train},
        dataset_config=raylance.DataConfig(num_decoders=0),
    ).fit()
    assert int((tmp_path / "done").read_text()) == -(-953 // BATCH)


def hand_fn(config: dict[str, Any]) -> None:
    """Loaders that the training function makes by itself, of handles that it was given."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    train = config["train"].loader(rank=rank, world_size=world, runtime="threads")
    raylance.restore(train)
    for _ in range(train.epoch, 2):
        for step, batch in enumerate(train.iter_batches(global_batch_size=BATCH)):
            del batch
            if step % 8 == 7:
                raylance.report({"step": step}, train, state={})
        with config["train"].loader(rank=0, world_size=1, runtime="threads") as whole:
            list(whole.iter_batches(batch_size=200))
        marker, done = Path(config["log"]) / "killed", Path(config["log"]) / "done"
        if rank == 0:
            done.touch()
        if rank == 1 and not marker.exists():
            while not done.exists():  # Ray Train ends rank 0, too, which shall have counted its own loader
                time.sleep(0.01)
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    raylance.report({"step": -1})
    assert str(train.explain())


def test_loaders_made_by_hand_in_a_worker_are_recorded_and_proven(images_uri: str, tmp_path: Path) -> None:
    train = open_train(images_uri, decode=None, columns=["id"])
    config = {"train": train, "log": str(tmp_path)}
    make_trainer(hand_fn, tmp_path, name="hand", failures=1, train_loop_config=config).fit()
    run = read_run(tmp_path / "hand")
    assert {record.facts["dataset"] for record in run.records} == {"images", "images-2"}
    assert run.main == "images"
    assert len({record.start for record in run.records}) == 2, "a start is what all its workers have in common"
    starts = {(record.start, record.rank) for record in run.of("images")}
    assert len(starts) == len(run.of("images")) == 4
    assert {part.facts["rank"] for part in run.ranks("images-2")} == {0, 1}
    assert [part.starts for part in run.ranks("images")] == [2, 2]
    reports = [what["metrics"]["step"] for _, record, kind, what in events(run) if kind == "report" and not record.rank]
    assert reports[-1] == -1, "one without a loader, too"
    for rank in range(2):
        handed = sum(int(record.at("rows", record.last)) for record in run.of("images-2") if record.rank == rank)
        assert handed == 953 * sum(record.rank == rank for record in run.of("images-2")), "each counts once"
    lines = str(raylance.prove_run(tmp_path / "hand")).splitlines()
    assert lines[0] == "images, each of epochs 0 to 1: 953 rows were handed out: every selected row exactly once"
    assert lines[1].startswith("images-2, each of 2 ranks, epoch 0: 953 rows are as planned, but were not all")
    assert "953 rows more were handed out: by set_epoch or another loader" in lines[1], "one for each epoch"
    verdict = raylance.explain_run(tmp_path / "hand")
    assert str(verdict).endswith(f"\n{verdict.rows}")
    assert verdict.rows.splitlines()[0] == lines[0]


def refused_fn(config: dict[str, Any]) -> None:
    raylance.restore(ray.train.get_dataset_shard("train"))


def mistakes_fn(config: dict[str, Any]) -> None:
    """Two loaders under Ray's own DataConfig, and what people do wrong with them and with a handle."""
    rank = ray.train.get_context().get_world_rank()
    said: dict[str, str] = {}

    def expect(name: str, call: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            call()
        said[name] = str(caught.value)

    handle = config["handle"]
    expect("iterated", lambda: next(handle.iter_batches(batch_size=10)))
    expect("loader", handle.loader)
    assert len(handle.loader(rank=0, world_size=1).batches(batch_size=100)) == 10, "on purpose it is possible"
    loaders = {name: ray.train.get_dataset_shard(name) for name in ("train", "extra")}
    assert raylance.restore(loaders) is None
    rows: dict[str, list[int]] = {}
    for name, loader in loaders.items():
        rows[name] = [row for batch in loader.iter_batches(global_batch_size=100) for row in batch["id"].tolist()]
        assert loader.world_size == 2
    expect("missing", lambda: raylance.report({}, loaders["train"]))
    expect("nothing", lambda: raylance.report({}, {}))
    expect("no loader", lambda: raylance.report({}, {"train": 3}))
    next(iter(loaders["extra"].batches(global_batch_size=100)))
    raylance.report({}, {"train": loaders["train"], "extra": loaders["extra"].batches(global_batch_size=100)})
    Path(config["out"], f"rank-{rank}.json").write_text(json.dumps({"rows": rows, "said": said}))


def test_without_a_data_config_and_with_common_mistakes(images_uri: str, tmp_path: Path) -> None:
    """Ray's default configuration splits; a handle in a worker, and a loader that is not reported, are refused."""
    data = {
        "train": open_train(images_uri, decode=None, columns=["id"]),
        "extra": open_train(images_uri, decode=None, columns=["id"], seed=5),
    }
    config = {"out": str(tmp_path), "handle": open_train(images_uri)}
    result = make_trainer(mistakes_fn, tmp_path / "runs", train_loop_config=config, datasets=data).fit()
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for name in data:
        assert sorted(ranks[0]["rows"][name] + ranks[1]["rows"][name]) == [r for r in range(1003) if not 200 <= r < 250]
    for said in (rank["said"] for rank in ranks):
        assert "get_dataset_shard('train')" in said["iterated"]
        assert "each of them would get all rows" in said["loader"]
        assert "the loader of 'extra' stands at epoch 1 and is not reported" in said["missing"]
        assert "no loader was given" in said["nothing"]
        assert "'train': int is not a loader" in said["no loader"]
    loaders = {name: dataset.loader(rank=1, world_size=3) for name, dataset in data.items()}
    assert raylance.restore(loaders, result.checkpoint) == {}
    assert [(loader.epoch, loader.state_dict()["position"]) for loader in loaders.values()] == [(1, 0), (1, 100)]
    with pytest.raises(raylance.StateError, match="'train', 'extra'"):
        raylance.restore(loaders["train"], result.checkpoint)


@pytest.mark.parametrize("kind", [raylance.DataConfig, ray.train.DataConfig])
def test_datasets_to_split_that_names_no_dataset(images_uri: str, tmp_path: Path, kind: type) -> None:
    data = {"datasets": {"train": open_train(images_uri)}, "dataset_config": kind(datasets_to_split=["trian"])}
    trainer = make_trainer(refused_fn, tmp_path, **data)
    with pytest.raises(ray.train.TrainingFailedError, match="'trian'"):
        trainer.fit()
    with pytest.raises(ConfigError, match="give a list of names"):
        raylance.DataConfig(datasets_to_split="train")  # type: ignore[arg-type]


def too_large_fn(config: dict[str, Any]) -> None:
    Path(config["starts"], f"{os.getpid()}").touch()
    next(iter(ray.train.get_dataset_shard("train").iter_batches(global_batch_size=10_000)))


def test_an_error_that_no_restart_repairs_ends_the_run_at_once(images_uri: str, tmp_path: Path) -> None:
    """Ray Train started the ranks `max_failures` times again."""
    starts = tmp_path / "starts"
    starts.mkdir()
    trainer = make_trainer(
        too_large_fn,
        tmp_path,
        workers=1,
        failures=3,
        train_loop_config={"starts": str(starts)},
        datasets={"train": open_train(images_uri, decode=None, columns=["id"], remainder="drop")},
        dataset_config=raylance.DataConfig(num_decoders=0),
        callbacks=[raylance.FailFast()],
    )
    with pytest.raises(ray.train.ControllerError, match="10,?000.*953|953.*10,?000") as ended:
        trainer.fit()
    assert type(ended.value.controller_failure) is ConfigError
    assert len(list(starts.iterdir())) == 1


def local_fn(config: dict[str, Any]) -> None:
    loader = ray.train.get_dataset_shard("train")
    assert (loader.rank, loader.world_size) == (0, 1)
    other = config["other"]
    assert len({next(iter(other.iter_batches(batch_size=10)))["id"].tobytes() for _ in range(2)}) == 1, "a value"
    methods = {name for name in dir(raylance.RankLoader) if not name.startswith("_")}
    assert methods <= set(dir(loader)), "what a training function calls on ranks, it calls here"
    assert raylance.restore(loader) is None
    loader.prepare(batch_size=100)
    seen = []
    for epoch in range(loader.epoch, 2):
        seen.append([row for batch in loader.iter_batches(batch_size=100) for row in batch["id"].tolist()])
        assert loader.epoch == epoch + 1
        raylance.report({"rows": len(seen[-1])}, loader, state={"epoch": epoch})
        assert raylance.restore(loader) == {"epoch": epoch}, "the checkpoint stays, as nobody stores it"
        mine = Path(config["mine"])
        mine.mkdir(exist_ok=True)
        raylance.report({"rows": 0}, loader, checkpoint=mine)
        assert mine.exists()
    ((saved_s, trained_s),) = report_slowly(loader, "slow")
    assert saved_s >= 0.05
    assert trained_s == pytest.approx(0, abs=1e-6)
    raylance.report({"rows": 0}, loader, state={"epoch": epoch})
    assert mine.exists(), "a directory of the user's is left alone"
    Path(config["out"]).write_text(json.dumps(seen))


def test_local_mode_hands_over_a_working_loader(
    images_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_workers=0 runs the function in this process, with the handle itself, which stands for the run's loader."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    out, plain = tmp_path / "seen.json", {"columns": ["id"], "decode": None}
    handle, other = open_train(images_uri, **plain), open_train(images_uri, seed=1, **plain)
    config = {"out": str(out), "other": other, "mine": str(tmp_path / "raylance-mine")}
    trainer = make_trainer(local_fn, tmp_path, workers=0, train_loop_config=config, datasets={"train": handle})
    made = trainer.fit().checkpoint
    assert raylance.restore(None, made) == {"epoch": 1}
    assert len(list(temporary.glob("raylance-report-*"))) == 3, "of each epoch's two, and the last"
    looks = [next(iter(handle.iter_batches(batch_size=10)))["id"].tolist() for _ in range(2)]
    assert looks[0] == looks[1], "the run is over, and the handle a value again"
    first, second = json.loads(out.read_text())
    assert len(np.unique(first)) == len(np.unique(second)) == 953
    assert first != second, "epochs move on"
    trainer.fit()
    assert json.loads(out.read_text()) == [first, second], "another run begins at the beginning"
    for data in (handle, other):
        data.close()
    wait_for_free_cpus(CPUS)
