"""Images that the trainer's device decodes, on the CPU: they are those of `raylance.Image`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageCms
import pyarrow as pa
import pytest
import torch

import raylance
from raylance import Image, RandomResizedCrop
from raylance.decode.device_images import view_of
from raylance.errors import ConfigError, DatasetError
from raylance.images import DeviceImage
from raylance.testing import check_decoder
from tests.helpers.images import KINDS, TO_PILLOW, by_pillow, encode, make_images, picture

pytest.importorskip("nvidia.nvimgcodec")

CROPS: dict[str, Any] = {"augment": RandomResizedCrop(), "hflip": 0.5}
ROWS = 40


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    """Photographs, and other formats among them; row 3 is damaged, row 4 missing."""
    rng = np.random.default_rng(0)
    images: list[bytes | None] = list(make_images(ROWS, size=(61, 83)))
    images[3], images[4] = images[3][: len(images[3]) // 2] if images[3] else None, None
    colours, grey = rng.integers(0, 256, (50, 70, 3), dtype=np.uint8), rng.integers(0, 256, (50, 70), dtype=np.uint8)
    images[5:11] = [
        encode(colours),
        encode(grey),
        encode(grey, "JPEG"),
        encode(colours, "JPEG", orientation=6),
        encode(colours, "JPEG", progressive=True, subsampling="4:4:4"),
        encode(colours, "WEBP", lossless=True),
    ]
    return write_dataset(pa.table({"id": np.arange(ROWS), "image": pa.array(images, pa.binary())}))


def test_pixels_are_those_of_decode_actors(uri: str) -> None:
    batches = []
    for decode in (DeviceImage("image", 48, **CROPS), Image("image", 48, **CROPS)):
        handle = raylance.dataset(uri, decode=decode, on_bad_row="mask", seed=5)
        assert handle.schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), (48, 48, 3))
        with handle.loader(num_decoders=0) as loader:
            batches.append([batch for _ in range(2) for batch in loader.iter_torch_batches(batch_size=20)])
            state = loader.state_dict()
        assert state["codecs"]["image"].endswith(", cpu") == isinstance(decode, DeviceImage)
    for ours, wanted in zip(*batches, strict=True):
        assert torch.equal(ours["id"], wanted["id"])
        assert torch.equal(ours["_valid"], wanted["_valid"])
        assert ours["image"].shape == (20, 3, 48, 48)
        assert ours["image"].is_contiguous(memory_format=torch.channels_last)
        for row, number in enumerate(ours["id"].tolist()):
            assert torch.equal(ours["image"][row], wanted["image"][row]), number
    assert sum(int((~batch["_valid"]).sum()) for batch in batches[0]) == 4


def in_other_formats() -> dict[str, bytes]:
    """One picture in the formats and modes that Pillow writes; damaged JPEGs."""
    photo = picture(61, 47)
    grey = np.asarray(photo.convert("L"))
    modes = {mode: photo.convert(mode) for mode in ("RGB", "L", "LA", "RGBA", "P", "1", "CMYK")}
    srgb, lab = (PIL.ImageCms.createProfile(name) for name in ("sRGB", "LAB"))
    modes["LAB"] = PIL.ImageCms.profileToProfile(photo, srgb, lab, outputMode="LAB")  # type: ignore[assignment]
    modes |= {
        f"{dtype} {high - low:g}": PIL.Image.fromarray((low + grey / 255 * (high - low)).astype(dtype))
        for dtype, low, high in (("float32", 0, 255), ("float32", -1, 1), ("int32", 0, 255), ("uint16", 0, 65535))
    }
    kept = {
        "PNG": ("RGB", "L", "LA", "RGBA", "P", "1", "uint16 65535"),
        "WEBP": ("RGB", "RGBA"),
        "BMP": ("RGB", "L", "P", "1"),
        "DIB": ("RGB",),
        "TGA": ("RGB", "RGBA", "L"),
        "PPM": ("RGB", "L", "1", "uint16 65535"),
        "TIFF": tuple(modes),
    }
    made = {f"{kind} {mode}": encode(modes[mode], kind) for kind, which in kept.items() for mode in which}
    made |= {kind: encode(photo, kind) for kind in ("GIF", "AVIF", "JPEG2000")}
    made |= {f"{kind} turned": encode(photo, kind, orientation=6) for kind in ("PNG", "WEBP", "AVIF", "TIFF")}
    made |= {name: make(photo) for name, make in TO_PILLOW.items()}
    whole = encode(photo, "JPEG")
    middle = whole.index(b"\xff\xda") + (len(whole) - whole.index(b"\xff\xda")) // 2
    for name, marker in (("SOI", b"\xff\xd8"), ("SOF", b"\xff\xc0"), ("DHT", b"\xff\xc4"), ("fill", b"\xff" * 9)):
        made[f"a JPEG with {name} among its pixels"] = whole[:middle] + marker + whole[middle:]
    return made | {f"{cut:.0%} of a JPEG": whole[: int(len(whole) * cut)] for cut in (0.001, 0.3, 0.9, 0.999)}


@pytest.mark.parametrize("augment", [None, RandomResizedCrop()])
def test_every_format_gives_the_pixels_of_an_image(write_dataset: Callable[..., str], augment: Any) -> None:
    others, jpegs = in_other_formats(), {name: make(picture(61, 47)) for name, make in KINDS.items()}
    names = [*others, *jpegs]
    encoded = pa.array([*others.values(), *jpegs.values()], pa.binary())
    uri = write_dataset(pa.table({"id": np.arange(len(names)), "image": encoded}))
    batches = []
    for kind in (Image, DeviceImage):
        decode = kind("image", (47, 61), augment=augment, hflip=0.5)
        handle = raylance.dataset(uri, decode=decode, on_bad_row="mask", order="sequential", max_bad_rows=None)
        with handle.loader(num_decoders=0) as loader:
            batches += loader.iter_torch_batches(batch_size=len(names))
            fallbacks = loader.stats()["fallback_rows"]
    wanted, ours = batches
    bad = [names[row] for row in np.flatnonzero(~ours["_valid"]) if "among" not in names[row]]
    assert bad == [f"{cut} of a JPEG" for cut in ("0%", "30%", "90%", "100%")]
    assert torch.equal(ours["_valid"], wanted["_valid"])
    assert [name for row, name in enumerate(names) if not torch.equal(ours["image"][row], wanted["image"][row])] == []
    assert fallbacks == len(names), "rows beside damaged ones are decoded by themselves"
    good = raylance.dataset(uri, decode=DeviceImage("image", 8), filter=f"id >= {len(others)}")
    with good.loader() as loader:
        list(loader.iter_torch_batches(batch_size=len(jpegs)))
        assert loader.stats()["fallback_rows"] == 0


def test_settings_are_those_of_an_image(uri: str) -> None:
    assert DeviceImage("image", 24).shape == (24, 24, 3)
    assert not DeviceImage("image", 24).is_random
    assert DeviceImage("image", (8, 9), **CROPS).is_random
    with pytest.raises(ConfigError, match=r"hflip=2\): a probability"):
        DeviceImage("image", 24, hflip=2)
    with pytest.raises(raylance.BadRowError, match="column 'image' of row offset 3 .*[Tt]runcated"):
        two = raylance.dataset(uri, decode=DeviceImage("image", 8), filter="id = 3 or id = 9")
        list(two.iter_batches(batch_size=2))
    check_decoder(DeviceImage("image", 24, **CROPS), make_images(4))


def test_an_image_of_too_many_pixels_is_a_bad_row(uri: str) -> None:
    """Rows of 61 x 83 pixels are too large, and those of 50 x 70 are not."""
    decode = DeviceImage("image", 8, max_pixels=50 * 70)
    assert decode != DeviceImage("image", 8)
    handle = raylance.dataset(uri, decode=decode, on_bad_row="mask", order="sequential")
    with handle.loader(num_decoders=0) as loader:
        (batch,) = loader.iter_batches(batch_size=ROWS)
    assert np.flatnonzero(batch["_valid"]).tolist() == list(range(5, 11))
    with pytest.raises(DatasetError, match="max_pixels=3499"):
        raylance.dataset(uri, decode=DeviceImage("image", 8, max_pixels=3499), filter="id = 9")


def test_a_machine_without_the_codec_says_how_to_get_it(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvidia.nvimgcodec", None)
    with pytest.raises(ConfigError, match=r"raylance\[nvjpeg\]"):
        raylance.dataset(uri, decode=DeviceImage("image", 8))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_kernel_is_given_the_displayed_part(orientation: int) -> None:
    """Pillow turns a picture of each orientation; the view's addresses name the same pixels of the stored one."""
    stored = np.random.default_rng(orientation).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    displayed = by_pillow(encode(stored, orientation=orientation))
    left, top, width, height = 1, 2, displayed.shape[1] - 2, displayed.shape[0] - 3
    view = view_of(0, stored.shape, orientation, (left, top, width, height), flips=True, row=9)
    address, row_bytes, column_bytes = view[:3]
    places = address + row_bytes * np.arange(height)[:, None] + column_bytes * np.arange(width)
    part = stored.reshape(-1)[places[..., None] + np.arange(3)]
    assert np.array_equal(part, displayed[top : top + height, left : left + width])
    assert view[3:] == (height, width, True, 9)
