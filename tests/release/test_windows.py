"""Windows of many columns through Ray, and in workers of torch's DataLoader."""

from collections.abc import Callable

import pyarrow as pa
import pytest

import raylance
from raylance import torch_data
from tests.helpers.robot_windows import ROWS, WINDOWS, check, expected, frames


def test_wide_columns_through_ray(write_dataset: Callable[..., str], ray_session: None) -> None:
    """Rows of 2 KiB, some of which are null, are sent once for each load, and not once for each sample."""
    table = frames()
    values = [None if row % 50 == 7 else [float(row)] * 512 for row in range(ROWS)]
    table = table.append_column("wide", pa.array(values, pa.list_(pa.float32(), 512)))
    table = table.append_column("full", pa.array([[row] * 256 for row in range(ROWS)], pa.list_(pa.int32(), 256)))
    offsets = {"wide": (-1, 0, 2), "full": (0, 1), "state": (0, 1)}
    windows = raylance.Windows(episode="episode", offsets=offsets)
    data = raylance.dataset(write_dataset(table), samples=windows, remainder="ragged")
    samples, seen = expected(table, windows), []
    with data.loader(runtime="ray", reader_bytes=400_000) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader.iter_batches(global_batch_size=20, batch_format="pyarrow", with_row_offset=True):
                for sample in batch.to_pylist():
                    seen.append(sample.pop("_rowoffset"))
                    assert sample == samples[seen[-1]]
    assert sorted(seen) == sorted([*samples, *samples])


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(*[frames().slice(at, 150) for at in range(0, ROWS, 150)])


def test_workers_of_torchs_dataloader(uri: str) -> None:
    samples, data = expected(frames()), raylance.dataset(uri, samples=WINDOWS, remainder="ragged")
    made = torch_data.IterableDataset(data, global_batch_size=32, with_row_offset=True)
    seen = [offset for batch in torch_data.Loader(made, num_workers=2) for offset in check(batch, samples)]
    assert sorted(seen) == list(range(ROWS))
