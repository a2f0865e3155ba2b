"""Windows through Ray: the samples of threads."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from tests.helpers.images import encode
from tests.helpers.robot_windows import ROWS, WINDOWS, check, expected, frames


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(*[frames().slice(at, 150) for at in range(0, ROWS, 150)])


def mean(batch: dict[str, Any]) -> dict[str, Any]:
    return {"mean": batch["image"].astype(np.float32).mean(axis=(1, 2, 3, 4)), "x": batch["x"]}


@pytest.mark.parametrize(("decoders", "transform"), [(0, None), (2, None), (0, mean), (2, mean)])
def test_pictures_that_samples_share(
    write_dataset: Callable[..., str], ray_session: None, decoders: int, transform: Any
) -> None:
    """Decoders decode each once for a chunk; a damaged one masks the samples that have it, as by threads."""
    rng = np.random.default_rng(0)
    files = [encode(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)) for _ in range(120)]
    files[50] = b"no picture"
    table = pa.table({"episode": np.arange(120) // 40, "image": files, "x": rng.random(120)})
    windows = raylance.Windows(episode="episode", offsets={"image": [-30, *range(-7, 1)], "x": [0, 1]})
    data = raylance.dataset(
        write_dataset(table), decode=raylance.Image("image", size=16), samples=windows, transform=transform,
        order="window", on_bad_row="mask", max_bad_rows=None, remainder="ragged",
    )  # fmt: skip
    found, stats = [], []
    for options in ({"runtime": "ray", "num_decoders": decoders}, {"runtime": "threads"}):
        with data.loader(**options) as loader:
            batches = list(loader.iter_batches(global_batch_size=120, with_row_offset=True))
            stats.append(loader.stats())
        assert sum(len(batch["_rowoffset"]) for batch in batches) == 120
        found.append([(name, batch[name].tobytes()) for batch in batches for name in sorted(batch)])
    assert found[0] == found[1]
    assert stats[0]["masked_rows"] == stats[1]["masked_rows"] == 8
    if transform is None:
        assert 120 <= stats[0]["decoded_rows"] <= 360, "and those of two chunks that are loaded ahead"


@pytest.mark.parametrize("decoders", [0, 1])
def test_a_rank_without_a_row_gets_a_batch_of_the_same_columns(
    write_dataset: Callable[..., str], ray_session: None, decoders: int
) -> None:
    files = [encode(np.full((8, 8, 3), 9 * row, dtype=np.uint8)) for row in range(5)]
    uri = write_dataset(pa.table({"episode": [0] * 5, "image": files}))
    windows = raylance.Windows(episode="episode", offsets={"image": [-1, 0]})
    data = raylance.dataset(uri, decode=raylance.Image("image", size=8), samples=windows, remainder="ragged_or_empty")
    with data.loader(runtime="ray", num_decoders=decoders, rank=0, world_size=4) as loader:
        batches = list(loader.iter_batches(global_batch_size=4))
    assert [batch["image"].shape[1:] for batch in batches] == [(2, 8, 8, 3)] * 2
    assert sorted(len(batch["image"]) for batch in batches) == [0, 1]


@pytest.fixture
def by_ray(uri: str, ray_session: None) -> Iterator[raylance.RankLoader]:
    with raylance.dataset(uri, samples=WINDOWS, remainder="ragged").loader(runtime="ray") as loader:
        yield loader


def test_windows_through_ray(uri: str, by_ray: raylance.RankLoader) -> None:
    samples = expected(frames())
    batches = [check(each, samples) for each in by_ray.iter_batches(global_batch_size=32, with_row_offset=True)]
    data = raylance.dataset(uri, samples=WINDOWS, remainder="ragged")
    with data.loader(runtime="threads") as loader:
        here = [each["_rowoffset"].tolist() for each in loader.iter_batches(global_batch_size=32, with_row_offset=True)]
    assert batches == here
    assert sorted(offset for batch in batches for offset in batch) == list(range(ROWS))
