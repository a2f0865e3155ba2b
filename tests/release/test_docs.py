"""The runs of what README and docs/ show: each page's snippets, one after the other in one namespace; its links; and
that what is made of the sources is current.

A block of ```python is run. One of ```py is shown alone: another library's, or what needs a run or a cluster.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from jobs.create_dataset.command import main as create_dataset
from tests.helpers.images import make_images
from tests.helpers.scripts import run_script
from tests.helpers.witness import rows_by_epoch, watched

ROOT = Path(__file__).parents[2]

PAGES = sorted((ROOT / "docs").glob("*.md"))

# What the guide says of several processes, for this one.
GUIDE = {"num_workers=4, persistent_workers=True": "num_workers=0", "num_workers=2": "num_workers=0"}


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def outputs(page: Path) -> list[str]:
    """What a page says that its Python prints, in the block after it."""
    return re.findall(r"^```python\n.*?^```\n\n```\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def adapted(page: Path, changes: dict[str, str]) -> list[str]:
    """Its Python, where what it says of other machines is changed for this one."""
    parts = snippets(page)
    for there, here in changes.items():
        assert any(there in part for part in parts), f"{page.name} says {there!r} no more"
        parts = [part.replace(there, here) for part in parts]
    return parts


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.stem not in ("guide", "moving") and snippets(page)],
    ids=lambda page: page.stem,
)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """As a script of its own: what it defines is sent to helpers as a user's would be. `tests/examples` runs what needs
    the frameworks of the extra `examples`.
    """
    if "import PreTrainedTokenizerFast" in page.read_text():
        pytest.importorskip("transformers")
    printed = run_script("\n".join(snippets(page)), tmp_path)
    for output in outputs(page):
        assert output in printed
        printed = printed.partition(output)[2]


def test_the_guide_runs_on_the_demo(tmp_path: Path, ray_session: None) -> None:
    """The session's Ray makes the demo's dataset; the guide itself, and the page that continues it, need none."""
    assert create_dataset(["demo", "--out", str(tmp_path / "digits.lance")]) == 0
    parts = [*snippets(ROOT / "docs" / "guide.md"), *adapted(ROOT / "docs" / "moving.md", GUIDE)]
    printed = run_script("\n".join(parts), tmp_path)
    assert outputs(ROOT / "docs" / "guide.md")
    for output in outputs(ROOT / "docs" / "guide.md"):
        assert output in printed
        printed = printed.partition(output)[2]


def test_the_site_has_no_broken_link_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material makes the site: pip install raylance[docs]")
    command = [sys.executable, "-m", "docs.source", "site", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert {"index", *(page.stem for page in PAGES)} <= pages
    tags = re.compile(r"<(?:script|img|link rel=.stylesheet.)[^>]+(?:src|href)=.(https?:[^\"']+)")
    for path in tmp_path.rglob("*.html"):
        fetched = tags.findall(path.read_text())
        assert not fetched, path


# What the README says of eight GPUs and millions of rows, for this machine.
HERE = {
    "num_workers=8, use_gpu=True": "num_workers=2",
    "global_batch_size=256": "global_batch_size=8",
    "loader.global_step % 500": "loader.global_step % 2",
    "raylance.DataConfig()": "raylance.DataConfig(num_decoders=1)",
    '"epochs": 10': '"epochs": 1',
    "size=224": "size=16",
}

# What the first snippet takes from its reader's program.
GIVEN = "loss, model = 0.0, torch.nn.Linear(2, 2)"


def test_readme_snippets_run(write_dataset: Callable[..., str], tmp_path: Path, ray_session: None) -> None:
    """What it trains on is sent to workers as a notebook's is: by value. One of two ranks is killed in mid-epoch: Ray
    Train starts both again, and every row comes once. (The program ended there, without its `FailureConfig`.)
    """
    rows = 40
    columns = {"image": make_images(rows), "label": [row % 5 for row in range(rows)], "split": ["train"] * rows}
    uri = write_dataset(pa.table(columns))
    changes = HERE | {"s3://bucket/runs": str(tmp_path), "s3://bucket/food101.lance": uri}
    space: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(GIVEN, space)
    with watched(tmp_path / "seen", die_at=3):
        for part in adapted(ROOT / "README.md", changes):
            exec(compile(part, "README.md", "exec"), space)
    assert (tmp_path / "seen" / "killed").exists()
    assert sorted(rows_by_epoch(tmp_path / "seen")[0]) == list(range(rows))
    assert list(tmp_path.glob("food101/checkpoint_*")), "the training function has reported"
    assert "shuffled" in (tmp_path / "food101" / "report.html").read_text()
