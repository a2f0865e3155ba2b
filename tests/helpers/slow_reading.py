"""Owns loaders of a storage that takes a while for each read, as an object store does."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

import raylance
from raylance.api.dataset import specs_of
from raylance.source.rows import TableRows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowRows(TableRows):
    """Takes a while for each read, as an object store does."""

    wait_s: float

    def open_reader(self, retry_s: float | None = None) -> Any:
        return SlowReader(TableRows.open_reader(self, retry_s), self.wait_s)


class SlowReader:
    def __init__(self, reader: Any, wait_s: float) -> None:
        self._reader, self._wait_s = reader, wait_s

    def read_into(self, offsets: np.ndarray, add: Callable[[pa.Table], None]) -> None:
        time.sleep(self._wait_s * len(offsets))
        self._reader.read_into(offsets, add)


def slow_loader(uri: str, wait_s: float, **options: Any) -> raylance.RankLoader:
    dataset: Any = raylance.dataset(uri, columns=["id", "text"], remainder="ragged")
    read_spec, delivery_spec = specs_of(dataset)
    source: Any = read_spec.source
    fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    read_spec = dataclasses.replace(read_spec, source=SlowRows(**fields, wait_s=wait_s))
    return raylance.RankLoader(read_spec, delivery_spec, raylance.Options(**options))
