"""Documents that are packed with their images: each image once, beside its tokens, in order."""

import dataclasses
import functools
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.audit.reopening import reopen
from raylance.errors import ConfigError, DatasetError, StateError
from raylance.torch_data import MapDataset
from tests.helpers.images import encode

IMAGE, LENGTH, ROWS = 99, 64, 90
PATCHES = raylance.Patches("images", min_pixels=28 * 28, max_pixels=28 * 28 * 6)
PACK: dict[str, Any] = {"policy": "whole", "too_long": "drop", "media": PATCHES, "placeholder": IMAGE}
Write = Callable[..., str]


def flat(number: int, height: int, width: int) -> bytes:
    """An image of one colour, which is its number."""
    return encode(PIL.Image.new("RGB", (width, height), (number % 256, number // 256, 7)))


def as_table(ids: list[list[int]], images: Any) -> pa.Table:
    return pa.table({"ids": pa.array(ids, pa.list_(pa.int32())), "images": pa.array(images, pa.list_(pa.binary()))})


def as_mask(ids: list[list[int]]) -> pa.Array:
    return pa.array([[int(token == IMAGE) for token in each] for each in ids], pa.list_(pa.int8()))


class Documents:
    """Documents of words and images; each word is its document's number, and each image has a number of its own."""

    def __init__(self, *, most: int = 4, between: int = 0) -> None:
        rng, number = np.random.default_rng(0), itertools.count()
        self.ids: list[list[int]] = []
        self.stored: list[list[int]] = []  # with one placeholder an image
        self.images: list[list[bytes] | None] = []
        self.numbers: list[list[int]] = []
        for row in range(ROWS):
            ids, images, numbers = [100 + row] * int(rng.integers(1, 5)), list[bytes](), list[int]()
            stored = ids.copy()
            for _ in range(row % most if row % 5 else 0):
                height, width = (int(each) for each in rng.integers(20, 90, 2))
                numbers.append(next(number))
                images.append(flat(numbers[-1], height, width))
                _, high, wide = PATCHES.grid(height, width)
                words = [100 + row] * int(rng.integers(between, 3))
                ids += [IMAGE] * (high * wide // 4) + words
                stored += [IMAGE, *words]
            self.ids.append(ids)
            self.stored.append(stored)
            self.images.append(images if row != 5 else None)
            self.numbers.append(numbers)

    def table(self) -> pa.Table:
        return as_table(self.ids, self.images).append_column("row", [range(ROWS)])

    def short(self) -> pa.Table:
        return as_table(self.stored, self.images).append_column("mask", as_mask(self.stored))

    def kept(self) -> list[int]:
        return [row for row in range(ROWS) if len(self.ids[row]) <= LENGTH]

    def check(self, batches: Any) -> list[int]:
        """The documents of batches, each of which has its tokens, and its images in order."""
        found = []
        for batch in batches:
            grids, patches = np.asarray(batch["images_grid"]), np.asarray(batch["images"])
            own = np.repeat(np.arange(len(grids)), grids.prod(axis=1))
            numbers = [int(patches[own == each][0, 0]) for each in range(len(grids))]
            assert len(own) == len(patches)
            at = 0
            for ids, segments, labels, count in zip(
                *(np.asarray(batch[name]) for name in ("input_ids", "segment_ids", "labels", "images_grid_length")),
                strict=True,
            ):
                wanted = []
                for segment in range(segments.max() + 1):
                    tokens = ids[segments == segment].tolist()
                    row = tokens[0] - 100
                    assert tokens == self.ids[row]
                    found.append(row)
                    wanted += self.numbers[row]
                assert numbers[at : at + count] == wanted
                at += int(count)
                assert not (labels == IMAGE).any()
            assert at == len(grids)
        return found


@pytest.fixture(scope="module")
def documents() -> Documents:
    return Documents()


@pytest.fixture(scope="module")
def uri(write_dataset: Write, documents: Documents) -> str:
    return write_dataset(documents.table(), max_rows_per_file=40)


def opened(uri: str, **arguments: Any) -> raylance.Dataset:
    pack = raylance.Pack("ids", LENGTH, **PACK)
    return raylance.dataset(uri, **{"samples": pack, "remainder": "ragged", "seed": 2} | arguments)


@pytest.mark.promise("P1", "P3", "P5")
def test_each_image_comes_once_beside_its_tokens(uri: str, documents: Documents) -> None:
    """On any world, in any epoch, before and after a resume."""
    data = opened(uri)
    for epoch in (0, 1):
        assert sorted(documents.check(data.iter_batches(batch_size=3, epoch=epoch))) == documents.kept()
    for world in (2, 3):
        parts = [
            documents.check(data.loader(rank=rank, world_size=world, record=False).iter_batches(global_batch_size=5))
            for rank in range(world)
        ]
        assert sorted(itertools.chain(*parts)) == documents.kept()
    with data.loader(runtime="threads") as loader:
        first = documents.check(itertools.islice(loader.iter_torch_batches(global_batch_size=4, device="cpu"), 2))
        state = json.loads(json.dumps(loader.state_dict()))
    with data.loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        rest = documents.check(loader.iter_batches(global_batch_size=3))
    assert sorted(first + rest) == documents.kept()


def test_decoders_and_lookups_give_the_same(uri: str, documents: Documents) -> None:
    data = opened(uri)
    whole = list(data.iter_batches(batch_size=4))
    with data.loader(runtime="threads", num_decoders=2) as loader:
        for batch, wanted in zip(loader.iter_batches(global_batch_size=4), whole, strict=True):
            assert all(np.array_equal(batch[name], wanted[name]) for name in wanted)
    items = MapDataset(data)
    again = {bytes(np.asarray(items[number]["input_ids"])): items[number] for number in range(len(data))}
    for batch in whole:
        ends = np.cumsum(batch["images_length"])
        for number, ids in enumerate(batch["input_ids"]):
            item = again[ids.tobytes()]
            own = batch["images"][ends[number] - batch["images_length"][number] : ends[number]]
            assert np.array_equal(np.asarray(item["images"]).reshape(own.shape), own)
    table = data.take([0])
    assert len(table["images_grid"][0]) == whole[0]["images_grid_length"][0] or len(data) > 1


def test_positions_on_three_axes_are_those_of_the_model(write_dataset: Write) -> None:
    """Those of transformers for each document alone, which needs a word between images. Each one counts from 0."""
    documents = Documents(between=1)
    uri = write_dataset(documents.table())
    of_model = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl").Qwen2VLModel
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    data = opened(uri, samples=raylance.Pack("ids", LENGTH, **PACK | {"mrope": True}))
    found = 0
    for batch in data.iter_torch_batches(batch_size=4):
        assert batch["position_ids"].shape[1:] == (3, LENGTH)
        assert batch["position_ids"].dtype == torch.int32
        grids = iter(batch["images_grid"].long())
        for ids, segments, positions in zip(
            batch["input_ids"].long(), batch["segment_ids"], batch["position_ids"], strict=True
        ):
            assert not positions[:, segments < 0].any()
            for segment in range(int(segments.max()) + 1):
                own = ids[segments == segment][None]
                count = len(documents.numbers[int(own[0, 0]) - 100])
                grid = torch.stack([next(grids) for _ in range(count)]) if count else None
                model = SimpleNamespace(config=config, get_vision_position_ids=functools.partial(
                    of_model.get_vision_position_ids, None))  # fmt: skip
                wanted, _ = of_model.get_rope_index(model, own, (own == IMAGE).int(), grid, None, torch.ones_like(own))
                assert positions[:, segments == segment].tolist() == wanted[:, 0].tolist()
                found += count
    assert found == sum(len(documents.numbers[row]) for row in documents.kept())
    assert MapDataset(data)[0]["position_ids"].shape == (3, LENGTH)


def test_a_bad_image_is_masked_and_its_documents_stay(write_dataset: Write, documents: Documents) -> None:
    broken = Documents()
    row = next(row for row in broken.kept() if len(broken.numbers[row]) == 2)
    images = broken.images[row]
    assert images is not None
    images[1] = images[1][:-30]  # the header is left
    where = write_dataset(broken.table())
    masked = list(opened(where, on_bad_row="mask").iter_batches(batch_size=3))
    assert sum(int((~batch["images_valid"]).sum()) for batch in masked) == 1
    assert sum(len(batch["images_grid"]) for batch in masked) == sum(len(broken.numbers[row]) for row in broken.kept())
    with pytest.raises(raylance.BadRowError):
        list(opened(where).iter_batches(batch_size=3))


def test_a_column_of_single_images(write_dataset: Write) -> None:
    one = Documents(most=2)
    table = one.table()
    single = pa.array([each[0] if each else None for each in one.images], pa.binary())
    where = write_dataset(table.set_column(1, "images", single))
    assert sorted(one.check(opened(where).iter_batches(batch_size=3))) == one.kept()


def test_a_run_is_reopened_and_proven(uri: str, documents: Documents, tmp_path: Path) -> None:
    with opened(uri).loader(record=str(tmp_path / "run"), name="train") as loader:
        assert sorted(documents.check(loader.iter_batches(global_batch_size=4))) == documents.kept()
        state = json.loads(json.dumps(loader.state_dict()))
    proof = raylance.prove_run(str(tmp_path / "run"))
    assert proof.ok, str(proof)
    assert sorted(documents.check(reopen(state).iter_batches(batch_size=4))) == documents.kept()


@pytest.mark.promise("P8")
def test_what_is_refused(uri: str, write_dataset: Write, documents: Documents) -> None:
    for wrong in (
        {"policy": "stream"},
        {"too_long": "split"},
        {"placeholder": None},
        {"placeholder": True},
        {"media": "images"},
        {"media": raylance.Patches},
        {"media": None},
        {"mrope": "yes"},
        {"expand": 1},
        {"media": None, "placeholder": None, "expand": True},
        {"placeholder": 2**40},
        {"placeholder": -5},
        {"placeholder": 0},  # padding
        {"eos_id": IMAGE},
        {"media": raylance.Patches("images", name="labels")},
        {"media": raylance.Patches("ids")},
        {"media": raylance.images.FramePatches("images")},
    ):
        with pytest.raises(ConfigError, match="media|placeholder|mrope|expand"):
            raylance.Pack("ids", LENGTH, **PACK | wrong)
    with pytest.raises(DatasetError, match="nothing"):
        opened(uri, samples=raylance.Pack("ids", LENGTH, **PACK | {"media": raylance.Patches("nothing")}))
    other = raylance.Pack("ids", LENGTH, **PACK | {"media": raylance.Patches("images", max_pixels=28 * 28 * 50)})
    with pytest.raises(DatasetError, match=rf"{IMAGE}.*grid\(\)"):
        list(opened(uri, samples=other).iter_batches(batch_size=4))


def test_documents_that_have_other_placeholders_than_their_images(write_dataset: Write) -> None:
    """In one sequence with others, whose sum is right."""
    image = flat(3, 56, 56)  # four tokens
    for ids, images in (
        ([[1, *[IMAGE] * 5, 1], [2, *[IMAGE] * 3, 2]], [[image], [image]]),
        ([[1, *[IMAGE] * 8, 1], [2, 2]], [[image], [image]]),
    ):
        table = pa.table(
            {"ids": pa.array(ids, pa.list_(pa.int32())), "images": pa.array(images, pa.list_(pa.binary()))}
        )
        with pytest.raises(DatasetError, match=r"begins with the tokens [12], .* tokens 99, .*become [48]"):
            list(opened(write_dataset(table)).iter_batches(batch_size=1))


@pytest.mark.promise("P1", "P3", "P5")
@pytest.mark.parametrize("kind", ["list", "structs", "sizes", "blob"])
def test_one_placeholder_becomes_the_tokens_of_its_image(write_dataset: Write, kind: str) -> None:
    """As if the documents were stored with all of them, wherever the sizes of images come from."""
    documents = Documents(most=2 if kind == "blob" else 4)
    table, media, arguments = documents.short(), PATCHES, {}
    if kind == "structs":
        kept = [[{"bytes": each, "path": ""} for each in row or ()] for row in documents.images]
        table = table.set_column(1, "images", pa.array(kept))
    if kind == "sizes":
        sizes = [[PIL.Image.open(io.BytesIO(each)).size for each in row or ()] for row in documents.images]
        for at, name in enumerate(("width", "height")):
            of_rows = [[size[at] for size in row] for row in sizes]
            table = table.append_column(name, pa.array(of_rows, pa.list_(pa.int32())))
        media = dataclasses.replace(media, height="height", width="width")
    if kind == "blob":
        one = pa.array([row[0] if row else None for row in documents.images], pa.large_binary())
        field = pa.field("images", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
        table, arguments = table.set_column(1, field, one), {"data_storage_version": "2.1"}
    short = raylance.Pack(["ids", "mask"], LENGTH, **PACK | {"media": media, "expand": True, "mrope": True})
    where = write_dataset(table, max_rows_per_file=40, **arguments)
    whole = raylance.Pack(["ids", "mask"], LENGTH, **PACK | {"mrope": True})
    data = opened(where, samples=short)
    stored = documents.table().append_column("mask", as_mask(documents.ids))
    wanted = opened(write_dataset(stored, max_rows_per_file=40), samples=whole)
    for epoch in (0, 1):
        batches = list(data.iter_batches(batch_size=3, epoch=epoch))
        assert sorted(documents.check(batches)) == documents.kept()
        assert all(((batch["mask"] != 0) == (batch["input_ids"] == IMAGE)).all() for batch in batches)
        for batch, same in zip(batches, wanted.iter_batches(batch_size=3, epoch=epoch), strict=True):
            assert batch.keys() == same.keys()
            assert all(np.array_equal(batch[name], same[name]) for name in batch)
    with data.loader(runtime="threads") as loader:
        first = documents.check(itertools.islice(loader.iter_batches(global_batch_size=1), 2))
        state = json.loads(json.dumps(loader.state_dict()))
    assert sorted(documents.check(reopen(state).iter_batches(batch_size=1))) == documents.kept()
    with data.loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        assert sorted(first + documents.check(loader.iter_batches(global_batch_size=3))) == documents.kept()


@pytest.mark.promise("P8")
def test_an_expanded_document_that_does_not_fit_its_images(write_dataset: Write) -> None:
    """Other placeholders than images; other sizes than columns say; other sizes of images than of a state."""
    image = flat(3, 56, 56)
    pack = raylance.Pack("ids", LENGTH, **PACK | {"expand": True})
    for ids in ([1, 1], [1, IMAGE, IMAGE]):
        with pytest.raises(DatasetError, match=rf"offset 1 .*{ids.count(IMAGE)} .*{IMAGE}, .*1 "):
            where = write_dataset(as_table([[IMAGE], ids], [[image]] * 2))
            list(opened(where, samples=pack).iter_batches(batch_size=1))
    table = as_table([[1, IMAGE, 1], [2, IMAGE]], [[image]] * 2)
    for height in (28, 84):
        sized = table.append_column("height", [[56], [height]]).append_column("width", [[56]] * 2)
        media = dataclasses.replace(PATCHES, height="height", width="width")
        other = dataclasses.replace(pack, media=media)
        with pytest.raises(DatasetError, match=rf"offset 1 .* 5 .* {1 + height // 28 * 2} "):
            list(opened(write_dataset(sized), samples=other).iter_batches(batch_size=1))
    where = write_dataset(table)
    with opened(where, samples=pack).loader(runtime="threads") as loader:
        next(iter(loader.iter_batches(global_batch_size=1)))
        state = loader.state_dict()
    for max_pixels, is_same in ((28 * 28 * 5, True), (28 * 28 * 2, False)):
        other = dataclasses.replace(pack, media=dataclasses.replace(PATCHES, max_pixels=max_pixels))
        with opened(where, samples=other).loader(runtime="threads") as loader:
            if is_same:
                loader.load_state_dict(state)
            else:
                with pytest.raises(StateError):
                    loader.load_state_dict(state)
    with pytest.raises(DatasetError, match=rf" 1 .*{IMAGE}, .* 0"):
        unknown = as_table([[1, IMAGE], [2, IMAGE]], [[image], [b"junk"]])
        list(opened(write_dataset(unknown), samples=pack, on_bad_row="mask").iter_batches(batch_size=1))


@pytest.mark.parametrize("kind", [pa.large_list(pa.binary()), pa.large_list(pa.large_binary())], ids=str)
def test_lists_with_large_offsets(write_dataset: Write, documents: Documents, kind: pa.DataType) -> None:
    table = documents.table()
    where = write_dataset(table.set_column(1, "images", table["images"].cast(kind)))
    assert sorted(documents.check(opened(where).iter_batches(batch_size=3))) == documents.kept()


def test_images_may_be_rare_and_headers_unreadable(write_dataset: Write) -> None:
    """None of the rows that an opening samples has an image; positions pass over images without a size."""
    image, rows = flat(3, 56, 56), 2_000
    ids = [[5, *[IMAGE] * 4, 6] if row % 400 == 7 else [5, 6] for row in range(rows)]
    images = [[image] if row % 400 == 7 else None if row % 3 else [] for row in range(rows)]
    table = as_table(ids, images)
    assert sum(len(batch["images_grid"]) for batch in opened(write_dataset(table)).iter_batches(batch_size=9)) == 5
    table = as_table([[1, *[IMAGE] * 4, 1], [2, 2], [IMAGE] * 4], [[image, None], [b"junk"], [image]])
    pack = raylance.Pack("ids", 10, **PACK | {"mrope": True}, shuffle=False)
    found = list(opened(write_dataset(table), samples=pack, on_bad_row="mask").iter_batches(batch_size=2))
    rows_of = (pair for batch in found for pair in zip(batch["input_ids"], batch["position_ids"], strict=True))
    positions = {int(tokens[0]): each for tokens, each in rows_of}
    assert positions[1][:, :6].tolist() == [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]


def test_what_makes_patches_changes_no_position(uri: str) -> None:
    data = opened(uri)
    with data.loader() as loader:
        next(iter(loader.iter_batches(global_batch_size=3)))
        state = loader.state_dict()
    other = raylance.Patches("images", min_pixels=28 * 28, max_pixels=28 * 28 * 6, temporal=1)
    with opened(uri, samples=raylance.Pack("ids", LENGTH, **PACK | {"media": other})).loader() as loader:
        loader.load_state_dict(state)
        assert next(iter(loader.iter_batches(global_batch_size=3)))["images"].shape[1] == 3 * 14 * 14
