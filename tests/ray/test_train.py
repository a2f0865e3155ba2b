"""One run of Ray Train that is killed, stopped and resized. Each test reads what the run has left."""

import dataclasses
import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from ray.train.torch import TorchTrainer

import raylance
from jobs import verify
from raylance.reports.progress import events
from raylance.reports.reading import Run, read_run
from tests.helpers.cluster import CPUS

BATCH, ROWS = 48, 953
KILLED, STOPPED, EVERY = 8, 13, 3  # steps: rank 1 is killed in the first one, all end in the second; reports
LIVE = [row for row in range(1003) if not 200 <= row < 250]
Steps = dict[int, list[tuple[int, int]]]
"""(row, byte sum) of each global batch, by the position after it; ranks one after the other."""


def open_train(uri: str, **changes: Any) -> raylance.Dataset:
    image = raylance.Image("image", size=(16, 16), augment=raylance.RandomResizedCrop(), hflip=0.5)
    order = raylance.WindowShuffle(shard_rows=20, window_shards=2, lanes=12)
    arguments = {"columns": ["image", "id"], "decode": image, "order": order, "seed": 11, "remainder": "ragged"}
    return raylance.dataset(uri, **(arguments | changes))


def line_of(loader: raylance.RankLoader, batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "position": loader.state_dict()["position"] or ROWS,  # after the last step comes the start of the next epoch
        "rank": loader.rank,
        "rows": batch["_rowoffset"].tolist(),
        "bytes": batch["image"].to(torch.int64).flatten(1).sum(1).tolist(),
    }


def train_fn(config: dict[str, Any]) -> None:
    loader, val, whole = (ray.train.get_dataset_shard(name) for name in ("train", "val", "whole"))
    saved = raylance.restore(loader)
    step = 0 if saved is None else saved["step"]
    killed = Path(config["log"], "killed")
    place = f"{loader.world_size}-of-{'no' if saved is None else 'a'}-checkpoint-{loader.rank}"
    with open(
        Path(config["log"], f"{place}.jsonl"), "a", buffering=1
    ) as log:  # a killed process leaves what it had seen
        for batch in loader.iter_torch_batches(global_batch_size=BATCH, with_row_offset=True):
            print(json.dumps(line_of(loader, batch)), file=log)
            step += 1
            if step % EVERY == 0:
                state = {"step": step, "weights": torch.full((2,), float(step))}
                raylance.report({"step": step}, loader, state=state)
            if step == KILLED and loader.rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STOPPED and loader.world_size == 2:
                break
    seen = {"decoders": loader.stats()["decoders"], "epoch": loader.epoch}
    for name, each in (("val", val), ("whole", whole)) if loader.world_size == 2 else ():
        seen[name] = [batch["id"].tolist() for batch in each.iter_torch_batches(batch_size=64)]
    Path(config["log"], f"{place}.json").write_text(json.dumps(seen))


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the run has left."""

    folder: Path
    log: Path
    result: ray.train.Result

    @property
    def starts(self) -> dict[str, list[list[dict[str, Any]]]]:
        """The lines of each rank, by its start."""
        found: dict[str, list[list[dict[str, Any]]]] = {}
        for path in sorted(self.log.glob("*.jsonl")):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found.setdefault(path.stem.rpartition("-")[0], []).append(lines)
        return found

    @property
    def begins(self) -> list[int]:
        """The position at which each start resumed. Ray Train may not have heard of the last report before a kill."""
        return [ranks[0][0]["position"] - BATCH for ranks in sorted(self.starts.values(), key=_first)]

    @property
    def seen(self) -> dict[str, Any]:
        """What each rank wrote as it ended."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.log.glob("*.json"))}

    @property
    def run(self) -> Run:
        return read_run(str(self.folder))


def _first(ranks: list[list[dict[str, Any]]]) -> int:
    return int(ranks[0][0]["position"])


@pytest.fixture(scope="module")
def trained(images_uri: str, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Trained:
    """Rank 1 of 2 is killed in step 8, and both start again at a report; they end in step 13; one continues at step 12.

    Two ranks hold every CPU, so that shard actors decode.
    """
    storage = tmp_path_factory.mktemp("runs")
    log = storage / "log"
    log.mkdir()
    plain = open_train(images_uri, decode=None, columns=["id"], order="sequential")
    result = None
    for workers, cpus, decoders in ((2, CPUS / 2, "auto"), (1, 1, 0)):
        result = TorchTrainer(
            train_fn,
            train_loop_config={"log": str(log)},
            scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": cpus}),
            run_config=ray.train.RunConfig(
                name="run",
                storage_path=str(storage),
                failure_config=ray.train.FailureConfig(max_failures=1),
                callbacks=[raylance.FailFast()],
            ),
            datasets={"train": open_train(images_uri), "val": plain, "whole": plain},
            dataset_config=raylance.DataConfig(datasets_to_split=["train", "val"], num_decoders=decoders),
        ).fit()
    assert result is not None
    return Trained(storage / "run", log, result)


@pytest.fixture(scope="module")
def undisturbed(images_uri: str) -> Steps:
    """The same epoch on one rank, by threads."""
    steps: Steps = {}
    with open_train(images_uri).loader(runtime="threads") as loader:
        for batch in loader.iter_torch_batches(global_batch_size=BATCH, with_row_offset=True):
            line = line_of(loader, batch)
            steps[line["position"]] = list(zip(line["rows"], line["bytes"], strict=True))
    assert len({row for step in steps.values() for row, _ in step}) == ROWS
    return steps


@pytest.mark.promise("P1", "P3", "P4", "P5", "P6")
def test_global_batches_are_those_of_an_undisturbed_run_to_the_byte(trained: Trained, undisturbed: Steps) -> None:
    starts = sorted(trained.starts.values(), key=_first)
    bounds = [*trained.begins, ROWS]
    assert bounds[1] in (EVERY * BATCH, 2 * EVERY * BATCH)
    assert (bounds[0], bounds[2]) == (0, 12 * BATCH)
    steps: dict[int, list[tuple[int, int]]] = {}
    for ranks, begin, end in zip(starts, bounds, bounds[1:], strict=False):
        for lines in ranks:
            for line in lines:
                if begin < line["position"] <= end:
                    steps.setdefault(line["position"], []).extend(zip(line["rows"], line["bytes"], strict=True))
    assert steps == undisturbed
    rows = [row for step in steps.values() for row, _ in step]
    assert len(rows) == len(set(rows)) == ROWS


@pytest.mark.promise("P6")
def test_steps_that_were_taken_twice_had_the_same_rows(trained: Trained, undisturbed: Steps) -> None:
    for ranks in trained.starts.values():
        for line in (line for lines in ranks for line in lines):
            assert set(line["rows"]) <= {row for row, _ in undisturbed[line["position"]]}


@pytest.mark.promise("P2")
def test_all_ranks_of_a_start_make_the_same_steps(trained: Trained) -> None:
    ends = [[lines[-1]["position"] for lines in ranks] for ranks in sorted(trained.starts.values(), key=_first)]
    assert ends[1:] == [[STOPPED * BATCH] * 2, [ROWS]]
    assert ends[0][1] == KILLED * BATCH, "the rank that was killed"
    assert ends[0][0] >= 2 * EVERY * BATCH, "a report waits for all ranks"


def test_the_loader_stands_where_the_run_ended(trained: Trained, images_uri: str) -> None:
    assert {rank["epoch"] for name, rank in trained.seen.items() if name.startswith("1")} == {1}
    with open_train(images_uri).loader(runtime="threads") as loader:
        saved = raylance.restore(loader, trained.result.checkpoint)
        assert saved is not None
        assert (saved["step"], saved["weights"].tolist()) == (18, [18, 18])
        assert (loader.epoch, loader.state_dict()["position"]) == (0, 18 * BATCH)


@pytest.mark.promise("P5")
def test_the_checkpoint_says_which_shards_are_complete(trained: Trained, images_uri: str, undisturbed: Steps) -> None:
    assert trained.result.checkpoint is not None
    with trained.result.checkpoint.as_directory() as directory:
        state = json.loads(Path(directory, "raylance_state.json").read_text())
    shards = state["completed_shards"]
    assert 0 < shards["complete"] < shards["shards"] == 48
    consumed = {row for at, step in undisturbed.items() if at <= 18 * BATCH for row, _ in step}
    loader = open_train(images_uri).loader()
    loader.load_state_dict(state)
    assert len(loader.completed_shards()) == shards["complete"]
    for shard in loader.completed_shards().tolist():
        assert consumed.issuperset(range(20 * shard, min(20 * shard + 20, ROWS)))


def test_each_rank_has_its_share_of_what_is_split_and_all_of_the_rest(trained: Trained) -> None:
    ranks = [rank for name, rank in trained.seen.items() if name.startswith("2")]
    assert [[row for ids in rank["whole"] for row in ids] for rank in ranks] == [LIVE] * 2
    shared = [rank["val"] for rank in ranks]
    assert [row for step in zip(*shared, strict=True) for ids in step for row in ids] == LIVE


def test_without_a_free_cpu_shard_actors_decode(trained: Trained) -> None:
    assert {rank["decoders"] for name, rank in trained.seen.items() if name.startswith("2")} == {0}


def test_the_records_name_each_start_and_the_place_where_it_resumed(trained: Trained) -> None:
    run = trained.run
    starts = sorted((record.started, record.rank) for record in run.of("train"))
    assert (run.name, run.main, len(starts)) == ("run", "train", 2 + 2 + 1)
    assert sorted(rank for _, rank in starts[:2]) == [0, 1]
    resumed = [what["position"] for _, _, kind, what in events(run) if kind == "resume"]
    _, second, third = trained.begins
    assert resumed == [second] * 2 + [third]


def test_the_records_hold_each_report(trained: Trained) -> None:
    reports = [
        what["metrics"]["step"] for _, record, kind, what in events(trained.run) if kind == "report" and not record.rank
    ]
    assert sorted(set(reports)) == [3, 6, 9, 12, 15, 18]


def test_the_certificates_of_an_epoch_are_those_of_its_last_start(trained: Trained) -> None:
    run = trained.run
    certificates = [what for _, record, kind, what in events(run) if kind == "epoch" and record in run.of("train")]
    assert {one["rank"] for one in certificates} == {0}
    assert sum(one["rows"] for one in certificates) == ROWS - 12 * BATCH


@pytest.mark.promise("P1", "P5", "P10")
def test_the_run_is_proven_over_its_starts(trained: Trained) -> None:
    """A validation set, which nobody restores, failed the proof of each run that was started twice."""
    proof = raylance.prove_run(trained.folder)
    assert proof.ok, proof
    proven = [(one.dataset, one.who, [(each.status, each.rows) for each in one.epochs]) for one in proof.datasets]
    assert proven == [
        ("train", "", [("proven", ROWS)]),
        ("val", "", [("proven", ROWS)]),
        ("whole", "each of 2 ranks", [("proven", ROWS)]),
    ]
    assert not proof.notes
    for begin in trained.begins[1:]:
        assert sum(line.startswith("train") and f"position {begin}" in line for line in proof.starts) == 1


def test_the_shell_proves_it_too(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--run", str(trained.folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("OK")


@pytest.mark.promise("P10")
def test_the_verdict_has_the_proof(trained: Trained) -> None:
    verdict = raylance.explain_run(trained.folder)
    assert verdict.rows.splitlines()[0] == raylance.prove_run(trained.folder, dataset="train").verdict
    assert verdict.limit != "unknown"


def test_a_run_with_another_seed_is_refused_before_it_starts(trained: Trained, images_uri: str) -> None:
    with open_train(images_uri, seed=12).loader() as loader, pytest.raises(raylance.StateError, match="11.*12"):
        raylance.restore(loader, trained.result.checkpoint)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="an extra, which the wheel does not bring")
def test_the_report_is_one_page_with_pictures(trained: Trained) -> None:
    page = Path(raylance.report_run(str(trained.folder))).read_text()
    assert "3 starts" in page
    assert f'<td class="good">{ROWS} rows were handed out' in page
    assert '<img src="data:image/png;base64' in page, "the first batch"
