"""Rows that lie in memory: a read specification, a selection and a reader in one."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from raylance.errors import DatasetError
from raylance.samples.table import SampleTable
from raylance.source.reader import RowReader


def table_of(sizes: list[int]) -> pa.Table:
    return pa.table({"data": pa.array([b"x" * size for size in sizes], pa.binary())})


class InMemory(RowReader):
    """A read specification, a selection and a reader of a table in one: the offset of row r is `step` r."""

    uri, version = "memory", 1

    def __init__(
        self, table: pa.Table, read_bytes: float = 1.0, step: int = 2, samples: SampleTable | None = None
    ) -> None:
        self.table, self.step, self.samples = table, step, samples
        self.likely_row_bytes, self.fails, self.reads = read_bytes, 0, 0

    def load_selection(self) -> "InMemory":
        return self

    def load_samples(self) -> SampleTable | None:
        return self.samples

    def open_reader(self, retry_s: float) -> RowReader:
        return self

    def offsets(self, selected: np.ndarray) -> np.ndarray:
        return selected * self.step

    def close(self) -> None:
        """It never waits."""

    def read_into(self, offsets: np.ndarray, add: Callable[[pa.Table], None], *_: Callable[[], bool]) -> None:
        half = len(offsets) // 2  # some mebibytes at a time
        for part in (offsets[:half], offsets[half:]) if half else (offsets,):
            add(self.read(part))

    def read(self, offsets: np.ndarray) -> pa.Table:
        if self.fails:
            self.fails -= 1
            raise DatasetError("storage says no")
        self.reads += len(offsets)
        assert (np.diff(offsets) > 0).all()
        return self.table.take(pa.array(offsets // self.step)).append_column("_rowoffset", pa.array(offsets))
