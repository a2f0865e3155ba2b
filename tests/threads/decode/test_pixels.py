"""Pixels are Pillow's whichever codec made them, on every processor, and the fast one did."""

import dataclasses
import io
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFile
import PIL.ImageFilter
import PIL.ImageOps
import PIL.PngImagePlugin
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.decode.images import Image, ImageCrop
from raylance.decode.pixels import CODEC, PixelDecoder, Pixels
from raylance.errors import ConfigError
from tests.helpers.images import (
    KINDS,
    TO_PILLOW,
    XMP,
    by_pillow,
    decode,
    encode,
    exif_segment,
    grey_of,
    jpeg,
    picture,
    png_chunk,
    with_chunks,
)
from tests.helpers.processors import digest, digest_elsewhere


@pytest.fixture(scope="module", autouse=True)
def without_avx() -> Iterator[subprocess.Popen[str]]:
    """It takes two seconds, beside the other tests of this file."""
    with digest_elsewhere(ATEN_CPU_CAPABILITY="default") as other:
        yield other


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


def test_a_limit_of_pixels_that_this_process_has_set_is_an_error_that_names_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is set in the user's process: what its Pillow refuses and helpers would decode is refused by name."""
    files = {kind: make(picture(61, 47)) for kind, make in LIMITED.items()}
    image = Image("image", size=8)
    for limit in (None, 61 * 47):
        monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", limit)
        assert decode([*files.values()], image)[1].all()
        with pytest.raises(raylance.BadRowError, match="max_pixels=1000"):
            decode([files["PNG"]], dataclasses.replace(image, max_pixels=1000))
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
    for unlimited in (image, dataclasses.replace(image, max_pixels=None)):
        with pytest.raises(ConfigError, match=r"MAX_IMAGE_PIXELS.* 2000,.*max_pixels="):
            decode([files["PNG"]], unlimited)
        assert decode([jpeg(picture(61, 47))], unlimited)[1].all(), "Pillow has no part in it"
    assert PIL.Image.MAX_IMAGE_PIXELS == 1000


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


@pytest.mark.parametrize(
    ("kind", "bits", "maxval"),
    [("PNG", 1, 0), ("PNG", 2, 0), ("PNG", 4, 0), ("TIFF", 1, 0), ("TIFF", 2, 0), ("TIFF", 4, 0), ("BMP", 1, 0)]
    + [("JPEG2000", 2, 0), ("JPEG2000", 4, 0), ("JPEG2000", 7, 0), ("JPEG2000", 8, 0)]
    + [(kind, 8, maxval) for kind in ("PGM", "plain PGM") for maxval in (1, 5, 15, 200, 254, 255)],
)
def test_grey_of_fewer_bits_is_as_it_is_stored(kind: str, bits: int, maxval: int) -> None:
    numbers = np.arange(13 * 7).reshape(7, 13) % ((maxval or (1 << bits) - 1) + 1)
    data = grey_of(numbers, kind, bits, maxval)
    out = decode([data], Image("image", size=(7, 13), mode="L"))[0]
    np.testing.assert_array_equal(out[0, ..., 0], numbers)
    np.testing.assert_array_equal(decode([data], Image("image", size=(7, 13)))[0][0], by_pillow(data))


def test_grey_of_one_bit_is_one_where_it_is_white() -> None:
    mask = np.arange(24).reshape(4, 6) % 3 == 0
    for kind in ("PNG", "PPM", "TIFF", "GIF", "BMP", "PCX"):
        found = decode([encode(PIL.Image.fromarray(mask), kind)], Image("image", size=(4, 6), mode="L"))[0]
        np.testing.assert_array_equal(found[0, ..., 0] > 0, mask, kind)
        assert kind == "GIF" or found.max() == 1


EXIF = exif_segment(6)[4:]  # of 8 bits, from "Exif" on

PROFILE = b"\nexif\n%8d\n" % len(EXIF) + EXIF.hex().encode() + b"\n"

XMP_TEXT = b"XML:com.adobe.xmp\0\0\0\0\0" + XMP

TURNING_CHUNKS = {
    "EXIF": png_chunk(b"eXIf", EXIF[6:]),
    "raw profile": png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(PROFILE)),
    "raw profile, not compressed": png_chunk(b"tEXt", b"Raw profile type exif\0" + PROFILE),
    "international raw profile": png_chunk(b"iTXt", b"Raw profile type exif\0\1\0\0\0" + zlib.compress(PROFILE)),
    "XMP": png_chunk(b"iTXt", XMP_TEXT),
}

TURNED: dict[str, Callable[[PIL.Image.Image], bytes]] = {
    **{
        f"PNG, {name}, {'before' if before else 'behind'} the pixels": lambda image, chunk=chunk, before=before: (
            with_chunks(encode(image), chunk, before_pixels=before)
        )
        for name, chunk in TURNING_CHUNKS.items()
        for before in (True, False)
    },
    "JPEG, XMP": lambda image: jpeg(image, xmp=XMP),
    "CMYK, XMP": lambda image: jpeg(image.convert("CMYK"), xmp=XMP),
    "WebP, XMP": lambda image: encode(image, "WEBP", xmp=XMP, lossless=True),
    "WebP, EXIF": lambda image: encode(image, "WEBP", exif=EXIF, lossless=True),
}


@pytest.mark.parametrize("kind", TURNED)
def test_what_turns_an_image_in_pillow_turns_it_here(kind: str) -> None:
    data = TURNED[kind](picture(20, 12))
    wanted = by_pillow(data)
    assert wanted.shape == (20, 12, 3)
    np.testing.assert_array_equal(PixelDecoder().decode(data, whole)[..., :3], wanted)
    assert PixelDecoder().decode_grey(data, lambda *size: [whole(*size)])[0].shape == (20, 12, 1)
    crop = ImageCrop("image").follow(Image("image", size=8))
    assert decode_crop(data, crop)[4:6].tolist() == [12, 20]


def decode_crop(data: bytes, crop: ImageCrop) -> np.ndarray:
    out = np.empty(7, np.int32)
    crop.decode_into(memoryview(data), np.zeros(crop.draws), out)
    return out


def damaged_exif(data: bytes, random: Any) -> bytes:
    """Some bytes of EXIF that are others, or missing at the end."""
    found = bytearray(data)
    for _ in range(random.randint(1, 5)):
        found[random.randrange(6, len(found))] = random.choice([0, 1, 255, random.randrange(256)])
    return bytes(found[: random.choice([len(found), random.randrange(6, len(found))])])


WITH_EXIF: dict[str, Callable[[PIL.Image.Image, bytes], bytes]] = {
    "JPEG": lambda image, exif: jpeg(image, exif=exif),
    "JPEG with a density": lambda image, exif: jpeg(image, exif=exif, dpi=(72, 72)),
    "grey JPEG": lambda image, exif: jpeg(image.convert("L"), exif=exif),
    "CMYK": lambda image, exif: jpeg(image.convert("CMYK"), exif=exif),
    "PNG": lambda image, exif: with_chunks(encode(image), png_chunk(b"eXIf", exif[6:])),
    "PNG, behind": lambda image, exif: with_chunks(encode(image), png_chunk(b"eXIf", exif[6:]), before_pixels=False),
    "PNG, a profile": lambda image, exif: with_chunks(
        encode(image), png_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 9\n" + exif.hex().encode())
    ),
    "WebP": lambda image, exif: encode(image, "WEBP", exif=exif, lossless=True),
}


def rich_exif(orientation: int) -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x011A] = orientation, "maker", 72.0
    exif.get_ifd(0x8825)[2] = (1.0, 2.0, 3.0)
    exif.get_ifd(0x8769)[0x927C] = b"made by"
    return exif.tobytes()


@given(st.sampled_from(sorted(WITH_EXIF)), st.integers(0, 9), st.randoms(use_true_random=False))
def test_damaged_exif_never_makes_a_row_bad(kind: str, orientation: int, random: Any) -> None:
    """It is turned as Pillow turns it, or one of eight ways if Pillow raises there."""
    image = picture(20, 12)
    data = WITH_EXIF[kind](image, damaged_exif(rich_exif(orientation), random))
    stored = by_pillow(WITH_EXIF[kind](image, rich_exif(1)))
    views = [stored[::down, ::right] for down in (1, -1) for right in (1, -1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            views = [by_pillow(data)]
        except Exception:  # anything at all
            views += [view.transpose(1, 0, 2) for view in views]
        found = PixelDecoder().decode(data, whole)[..., :3]
        assert any(np.array_equal(found, view) for view in views)
        grey = PixelDecoder().decode_grey(data, lambda *size: [whole(*size)])[0]
        crop = decode_crop(data, ImageCrop("image").follow(Image("image", size=8)))
    assert grey.shape[:2] == found.shape[:2] == (crop[5], crop[4])


def test_other_metadata_never_makes_a_row_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and profiles beyond Pillow's limits, which belong to the process, and chunks of a wrong size."""
    image, long = picture(20, 12), zlib.compress(bytes(5_000_000))
    chunks = [
        png_chunk(b"zTXt", b"Comment\0\0" + long),
        png_chunk(b"iCCP", b"a profile\0\0" + long),
        png_chunk(b"pHYs", b"\0") + png_chunk(b"gAMA", b"") + png_chunk(b"cHRM", b"\0") + png_chunk(b"sRGB", b""),
        png_chunk(b"tEXt", b"Comment\0is good")[:-1] + b"!",
        png_chunk(b"eXIf", EXIF[6:]) + png_chunk(b"zTXt", b"Raw profile type exif\0\0is not compressed"),
    ]
    monkeypatch.setattr(PIL.PngImagePlugin, "MAX_TEXT_CHUNK", 1)
    for number, chunk in enumerate(chunks):
        for before in (True, False):
            data = with_chunks(encode(image), chunk, before_pixels=before)
            found = PixelDecoder().decode(data, whole)[..., :3]
            turned = np.asarray(image)[::-1].transpose(1, 0, 2)
            np.testing.assert_array_equal(found, turned if number == 4 else np.asarray(image))


def test_an_orientation_that_cannot_be_read_is_counted(write_dataset: Callable[..., str]) -> None:
    images = [jpeg(picture(12, 20, seed), exif=b"Exif\0\0MM and no more", dpi=(72, 72)) for seed in range(6)]
    images += [jpeg(picture(12, 20, seed), orientation=1) for seed in range(6)]
    handle = raylance.dataset(
        write_dataset(pa.table({"image": pa.array(images, pa.binary())})),
        decode=[Image("image", size=(20, 12)), ImageCrop("image"), Image("image", name="grey", like="image", mode="L")],
        remainder="ragged",
    )
    with handle.loader(runtime="threads") as loader:
        assert sum(len(batch["image"]) for batch in loader.batches(global_batch_size=6)) == 12
        assert loader.stats()["unturned_rows"] >= 6
        assert loader.stats()["masked_rows"] == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "TIFF", "CMYK"])
@pytest.mark.parametrize("of_process", [False, True])
def test_truncated_images_follow_the_setting_and_a_process_that_contradicts_it_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: str, of_process: bool
) -> None:
    data = TO_PILLOW["CMYK"](picture(61, 47)) if kind == "CMYK" else encode(picture(61, 47), kind)
    data = data[: len(data) * 2 // 3]
    monkeypatch.setattr(PIL.ImageFile, "LOAD_TRUNCATED_IMAGES", of_process)
    for mode in ("RGB", "L"):
        image = Image("image", size=8, mode=mode)  # type: ignore[arg-type]
        wanted = ConfigError if of_process else raylance.BadRowError
        with pytest.raises(wanted, match='LOAD_TRUNCATED_IMAGES.*truncated="accept"' if of_process else "truncated"):
            decode([data], image)
        accepted = decode([data], dataclasses.replace(image, truncated="accept"))[0]
        assert accepted.any()
        monkeypatch.setattr(PIL.ImageFile, "LOAD_TRUNCATED_IMAGES", not of_process)
        np.testing.assert_array_equal(decode([data], dataclasses.replace(image, truncated="accept"))[0], accepted)
        monkeypatch.setattr(PIL.ImageFile, "LOAD_TRUNCATED_IMAGES", of_process)
    with pytest.raises(ConfigError, match="truncated='yes'"):
        Image("image", truncated="yes")  # type: ignore[arg-type]


def test_a_gif_is_not_decoded_where_the_process_turns_its_palette_into_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Class numbers would become their brightness."""
    numbers = np.arange(13 * 7, dtype=np.uint8).reshape(7, 13) % 5
    image = PIL.Image.fromarray(numbers)
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255, 255, 255, 255])
    data, mask = encode(image, "GIF"), Image("image", size=(7, 13), mode="L")
    np.testing.assert_array_equal(decode([data], mask)[0][0, ..., 0], numbers)
    monkeypatch.setattr(PIL.GifImagePlugin, "LOADING_STRATEGY", PIL.GifImagePlugin.LoadingStrategy.RGB_ALWAYS)
    with pytest.raises(ConfigError, match="LOADING_STRATEGY.*RGB_AFTER_FIRST"):
        decode([data], mask)


def test_a_process_that_only_decodes_is_set_up_whatever_its_environment_says() -> None:
    script = (
        "import warnings, PIL.Image, PIL.ImageFile, raylance.decode.pixels as pixels\n"
        "PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.Image.MAX_IMAGE_PIXELS = True, 10\n"
        "pixels.set_up_process()\n"
        "assert not PIL.ImageFile.LOAD_TRUNCATED_IMAGES and PIL.Image.MAX_IMAGE_PIXELS is None\n"
        "warnings.warn_explicit('of Pillow', UserWarning, 'Image.py', 1, module='PIL.Image')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


LARGE = (1400, 1200)  # more pixels than are converted at once


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "turned"])
def test_large_images_are_decoded_like_small_ones(mode: str) -> None:
    image = picture(*LARGE)
    if mode == "turned":
        data = encode(image, "WEBP", orientation=6, lossless=True, quality=0, method=0)
    else:
        kind, options = ("TIFF", {}) if mode == "CMYK" else ("PNG", {"compress_level": 0})
        data = encode(image.convert(mode), kind, **options)
    np.testing.assert_array_equal(PixelDecoder().decode(data, whole)[..., :3], by_pillow(data))


def test_large_deep_images_are_scaled_as_a_whole() -> None:
    deep = np.arange(LARGE[0] * LARGE[1], dtype=np.uint32).reshape(LARGE) % 65536
    found = PixelDecoder().decode(encode(PIL.Image.fromarray(deep.astype(np.uint16))), whole)
    np.testing.assert_array_equal(found[..., :3], (deep >> 8).astype(np.uint8)[..., None].repeat(3, 2))
    floats = np.linspace(-1, 1, deep.size, dtype=np.float32).reshape(LARGE)
    found = PixelDecoder().decode(encode(PIL.Image.fromarray(floats), "TIFF"), whole)
    np.testing.assert_array_equal(found[..., 0], ((floats.astype(np.float64) + 1) * 127.5).astype(np.uint8))


def test_memory_of_large_images_is_bounded_and_given_back() -> None:
    small, large = jpeg(picture(90, 60)), jpeg(PIL.Image.new("RGB", (6000, 5000)))
    by_pillow_alone = encode(PIL.Image.new("RGB", (2400, 2000)))
    decoder = PixelDecoder()
    for data in (small, by_pillow_alone):
        decoder.decode(data, whole)
    tracemalloc.start()
    try:
        decoder.decode(large, whole)
        decoder.decode(small, whole)
        assert tracemalloc.get_traced_memory()[0] < 10 << 20
        tracemalloc.reset_peak()
        decoder.decode(by_pillow_alone, whole)
        assert tracemalloc.get_traced_memory()[1] < 5 * 2400 * 2000
    finally:
        tracemalloc.stop()


def test_pixels_are_the_same_on_lesser_processors(without_avx: subprocess.Popen[str]) -> None:
    assert without_avx.communicate(timeout=120)[0].strip() == digest()


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("orientation", [*range(1, 9)])
@pytest.mark.parametrize("size", [(1, 40), (40, 1), (1, 1)])
def test_images_of_one_pixel_in_a_row_or_column_are_resized_as_they_are_shown(
    size: tuple[int, int], orientation: int, mode: Any
) -> None:
    """NumPy calls pixels contiguous whatever the stride of an axis of one pixel, which is negative after some turns."""
    encoded = jpeg(picture(*size), orientation=orientation)
    pixels, _, _ = decode([encoded], Image("image", size=(20, 20), mode=mode))
    shown = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(encoded))).convert(mode)
    wanted = np.asarray(shown.resize((20, 20), PIL.Image.Resampling.BILINEAR)).reshape(pixels[0].shape)
    np.testing.assert_allclose(pixels[0].astype(int), wanted.astype(int), atol=1)


@pytest.mark.parametrize(("shape", "axes"), [((1, 40, 1), (1, 0, 2)), ((1, 40, 3), (1, 0, 2)), ((40, 1, 1), (1, 0, 2))])
def test_pixels_are_written_into_given_memory_and_no_other(shape: Any, axes: Any) -> None:
    mode: Any = "RGB" if shape[2] == 3 else "L"
    guarded = np.full(4096, 77, dtype=np.uint8)
    memory = guarded[1024 : 1024 + int(np.prod(shape))].reshape(shape).transpose(axes)
    image = Image("image", size=memory.shape[:2], mode=mode)
    encoded, draws = jpeg(picture(50, 60)), np.zeros(image.draws)
    image.decode_into(encoded, draws, memory)
    plain = np.empty(memory.shape, dtype=np.uint8)
    image.decode_into(encoded, draws, plain)
    np.testing.assert_array_equal(memory, plain)
    assert (guarded[:1024] == 77).all()
    assert (guarded[1024 + memory.size :] == 77).all()
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        image.decode_into(encoded, draws, memory)
