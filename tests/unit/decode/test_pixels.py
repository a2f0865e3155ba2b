"""Owns the checks that pixels are Pillow's whichever codec made them, on every processor, and that the fast one did."""

import dataclasses
import hashlib
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFilter
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.decode.images import Image, ImageCrop
from raylance.decode.pixels import CODEC, MAX_PIXELS, PixelDecoder, Pixels
from tests.helpers.images import KINDS, TO_PILLOW, by_pillow, decode, encode, jpeg, picture, with_size


def whole(height: int, width: int) -> tuple[int, int, int, int]:
    return 0, 0, width, height


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(64, 48), (61, 47), (1, 1), (7, 130), (16, 8), (33, 1)])
def test_pixels_are_those_of_pillow(kind: str, size: tuple[int, int]) -> None:
    data = KINDS[kind](picture(*size))
    decoder = PixelDecoder()
    np.testing.assert_array_equal(decoder.decode(data, whole)[..., :3], by_pillow(data))
    assert decoder.fallbacks == 0


@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(0, 99),
    st.randoms(use_true_random=False),
)
def test_pixels_of_a_box_are_those_of_pillow(kind: str, width: int, height: int, seed: int, random: Any) -> None:
    data = KINDS[kind](picture(width, height, seed))
    wanted = by_pillow(data)
    left, top = random.randrange(wanted.shape[1]), random.randrange(wanted.shape[0])
    box = left, top, random.randint(1, wanted.shape[1] - left), random.randint(1, wanted.shape[0] - top)
    decoder = PixelDecoder()
    decoder.decode(KINDS["best"](picture(91, 91)), whole)  # memory that was used before
    found = decoder.decode(
        memoryview(data), lambda high, wide: box if (high, wide) == wanted.shape[:2] else (0, 0, 0, 0)
    )
    np.testing.assert_array_equal(found, wanted[top : top + box[3], left : left + box[2]])
    assert decoder.fallbacks == 0


@pytest.mark.parametrize("kind", TO_PILLOW)
def test_what_the_fast_codec_refuses_is_pillows(kind: str) -> None:
    data = TO_PILLOW[kind](picture(61, 47))
    decoder = PixelDecoder()
    np.testing.assert_array_equal(decoder.decode(data, whole)[..., :3], by_pillow(data))
    assert decoder.fallbacks == 1


@pytest.mark.parametrize("cut", [0.3, 0.9, 0.999])
def test_a_truncated_image_is_a_bad_row(cut: float) -> None:
    data = jpeg(picture(61, 47))
    with pytest.raises(OSError, match="(?i)truncated"):
        PixelDecoder().decode(data[: int(len(data) * cut)], whole)


LIMITED: dict[str, Callable[[PIL.Image.Image], bytes]] = {
    "JPEG": jpeg,
    "JPEG with EXIF": lambda image: jpeg(image, orientation=6),
    "CMYK": TO_PILLOW["CMYK"],
    "GIF of two frames": lambda image: encode(image, "GIF", save_all=True, append_images=[image.rotate(90)]),
    "WebP of two frames": lambda image: encode(image, "WEBP", save_all=True, append_images=[image.rotate(90)]),
    "an icon": lambda image: encode(image, "ICO", sizes=[image.size]),
    "TIFF turned": lambda image: encode(image, "TIFF", orientation=6),
    **{kind: lambda image, kind=kind: encode(image, kind) for kind in ("PNG", "BMP", "PPM")},
}


@pytest.mark.parametrize("kind", LIMITED)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(kind: str, mode: Any) -> None:
    data = LIMITED[kind](picture(61, 47))
    least = Image("image", size=8, mode=mode, max_pixels=61 * 47)
    wanted = decode([data], dataclasses.replace(least, max_pixels=None))[0]
    np.testing.assert_array_equal(decode([data], least)[0], wanted)
    message = "is 2867 pixels: more than max_pixels=2866 allows.* Image\\(…, max_pixels=…\\) .* None for no limit"
    for crops in ({}, {"augment": raylance.RandomResizedCrop(scale=(0.1, 0.2))}):
        less = dataclasses.replace(least, max_pixels=61 * 47 - 1, **crops)
        with pytest.raises(raylance.BadRowError, match=message):
            decode([data], less)
        pixels, valid, _ = decode([data, jpeg(picture(8, 8))], less, mask_bad_rows=True)
        assert valid.tolist() == [False, True]
        assert not pixels[0].any()


def test_the_limit_of_pixels_is_the_setting_and_not_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that decodes decided: rows were bad by threads, and good in helpers, or the other way round."""
    files = [make(picture(61, 47)) for make in LIMITED.values()]
    many = dataclasses.replace(Image("image", size=8), max_pixels=4 * MAX_PIXELS)
    for limit, image in ((None, Image("image", size=8)), (1000, Image("image", size=8)), (1000, many)):
        monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", limit)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert decode(files, image)[1].all()
            with pytest.raises(raylance.BadRowError, match="more than max_pixels=1000 allows"):
                decode(files[:1], dataclasses.replace(image, max_pixels=1000))
    assert PIL.Image.MAX_IMAGE_PIXELS == 4 * MAX_PIXELS


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"])
@pytest.mark.parametrize("image", [Image("image", size=8), Image("image", size=8, mode="L"), ImageCrop("image")])
def test_absurd_dimensions_are_refused_by_default(kind: str, image: Any) -> None:
    data = with_size(encode(picture(16, 16), kind), kind, 16_000, 16_000)
    if isinstance(image, ImageCrop):
        image = image.follow(Image("image", size=8))
    out = np.empty(image.shape, image.dtype)
    with pytest.raises(PIL.Image.DecompressionBombError, match="256000000 pixels.*: more than max_pixels=178956970"):
        image.open().decode_into(memoryview(data), np.zeros(image.draws), out)


def test_a_limit_is_a_whole_number_and_part_of_the_setting() -> None:
    image = Image("image", size=8, max_pixels=np.int64(5000))
    assert pickle.loads(pickle.dumps(image)) == image == Image("image", size=8, max_pixels=5000)
    assert image != Image("image", size=8)
    for wrong in (0, -1, 2.5, True, "1000"):
        with pytest.raises(raylance.ConfigError, match=r"Image\('image'\).max_pixels=.*: must be an integer"):
            Image("image", max_pixels=wrong)


def test_the_least_limit_of_a_row_decides(write_dataset: Callable[..., str]) -> None:
    """A crop and a mask read the header of the image that they follow: by its limit, not by their own."""
    files = [jpeg(picture(40, 30)), jpeg(picture(41, 30)), jpeg(picture(40, 30))]
    masks = [encode(picture(image, 30).convert("L")) for image in (40, 41, 40)]
    uri = write_dataset(pa.table({"image": pa.array(files, pa.binary()), "mask": pa.array(masks, pa.binary())}))
    large = Image("image", size=8, name="large", max_pixels=None)
    small = Image("image", size=4, name="small", max_pixels=1200)
    mask = Image("mask", like="large", mode="L")
    handle = raylance.dataset(uri, decode=[large, small, mask, ImageCrop("image", like="small")], on_bad_row="mask")
    batch = handle.head(3)
    assert batch["large"].any(axis=(1, 2, 3)).tolist() == [True, False, True]
    assert batch["small_crop"].any(axis=1).tolist() == [True, False, True]
    alone = raylance.dataset(uri, decode=[large, mask], on_bad_row="mask").head(3)
    assert alone["large"].any(axis=(1, 2, 3)).all()
    assert alone["mask"].any(axis=(1, 2, 3)).all()


def test_the_fast_way_is_taken_and_stats_count_the_slow_one(write_dataset: Callable[..., str]) -> None:
    """From Lance to the batch: Arrow lends memory in a format that simplejpeg refuses, and nobody would notice."""
    jpegs = [jpeg(picture(40, 30, seed)) for seed in range(20)]
    for slow in ([], [3, 17]):
        images = [TO_PILLOW["CMYK"](picture(40, 30)) if row in slow else data for row, data in enumerate(jpegs)]
        uri = write_dataset(pa.table({"image": pa.array(images, pa.binary())}))
        with raylance.dataset(uri, decode=Image("image", size=24), remainder="ragged").loader(
            runtime="threads"
        ) as loader:
            assert sum(len(batch["image"]) for batch in loader.batches(global_batch_size=8)) == 20
            # What is made ahead for the next epoch counts as well, if it has come so far.
            assert len(slow) <= loader.stats()["fallback_rows"] <= 2 * len(slow)


def test_other_formats_are_no_fallback() -> None:
    assert decode([encode(picture(8, 8))] * 3, Image("image", size=8))[2].fallback_rows == 0


def shrunk(data: bytes, size: tuple[int, int], *, draft: bool) -> Pixels:
    out = np.empty((*size, 3), np.uint8)
    Image("image", size=size, draft=draft).decode_into(data, np.zeros(41), out)
    return out


@pytest.mark.parametrize("orientation", [1, 6])
def test_drafts_are_near_and_only_from_twice_the_size_on(orientation: int) -> None:
    data = jpeg(picture(400, 300).filter(PIL.ImageFilter.GaussianBlur(3)), orientation=orientation)
    high, wide = by_pillow(data).shape[:2]
    for factor in (1.5, 1.99, 2, 2.5, 4, 9):
        size = int(high / factor), int(wide / factor)
        differing = np.abs(shrunk(data, size, draft=True).astype(int) - shrunk(data, size, draft=False))
        assert differing.any() == (factor >= 2)
        assert differing.mean() < 10
        reduced = PixelDecoder().decode(data, whole, size)
        assert (reduced.shape[0] < high) == (factor >= 2)
        assert reduced.shape[0] >= size[0]
        assert reduced.shape[1] >= size[1]


def test_a_draft_of_a_box_lies_where_the_box_lies() -> None:
    data = jpeg(picture(400, 300).filter(PIL.ImageFilter.GaussianBlur(3)), quality=95)
    decoder = PixelDecoder()
    for box in ((40, 30, 200, 160), (199, 139, 201, 161), (0, 0, 400, 300)):
        size = box[3] // 2 - 1, box[2] // 2 - 1
        reduced = PIL.Image.fromarray(decoder.decode(data, lambda *_, box=box: box, size)[..., :3])
        full = PIL.Image.fromarray(decoder.decode(data, lambda *_, box=box: box)[..., :3])
        assert reduced.width < full.width
        there, here = (
            np.asarray(image.resize((20, 20), PIL.Image.Resampling.BOX)).astype(int) for image in (reduced, full)
        )
        assert np.abs(there - here).mean() < 4


def digest() -> str:
    """A hash of every kind of JPEG, decoded and augmented."""
    found = hashlib.sha256()
    image = Image("image", size=(37, 50), augment=raylance.RandomResizedCrop(), hflip=0.5)
    rows, out = image.open(), np.empty(image.shape, np.uint8)
    for number, make in enumerate(KINDS.values()):
        data = make(picture(211 + number, 160, number))
        for draw in range(4):
            rows.decode_into(data, np.random.default_rng((number, draw)).random(41), out)
            found.update(out.tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    "setting",
    [
        {"ATEN_CPU_CAPABILITY": "default"},
        pytest.param({"ATEN_CPU_CAPABILITY": "avx2"}, marks=pytest.mark.slow),
        pytest.param({"JSIMD_FORCENONE": "1"}, marks=pytest.mark.slow),
    ],
)
def test_pixels_are_the_same_on_lesser_processors(setting: dict[str, str]) -> None:
    """Without AVX-512 in torch, without AVX2, without any vectors in libjpeg-turbo; beside this machine's best."""
    command = [sys.executable, "-c", f"from {__name__} import digest; print(digest())"]
    run = subprocess.run(command, env=os.environ | setting, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == digest()


def test_states_name_the_codec_and_drafts(write_dataset: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    uri = write_dataset(pa.table({"image": pa.array([jpeg(picture(8, 8))] * 4, pa.binary())}))
    opened = raylance.dataset(uri, decode=Image("image", size=8))
    state = opened.loader().state_dict()
    assert state["codecs"] == {"image": CODEC}
    assert not {"draft", "max_pixels"} & set(state["decode"][0])
    opened.loader().load_state_dict(state)
    assert not caplog.records
    opened.loader().load_state_dict(state | {"codecs": {"image": "simplejpeg 0.1"}})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"codecs.image: saved 'simplejpeg 0.1', now {CODEC!r}" in caplog.text
    caplog.clear()
    drafts = raylance.dataset(uri, decode=Image("image", size=8, draft=True)).loader()
    assert drafts.state_dict()["decode"][0]["draft"] is True
    drafts.load_state_dict(state)
    assert "makes other batches of them" in caplog.text
    limited = raylance.dataset(uri, decode=Image("image", size=8, max_pixels=None)).loader()
    assert limited.state_dict()["decode"][0]["max_pixels"] is None
