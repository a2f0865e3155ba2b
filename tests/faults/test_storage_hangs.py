"""Storage which accepts requests and never answers is an error in time, with the options that a user has; by a real S3
API on this machine, and by sockets that say nothing.

Without limits, Lance waits half an hour: bounds of time are far below that, and far above what the limits allow.
"""

import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.api.dataset import opened_of
from raylance.errors import DatasetError
from raylance.source import retrying
from raylance.source.lance_errors import LANCE_ERRORS
from raylance.source.limits import with_limits
from tests.helpers.faulty_store import FaultyStore, store_options

ROWS = 1500
URI = "s3://hanging/data.lance"
TABLE = pa.table({"id": np.arange(ROWS), "bulk": [np.random.default_rng(row).bytes(100) for row in range(ROWS)]})
KEYS = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "aws_region": "us-east-1"}
ORDER = raylance.Sequential(shard_rows=500, window_shards=1)
SMALL = {"reader_bytes": 1 << 17, "inflight_bytes": 30_000}

pytestmark = pytest.mark.timeout(200)


def opened(store: FaultyStore, **arguments: Any) -> raylance.Dataset:
    """As a user has it: without a limit."""
    return raylance.dataset(URI, storage_options=store_options(store.port), **{"order": ORDER, **arguments})


def epoch(data: raylance.Dataset, breaks: Callable[[], Any], after: int = 50, **options: Any) -> list[int]:
    """An epoch of which the storage fails after so many rows: the first are read by themselves, later ones ahead."""
    ids: list[int] = []
    with data.loader(**{**SMALL, **options}) as loader:
        for batch in loader.iter_batches(global_batch_size=50):
            if len(ids) == after - 50:
                breaks()
            ids += batch["id"].tolist()
    return ids


def check_hang(store: FaultyStore, runtime: str, match: str, after: int = 50, read_timeout_s: float = 2) -> None:
    data, begun = opened(store), []

    def hang() -> None:
        begun.append(time.monotonic())
        store.disturb("hang", match)

    with pytest.raises(DatasetError, match=r"cannot be .*tried (once|\d+ times) in \d+ s") as caught:
        epoch(data, hang, after, read_timeout_s=read_timeout_s, runtime=runtime)
    spent_s = time.monotonic() - begun[0]
    print(f"{runtime}, {match!r}, {read_timeout_s} s: the error came after {spent_s:.1f} s: {caught.value}")
    assert spent_s < 60
    said_s = int(str(caught.value).rpartition("tried ")[2].split(" in ")[1].split()[0])
    assert said_s >= read_timeout_s, "since when the storage fails, and not how long the last attempt took"


@pytest.mark.promise("P9")
@pytest.mark.parametrize(
    ("match", "after"),
    [("/data/", 50), ("/data/", 450), ("", 450)],
    ids=["one item", "read ahead", "all requests"],
)
def test_a_storage_that_begins_to_hang_is_an_error_in_time(store: FaultyStore, match: str, after: int) -> None:
    check_hang(store, "threads", match, after)


def test_a_storage_that_begins_to_hang_is_an_error_in_time_with_ray(ray_session: None, store: FaultyStore) -> None:
    check_hang(store, "ray", "/data/", after=450, read_timeout_s=8)


def test_a_hang_that_passes_costs_time(store: FaultyStore) -> None:
    data = opened(store)
    timer = threading.Timer(1, store.disturb, [""])

    def hang() -> None:
        store.disturb("hang")
        timer.start()

    assert epoch(data, hang, read_timeout_s=60, runtime="threads") == list(range(ROWS))
    timer.join()


@pytest.mark.promise("P9")
def test_an_opening_that_hangs_is_an_error_in_time(
    store: FaultyStore, s3_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening of the newest version, and the selection of rows, each by a store of its own at the same time."""
    monkeypatch.setattr(retrying, "OPENING_S", 2.0)
    other = FaultyStore(s3_port)
    store.disturb("hang")
    other.disturb("hang", "/data/")

    def refused(at: FaultyStore, arguments: dict[str, Any]) -> str:
        with pytest.raises(DatasetError, match="has not answered for") as caught:
            opened(at, **arguments)
        return str(caught.value)

    begin = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        newest, rows = threads.map(refused, [store, other], [{}, {"filter": "id >= 0"}])
    assert time.monotonic() - begin < 60
    assert "cannot be opened" in newest
    assert "cannot be read" in rows
    other.close()


# ---- the limits that Lance keeps


@pytest.fixture
def silent() -> Iterator[str]:
    """What accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def stores_of(silent: str) -> dict[str, tuple[str, dict[str, str]]]:
    return {
        "s3": ("s3://b/data.lance", {"aws_endpoint": silent, **KEYS}),
        "gs": ("gs://b/data.lance", {"google_base_url": silent, "google_skip_signature": "true"}),
        "az": (
            "az://c/data.lance",
            {"azure_storage_account_name": "a", "azure_endpoint": f"{silent}/a", "azure_skip_signature": "true"},
        ),
    }


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_lance_keeps_the_limits(silent: str, scheme: str) -> None:
    """Its own default is 30 s for a request, and sixteen requests."""
    uri, options = stores_of(silent)[scheme]
    begin = time.monotonic()
    with pytest.raises(LANCE_ERRORS, match="HTTP error"):
        lance.dataset(uri, version=1, storage_options=with_limits(uri, {**options, "allow_http": "true"}, 2.0))
    assert time.monotonic() - begin < 25


def test_limits_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"aws_access_key_id": "x"}
    made = with_limits("s3://b/d", keys, 8.0)
    assert made == {**keys, "timeout": "4000ms", "connect_timeout": "4000ms", "client_retry_timeout": "4"}
    assert keys == {"aws_access_key_id": "x"}
    for uri in ("s3://b/d", "gs://b/d", "az://b/d", "abfss://b/d"):
        assert with_limits(uri, None, float("inf")) == {
            "timeout": "30000ms",
            "connect_timeout": "5000ms",
            "client_retry_timeout": "30",
        }
        for name in ("timeout", "AWS_TIMEOUT", "connect_timeout", "client_max_retries", "client_retry_timeout"):
            assert with_limits(uri, {name: "1s"}, 8.0) == {name: "1s"}
    for uri in ("/data", "file:///data", "memory://x", "oss://b/d", "hf://b/d"):
        assert with_limits(uri, None, 8.0) is None
        assert with_limits(uri, keys, 8.0) == keys
    for name in ("TIMEOUT", "AWS_CONNECT_TIMEOUT", "OBJECT_STORE_CLIENT_MAX_RETRIES"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "7s")
            assert with_limits("s3://b/d", keys, 8.0) == keys


def test_no_limit_enters_what_is_pinned_or_saved(store: FaultyStore) -> None:
    """A run that resumes with another `read_timeout_s`, or with new credentials, is the same run."""
    data = pickle.loads(pickle.dumps(opened(store)))
    with data.loader(runtime="threads", read_timeout_s=7) as loader:
        next(iter(loader.iter_batches(global_batch_size=50)))
        saved = loader.state_dict()
    assert "timeout" not in json.dumps(saved)
    assert opened_of(data).read.source.pinned.storage_options == store_options(store.port)
    renewed = raylance.dataset(URI, storage_options=store_options(store.port, "new"), order=ORDER)
    with renewed.loader(runtime="threads", read_timeout_s=20) as loader:
        loader.load_state_dict(saved)
        assert next(iter(loader.iter_batches(global_batch_size=50)))["id"].tolist() == list(range(50, 100))
