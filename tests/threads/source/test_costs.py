"""Costs of rows: right for any selection, read once, kept in a file, continued after a kill."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError, DatasetError, RaylanceError
from raylance.samples.pack_tokens import PackTokens
from tests.helpers.faulty_store import bucket_of


@pytest.mark.parametrize(
    ("cost", "of"),
    [
        ("length", lambda row: row["length"]),
        (raylance.TokensOf("ids"), lambda row: row["length"]),
        (raylance.TokensOf("ids", multiple=7), lambda row: -(-row["length"] // 7) * 7),
        ("length + 256 * images", lambda row: row["length"] + 256 * row["images"].astype(int)),
        ("a b", lambda row: np.ceil(row["length"] / 8)),
        ("`a b` * 16", lambda row: 2 * row["length"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("filter", [None, "id % 3 = 1", "id % 1000 = 5"])
def test_costs_are_those_of_the_selected_rows(
    tokens: str, tmp_path: Path, cost: Any, of: Callable[[Any], Any], filter: str | None
) -> None:
    dataset = raylance.dataset(tokens, columns=["id"], cost=cost, cost_folder=tmp_path, filter=filter)
    stored = lance.dataset(tokens).to_table(columns=["id", "length", "images"], filter=filter).to_pandas()
    assert dataset.costs is not None
    assert dataset.costs.dtype == np.int32
    np.testing.assert_array_equal(dataset.costs, of(stored).astype(np.int32))


def test_they_are_read_once_for_a_version_and_a_selection(tokens: str, tmp_path: Path, monkeypatch: Any) -> None:
    def opened(**arguments: Any) -> raylance.Dataset:
        return raylance.dataset(tokens, columns=["id"], cost_folder=tmp_path, **{"cost": "length"} | arguments)

    costs = opened().costs
    [file] = tmp_path.iterdir()
    assert file.stat().st_size == 4 * len(opened())
    file.chmod(0o400)
    time = file.stat().st_mtime_ns
    np.testing.assert_array_equal(opened().costs, costs)
    assert file.stat().st_mtime_ns == time
    opened(cost="length + 1")
    opened(filter="id > 5")
    assert len(list(tmp_path.iterdir())) == 3, "other costs and other rows have files of their own"
    opened(filter="id < 1000")
    assert len(list(tmp_path.iterdir())) == 3, "those of few rows are read again"


def test_a_folder_that_cannot_be_written_is_said(tokens: str, caplog: pytest.LogCaptureFixture) -> None:
    dataset = raylance.dataset(tokens, columns=["id"], cost="length", cost_folder="/proc/nothing")
    assert dataset.costs is not None
    assert "/proc/nothing" in caplog.text


def test_a_folder_in_an_object_store_serves_a_machine_without_the_file(
    tokens: str, s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(s3_port, "costs")
    folder = f"s3://me:password@costs/kept?scheme=http&endpoint_override=127.0.0.1:{s3_port}"
    found = []
    for machine in ("first", "second"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        found.append(raylance.dataset(tokens, columns=["id"], cost="length", cost_folder=folder).costs)
    stored = lance.dataset(tokens).to_table(columns=["length"])["length"].to_numpy()
    assert all(np.array_equal(costs, stored) for costs in found)
    [kept] = bucket.objects.all()
    assert kept.key.startswith("kept/")
    assert kept.size == 4 * len(stored)
    kept.put(Body=np.arange(1, len(stored) + 1, dtype=np.int32).tobytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    fetched = raylance.dataset(tokens, columns=["id"], cost="length", cost_folder=folder).costs
    assert fetched is not None
    assert fetched[-1] == len(stored), "the file was fetched, and not made again"


def test_a_store_that_fails_is_said(
    tokens: str, s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = f"s3://me:password@missing-bucket/kept?scheme=http&endpoint_override=127.0.0.1:{s3_port}"
    assert raylance.dataset(tokens, columns=["id"], cost="length", cost_folder=folder).costs is not None
    assert "missing-bucket" in caplog.text
    assert "password" not in caplog.text


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"cost": "nothing"}, DatasetError, "nothing"),
        ({"cost": "ids"}, ConfigError, "ids"),
        ({"cost": "length - 30"}, DatasetError, "-"),
        ({"cost": "length * 1000000000"}, DatasetError, "length"),
        ({"cost": "0 * length"}, DatasetError, "is 0"),
        ({"cost": "length length"}, DatasetError, "length length"),
        ({"cost": "length, id"}, DatasetError, "length, id"),
        ({"cost": 3}, ConfigError, "cost=3"),
        ({"cost": raylance.TokensOf("length")}, DatasetError, "length"),
        ({"cost": raylance.TokensOf("nothing")}, DatasetError, "nothing"),
        ({"cost": raylance.TokensOf("length", multiple=8)}, DatasetError, "length"),
        ({"cost": "length", "cost_folder": "none://bucket/costs"}, ConfigError, "none"),
        ({"cost": "length", "cost_folder": 3}, ConfigError, "cost_folder=3"),
        ({"cost": "length", "samples": PackTokens("ids", 8), "columns": None}, ConfigError, "Pack"),
        ({"order": "bucket"}, ConfigError, "cost="),
        ({"balance": raylance.Balance()}, ConfigError, "cost="),
        ({"cost": "length", "balance": "cost"}, ConfigError, "balance"),
    ],
    ids=str,
)
def test_what_cannot_be(
    tokens: str, tmp_path: Path, arguments: dict[str, Any], error: type[RaylanceError], named: str
) -> None:
    with pytest.raises(error, match=named):
        raylance.dataset(tokens, **{"columns": ["id"], "cost_folder": tmp_path} | arguments)


def test_a_row_without_a_cost_is_named(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"n": [1, 2, None, 4]}))
    with pytest.raises(DatasetError, match="offset 2"):
        raylance.dataset(uri, cost="n")
    assert raylance.dataset(uri, cost="coalesce(n, 7)").costs.tolist() == [1, 2, 7, 4]
    assert raylance.dataset(uri, cost="n", filter="n is not null").costs.tolist() == [1, 2, 4]
