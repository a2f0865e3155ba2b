"""Lists of images through decode actors."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from tests.helpers.images import encode


@pytest.mark.promise("P4")
@pytest.mark.usefixtures("ray_session")
def test_lists_of_images_are_those_of_threads(write_dataset: Callable[..., str]) -> None:
    """Also with a bad image, which is masked alone."""
    rng = np.random.default_rng(0)
    images = [[encode(rng.integers(0, 255, (24, 32, 3), np.uint8)) for _ in range(row % 4)] for row in range(80)]
    images[5] = [b"bad", *images[5]]
    uri = write_dataset(pa.table({"id": np.arange(80), "images": pa.array(images, pa.list_(pa.binary()))}))
    decoder = raylance.Image("images", size=16, augment=raylance.RandomResizedCrop(), hflip=0.5)
    data = raylance.dataset(
        uri, columns=["id", decoder], on_bad_row="mask", max_bad_rows=None, remainder="ragged", order="row"
    )
    found = []
    for runtime, decoders in (("threads", 0), ("ray", 0), ("ray", 2)):
        with data.loader(runtime=runtime, num_decoders=decoders) as loader:
            found.append(list(loader.iter_torch_batches(global_batch_size=12)))
            assert loader.stats()["masked_rows"] == 1
    for batches in zip(*found, strict=True):
        for name in ("id", "images", "images_length", "images_valid"):
            assert all(torch.equal(batch[name], batches[0][name]) for batch in batches)
    assert sum(int((~batch["images_valid"]).sum()) for batch in found[0]) == 1
