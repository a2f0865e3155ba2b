"""Owns the runs of what README and docs/ show: each page's snippets, one behind the other in one namespace."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from tests.conftest import make_images

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def snippets(page: Path) -> list[str]:
    """The page's Python."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """As a script of its own, in an empty folder: what it defines is sent to helpers as a user's would be."""
    parts = snippets(page)
    if not parts:
        pytest.skip("shows no Python")
    script = tmp_path / page.with_suffix(".py").name
    script.write_text("\n".join(parts))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# What the README says of a bucket, eight GPUs and millions of rows, for this machine; each must be found.
HERE = {
    "s3://bucket/runs": "{runs}",
    "s3://bucket/food101.lance": "{data}",
    "num_workers=8, use_gpu=True": "num_workers=2",
    "num_workers=4, persistent_workers=True": "num_workers=1",
    "global_batch_size=256": "global_batch_size=8",
    "step % 500 == 499": "step % 2 == 1",
    '"epochs": 10': '"epochs": 1',
    "world_size=8": "world_size=2",
    "rows_of_step(1200": "rows_of_step(1",
    "size=224": "size=16",
}
# What each snippet takes from its reader's program.
GIVEN = (
    "loss, model = 0.0, torch.nn.Linear(2, 2)",
    "saved = train.loader().batches(global_batch_size=8).state_dict()",
    "from raylance.torch_data import IterableDataset\nepochs = 1\n"
    "train = raylance.dataset(uri, decode=raylance.Image('image', size=16))\n"
    "saved = IterableDataset(train, global_batch_size=8).state_dict()",
    "state = saved",
)


def test_readme_snippets_run(write_dataset: Callable[..., str], tmp_path: Path, ray_session: None) -> None:
    """What it trains on is sent to workers as a notebook's is: by value."""
    rows = 40
    columns = {"image": make_images(rows), "label": [row % 5 for row in range(rows)], "split": ["train"] * rows}
    uri = write_dataset(pa.table(columns))
    parts = snippets(ROOT / "README.md")
    assert len(parts) == len(GIVEN)
    for there, here in HERE.items():
        assert any(there in part for part in parts), f"the README says {there!r} no more"
        parts = [part.replace(there, here.format(data=uri, runs=tmp_path)) for part in parts]
    space: dict[str, Any] = {"__name__": "__main__", "torch": torch, "uri": uri}
    for given, part in zip(GIVEN, parts, strict=True):
        exec(given, space)
        exec(compile(part, "README.md", "exec"), space)
    assert list(tmp_path.glob("food101/checkpoint_*")), "the first snippet has reported"
    assert space["saved"]["epoch"] == 1, "the third has gone through its epoch"
    assert space["audit"].count().ok
