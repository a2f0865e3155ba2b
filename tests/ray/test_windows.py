"""Windows through Ray: the samples of threads."""

from collections.abc import Callable, Iterator

import pytest

import raylance
from tests.helpers.robot_windows import ROWS, WINDOWS, check, expected, frames


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(*[frames().slice(at, 150) for at in range(0, ROWS, 150)])


@pytest.fixture
def by_ray(uri: str, ray_session: None) -> Iterator[raylance.RankLoader]:
    with raylance.dataset(uri, windows=WINDOWS, remainder="ragged").loader(runtime="ray") as loader:
        yield loader


def test_windows_through_ray(uri: str, by_ray: raylance.RankLoader) -> None:
    samples = expected(frames())
    batches = [check(each, samples) for each in by_ray.iter_batches(global_batch_size=32, with_row_offset=True)]
    data = raylance.dataset(uri, windows=WINDOWS, remainder="ragged")
    with data.loader(runtime="threads") as loader:
        here = [each["_rowoffset"].tolist() for each in loader.iter_batches(global_batch_size=32, with_row_offset=True)]
    assert batches == here
    assert sorted(offset for batch in batches for offset in batch) == list(range(ROWS))
