"""`Loader(record=…)`: `prove_run` proves what was handed out under DataLoader, and nothing else."""

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.errors import ConfigError
from raylance.torch_data import IterableDataset, Loader, MapDataset, RowSampler
from tests.helpers import data_loaders
from tests.helpers.data_loaders import STYLES
from tests.helpers.images import make_images
from tests.helpers.proofs import values


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(330)}), max_rows_per_file=150)


def open_data(uri: str, **changes: Any) -> raylance.Dataset:
    return raylance.dataset(uri, **({"filter": "id >= 30", "remainder": "ragged", "seed": 3} | changes))


def make(handle: raylance.Dataset, style: str, folder: Path, *, size: int = 40, **options: Any) -> Loader:
    return data_loaders.make(Loader, handle, style, size, **({"record": str(folder)} | options))[1]


def take(loader: Loader, steps: int) -> None:
    for batch in itertools.islice(loader, steps):
        assert type(batch) is dict
        assert set(batch) <= {"id", "_valid"}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_what_workers_made_is_proven(uri: str, style: str, remainder: str, tmp_path: Path) -> None:
    """Two workers that persist, over two epochs, and an iteration that is left half-way with batches ahead."""
    options: dict[str, Any] = {"workers": 2, "persistent_workers": True, "prefetch_factor": 3}
    loader = make(open_data(uri, remainder=remainder), style, tmp_path, **options)
    take(loader, 3)
    found = values(raylance.prove_run(tmp_path))
    assert found == [("data", 0, 1, "proven", 120)], "batches that wait in the workers do not count"
    for _ in range(2):
        take(loader, 9)
    proof = raylance.prove_run(tmp_path)
    assert proof.ok
    assert values(proof) == [("data", 0, 2, "proven", {"drop": 280, "pad": 300}[remainder])]
    ((epoch,),) = (each.epochs for each in proof.datasets)
    assert (epoch.left_out, epoch.padding) == {"drop": (20, 0), "pad": (0, 20)}[remainder]
    assert raylance.explain_run(tmp_path).rows == proof.verdict


def keep(uri: str, style: str, folder: Path, ranks: int, steps: int, state: Any = None, **options: Any) -> Any:
    """Each rank takes some steps, or those that are left of the epoch, and then keeps a state."""
    loaders = [make(open_data(uri), style, folder, dist_info=(rank, ranks), **options) for rank in range(ranks)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        take(loader, steps)
        state_here = loader.state_dict()
        take(loader, 1)  # is rolled back if a run continues at the state
    for loader in loaders:
        loader.close()
    return state_here


@pytest.mark.parametrize("style", STYLES)
def test_a_run_that_continues_in_mid_epoch_on_other_ranks_is_proven(uri: str, style: str, tmp_path: Path) -> None:
    state = keep(uri, style, tmp_path, 2, 3, workers=1)
    assert state["position"] == 120
    keep(uri, style, tmp_path, 3, 100, state, size=50)
    proof = raylance.prove_run(tmp_path)
    assert proof.ok, proof
    assert values(proof) == [("data", 0, 1, "proven", 300), ("data", 1, 1, "proven", 50)]


def test_sequences_of_a_run_that_moves_to_torch_in_mid_epoch(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    """Each token comes once in each epoch. The proof says that it counts sequences by their numbers."""
    data = write_dataset(pa.table({"tokens": [list(range(5 * row, 5 * row + 5)) for row in range(20)]}))
    pack = raylance.Pack("tokens", 16)
    handle = raylance.dataset(data, samples=pack, order="sequential", remainder="ragged")
    with handle.loader(runtime="threads", record=str(tmp_path)) as ranked:
        for _ in ranked.iter_batches(global_batch_size=2):
            pass
        seen = [*itertools.islice(ranked.iter_batches(global_batch_size=2), 2)]
        state = ranked.state_dict()
    loader = make(handle, "map", tmp_path, size=2)
    loader.load_state_dict(state)
    tokens = np.concatenate([np.asarray(batch["input_ids"]).ravel() for batch in (*seen, *loader)])
    loader.close()
    assert np.sort(tokens[np.flatnonzero(tokens)]).tolist() == list(range(1, 100)), "0 is also padding"
    proof = raylance.prove_run(tmp_path, samples=pack)
    assert proof.ok, proof
    assert "by their numbers" in str(proof)


class Short(MapDataset):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return super().__getitems__(indices)[1:]


class Skipping(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), 1, None)


class Mixing(MapDataset):
    """Changes rows, with the help of rows that are not of the batch."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        rows = super().__getitems__(indices)
        others = super().__getitems__([0] * len(rows))
        return [{"id": row["id"] + other["id"]} for row, other in zip(rows, others, strict=True)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("style", STYLES)
def test_rows_that_were_lost_are_not_proven(uri: str, style: str, workers: int, tmp_path: Path) -> None:
    loader = make(open_data(uri), style, tmp_path, workers=workers, kinds=(Skipping, Short))
    take(loader, 8)
    proof = raylance.prove_run(tmp_path)
    assert not proof.ok
    assert [status for _, _, _, status, _ in values(proof)] == ["fault"]


def test_a_subclass_that_changes_rows_is_proven(uri: str, tmp_path: Path) -> None:
    take(make(open_data(uri), "map", tmp_path, kinds=(IterableDataset, Mixing)), 8)
    assert raylance.prove_run(tmp_path).ok


class Batch:
    """A batch of a type that torch does not know, but asks to pin itself."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.is_pinned = rows, False

    def pin_memory(self) -> "Batch":
        self.is_pinned = True
        return self


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_any_type_are_handed_out_as_they_were_made(
    uri: str, style: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not workers:  # torch then asks batches to pin themselves in this thread, which a Batch does without a device
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    loader = make(open_data(uri), style, tmp_path, workers=workers, collate_fn=Batch, pin_memory=True)
    batches = list(loader)
    assert {type(batch) for batch in batches} == {Batch}
    assert {batch.is_pinned for batch in batches} == {torch.accelerator.is_available()}
    first = batches[0].rows
    assert len(first["id"] if style == "iterable" else first) == 40
    assert raylance.prove_run(tmp_path).ok


def test_masked_rows_count_and_are_named(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    images = make_images(60)
    images[7] = images[7][:100]
    uri = write_dataset(pa.table({"image": pa.array(images, pa.binary()), "id": np.arange(60)}))
    for style in STYLES:
        decode = raylance.Image("image", size=16)
        data = open_data(uri, filter=None, decode=decode, on_bad_row="mask", max_bad_rows=None)
        assert sum(int((~batch["_valid"]).sum()) for batch in make(data, style, tmp_path / style)) == 1
        proof = raylance.prove_run(tmp_path / style)
        assert proof.ok, proof
        assert values(proof) == [("data", 0, 1, "proven", 60)]
        page = Path(raylance.report_run(tmp_path / style, tmp_path / "report.html")).read_text()
        assert "Truncated File Read" in page


def test_mixtures_repeats_and_peers_are_proven(uri: str, write_dataset: Callable[..., str], tmp_path: Path) -> None:
    other = write_dataset(pa.table({"id": np.arange(1000, 1100)}))
    mixed = raylance.mix({"a": (open_data(uri), 3), "b": (open_data(other, filter=None), 1)})
    drawn = open_data(uri, order=raylance.ClassBalanced(column="id", rows_per_epoch=100))
    for style, (name, data) in itertools.product(STYLES, {"mixed": mixed, "drawn": drawn}.items()):
        folder = tmp_path / name / style
        for rank in range(4):
            for _ in (loader := make(data, style, folder, dist_info=(rank, 4), ranks_per_replica=2)):
                pass
            loader.close()
        proof = raylance.prove_run(folder)
        assert proof.ok, proof
        assert values(proof)[0][4] == 100 or name == "mixed"


@pytest.mark.parametrize("style", STYLES)
def test_an_epoch_that_came_again_is_not_proven(uri: str, style: str, tmp_path: Path) -> None:
    loader = make(open_data(uri), style, tmp_path)
    take(loader, 3)
    loader.set_epoch(0)
    take(loader, 100)
    proof = raylance.prove_run(tmp_path)
    assert not proof.ok
    assert values(proof) == [("data", 0, 1, "unproven", 420)]


def test_an_epoch_of_which_no_step_is_left_has_ended(uri: str, tmp_path: Path) -> None:
    loader = make(open_data(uri, remainder="drop"), "map", tmp_path)
    take(loader, 5)
    state = loader.state_dict()
    loader.close()
    loader = make(open_data(uri, remainder="drop"), "map", tmp_path, size=150)
    loader.load_state_dict(state)
    assert list(loader) == []
    take(loader, 1)
    proof = raylance.prove_run(tmp_path)
    assert proof.ok, proof
    assert values(proof)[0] == ("data", 0, 1, "proven", 200)


def test_a_loader_that_is_gone_gives_its_name_back(uri: str, tmp_path: Path) -> None:
    """A record held its loader, so that the next one of the same data was recorded as another dataset."""
    for _ in range(2):
        take(make(open_data(uri), "map", tmp_path, name="train"), 8)
        gc.collect()
    assert {dataset for dataset, *_ in values(raylance.prove_run(tmp_path))} == {"train"}


@pytest.mark.parametrize("style", STYLES)
def test_a_new_loader_of_the_same_steps_continues_the_run(uri: str, style: str, tmp_path: Path) -> None:
    """A script that makes one for each pass."""
    data, folder = open_data(uri), str(tmp_path)
    steps: Any = (IterableDataset if style == "iterable" else RowSampler)(data, global_batch_size=40)
    arguments = (steps,) if style == "iterable" else (MapDataset(data), steps)
    for _ in range(3):
        take(Loader(*arguments, record=folder), 6)
    proof = raylance.prove_run(folder)
    assert proof.ok, proof
    assert values(proof) == [("data", 0, 1, "proven", 300), ("data", 1, 1, "proven", 240)]


@pytest.mark.parametrize("record", ["", 3, Path("run")])
def test_a_record_that_is_not_a_folder_is_refused(uri: str, record: Any) -> None:
    with pytest.raises(ConfigError, match="record="):
        make(open_data(uri), "map", Path(), record=record)


@pytest.mark.parametrize("style", STYLES)
def test_without_a_record_nothing_is_written(uri: str, style: str, tmp_path: Path) -> None:
    loader = make(open_data(uri), style, tmp_path, record=False)
    take(loader, 100)
    loader.close()
    assert loader.state_dict()["epoch"] == 1
    with pytest.raises(ConfigError, match="record"):
        raylance.prove_run(tmp_path)
