"""What tests of jobs/create_dataset share: images, folders, tars, and runs of the job in this process."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.create_dataset import command as job
from jobs.create_dataset.images import Digits
from tests.helpers.images import encode


def png(number: int, size: tuple[int, int] = (4, 5)) -> bytes:
    """An encoded image that only this number gives."""
    return encode(np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8))


def plant(folder: Path, files: Mapping[str, Any]) -> Path:
    """Writes tables as Parquet, texts and bytes as they are; returns the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, (str, bytes)):
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            pq.write_table(content if isinstance(content, pa.Table) else pa.table(content), folder / name)
    return folder


def pack(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def make(source: str, out: Path | str, *options: object) -> lance.LanceDataset:
    assert job.main([source, "--out", str(out), *map(str, options)]) == 0
    return lance.dataset(str(out))


def refusal(capsys: pytest.CaptureFixture[str], *argv: object, main: Any = job.main, status: int = 2) -> str:
    """Runs a job, which must fail; returns the message."""
    capsys.readouterr()  # drops what earlier runs printed
    assert main([str(word) for word in argv]) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "\nwrote" not in f"\n{captured.out}"
    return captured.err


def write_digits(out: Path, rows: int | None = None) -> Path:
    """The handwritten digits, or the first of them, with a split and their classes."""
    source = Digits()
    table = source.rows.slice(0, rows)
    splits = pa.array(["val" if row % 10 == 0 else "train" for row in range(table.num_rows)])
    table = table.append_column("split", splits)
    lance.write_dataset(table.replace_schema_metadata({"classes": json.dumps(source.classes)}), out)
    return out


def check_said(wanted: str, said: str) -> None:
    """A message has all these parts."""
    assert all(part in said for part in wanted.split(" … ")), said


def classes_of(dataset: lance.LanceDataset) -> list[str]:
    names: list[str] = json.loads(dataset.schema.metadata[b"classes"])
    return names
