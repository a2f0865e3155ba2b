"""Datasets of a storage that takes a while for each read, as an object store does."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

import raylance
from raylance.api.dataset import opened_of
from raylance.source.reader import RowReader
from raylance.source.rows import TableRows

SLOW_ROWS = 720
SMALL = {"reader_bytes": 90_000, "inflight_bytes": 40_000}  # many chunks, and little on its way


def texts() -> pa.Table:
    """Rows of which `SMALL` makes many chunks."""
    rows = np.arange(SLOW_ROWS)
    return pa.table({"id": rows, "text": ["x" * 400] * SLOW_ROWS, "class": rows % 5, "weight": 1.0 + rows % 3})


def ids_of(batch: dict[str, Any]) -> list[int]:
    found: list[int] = batch["id"].tolist()
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowRows(TableRows):
    """Rows that are waited for: `pause` is called before each read, with the number of rows."""

    pause: Callable[[int], None]

    def open_reader(self, retry_s: float | None = None) -> Any:
        return SlowReader(TableRows.open_reader(self, retry_s), self.pause)


class SlowReader(RowReader):
    def __init__(self, reader: Any, pause: Callable[[int], None]) -> None:
        self._reader, self._pause = reader, pause

    def read_into(self, offsets: np.ndarray, add: Callable[[pa.Table], None], *wanted: Callable[[], bool]) -> None:
        self._pause(len(offsets))
        self._reader.read_into(offsets, add, *wanted)

    def close(self) -> None:
        self._reader.close()


def opened_slowly(dataset: Any, pause: Callable[[int], None]) -> Any:
    """What loaders of a dataset are made of, with slow reads."""
    spec = opened_of(dataset)
    source: Any = spec.read.source
    fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    read = dataclasses.replace(spec.read, source=SlowRows(**fields, pause=pause))
    return dataclasses.replace(spec, read=read)


def sleep(wait_s: float, rows: int) -> None:
    time.sleep(wait_s * rows)


def slow_loader(uri: str, wait_s: float, **options: Any) -> raylance.RankLoader:
    """A loader that waits so long for each row that it reads."""
    dataset = raylance.dataset(uri, columns=["id", "text"], remainder="ragged")
    return raylance.RankLoader(opened_slowly(dataset, functools.partial(sleep, wait_s)), raylance.Options(**options))
