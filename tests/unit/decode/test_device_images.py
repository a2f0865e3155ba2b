"""Owns the checks of images that the trainer's device decodes, on the CPU: they are those of `raylance.Image`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance import DeviceImage, Image, RandomResizedCrop
from raylance.testing import check_decoder
from tests.helpers.images import encode, make_images

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


def test_settings_are_those_of_an_image(uri: str) -> None:
    assert DeviceImage("image", 24).shape == (24, 24, 3)
    assert not DeviceImage("image", 24).is_random
    assert DeviceImage("image", (8, 9), **CROPS).is_random
    with pytest.raises(raylance.ConfigError, match=r"hflip=2\): a probability"):
        DeviceImage("image", 24, hflip=2)
    with pytest.raises(raylance.BadRowError, match="column 'image' of row offset 3 .*nvImageCodec cannot decode it"):
        list(
            raylance.dataset(uri, decode=DeviceImage("image", 8), filter="id = 3 or id = 9").iter_batches(batch_size=2)
        )
    check_decoder(DeviceImage("image", 24, **CROPS), make_images(4))


def test_a_machine_without_the_codec_says_how_to_get_it(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvidia.nvimgcodec", None)
    with pytest.raises(
        raylance.ConfigError, match=r"nvImageCodec is not installed here: pip install 'raylance\[nvjpeg\]'"
    ):
        raylance.dataset(uri, decode=DeviceImage("image", 8))
