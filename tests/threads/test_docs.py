"""The pages name what there is: links, files, tests, the public names, docstrings."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import raylance
from docs.source import promises
from raylance import errors

ROOT = Path(__file__).parents[2]

PAGES = sorted((ROOT / "docs").glob("*.md"))

LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


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


HELPERS = ("decode", "memory", "runtime", "samples", "source", "work")  # what helpers run, and what is between
# What they keep beside the limits that users set, by module: the beginning of its row in the guide, and what this says.
KEPT = {
    "work/read_work.py": [
        ("a reader: memory", "{LENT[0]} of `reader_bytes` and {LENT[1]} for items"),
        ("a reader: memory", "threads {LENT_AS_VIEWS[0]} and {LENT_AS_VIEWS[1]}, and {LENT_AS_VIEWS[0]} for"),
    ],
    "source/reader.py": [("a reader: pieces of rows", "of {PIECE_BYTES.mib} MiB from a disk")],
    "source/data_files.py": [("a reader: data files", "{MOST_IDLE} open files")],
    "source/video_files.py": [("a reader of videos", "{KEPT_BYTES.mib} MiB")],
    "decode/video_frames.py": [("a thread that decodes videos", "{MOST_OPEN} of up to 1 megapixel")],
    "decode/pixels.py": [("a thread that decodes JPEGs", "{KEPT_BYTES.mib} MiB")],
    "memory/malloc.py": [("a shard actor: memory", "{KEPT_BYTES.mib} MiB in each of {ARENAS} arenas")],
    "runtime/ray/decode_actor.py": [("a decode actor", "an item, and a block")],
    "runtime/ray/runtime.py": [("the trainer, through Ray", "{LENT} · `inflight_bytes`")],
    "source/limits.py": [],  # idle threads
}


def keeps(tree: ast.AST) -> Iterator[str]:
    """What makes values stay for later: caches, and memory that is lent again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in {"Lender", "FadingLender", "lru_cache", "OrderedDict"}:
                yield name
            yield from (keyword.arg for keyword in node.keywords if keyword.arg == "maxlen")
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").lstrip("_") == "KEPT_BYTES":
            yield "KEPT_BYTES"


class Size(int):
    @property
    def mib(self) -> int:
        return self >> 20


def test_the_guide_says_what_is_kept_beside_the_limits() -> None:
    paths = [path for package in HELPERS for path in (ROOT / "raylance" / package).rglob("*.py")]
    found = {
        path.relative_to(ROOT / "raylance").as_posix() for path in paths if any(keeps(ast.parse(path.read_text())))
    }
    assert found <= KEPT.keys(), "a cache of its own: let it be counted in the one account, or name it there"
    _, _, sizes = (ROOT / "docs" / "guide.md").read_text().partition("\n## Sizes\n")
    rows = [line for line in sizes.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    for path, told in KEPT.items():
        module = importlib.import_module("raylance." + path.removesuffix(".py").replace("/", "."))
        values = {name: Size(value) if type(value) is int else value for name, value in vars(module).items()}
        for begin, size in told:
            row = next(row for row in rows if row.startswith(f"| {begin}"))
            assert size.format(**values) in row, (path, size.format(**values))


def reference_names() -> list[str]:
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)


def test_the_reference_names_all_that_is_public() -> None:
    named = reference_names()
    assert len(set(named)) == len(named)
    wanted = {f"raylance.{name}" for name in raylance.__all__}
    for module in {name for name in dir(raylance) if name[0] != "_"} - set(raylance.__all__):
        public = getattr(importlib.import_module(f"raylance.{module}"), "__all__", [])
        wanted |= {f"raylance.{module}.{name}" for name in public}
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


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 920
