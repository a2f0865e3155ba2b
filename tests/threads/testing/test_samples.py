"""Tables of samples of one's own: the checker catches what breaks, and they work through loader, mixture and audit."""

import os
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.audit import EpochAudit, reopen
from raylance.errors import ConfigError, StateError
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.samples.windows import Episodes, WindowTable
from raylance.testing import check_samples

ROWS = 120


class Mirrored(raylance.SampleTable):
    """Each row with the one as far from the other end, and twice the first row; not of the last ten rows."""

    columns: ClassVar = {"x": 2, "y": 2}
    fingerprint = "mirrored"

    def rows(self, anchors: Int64Array) -> Mapping[str, Int64Array]:
        return {"x": np.stack([anchors, ROWS - 1 - anchors], axis=1), "y": np.zeros((len(anchors), 2), dtype=np.int64)}

    def pads(self, anchors: Int64Array) -> Mapping[str, BoolArray]:
        return {"y": np.stack([anchors > 50, anchors > 90], axis=1)}

    def are_anchors(self, offsets: Int64Array) -> BoolArray:
        return offsets < ROWS - 10


class Foreign(Mirrored):
    def rows(self, anchors: Int64Array) -> Mapping[str, Int64Array]:
        return {"x": np.stack([anchors, anchors + ROWS], axis=1), "y": super().rows(anchors)["y"]}


class Narrow(Mirrored):
    def rows(self, anchors: Int64Array) -> Mapping[str, Int64Array]:
        return {"x": anchors[:, None], "y": super().rows(anchors)["y"]}


class Neighbourly(Mirrored):
    def rows(self, anchors: Int64Array) -> Mapping[str, Int64Array]:
        return {"x": np.stack([anchors, np.roll(anchors, 1)], axis=1), "y": super().rows(anchors)["y"]}


class Lacking(Mirrored):
    def stored(self, anchors: Int64Array) -> Int64Array:
        return np.unique(anchors)


class Nobody(Mirrored):
    def are_anchors(self, offsets: Int64Array) -> BoolArray:
        return offsets < 0


class Changing(Mirrored):
    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return os.urandom(4).hex()


class Numbers(Mirrored):
    def pads(self, anchors: Int64Array) -> Mapping[str, BoolArray]:
        return {"y": np.zeros((len(anchors), 2), dtype=np.int64)}  # type: ignore[dict-item]


def test_tables_that_keep_everything() -> None:
    check_samples(Mirrored(), rows=ROWS)
    windows = raylance.Windows(episode="e", offsets={"x": [-2, 0, 3]}, at_ends="drop", stride=2)
    check_samples(
        WindowTable(windows=windows, episodes=Episodes(ends=np.array([50, ROWS])), offsets={"x": (-2, 0, 3)}), rows=ROWS
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Foreign(), "rows: 'x' names row"),
        (Narrow(), r"rows: 'x' is int64 \(64, 1\).*int64 \(64, 2\)"),
        (Neighbourly(), "by itself.*among others"),
        (Lacking(), "find:|out of bounds|index"),
        (Nobody(), "no sample"),
        (Changing(), "fingerprint"),
        (Numbers(), "pads: 'y' is int64"),
    ],
)
def test_the_checker_catches(wrong: raylance.SampleTable, message: str) -> None:
    with pytest.raises((AssertionError, IndexError), match=message):
        check_samples(wrong, rows=ROWS)


def test_a_table_of_ones_own_through_everything(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"x": np.arange(ROWS), "y": np.arange(ROWS) * 10, "z": np.arange(ROWS) % 7}))
    data = raylance.dataset(uri, samples=Mirrored(), remainder="ragged")
    seen = []
    for batch in data.iter_torch_batches(batch_size=16, with_row_offset=True):
        anchors = batch["_rowoffset"].numpy()
        assert batch["x"].tolist() == [[at, ROWS - 1 - at] for at in anchors]
        assert batch["y"].tolist() == [[0, 0]] * len(anchors)
        assert batch["y_is_pad"].tolist() == [[at > 50, at > 90] for at in anchors]
        assert batch["z"].tolist() == (anchors % 7).tolist()
        seen += anchors.tolist()
    assert sorted(seen) == list(range(ROWS - 10))
    assert EpochAudit(data, global_batch_size=16).count().ok
    with data.loader() as loader:
        next(iter(loader.iter_batches(batch_size=16)))
        state = loader.state_dict()
    assert len(reopen(state, samples=Mirrored())) == ROWS - 10
    with pytest.raises(ConfigError, match="Mirrored.*samples="):
        reopen(state)
    changed = Mirrored()
    changed.fingerprint = "changed"
    with raylance.dataset(uri, samples=changed).loader() as loader, pytest.raises(StateError):
        loader.load_state_dict(state)
    windows = raylance.Windows(episode="z", offsets={"x": [0, 1], "y": [0, 1]})
    mixture = raylance.mix(
        {
            "own": (raylance.dataset(uri, samples=Mirrored(), columns=["y", "x"]), 0.5),
            "own again": (raylance.dataset(uri, samples=Mirrored(), columns=["y", "x"], filter="z = 3"), 0.5),
        }
    )
    for batch in mixture.iter_batches(batch_size=20, with_row_offset=True):
        assert batch["x"].tolist() == [[at, ROWS - 1 - at] for at in batch["_rowoffset"]]
    with pytest.raises(ConfigError, match="schema"):
        raylance.mix({"a": (data, 0.5), "b": (raylance.dataset(uri, samples=windows), 0.5)})
