"""The runs of what README and docs/ show: each page's snippets, one after the other in one namespace; its links; and
that what is made of the sources is current.

A block of ```python is run. One of ```py is shown alone: another library's, or what needs a run or a cluster.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import raylance
from docs.source import promises
from jobs.create_dataset.command import main as create_dataset
from raylance import errors
from tests.helpers.images import make_images
from tests.helpers.scripts import run_script
from tests.helpers.witness import rows_by_epoch, watched

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
# What the guide says of several processes, for this one.
GUIDE = {"num_workers=4, persistent_workers=True": "num_workers=0", "num_workers=2": "num_workers=0"}


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


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
    """As a script of its own: what it defines is sent to helpers as a user's would be."""
    run_script("\n".join(snippets(page)), tmp_path)


def test_the_guide_runs_on_the_demo(tmp_path: Path, ray_session: None) -> None:
    """The session's Ray makes the demo's dataset; the guide itself, and the page that continues it, need none."""
    assert create_dataset(["demo", "--out", str(tmp_path / "digits.lance")]) == 0
    parts = [*snippets(ROOT / "docs" / "guide.md"), *adapted(ROOT / "docs" / "moving.md", GUIDE)]
    run_script("\n".join(parts), tmp_path)


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


FILES = [path for top in ("raylance", "jobs", "tests", "docs") for path in (ROOT / top).rglob("*.py")]
FILE = re.compile(r"`([\w/]+\.py)`")
THINGS_IN_FILE = re.compile(
    r"((?:`[A-Za-z_][\w.]*` and )*`[A-Za-z_][\w.]*`) \(`([\w/]+\.py)`"
)  # `this` and `that` (`file.py`)
MAP = [ROOT / "docs" / "concepts.md", ROOT / "docs" / "reliability.md"]


def file_of(name: str) -> Path:
    """The one file that a page means by `folder/file.py`."""
    found = [path for path in FILES if path.match(name)]
    exact = [path for path in found if path in (ROOT / name, ROOT / "raylance" / name)]
    assert len(found) == 1 or len(exact) == 1, f"{name} is {[str(path) for path in found] or 'no file'}"
    return (exact or found)[0]


def defined_in(path: Path) -> set[str]:
    """Names that a file defines: functions, classes, constants, and members of classes as `Class.member`."""

    def names(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            if isinstance(node, ast.ClassDef):
                yield from (f"{node.name}.{member}" for member in names(node.body))
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))

    return set(names(ast.parse(path.read_text()).body))


@pytest.mark.parametrize("page", MAP, ids=lambda page: page.stem)
def test_files_define_what_a_page_says(page: Path) -> None:
    """It named files that the thing had left, and folders that were no more."""
    text = page.read_text()
    for name in FILE.findall(text):
        file_of(name)
    for name in re.findall(r"`([\w/]+/)`", text):
        assert (ROOT / name).is_dir() or (ROOT / "raylance" / name).is_dir(), name
    members = set().union(*map(defined_in, (ROOT / "raylance").rglob("*.py")))
    for name in re.findall(r"`([A-Z]\w*\.\w+)`", text):
        assert name in members, f"no class defines {name}"
    pairs = THINGS_IN_FILE.findall(text)
    assert len(pairs) >= 4
    for things, name in pairs:
        assert set(re.findall(r"`([\w.]+)`", things)) <= defined_in(file_of(name)), (things, name)


def test_the_folders_stand_in_the_order_of_the_layers() -> None:
    """From the lowest layer to the highest, all of them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(layer.split(" | ")) for layer in reversed(contracts[0]["layers"])]
    section = MAP[0].read_text().partition("## The folders")[2]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)/?`", cell)]
    assert sorted(named) == sorted(set().union(*layers))
    heights = [next(height for height, layer in enumerate(layers) if name in layer) for name in named]
    assert heights == sorted(heights), dict(zip(named, heights, strict=True))


def test_each_promise_has_tests_and_the_page_names_them() -> None:
    page = promises.PAGE.read_text()
    assert page == promises.render_promises(page), "python -m docs.source promises"
    table = page.partition(promises.BEGIN)[2].partition(promises.END)[0]
    counts = [row.count("](") for row in table.strip().splitlines()[2:]]
    assert len(counts) == len(promises.PROMISES)
    assert min(counts) >= 2, "a promise that no test holds"


def reference_names() -> list[str]:
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)


def test_the_reference_names_all_that_is_public() -> None:
    named = reference_names()
    assert len(set(named)) == len(named)
    wanted = {f"raylance.{name}" for name in raylance.__all__}
    for module in ("torch_data", "torchft", "audit", "testing"):
        wanted |= {f"raylance.{module}.{name}" for name in importlib.import_module(f"raylance.{module}").__all__}
    assert wanted <= set(named)


def test_docstrings_describe_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    """Public names and their members have docstrings, whose arguments are those of the signatures; griffe reads them as
    the site does, and warns of others. Errors that are raised in a function's own lines stand under Raises.
    """
    griffe = pytest.importorskip("griffe", reason="griffe reads the docstrings: pip install griffe")
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser=griffe.Parser.google)
    loader.load("raylance")
    loader.resolve_aliases(external=False)
    lacking = []
    for name in reference_names():
        found = loader.modules_collection[name]
        found = found.final_target if found.is_alias else found
        members = [each for key, each in found.members.items() if not key.startswith("_") and not each.is_alias]
        for each in [found, *(each for each in members if each.is_function)]:
            if each.docstring is None:
                lacking.append(each.path)
                continue
            sections = {section.kind.value: section for section in each.docstring.parse("google")}
            raised = set(re.findall(r"^ *raise (\w+Error)\(", each.source, re.MULTILINE)) & vars(errors).keys()
            listed = str([item.annotation for item in sections["raises"].value]) if "raises" in sections else ""
            lacking += [f"{each.path} raises {error}" for error in raised if each.is_function and error not in listed]
    assert not lacking
    assert not [record.getMessage() for record in caplog.records if "griffe" in record.name]


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


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 920
