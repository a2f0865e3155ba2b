"""Checks the jobs against a real S3 API on this machine: data, runs and the commands that they print."""

import io
import re
import shlex
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from pyarrow.fs import copy_files
from sklearn.datasets import load_digits

from jobs import common, train_images, verify
from jobs.create_dataset import command as create
from jobs.materialize import command as materialize
from tests.helpers.faulty_store import bucket_of, store_options
from tests.helpers.images import encode
from tests.helpers.tracked import curves_of_tensorboard

SECRET = "none-of-yours"


@pytest.fixture(scope="module")
def options(s3_port: int) -> list[str]:
    """What reaches the API, given to jobs alone: no environment has it."""
    bucket, digits = bucket_of(s3_port, "bucket"), load_digits()
    for number, pixels in enumerate((digits.images[:120] * 15).astype("uint8")):
        bucket.upload_fileobj(io.BytesIO(encode(pixels)), f"photos/{digits.target[number]}/{number:04}.png")
    pairs = store_options(s3_port) | {"aws_secret_access_key": SECRET}
    return [word for key, value in pairs.items() for word in ("--storage-options", f"{key}={value}")]


@pytest.mark.usefixtures("ray_session")
def test_from_pictures_to_a_resumed_run(options: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A dataset is made of a bucket in the bucket, copied, audited, trained on; runs are kept there, too."""
    assert create.main(["imagefolder", "--input", "s3://bucket/photos", "--out", "s3://bucket/d.lance", *options]) == 0
    assert "rows       120" in capsys.readouterr().out
    assert create.main(["lance", "--input", "s3://bucket/d.lance", "--out", "s3://bucket/e.lance", *options]) == 0
    assert materialize.main(["--data", "s3://bucket/d.lance", "--out", "s3://bucket/m.lance", *options]) == 0
    assert "120, each once" in capsys.readouterr().out
    given = ["s3://bucket/m.lance", "--global-batch-size", "16", "--columns", "label"]
    assert verify.main([*given, "--remainder", "ragged", *options]) == 0
    capsys.readouterr()
    train = ["--data", "s3://bucket/d.lance", "--storage-path", "s3://bucket/runs", "--num-workers", "1", *options]
    assert train_images.main([*train, "--epochs", "1", "--global-batch-size", "16"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"checkpoint bucket/runs/d-small_cnn/checkpoint_", text), text
    assert train_images.main([*train, "--epochs", "1", "--global-batch-size", "16"]) == 0
    assert "was finished already" in capsys.readouterr().out
    assert train_images.main([*train, "--epochs", "2", "--global-batch-size", "16"]) == 0
    assert "report: " in capsys.readouterr().out
    filesystem, folder = common.open_filesystem(
        "s3://bucket/runs/d-small_cnn", dict(map(common.key_value, options[1::2]))
    )
    copy_files(folder, str(tmp_path), source_filesystem=filesystem)
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file())
    curves = curves_of_tensorboard(tmp_path / "tensorboard")  # of both attempts, copied there
    assert curves["val_accuracy"] == [6, 12]


@pytest.mark.usefixtures("ray_session")
def test_the_command_of_a_refusal_reaches_the_bucket(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It names the options, but for secrets."""
    images = [encode(np.full((8, 8), number, np.uint8)) for number in range(20)]
    table = pa.table({"image": images, "species": ["auk", "owl"] * 10, "split": ["train", "train", "val", "val"] * 5})
    store = dict(map(common.key_value, options[1::2]))
    lance.write_dataset(table, "s3://bucket/birds.lance", storage_options=store)
    assert train_images.main(["--data", "s3://bucket/birds.lance", "--label-column", "species", *options]) == 2
    said = capsys.readouterr().err
    assert SECRET not in said
    words = shlex.split(re.search(r"`python jobs/create_dataset.py (classes .+)`", said)[1])
    whole = [word.replace("…", SECRET) for word in words]
    assert create.main(whole) == 0
    assert "added class_id to s3://bucket/birds.lance" in capsys.readouterr().out


def test_options_that_only_lance_understands_are_refused_elsewhere() -> None:
    with pytest.raises(common.RefusedError, match="cannot be used for gs://bucket/x"):
        common.open_filesystem("gs://bucket/x", {"token": "x"})
    with pytest.raises(common.RefusedError, match="timeout"):
        common.open_filesystem("s3://bucket/x", {"timeout": "3"})
