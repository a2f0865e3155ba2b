"""Rows with a picture that is cut short and one without a value, and the errors that name the first."""

import traceback
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

import raylance
from tests.helpers.images import encode


def damaged(write_dataset: Callable[..., str]) -> str:
    good = encode(np.full((8, 8, 3), 200, np.uint8))
    values = [good[:40] if row == 33 else None if row == 57 else good for row in range(100)]
    files = [f"{row}.png" for row in range(100)]
    return write_dataset(pa.table({"image": pa.array(values, pa.binary()), "id": np.arange(100), "file": files}))


def check_bad_row(uri: str, decoders: int) -> None:
    dataset = raylance.dataset(uri, columns=["image", "id"], decode=raylance.Image("image"), order="sequential")
    mixed = raylance.mix({"one": (dataset, 1), "other": (dataset, 1)})
    with pytest.raises(raylance.BadRowError, match=r"row offset 33, file '33\.png', of "):
        dataset.take([33])
    # A handle would keep its helpers, and their CPUs, until the error that refers to it is collected.
    wanted = pytest.raises(raylance.BadRowError, match=r"row offset 33, file '33\.png', of ")
    with mixed.loader(num_decoders=0) as loader, wanted:
        list(loader.iter_batches(batch_size=10))
    with dataset.loader(num_decoders=decoders) as loader:
        with pytest.raises(raylance.BadRowError, match="row offset 33.*on_bad_row=") as caught:
            list(loader.iter_batches(global_batch_size=10))
        assert (caught.value.column, caught.value.row_offset) == ("image", 33)
        assert caught.value.file == "33.png"
        shown = "".join(traceback.format_exception(caught.value))
        assert "RayTaskError" not in shown
        assert not decoders or shown.count("Traceback") == 1, "none of the helper's process"
        assert loader.state_dict()["position"] == 30
