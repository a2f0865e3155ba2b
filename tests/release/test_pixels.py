"""Pixels on other processors, and of a plug-in of Pillow through Ray."""

from collections.abc import Callable

import numpy as np
import PIL.Image
import PIL.ImageFile
import PIL.ImageFilter
import PIL.ImageOps
import PIL.PngImagePlugin
import pyarrow as pa
import pytest

import raylance
from raylance.decode.images import Image, ImageCrop
from raylance.errors import ConfigError, DatasetError
from tests.helpers.images import (
    encode,
    picture,
    register_backwards,
)
from tests.helpers.processors import digest, digest_elsewhere


@pytest.mark.parametrize("setting", [{"ATEN_CPU_CAPABILITY": "avx2"}, {"JSIMD_FORCENONE": "1"}])
def test_pixels_are_the_same_on_other_lesser_processors(setting: dict[str, str]) -> None:
    """Without AVX-512 in torch, without any vectors in libjpeg-turbo; beside this machine's best."""
    with digest_elsewhere(**setting) as other:
        assert other.communicate(timeout=120)[0].strip() == digest()


@pytest.mark.usefixtures("ray_session")
def test_a_format_of_a_plugin_is_decoded_where_its_setup_is_named(write_dataset: Callable[..., str]) -> None:
    images = [encode(picture(12, 20, seed))[::-1] for seed in range(6)]
    uri = write_dataset(pa.table({"image": pa.array(images, pa.binary())}))
    register_backwards()
    try:
        with pytest.raises(DatasetError, match="plug-in.*setup="):
            raylance.dataset(uri, decode=Image("image", size=(20, 12)))
        plain = Image("image", size=(20, 12), setup=register_backwards)
        handle = raylance.dataset(uri, decode=[plain, ImageCrop("image")], order="sequential", remainder="ragged")
        with handle.loader(num_decoders=1) as loader:
            batches = list(loader.iter_batches(batch_size=3))
    finally:
        PIL.Image.OPEN.pop("BACKWARDS")
        PIL.Image.ID.remove("BACKWARDS")
    found = np.concatenate([batch["image"] for batch in batches])
    np.testing.assert_array_equal(found, [np.asarray(picture(12, 20, seed)) for seed in range(6)])
    with pytest.raises(ConfigError, match="setup=3"):
        Image("image", setup=3)  # type: ignore[arg-type]
