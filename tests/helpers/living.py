"""A dataset whose rows, filter and order change at random."""

import dataclasses
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa


def append(uri: str, first: int, rows: int) -> None:
    ids = np.arange(first, first + rows)
    lance.write_dataset(pa.table({"id": ids, "group": ids % 5}), uri, mode="append")


def new_data(folder: Path, rows: int, *, stable_row_ids: bool) -> str:
    """Writes a dataset with the ids from 0 on; returns its place."""
    ids, uri = np.arange(rows), str(folder / f"{len([*folder.glob('*.lance')])}.lance")
    lance.write_dataset(pa.table({"id": ids, "group": ids % 5}), uri, enable_stable_row_ids=stable_row_ids)
    return uri


@dataclasses.dataclass
class Living:
    """A dataset and what is asked of it; and what each of its rows should have come to in the present epoch."""

    uri: str
    rng: np.random.Generator
    newest: int  # the largest id
    filter: str | None = None
    order: str = "window"
    seed: int = 0
    had: list[int] = dataclasses.field(default_factory=list)
    due: set[int] = dataclasses.field(default_factory=set)

    def selected(self) -> set[int]:
        return {*lance.dataset(self.uri).to_table(columns=["id"], filter=self.filter)["id"].to_pylist()}

    def change(self) -> None:
        """Changes the dataset, or what is asked of it."""
        data, (low, high) = lance.dataset(self.uri), sorted(self.rng.integers(0, self.newest + 1, 2))
        match self.rng.integers(0, 9):
            case 0 | 1:
                append(self.uri, self.newest + 1, more := int(self.rng.integers(1, 40)))
                self.newest += more
            case 2:
                data.delete(f"id >= {low} AND id < {min(high, low + 9)}")
            case 3 if data.has_stable_row_ids:
                data.update({"group": "group"}, where=f"id >= {low} AND id < {min(high, low + 9)}")
            case 3:  # an updated row is another one
                data.update({"id": f"id + {self.newest + 1}"}, where=f"id >= {low} AND id < {min(high, low + 9)}")
                self.newest = 2 * self.newest + 1
            case 4:
                self.filter = str(self.rng.choice([f"id >= {low // 2}", "group != 3", "id % 7 != 2"]))
            case 5:
                self.filter = None
            case 6:
                self.order = str(self.rng.choice(["window", "row", "shard", "sequential"]))
            case 7:
                self.seed = int(self.rng.integers(0, 99))
            case 8:
                data.create_scalar_index("group", "BTREE", replace=True)

    def grow(self, least: int) -> None:
        """Appends rows, and selects all, if fewer than `least` are selected."""
        if len(self.selected()) < least:
            self.filter = None
            append(self.uri, self.newest + 1, 60)
            self.newest += 60
