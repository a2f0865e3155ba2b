"""Credentials which expire are asked for again in time, in every process that reads: from a function, and from a Lance
namespace that vends them; by a real S3 API on this machine, and a proxy that refuses keys which have expired.
"""

import pickle
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError, DatasetError
from tests.helpers.faulty_store import FaultyStore
from tests.helpers.vending import Keys

ROWS = 600
URI = "s3://expiring/data.lance"
TABLE = pa.table({"id": np.arange(ROWS), "bulk": pa.array([bytes(200)] * ROWS, pa.binary())})


def vended(store: FaultyStore, folder: Path, token: str = "right", **more: str) -> raylance.namespaces.NamespaceTable:
    """The table of a namespace that vends such credentials."""
    properties = {"uri": URI, "port": str(store.port), "folder": str(folder), "token": token, **more}
    return raylance.namespaces.NamespaceTable(["lake", "data"], "tests.helpers.vending.Vending", properties)


def check_renewal(store: FaultyStore, folder: Path, runtime: Any, processes: int, **source: Any) -> None:
    """An epoch that takes five seconds, with little read ahead."""
    store.refuses = lambda key: float(key.partition("-")[2] or 0) < time.time()  # its name says how long it is valid
    order = raylance.Sequential(shard_rows=100, window_shards=1)
    data = raylance.dataset(**source or {"uri": URI, "storage_options": Keys(store.port, folder)}, order=order)
    data = pickle.loads(pickle.dumps(data))
    ids: list[int] = []
    with data.loader(runtime=runtime, reader_bytes=1 << 15, inflight_bytes=8_000, num_decoders=0) as loader:
        for batch in loader.iter_batches(global_batch_size=50):
            ids += batch["id"].tolist()
            time.sleep(5 * 50 / ROWS)
    assert ids == list(range(ROWS))
    asked = [path.name.partition("-") for path in folder.iterdir()]
    times = sorted(float(until) for _, _, until in asked)
    assert times[-1] - times[0] > 2, "credentials that were valid at the start had expired at the end"
    assert len({pid for pid, _, _ in asked}) == processes, "each process that reads asks by itself"


def test_credentials_are_renewed_before_they_expire(store: FaultyStore, tmp_path: Path) -> None:
    check_renewal(store, tmp_path, "threads", 1)


def test_credentials_that_a_namespace_vends_are_renewed_before_they_expire(store: FaultyStore, tmp_path: Path) -> None:
    check_renewal(store, tmp_path, "threads", 1, uri=vended(store, tmp_path))


@pytest.mark.usefixtures("ray_session")
def test_a_shard_actor_asks_the_namespace_itself(store: FaultyStore, tmp_path: Path) -> None:
    check_renewal(store, tmp_path, "ray", 2, uri=vended(store, tmp_path))


def test_a_table_that_moved_is_not_read_on_with_credentials_for_its_new_place(
    store: FaultyStore, tmp_path: Path
) -> None:
    data = raylance.dataset(vended(store, tmp_path))
    (tmp_path / "moved").write_text("s3://expiring/other.lance")
    with (
        pytest.raises(DatasetError, match="s3://expiring/other.lance"),
        data.loader(runtime="threads") as loader,
    ):
        next(iter(loader.iter_batches(global_batch_size=50)))


@pytest.mark.parametrize("token", ["planted-secret", "Bearer planted-secret"])
def test_a_token_that_the_namespace_refuses_is_not_shown(store: FaultyStore, tmp_path: Path, token: str) -> None:
    table = vended(store, tmp_path, token=token)
    with pytest.raises(DatasetError, match="lake.data") as refused:
        raylance.dataset(table)
    assert "planted-secret" not in "".join(traceback.format_exception(refused.value)) + repr(table)


def test_a_namespace_that_fails_once_is_asked_again(
    store: FaultyStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failing").touch()
    assert len(raylance.dataset(vended(store, tmp_path))) == ROWS
    assert "the catalog starts again" in caplog.text


def test_the_newest_version_of_a_table_whose_versions_the_namespace_keeps_is_refused(
    store: FaultyStore, tmp_path: Path
) -> None:
    table = vended(store, tmp_path, keeps_versions="true")
    with pytest.raises(ConfigError, match="version="):
        raylance.dataset(table)
    assert len(raylance.dataset(table, version=1)) == ROWS


@pytest.mark.usefixtures("ray_session")
def test_credentials_of_a_shard_actor_are_renewed_before_they_expire(store: FaultyStore, tmp_path: Path) -> None:
    check_renewal(store, tmp_path, "ray", 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (lambda: 5, "storage_options is a int: nothing was opened. Give a dict"),
        (lambda: {}["vault"], "storage_options raised KeyError: 'vault'"),
    ],
)
def test_a_function_that_fails_says_so(options: Any, text: str) -> None:
    with pytest.raises(DatasetError, match=text):
        raylance.dataset(URI, storage_options=options)


def test_credentials_are_never_shown(store: FaultyStore, tmp_path: Path) -> None:
    data = raylance.dataset(URI, storage_options=Keys(store.port, tmp_path))
    assert "secret" not in repr(data)
    assert str(store.port) not in repr(data)
    assert "aws" not in str(data.loader(runtime="threads").state_dict())
