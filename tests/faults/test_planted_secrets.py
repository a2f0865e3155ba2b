"""A run leaves no secret: a real run on an S3 API of this machine, with secrets planted in storage options and in the
environment, that fails once; then all that it leaves is searched.
"""

import json
import logging
import os
import traceback
import urllib.request
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
import ray
import ray.train
from ray.train.torch import TorchTrainer

import raylance
from raylance.errors import DatasetError
from raylance.reports.reading import read_run
from tests.helpers.faulty_store import FaultyStore, store_options

ROWS = 400
OPTION, TOKEN, ENVIRONMENT = "pl4nted-option", "pl4nted-token", "pl4nted-environment"
SECRETS = (OPTION, TOKEN, ENVIRONMENT)
URI = "s3://secrets/data.lance"


def train_fn(config: dict[str, Any]) -> None:
    os.environ["AWS_SECRET_ACCESS_KEY"] = ENVIRONMENT
    loader = ray.train.get_dataset_shard("train")
    raylance.restore(loader)
    Path(config["shown"]).write_text(repr(loader) + str(loader.explain()) + json.dumps(loader.identity()))
    for step, batch in enumerate(loader.iter_batches(global_batch_size=20)):
        if step % 5 == 0:
            raylance.report({"rows": len(batch["id"])}, loader, state={"step": step})
        if step == 6:
            raylance.dataset(URI + "-none", storage_options=config["options"])


def test_a_run_leaves_no_secret(
    store: FaultyStore,
    ray_session: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ENVIRONMENT)
    options = store_options(store.port) | {"aws_secret_access_key": OPTION, "aws_session_token": TOKEN}
    rows = pa.table({"id": np.arange(ROWS), "bulk": [b"x" * 100] * ROWS})
    lance.write_dataset(rows, URI, max_rows_per_file=100, storage_options=options)
    data = raylance.dataset(URI, storage_options=options)
    shown = [repr(data), data._repr_html_(), repr(data.plan(20)), str(data.plan(20))]
    trainer = TorchTrainer(
        train_fn,
        train_loop_config={"shown": str(tmp_path / "shown"), "options": options},
        scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="run", storage_path=str(tmp_path / "storage")),
        datasets={"train": data},
        dataset_config=raylance.DataConfig(num_decoders=0),
    )
    with raylance.watch(tmp_path / "storage" / "run"), pytest.raises(Exception) as caught:
        trainer.fit()
    assert "no Lance dataset can be opened" in str(caught.value)
    shown.append("".join(traceback.format_exception(caught.value)))
    store.disturb("403", "/data/")
    with pytest.raises(DatasetError) as refused:
        data.head()
    shown.append("".join(traceback.format_exception(refused.value)))
    store.disturb("")

    folder = tmp_path / "storage" / "run"
    shown += [str(raylance.explain_run(folder, storage_options=options)), repr(read_run(folder).records)]
    raylance.report_run(folder, storage_options=options)
    shown += [str(raylance.prove_run(folder, storage_options=options)), caplog.text, *capfd.readouterr()]
    for path in folder.rglob("*.arrow"):  # compressed on the disk
        table = pyarrow.feather.read_table(path, memory_map=False)
        shown.append(f"{table.schema.metadata} {table.to_pydict()}")
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        shown.append(answer.read().decode())
    assert "ray_raylance_rows" in shown[-1]
    assert "ray_data_iter_rows_total{" in shown[-1], "what Ray's own dashboard of Ray Train reads"
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    left = {str(path): path.read_bytes() for at in (tmp_path, session) for path in at.rglob("*") if path.is_file()}
    names = {Path(path).name for path in left}
    assert {"raylance_state.json", "state.pt", "report.html", "shown"} <= names
    assert any("raylance" in path and path.endswith(".arrow") for path in left)
    assert any("worker" in path and str(session) in path for path in left), "Ray's logs"
    left |= {f"shown {number}": text.encode() for number, text in enumerate(shown)}
    for name in ("raylance_state.json", "report.html", "shown"):
        assert any(URI.encode() in content for path, content in left.items() if Path(path).name == name), name
    found = [(path, secret) for path, content in left.items() for secret in SECRETS if secret.encode() in content]
    assert not found
