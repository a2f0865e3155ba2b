"""Faults of the machines cost time and never a row, and what cannot be mended is said."""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray
import ray.exceptions

import raylance
from raylance.api.loader import consumer_of
from raylance.errors import DatasetError, HelperError
from tests.faults import workloads

pytestmark = pytest.mark.usefixtures("ray_session")

ONE_STEP = {"inflight_bytes": 400}  # so little in flight that items are single steps


def ids_of(loader: raylance.RankLoader, batch: int, limit: int = 10**9, **options: Any) -> list[int]:
    iterator = loader.iter_batches(global_batch_size=batch, **options)
    return [row for _, found in zip(range(limit), iterator, strict=False) for row in found["id"].tolist()]


@pytest.fixture
def numbers(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(200)}))


# ---- breaking off


@pytest.fixture(scope="module")
def chunks_uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(20_000), "text": ["x" * 500] * 20_000}))


def chunked(uri: str) -> raylance.Dataset:
    return raylance.dataset(uri, order=raylance.Sequential(shard_rows=500, window_shards=1))


def test_no_chunk_is_read_twice_after_breaking_off_in_its_middle(chunks_uri: str) -> None:
    with chunked(chunks_uri).loader(inflight_bytes=100_000) as loader:
        ids = ids_of(loader, 50, limit=4) + ids_of(loader, 50)
        assert ids == list(range(20_000))
        read = loader.stats()["read_bytes"]
    once = 20_000 * 520
    assert once <= read < 1.3 * once


# ---- faults of the machines


class RaisesOnce:
    """A transform that raises Ray's errors, as helpers do when a machine fails, each once for a row."""

    def __init__(self, marks: Path, errors: dict[int, Exception], always: bool = False) -> None:
        self.marks, self.errors, self.always = marks, errors, always

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for row in batch["id"].tolist():
            mark = self.marks / str(row)
            if row in self.errors and (self.always or not mark.exists()):
                mark.touch()
                raise self.errors[row]
        return {"id": batch["id"]}


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation shows how long work waits before it is done again."""
    monkeypatch.setattr("raylance.dispatch.dispatcher.PAUSES_S", (0.05, 0.05, 0.05))


MACHINE_FAULTS: list[Exception] = [
    ray.exceptions.OutOfMemoryError("the monitor says so"),
    ray.exceptions.NodeDiedError("the node is gone"),
    ray.exceptions.ObjectStoreFullError("full"),
    ray.exceptions.OutOfDiskError("full"),
    ray.exceptions.OwnerDiedError("ff" * 28, b"", ""),
    ray.exceptions.ObjectLostError("ff" * 28, b"", ""),
    ray.exceptions.WorkerCrashedError(),
    ray.exceptions.RayActorError(),
    ray.exceptions.LocalRayletDiedError(),
    ray.exceptions.RaySystemError("the raylet is gone"),
]


@pytest.mark.promise("P6")
@pytest.mark.parametrize("decoders", [0, 1])
@pytest.mark.usefixtures("short_pauses")
def test_faults_of_the_machines_cost_no_row(numbers: str, tmp_path: Path, decoders: int) -> None:
    errors = {5 + 20 * place: error for place, error in enumerate(MACHINE_FAULTS)}
    transform = RaisesOnce(tmp_path, {})
    dataset = raylance.dataset(numbers, transform=transform, order="sequential")
    transform.errors = errors  # not while the dataset is opened, which tries the transform
    with dataset.loader(num_decoders=decoders, **ONE_STEP) as loader:
        assert ids_of(loader, 10) == list(range(200))
        assert loader.stats()["helpers_replaced"] == 0, "what raised the error lives on"
    assert len(list(tmp_path.iterdir())) == len(errors)


@pytest.mark.promise("P8", "P9")
@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (MACHINE_FAULTS[0], "reader_bytes"),
        (MACHINE_FAULTS[3], "object_store_memory"),
        (MACHINE_FAULTS[4], ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.usefixtures("short_pauses")
def test_a_fault_that_does_not_end_is_an_error_with_rows_cause_and_fix(
    numbers: str, tmp_path: Path, error: Exception, fix: str
) -> None:
    transform = RaisesOnce(tmp_path, {}, always=True)
    dataset = raylance.dataset(numbers, transform=transform, order="sequential")
    transform.errors = {43: error}
    with dataset.loader(num_decoders=0) as loader:
        ids = []
        with pytest.raises(HelperError, match=rf"between 40 and 49 of .*{type(error).__name__}.*{fix}") as got:
            for batch in loader.iter_batches(global_batch_size=10):
                ids += batch["id"].tolist()
        assert numbers in str(got.value)
        assert ids == list(range(40))


# ---- rows that end their decoder


def open_fatal(
    write_dataset: Callable[..., str], armed: Path, numbers: range = range(80), row_s: float = 0.0, **options: Any
) -> raylance.Dataset:
    cells = pa.array([number.to_bytes(2, "little") for number in numbers], pa.binary())
    uri = write_dataset(pa.table({"id": np.array(numbers), "number": cells}))
    decode = workloads.Fatal("number", str(armed), 23, row_s)
    return raylance.dataset(uri, decode=decode, order="sequential", **options)


@pytest.mark.promise("P6")
@pytest.mark.parametrize(
    ("decoders", "how", "batch"),
    [
        (1, "exit", 4),
        (1, "signal", 4),
        (2, "signal", 40),
        (0, "exit", 4),
    ],
)
def test_a_row_that_ends_its_decoder_is_a_bad_row(
    write_dataset: Callable[..., str], tmp_path: Path, decoders: int, how: str, batch: int
) -> None:
    """The epoch ended: "the work on the same 4 rows … was lost 4 times", without the row's number."""
    armed = tmp_path / "armed"
    handle = open_fatal(write_dataset, armed, on_bad_row="mask")
    armed.write_text(how)
    with handle.loader(num_decoders=decoders) as loader:
        batches = list(loader.iter_batches(global_batch_size=batch))
        stats, bad = loader.stats(), consumer_of(loader).recorder.stats.bad_rows
    rows = {name: np.concatenate([each[name] for each in batches]) for name in ("id", "number", "_valid")}
    assert rows["id"].tolist() == list(range(80))
    assert np.flatnonzero(~rows["_valid"]).tolist() == [23]
    assert rows["number"].tolist() == [0 if row == 23 else row for row in range(80)]
    ((offset, column, why),) = bad
    assert (offset, column, stats["masked_rows"]) == (23, "number", 1)
    times = int(re.findall(r"it ended the process of its decoder (\d+) times", why)[0])
    assert 4 <= times <= stats["helpers_replaced"]


def open_shared_fatal(write_dataset: Callable[..., str], armed: Path, **options: Any) -> raylance.Dataset:
    cells = pa.array([number.to_bytes(2, "little") for number in range(80)], pa.binary())
    uri = write_dataset(pa.table({"episode": np.arange(80) // 40, "id": np.arange(80), "number": cells}))
    windows = raylance.Windows(episode="episode", offsets={"number": [-1, 0]})
    decode = workloads.Fatal("number", str(armed), 23)
    return raylance.dataset(uri, decode=decode, samples=windows, order="sequential", **options)


def test_a_shared_row_that_ends_its_decoder_is_named(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    handle = open_shared_fatal(write_dataset, armed)
    armed.write_text("exit")
    with handle.loader(num_decoders=2) as loader:
        seen = list[int]()
        with pytest.raises(raylance.BadRowError, match="'number' of row offset 23 .*ended the process"):
            for each in loader.iter_batches(global_batch_size=4):
                seen += each["id"].tolist()
        assert loader.stats()["helpers_replaced"] < 16, "the row is searched once, not in each half of its chunk"
    assert seen == [*range(20)]


@pytest.mark.promise("P6")
@pytest.mark.parametrize(("decoders", "how"), [(1, "exit"), (2, "signal"), (0, "exit")])
def test_a_shared_row_that_ends_its_decoder_masks_its_samples(
    write_dataset: Callable[..., str], tmp_path: Path, decoders: int, how: str
) -> None:
    """Rows that several samples share are decoded by block, and searched there."""
    armed = tmp_path / "armed"
    handle = open_shared_fatal(write_dataset, armed, on_bad_row="mask", max_bad_rows=None)
    armed.write_text(how)
    with handle.loader(num_decoders=decoders) as loader:
        batches = list(loader.iter_batches(global_batch_size=8))
        replaced = loader.stats()["helpers_replaced"]
    rows = {name: np.concatenate([each[name] for each in batches]) for name in ("id", "number", "_valid")}
    assert rows["id"].tolist() == list(range(80))
    assert np.flatnonzero(~rows["_valid"]).tolist() == [23, 24]
    wanted = [[0, 0] if row in (23, 24) else [max(row - 1, row // 40 * 40), row] for row in range(80)]
    assert rows["number"].tolist() == wanted
    assert replaced >= 4


def test_a_row_of_another_loader_ends_the_decoder_of_both(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    """A good row of the training data was masked for what a row of the validation data did to their decoder."""
    armed = tmp_path / "armed"
    both = range(100, 160), range(20, 32)
    handles = [open_fatal(write_dataset, armed, numbers, 0.02, on_bad_row="mask") for numbers in both]
    armed.write_text("exit")
    with handles[0].loader(num_decoders=1) as train, handles[1].loader(num_decoders=1) as val:
        batches, of_val = [], val.iter_batches(global_batch_size=4)
        for batch in train.iter_batches(global_batch_size=4):
            batches.append(batch)
            next(of_val, None)
        found = [consumer_of(loader).recorder.stats.bad_rows for loader in (train, val)]
        replaced = train.stats()["helpers_replaced"]
    assert np.concatenate([batch["number"] for batch in batches]).tolist() == [*range(100, 160)]
    assert [[offset for offset, _, _ in bad] for bad in found] == [[], [3]]
    assert replaced, "they did share it"


def test_a_row_that_ends_its_decoder_is_named(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    handle = open_fatal(write_dataset, armed)
    armed.write_text("exit")
    with handle.loader(num_decoders=1) as loader:
        seen = 0
        with pytest.raises(raylance.BadRowError, match="'number' of row offset 23 "):
            for each in loader.iter_batches(global_batch_size=4):
                seen += len(each["number"])
    assert seen == 20


# ---- storage


@pytest.fixture
def two_files(write_dataset: Callable[..., str]) -> tuple[str, Path]:
    first = write_dataset(pa.table({"id": np.arange(1000), "text": ["x" * 500] * 1000}))
    before = set(Path(first, "data").iterdir())
    lance.write_dataset(pa.table({"id": np.arange(1000, 2000), "text": ["x" * 500] * 1000}), first, mode="append")
    (second,) = set(Path(first, "data").iterdir()) - before
    return first, second


def halves(uri: str) -> raylance.Dataset:
    return raylance.dataset(uri, order=raylance.Sequential(shard_rows=100, window_shards=1))


@pytest.mark.promise("P8")
@pytest.mark.timeout(120)
def test_a_damaged_file_is_not_waited_for(two_files: tuple[str, Path]) -> None:
    uri, path = two_files
    dataset = halves(uri)
    with path.open("r+b") as file:
        file.write(np.random.default_rng(0).bytes(path.stat().st_size - 2000))
    with dataset.loader(read_timeout_s=1000) as loader:
        ids = []
        with pytest.raises(raylance.RaylanceError, match="corrupt"):
            for batch in loader.iter_batches(global_batch_size=50):
                ids += batch["id"].tolist()
        assert ids == list(range(1000))


# ---- helpers and selections


@pytest.mark.promise("P9")
def test_a_helper_that_hangs_is_replaced(numbers: str, tmp_path: Path) -> None:
    """It lives, and answers nothing: only a deadline shows it."""
    flag = tmp_path / "hung"

    def hang_once(batch: dict[str, Any]) -> dict[str, Any]:
        if 43 in batch["id"] and batch["_rowoffset"].max() > 43 and not flag.exists():
            flag.touch()
            time.sleep(10_000)
        return {"id": batch["id"]}

    flag.touch()  # not at the opening
    dataset = raylance.dataset(numbers, transform=hang_once, order="sequential")
    flag.unlink()
    with dataset.loader(num_decoders=1, work_timeout_s=20) as loader:
        assert ids_of(loader, 10) == list(range(200))
        assert loader.stats()["helpers_replaced"] == 1


def test_a_selection_that_cannot_be_built_again_is_refused(write_dataset: Callable[..., str]) -> None:
    """It is so large that it travels through the object store, and is lost with the worker that put it there."""
    uri = write_dataset(pa.table({"id": np.arange(400_000)}))

    @ray.remote(num_cpus=0)
    class Opener:
        def open(self) -> raylance.Dataset:
            return raylance.dataset(uri, filter="id % 2 = 1", remainder="ragged")

    opener = Opener.remote()
    dataset: raylance.Dataset = ray.get(opener.open.remote())
    ray.kill(opener)
    time.sleep(1)
    shutil.rmtree(uri)
    lance.write_dataset(pa.table({"id": np.arange(300_000)}), uri)
    with dataset.loader() as loader, pytest.raises(DatasetError, match="was rewritten in place"):
        ids_of(loader, 20_000)


# ---- errors of user code


class OddError(Exception):
    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{what} at {where}")


def odd(batch: dict[str, Any]) -> dict[str, Any]:
    if 43 in batch["id"]:
        raise OddError("row 43", "something odd")
    return {"id": batch["id"]}


@pytest.mark.parametrize("decoders", [0, 1])
def test_an_error_that_cannot_travel_hides_no_good_row(numbers: str, decoders: int) -> None:
    dataset = raylance.dataset(numbers, transform=odd, order="sequential")
    with dataset.loader(num_decoders=decoders) as loader:
        ids = []
        with pytest.raises(raylance.BadRowError, match="row offset 43 .*OddError") as caught:
            for batch in loader.iter_batches(global_batch_size=10):
                ids += batch["id"].tolist()
        assert ids == list(range(40))
        assert loader.state_dict()["position"] == 40
        assert "raise OddError" in "".join(caught.value.__notes__), "the traceback of where it was raised"
