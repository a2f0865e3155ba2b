"""Patches of images of any size: the grids, order and values of the processors of the Qwen-VL family."""

import io
import itertools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.audit.reopening import reopen
from raylance.decode.pixels import size_in_head
from raylance.errors import ConfigError, DatasetError, RaylanceError
from tests.helpers.images import encode, odd_images

transformers = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")

Write = Callable[..., str]
SETTINGS: dict[str, Any] = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}
SIZES = [(40, 70), (28, 28), (200, 90), (1, 1), (31, 500), (56, 84)]


def picture(seed: int, height: int, width: int, kind: str = "PNG") -> bytes:
    """Smooth, so that the last bit of two bicubic kernels hardly differs."""
    noise = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), np.uint8)
    return encode(PIL.Image.fromarray(noise).resize((width, height), PIL.Image.Resampling.BICUBIC), kind)


def expected(images: list[bytes], **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Patches and grids by the processor of transformers, without rescaling and normalising."""
    processor = transformers.Qwen2VLImageProcessorPil(
        do_rescale=False,
        do_normalize=False,
        **{"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, **settings},
    )
    with_pillow = [PIL.Image.open(io.BytesIO(each)).convert("RGB") for each in images]
    made = processor(images=with_pillow, return_tensors="np")
    return np.asarray(made["pixel_values"]), np.asarray(made["image_grid_thw"])


def check_alike(found: np.ndarray, wanted: np.ndarray) -> None:
    """Pillow rounds after each of two passes; torch, by which torchvision resizes, may differ by one or two of 255."""
    off = np.abs(found.astype(int) - wanted)
    assert off.max() <= 2
    assert off.mean() < 0.1


@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    patch=st.sampled_from([14, 16]),
    merge=st.integers(1, 3),
    pixels=st.tuples(st.integers(1, 200), st.integers(1, 3000)),
)
def test_grids_are_those_of_the_processor(
    height: int, width: int, patch: int, merge: int, pixels: tuple[int, int]
) -> None:
    side = patch * merge
    least, most = pixels[0] * side**2, (pixels[0] + pixels[1]) * side**2
    patches = raylance.Patches("image", patch=patch, merge=merge, min_pixels=least, max_pixels=most)
    try:
        high, wide = transformers.smart_resize(height, width, side, least, most)
    except ValueError:
        with pytest.raises(ValueError, match=str(height)):
            patches.grid(height, width)
        return
    assert patches.grid(height, width) == (1, high // patch, wide // patch)


@pytest.mark.parametrize("settings", [{}, {"patch": 16, "temporal": 1}, {"merge": 1, "patch": 7}], ids=str)
def test_patches_are_those_of_the_processor(write_dataset: Write, settings: dict[str, Any]) -> None:
    images = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    rows = [images[:2], [], None, images[2:5], images[5:]]
    uri = write_dataset(pa.table({"id": range(5), "images": pa.array(rows, pa.list_(pa.binary()))}))
    given_ = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 12, **settings}
    patches = raylance.Patches("images", **given_)
    batch = next(iter(raylance.dataset(uri, columns=["id", patches]).iter_torch_batches(batch_size=5)))
    names = {"patch": "patch_size", "merge": "merge_size", "temporal": "temporal_patch_size"}
    wanted, grids = expected(images, **{names.get(name, name): value for name, value in given_.items()})
    order = [{0: images[:2], 3: images[2:5], 4: images[5:]}.get(row, []) for row in batch["id"].tolist()]
    places = [images.index(each) for each in itertools.chain(*order)]
    counts = grids.prod(1)
    starts = np.cumsum(counts) - counts
    found, grid = batch["images"], batch["images_grid"]
    assert found.dtype == torch.uint8
    assert grid.dtype == torch.int32
    assert grid.tolist() == grids[places].tolist()
    assert batch["images_grid_length"].tolist() == [len(each) for each in order]
    assert batch["images_length"].tolist() == [sum(int(counts[images.index(each)]) for each in row) for row in order]
    together = np.concatenate([wanted[starts[at] : starts[at] + counts[at]] for at in places])
    assert found.shape == together.shape
    check_alike(found.numpy(), together)


def test_a_column_of_single_images(write_dataset: Write) -> None:
    images = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    uri = write_dataset(pa.table({"image": images}))
    data = raylance.dataset(uri, columns=[raylance.Patches("image", **SETTINGS)], order="sequential")
    batch = next(iter(data.iter_batches(batch_size=6)))
    wanted, grids = expected(images, **SETTINGS)
    assert batch["image_grid"].tolist() == grids.tolist()
    assert batch["image_length"].tolist() == grids.prod(1).tolist()
    check_alike(batch["image"], wanted)


def test_a_draft_decodes_fewer_pixels_and_gives_nearly_the_same(write_dataset: Write) -> None:
    uri = write_dataset(pa.table({"image": [picture(1, 900, 1200, "JPEG")] * 2}))
    exact, draft = (
        next(
            iter(
                raylance.dataset(uri, columns=[raylance.Patches("image", draft=draft, **SETTINGS)]).iter_batches(
                    batch_size=2
                )
            )
        )
        for draft in (False, True)
    )
    assert exact["image_grid"].tolist() == draft["image_grid"].tolist()
    assert 0 < np.abs(exact["image"].astype(int) - draft["image"]).mean() < 2


@pytest.mark.promise("P3", "P4", "P5")
def test_equal_on_any_world_and_after_a_resume(write_dataset: Write) -> None:
    rows = [[picture(10 * row + n, *SIZES[(row + n) % 6]) for n in range(row % 4)] for row in range(40)]
    uri = write_dataset(pa.table({"id": range(40), "images": pa.array(rows, pa.list_(pa.binary()))}))

    def opened() -> raylance.Dataset:
        return raylance.dataset(uri, columns=["id", raylance.Patches("images", **SETTINGS)], remainder="ragged")

    def by_row(batches: Any) -> dict[int, tuple[bytes, list[list[int]]]]:
        found = {}
        for batch in batches:
            ends, stops = np.cumsum(batch["images_length"]), np.cumsum(batch["images_grid_length"])
            for at, row in enumerate(batch["id"].tolist()):
                own = slice(ends[at] - batch["images_length"][at], ends[at])
                grid = slice(stops[at] - batch["images_grid_length"][at], stops[at])
                found[row] = batch["images"][own].tobytes(), batch["images_grid"][grid].tolist()
        return found

    whole = by_row(opened().iter_batches(batch_size=7))
    for world in (2, 3):
        ranks = [
            by_row(opened().loader(rank=rank, world_size=world).iter_batches(global_batch_size=9))
            for rank in range(world)
        ]
        assert {row: each for part in ranks for row, each in part.items()} == whole
    with opened().loader(runtime="threads") as loader:
        first = by_row(itertools.islice(loader.iter_batches(global_batch_size=8), 2))
        state = loader.state_dict()
    with opened().loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        assert first | by_row(loader.iter_batches(global_batch_size=5)) == whole


def test_odd_images_in_a_list_have_the_pixels_of_image(write_dataset: Write) -> None:
    """One pixel, 16 bits, CMYK, an animation: as if the pixels that `Image` gives were stored."""
    odd = odd_images()
    single = [raylance.dataset(write_dataset(pa.table({"it": [each]})), columns=[raylance.Image("it")]) for each in odd]
    plain = [encode(np.asarray(each.take([0])["it"][0])) for each in single]
    uri = write_dataset(pa.table({"images": pa.array([odd, plain], pa.list_(pa.binary()))}))
    data = raylance.dataset(uri, columns=[raylance.Patches("images", **SETTINGS)], order="sequential")
    batch = next(iter(data.iter_batches(batch_size=2)))
    first, second = np.split(batch["images"], 2)
    assert np.array_equal(first, second)
    assert first.any()
    assert len({*map(tuple, batch["images_grid"].tolist())}) > 2


def test_a_bad_image_has_zeros_as_many_as_its_header_says(write_dataset: Write) -> None:
    good, cut, broken = picture(1, 56, 56), picture(2, 200, 90)[:-40], b"not an image"
    uri = write_dataset(
        pa.table({"images": pa.array([[good], [cut, good], [broken, None, good]], pa.list_(pa.binary()))})
    )
    patches = raylance.Patches("images", **SETTINGS)
    data = raylance.dataset(uri, columns=[patches], on_bad_row="mask", order="sequential")
    batch = next(iter(data.iter_batches(batch_size=3)))
    assert batch["images_valid"].tolist() == [True, False, True, False, False, True]
    assert batch["_valid"].tolist() == [True] * 3
    grids = batch["images_grid"]
    assert grids[1].tolist() == list(patches.grid(200, 90))
    assert grids[3].tolist() == grids[4].tolist() == [0, 0, 0]
    assert batch["images_length"].tolist() == [
        int(grids[own].prod(1).sum()) for own in (slice(1), slice(1, 3), slice(3, 6))
    ]
    first = int(grids[0].prod())
    assert not batch["images"][first : first + int(grids[1].prod())].any()
    with pytest.raises(raylance.BadRowError):
        list(raylance.dataset(uri, columns=[patches]).iter_batches(batch_size=3))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "GIF"])
def test_sizes_are_in_the_first_bytes(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (31, 57, 3), np.uint8)
    options: list[dict[str, Any]] = [{}, {"lossless": True}] if kind == "WEBP" else [{}]
    if kind == "WEBP":
        options.append({"exif": b"Exif\0\0" + PIL.Image.Exif().tobytes()})
    for each in options:
        whole = encode(PIL.Image.fromarray(noise), kind, **each)
        assert size_in_head(memoryview(whole[:1024])) == (None if kind == "GIF" else (31, 57))
        assert all(size_in_head(memoryview(whole[:end])) in (None, (31, 57)) for end in range(1024))


def test_the_cost_of_blobs_takes_their_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JPEGs with EXIF of 20 kB before the header, other formats, damaged ones and nulls as by whole files."""
    rows: list[bytes | None] = [picture(row, *SIZES[row % 6], kind="JPEG") for row in range(40)]
    exif = PIL.Image.Exif()
    exif[0x9286] = b"x" * 20_000
    rows[3] = encode(PIL.Image.new("RGB", (90, 130)), "JPEG", exif=exif)
    rows[4], rows[5], rows[6], rows[7] = None, b"not an image", b"", encode(PIL.Image.new("P", (60, 90)), "GIF")
    rows[8] = picture(8, 200, 90, "JPEG")[:600]  # what is left of it has a size, and is decoded to zeros
    blob = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    uris = []
    for name, field in (("blobs", blob), ("plain", pa.field("image", pa.large_binary()))):
        uris.append(str(tmp_path / name))
        columns = [pa.array(rows, pa.large_binary()), range(40)]
        table = pa.table(columns, schema=pa.schema([field, ("id", pa.int64())]))
        lance.write_dataset(table, uris[-1], data_storage_version="2.1")
    read: list[int] = []
    ranges = lance.LanceDataset.read_blob_ranges

    def counted(self: Any, column: str, asked: list[tuple[int, int, int]], **options: Any) -> Any:
        read.append(sum(length for _, _, length in asked))
        return ranges(self, column, asked, **options)

    monkeypatch.setattr(lance.LanceDataset, "read_blob_ranges", counted)
    patches = raylance.Patches("image", **SETTINGS)
    blobs, plain = (raylance.dataset(uri, columns=["id"], cost=patches, cost_folder=tmp_path).costs for uri in uris)
    assert blobs.tolist() == plain.tolist()
    assert (blobs[4:7] == 0).all()
    assert blobs[3] == np.prod(patches.grid(130, 90))
    assert sum(read) < 41 * 1024 + 2 * 70_000


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"patch": 0}, "patch"),
        ({"merge": "a"}, "merge"),
        ({"height": "h"}, "width"),
        ({"min_pixels": 9, "max_pixels": 5}, "max_pixels"),
        ({"max_pixels": 100, "min_pixels": 9}, "784"),
        ({"size": 224}, "max_pixels"),
        ({"temporal": 1.5}, "temporal"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        raylance.Patches("images", **fields)


def test_the_cost_is_the_number_of_patches(write_dataset: Write, caplog: pytest.LogCaptureFixture) -> None:
    """From headers, from columns of sizes, and as batches have them."""
    rows = [[picture(10 * row + n, *SIZES[(row + n) % 6], "JPEG") for n in range(row % 4)] for row in range(40)]
    sizes = [[SIZES[(row + n) % 6] for n in range(row % 4)] for row in range(40)]
    table = pa.table(
        {
            "images": pa.array(rows, pa.list_(pa.binary())),
            "h": [[high for high, _ in each] for each in sizes],
            "w": [[wide for _, wide in each] for each in sizes],
        }
    )
    uri, patches = write_dataset(table), raylance.Patches("images", **SETTINGS)
    with caplog.at_level(logging.WARNING):
        data = raylance.dataset(uri, columns=[patches], cost={"patches": patches}, order="sequential")
    by_columns = raylance.Patches("images", height="h", width="w", **SETTINGS)
    named = raylance.dataset(uri, columns=["h"], cost={"patches": by_columns})
    wanted = np.concatenate([each["images_length"] for each in data.iter_batches(batch_size=8)])
    assert data.costs["patches"].tolist() == named.costs["patches"].tolist() == wanted.tolist()
    filtered = raylance.dataset(uri, columns=["h"], cost=patches, filter="array_length(h) = 2")
    assert filtered.costs.tolist() == wanted[[len(each) == 2 for each in rows]].tolist()
    with pytest.raises(DatasetError, match="nothing_there"):
        raylance.dataset(uri, cost=raylance.Patches("nothing_there"))


def test_a_run_over_patches_is_recorded_reported_reopened_and_proven(write_dataset: Write, tmp_path: Path) -> None:
    rows = [[picture(10 * row + n, *SIZES[(row + n) % 6]) for n in range(row % 3)] for row in range(24)]
    uri = write_dataset(pa.table({"id": range(24), "images": pa.array(rows, pa.list_(pa.binary()))}))
    patches = raylance.Patches("images", **SETTINGS)
    data = raylance.dataset(uri, columns=["id", patches], cost={"patches": patches}, remainder="ragged")
    with data.loader(record=str(tmp_path / "run"), name="train") as loader:
        for number, _ in enumerate(loader.iter_batches(budget=raylance.Budget({"patches": 200}))):
            if number < 2:
                time.sleep(1.1)  # the record is written more than once
        state = json.loads(json.dumps(loader.state_dict(), sort_keys=True))
    assert [each["class"] for each in state["decode"]] == ["Patches"]
    proof = raylance.prove_run(str(tmp_path / "run"))
    assert proof.ok, str(proof)
    assert "24 rows" in proof.verdict
    page = Path(raylance.report_run(str(tmp_path / "run"))).read_text()
    assert "200 patches" in page
    again = reopen(state)
    assert again.costs["patches"].tolist() == data.costs["patches"].tolist()
    with raylance.dataset(uri, columns=["id", patches], cost={"patches": patches}).loader() as loader:
        loader.load_state_dict(state)


@pytest.mark.parametrize("bad", ["raise", "mask"])
def test_a_transform_gets_and_returns_patches(write_dataset: Write, bad: Any) -> None:
    rows = [[picture(10 * row + n, *SIZES[(row + n) % 6]) for n in range(row % 3)] for row in range(12)]
    uri = write_dataset(pa.table({"id": range(12), "images": pa.array(rows, pa.list_(pa.binary()))}))
    columns = ["id", raylance.Patches("images", **SETTINGS), raylance.Image("images", size=8, name="small")]
    plain = raylance.dataset(uri, columns=columns, on_bad_row=bad)
    same = raylance.dataset(uri, columns=columns, on_bad_row=bad, transform=lambda batch: batch)
    for before, after in zip(plain.iter_batches(batch_size=4), same.iter_batches(batch_size=4), strict=True):
        for name in ("images", "images_grid", "small", "images_length", "small_length"):
            assert np.array_equal(before[name], after[name]), name


@pytest.mark.promise("P8")
def test_costs_that_are_no_costs(write_dataset: Write) -> None:
    image = picture(1, 40, 40)
    uri = write_dataset(
        pa.table({"id": [1, 2], "image": [image] * 2, "text": ["a", "b"], "s": [{"h": 40, "image": image}] * 2})
    )
    for cost, named in (
        (raylance.Patches, "cost="),
        ({"patches": raylance.Patches}, "patches"),
        (raylance.Patches("text"), "text"),
        (raylance.Patches("image", height="text", width="id"), "text"),
    ):
        with pytest.raises(RaylanceError, match=named):
            raylance.dataset(uri, columns=["id"], cost=cost)
    lists = write_dataset(
        pa.table({"images": pa.array([[image]], pa.list_(pa.binary())), "image": [image], "images_grid": [1]})
    )
    valid = raylance.Patches("image", name="images_valid")
    with pytest.raises(ConfigError, match="images_valid"):
        raylance.dataset(lists, columns=[raylance.Patches("images"), valid], on_bad_row="mask")
    with pytest.raises(ConfigError, match=r"Patches\('image', name='images'\).*images_grid"):
        raylance.dataset(lists, columns=[raylance.Patches("image", name="images"), "images_grid"])
    heads = raylance.dataset(uri, columns=["id"], cost=raylance.Patches("s.image")).costs
    sizes = raylance.dataset(uri, columns=["id"], cost=raylance.Patches("image", height="s.h", width="s.h")).costs
    assert heads.tolist() == sizes.tolist() == [int(np.prod(raylance.Patches("image").grid(40, 40)))] * 2
