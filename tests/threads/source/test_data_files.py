"""Reading data files directly gives what a scan gives, or leaves it to a scan, whatever was done before."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileWriter
from lance.fragment import DataFile, FragmentMetadata

import raylance
from raylance.source.data_files import DataFiles
from raylance.source.limits import Calls

SIX = pa.list_(pa.int16(), 6)
TENSOR = pa.fixed_shape_tensor(pa.int16(), [2, 3])
VERSIONS = ["2.0", "2.1", "2.2"]


def some_of_all_types(rows: int) -> pa.Table:
    numbers = np.arange(rows)
    columns = {
        "int": pa.array(numbers),
        "null": pa.array([None if row % 7 == 0 else float(row) for row in numbers]),
        "bool": pa.array([row % 3 == 0 for row in numbers]),
        "half": pa.array(numbers.astype(np.float16)),
        "time": pa.array(numbers, pa.timestamp("us")),
        "decimal": pa.array(numbers.tolist()).cast(pa.decimal128(30, 2)),
        "text": pa.array([f"{row}" * (row % 4) for row in numbers]),
        "bytes": pa.array([b"x" * (row % 5) for row in numbers], pa.large_binary()),
        "three": pa.array([b"abc"] * rows, pa.binary(3)),
        "class": pa.array([f"class {row % 3}" for row in numbers]).dictionary_encode(),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 4).astype(np.float32)), 4),
        "matrix": pa.array([[[row, 1], [2, 3]] for row in numbers.tolist()], pa.list_(pa.list_(pa.int32(), 2), 2)),
        "tokens": pa.array([list(range(row % 6)) for row in numbers], pa.list_(pa.int32())),
        "boxes": pa.array([[[row, 1.0]] * (row % 3) for row in numbers], pa.list_(pa.list_(pa.float32(), 2))),
        "struct": pa.array([{"x": row, "y": {"z": f"{row}"}} for row in numbers.tolist()]),
        "tensor": pa.ExtensionArray.from_storage(TENSOR, pa.array([[row % 9] * 6 for row in numbers], SIX)),
        "last": pa.array(numbers * 2),
    }  # fmt: skip
    return pa.table(columns)


def read(files: DataFiles, first: int, rows: int) -> pa.Table | None:
    return Calls(1, "test").submit(files.read, first, rows).result()


def check(dataset: lance.LanceDataset, columns: list[str], seed: int = 0) -> int:
    """Compares some ranges with a scan; returns how many of them were read directly."""
    files, rows, direct = DataFiles(dataset, columns), dataset.count_rows(), 0
    rng = np.random.default_rng(seed)
    for _ in range(4):
        first = int(rng.integers(rows))
        count = int(rng.integers(1, rows - first + 1))
        found = read(files, first, count)
        if found is not None:
            wanted = dataset.scanner(columns=columns, offset=first, limit=count).to_table()
            assert found.column_names == wanted.column_names
            assert found.schema.types == wanted.schema.types
            assert found.to_pylist() == wanted.to_pylist()
            direct += 1
    return direct


@pytest.mark.parametrize("version", VERSIONS)
def test_every_type_is_read_as_a_scan_reads_it(write_dataset: Callable[..., str], version: str) -> None:
    table = some_of_all_types(100)
    parts = [table.take(list(rows)) for rows in (range(60), range(60, 100))]  # Lance takes no slices
    uri = write_dataset(*parts, data_storage_version=version)
    dataset = lance.dataset(uri)
    for name in table.column_names:
        assert check(dataset, [name]) == 4, name
    assert check(dataset, table.column_names[::-1]) == 4
    assert check(dataset, ["last", "int"]) == 4


def swap(dataset: lance.LanceDataset) -> None:
    for old, new in (("a", "tmp"), ("b", "a"), ("tmp", "b")):
        dataset.alter_columns({"path": old, "name": new})


def rotate(dataset: lance.LanceDataset) -> None:
    for old, new in (("a", "tmp"), ("b", "a"), ("c", "b"), ("tmp", "c")):
        dataset.alter_columns({"path": old, "name": new})


def cast(dataset: lance.LanceDataset) -> None:
    wider = pa.float64() if dataset.schema.field("a").type == pa.float32() else pa.float32()
    dataset.alter_columns({"path": "a", "data_type": wider})


def add_again(dataset: lance.LanceDataset) -> None:
    dataset.drop_columns(["a"])
    dataset.add_columns({"a": "cast(b + 1000 as float)"})


def append(dataset: lance.LanceDataset) -> None:
    rows = pa.table({name: np.arange(20) + 5000 for name in dataset.schema.names})
    lance.write_dataset(rows.cast(dataset.schema), dataset.uri, mode="append")


HISTORIES: dict[str, Callable[[lance.LanceDataset], Any]] = {
    "swapped": swap,
    "cast": cast,
    "added again": add_again,
    "rotated": rotate,
    "deleted": lambda dataset: dataset.delete("_rowid % 17 = 3"),
    "updated": lambda dataset: dataset.update({"a": "a + 1"}, where="a > 100 and a < 120"),
    "compacted": lambda dataset: dataset.optimize.compact_files(target_rows_per_fragment=500),
    "appended": append,
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_was_done_before_rows_are_those_of_a_scan(
    write_dataset: Callable[..., str], version: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    numbers = np.arange(400)
    table = pa.table({"a": numbers.astype(np.float32), "b": numbers + 1000.0, "c": numbers + 2000.0})
    table = table.cast(pa.schema([(name, pa.float32()) for name in "abc"]))
    uri = write_dataset(table.slice(0, 150), table.slice(150), data_storage_version=version)
    direct = check(lance.dataset(uri), ["b", "a"])
    for name in rng.choice(list(HISTORIES), 5).tolist():
        HISTORIES[name](lance.dataset(uri))
        dataset = lance.dataset(uri)
        for column in (["a"], dataset.schema.names, dataset.schema.names[::-1]):
            direct += check(dataset, column, seed)
    assert direct


def test_what_is_direct_and_what_is_not(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    numbers = np.arange(100)
    table = pa.table({"a": numbers, "b": numbers + 1000})
    uri = write_dataset(table.slice(0, 50), table.slice(50))

    def direct(*columns: str) -> list[bool]:
        """By fragment."""
        files = DataFiles(lance.dataset(uri), list(columns))
        return [read(files, first, 10) is not None for first in (0, 60)]

    assert direct("a", "b") == [True, True]
    assert direct() == [False, False]
    lance.dataset(uri).add_columns({"e": "a * 2"})
    assert direct("a", "e") == [True, True], "of two files"
    lance.dataset(uri).delete("a = 70")
    assert direct("a") == [True, False]
    swap(lance.dataset(uri))
    assert direct("a") == direct("b") == [False, False]
    assert direct("e") == [True, False]
    clone = str(tmp_path / "clone")
    lance.dataset(uri).shallow_clone(clone, lance.dataset(uri).version)
    assert read(DataFiles(lance.dataset(clone), ["e"]), 0, 10) is None, "its files lie elsewhere"
    branch = lance.dataset(uri).create_branch("other")
    assert branch.count_rows() == 99
    check(branch, ["a", "e"])
    assert read(DataFiles(lance.dataset(f"file://{uri}"), ["e"]), 0, 10) is None


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    uri = str(tmp_path / "a b%20ü#?&.lance")
    lance.write_dataset(pa.table({"a": np.arange(10)}), uri)
    check(lance.dataset(uri), ["a"])


def test_a_file_that_is_damaged_or_gone_is_left_to_a_scan(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"a": np.arange(1000)}), pa.table({"a": np.arange(1000)}))
    files = DataFiles(lance.dataset(uri), ["a"])
    first, second = (fragment.data_files()[0].path for fragment in lance.dataset(uri).get_fragments())
    Path(uri, "data", first).write_bytes(b"x" * 1000)
    Path(uri, "data", second).unlink()
    assert read(files, 0, 10) is read(files, 1500, 10) is None
    assert read(files, 1995, 10) is None


def test_many_small_files_are_left_to_a_scan(write_dataset: Callable[..., str]) -> None:
    files = DataFiles(lance.dataset(write_dataset(*[pa.table({"a": np.arange(10)})] * 5)), ["a"])
    assert [read(files, 5, rows) is None for rows in (5, 15, 16, 45, 46)] == [False, False, True, True, True]


def test_threads_read_at_once(write_dataset: Callable[..., str]) -> None:
    tables = [pa.table({"a": np.arange(first, first + 500)}) for first in range(0, 50_000, 500)]
    files = DataFiles(lance.dataset(write_dataset(*tables)), ["a"])

    def read_some(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            first = int(rng.integers(49_000))
            found = read(files, first, 450)
            assert found is not None
            assert found["a"].to_pylist() == list(range(first, first + 450))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read_some, range(4)))
    assert len(files._idle) <= 64


def overlay(uri: str, column: str, row: int, value: int) -> None:
    """Lays a file with another value over a column: the version has the same data files as before."""
    dataset, name = lance.dataset(uri), f"over-{column}-{row}.lance"
    with LanceFileWriter(f"{uri}/data/{name}", pa.schema([(column, pa.int64())])) as writer:
        writer.write_batch(pa.table({column: pa.array([value], pa.int64())}))
    file = lance.LanceOperation.DataOverlayFile(DataFile.create(dataset, name), [row])
    group = lance.LanceOperation.DataOverlayGroup(0, [file])
    lance.LanceDataset.commit(uri, lance.LanceOperation.DataOverlay([group]), read_version=dataset.version)


def test_values_laid_over_others_are_read_and_belong_to_the_identity(
    write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANCE_ENABLE_UNSTABLE_DATA_OVERLAY_FILES", "1")
    uri = write_dataset(pa.table({"a": np.arange(50_000), "b": np.arange(50_000)}))
    identities = [raylance.dataset(uri).loader(runtime="threads").state_dict()["identity"]]
    for row in (7, 40_000):
        overlay(uri, "b", row, -row)
        handle = raylance.dataset(uri, order="sequential")
        identities.append(handle.loader(runtime="threads").state_dict()["identity"])
        (batch,) = handle.iter_batches(batch_size=50_000)
        assert batch["b"][row] == -row
        assert read(DataFiles(lance.dataset(uri), ["b"]), 0, 10) is None
    assert len(set(identities)) == 3


@dataclasses.dataclass
class OfTomorrow(FragmentMetadata):
    """A fragment that has something that does not exist yet."""

    patches: str = ""


def test_a_fragment_of_which_not_all_is_known_is_left_to_a_scan(
    write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = lance.dataset(write_dataset(pa.table({"a": np.arange(50)})))
    known = dataset.get_fragments()[0].metadata
    given = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    for patches in ("", "some"):
        monkeypatch.setattr(
            lance.LanceFragment, "metadata", property(lambda _, p=patches: OfTomorrow(**given, patches=p))
        )
        assert (read(DataFiles(dataset, ["a"]), 0, 10) is None) == bool(patches)
