"""Checks that a read gives the rows asked for, by range or by take, whatever the fragments look like."""

import ast
import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.api.dataset import opened_of
from raylance.errors import DatasetError
from raylance.samples.pack_tokens import PackTokens
from raylance.source.data_files import DataFiles
from raylance.source.reader import READ_MODES, Reader, ReadMode
from raylance.source.reads import Reads
from raylance.source.version import Source, pin


def table(first: int, rows: int) -> pa.Table:
    ids = np.arange(first, first + rows)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 4).astype(np.float32)), 4)
    return pa.table({"id": ids, "vector": vectors, "text": [f"row {row}" * (row % 5) for row in ids]})


def test_a_name_that_lance_cannot_read_is_refused_at_the_opening(write_dataset: Callable[..., str]) -> None:
    names = {"a`b": [1, 2], "a b": [1, 2], "a'b": [3, 4], 'a"b': [3.0, 4.0], "ümlaut": ["x", None]}
    uri = write_dataset(pa.table(names))
    for arguments in (
        {},
        {"columns": ["a`b"]},
        {"columns": ["a b"], "order": raylance.Weighted(weights="a`b")},
        {"columns": ["a b"], "split": raylance.ValueSplit("a`b", 1)},
    ):
        with pytest.raises(DatasetError, match="a`b"):
            raylance.dataset(uri, **arguments)
    dataset = raylance.dataset(uri, columns=list(names)[1:])
    assert dataset.head()["a b"].tolist() == [1, 2]
    with pytest.raises(DatasetError, match="nested.y"):
        raylance.dataset(write_dataset(pa.table({"nested": [{"x": 1}]})), columns=["nested.y"])


def test_hints_to_leave_out_nulls_are_filters_that_work(write_dataset: Callable[..., str]) -> None:
    for name in ("a b", "a'b", 'a"b', "select", "Ümlaut"):
        uri = write_dataset(pa.table({name: [1, None, 3]}))
        with pytest.raises(DatasetError, match="1 nulls") as caught:
            raylance.dataset(uri).head()
        hint = str(caught.value).split("filter=")[1].split("), or")[0]
        assert raylance.dataset(uri, filter=ast.literal_eval(hint)).head()[name].tolist() == [1, 3]


LAYOUTS = {"one huge": [2000], "many tiny": [7] * 30, "uneven": [1, 900, 3, 250, 846]}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout_uri(write_dataset: Callable[..., str], request: pytest.FixtureRequest) -> str:
    sizes = LAYOUTS[request.param]
    firsts = np.cumsum([0, *sizes[:-1]])
    uri = write_dataset(*[table(int(a), n) for a, n in zip(firsts, sizes, strict=True)])
    lance.dataset(uri).delete("id % 11 = 5")
    return uri


@pytest.mark.parametrize("mode", READ_MODES)
@pytest.mark.parametrize("row_bytes", [1, 1 << 20], ids=["small", "large"])
def test_any_rows_of_any_layout(layout_uri: str, row_bytes: int, mode: ReadMode) -> None:
    live, pinned = lance.dataset(layout_uri).to_table(), pin(layout_uri, None, None)
    reader = Reader(pinned=pinned, columns=["text", "vector"], row_bytes=row_bytes, mode=mode)
    rng = np.random.default_rng(0)
    scattered = np.sort(rng.choice(live.num_rows, 60, replace=False))
    for offsets in (np.arange(live.num_rows), np.arange(20, 75), scattered, np.array([live.num_rows - 1])):
        found = reader.read(offsets)
        assert found.column_names == ["text", "vector", "_rowoffset"]
        assert found["_rowoffset"].to_pylist() == offsets.tolist()
        wanted = live.take(offsets)
        assert found["text"].to_pylist() == wanted["text"].to_pylist()
        assert found["vector"].to_pylist() == wanted["vector"].to_pylist()


@pytest.mark.parametrize(
    ("modulus", "columns"),
    [(2, ["id", "vector"]), (3, ["id", "text", "vector"]), (2, ["id", "few", "vector"]), (11, ["id", "few", "vector"])],
)
def test_rows_between_the_wanted_ones_never_come(
    write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch, columns: list[str], modulus: int
) -> None:
    """They are read, too, and may be null. The wanted rows are shuffled, and come as views of memory that is reused."""
    ids = np.arange(6000)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 256).astype(np.float32)), 256)
    few = pa.array([None if row % modulus == 1 else row for row in ids.tolist()])
    whole = table(0, 6000).append_column("few", few).set_column(1, "vector", vectors)
    uri = write_dataset(whole.slice(0, 2500), whole.slice(2500))
    order = raylance.WindowShuffle(shard_rows=500, window_shards=1, lanes=4)  # so that ranges are read
    handle = raylance.dataset(uri, columns=columns, filter=f"id % {modulus} != 1", order=order)
    loader = handle.loader(runtime="threads", reader_bytes=8 << 20)
    for _ in range(3):
        found = pa.concat_tables(loader.iter_batches(batch_size=64, batch_format="pyarrow", drop_last=False))
        assert sorted(found["id"].to_pylist()) == ids[ids % modulus != 1].tolist()
        assert found.combine_chunks() == whole.take(found["id"]).select(found.column_names).combine_chunks()
    loader.close()


def test_rows_that_are_gone_are_an_error_and_not_a_short_table(write_dataset: Callable[..., str]) -> None:
    pinned = pin(write_dataset(table(0, 10)), None, None)
    for row_bytes in (1, 1 << 20):
        reader = Reader(pinned=pinned, columns=["id"], row_bytes=row_bytes)
        with pytest.raises(DatasetError, match="epoch stops here"):
            reader.read(np.arange(5, 20))


def test_a_call_that_fails_in_one_thread_leaves_the_dataset_to_the_other(write_dataset: Callable[..., str]) -> None:
    """A shard actor reads ahead in one thread, and what was not read ahead in another one, by one reader."""
    reads = Reads(Source(uri=write_dataset(table(0, 10)), version=1), at_once=2, retry_s=0.0, missing=False)
    counted: list[int] = []

    def run(make: Callable[[lance.LanceDataset, int], int]) -> None:
        reads.run(iter([0]), make, lambda rows: counted.append(rows) is None, str)

    def fails(*_: object) -> int:
        raise OSError("the storage is away")

    def count_after_a_failure(dataset: lance.LanceDataset, _: int) -> int:
        with pytest.raises(DatasetError, match="the storage is away"):
            run(fails)
        return int(dataset.count_rows())

    run(count_after_a_failure)
    run(lambda dataset, _: int(dataset.count_rows()))
    assert counted == [10, 10], "the next call opens it again"


def test_threads_that_begin_together_open_the_dataset_once(
    write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = write_dataset(table(0, 10))
    reader = Reader(pinned=Source(uri=uri, version=1), columns=["id"], row_bytes=8)
    together, opened, open_once = threading.Barrier(4), [], Source.open_once

    def open_slowly(source: Source, limit_s: float) -> object:
        opened.append(threading.current_thread())
        time.sleep(0.1)
        return open_once(source, limit_s)

    def read() -> list[int]:
        together.wait()
        return list(reader.read(np.arange(10))["id"].to_pylist())

    monkeypatch.setattr(Source, "open_once", open_slowly)
    with ThreadPoolExecutor(4) as threads:
        assert [one.result() for one in [threads.submit(read) for _ in range(4)]] == [list(range(10))] * 4
    assert len(opened) == 1


def test_threads_that_read_pieces_share_the_threads_that_read_them(write_dataset: Callable[..., str]) -> None:
    """Each of several reads at once has its turn, and there are no more threads than for one of them."""
    reader = Reader(pinned=pin(write_dataset(table(0, 4_000)), None, None), columns=["id"], row_bytes=1 << 18)
    together = threading.Barrier(8)
    before = {one for one in threading.enumerate() if one.name.startswith("read_")}

    def read(first: int) -> list[int]:
        together.wait()
        return list(reader.read(np.arange(first, 4_000, 8))["id"].to_pylist())

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(read, range(8)))
    assert found == [list(range(first, 4_000, 8)) for first in range(8)]
    assert len({one for one in threading.enumerate() if one.name.startswith("read_")} - before) <= 4


def test_nothing_is_read_that_nobody_wants_any_more(write_dataset: Callable[..., str]) -> None:
    reader = Reader(pinned=pin(write_dataset(table(0, 400)), None, None), columns=["id"], row_bytes=1 << 20)
    read: list[int] = []
    added: list[int] = []

    def prepare(first: int, piece: pa.Table, _: object) -> int:
        read.append(first)
        return piece.num_rows

    def add(rows: int) -> bool:
        added.append(rows)
        return True

    reader.read_pieces(np.arange(400), prepare, add, is_wanted=lambda: not read)
    assert len(added) <= len(read) < 10


@pytest.mark.parametrize("kind", ["rows", "mixture", "sequences"])
def test_storage_that_fails_is_not_waited_for_if_nobody_wants_the_rows(tmp_path: Path, kind: str) -> None:
    uri, add = str(tmp_path / "data.lance"), list[pa.Table]().append
    lance.write_dataset(pa.table({"tokens": [[token] * 8 for token in range(40)]}), uri)
    pack = PackTokens("tokens", 16) if kind == "sequences" else None
    data = raylance.dataset(uri, columns=None if pack else ["tokens"], samples=pack)
    mixed = raylance.mix({"a": (data, 1.0), "b": (data, 1.0)}, stop=60) if kind == "mixture" else data
    reader = opened_of(mixed).read.source.open_reader(30.0)
    shutil.rmtree(Path(uri, "data"))
    begin = time.monotonic()
    reader.read_into(np.arange(10), add, lambda: False)
    reader.read_pieces(np.arange(10), lambda *rows: rows, lambda _: True, lambda: False)
    assert time.monotonic() - begin < 20
    with pytest.raises(DatasetError):
        opened_of(mixed).read.source.open_reader(0.1).read_into(np.arange(10), add)


def test_a_read_that_is_done_refers_to_nothing(write_dataset: Callable[..., str]) -> None:
    """Else the memory of a chunk lives on until the garbage collector runs, and another one is made beside it."""
    reader = Reader(pinned=pin(write_dataset(table(0, 40)), None, None), columns=["id"], row_bytes=8)
    kept = np.empty(0)
    reference = weakref.ref(kept)
    gc.disable()
    try:
        reader.read_pieces(np.arange(40), lambda *_, kept=kept: kept, lambda _, kept=kept: True, lambda kept=kept: True)
        del kept
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("mode", ["range", "take"])
def test_damage_is_told_from_a_storage_that_fails(write_dataset: Callable[..., str], mode: ReadMode) -> None:
    uri = write_dataset(pa.table({"id": np.arange(1000), "text": ["x" * 500] * 1000}))
    (path,) = Path(uri, "data").iterdir()
    whole, kinds = path.read_bytes(), set()
    for seed in range(100):
        rng = np.random.default_rng(seed)
        body, footer = len(whole) - 2000, len(whole) - int(rng.integers(50, 2000))
        damaged = rng.bytes(body) + whole[body:] if seed % 2 else whole[:footer] + rng.bytes(20) + whole[footer + 20 :]
        path.write_bytes(damaged)
        options = {"columns": ["id", "text"], "row_bytes": 508, "mode": mode, "retry_s": 1000, "missing": True}
        reader = Reader(pinned=Source(uri=uri, version=1), **options)
        try:
            reader.read(np.arange(1000))
        except DatasetError as error:
            kinds.add(next((sign for sign in ("corrupt", "memory error", "Protobuf") if sign in str(error)), "other"))
    assert kinds >= {"corrupt", "memory error", "Protobuf"}, "damage of every kind was tried, and none was waited for"


def test_a_closed_reader_waits_for_no_storage(
    write_dataset: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    uri = write_dataset(table(0, 10))
    reader = Reader(pinned=pin(uri, None, None), columns=["id"], row_bytes=8, retry_s=600, missing=True)
    assert reader.read(np.arange(10)).num_rows == 10
    shutil.rmtree(uri)
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(reader.read, np.arange(10))
        while "the storage failed" not in caplog.text:
            time.sleep(0.01)
        reader.close()
        with pytest.raises(DatasetError, match="cannot be read"):
            reading.result(timeout=60)


def test_the_choice_follows_density_and_row_size(write_dataset: Callable[..., str]) -> None:
    pinned = pin(write_dataset(table(0, 10)), None, None)

    def choose(offsets: np.ndarray, row_bytes: float) -> ReadMode:
        return Reader(pinned=pinned, columns=["id"], row_bytes=row_bytes).choose(offsets)

    every, half, few = np.arange(10_000), np.arange(0, 10_000, 2), np.arange(0, 10_000, 20)
    assert choose(every, 100) == "range"
    assert choose(half, 100) == "range", "a selectivity of one half is read through"
    assert choose(few, 100) == "take", "nineteen of twenty rows would be read in vain"
    assert choose(np.arange(0, 1_000_000, 20), 8) == "range", "a take reads whole blocks of small values, too"
    assert choose(np.arange(0, 1_000_000, 100), 8) == "take", "ninety-nine of a hundred rows would be read in vain"
    assert choose(half, 100_000) == "take", "gaps of large rows are not read"
    assert choose(np.arange(5), 100) == "take", "a few small rows are no range"
    assert choose(few, 1_000_000) == "take", "single rows are no range, however large"
    assert choose(np.r_[0:8, 500:508], 100_000) == "range"


@pytest.mark.parametrize(("row_bytes", "is_direct"), [(100.0, True), (1 << 26, False)])
def test_ranges_of_small_rows_are_read_from_the_files(
    write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch, row_bytes: float, is_direct: bool
) -> None:
    """Large ones by a scan, which says how far it is: a slow storage must not look like one that hangs."""
    pinned, found = pin(write_dataset(table(0, 1000)), None, None), []
    read = DataFiles.read

    def record(files: DataFiles, first: int, rows: int) -> pa.Table | None:
        found.append(read(files, first, rows))
        return found[-1]

    monkeypatch.setattr(DataFiles, "read", record)
    reader = Reader(pinned=pinned, columns=["id", "text"], row_bytes=row_bytes, mode="range")
    assert reader.read(np.arange(100, 900))["id"].to_pylist() == list(range(100, 900))
    assert [one is not None for one in found] == [True] * is_direct
