"""Values that go back into a dataset: each type, other writers, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.errors import ConfigError, CoverageError, DatasetError

ROWS = 40


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """40 rows in fragments of 15, of which five are deleted."""
    uri = str(tmp_path / "rows.lance")
    lance.write_dataset(pa.table({"id": range(ROWS + 5)}), uri, max_rows_per_file=15)
    lance.dataset(uri).delete("id >= 10 and id < 15")
    return uri


def written(uri: str, folder: Path, values: Any, type: pa.DataType, *, meanwhile: Callable[[], object] = list) -> int:
    """Writes values of all rows in two parts, one of them twice, as a run does; returns how many were not written."""
    raylance.writing.add_column(uri, "found", type)
    version = lance.dataset(uri).version
    for part in (slice(0, 16), slice(0, 16), slice(16, ROWS)):
        raylance.writing.write_values(folder, torch.arange(ROWS)[part], values[part], type)
    meanwhile()
    return raylance.writing.write_column(uri, "found", raylance.writing.read_values(folder, ROWS), version=version)


@pytest.mark.parametrize(
    ("type", "values"),
    [
        (pa.int32(), np.arange(ROWS)),
        (pa.int64(), torch.arange(ROWS)),
        (pa.float32(), torch.arange(ROWS) / 8),
        (pa.float64(), np.arange(ROWS) / 8),
        (pa.bool_(), np.arange(ROWS) % 2 == 0),
        (pa.list_(pa.float32(), 4), torch.arange(4 * ROWS).reshape(ROWS, 4) / 8),
        (pa.list_(pa.list_(pa.int32(), 2), 3), np.arange(6 * ROWS).reshape(ROWS, 3, 2)),
        (pa.list_(pa.field("element", pa.float32()), 2), np.ones((ROWS, 2))),
        (pa.list_(pa.float32()), [[0.5] * (row % 4) for row in range(ROWS)]),
        (pa.string(), [f"a cat, {row}" for row in range(ROWS)]),
        (pa.string(), pa.array([f"a cat, {row}" for row in range(ROWS)])),
    ],
    ids=lambda given: str(given) if isinstance(given, pa.DataType) else type(given).__name__,
)
def test_values_of_each_type_are_written(uri: str, tmp_path: Path, type: pa.DataType, values: Any) -> None:
    assert written(uri, tmp_path / "parts", values, type) == 0
    table = lance.dataset(uri).to_table()
    assert table.schema.field("found").type == type
    wanted = values.to_pylist() if isinstance(values, pa.Array) else getattr(values, "tolist", lambda: values)()
    assert table["found"].to_pylist() == wanted


def test_other_writers_keep_their_rows(uri: str, tmp_path: Path) -> None:
    """Rows that were added, deleted or updated meanwhile; and rows that no value is for."""

    def meanwhile() -> None:
        more = pa.table({"id": range(100, 103), "found": pa.array([7, 8, None], pa.int32())})
        lance.write_dataset(more, uri, mode="append")
        lance.dataset(uri).delete("id = 3")

    assert written(uri, tmp_path / "parts", np.arange(ROWS), pa.int32(), meanwhile=meanwhile) == 0
    table = lance.dataset(uri).to_table()
    ids = [*range(10), *range(15, 45)]
    assert table["id"].to_pylist() == [row for row in ids if row != 3] + [100, 101, 102]
    assert table["found"].to_pylist() == [row for row in range(ROWS) if row != 3] + [7, 8, None]


@pytest.mark.parametrize("change", ["overwritten", "compacted"])
def test_no_value_gets_into_a_row_of_another_fragment(uri: str, tmp_path: Path, change: str) -> None:
    """An overwritten dataset has fragments of the same numbers."""

    def meanwhile() -> None:
        dataset = lance.dataset(uri)
        if change == "compacted":
            dataset.optimize.compact_files()
        else:
            lance.write_dataset(dataset.to_table().slice(20), uri, mode="overwrite", max_rows_per_file=10)

    raylance.writing.add_column(uri, "found", pa.int32())
    before = pa.array([-1] * ROWS, pa.int32())  # it counted nulls, and said 0
    raylance.writing.write_column(
        uri, "found", pa.table({"_rowoffset": range(ROWS), "value": before}), version=lance.dataset(uri).version
    )
    left = written(uri, tmp_path / "parts", np.arange(ROWS), pa.int32(), meanwhile=meanwhile)
    assert left == ROWS
    assert set(lance.dataset(uri).to_table()["found"].to_pylist()) == {-1}


def test_a_column_of_another_type_is_refused_before_any_value(uri: str) -> None:
    raylance.writing.add_column(uri, "found", pa.float32())
    raylance.writing.add_column(uri, "found", pa.float32())
    with pytest.raises(ConfigError, match=r"'found' .*float.*int64"):
        raylance.writing.add_column(uri, "found", pa.int64())


@pytest.mark.parametrize(
    ("offsets", "values", "text"),
    [
        ([0, 1], [1.5, 2.5], "do not fit the type int32"),
        ([0, 1], ["a", "b"], "do not fit the type int32"),
        ([0, 1], [1, 2, 3], "3 values are for 2 row offsets: no part was written"),
        ([0.9, 1.9], [1, 2], r"row offsets of shape \(2,\) and type float64"),
        ([[0], [1]], [1, 2], r"row offsets of shape \(2, 1\) and type int64"),
        ([None, 1], [1, 2], r"row offsets of shape \(2,\) and type object"),
        ([0, 1], torch.ones(2, device="meta"), "do not fit the type int32"),
    ],
)
def test_values_that_do_not_fit_are_refused(tmp_path: Path, offsets: list[int], values: list[Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        raylance.writing.write_values(tmp_path, offsets, values, pa.int32())
    assert not list(tmp_path.iterdir())


def test_no_value_is_no_error(uri: str, tmp_path: Path) -> None:
    raylance.writing.add_column(uri, "found", pa.int32())
    values = raylance.writing.read_values(tmp_path / "parts", 0)
    assert raylance.writing.write_column(uri, "found", values, version=lance.dataset(uri).version) == 0


def test_values_that_have_a_gradient_and_files_of_others_are_taken_as_they_are(tmp_path: Path) -> None:
    raylance.writing.write_values(tmp_path, [1, 0], torch.ones(2, requires_grad=True), pa.float32())
    (tmp_path / "README").write_text("parts of a run")
    assert raylance.writing.read_values(tmp_path, 2).to_pydict() == {"_rowoffset": [0, 1], "value": [1.0, 1.0]}


@pytest.mark.parametrize("name", ["", "a.b", "a`b"])
def test_a_name_that_no_filter_can_address_is_refused(uri: str, name: str) -> None:
    with pytest.raises(ConfigError, match="a column cannot be named"):
        raylance.writing.add_column(uri, name, pa.int32())
    assert lance.dataset(uri).schema.names == ["id"]


def test_what_cannot_be_written_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="0 rows, .*40 rows"):
        raylance.writing.read_values(tmp_path / "parts", ROWS)
    raylance.writing.write_values(tmp_path / "parts", [0, 40], [5, 6], pa.int32())
    with pytest.raises(CoverageError, match="2 rows, .*40 rows"):
        raylance.writing.read_values(tmp_path / "parts", ROWS)
    values, version = raylance.writing.read_values(tmp_path / "parts", 2), lance.dataset(uri).version
    with pytest.raises(DatasetError, match="'found'"):
        raylance.writing.write_column(uri, "found", values, version=version)
    with pytest.raises(ConfigError, match="column 'id' of .* is int64, and the values are int32"):
        raylance.writing.write_column(uri, "id", values, version=version)
    raylance.writing.add_column(uri, "found", pa.int32())
    with pytest.raises(ConfigError, match=r"row offsets 0 to 40, and version 2 of .* has 40 rows"):
        raylance.writing.write_column(uri, "found", values, version=version)
    assert lance.dataset(uri).count_rows("found IS NULL") == ROWS


def test_writers_that_always_come_first_are_an_error(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a RetryError without a cause. The other writer is real, and adds a column each time."""
    commit, added = lance.LanceDataset.commit, iter("abcde")

    def after_another(*arguments: Any, **options: Any) -> Any:
        lance.dataset(uri).add_columns({next(added): "id + 1"})
        return commit(*arguments, **options)

    monkeypatch.setattr(lance.LanceDataset, "commit", after_another)
    with pytest.raises(DatasetError, match="in each of 5 attempts to write column 'found'"):
        written(uri, tmp_path / "parts", np.arange(ROWS), pa.int32())
