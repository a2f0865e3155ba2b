"""Checks that jobs and examples say what to install if a package is missing."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"pylance": "lance", "pillow": "PIL"}  # that have another name than their package
REQUIRED = {Requirement(each).name for each in PROJECT["dependencies"]}

NEEDS = [
    ("jobs.benchmark", "psutil", "raylance[bench]"),
    ("jobs.examples.accelerate_loop", "accelerate", "raylance[examples]"),
    ("jobs.examples.jax_loop", "jax", "jax"),
    ("jobs.examples.lightning_loop", "lightning", "raylance[examples]"),
    ("jobs.examples.torchdata_nodes", "torchdata", "raylance[examples]"),
    ("jobs.examples.torchtitan_loader", "torchtitan", "raylance[examples]"),
    ("jobs.examples.transformers_trainer", "transformers", "raylance[examples]"),
]
# As `python -m` runs a program, in an environment without the package.
WITHOUT = (
    "import runpy, sys; sys.modules[sys.argv.pop(1)] = None; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)


# One of each kind always: their processes take seconds each.
@pytest.mark.parametrize(
    ("program", "package", "install"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (number > 1)) for number, each in enumerate(NEEDS)],
    ids=lambda word: word,
)
def test_a_missing_package_is_named_with_what_brings_it(program: str, package: str, install: str) -> None:
    """It was a traceback, for --help, too."""
    command = [sys.executable, "-c", WITHOUT, package, program, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert re.search(rf"a package is missing \(.*{package}.*: pip install '{re.escape(install)}'", done.stderr)
    assert "Traceback" not in done.stderr
    extra = install.removeprefix("raylance[").removesuffix("]")
    listed = {Requirement(each).name for each in PROJECT["optional-dependencies"].get(extra, [])}
    assert package in listed or extra == package


def imported_at_once(tree: ast.Module) -> Iterator[str]:
    """The top-level modules that a file imports when it is loaded, but for those within a `with` or `try`."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "jobs").rglob("*.py")) if path.parent.name != "benchmark"],  # see NEEDS
    ids=lambda path: path.stem,
)
def test_what_is_imported_at_once_comes_with_raylance(path: Path) -> None:
    brought = {MODULES.get(name, name) for name in REQUIRED} | {"jobs", "raylance"} | sys.stdlib_module_names
    tree = ast.parse(path.read_text())
    assert set(imported_at_once(tree)) <= brought, "import it in a function, or within `bringing(…)` of jobs.common"
    assert "torch.utils.tensorboard" not in {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
