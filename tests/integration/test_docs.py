"""Owns the runs of what README and docs/ show: each page's snippets, one after the other in one namespace; its links;
and that what is made of the sources is current.

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

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
# What the guide says of several processes, for this one.
GUIDE = {"num_workers=4, persistent_workers=True": "num_workers=0", "num_workers=2": "num_workers=0"}


def snippets(page: Path) -> list[str]:
    """The page's Python."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def adapted(page: Path, changes: dict[str, str]) -> list[str]:
    """Its Python, where what it says of other machines is changed for this one."""
    parts = snippets(page)
    for there, here in changes.items():
        assert any(there in part for part in parts), f"{page.name} says {there!r} no more"
        parts = [part.replace(there, here) for part in parts]
    return parts


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem != "guide" and snippets(page)], ids=lambda page: page.stem
)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """As a script of its own: what it defines is sent to helpers as a user's would be."""
    run_script("\n".join(snippets(page)), tmp_path)


def test_the_guide_runs_on_the_demo(tmp_path: Path, ray_session: None) -> None:
    """The session's Ray makes the demo's dataset; the guide itself needs none."""
    assert create_dataset(["demo", "--out", str(tmp_path / "digits.lance")]) == 0
    run_script("\n".join(adapted(ROOT / "docs" / "guide.md", GUIDE)), tmp_path)


def anchors(page: Path) -> set[str]:
    """What a link may name of a page, as GitHub makes it of headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_concepts_name_what_there_is() -> None:
    """It named a method that has another name by now."""
    files = list((ROOT / "raylance").rglob("*"))
    code = "\n".join(path.read_text() for path in files if path.suffix == ".py")
    for name in re.findall(r"`([\w./]+)`", (ROOT / "docs" / "concepts.md").read_text()):
        owner, _, member = name.partition(".")
        if name.endswith((".py", "/")):
            assert (ROOT / name).exists() or any(path.match(name) for path in files), name
        elif owner[0].isupper() and member:
            assert f"class {owner}" in code, name
            assert f"def {member}(" in code, name


def test_the_reference_is_that_of_the_docstrings() -> None:
    pytest.importorskip("griffe", reason="griffe makes the reference: pip install griffe")
    from docs.source.reference import PAGE, render_reference

    assert PAGE.read_text() == render_reference(), "python -m docs.source reference"


@pytest.mark.slow
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
    "num_workers=8, use_gpu=True": "num_workers=1",
    "global_batch_size=256": "global_batch_size=8",
    "loader.global_step % 500": "loader.global_step % 4",
    "raylance.DataConfig()": "raylance.DataConfig(num_decoders=1)",
    '"epochs": 10': '"epochs": 1',
    "size=224": "size=16",
}
# What the first snippet takes from its reader's program.
GIVEN = "loss, model = 0.0, torch.nn.Linear(2, 2)"


def test_readme_snippets_run(write_dataset: Callable[..., str], tmp_path: Path, ray_session: None) -> None:
    """What it trains on is sent to workers as a notebook's is: by value."""
    rows = 40
    columns = {"image": make_images(rows), "label": [row % 5 for row in range(rows)], "split": ["train"] * rows}
    uri = write_dataset(pa.table(columns))
    changes = HERE | {"s3://bucket/runs": str(tmp_path), "s3://bucket/food101.lance": uri}
    space: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(GIVEN, space)
    for part in adapted(ROOT / "README.md", changes):
        exec(compile(part, "README.md", "exec"), space)
    assert list(tmp_path.glob("food101/checkpoint_*")), "the training function has reported"
    assert "shuffled" in (tmp_path / "food101" / "report.html").read_text()


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
