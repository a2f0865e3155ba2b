"""Lists of images: all of a batch one after another, each cropped, masked and counted by itself."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.errors import ConfigError
from raylance.torch_data import IterableDataset, MapDataset
from tests.helpers.images import encode, odd_images

ROWS = 60
BYTES, STRUCT = pa.binary(), pa.struct([("bytes", pa.binary()), ("path", pa.string())])
CROPS: dict[str, Any] = {"augment": raylance.RandomResizedCrop(), "hflip": 0.5}
Images = list[list[bytes | None] | None]
Write = Callable[..., str]


def picture(seed: int, height: int = 24, width: int = 32) -> bytes:
    return encode(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


def lists() -> Images:
    """Rows of 0 to 3 images; row 8 is a null, row 9 has odd ones."""
    found: Images = [[picture(10 * row + number) for number in range(row % 4)] for row in range(ROWS)]
    found[8], found[9] = None, odd_images()
    return found


def table(images: Images, kind: pa.DataType = BYTES, *, large: bool = False) -> pa.Table:
    inside = pa.types.is_struct(kind)
    values = [row and [{"bytes": each, "path": "a"} if inside else each for each in row] for row in images]
    of = pa.large_list(kind) if large else pa.list_(kind)
    return pa.table({"id": np.arange(len(images)), "images": pa.array(values, of)})


def by_row(batches: Any, column: str = "images") -> dict[int, np.ndarray]:
    """The images of each row, uint8 (k, …); checks that lengths and images agree."""
    found = {}
    for batch in batches:
        lengths = np.asarray(batch[f"{column}_length"])
        ends = np.cumsum(lengths)
        assert len(batch["id"]) == len(lengths)
        assert len(batch[column]) == lengths.sum()
        for row, end, length in zip(np.asarray(batch["id"]).tolist(), ends, lengths, strict=True):
            found[row] = np.asarray(batch[column][end - length : end])
    return found


def opened(uri: str, *, size: int = 16, **arguments: Any) -> raylance.Dataset:
    columns = ["id", raylance.Image("images", size=size, **CROPS)]
    return raylance.dataset(uri, **{"columns": columns, "remainder": "ragged", "seed": 5, **arguments})


@pytest.mark.parametrize(("kind", "large"), [(BYTES, False), (STRUCT, False), (pa.large_binary(), True)], ids=str)
def test_all_images_of_a_batch_follow_one_another(write_dataset: Write, kind: pa.DataType, large: bool) -> None:
    """With the pixels that each has in a column of single images."""
    images = lists()
    uri = write_dataset(table(images, kind, large=large))
    data = raylance.dataset(uri, columns=["id", raylance.Image("images", size=16)], remainder="ragged")
    found = by_row(data.iter_batches(batch_size=7))
    flat = [image for row in images for image in row or []]
    single = raylance.dataset(write_dataset(pa.table({"image": flat})), columns=[raylance.Image("image", size=16)])
    wanted = single.take(range(len(flat)))["image"]
    at = 0
    for row, given in enumerate(images):
        length = len(given or [])
        assert np.array_equal(found[row], wanted[at : at + length])
        at += length
    batch = next(iter(data.iter_torch_batches(batch_size=7)))
    assert batch["images"].shape[1:] == (3, 16, 16)
    assert batch["images"].dtype == torch.uint8
    assert batch["images"].is_contiguous(memory_format=torch.channels_last)
    assert batch["images_length"].dtype == torch.int64
    assert data.schema.names == ["id", "images"]


@pytest.mark.promise("P4")
def test_an_image_is_augmented_by_row_and_number(write_dataset: Write) -> None:
    uri = write_dataset(table([[picture(1, 64, 80)] * 3] * ROWS))
    data = opened(uri)
    whole = by_row(data.iter_batches(batch_size=11))
    assert len({image.tobytes() for images in whole.values() for image in images}) == 3 * ROWS, "each its own crop"
    steps = {"global_batch_size": 17}
    worlds = {
        world: [by_row(data.loader(rank=rank, world_size=world).iter_batches(**steps)) for rank in range(world)]
        for world in (1, 2, 3, 8)
    }
    for ranks in worlds.values():
        rows = [row for part in ranks for row in part]
        assert sorted(rows) == list(range(ROWS)), "each once, with all of its images"
        assert all(np.array_equal(part[row], whole[row]) for part in ranks for row in part)
    others = by_row(data.iter_batches(batch_size=11, epoch=1))
    torchs = by_row(IterableDataset(data, batch_size=4))
    for row, images in whole.items():
        assert np.array_equal(images, torchs[row].transpose(0, 2, 3, 1))
        assert not np.array_equal(images, others[row])
    item = MapDataset(data)[7]
    assert item["images"].shape == (3, 3, 16, 16)


def test_a_run_continues_at_the_row(write_dataset: Write) -> None:
    data = opened(write_dataset(table(lists())))
    whole = by_row(data.iter_batches(batch_size=8))
    with data.loader(runtime="threads") as loader:
        first = by_row(itertools.islice(loader.iter_batches(global_batch_size=8), 3))
        state = loader.state_dict()
    with data.loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        rest = by_row(loader.iter_batches(global_batch_size=10))
    assert first.keys() | rest.keys() == whole.keys()
    assert not first.keys() & rest.keys()
    assert all(np.array_equal(images, (first | rest)[row]) for row, images in whole.items())


def test_a_bad_image_is_masked_alone(write_dataset: Write) -> None:
    images = lists()
    images[6] = [picture(1), b"not an image", picture(2)]
    images[7] = [None, picture(3)]
    uri = write_dataset(table(images))
    masked = opened(uri, on_bad_row="mask", max_bad_rows=2, order="sequential")
    with masked.loader(runtime="threads") as loader:
        batch = next(iter(loader.iter_torch_batches(global_batch_size=ROWS)))
        assert loader.stats()["masked_rows"] == 2
    assert batch["_valid"].all()
    marks = {
        row: part.tolist()
        for row, part in enumerate(batch["images_valid"].split(batch["images_length"].tolist()))
        if not part.all()
    }
    assert marks == {6: [True, False, True], 7: [False, True]}
    is_zero = batch["images"].flatten(1).eq(0).all(dim=1)
    assert torch.equal(is_zero, ~batch["images_valid"])
    with pytest.raises(raylance.BadRowError, match="images.*row offset 6 "):
        list(opened(uri, order="sequential").iter_batches(batch_size=8))
    few = opened(uri, on_bad_row="mask", max_bad_rows=1)
    with few.loader(runtime="threads") as loader, pytest.raises(raylance.BadRowError, match="max_bad_rows=1"):
        list(loader.iter_batches(global_batch_size=8))
    batch = next(iter(masked.iter_torch_batches(batch_size=8, pad_lists={"images": raylance.Pad(0)})))
    assert batch["images"].shape == (8, 3, 3, 16, 16)
    assert batch["images_valid"].shape == (8, 3)
    assert batch["images_valid"][6].tolist() == [True, False, True]


def test_other_forms_are_asked_for(write_dataset: Write) -> None:
    data = opened(write_dataset(table(lists())), order="sequential")

    def first(how: Any) -> dict[str, Any]:
        return next(iter(data.iter_torch_batches(batch_size=8, pad_lists={"images": how})))

    padded, jagged, plain, flat = first(raylance.Pad(0, length=4)), first("jagged"), first(None), first("flat")
    assert padded["images"].shape == (8, 4, 3, 16, 16)
    assert padded["images_length"].tolist() == flat["images_length"].tolist() == [0, 1, 2, 3] * 2
    assert (
        [len(each) for each in jagged["images"].unbind()] == [len(each) for each in plain["images"]] == [0, 1, 2, 3] * 2
    )
    assert torch.equal(torch.cat(list(plain["images"])), flat["images"])
    assert torch.equal(padded["images"][3, :3], flat["images"][3:6])


def test_stored_lists_come_one_after_another_if_asked_for(write_dataset: Write) -> None:
    tokens = [[row] * (row % 4) for row in range(ROWS)]
    data = raylance.dataset(write_dataset(pa.table({"tokens": tokens})), order="sequential")
    batch = next(iter(data.iter_torch_batches(batch_size=8, pad_lists={"tokens": "flat"})))
    assert batch["tokens"].tolist() == [token for row in tokens[:8] for token in row]
    assert batch["tokens_length"].tolist() == [0, 1, 2, 3] * 2


def test_masks_get_the_crops_of_their_images(write_dataset: Write) -> None:
    images = lists()
    both = table(images).append_column("masks", pa.array(images, pa.list_(BYTES)))
    crop = raylance.Image("images", size=16, **CROPS)
    follower = raylance.Image("masks", size=16, like="images")
    data = raylance.dataset(write_dataset(both), columns=["id", crop, follower], remainder="ragged")
    first, second = (by_row(data.iter_batches(batch_size=9), name) for name in ("images", "masks"))
    assert all(np.array_equal(pixels, second[row]) for row, pixels in first.items())
    images[5] = [*(images[5] or []), picture(1)]
    uneven = table(lists()).append_column("masks", pa.array(images, pa.list_(BYTES)))
    data = raylance.dataset(write_dataset(uneven), columns=["id", crop, follower], remainder="ragged")
    with pytest.raises(ConfigError, match="masks.*row offset 5 .*images"):
        list(data.iter_batches(batch_size=9))


def test_mixtures_and_transforms(write_dataset: Write) -> None:
    uris = [write_dataset(table(lists())) for _ in range(2)]
    mixed = raylance.mix({name: (opened(uri), 0.5) for name, uri in zip("ab", uris, strict=True)})
    batch = next(iter(mixed.iter_torch_batches(global_batch_size=16)))
    assert batch["images_length"].sum() == len(batch["images"])

    def count(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"id": batch["id"], "pixels": np.array([each.size for each in batch["images"]])}

    counted = opened(uris[0], transform=count, order="sequential").head(4)
    assert counted["pixels"].tolist() == [number * 16 * 16 * 3 for number in range(4)]


def test_lists_that_nothing_decodes_are_named(write_dataset: Write, caplog: pytest.LogCaptureFixture) -> None:
    data = raylance.dataset(write_dataset(table(lists(), STRUCT)), columns=["images"])
    with caplog.at_level(logging.WARNING, "raylance"):
        next(iter(data.iter_batches(batch_size=4)))
    assert "raylance.Image('images'" in caplog.text


@pytest.mark.promise("P8")
def test_what_takes_one_value_a_row_is_refused(write_dataset: Write) -> None:
    uri = write_dataset(table(lists()).append_column("episode", pa.array(np.arange(ROWS) // 9)))
    with pytest.raises(ConfigError, match="DeviceImage.*list"):
        raylance.dataset(uri, columns=[raylance.images.DeviceImage("images", size=16)])
    windows = raylance.Windows(episode="episode", offsets={"images": [-1, 0]})
    with pytest.raises(ConfigError, match="'images'"):
        raylance.dataset(uri, columns=[raylance.Image("images", size=16)], samples=windows)
    empty = write_dataset(table([[], None] * 10))
    with pytest.raises(raylance.errors.DatasetError, match="'images'"):
        raylance.dataset(empty, columns=[raylance.Image("images")])


@pytest.mark.promise("P7", "P8")
def test_ten_thousand_images_in_a_row_are_decoded_or_refused_by_memory(write_dataset: Write) -> None:
    """And a row of 40, of which one is bad."""
    small = [picture(number, 6, 8) for number in range(8)]
    images: Images = [[small[number % 8] for number in range(10_000)], [small[number % 8] for number in range(40)], []]
    images[1][7] = b"not an image"  # type: ignore[index]
    uri = write_dataset(table(images))
    data = raylance.dataset(
        uri, columns=["id", raylance.Image("images", size=8)], on_bad_row="mask", remainder="ragged"
    )
    found = by_row(data.iter_batches(batch_size=2))
    assert {row: len(each) for row, each in found.items()} == {0: 10_000, 1: 40, 2: 0}
    assert [not each.any() for each in found[1]] == [number == 7 for number in range(40)]
    assert np.array_equal(found[0][:8], found[0][-8:])
    few = data.loader(runtime="threads", reader_bytes=200_000)
    with few as loader, pytest.raises(raylance.errors.DatasetError, match=r"offset 0 .*200,000"):
        list(loader.iter_batches(global_batch_size=2))
