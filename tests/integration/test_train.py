"""The promises under a real TorchTrainer: exactly once through a killed rank, resume on other world sizes."""

import importlib.util
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray.train
import torch
from ray.train.torch import TorchTrainer

import raylance
from raylance.integrations.checkpoint_files import _save
from raylance.reports.progress import events
from raylance.reports.reading import read_run
from tests.helpers.cluster import CPUS, actors_of, wait_for_free_cpus
from tests.helpers.reporting import report_slowly

pytestmark = pytest.mark.usefixtures("ray_session")

BATCH = 48


def open_train(uri: str, **changes: Any) -> raylance.Dataset:
    image = raylance.Image("image", size=(16, 16), augment=raylance.RandomResizedCrop(), hflip=0.5)
    order = raylance.WindowShuffle(shard_rows=20, window_shards=2, lanes=12)
    arguments = {"columns": ["image", "id"], "decode": image, "order": order, "seed": 11, "remainder": "ragged"}
    return raylance.dataset(uri, **(arguments | changes))


def log_batch(path: Path, loader: raylance.RankLoader, batch: dict[str, Any]) -> None:
    """Appends what a rank got, as it gets it: a killed process leaves what it had seen."""
    state = loader.state_dict()
    line = {
        "epoch": state["epoch"],
        "position": state["position"] or 953,  # after the last step comes the start of the next epoch
        "rank": loader.rank,
        "world": loader.world_size,
        "rows": batch["_rowoffset"].tolist(),
        "bytes": batch["image"].to(torch.int64).flatten(1).sum(1).tolist(),
    }
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def train_fn(config: dict[str, Any]) -> None:
    loader, val = (ray.train.get_dataset_shard(name) for name in ("train", "val"))
    saved = raylance.restore(loader)
    step = 0 if saved is None else saved["step"]
    log = Path(config["log"]) / f"attempt-{os.getpid()}.jsonl"
    for epoch in range(loader.epoch, config["epochs"]):
        for batch in loader.iter_torch_batches(global_batch_size=BATCH, with_row_offset=True):
            log_batch(log, loader, batch)
            step += 1
            if step % 3 == 0:
                state = {"step": step, "weights": torch.full((2,), float(step))}
                raylance.report({"step": step}, loader, state=state)
            marker = Path(config["log"]) / "killed"
            if step == config.get("die_at") and loader.rank == 1 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if step == config.get("stop_at"):
                return
        assert loader.epoch == epoch + 1
    whole = [row for batch in val.iter_torch_batches(batch_size=64) for row in batch["id"].tolist()]
    seen = {"val": whole, "decoders": len(actors_of(loader)[1])}
    Path(config["log"], f"rank-{loader.rank}.json").write_text(json.dumps(seen))


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


def fit(uri: str, storage: Path, name: str, **options: Any) -> ray.train.Result:
    """Trains an epoch of `train_fn`; options that are no trainer's are its configuration."""
    log = storage / f"log-{name}"
    log.mkdir(parents=True, exist_ok=True)
    config = {"log": str(log), "epochs": 1} | {key: options.pop(key, None) for key in ("die_at", "stop_at")}
    return make_trainer(
        train_fn,
        storage,
        name=name,
        train_loop_config=config,
        datasets={"train": open_train(uri), "val": open_train(uri, decode=None, columns=["id"], order="sequential")},
        dataset_config=raylance.DataConfig(datasets_to_split=["train"]),
        **options,
    ).fit()


Steps = dict[int, list[tuple[int, int]]]


def read_log(storage: Path, name: str) -> list[dict[str, Any]]:
    lines = []
    for path in sorted((storage / f"log-{name}").glob("*.jsonl")):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    return lines


def global_steps(lines: list[dict[str, Any]]) -> Steps:
    """(row, byte sum) of each global batch, by the position after it; ranks one after the other."""
    steps: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for line in lines:
        steps.setdefault(line["position"], {})[line["rank"]] = list(zip(line["rows"], line["bytes"], strict=True))
    return {at: [row for rank in sorted(ranks) for row in ranks[rank]] for at, ranks in sorted(steps.items())}


@pytest.fixture(scope="module")
def undisturbed(images_uri: str) -> Steps:
    """The same epoch on one rank, by threads."""
    steps: Steps = {}
    with open_train(images_uri).loader(runtime="threads") as loader:
        for batch in loader.iter_torch_batches(global_batch_size=BATCH, with_row_offset=True):
            sums = batch["image"].to(torch.int64).flatten(1).sum(1).tolist()
            steps[loader.state_dict()["position"] or 953] = list(zip(batch["_rowoffset"].tolist(), sums, strict=True))
    assert len({row for step in steps.values() for row, _ in step}) == 953
    return steps


@pytest.mark.promise("P6")
def test_a_killed_rank_costs_no_row_and_doubles_none(images_uri: str, tmp_path: Path, undisturbed: Steps) -> None:
    """Rank 1 of 2 is killed in step 8; Ray Train starts both again at the checkpoint of step 6.

    They hold every CPU, so that the shard actors decode; and each sees all of a dataset that is not split.
    """
    result = fit(images_uri, tmp_path, "killed", workers=2, failures=1, cpus=CPUS / 2, die_at=8)
    lines = read_log(tmp_path, "killed")
    attempts = sorted((tmp_path / "log-killed").glob("*.jsonl"))
    assert len(attempts) == 4, "two ranks, two attempts"
    resumed_at = 6 * BATCH
    kept = [line for line in lines if line["position"] <= resumed_at]
    after = [line for line in lines if line["position"] > resumed_at]
    assert {line["position"] for line in kept} == {BATCH * step for step in range(1, 7)}
    steps = global_steps(kept + after)
    assert steps == undisturbed, "the same global batches, to the byte"
    rows = [row for step in steps.values() for row, _ in step]
    assert len(rows) == len(set(rows)) == 953
    # Steps 7 and 8 were taken twice, by the run that died and by the one that resumed: with the same rows.
    for line in after:
        place = [row for row, _ in undisturbed[line["position"]]]
        assert set(line["rows"]) <= set(place)
    assert result.checkpoint is not None
    for rank in range(2):
        seen = json.loads((tmp_path / "log-killed" / f"rank-{rank}.json").read_text())
        assert seen == {"val": [row for row in range(1003) if not 200 <= row < 250], "decoders": 0}
    check_records(tmp_path / "killed")


def check_records(folder: Path) -> None:
    """What the killed run left of itself: two ranks, two starts, a certificate of each rank, reports of rank 0."""
    run = read_run(str(folder))
    starts = sorted((record.started, record.rank) for record in run.of("train"))
    assert (run.name, run.main, sorted(rank for _, rank in starts[:2]), len(starts)) == ("killed", "train", [0, 1], 4)
    happened = events(run)
    resumed = [what["position"] for _, _, kind, what in happened if kind == "resume"]
    at = resumed[0]  # Ray Train may not have heard of the last checkpoint
    assert at in (3 * BATCH, 6 * BATCH)
    assert resumed == [at, at]
    steps = [what["metrics"]["step"] for _, record, kind, what in happened if kind == "report" and not record.rank]
    assert steps[:2] == [3, 6]
    assert steps[-1] == 18, "the last one is written before the worker ends"
    certificates = [what for _, record, kind, what in happened if kind == "epoch" and record in run.of("train")]
    assert {one["rank"] for one in certificates} == {0, 1}
    assert sum(one["rows"] for one in certificates) == 953 - at
    proof = raylance.prove_run(folder)
    assert proof.ok, proof
    assert str(proof).splitlines() == [
        "train, epoch 0: 953 rows were handed out: every selected row exactly once",
        "val, each of 2 ranks, epoch 0: 953 rows were handed out: every selected row exactly once",
        "train, start 1 of 2: began at epoch 0, position 0; there was no checkpoint of it",
        f"train, start 2 of 2: restored epoch 0, position {at}",
    ]
    if importlib.util.find_spec("matplotlib") is None:  # an extra, which the wheel does not bring
        return
    page = Path(raylance.report_run(str(folder))).read_text()
    assert "2 starts" in page
    assert '<td>all ranks together</td><td>0</td><td class="good">953 rows were handed out: every selected row' in page
    assert '<img src="data:image/png;base64' in page, "the first batch"


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
        except raylance.ConfigError as error:
            Path(config["log"]).write_text(str(error))
        loader.set_epoch(0)
    for step, batch in enumerate(loader.iter_batches(global_batch_size=BATCH), 1):
        del batch
        if step == 3:
            raylance.report({"step": step}, loader, state={"step": step})
        if step == 5 and checkpoint is None:
            raise RuntimeError("the first start ends here")


@pytest.mark.promise("P8")
@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.promise("P5")
@pytest.mark.slow
def test_resume_on_other_world_sizes(images_uri: str, tmp_path: Path, undisturbed: Steps) -> None:
    """Two ranks stop at step 7, one continues to step 13, three to the end: each from the last checkpoint before."""
    kept: list[dict[str, Any]] = []
    seen: list[dict[str, Any]] = []
    result = None
    for world, stop, checkpoint in ((2, 7, 6), (1, 13, 12), (3, None, 20)):
        result = fit(images_uri, tmp_path, "resized", workers=world, stop_at=stop)
        ours = [line for line in read_log(tmp_path, "resized") if line not in seen]
        seen += ours
        assert {line["world"] for line in ours} == {world}
        kept += [line for line in ours if line["position"] <= checkpoint * BATCH]
    assert global_steps(kept) == undisturbed
    assert result is not None
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        state = json.loads(Path(directory, "raylance_state.json").read_text())
    shards = state["completed_shards"]
    assert (state["epoch"], state["position"]) == (0, 18 * BATCH)
    assert 0 < shards["complete"] < shards["shards"] == 48
    consumed = {row for at, step in undisturbed.items() if at <= 18 * BATCH for row, _ in step}
    loader = open_train(images_uri).loader()
    loader.load_state_dict(state)
    assert len(loader.completed_shards()) == shards["complete"]
    for shard in loader.completed_shards().tolist():
        assert consumed.issuperset(range(20 * shard, min(20 * shard + 20, 953)))
    proven, *starts = str(raylance.prove_run(tmp_path / "resized", dataset="train")).splitlines()
    assert proven == "train, epoch 0: 953 rows were handed out: every selected row exactly once"
    assert [line.partition(": ")[2] for line in starts] == [
        "began at epoch 0, position 0; there was no checkpoint of it",
        f"restored epoch 0, position {6 * BATCH}",
        f"restored epoch 0, position {12 * BATCH}",
    ], "on 2, 1 and 3 ranks"
    data = {"datasets": {"train": open_train(images_uri, seed=12)}, "dataset_config": raylance.DataConfig()}
    other_seed = make_trainer(refused_fn, tmp_path, name="resized", workers=1, **data)
    with pytest.raises(ray.train.TrainingFailedError, match="seed: saved 11, now 12"):
        other_seed.fit()


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    _save({"model": {"w": torch.ones(3)}, "step": 3, "name": "x", "history": [1.0, None]}, path)
    assert torch.load(path, weights_only=True)["model"]["w"].tolist() == [1, 1, 1]
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    _save({"model": {"w": quantised}}, path)
    assert torch.load(path, weights_only=True)["model"]["w"].dequantize().tolist() == pytest.approx([1, 1, 1])
    for value in (Path("x"), lambda: 1, (row for row in [1]), open(path, "rb")):  # noqa: SIM115
        with pytest.raises(raylance.ConfigError, match="no run could resume"):
            _save({"value": value}, path)


def mistakes_fn(config: dict[str, Any]) -> None:
    """Two loaders under Ray's own DataConfig, and what people do wrong with them and with a handle."""
    rank = ray.train.get_context().get_world_rank()
    said: dict[str, str] = {}

    def expect(name: str, call: Any) -> None:
        with pytest.raises(raylance.ConfigError) as caught:
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


@pytest.mark.slow
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
@pytest.mark.slow
def test_datasets_to_split_that_names_no_dataset(images_uri: str, tmp_path: Path, kind: type) -> None:
    data = {"datasets": {"train": open_train(images_uri)}, "dataset_config": kind(datasets_to_split=["trian"])}
    trainer = make_trainer(refused_fn, tmp_path, **data)
    with pytest.raises(ray.train.TrainingFailedError, match="'trian'"):
        trainer.fit()
    with pytest.raises(raylance.ConfigError, match="give a list of names"):
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
    assert type(ended.value.controller_failure) is raylance.ConfigError
    assert len(list(starts.iterdir())) == 1


@pytest.mark.parametrize(
    ("workers", "starts"),
    [
        pytest.param(
            2, ["DatasetError: a", "DatasetError: b", "ConfigError: c"], id="a wrong argument ends it at once"
        ),
        pytest.param(2, ["StateError: a", "OSError: a", "StateError: a", "StateError: a"], id="twice the same"),
        pytest.param((1, 2), ["ConfigError: 3 ranks", "ConfigError: 2 ranks", "ConfigError: 2 ranks"], id="elastic"),
    ],
)
def test_which_errors_end_a_run(workers: Any, starts: list[str]) -> None:
    """Only the last start of each row does."""
    context = SimpleNamespace(scaling_config=ray.train.ScalingConfig(num_workers=workers))
    callback = raylance.FailFast()
    *others, last = ([getattr(raylance, kind, OSError)(text)] for kind, text in (it.split(": ") for it in starts))
    for errors in others:
        callback.after_exception(context, dict(enumerate(errors)))
    with pytest.raises(type(last[0]), match=str(last[0])):
        callback.after_exception(context, dict(enumerate([ray.exceptions.RayActorError(), *last])))


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
