"""Checks that each example, killed in mid-epoch where it can be, has each row once all the same."""

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lance
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import ray.train
import torch

import raylance
from jobs.examples import common
from raylance.errors import ConfigError
from raylance.samples.pack_tokens import PackTokens
from tests.helpers.images import make_images
from tests.helpers.witness import rows_by_epoch, steps_seen, watched

ROOT = Path(__file__).parents[2]
TRAIN, VAL = 250, 40
STEPS = 8  # of 32 rows


@pytest.fixture(scope="module")
def labelled_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("examples") / "labelled.lance")
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "image": pa.array(make_images(TRAIN + VAL, seed=3), pa.binary()),
            "label": pa.array(rng.integers(0, 10, TRAIN + VAL)),
            "split": pa.array(["train"] * TRAIN + ["val"] * VAL),
        }
    )
    lance.write_dataset(table, uri, max_rows_per_file=100)
    return uri


@pytest.fixture(scope="module")
def tokens_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("examples") / "tokens.lance")
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 1000, rng.integers(20, 200)).tolist() for _ in range(200)]
    lance.write_dataset(pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))}), uri)
    return uri


def run(name: str, *arguments: object) -> int:
    """Runs an example in this process; on the session's Ray, where there is one."""
    example = importlib.import_module(f"jobs.examples.{name}")
    status: int = example.main([str(argument) for argument in arguments])
    return status


def each_row_once(rows: Path, epochs: int = 2, expected: Iterable[int] = range(TRAIN)) -> bool:
    """Whether all epochs had every expected row once: by default, those of the training split."""
    seen = rows_by_epoch(rows)
    return list(seen) == list(range(epochs)) and all(sorted(epoch) == [*expected] for epoch in seen.values())


def was_killed_and_continued(rows: Path) -> bool:
    """Whether a rank was killed, and none made the first step again."""
    began = [line["dp_rank"] for line in steps_seen(rows) if line["step"] == 1]
    return (rows / "killed").exists() and len(began) == len(set(began))


def test_local_mode(labelled_uri: str, tmp_path: Path) -> None:
    """In a process of its own: Ray Train takes one that was in local mode once for one that still is."""
    rows = tmp_path / "rows"
    script = (
        "import pathlib, sys, tests.helpers.witness, jobs.examples.local_mode as example\n"
        "with tests.helpers.witness.watched(pathlib.Path(sys.argv.pop(1))): sys.exit(example.main(sys.argv[1:]))"
    )
    words = ["-c", script, rows, "--data", labelled_uri, "--global-batch-size", "32"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert each_row_once(rows)


def test_rows_that_come_twice_or_not_are_noticed(tmp_path: Path) -> None:
    """The witness itself: a step that was made twice counts once, a row that is missing shows."""
    line = '{{"epoch": 0, "step": {}, "rows": {}, "dp_rank": {}, "dp_size": {}}}\n'
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text(line.format(1, "[0, 1]", 0, 1) + line.format(2, "[2, 3]", 0, 1))
    second.write_text(line.format(2, "[2, 3]", 0, 1) + line.format(3, "[4]", 0, 1))
    assert rows_by_epoch(tmp_path) == {0: [0, 1, 2, 3, 4]}
    second.write_text(line.format(2, "[2]", 1, 2) + line.format(3, "[4]", 0, 1))
    with pytest.raises(RuntimeError, match="step 2: 1 of 2 ranks were seen"):
        rows_by_epoch(tmp_path)


def test_trials_are_kept_where_their_runs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a URI, Ray Tune was given a folder below the current one."""

    tuner = Mock(side_effect=KeyboardInterrupt)  # which ends the example there
    tuning = importlib.import_module("jobs.examples.tuning")
    monkeypatch.setattr(tuning.common, "start_ray", lambda: None)
    monkeypatch.setattr(tuning.common, "open_data", lambda args: {})
    monkeypatch.setattr(tuning.tune, "Tuner", tuner)
    with pytest.raises(KeyboardInterrupt):
        tuning.main(["--data", "x", "--storage-path", "s3://bucket/runs"])
    assert tuner.call_args.kwargs["run_config"].storage_path == "s3://bucket/runs"


def test_torchdata_nodes(labelled_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out of the pipelines is counted, since a node prefetches."""
    nodes, seen = pytest.importorskip("torchdata.nodes"), []

    def keep(loader: Any, iterate: Any = nodes.Loader.__iter__) -> Iterator[Any]:
        for batch in iterate(loader):
            seen.append(batch["_rowoffset"])
            yield batch

    batches = functools.partialmethod(raylance.RankLoader.batches, with_row_offset=True)
    monkeypatch.setattr(raylance.RankLoader, "batches", batches)
    monkeypatch.setattr(nodes.Loader, "__iter__", keep)
    assert run("torchdata_nodes", "--data", labelled_uri, "--global-batch-size", 32) == 0
    assert sorted(torch.cat(seen).tolist()) == list(range(TRAIN))


def test_torchtitan(tokens_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchtitan")
    packed = raylance.dataset(tokens_uri, samples=PackTokens("tokens", length=65, eos_id=0))
    steps = len(packed.loader().batches(batch_size=4))
    assert run("torchtitan_loader", "--data", tokens_uri, "--seq-len", 64) == 0
    assert f"{steps} steps, {steps * 4 * 64:,} tokens" in capsys.readouterr().out
    example = importlib.import_module("jobs.examples.torchtitan_loader")
    config = example.LanceDataLoader.Config(dataset_path=tokens_uri)

    def take(state: dict[str, Any], rank: int, world_size: int, size: int, count: int | None = None) -> Any:
        place = {"dp_rank": rank, "dp_world_size": world_size, "local_batch_size": size, "seq_len": 64}
        made = example.LanceDataLoader(config, **place)
        made.load_state_dict(state)
        taken = []
        with contextlib.suppress(example.DataloaderExhaustedError):
            for inputs, labels in made:
                assert (inputs["input"][:, 1:] == labels[:, :-1]).all()
                taken.append(inputs["input"])
                if len(taken) == count:
                    break
        return taken, made.state_dict()

    whole, _ = take({}, 0, 1, 4)
    before, state = take({}, 0, 1, 4, count=5)
    ranks = [take(state, rank, 2, 2)[0] for rank in range(2)]
    after = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
    assert torch.equal(torch.cat(whole), torch.cat(before + after)), "on twice as many ranks"


KILLED = {  # and the package that they need
    "failures": "",
    "elastic": "",
    "async_upload": "",
    "async_validation": "",
    "fsdp2": "",
    "lightning_loop": "lightning",
    "accelerate_loop": "accelerate",
    "transformers_trainer": "transformers",
    "jax_loop": "jax",
    "torchft_ddp": "torchft",
}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", KILLED)
def test_each_row_comes_once_when_a_rank_is_killed(
    name: str, labelled_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank dies in the second epoch's fifth step, two steps after a checkpoint."""
    if KILLED[name]:
        pytest.importorskip(KILLED[name])
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows"
    given = "--data", labelled_uri, "--storage-path", tmp_path, "--global-batch-size", 32, "--checkpoint-every-steps", 3
    with watched(rows, die_at=STEPS + 5):
        assert run(name, *given) == 0
    assert was_killed_and_continued(rows)
    assert each_row_once(rows)


@pytest.mark.usefixtures("ray_session")
def test_peers_get_the_same_rows_when_replicas_and_their_ranks_change(
    labelled_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 × 2 ranks, killed in mid-epoch; continued as 1 × 2, killed again; and as 4 × 1 to the end."""
    once = common.run_config
    monkeypatch.setattr(common, "run_config", lambda args: once(args, max_failures=0))
    rows = tmp_path / "rows"
    given = "--data", labelled_uri, "--storage-path", tmp_path, "--global-batch-size", 32, "--checkpoint-every-steps", 3
    for replicas, peers in ((2, 2), (1, 2)):
        with watched(rows, die_at=5), pytest.raises(ray.train.TrainingFailedError):
            run("tensor_parallel", *given, "--num-workers", replicas * peers, "--tensor-parallel", peers)
        (rows / "killed").unlink()
    with watched(rows):
        assert run("tensor_parallel", *given, "--num-workers", 4, "--tensor-parallel", 1) == 0
    assert each_row_once(rows)
    seen: dict[tuple[int, ...], list[list[int]]] = {}
    for line in steps_seen(rows):
        at = line["dp_size"], line["step"], line["dp_rank"]
        seen.setdefault(at, []).append(line["rows"])
    of_two = [found for at, found in seen.items() if at[0] < 4 and len(found) == 2]
    assert len(of_two) >= 2 * 3 + 3, "steps up to the last checkpoints, of each data-parallel rank"
    assert all(one == other for one, other in of_two)
    assert {at[0] for at in seen} == {1, 2, 4}


RECIPES = [
    "speech",
    "language_model",
    "fine_tuning",
    "images_and_text",
    "action_chunks",
    "segmentation",
    "detection",
    "views",
    "views --multi-crop",
    "pairs",
    "hsdp --num-workers 4",
    "evaluation",
]


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_killed_and_continue(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """256 rows; the last rank dies in the sixth step, after two checkpoints, of which a kill may undo the newest."""
    uri, rows, (name, *arguments) = tmp_path / "made.lance", tmp_path / "rows", recipe.split()
    kinds = {"speech": "sounds", "action_chunks": "episodes", "language_model": "documents", "fine_tuning": "documents"}
    kinds["images_and_text"] = "pages"
    kind = kinds.get(name, "scenes")
    assert run("made_data", kind, uri, "--count", 320) == 0
    given = ["--data", uri, "--storage-path", tmp_path / "runs", "--global-batch-size", 32]
    with watched(rows, die_at=6):
        assert run(name, *given, "--checkpoint-every-steps", 2, "--image-size", 32, *arguments) == 0
    assert was_killed_and_continued(rows)
    epochs = 1 if name == "evaluation" else 2
    split = lance.dataset(uri).to_table(columns=["split"])["split"].to_pylist()
    wanted = [row for row in range(320) if split[row] == "train"]
    if name == "language_model":  # sequences
        example = importlib.import_module("jobs.examples.language_model")
        wanted = list(range(len(raylance.dataset(str(uri), samples=example.PACK, filter="split = 'train'"))))
    assert each_row_once(rows, epochs, wanted)
    assert epochs == 2 or "'rows': 256" in capsys.readouterr().out


def test_a_packed_loss_is_that_of_the_documents_one_by_one(tmp_path: Path) -> None:
    example = importlib.import_module("jobs.examples.language_model")
    uri = str(tmp_path / "made.lance")
    assert run("made_data", "documents", uri, "--count", 80) == 0
    model, losses, count = example.TinyGPT(), 0.0, 0
    for text in lance.dataset(uri).to_table(columns=["tokens"])["tokens"].to_pylist():
        ids = torch.tensor([[*text, 0]])
        logits = model(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids))
        losses += torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += len(text)
    for policy in ("stream", "whole"):
        pack = dataclasses.replace(example.PACK, policy=policy, length=61 if policy == "whole" else 10**4)
        data, packed, labels = raylance.dataset(uri, samples=pack, remainder="ragged"), 0.0, 0
        for batch in data.iter_torch_batches(global_batch_size=7):
            found = int((batch["labels"] != -100).sum())
            packed, labels = packed + example.loss_of(model, batch).item() * found, labels + found
        assert labels == count, "each token but the first of a document is a label once"
        assert packed / labels == pytest.approx(losses / count, rel=1e-5)


def test_a_budgets_gradient_is_that_of_the_documents_one_by_one(tmp_path: Path) -> None:
    """However a step is divided among ranks and micro-batches."""
    example = importlib.import_module("jobs.examples.fine_tuning")
    uri = str(tmp_path / "made.lance")
    assert run("made_data", "documents", uri, "--count", 400) == 0
    data, gradients = example.open_data(uri), []
    for world in (1, 3):
        model = example.TinyGPT()
        for rank in range(world):
            with data.loader(rank=rank, world_size=world, record=False) as loader:
                batches = loader.batches(**example.SIZE, pad_lists={"tokens": raylance.Pad(0)}, device="cpu")
                for micro in next(iter(batches)):
                    (example.loss_of(model, micro) / micro["_step_cost"]).backward()
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
    torch.testing.assert_close(*gradients)


def test_the_loss_of_patches_is_that_of_transformers_own_processor(tmp_path: Path) -> None:
    """Of the same rows, one by one; as two ranks have them, and, from the middle of the epoch on, three."""
    example = importlib.import_module("jobs.examples.images_and_text")
    of_pages = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = of_pages.Qwen2VLImageProcessorPil(**example.PATCHES)
    uri = str(tmp_path / "pages.lance")
    assert run("made_data", "pages", uri, "--count", 100) == 0
    rows, model = lance.dataset(uri).to_table().to_pylist(), example.build_model()
    losses: dict[int, float] = {}
    for number, row in enumerate(rows):
        ids, images = torch.tensor([row["input_ids"]]), dict[str, Any]()
        if row["images"]:
            pictures = [PIL.Image.open(io.BytesIO(each)).convert("RGB") for each in row["images"]]
            images = dict(processor(images=pictures, return_tensors="pt"))
        kinds = (ids == example.IMAGE).int()
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=kinds, **images).logits
        labels = torch.where(kinds == 1, -100, ids)[0, 1:]
        losses[number] = torch.nn.functional.cross_entropy(logits[0, :-1], labels, reduction="sum").item()
    data, state, seen = example.open_data(uri), None, dict[int, int]()
    found = wanted = 0.0
    for world, steps in ((2, 3), (3, None)):
        for rank in range(world):
            with data.loader(rank=rank, world_size=world, record=False) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                batches = loader.batches(budget=example.BUDGET, pad_lists={"input_ids": raylance.Pad(0)}, device="cpu",
                                         with_row_offset=True)  # fmt: skip
                for batch in itertools.islice(batches, steps):
                    own = batch["_rowoffset"].tolist()
                    with torch.no_grad():
                        found += example.loss_of(model, batch).item() if own else 0.0
                    wanted += sum(losses[row] for row in own)
                    seen |= {row: seen.get(row, 0) + 1 for row in own}
                saved = loader.state_dict()
        state = saved
    assert seen == {row: 1 for row in range(100) if rows[row]["split"] == "train"}
    assert found == pytest.approx(wanted, rel=1e-3), "resized by torch, and there by Pillow"


@pytest.mark.usefixtures("ray_session")
def test_inference_writes_each_row_once_also_where_the_dataset_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in mid-run; rows are added meanwhile, and once more between the last read and the commit."""
    uri = str(tmp_path / "scenes.lance")
    assert run("made_data", "scenes", uri, "--count", 150) == 0
    more = lance.dataset(uri).take(range(10))
    commit, commits, read = lance.LanceDataset.commit, [], raylance.writing.read_values

    def grow_and_read(*arguments: Any) -> Any:
        lance.write_dataset(more, uri, mode="append")
        return read(*arguments)

    def grow_and_commit(*arguments: Any, **options: Any) -> Any:
        commits.append(options["read_version"])
        if len(commits) == 1:
            lance.dataset(uri).delete("label = 7")
        return commit(*arguments, **options)

    monkeypatch.setattr(raylance.writing, "read_values", grow_and_read)
    monkeypatch.setattr(lance.LanceDataset, "commit", grow_and_commit)
    given = ["--data", uri, "--storage-path", tmp_path / "runs", "--global-batch-size", 16, "--column", "found"]
    given += ["--checkpoint-every-steps", 2, "--image-size", 32]
    with watched(rows := tmp_path / "rows", die_at=5):
        assert run("inference", *given) == 0
    assert was_killed_and_continued(rows)
    assert each_row_once(rows, 1, range(150))
    shown = capsys.readouterr().out
    assert "150 rows were predicted" in shown
    monkeypatch.setattr(raylance.writing, "read_values", read)
    left = lance.dataset(uri).count_rows("found IS NULL")
    assert 0 < left <= 10, "those that were added meanwhile"
    assert run("inference", *given, "--run-name", "again") == 0
    given[given.index("found")] = "scores"
    assert run("inference", *given, "--run-name", "scores", "--predict", "scores") == 0
    whole = lance.dataset(uri)
    assert whole.count_rows("found IS NULL OR scores IS NULL") == 0
    assert whole.schema.field("scores").type == pa.list_(pa.float32(), 10)
    assert whole.tags.list() == {}
    table = whole.to_table(columns=["image", "found", "scores"])
    model = common.build_model(32).eval()
    data = raylance.dataset(uri, columns=["image"], decode=raylance.Image("image", size=32), order="sequential")
    images = torch.from_numpy(data.head(len(table))["image"]).permute(0, 3, 1, 2)
    with torch.inference_mode():
        wanted = model(images.float() / 255)
    torch.testing.assert_close(torch.tensor(table["scores"].to_pylist()), wanted)
    assert (torch.tensor(table["found"].to_pylist()) == wanted.argmax(1)).float().mean() > 0.98, (
        "of ties, the shape of a batch decides"
    )


def test_inference_refuses_a_column_of_another_type_before_it_predicts(
    labelled_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It predicted all rows, and failed at the commit with `LanceError(Schema)`."""
    monkeypatch.setattr(common, "fit", lambda *_, **__: pytest.fail("it predicts"))
    with pytest.raises(ConfigError, match=r"'label' of .* is int64, and the values are fixed_size_list"):
        run("inference", "--data", labelled_uri, "--column", "label", "--predict", "scores")
    assert lance.dataset(labelled_uri).tags.list() == {}


@pytest.mark.usefixtures("ray_session")
def test_two_runs_are_the_same_to_the_byte(
    labelled_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = []
    for name in ("one", "two"):
        given = ["--data", labelled_uri, "--storage-path", tmp_path, "--run-name", name, "--global-batch-size", 32]
        assert run("reproducible", *given) == 0
        digests.append(re.findall(r"'digest': '(\w+)'", capsys.readouterr().out))
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]


@pytest.mark.usefixtures("ray_session")
def test_trials_share_a_selection(labelled_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", labelled_uri, "--storage-path", tmp_path, "--trials", 2, "--at-once", 1, "--epochs", 1]
    assert run("tuning", *given, "--global-batch-size", 32) == 0
    assert capsys.readouterr().out.count("learning rate") == 2


SLOWLY = """
import pathlib, sys, time, tests.helpers.witness
from jobs.examples import elastic

def train(config):  # runs in a process where the module is as it was
    from jobs.examples import common
    at_once = common.loss_of
    common.loss_of = lambda model, batch: time.sleep(0.5) or at_once(model, batch)
    return common.train(config)

elastic.common.train = train
with tests.helpers.witness.watched(pathlib.Path(sys.argv.pop(1))):
    sys.exit(elastic.main(sys.argv[1:]))
"""
NODES = """
import json, os, pathlib, subprocess, sys, time
from ray.cluster_utils import Cluster

rows = pathlib.Path(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
cluster.add_node(num_cpus=1)
run = subprocess.Popen([sys.executable, *sys.argv[2:]], env=os.environ | {"RAY_ADDRESS": cluster.address})

def world_sizes():
    texts = [file.read_text() for file in sorted(rows.glob("*.jsonl"))]
    return [json.loads(text.splitlines()[0])["dp_size"] for text in texts if text.count("\\n") > 4]

def wait_for(size, seen):
    while run.poll() is None and size not in world_sizes()[seen:]:
        time.sleep(0.2)
    assert size in world_sizes()[seen:], world_sizes()
    return len(world_sizes())

try:
    seen = wait_for(1, 0)
    node = cluster.add_node(num_cpus=1)
    seen = wait_for(2, seen)
    cluster.remove_node(node, allow_graceful=False)
    wait_for(1, seen)
    status = run.wait()
finally:
    cluster.shutdown()  # its address would stay, for the next Ray of this machine to wait for
print("ranks of each start:", world_sizes())
sys.exit(status)
"""


def test_ranks_that_nodes_bring_and_take_along_cost_no_row(labelled_uri: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    words: list[object] = [sys.executable, "-c", NODES, rows, "-c", SLOWLY, rows, "--data", labelled_uri]
    words += ["--storage-path", tmp_path / "runs", "--num-workers", 2, "--epochs", 8]
    words += ["--global-batch-size", 32, "--checkpoint-every-steps", 3, "--resize-interval-s", 5]
    # Until Ray counts the lost node out, Ray Train waits for its CPUs: 240 s by what conftest.py sets, 60 by default.
    environment = os.environ | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60"}
    ran = subprocess.run(
        [*map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert each_row_once(rows, 8)


def test_rollouts_are_learned_from_once_however_often_the_trainer_is_killed(tmp_path: Path) -> None:
    """Their generators die and fail by themselves. A cursor of what was handed out loses what is under way."""
    command = [sys.executable, "-m", "jobs.examples.rollouts", "--out", str(tmp_path), "--prompts", "150"]
    policy = tmp_path / "policy.json"

    def step() -> int:
        return int(json.loads(policy.read_text())["step"]) if policy.exists() else -1

    for _ in range(2):
        before = step()
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        while process.poll() is None and step() <= before:
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    last = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert last.returncode == 0, last.stdout + last.stderr
    assert json.loads(policy.read_text())["learned"] == [1] * 150
