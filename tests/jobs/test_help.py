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
ALWAYS = {"jobs", "raylance"} | sys.stdlib_module_names
# As `python -m` runs a program, in an environment without the package.
WITHOUT = (
    "import runpy, sys; sys.modules[sys.argv.pop(1)] = None; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)


@pytest.mark.parametrize(
    ("program", "package", "install"),
    [("jobs.benchmark", "psutil", "raylance[bench]"), ("jobs.examples.jax_loop", "jax", "jax")],
)
def test_a_missing_package_is_named_with_what_brings_it(program: str, package: str, install: str) -> None:
    """It was a traceback, for --help, too."""
    command = [sys.executable, "-c", WITHOUT, package, program, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert re.search(rf"a package is missing \(.*{package}.*: pip install '{re.escape(install)}'", done.stderr)
    assert "Traceback" not in done.stderr


def modules_of(requirements: list[str]) -> set[str]:
    names = {Requirement(each).name for each in requirements}
    return {MODULES.get(name, name) for name in names}


def imported(nodes: list[ast.stmt]) -> Iterator[str]:
    """The top-level modules that are imported by these statements themselves."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "jobs").rglob("*.py")) if path.parent.name != "benchmark"],
    ids=lambda path: path.stem,
)
def test_what_is_imported_at_once_comes_with_raylance_or_with_what_is_named(path: Path) -> None:
    brought = modules_of(PROJECT["dependencies"]) | ALWAYS
    tree = ast.parse(path.read_text())
    assert set(imported(tree.body)) <= brought, "import it in a function, or within `bringing(…)` of jobs.common"
    assert "torch.utils.tensorboard" not in {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    for node in tree.body:
        if isinstance(node, ast.With):
            install = node.items[0].context_expr.args[0].value
            extras = re.findall(r"\w+", install.removeprefix("raylance"))
            more = [each for extra in extras for each in PROJECT["optional-dependencies"].get(extra, [extra])]
            assert set(imported(node.body)) <= brought | modules_of(more), install
