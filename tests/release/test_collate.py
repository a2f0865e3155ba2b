"""Batches of bfloat16 through Ray."""

import numpy as np
import pytest
import torch

import raylance
from tests.helpers.brain_floats import BRAIN


@pytest.mark.usefixtures("ray_session")
def test_bfloat16_is_a_number_of_numpy_with_its_package(bfloat16_uri: str) -> None:
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)

    def double(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"one": batch["one"] * dtype.type(2), **{name: batch[name] for name in ("vector", "name", "list")}}

    handle = raylance.dataset(bfloat16_uri, order="sequential")
    (batch,) = handle.iter_batches(batch_size=3, pad_lists={"list": 0.5})
    assert {batch[name].dtype for name in ("one", "vector", "even", "list")} == {dtype}
    np.testing.assert_array_equal(batch["vector"], BRAIN.astype(dtype).reshape(3, 2))
    assert batch["list"][1].tolist() == [0.5] * 5
    changed = raylance.dataset(bfloat16_uri, order="sequential", transform=double)
    for options in ({"runtime": "threads"}, {"num_decoders": 1}):  # a decode actor has not loaded Lance
        with changed.loader(**options) as loader:
            (batch,) = loader.iter_torch_batches(batch_size=3)
        assert torch.equal(batch["one"], torch.tensor(BRAIN).to(torch.bfloat16)[1:4] * 2)
        assert batch["vector"].dtype == batch["list"][2].dtype == torch.bfloat16
