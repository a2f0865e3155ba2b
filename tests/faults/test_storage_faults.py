"""Storage which fails is asked again, at opening and at reading alike, and what cannot pass is an error at once,
with its true cause; by a real S3 API on this machine, and by local folders that go away.
"""

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import DatasetError
from raylance.source import retrying
from raylance.source.lance_errors import Failure, failure_of
from tests.helpers.faulty_store import Fault, FaultyStore, bucket_of, store_options

ROWS = 1500
URI = "s3://faulty/data.lance"
PASSING: list[Fault] = ["reset", "truncate", "500", "503", "hang"]


def table(count: int = ROWS, width: int = 100) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table({"id": np.arange(count), "bulk": [rng.bytes(width) for _ in range(count)]})


TABLE = table()
Heal = Callable[[Callable[[], Any]], list[logging.LogRecord]]


@pytest.fixture
def heal() -> Iterator[Heal]:
    """Mends what is broken when raylance says for the first time that it asks again; returns all that it says."""
    logger, filters = logging.getLogger("raylance.source.retrying"), list[Callable[[logging.LogRecord], bool]]()

    def begin(mend: Callable[[], Any]) -> list[logging.LogRecord]:
        said: list[logging.LogRecord] = []

        def hear(record: logging.LogRecord) -> bool:
            said.append(record)
            if len(said) == 1:
                mend()
            return True

        logger.addFilter(hear)
        filters.append(hear)
        return said

    yield begin
    for hear in filters:
        logger.removeFilter(hear)


def options_of(store: FaultyStore) -> dict[str, str]:
    """Lance tries again by itself, too: not here, so that what is tested is what comes after."""
    patience = {"client_max_retries": "0", "client_retry_timeout": "1", "timeout": "1s", "connect_timeout": "1s"}
    return {**store_options(store.port), **patience}


def opened(store: FaultyStore, **arguments: Any) -> raylance.Dataset:
    chosen = {"order": raylance.Sequential(shard_rows=500, window_shards=1), **arguments}
    return raylance.dataset(URI, storage_options=options_of(store), **chosen)


def epoch(data: raylance.Dataset, broken: Callable[[], Any], **options: Any) -> list[int]:
    """An epoch of single small windows, of which the storage fails from the first batch on."""
    ids: list[int] = []
    limits = {"reader_bytes": 1 << 17, "inflight_bytes": 30_000, "runtime": "threads"}
    with data.loader(**{**limits, **options}) as loader:
        for batch in loader.iter_batches(global_batch_size=50):
            if not ids:
                broken()
            ids += batch["id"].tolist()
    return ids


# What fails, and of what: opening a version, the newest, and what else is read at an opening.
OPENINGS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 1}, "_versions"),
    "newest": ({}, "_versions"),
    "rows": ({"filter": "id >= 0"}, "/data/"),
}


@pytest.mark.promise("P6")
@pytest.mark.parametrize(
    ("fault", "what"),
    list(itertools.product(PASSING, OPENINGS)),
)
def test_an_opening_outlasts_a_storage_that_fails(store: FaultyStore, heal: Heal, fault: Fault, what: str) -> None:
    healed = heal(lambda: store.disturb(""))
    arguments, match = OPENINGS[what]
    store.disturb(fault, match)
    data = opened(store, **arguments)
    assert healed
    assert len(data) == ROWS


@pytest.mark.parametrize("fault", ["truncate", "500", "404", "reset", "503", "hang"])
def test_a_loader_outlasts_a_storage_that_fails(store: FaultyStore, heal: Heal, fault: Fault) -> None:
    """Also where files are said to be missing that were there before."""
    data = opened(store)
    healed = heal(lambda: store.disturb(""))
    assert epoch(data, lambda: store.disturb(fault, "/data/")) == list(range(ROWS))
    assert healed


@pytest.mark.parametrize("fault", ["500", "hang"])
def test_a_storage_that_fails_for_too_long_is_an_error_that_says_so(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    data = opened(store)
    monkeypatch.setattr(retrying, "OPENING_S", 0.1)
    store.disturb(fault)
    with pytest.raises(DatasetError, match=r"cannot be opened") as caught:
        opened(store, version=1)
    assert "has no version" not in str(caught.value)
    store.disturb("")
    with pytest.raises(DatasetError, match=r"rows \d+ to \d+ of .* cannot be read .* tried (once|\d+ times)"):
        epoch(data, lambda: store.disturb(fault, "/data/"), read_timeout_s=0.1)


@pytest.mark.parametrize("arguments", [{"version": 1}, {}])
def test_a_storage_that_refuses_is_an_error_at_once(store: FaultyStore, heal: Heal, arguments: dict[str, Any]) -> None:
    data = opened(store)
    healed = heal(lambda: None)
    store.disturb("403")
    with pytest.raises(DatasetError, match=r"403") as caught:
        opened(store, **arguments)
    assert "has no version" not in str(caught.value)
    store.disturb("")
    with pytest.raises(DatasetError, match="403"):
        epoch(data, lambda: store.disturb("403", "/data/"), read_timeout_s=1000)
    assert not healed


def test_a_filter_is_not_blamed_for_the_storage(store: FaultyStore) -> None:
    store.disturb("403", "/data/")
    with pytest.raises(DatasetError, match="403"):
        opened(store, filter="id >= 0")


def test_what_is_not_there_is_said_at_once(store: FaultyStore, heal: Heal) -> None:
    healed = heal(lambda: None)
    for uri, version, message in [
        (URI, 7, "has no version 7 .* It has versions 1 to 1"),
        (URI, "none", "has no tag 'none'"),
        (URI, ("none", None), "has no reference"),
        ("s3://faulty/none.lance", None, "no Lance dataset can be opened at"),
        ("s3://faulty/none.lance", 1, "no Lance dataset can be opened at"),
        ("s3://none/data.lance", 1, "NoSuchBucket"),
    ]:
        with pytest.raises(DatasetError, match=message):
            raylance.dataset(uri, version=version, storage_options=options_of(store))
    assert not healed


def test_a_manifest_that_is_listed_is_asked_for_again(store: FaultyStore, heal: Heal) -> None:
    """A version cannot be missing of versions 1 to 1."""
    healed = heal(lambda: store.disturb(""))
    store.disturb("404", "HEAD .*manifest")
    assert opened(store, version=1).version == 1
    assert len(healed) == 1


def test_a_dataset_that_was_rewritten_in_a_bucket_is_refused(store: FaultyStore, s3_port: int) -> None:
    """Lance keeps no manifest of before; the loader ends though its storage is healthy."""
    uri, options = "s3://faulty/other.lance", options_of(store)
    lance.write_dataset(TABLE, uri, max_rows_per_file=500, storage_options=options)
    order = raylance.Sequential(shard_rows=500, window_shards=1)
    data = raylance.dataset(uri, storage_options=options, order=order)

    def rewrite() -> None:
        bucket_of(s3_port, "faulty").objects.filter(Prefix="other.lance/").delete()
        lance.write_dataset(TABLE, uri, max_rows_per_file=500, storage_options=options)

    with pytest.raises(DatasetError, match=r"rewritten in place: its files were \w{32}.* and are \w{32}"):
        epoch(data, rewrite, read_timeout_s=1000)


# ---- a local folder


@pytest.fixture(params=[10, 500], ids=["small files", "large files"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Six files, which Lance reads at once where they are small: what it says of one that is away differs."""
    path = tmp_path / "data.lance"
    lance.write_dataset(table(width=request.param), str(path), max_rows_per_file=ROWS // 6)
    return path


def in_chunks(path: Path) -> raylance.Dataset:
    return raylance.dataset(str(path), order=raylance.Sequential(shard_rows=ROWS // 6, window_shards=1))


@pytest.mark.parametrize("what", ["data", "."], ids=["its files", "all of it"])
def test_a_local_folder_that_goes_away_and_comes_back_costs_time(local: Path, heal: Heal, what: str) -> None:
    data, folder = in_chunks(local), (local / what).resolve()
    away = folder.with_name("away")
    healed = heal(lambda: away.rename(folder))
    assert epoch(data, lambda: folder.rename(away)) == list(range(ROWS))
    assert healed


def test_a_local_folder_that_is_away_before_the_first_batch(local: Path, heal: Heal) -> None:
    data, away = in_chunks(local), local.with_name("away")
    heal(lambda: away.rename(local))
    local.rename(away)
    assert epoch(data, lambda: None) == list(range(ROWS))


def test_an_outage_that_stays_says_since_when(local: Path) -> None:
    """It begins while windows are read ahead, and what was read ahead is asked for when that has given up."""
    data = in_chunks(local)
    limits: dict[str, Any] = {"reader_bytes": 1 << 17, "inflight_bytes": 30_000, "runtime": "threads"}
    with data.loader(read_timeout_s=1, **limits) as loader:
        iterator = iter(loader.iter_batches(global_batch_size=50))
        for _ in range(4):
            next(iterator)
        (local / "data").rename(local / "away")
        with pytest.raises(DatasetError, match="cannot be read") as caught:
            list(iterator)
        times, seconds = re.findall(r"tried (\d+) times in (\d+) s", str(caught.value))[0]
        assert int(times) >= 3
        assert 1 <= int(seconds) <= 60
        (local / "away").rename(local / "data")
        assert len(list(loader.iter_batches(global_batch_size=50))) > 0, "the loader continues"


def test_a_version_that_was_cleaned_up_is_an_error_at_once(local: Path, heal: Heal) -> None:
    data, healed = in_chunks(local), heal(lambda: None)
    lance.write_dataset(table(10), str(local), mode="overwrite")
    lance.dataset(str(local)).cleanup_old_versions(timedelta(0), delete_unverified=True)
    with pytest.raises(DatasetError, match="no version 1 .*versions 2 to 2"):
        epoch(data, lambda: None, read_timeout_s=1000)
    with pytest.raises(DatasetError, match="has no version 1 any more"):
        data.head()
    assert not healed


def test_a_path_without_a_dataset_is_an_error_at_once(tmp_path: Path, heal: Heal) -> None:
    healed = heal(lambda: None)
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "none.lance", tmp_path, tmp_path / "file"):
        with pytest.raises(DatasetError, match=re.escape(repr(str(path)))):
            raylance.dataset(path)
    assert not healed


@pytest.mark.parametrize("how", ["cut", "empty", "noise"])
def test_a_damaged_manifest_is_an_error_at_once(local: Path, heal: Heal, how: str) -> None:
    """In noise, Lance panics, which is no Exception in Python."""
    healed = heal(lambda: None)
    (manifest,) = (path for path in (local / "_versions").iterdir() if path.suffix == ".manifest")
    whole = manifest.read_bytes()
    noise = np.random.default_rng(0).bytes(len(whole) - 16) + whole[-16:]
    manifest.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "noise": noise}[how])
    with pytest.raises(DatasetError, match="whether the files are whole|that the dataset was written"):
        raylance.dataset(str(local))
    assert not healed


@pytest.mark.parametrize("columns", [["id"], ["bulk"]])
def test_a_data_file_that_is_missing_at_an_opening_is_an_error_at_once(local: Path, columns: list[str]) -> None:
    for path in (local / "data").iterdir():
        path.unlink()
    with pytest.raises(DatasetError, match="cannot be (read|selected).*Not found"):
        raylance.dataset(str(local), columns=columns, filter="id >= 0" if columns == ["id"] else None)


# ---- what Lance says where none of the storages above says it


LIST = "LanceError(IO): Generic S3 error: Error performing list request: Error performing GET http://x in 1ms, after 1 "
PASSES = [
    f"{LIST}retries - Server returned non-2xx status code: 429 Too Many Requests: ",
    "LanceError(IO): Generic LocalFileSystem error: Unable to open file /x: Stale file handle (os error 116)",
    "LanceError(IO): Generic LocalFileSystem error: Input/output error (os error 5)",
]
MISSES = [
    "LanceError(IO): Generic N/A error: Not found: /x/data/1.lance, function.rs:250:5",
    "External error: Not found: x/data/1.lance",
    "Dataset at path x/_versions/1.manifest was not found: Not found: x/_versions/1.manifest",
    "LanceError(IO): Generic LocalFileSystem error: No such file or directory (os error 2)",
]
LASTS = [
    "LanceError(IO): Generic memory error: Invalid range 0..1320 for object of size 660 bytes",
    "External error: LanceError(IO): Generic LocalFileSystem error: failed to fill whole buffer",
    "LanceError(IO): file size is too small",
    "LanceError(IO): Generic LocalFileSystem error: Unable to open file /x: Permission denied (os error 13)",
    "LanceError(IO): Generic LocalFileSystem error: Unable to walk dir: Not a directory (os error 20)",
]
NO_STORAGE = ["Invalid user input: No field named x", "LanceError(Schema): x"]


@pytest.mark.parametrize(
    ("texts", "failure"),
    [(PASSES, Failure.PASSING), (MISSES, Failure.MISSING), (LASTS, Failure.LASTING), (NO_STORAGE, None)],
)
def test_what_lance_says_is_classified(texts: list[str], failure: Failure | None) -> None:
    """Whatever class the exception has; an error of raylance is as its cause."""
    for text in texts:
        for kind in (OSError, ValueError, pa.ArrowInvalid):
            assert failure_of(kind(text)) is failure, text
            found = DatasetError("rows cannot be read")
            found.__cause__ = kind(text)
            assert failure_of(found) is failure
    assert failure_of(TimeoutError()) is failure_of(ConnectionResetError()) is Failure.PASSING
    assert failure_of(DatasetError("it has no version 1 any more: Not found: x")) is Failure.LASTING
