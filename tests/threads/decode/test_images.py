"""Decoding, resizing and augmentation, against Pillow and against each other."""

import dataclasses
import io
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import PIL.TiffImagePlugin
import PIL.TiffTags
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.api.loader import consumer_of
from raylance.decode.crops import CenterCrop, RandomResizedCrop
from raylance.decode.images import Image, ImageCrop
from raylance.errors import BadRowError, ConfigError, DatasetError
from tests.helpers.images import by_pillow, decode, encode, make_images, with_size


@pytest.fixture(scope="module")
def photo() -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(make_images(1, seed=3, size=(90, 120))[0])).convert("RGB")


@pytest.mark.parametrize("size", [(40, 50), (90, 120), (200, 33)])
def test_resizes_as_pillow_does(photo: PIL.Image.Image, size: tuple[int, int]) -> None:
    ours = decode([encode(photo)], Image("image", size=size))[0][0]
    pillow = np.asarray(photo.resize(size[::-1], PIL.Image.Resampling.BILINEAR))
    differing = np.abs(ours.astype(int) - pillow)
    assert differing.max() <= 1
    assert (differing > 0).mean() < 0.02


@pytest.mark.parametrize(
    "how",
    [{"kind": kind} for kind in ("PNG", "JPEG", "WEBP")]
    + [{"mode": mode} for mode in ("L", "P", "RGBA", "LA", "1")]
    + [{"mode": "CMYK", "kind": "TIFF"}]
    + [{"orientation": orientation} for orientation in range(1, 9)],
    ids=str,
)
def test_formats_modes_and_rotations_are_those_of_pillow(photo: PIL.Image.Image, how: dict[str, Any]) -> None:
    options = {"mode": "RGB"} | how
    data = encode(photo.convert(options.pop("mode")), **options)
    wanted = by_pillow(data)
    assert Image("image").resolve(data).size == wanted.shape[:2]
    np.testing.assert_array_equal(decode([data], Image("image", size=wanted.shape[:2]))[0][0], wanted)


@pytest.mark.parametrize(
    ("grey", "wanted"),
    [
        (np.array([0, 0.25, 0.5, 1], np.float32), [0, 63, 127, 255]),
        (np.array([0, 20.6, 250], np.float32), [0, 20, 250]),
        (np.array([0, 256, 65535], np.float32), [0, 1, 255]),
        (np.array([-1, 0, 1], np.float32), [0, 127, 255]),
        (np.array([-1, 0, 65535], np.float32), [0, 0, 255]),
        (np.array([-300, 0, 65535], np.int32), [0, 1, 255]),
        (np.array([0, 1e6, np.nan, np.inf], np.float32), [0, 255, 0, 0]),
        (np.array([-np.inf, np.nan], np.float32), [0, 0]),
        (np.array([7e9, 7e9], np.float32), [0, 0]),
        (np.array([0, 1, 40, 255], np.int32), [0, 1, 40, 255]),
        (np.array([0, 1, 40, 1], np.int32), [0, 1, 40, 1]),
        (np.array([0, 256, 65535], np.int32), [0, 1, 255]),
        (np.array([0, 2**30, 2**31 - 1], np.int32), [0, 127, 255]),
        (np.array([-(2**31), 0, 2**31 - 1], np.int32), [0, 127, 255]),
    ],
)
def test_grey_of_32_bits_is_scaled(grey: np.ndarray, wanted: list[int]) -> None:
    ours = decode([encode(grey[None, :], "TIFF")], Image("image", size=(1, len(grey))))[0][0, 0, :, 0]
    assert ours.tolist() == wanted


def test_sixteen_bits_of_pgm_stay_sixteen_bits() -> None:
    dark = b"P5\n3 1\n65535\n" + np.array([0, 255, 200], ">u2").tobytes()
    bright = b"P5\n3 1\n65535\n" + np.array([0, 256, 65535], ">u2").tobytes()
    ours = decode([dark, bright], Image("image", size=(1, 3)))[0][:, 0, :, 0]
    assert ours.tolist() == [[0, 0, 0], [0, 1, 255]]


AUGMENTED = Image("image", size=24, augment=RandomResizedCrop(), hflip=0.5)


def test_augmentation_depends_on_seed_epoch_and_row_alone() -> None:
    values = make_images(12)
    whole, _, _ = decode(values, AUGMENTED)
    for row in (0, 5, 11):
        alone, _, _ = decode([values[row]], AUGMENTED, offsets=[row])
        np.testing.assert_array_equal(alone[0], whole[row])
    with ThreadPoolExecutor(3) as threads:
        np.testing.assert_array_equal(decode(values, AUGMENTED, executor=threads)[0], whole)
    same = [values[0]] * 3
    rows = decode(same, AUGMENTED)[0]
    assert not np.array_equal(rows[0], rows[1]), "two rows with the same bytes are augmented differently"
    for other in (decode(same, AUGMENTED, epoch=1)[0], decode(same, AUGMENTED, seed=8)[0]):
        assert not np.array_equal(other[0], rows[0])


def test_flips_as_often_as_asked() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    pixels[:, 0] = 255
    flipped = decode([encode(pixels)] * 2000, Image("image", size=2, hflip=0.3))[0][:, 0, 0, 0] == 0
    assert 0.26 < flipped.mean() < 0.34


@given(
    width=st.integers(1, 500),
    height=st.integers(1, 500),
    seed=st.integers(0, 10**6),
    zoom=st.floats(1, 3),
    scale=st.lists(st.floats(1e-300, 1), min_size=2, max_size=2).map(sorted).map(tuple),
    ratio=st.lists(st.floats(-6, 6), min_size=2, max_size=2).map(lambda powers: tuple(10.0**p for p in sorted(powers))),
)
def test_boxes_lie_inside(width: int, height: int, seed: int, zoom: float, scale: Any, ratio: Any) -> None:
    draws = np.random.default_rng(seed).random(40)
    wild = RandomResizedCrop(scale=scale, ratio=ratio)
    for crop in (RandomResizedCrop(), RandomResizedCrop(scale=(0.9, 1), ratio=(0.1, 9)), CenterCrop(zoom=zoom), wild):
        left, top, cut_width, cut_height = crop.box(width, height, (20, 30), draws)
        assert 0 <= left <= left + cut_width <= width
        assert 0 <= top <= top + cut_height <= height
        assert min(cut_width, cut_height) >= 1


def test_random_crops_have_the_areas_and_ratios_asked_for() -> None:
    crop = RandomResizedCrop(scale=(0.2, 0.6), ratio=(0.5, 2))
    boxes = np.array([crop.box(400, 400, (9, 9), np.random.default_rng(seed).random(40)) for seed in range(2000)])
    area, ratio = boxes[:, 2] * boxes[:, 3] / 160_000, boxes[:, 2] / boxes[:, 3]
    np.testing.assert_allclose([area.min(), area.mean(), area.max()], [0.2, 0.4, 0.6], atol=0.02)
    assert abs(np.log(ratio).mean()) < 0.05
    assert 0.49 < ratio.min() < ratio.max() < 2.02


def test_centre_crop_is_the_middle() -> None:
    assert CenterCrop(zoom=1).box(100, 60, (30, 30), np.empty(0)) == (20, 0, 60, 60)
    assert CenterCrop(zoom=2).box(100, 60, (30, 30), np.empty(0)) == (35, 15, 30, 30)


GOOD = encode(np.full((6, 8, 3), 9, np.uint8))


@pytest.mark.parametrize("bad", [b"", b"not an image", GOOD[:45], None])
def test_bad_rows(bad: bytes | None) -> None:
    with pytest.raises(BadRowError, match=r"'image' of row offset 41 cannot be decoded \(.+\).*on_bad_row=") as caught:
        decode([GOOD, bad], Image("image", size=4), offsets=[40, 41])
    assert caught.value.row_offset == 41
    pixels, valid, receipt = decode([GOOD, bad, GOOD], Image("image", size=4), mask_bad_rows=True)
    assert valid.tolist() == [True, False, True]
    assert pixels[1].max() == 0
    assert pixels[2].min() == 9
    assert receipt.decode_s > 0


def test_other_sizes_are_refused_where_the_size_is_kept() -> None:
    other, message = encode(np.zeros((6, 9, 3), np.uint8)), r"is 9x6 .* others are 8x6.*Image\('image', size=\(6, 8\)"
    image = Image("image").resolve(GOOD)
    made = Image("image", decode_fn=lambda data: np.zeros((6, 9 if data == b"9" else 8, 3), np.uint8))
    own = made.resolve(GOOD)
    for mask in (False, True):
        with pytest.raises(ConfigError, match=f"'image' of row offset 1 {message}"):
            decode([GOOD, other], image, mask_bad_rows=mask)
        with pytest.raises(ConfigError, match=message):
            decode([b"8", b"9"], own, mask_bad_rows=mask)


def test_images_of_mixed_sizes_are_no_bad_rows(write_dataset: Callable[..., str]) -> None:
    values = [encode(np.full((6, 8 + (row == 20), 3), 9, np.uint8)) for row in range(400)]
    uri = write_dataset(pa.table({"image": pa.array(values, pa.binary())}))
    dataset = raylance.dataset(uri, decode=Image("image"), on_bad_row="mask")
    assert dataset.head(20)["image"].min() == 9
    with pytest.raises(ConfigError, match="row offset 20 .*9x6"):
        dataset.head(30)
    # What the sampled rows show is refused at once.
    mixed = write_dataset(pa.table({"image": pa.array(make_images(1) + values[:9], pa.binary())}))
    with pytest.raises(ConfigError, match="row offset 1 of .*data.lance is 8x6 .* others are 32x24"):
        raylance.dataset(mixed, decode=Image("image"), on_bad_row="mask")


def bomb() -> bytes:
    """A damaged header: a picture of 900 megapixels, at which Pillow raises neither ValueError nor OSError."""
    return with_size(encode(np.zeros((4, 4, 3), np.uint8)), "PNG", 30_000, 30_000)


def test_a_damaged_first_row_is_left_to_on_bad_row(write_dataset: Callable[..., str]) -> None:
    values = [bomb(), b"bad", *make_images(5)]
    uri = write_dataset(pa.table({"image": pa.array(values, pa.binary())}))
    dataset = raylance.dataset(uri, decode=Image("image"), on_bad_row="mask")
    assert dataset.schema.field("image").type.shape == [24, 32, 3]
    assert dataset.head(7)["image"].any(axis=(1, 2, 3)).tolist() == [False, False, *[True] * 5]
    with pytest.raises(BadRowError, match=f"row offset 0 of {uri} cannot be decoded .DecompressionBomb") as caught:
        raylance.dataset(uri, decode=Image("image")).head(1)
    assert caught.value.dataset == uri
    for other in (bomb(), b"text"):
        with pytest.raises(DatasetError, match="'image' .*3 sampled rows"):
            raylance.dataset(write_dataset(pa.table({"image": [other] * 3})), decode=Image("image"))


def test_decode_fn_replaces_decoding() -> None:
    image = Image("image", size=(2, 2), decode_fn=lambda data: np.full((2, 2, 3), len(data), np.uint8))
    assert decode([b"abc", b"abcd"], image)[0][:, 0, 0, 0].tolist() == [3, 4]
    with pytest.raises(BadRowError, match=r"decode_fn gave float64 \(2, 2\), expected uint8 \(2, 2, 3\)"):
        decode([b"a"], Image("image", size=(2, 2), decode_fn=lambda data: np.zeros((2, 2))))


@pytest.mark.parametrize("size", [[6, 8], (np.int64(6), np.int32(8)), np.array([6, 8]).tolist()])
def test_sizes(size: object) -> None:
    image = Image("image", size=size)
    assert (image.size, image.shape) == ((6, 8), (6, 8, 3))
    assert image == Image("image", size=(6, 8))
    assert decode([GOOD], image)[0].shape == (1, 6, 8, 3)
    assert Image("image", size=np.int64(4)).size == (4, 4)


@pytest.mark.parametrize(
    "size", [224.0, (4, 4.5), (3, 4, 5), [4], [], 0, (3, -1), "224", True, np.array([4, 4]), (None, 4), {4, 5}]
)
def test_sizes_that_are_none(images_uri: str, size: object) -> None:
    with pytest.raises(ConfigError, match=r"size="):
        raylance.dataset(images_uri, decode=Image("image", size=size))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomResizedCrop(ratio=(1e-9, 1)), "1e-6 <= low"),
        (lambda: RandomResizedCrop(ratio=(1, float("inf"))), "high <= 1e6"),
        (lambda: RandomResizedCrop(ratio=(float("nan"), 1)), "ratio="),
        (lambda: Image("image", size=4, hflip=1.5), "hflip=1.5"),
        *((lambda wrong=wrong: Image("image", max_pixels=wrong), "max_pixels=") for wrong in (0, 2.5, True, "1000")),
        (lambda: Image("image", augment=CenterCrop()), "needs size="),
        (lambda: CenterCrop(zoom=0.5), "zoom=0.5"),
        (lambda: RandomResizedCrop(scale=(0.5, 1.5)), "scale="),
        (lambda: RandomResizedCrop(ratio=(2, 1)), "ratio="),
        (lambda: Image("mask", mode="P"), "mode='P'.: must be 'RGB' or 'L'"),
        (lambda: Image("mask", interpolation="cubic"), "interpolation='cubic'.: must be 'bilinear' or 'nearest'"),
        (lambda: Image("mask", like="image", hflip=0.5), "like='image'.: its crop and flip are those of that column"),
        (lambda: Image("mask", like="image", size=4, augment=CenterCrop()), "Leave augment=, hflip= and decode_fn="),
        (lambda: Image("mask", like="image", decode_fn=np.frombuffer), "decode_fn= out"),
        (lambda: Image("mask", like="image").open(), "like='image'. does not know its crop. Pass it to"),
    ],
)
def test_bad_settings(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


CROPS = {"augment": RandomResizedCrop(scale=(0.2, 0.8)), "hflip": 0.5, "interpolation": "nearest"}
MASK = Image("mask", like="image", mode="L", interpolation="nearest")


@pytest.fixture(scope="module")
def masks_uri(write_dataset: Callable[..., str]) -> str:
    """Pictures whose red says which class a pixel has; masks in grey, and by a palette. Some do not fit together."""
    rng = np.random.default_rng(5)
    palette = rng.permutation(256).astype(np.uint8).tolist() * 3
    images, masks, indexed = [], [], []
    for row in range(80):
        classes = rng.integers(0, 20, (30 + row % 3, 40), dtype=np.uint8)
        images.append(encode(np.stack([classes, classes * 3, 255 - classes], -1)))
        masks.append(encode(classes))
        picture = PIL.Image.fromarray(classes)
        picture.putpalette(palette)
        indexed.append(encode(picture))
    masks[7] = encode(np.zeros((40, 30), np.uint8))
    masks[9] = encode(np.zeros((30, 40), np.uint16))
    masks[11], images[12], images[13] = None, None, b"bad"
    columns = {"image": images, "mask": masks, "indexed": indexed}
    table = {name: pa.array(values, pa.binary()) for name, values in columns.items()}
    return write_dataset(pa.table({"id": np.arange(80), **table}))


@pytest.mark.parametrize("decoders", [0, 2])
def test_an_image_and_its_mask_get_one_crop(masks_uri: str, decoders: int) -> None:
    decode = [MASK, dataclasses.replace(MASK, column="indexed"), Image("image", size=24, **CROPS)]
    bad = [7, 9, 11, 12, 13]
    handle = raylance.dataset(masks_uri, decode=decode, on_bad_row="mask", remainder="ragged")
    assert handle.schema.field("mask").type == pa.fixed_shape_tensor(pa.uint8(), (24, 24, 1))
    seen = []
    with handle.loader(num_decoders=decoders) as loader:
        for _ in range(2):
            for batch in loader.iter_batches(global_batch_size=20):
                valid = batch["_valid"]
                assert np.flatnonzero(~valid).size == np.isin(batch["id"], bad).sum()
                assert batch["image"][valid].any(axis=(1, 2, 3)).all()
                np.testing.assert_array_equal(batch["mask"][valid, ..., 0], batch["image"][valid, ..., 0])
                np.testing.assert_array_equal(batch["indexed"][valid, ..., 0], batch["image"][valid, ..., 0])
                seen.append(batch["mask"][np.argsort(batch["id"])].tobytes())
        assert len(set(seen)) == len(seen)
        (tensors,) = loader.iter_torch_batches(global_batch_size=80)
        assert tensors["mask"].shape == (80, 1, 24, 24)
        why = {offset: (column, reason) for offset, column, reason in consumer_of(loader).recorder.stats.bad_rows}
    assert why[7] == ("mask", "ValueError: is 30x40 pixels, and 'image' is 40x31: one crop does not fit both")
    assert why[9][1].startswith("ValueError: has more than 8 bits a pixel")
    assert why[11][1] == "ValueError: is null"
    alone = raylance.dataset(masks_uri, decode=decode[2], columns=["id", "image"], on_bad_row="mask")
    np.testing.assert_array_equal(alone.head(80)["image"], handle.head(80)["image"], "the image is what it was")


@pytest.mark.parametrize("first", ["mask", "image"])
def test_a_damaged_image_is_no_fault_of_its_mask(masks_uri: str, first: str) -> None:
    decode = [MASK, Image("image", size=24, **CROPS)]
    for row, why in ((12, "ValueError: is null"), (13, "cannot identify image file")):
        given = {"decode": decode if first == "mask" else decode[::-1], "filter": f"id = 0 or id = {row}"}
        with pytest.raises(raylance.BadRowError, match=f"column 'image' of row offset {row} .*{why}") as caught:
            list(raylance.dataset(masks_uri, **given).iter_batches(batch_size=2))
        assert caught.value.column == "image"
        advice = "filter='`image` IS NOT NULL'", "max_bad_rows=None"
        assert [each in str(caught.value) for each in advice] == [row == 12] * 2
        handle = raylance.dataset(masks_uri, **given, on_bad_row="mask", max_bad_rows=0)
        with pytest.raises(raylance.BadRowError, match=f"The first: image of row offset {row} ") as caught:
            list(handle.iter_batches(batch_size=2))
        assert caught.value.column == "image"
        assert (advice[0] in str(caught.value)) == (row == 12)
        assert not handle.head(2)["mask"][1].any(), "there is no crop for it"


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "TIFF by a ratio", "TIFF by XMP", "WEBP"])
def test_a_mask_that_its_image_is_turned_away_from_is_a_bad_row(write_dataset: Callable[..., str], kind: str) -> None:
    classes = np.arange(12 * 16, dtype=np.uint8).reshape(12, 16)

    def turn_by(classes: np.ndarray, turn: int) -> bytes:
        if kind == "TIFF by XMP":  # such a TIFF has no size of its own for how it is displayed
            return encode(classes, "TIFF", tiffinfo={700: f'<x tiff:Orientation="{turn or 1}"/>'.encode()})
        if kind == "TIFF by a ratio":
            tags = PIL.TiffImagePlugin.ImageFileDirectory_v2()
            tags[0x0112] = PIL.TiffImagePlugin.IFDRational(turn or 1)
            tags.tagtype[0x0112] = PIL.TiffTags.RATIONAL
            return encode(classes, "TIFF", tiffinfo=tags)
        return encode(classes, kind, orientation=turn, **({"lossless": True} if kind == "WEBP" else {}))

    turned = [turn_by(classes, turn) for turn in range(9)]
    upright = [encode(by_pillow(data)[..., 0]) for data in turned]
    square = classes[:, :12]
    pairs = list(zip(turned, turned, strict=True))
    pairs += [(turned[turn], upright[turn]) for turn in (1, 5, 6, 7, 8)]
    fit = len(pairs)
    pairs += [(turned[turn], upright[turn]) for turn in (2, 3, 4)]
    pairs += [(turned[6], turned[8])] + [(turn_by(square, turn), encode(square)) for turn in range(2, 9)]
    images, masks = zip(*pairs, strict=True)
    columns = {"image": pa.array(images, pa.binary()), "mask": pa.array(masks, pa.binary())}
    decode = [Image("image", size=(12, 16), interpolation="nearest"), MASK, ImageCrop("image")]
    handle = raylance.dataset(write_dataset(pa.table(columns)), decode=decode, on_bad_row="mask", order="sequential")
    with handle.loader(num_decoders=0) as loader:
        (batch,) = loader.iter_batches(batch_size=len(pairs))
        why = {offset: reason for offset, _, reason in consumer_of(loader).recorder.stats.bad_rows}
    assert batch["_valid"].tolist() == [True] * fit + [False] * (len(pairs) - fit)
    np.testing.assert_array_equal(batch["mask"][:fit, ..., 0], batch["image"][:fit, ..., 0])
    assert "has EXIF orientation 1, and 'image' has 2: one of them would be turned or mirrored" in why[fit]
    assert "has EXIF orientation 8, and 'image' has 6" in why[fit + 3]
    shown = [by_pillow(image).shape[1::-1] for image in images[:fit]]
    assert [tuple(crop[2:6]) for crop in batch["image_crop"][:fit].tolist()] == [2 * size for size in shown]


def test_a_mask_may_be_smaller_than_its_image(masks_uri: str) -> None:
    given = {"on_bad_row": "mask", "filter": "id > 13"}
    small = dataclasses.replace(MASK, column="indexed", size=12)
    both = raylance.dataset(masks_uri, decode=[Image("image", size=24, **CROPS), small], **given).head(60)
    assert (both["image"].shape[1:], both["indexed"].shape[1:]) == ((24, 24, 3), (12, 12, 1))
    wanted = raylance.dataset(masks_uri, decode=Image("image", size=12, **CROPS), **given).head(60)["image"]
    np.testing.assert_array_equal(both["indexed"][..., 0], wanted[..., 0])


def test_what_a_mask_cannot_be_like(masks_uri: str) -> None:
    image = Image("image", size=8)
    for decoders, message in (
        ([MASK], r"Image\('mask', like='image'\): must name a decoded column.*: there is none"),
        ([MASK, Image("image", like="mask", size=8)], "does not use like= itself: there is none"),
        ([image, MASK, Image("indexed", like="mask")], r"'indexed', like='mask'.* itself: image\."),
        ([Image("image", size=8, decode_fn=lambda _: np.zeros((8, 8, 3), np.uint8)), MASK], "whose crop is not known"),
        ([Image("mask", like="mask", size=8)], "must name a decoded column"),
    ):
        with pytest.raises(ConfigError, match=message):
            raylance.dataset(masks_uri, decode=decoders)


def test_two_columns_with_crops_of_their_own_are_warned_of(masks_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    crop, given = Image("image", size=24, **CROPS), {"on_bad_row": "mask"}
    with caplog.at_level(logging.WARNING, logger="raylance"):
        with pytest.raises(ConfigError, match="'image' .*2 times"):
            raylance.dataset(masks_uri, decode=[crop, crop])
        fixed = Image("mask", size=24, augment=CenterCrop(), hflip=1.0)
        for decode in ([crop, MASK], [crop, fixed], [Image("image", size=24), Image("mask", size=24)]):
            raylance.dataset(masks_uri, decode=decode, **given)
        assert not caplog.records
        raylance.dataset(masks_uri, decode=[crop, dataclasses.replace(crop, column="mask")], **given)
    assert len(caplog.records) == 1
