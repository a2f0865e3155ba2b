"""Windows of many columns through Ray."""

from collections.abc import Callable

import pyarrow as pa

import raylance
from tests.helpers.robot_windows import ROWS, expected, frames


def test_wide_columns_through_ray(write_dataset: Callable[..., str], ray_session: None) -> None:
    """Rows of 2 KiB, some of which are null, are sent once for each load, and not once for each sample."""
    table = frames()
    values = [None if row % 50 == 7 else [float(row)] * 512 for row in range(ROWS)]
    table = table.append_column("wide", pa.array(values, pa.list_(pa.float32(), 512)))
    table = table.append_column("full", pa.array([[row] * 256 for row in range(ROWS)], pa.list_(pa.int32(), 256)))
    offsets = {"wide": (-1, 0, 2), "full": (0, 1), "state": (0, 1)}
    windows = raylance.Windows(episode="episode", offsets=offsets)
    data = raylance.dataset(write_dataset(table), windows=windows, remainder="ragged")
    samples, seen = expected(table, windows), []
    with data.loader(runtime="ray", max_window_bytes=400_000) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader.iter_batches(global_batch_size=20, batch_format="pyarrow", with_row_offset=True):
                for sample in batch.to_pylist():
                    seen.append(sample.pop("_rowoffset"))
                    assert sample == samples[seen[-1]]
    assert sorted(seen) == sorted([*samples, *samples])
