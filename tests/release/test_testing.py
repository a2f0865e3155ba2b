"""An order of one's own, through the loader."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest

import raylance
from tests.helpers.own_orders import ShortFirst

LENGTHS = np.arange(400) * 37 % 101


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(400), "length": LENGTHS}))


@pytest.mark.usefixtures("ray_session")
def test_an_order_of_ones_own_through_the_loader_with_resume(uri: str) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Local(ShortFirst):
        """Of no module that actors could import, as in a user's script: it is sent by value."""

        name: ClassVar[str] = "local"

    order = Local(column="length", window_rows=40)
    handle = raylance.dataset(uri, columns=["id"], order=order)
    with handle.loader(num_decoders=0) as loader:
        whole = [batch["id"].tolist() for batch in loader.iter_batches(global_batch_size=20)]
    assert sorted(row for batch in whole for row in batch) == list(range(400))
    lengths = LENGTHS[np.array(whole)]
    assert all(lengths[step].max() <= lengths[step + 2].min() for step in range(0, 18, 2)), "short ones come first"
    with handle.loader(num_decoders=0) as loader:
        for _, batch in zip(range(7), loader.iter_batches(global_batch_size=20), strict=False):
            assert batch["id"].tolist() == whole[loader.state_dict()["position"] // 20 - 1]
        state = loader.state_dict()
    assert state["order"] == {"name": "local", "shard_rows": 100, "column": "length", "window_rows": 40}
    with handle.loader(num_decoders=0) as loader:
        loader.load_state_dict(state)
        assert [batch["id"].tolist() for batch in loader.iter_batches(global_batch_size=20)] == whole[7:]
    other = raylance.dataset(uri, columns=["id"], order=Local(column="length", window_rows=8))
    with pytest.raises(raylance.StateError, match="order.window_rows: saved 40, now 8"):
        other.loader().load_state_dict(state)
    with pytest.raises(raylance.StateError, match="order.name: saved 'local', now 'window'"):
        raylance.dataset(uri, columns=["id"]).loader().load_state_dict(state)
