"""Proofs of real loaders' runs, from the records that they leave."""

import contextlib
import gc
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from jobs import verify
from raylance import torch_data
from raylance.api.loader import consumer_of
from raylance.audit.epoch import EpochAudit
from raylance.errors import ConfigError
from raylance.reports.reading import read_run
from raylance.samples.pack_tokens import PackTokens
from tests.helpers.images import make_images
from tests.helpers.own_orders import Reversed
from tests.helpers.proofs import values
from tests.helpers.scripts import run_script


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(150)}), pa.table({"id": np.arange(150, 330)}))


def open_data(uri: str, **changes: Any) -> raylance.Dataset:
    arguments: dict[str, Any] = {"filter": "id >= 30", "remainder": "drop", "seed": 3}
    return raylance.dataset(uri, **(arguments | changes))


def take(loader: raylance.RankLoader, steps: int, size: int = 40) -> dict[str, Any]:
    """So many steps, over as many epochs as they take; gives the state."""
    passes = (loader.iter_batches(global_batch_size=size) for _ in itertools.count())
    for batch in itertools.islice(itertools.chain.from_iterable(passes), steps):
        del batch
    return loader.state_dict()


def train(
    data: Any, folder: Path, steps: int, *, state: dict[str, Any] | None = None, size: int = 40, **options: Any
) -> dict[str, Any]:
    """Two ranks of this process take so many steps; both report at the end. Gives the state."""
    handles = data if isinstance(data, list) else [data] * 2
    world = len(handles)
    loaders = [
        handle.loader(rank=rank, world_size=world, runtime="threads", record=str(folder), **options)
        for rank, handle in enumerate(handles)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        take(loader, steps, size)
        with consumer_of(loader).reporting({}):
            pass
    saved = loaders[0].state_dict()
    for loader in loaders:
        loader.close()
    return saved


@pytest.mark.parametrize("kind", ["loader", "torch_data"])
def test_a_whole_pass_that_was_left_does_not_count(uri: str, tmp_path: Path, kind: str) -> None:
    """As Lightning's check before the training does with a validation: it began again, and the proof counted both."""
    data, passes = open_data(uri), contextlib.ExitStack()
    batches: Any
    if kind == "loader":
        loader = passes.enter_context(data.loader(runtime="threads", record=str(tmp_path)))
        batches = loader.batches(global_batch_size=40, whole=True)
    else:
        dataset = torch_data.IterableDataset(data, global_batch_size=40)
        batches = passes.enter_context(contextlib.closing(torch_data.Loader(dataset, whole=True, record=str(tmp_path))))
    with passes:
        for steps in (2, 99, 1, 99, 3):  # the steps of each pass, at most
            for _, batch in zip(range(steps), batches, strict=False):
                del batch
    proof = raylance.prove_run(tmp_path)
    assert proof.ok, proof
    assert values(proof) == [("data", 0, 2, "proven", 280), ("data", 2, 1, "proven", 120)]


RANK = """
import json, pathlib, sys, time, raylance
rank, world, steps, saves = RANK
with raylance.dataset(URI).loader(rank=rank, world_size=world, runtime="threads", record=FOLDER) as loader:
    if STATE:
        loader.load_state_dict(json.loads(STATE))
    for step, batch in enumerate(loader.iter_batches(global_batch_size=40), 1):
        pathlib.Path(FOLDER, f"began-{rank}-of-{world}").touch()
        while len(list(pathlib.Path(FOLDER).glob(f"began-*-of-{world}"))) < world:
            time.sleep(0.01)  # ranks of one start live at the same time
        if step == 2 and saves:
            print("STATE", json.dumps(loader.state_dict()))
        if step == steps:
            break
"""


@pytest.mark.parametrize("all_save", [True, False])
def test_ranks_in_processes_of_their_own_are_one_start(uri: str, tmp_path: Path, all_save: bool) -> None:
    """Outside of Ray Train, nothing names a start. Each rank must save its place, or its rows before are not known."""

    def run(rank: int, world: int, steps: int, state: str, *, saves: bool) -> str:
        names = f"URI, FOLDER, STATE, RANK = {uri!r}, {str(tmp_path)!r}, {state!r}, {(rank, world, steps, saves)}\n"
        own = tmp_path / f"of {rank}"
        own.mkdir(exist_ok=True)
        printed = run_script(names + RANK, own)
        return next((line[6:] for line in printed.splitlines() if line.startswith("STATE")), "")

    with ThreadPoolExecutor() as ranks:
        first = ranks.submit(run, 0, 2, 3, "", saves=True)
        ranks.submit(run, 1, 2, 3, "", saves=all_save).result()
        state = first.result()
    run(0, 1, 99, state, saves=False)
    proof = raylance.prove_run(tmp_path)
    lines = [line for line in str(proof).splitlines() if "start" in line]
    assert [line.partition(": ")[2] for line in lines] == [
        "began at epoch 0, position 0; there was no checkpoint of it",
        "restored epoch 0, position 80",
    ]
    assert proof.ok == all_save


def test_a_run_is_proven_over_its_ranks_and_starts(uri: str, tmp_path: Path) -> None:
    data = open_data(uri)
    state = train(data, tmp_path, 5)
    assert values(raylance.prove_run(tmp_path)) == [("data", 0, 1, "proven", 200)]
    train(data, tmp_path, 4, state=state)  # was rolled back
    train([data] * 3, tmp_path, 11, state=state, size=32)
    proof = raylance.prove_run(tmp_path)
    assert proof.ok
    assert values(proof) == [("data", 0, 1, "proven", 296), ("data", 1, 1, "proven", 256)]
    assert proof.datasets[0].epochs[0].left_out == 4
    assert proof.verdict == "; ".join(str(proof).splitlines())


def test_ranks_with_unlike_plans_are_a_fault(uri: str, tmp_path: Path) -> None:
    """Each rank had every row of its own plan: 300 rows over both, of which some are the same."""
    handles = [open_data(uri, remainder="ragged", seed=seed) for seed in (3, 4)]
    train(handles, tmp_path, 8)
    proof = raylance.prove_run(tmp_path)
    assert values(proof) == [("data", 0, 1, "fault", 300)]
    assert not proof.ok
    assert len(proof.faults) == 1
    assert raylance.explain_run(tmp_path).rows == proof.verdict
    page = Path(raylance.report_run(tmp_path, tmp_path / "o.html")).read_text()
    assert f'<td class="bad">{proof.datasets[0].epochs[0].text}' in page


def test_an_order_of_ones_own_is_compared_as_far_as_it_is_known(uri: str, tmp_path: Path) -> None:
    train(open_data(uri, order=Reversed(), remainder="ragged"), tmp_path, 10)
    found = values(raylance.prove_run(tmp_path))
    assert [status for _, _, _, status, _ in found] == ["proven", "counted"]
    assert raylance.prove_run(tmp_path, order=Reversed()).ok


def test_a_dataset_that_is_gone_leaves_counts(uri: str, tmp_path: Path) -> None:
    moved = str(tmp_path / "moved.lance")
    shutil.copytree(uri, moved)
    run = tmp_path / "run"
    train(open_data(moved), run, 8)
    shutil.rmtree(moved)
    proof = raylance.prove_run(run)
    assert not proof.faults
    assert values(proof)[0] == ("moved", 0, 1, "counted", 280)
    assert not raylance.prove_run(run).ok
    assert raylance.prove_run(run, uri=uri).ok, "where it lies now"
    with pytest.raises(ConfigError, match="dataset='val': the run has 'moved'"):
        raylance.prove_run(run, dataset="val")


@pytest.mark.parametrize("how", ["moved", "copied", "linked", "renamed"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_run_continues_with_files_that_lie_elsewhere(
    uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, is_mixed: bool
) -> None:
    old, new, run = tmp_path / "a" / "data.lance", tmp_path / "b" / "data.lance", tmp_path / "run"
    if how == "renamed":
        new = tmp_path / "a" / "other.lance"
    shutil.copytree(uri, old)
    new.parent.mkdir(exist_ok=True)

    def opened(place: Path) -> raylance.Dataset:
        data = open_data(str(place), remainder="ragged")
        return raylance.mix({"one": (data, 2), "two": (open_data(uri), 1)}) if is_mixed else data

    state = train(opened(old), run, 3)
    ways = {"linked": lambda: new.symlink_to(old), "copied": lambda: shutil.copytree(old, new)}
    ways.get(how, lambda: old.rename(new))()
    caplog.clear()
    state = train(opened(new), run, 3, state=state)
    assert caplog.text.count(f"saved {str(old)!r}, now {str(new)!r}") == 2, "one warning a loader"
    train(opened(new), run, 9, state=state)
    proof = raylance.prove_run(run)
    assert proof.ok, str(proof)
    assert len(proof.datasets) == 1
    assert EpochAudit(opened(new), state=state).count().ok
    lance.write_dataset(pa.table({"id": np.arange(330)}), new, mode="overwrite")
    with pytest.raises(raylance.StateError, match="identity"):
        train(opened(new), run, 1, state=state)


@pytest.mark.parametrize(
    "pack", [PackTokens("tokens", length=32), raylance.Pack(["tokens"], length=32, policy="whole", eos_id=7)]
)
def test_packed_documents_are_proven_by_their_sequences(
    write_dataset: Callable[..., str], tmp_path: Path, pack: Any
) -> None:
    """The record says how they were packed: before, only whoever gave all arguments of `Pack` again had a proof."""
    texts = write_dataset(pa.table({"tokens": [list(range(row % 50 + 1)) for row in range(100)]}))
    data = raylance.dataset(texts, samples=pack, remainder="ragged", order="row")
    state = train(data, tmp_path, -(-len(data) // 10), size=10)
    proof = raylance.prove_run(tmp_path)
    assert values(proof) == [("data", 0, 1, "proven", len(data))]
    assert proof.ok
    assert verify.main(["--run", str(tmp_path)]) == 0
    again = raylance.audit.reopen(state, remainder="ragged")
    assert repr(again) == repr(data)
    of_0_11 = {name: value for name, value in state.items() if name != "windows"}
    with data.loader(runtime="threads") as loader:
        loader.load_state_dict(of_0_11)
        assert loader.state_dict() | {"dp_size": 2} == state


def test_windows_of_pictures_are_proven_without_a_decoder(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    stored = {"episode": np.repeat(np.arange(9), 10), "image": pa.array(make_images(90), pa.binary())}
    data = raylance.dataset(
        write_dataset(pa.table(stored)),
        samples=raylance.Windows(episode="episode", offsets={"image": [-2, 0]}, at_ends="drop"),
        decode=raylance.Image("image", size=8),
    )
    train(data, tmp_path, len(data) // 30, size=30)
    assert values(raylance.prove_run(tmp_path)) == [("data", 0, 1, "proven", 60)]


def test_masked_rows_were_delivered_and_padding_is_no_row(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    images = make_images(90)
    images[17] = b"no picture"
    data = raylance.dataset(
        write_dataset(pa.table({"image": pa.array(images, pa.binary())})),
        decode=raylance.Image("image", size=8),
        on_bad_row="mask",
        remainder="pad",
    )
    train(data, tmp_path, 3)
    proof = raylance.prove_run(tmp_path)
    assert values(proof) == [("data", 0, 1, "proven", 90)]
    assert proof.datasets[0].epochs[0].padding == 30
    assert sum(float(each.at("masked_rows", each.last)) for each in read_run(tmp_path).records) == 1


@pytest.mark.parametrize("damage", ["older", "interval"])
def test_a_record_without_whole_digests_proves_nothing(uri: str, tmp_path: Path, damage: str) -> None:
    train(open_data(uri), tmp_path, 7)
    for path in (tmp_path / "raylance").glob("*.arrow"):
        table = pa.feather.read_table(path)
        facts = json.loads(table.schema.metadata[b"raylance"])
        if damage == "older":  # raylance recorded none
            del facts["digest"]
        else:
            facts["digest"]["intervals"][0][6] = -1
        pa.feather.write_feather(table.replace_schema_metadata({"raylance": json.dumps(facts)}), path)
    proof = raylance.prove_run(tmp_path)
    assert not proof.ok
    assert {status for _, _, _, status, _ in values(proof)} <= {"unproven"}


def test_two_loaders_of_one_dataset_are_two_datasets_to_a_run(uri: str, tmp_path: Path) -> None:
    data = open_data(uri)

    def batches(loader: raylance.RankLoader) -> Iterator[Any]:
        return iter(loader.iter_batches(global_batch_size=90))

    options: dict[str, Any] = {"runtime": "threads", "record": str(tmp_path)}
    with data.loader(**options) as one, data.loader(**options) as other:
        for _ in zip(batches(one), batches(other), strict=True):
            pass
    with data.loader(**options) as again:
        list(batches(again))
    run = read_run(tmp_path)
    assert sorted(str(each.facts["dataset"]) for each in run.records) == ["data", "data", "data-2"]
    assert {float(each.at("rows", each.last)) for each in run.records} == {270.0}
    assert len({each.name for each in run.records}) == 3
    found = values(raylance.prove_run(tmp_path))
    assert found == [("data", 0, 1, "unproven", 540), ("data-2", 0, 1, "proven", 270)]


def test_the_job_proves_a_run(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status says whether all is proven."""
    good, bad, own, out = tmp_path / "good", tmp_path / "bad", tmp_path / "own", tmp_path / "out.json"
    train(open_data(uri), good, 8)
    train([open_data(uri, seed=seed) for seed in (3, 4)], bad, 8)
    train(open_data(uri, order=Reversed()), own, 8)
    assert verify.main(["--run", str(good), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("OK: data, epoch 0: 280 rows were handed out: every")
    assert json.loads(out.read_text())["datasets"][0]["epochs"][0]["status"] == "proven"
    assert verify.main(["--run", str(bad)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAULT: data, epoch 0: 280 rows")
    assert verify.main(["--run", str(own)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("NOT PROVEN: data, epoch 0: 280 rows were counted, not")
    assert verify.main(["--run", str(tmp_path)]) == 2
    assert "holds no record" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        verify.main(["--run", str(good), "--step", "3"])
    assert "--step means nothing with --run" in capsys.readouterr().err


def test_a_storage_that_fails_leaves_what_is_not_proven(uri: str, tmp_path: Path) -> None:
    """It goes away in mid-epoch; then the process is gone, as far as the storage knows."""
    folder, kept = tmp_path / "run" / "raylance", tmp_path / "kept" / "raylance"
    with open_data(uri).loader(runtime="threads", record=str(folder.parent)) as loader:
        for step, batch in enumerate(loader.iter_batches(global_batch_size=40)):
            del batch
            if step == 2:
                with consumer_of(loader).reporting({}):
                    pass
                shutil.copytree(folder, kept)
                shutil.rmtree(folder)
                folder.write_text("no folder")
            if step == 4:
                with consumer_of(loader).reporting({}):
                    pass
        state = loader.state_dict() | {"epoch": 0, "position": 200}
        folder.unlink()
    found = values(raylance.prove_run(tmp_path / "run"))
    assert found == [("data", 0, 1, "proven", 280)], "what the storage missed is written when it is there again"
    assert values(raylance.prove_run(tmp_path / "kept")) == [("data", 0, 1, "proven", 120)]
    train([open_data(uri)], tmp_path / "kept", 2, state=state)
    proof = raylance.prove_run(tmp_path / "kept")
    assert not proof.ok
    assert values(proof) == [("data", 0, 1, "unproven", 200)]


def test_a_loader_that_is_gone_gives_its_name_back(uri: str, tmp_path: Path) -> None:
    for _ in range(2):
        take(open_data(uri).loader(runtime="threads", record=str(tmp_path)), 7)
        gc.collect()
    assert read_run(tmp_path).datasets == ["data"]


def test_set_epoch_rolls_nothing_back(uri: str, tmp_path: Path) -> None:
    with open_data(uri).loader(runtime="threads", record=str(tmp_path)) as loader:
        take(loader, 5)
        loader.set_epoch(0)
        take(loader, 7)
        loader.set_epoch(2**40)
        take(loader, 1)
    proof = raylance.prove_run(tmp_path)
    assert not proof.ok
    assert values(proof)[0] == ("data", 0, 1, "unproven", 480)
    assert values(proof)[1] == ("data", 1, 2**40 - 1, "unproven", 0)


@pytest.mark.promise("P1", "P10")
@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("steps", [2, 3, 5, 12])
def test_a_spike_is_passed_over_after_a_return_to_a_checkpoint(
    uri: str, tmp_path: Path, begun: int, steps: int
) -> None:
    """`seek` after a restore was a lost record, or rows that were rolled back counted: 7 steps of 40 are an epoch."""
    data = open_data(uri)
    folder = tmp_path / "run"
    state = train(data, folder, 2)
    train(data, folder, 3, state=state)  # the spike, whose steps are rolled back
    loaders = [data.loader(rank=rank, world_size=2, runtime="threads", record=str(folder)) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(state)

    def batches_of(loader: raylance.RankLoader) -> Iterator[Any]:
        while True:
            yield from loader.iter_batches(global_batch_size=40, with_row_offset=True)

    seen: list[int] = []
    for number, batches in enumerate(zip(*map(batches_of, loaders), strict=True)):
        seen += [int(row) for batch in batches for row in batch["_rowoffset"]]
        if number == begun:
            for loader in loaders:
                loader.skip(steps, reason="loss spike")
        if loaders[0].global_step >= 21:
            break
    for loader in loaders:
        loader.close()
    assert len(seen) == 40 * (21 - 2 - steps)
    proof = raylance.prove_run(folder)
    assert proof.ok, proof
    (found,) = proof.datasets
    assert sum(one.rows * one.epochs for one in found.epochs) == len(seen) + 80
    where = raylance.runs.seen(folder, [*range(330)])
    assert sorted(where[(where.epoch > 0) | (where.position >= 80)].row_offset) == sorted(seen)


def test_what_no_record_holds_is_not_proven(uri: str, tmp_path: Path) -> None:
    with open_data(uri).loader(runtime="threads", record=False) as loader:
        state = take(loader, 14)
    train([open_data(uri)], tmp_path, 7, state=state)
    proof = raylance.prove_run(tmp_path)
    assert not proof.ok
    assert values(proof)[0] == ("data", 0, 2, "unproven", 0)


def test_a_dataset_that_grew_between_two_starts_is_no_fault(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    uri = write_dataset(pa.table({"id": np.arange(200)}))
    train([open_data(uri, filter=None)], tmp_path, 5)
    lance.write_dataset(pa.table({"id": np.arange(200, 280)}), uri, mode="append")
    with open_data(uri, filter=None).loader(runtime="threads", record=str(tmp_path)) as loader:
        loader.set_epoch(1)
        take(loader, 7)
    found = values(raylance.prove_run(tmp_path))
    assert found == [("data", 0, 1, "proven", 200), ("data", 1, 1, "proven", 280)]


def test_data_that_was_written_again_is_not_what_an_order_of_ones_own_was_compared_with(
    uri: str, tmp_path: Path
) -> None:
    moved = str(tmp_path / "data.lance")
    shutil.copytree(uri, moved)
    train([open_data(moved, order=Reversed(), remainder="ragged")], tmp_path / "run", 8)
    assert raylance.prove_run(tmp_path / "run").ok
    shutil.rmtree(moved)
    for rows, mode in ((np.arange(150), "create"), (np.arange(150, 330), "append")):
        lance.write_dataset(pa.table({"id": rows + 1000 * (rows >= 30)}), moved, mode=mode)  # the same rows selected
    proof = raylance.prove_run(tmp_path / "run")
    assert not proof.ok
    assert [status for _, _, _, status, _ in values(proof)] == ["counted"]
