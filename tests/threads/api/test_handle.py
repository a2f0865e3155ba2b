"""`raylance.dataset`: what the handle shows, and what it refuses before any actor starts."""

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

import raylance
from jobs import common
from raylance import torch_data
from raylance.errors import ConfigError, DatasetError
from raylance.planning.shard_context import Assignment
from raylance.source.derived import Renamed
from tests.helpers.images import make_images
from tests.helpers.scripts import run_script


def test_a_notebook_needs_no_trainer_and_no_ray_to_look(images_uri: str, tmp_path: Path) -> None:
    """len, schema, head and plan in a process that never starts Ray."""
    script = f"""
import raylance, sys
ds = raylance.dataset({images_uri!r}, filter="label < 3", decode=raylance.Image("image"))
assert len(ds) == 410, len(ds)
assert ds.schema.field("image").type.shape == [24, 32, 3]
first = ds.head(4)
assert first["image"].shape == (4, 24, 32, 3) and first["id"].tolist() == [0, 1, 2, 7]
assert "410 rows" in repr(ds) and "12 steps" in repr(ds.plan(global_batch_size=32, world_size=2))
assert ds.version == 2
assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
"""
    run_script(script, tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"columns": ["imag"]}, DatasetError, "'imag'"),
        ({"columns": []}, ConfigError, "at least one column"),
        ({"columns": ["label"]}, ConfigError, "'image'"),
        ({"columns": ["image", "image"]}, ConfigError, "each once"),
        ({"decode": raylance.Image("label", size=8)}, DatasetError, "'label' is int64, not binary"),
        ({"decode": [raylance.Image("image")] * 2}, ConfigError, "decode each column once"),
        ({"order": "shuffle"}, ConfigError, "order='shuffle' is unknown"),
        ({"remainder": "wrap"}, ConfigError, "remainder='wrap'"),
        ({"on_bad_row": "skip"}, ConfigError, "on_bad_row='skip'"),
        ({"read": "scan"}, ConfigError, "read='scan'"),
        ({"columns": "image"}, ConfigError, "give a list of names"),
        ({"decode": "image"}, ConfigError, "give raylance.Image"),
        ({"split": "train"}, ConfigError, "give a FractionSplit"),
        ({"seed": 0.5}, ConfigError, "seed=0.5"),
        ({"version": 77}, DatasetError, "no version 77"),
        ({"version": 1.0}, ConfigError, "version=1.0"),
        ({"filter": "label = 99"}, DatasetError, "no row with label = 99"),
        ({"filters": "label = 1"}, ConfigError, r"no argument filters=: did you mean filter=\?"),
    ],
)
def test_bad_input(images_uri: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    settings = {"columns": ["image", "label"], "decode": raylance.Image("image", size=8)} | change
    with pytest.raises(error, match=message):
        raylance.dataset(images_uri, **settings)


def test_names_that_raylance_adds_are_refused(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"id": [1, 2], "_valid": [True, False]}))
    with pytest.raises(ConfigError, match="_valid"):
        raylance.dataset(uri)
    assert len(raylance.dataset(uri, columns=["id"])) == 2


def test_the_plan_tells_how_rows_are_read(write_dataset: Callable[..., str]) -> None:
    """Lance's five scenarios: no filter and a filter, shards and rows."""
    rows = np.arange(200_000)
    uri = write_dataset(pa.table({"id": rows, "x": rows.astype(np.float64)}))
    cases = [
        ({"order": "sequential"}, "range"),
        ({"order": "shard"}, "range"),
        ({"order": "sequential", "filter": "id % 2 = 0"}, "range"),
        ({"order": "shard", "filter": "id % 50 = 0"}, "take"),
        ({"order": "row", "filter": "id % 50 = 0"}, "take"),
        ({"order": "shard", "read": "take"}, "take"),
        ({"order": "row", "filter": "id % 50 = 0", "read": "range"}, "range"),
    ]
    for arguments, wanted in cases:
        plan = raylance.dataset(uri, **arguments).plan(global_batch_size=100)
        assert plan.reads.startswith(f"{wanted}: "), (arguments, plan.reads)
        assert wanted == "range" or "many in one read" in plan.reads, "100% of the rows came as single rows in 1 read"
        assert repr(plan).splitlines()[-1] == f"read by {plan.reads}"
    half = raylance.dataset(uri, order="sequential", filter="id % 2 = 0").plan(global_batch_size=100)
    wanted = "range: stretches of stored rows; the first window needs 50% of the 199,999 rows stored from its first"
    assert half.reads == f"{wanted} to its last, in 1 read of 2.3 MiB, 2 at a time"
    mixed = raylance.mix({"a": (raylance.dataset(uri), 0.5), "b": (raylance.dataset(uri), 0.5)})
    assert mixed.plan(global_batch_size=100).reads == "range or take, as the datasets that it is made of need it"


def test_batches_do_not_depend_on_the_world_size_by_default(images_uri: str) -> None:
    """What "auto" resolves to must not depend on it, or the same run on other machines would train on other batches."""
    dataset = raylance.dataset(images_uri, columns=["image"])
    orders = {repr(dataset.plan(global_batch_size=96, world_size=world).plan.order) for world in (1, 2, 3, 5, 8, 64)}
    assert len(orders) == 1


def batches_of(dataset: raylance.Dataset, state: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
    with dataset.loader(runtime="threads", **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = loader.iter_batches(global_batch_size=100, with_row_offset=True)
        found = [batch["_rowoffset"].tolist() for batch in batches]
        assert state is None or loader.state_dict()["window_bytes"] == state["window_bytes"]
        return found


@pytest.mark.parametrize("order", ["window", "shard", raylance.WindowShuffle(shard_rows=100, window_shards=4, lanes=2)])
def test_the_memory_of_a_rank_changes_no_batch(
    write_dataset: Callable[..., str], order: Any, caplog: pytest.LogCaptureFixture
) -> None:
    uri = write_dataset(pa.table({"vector": pa.FixedSizeListArray.from_arrays(np.arange(320_000.0), 320)}))
    dataset = raylance.dataset(uri, order=order, seed=3)
    wanted = batches_of(dataset)
    assert batches_of(dataset, reader_bytes=150_000) == wanted
    is_cut = "reader_bytes=150000 has room for two of 0.1 MiB. Each window is read in parts" in caplog.text
    assert is_cut == (order != "shard"), "rows that are not shuffled inside of windows are read in smaller ones"
    halves = [
        batches_of(dataset, rank=rank, world_size=2, reader_bytes=limit)
        for rank, limit in enumerate((512 << 20, 150_000))
    ]
    assert [first + second for first, second in zip(*halves, strict=True)] == wanted


def test_window_bytes_belong_to_the_dataset_and_are_kept(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"vector": pa.FixedSizeListArray.from_arrays(np.arange(320_000.0), 320)}))
    small, large = (raylance.dataset(uri, window_bytes=size) for size in (150_000, None))
    assert batches_of(small) != batches_of(large)
    before = small.loader()
    assert before.state_dict()["window_bytes"] == 150_000
    first = next(iter(before.iter_batches(global_batch_size=100, with_row_offset=True)))["_rowoffset"].tolist()
    before.close()
    for state in (before.state_dict(), small.loader().state_dict()):  # with sizes, and before there were any
        rest = batches_of(large, state, reader_bytes=64 << 20)
        assert [first] * (state["position"] > 0) + rest == batches_of(small)
    # A run's config sets it for all ranks, where the dataset leaves it open.
    assignment = Assignment(name="train", is_split=True)
    for data, wanted in ((small, 150_000), (large, 1 << 20)):
        of_run = data().make_loader(0, 2, raylance.Options(reader_bytes=1 << 20), assignment)
        assert of_run.state_dict()["window_bytes"] == wanted
    with pytest.raises(ConfigError, match="window_bytes=0: must be an integer of at least 1"):
        raylance.dataset(uri, window_bytes=0)
    with pytest.raises(ConfigError, match=r"'a' .*150,000"):
        raylance.mix({"a": (small, 1)})
    assert raylance.mix({"a": (large, 1)}, window_bytes=7).loader().state_dict()["window_bytes"] == 7


def test_what_cannot_be_decoded_is_marked_wherever_rows_are_looked_at(write_dataset: Callable[..., str]) -> None:
    cells = make_images(10)
    cells[3] = b"no image"
    uri = write_dataset(pa.table({"image": pa.array(cells, pa.binary()), "id": range(10)}))
    data = raylance.dataset(uri, decode=raylance.Image("image", size=8), on_bad_row="mask")
    for rows in (data.head(10), data.take(range(10)), data[:], data[list(range(10))]):
        assert rows["_valid"].tolist() == [row != 3 for row in range(10)]
        assert [bool(image.any()) for image in rows["image"]] == rows["_valid"].tolist()
    assert not data[3]["_valid"]
    assert data.to_pandas()["_valid"].tolist() == data.head(10)["_valid"].tolist()
    assert data.schema.names == ["image", "id"]
    strict = raylance.dataset(uri, decode=raylance.Image("image", size=8))
    assert "_valid" not in strict.take([0])
    with pytest.raises(raylance.BadRowError, match=r"row offset 3 "):
        strict[3]


def test_closing_a_handle_closes_what_it_made(images_uri: str) -> None:
    """Loaders of it, too, whose helpers would keep the CPUs of a notebook's next trainer; they can continue."""
    dataset = raylance.dataset(images_uri, columns=["id"], order="sequential", remainder="ragged")
    loader = dataset.loader(runtime="threads")
    batches = iter(loader.iter_batches(global_batch_size=100))
    rows, over_handle = next(batches)["id"].tolist(), [iter(dataset.iter_batches(batch_size=100)) for _ in range(2)]
    for each in over_handle:
        next(each)
    copy = pickle.loads(pickle.dumps(dataset))
    copy.loader()
    copy.close()
    rows += next(batches)["id"].tolist()
    dataset.close()
    for each in (batches, *over_handle):
        with pytest.raises(raylance.RaylanceError, match="superseded"):
            next(each)
    rows += [row for batch in loader.iter_batches(global_batch_size=100) for row in batch["id"].tolist()]
    assert rows == [row for row in range(1003) if not 200 <= row < 250]
    dataset.close()


@pytest.mark.parametrize("version", [np.int64(1), np.uint8(1), (None, np.int32(1)), 1])
def test_a_version_is_an_integer_of_any_kind(images_uri: str, version: Any) -> None:
    state = raylance.dataset(images_uri, columns=["id"], version=version).loader().state_dict()
    assert (state["version"], type(state["version"])) == (1, int)


@pytest.mark.parametrize("form", ["~/{}", "../{}", "file:{}", "file:///{}", "FILE:{}", "{}/", "/{}"])
@pytest.mark.parametrize("kind", [str, Path])
def test_places_are_opened_as_lance_opens_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, kind: type
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    place = tmp_path / "x.lance"
    lance.write_dataset(pa.table({"id": [1, 2]}), place)
    given = kind(form.format("x.lance" if form.startswith(("~", "..")) else place))
    if kind is Path and form == "file:///{}":
        pytest.skip("a Path has no //")
    assert lance.dataset(given).count_rows() == 2
    handle = raylance.dataset(given)
    assert form != "../{}" or handle.loader().state_dict()["uri"] == str(place)
    monkeypatch.chdir(tmp_path)
    assert handle.head(2)["id"].tolist() == [1, 2]
    monkeypatch.chdir(tmp_path / "elsewhere")
    raylance.writing.add_column(given, "found", pa.int64())
    assert lance.dataset(place).schema.names == ["id", "found"]
    assert lance.dataset(common.locate(str(given))).count_rows() == 2
    assert os.listdir() == []


@pytest.mark.parametrize("form", ["file:{}#2", "FILE:{}#2", "file://{}?x=1", "File:{}?2", "s3://bucket/run#2/d.lance"])
def test_a_place_that_lance_would_cut_is_refused(tmp_path: Path, form: str) -> None:
    lance.write_dataset(pa.table({"id": [1, 2]}), tmp_path / "x.lance")
    uri = form.format(tmp_path / "x.lance")
    for call in (lambda: raylance.dataset(uri), lambda: raylance.writing.add_column(uri, "y", pa.int64())):
        with pytest.raises(ConfigError, match="ends a URI"):
            call()


def whole_passes(batches: Any, count: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is warned of after each of some whole passes, by a consumer that stops by count, as Lightning does."""
    warnings = []
    for _ in range(count):
        caplog.clear()
        for _, _batch in zip(range(len(batches)), batches, strict=False):
            pass
        warnings.append(caplog.text)
    return warnings


def test_a_program_that_trains_on_one_epoch_of_a_handle_is_warned_once(
    images_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle = raylance.dataset(images_uri, columns=["id"])
    batches = handle.iter_torch_batches(batch_size=100)
    next(iter(batches))
    for _ in range(2):  # passes that are not whole
        for _, _batch in zip(range(len(batches) - 1), batches, strict=False):
            pass
    first, second, third = whole_passes(batches, 3, caplog)
    assert (first, third) == ("", "")
    assert "has no position, was handed out whole a second time, as epoch 0 again" in second
    assert "loader = handle.loader(), then loader.batches(" in second
    other = raylance.dataset(images_uri, columns=["id"])
    whole_passes(other.iter_batches(batch_size=100), 1, caplog)
    (again,) = whole_passes(pickle.loads(pickle.dumps(other)).iter_batches(batch_size=100), 1, caplog)
    assert again == "", "another handle"
    (again,) = whole_passes(other.iter_torch_batches(batch_size=50), 1, caplog)
    assert "as epoch 0 again" in again, "the same epoch, whatever the batches"


LAUNCHED = [
    {"WORLD_SIZE": "2", "RANK": "1"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"},
    {"PMI_SIZE": "2", "PMI_RANK": "1"},
    {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"},
    {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"},
    {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"},
    {"WORLD_SIZE": "2", "RANK": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
]
WAYS: dict[str, Callable[[raylance.Dataset], Any]] = {
    "loader": lambda data: data.loader(),
    "torch batches": lambda data: data.iter_torch_batches(batch_size=8),
    "batches": lambda data: data.iter_batches(batch_size=8),
    "mixture": lambda data: raylance.mix({"a": (data, 1)}).loader(),
    "mixture's batches": lambda data: raylance.mix({"a": (data, 1)}).iter_batches(batch_size=8),
    "torch_data": lambda data: next(iter(torch_data.IterableDataset(data, batch_size=8))),
    "sampler": lambda data: next(iter(torch_data.RowSampler(data, batch_size=8))),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_one_of_several_processes_is_told_to_give_its_rank(
    way: Callable[[raylance.Dataset], Any], images_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of them would train on all rows."""
    data = raylance.dataset(images_uri, columns=["id"])
    for launched in LAUNCHED:
        with monkeypatch.context() as environment:
            for name, value in launched.items():
                environment.setenv(name, value)
            with pytest.raises(ConfigError, match="2") as caught:
                way(data)
            assert "rank=1, world_size=2" in str(caught.value) or "auto" in str(caught.value)
    way(data)


def test_a_launchers_place_is_taken_on_request(images_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = raylance.dataset(images_uri, columns=["id"])
    assert (data.loader(rank="auto").rank, data.loader(rank="auto").world_size) == (0, 1)
    for launched in LAUNCHED:
        with monkeypatch.context() as environment:
            for name, value in launched.items():
                environment.setenv(name, value)
            loader = data.loader(rank="auto", ranks_per_replica=2)
            assert (loader.rank, loader.world_size, loader.dp_rank, loader.dp_size) == (1, 2, 0, 1)
            assert data.loader(rank=0, world_size=1).world_size == 1
            with pytest.raises(ConfigError, match="world_size=3.* world of 2"):
                data.loader(rank="auto", world_size=3)
    monkeypatch.setenv("WORLD_SIZE", "2")  # Lightning sets no RANK
    with pytest.raises(ConfigError, match="^rank='auto'.*WORLD_SIZE has rank unknown of 2"):
        data.loader(rank="auto")


def test_a_world_that_grew_since_the_loader_was_made_is_seen(images_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the main process of Lightning's ddp, which starts the others."""
    data = raylance.dataset(images_uri, columns=["id"])
    loader = data.loader(runtime="threads")
    made = [loader.batches(batch_size=8), data.iter_batches(batch_size=8)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for batches in made:
        with pytest.raises(ConfigError, match="one of 2 processes"):
            next(iter(batches))


def test_a_place_that_was_found_too_early_is_refused(images_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch.distributed was initialised, "auto" gave each process rank 0 of 1, and so all rows."""
    with raylance.dataset(images_uri, columns=["id"]).loader(rank="auto", runtime="threads") as loader:
        batches = loader.batches(global_batch_size=8)
        assert len(next(iter(batches))["id"]) == 8
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(ConfigError, match="rank 0 of 1 .*rank 1 of 2"):
            next(iter(batches))
        loader.reshard(0, 1)  # on purpose
        assert len(next(iter(batches))["id"]) == 8


def test_passes_over_a_handle_read_each_row_once_a_pass(
    write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are of one epoch: with each, the begin of the next epoch was read, too."""
    read_range, read = LanceFileReader.read_range, []

    def count(reader: Any, start: int, rows: int, **options: Any) -> Any:
        read.append(rows)
        return read_range(reader, start, rows, **options)

    vectors = pa.FixedSizeListArray.from_arrays(np.zeros(400 * 512, np.float32), 512)
    with raylance.dataset(write_dataset(pa.table({"x": vectors}))) as handle:
        monkeypatch.setattr(LanceFileReader, "read_range", count)
        for _ in range(3):
            assert sum(len(batch["x"]) for batch in handle.iter_batches(batch_size=20)) == 400
    assert sum(read) == 3 * 400


def test_a_handle_says_where_channels_are_in_torch(images_uri: str) -> None:
    handle = raylance.dataset(images_uri, columns=["image", "label"], decode=raylance.Image("image"))
    facts = dict(re.findall(r"<th[^>]*>(.*?)</th>\s*<td[^>]*>(.*?)</td>", handle._repr_html_()))
    assert "channels first" in facts["image"]
    assert "channels" not in facts["label"]
    assert handle.head(2)["image"].shape == (2, 24, 32, 3)
    assert next(iter(handle.iter_torch_batches(batch_size=2)))["image"].shape == (2, 3, 24, 32)


def test_what_makes_columns_stands_among_the_names(images_uri: str) -> None:
    image, small = raylance.Image("image", size=16), raylance.Image("image", name="small", size=8)
    both: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"columns": ["id", image]}, {"columns": ["id", "image"], "decode": image}),
        ({"columns": [image]}, {"columns": ["image"], "decode": [image]}),
        ({"columns": (image, "id", small)}, {"columns": ["image", "id"], "decode": [image, small]}),
        ({"columns": ["image", image, "id"]}, {"columns": ["image", "id"], "decode": image}),
        ({"columns": ["id", Renamed("picture", "image")]}, {"columns": ["id"], "decode": Renamed("picture", "image")}),
        ({"columns": [Renamed("picture", "image")]}, {"columns": [], "decode": Renamed("picture", "image")}),
    ]
    for new, older in both:
        found, wanted = (raylance.dataset(images_uri, order="sequential", **each) for each in (new, older))
        assert found.schema == wanted.schema
        with found.loader(record=False) as loader:
            state = loader.state_dict()
        with wanted.loader(record=False) as loader:
            assert loader.state_dict() == state
        assert [*found.head(2)] == [*wanted.head(2)]
        for name, values in found.head(2).items():
            np.testing.assert_array_equal(values, wanted.head(2)[name])
    with pytest.raises(ConfigError, match="decode= has Image"):
        raylance.dataset(images_uri, columns=["id", image], decode=small)
    with pytest.raises(ConfigError, match="each once"):
        raylance.dataset(images_uri, columns=["id", "id", image])
