"""A dataset which was removed and written again in its place is never taken for the pinned one."""

import logging
import pickle
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.api.dataset import opened_of
from raylance.audit import EpochAudit, reopen
from raylance.errors import DatasetError
from raylance.source import version

ROWS = 4000
REWRITTEN = r"rewritten in place: its files were \w{32} \(written .*\) when it was pinned, and are \w{32} \(written"


def rows(first: int, count: int = ROWS) -> pa.Table:
    """Ids from `first` on, and bulk, so that a file is no smaller than what Lance reads at once."""
    ids = np.arange(first, first + count)
    return pa.table({"id": ids, "label": ids % 7, "bulk": ["x" * 500] * count})


def rewrite(uri: str, first: int = 10**6, **options: Any) -> None:
    shutil.rmtree(uri)
    lance.write_dataset(rows(first), uri, max_rows_per_file=500, **options)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    path = str(tmp_path / "data.lance")
    lance.write_dataset(rows(0), path, max_rows_per_file=500)
    return path


def chunked(uri: str, **options: Any) -> raylance.Dataset:
    return raylance.dataset(uri, order=raylance.Sequential(shard_rows=500, window_shards=1), **options)


def test_a_loader_in_mid_epoch_ends(uri: str) -> None:
    options: dict[str, Any] = {"reader_bytes": 1 << 20, "inflight_bytes": 100_000, "read_timeout_s": 1000}
    with chunked(uri).loader(runtime="threads", **options) as loader:
        ids: list[int] = []
        with pytest.raises(DatasetError, match=REWRITTEN):
            for batch in loader.iter_batches(global_batch_size=50):
                ids += batch["id"].tolist()
                if len(ids) == ROWS // 4:
                    rewrite(uri)
        assert ROWS // 4 <= len(ids) < ROWS
        assert ids == list(range(len(ids))), "of the pinned dataset alone, and without a gap"
        with pytest.raises(DatasetError, match=REWRITTEN):
            next(loader.iter_batches(global_batch_size=50))


PEEKS: dict[str, Callable[[raylance.Dataset], Any]] = {
    "head": lambda data: data.head(),
    "take": lambda data: data.take([5]),
    "[]": lambda data: data[5],
    "iteration": lambda data: next(iter(data.iter_batches(batch_size=10))),
    "loader": lambda data: next(data.loader(runtime="threads").iter_batches(global_batch_size=10)),
    "rows of torch_data": lambda data: raylance.torch_data.MapDataset(data)[5],
    "audit": lambda data: EpochAudit(data, global_batch_size=10).count(),
}


@pytest.mark.parametrize("name", PEEKS)
def test_a_pickled_handle_refuses(uri: str, name: str) -> None:
    sent = pickle.dumps(chunked(uri, filter="id >= 10"))
    assert int(pickle.loads(sent)[0]["id"]) == 10
    rewrite(uri)
    with pytest.raises(DatasetError, match=REWRITTEN):
        PEEKS[name](pickle.loads(sent))


def test_a_handle_that_has_looked_refuses(uri: str) -> None:
    data = chunked(uri)
    assert data.head(2)["id"].tolist() == [0, 1]
    rewrite(uri)
    with pytest.raises(DatasetError, match=REWRITTEN):
        data.take([ROWS - 1])


def test_each_component_of_a_mixture_is_compared(uri: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.lance")
    lance.write_dataset(rows(5 * 10**6), other, max_rows_per_file=500)
    mix = raylance.mix({"a": (chunked(uri), 1), "b": (chunked(other), 1)})
    rewrite(other)
    with (
        pytest.raises(DatasetError, match=REWRITTEN) as caught,
        mix.loader(runtime="threads") as loader,
    ):
        next(loader.iter_batches(global_batch_size=10))
    assert other in str(caught.value)


@pytest.mark.parametrize("reference", ["tag", ("line", None), ("line", 2)])
def test_tags_and_branches_are_pinned(uri: str, reference: Any) -> None:
    def branch() -> None:
        line = lance.dataset(uri).create_branch("line")
        lance.write_dataset(rows(ROWS, 10), line, mode="append")
        lance.dataset(uri).tags.create("tag", ("line", 2))

    branch()
    sent = pickle.dumps(chunked(uri, version=reference))
    assert len(pickle.loads(sent)) == ROWS + 10
    lance.dataset(uri).tags.delete("tag")
    lance.dataset(uri).tags.create("tag", 1)
    assert pickle.loads(sent).take([ROWS])["id"].tolist() == [ROWS], "a tag that moves moves nothing that was pinned"
    shutil.rmtree(uri)
    lance.write_dataset(rows(0), uri, max_rows_per_file=500)
    with pytest.raises(DatasetError, match="has no branch 'line' any more"):
        pickle.loads(sent).head()
    branch()
    with pytest.raises(DatasetError, match=REWRITTEN):
        pickle.loads(sent).head()


def test_fewer_versions_than_were_pinned_are_another_dataset(uri: str) -> None:
    lance.write_dataset(rows(ROWS, 10), uri, mode="append")
    data = chunked(uri)
    rewrite(uri)
    with pytest.raises(DatasetError, match="version 2 .*version is 1"):
        data.head()


def test_a_checkpoint_does_not_continue_over_it(uri: str) -> None:
    data = chunked(uri)
    with data.loader(runtime="threads") as loader:
        batches = loader.batches(global_batch_size=50)
        next(iter(batches))
        state = loader.state_dict()
    rewrite(uri)
    with data.loader(runtime="threads") as loader, pytest.raises(DatasetError, match=REWRITTEN):
        loader.load_state_dict(state)  # the handle of before
        next(loader.iter_batches(global_batch_size=50))
    with chunked(uri).loader(runtime="threads") as loader, pytest.raises(raylance.StateError, match="identity"):
        loader.load_state_dict(state)
    with pytest.raises(raylance.StateError, match="identity"):
        EpochAudit(reopen(state), state=state)


def test_files_that_are_put_back_are_the_pinned_ones(uri: str, tmp_path: Path) -> None:
    data, kept = chunked(uri), tmp_path / "kept"
    shutil.copytree(uri, kept)
    rewrite(uri)
    with pytest.raises(DatasetError, match=REWRITTEN):
        data.head()
    shutil.rmtree(uri)
    shutil.copytree(kept, uri)
    assert data.head(2)["id"].tolist() == [0, 1]


def test_a_version_that_was_cleaned_up_is_read_while_its_files_are_there(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions that only add rows share their files."""
    monkeypatch.setattr(version, "_CHECK_S", 0.0)
    monkeypatch.setattr(version, "_CHECK_SHARE", 0)
    caplog.set_level(logging.WARNING, "raylance.source.version")
    with chunked(uri).loader(runtime="threads", reader_bytes=1 << 20, inflight_bytes=100_000) as loader:
        ids: list[int] = []
        for batch in loader.iter_batches(global_batch_size=50):
            if not ids:
                lance.write_dataset(rows(ROWS, 10), uri, mode="append")
                lance.dataset(uri).cleanup_old_versions(timedelta(0), delete_unverified=True)
            ids += batch["id"].tolist()
    assert ids == list(range(ROWS))
    assert [f"removed version 1 of {uri!r}" in record.getMessage() for record in caplog.records] == [True]


def test_an_open_dataset_that_still_serves_what_was_removed_is_checked(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading alone finds nothing: the files are read that were opened before."""
    monkeypatch.setattr(version, "_CHECK_S", 0.0)
    monkeypatch.setattr(version, "_CHECK_SHARE", 0)
    source = opened_of(raylance.dataset(uri, columns=["id", "label"])).read.source
    reader = source.open_reader()
    reader.read(np.arange(ROWS))
    kept = Path(uri + ".kept")
    Path(uri).rename(kept)
    lance.write_dataset(rows(7), uri, max_rows_per_file=500)
    for path in (kept / "data").iterdir():  # what an open file or a cache would serve
        path.rename(Path(uri, "data", path.name))
    with pytest.raises(DatasetError, match=REWRITTEN):
        reader.read(np.arange(10))
