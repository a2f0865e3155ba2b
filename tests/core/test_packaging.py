"""`pyproject.toml` and constraints.txt fit each other."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALL = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
REQUIREMENTS = [requirement for requirement in map(Requirement, ALL) if requirement.name != PROJECT["name"]]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_pins_are_of_packages_that_are_asked_for_by_name(pin):
    # What others bring along is theirs to choose: a pin of theirs would keep users from installing what disagrees.
    asked = [each for each in REQUIREMENTS if canonicalize_name(each.name) == canonicalize_name(pin.name)]
    assert asked
    [version] = pin.specifier
    assert version.operator == "=="
    assert all(each.specifier.contains(version.version) for each in asked)


def test_the_package_asks_for_no_exact_version():
    exact = [str(each) for each in REQUIREMENTS if any(one.operator in ("==", "===") for one in each.specifier)]
    assert not exact


def test_torchtitan_has_its_loader_where_the_example_takes_it_from():
    """Only 0.3.0 was tried; its repository has moved the loader since."""
    [torchtitan] = [each for each in REQUIREMENTS if each.name == "torchtitan"]
    assert torchtitan.specifier.contains("0.3.0")
    assert not any(torchtitan.specifier.contains(later) for later in ("0.3.1", "0.4.0", "1.0"))


def test_every_package_that_runs_has_a_lower_bound_that_a_run_can_show():
    for requirement in map(Requirement, PROJECT["dependencies"]):
        bounds = [one.version for one in requirement.specifier if one.operator == ">="]
        assert len(bounds) == 1, requirement
        assert re.fullmatch(r"[\d.]+", bounds[0]), requirement


@pytest.mark.parametrize("script", ["wheel", "lowest", "examples", "run"])
def test_scripts_run_tests_that_are_there(script: str) -> None:
    """They run once a release, and a file that was moved would be missed only then."""
    words = re.findall(r"tests/\S*test_\S*\.py", (ROOT / "tests" / script).read_text())
    expanded = subprocess.run(["bash", "-c", f"echo {' '.join(words)}"], capture_output=True, text=True, check=True)
    files = expanded.stdout.split()
    assert files
    assert not [file for file in files if not (ROOT / file).exists()]


def test_the_workflow_runs_each_supported_python_and_each_part() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    supported = re.findall(r"Python :: (3\.\d+)", str(PROJECT["classifiers"]))
    assert jobs["tiers"]["strategy"]["matrix"]["python"] == supported
    parts = re.findall(r"^    (\d)\)", (ROOT / "tests" / "run").read_text(), re.MULTILINE)
    assert [str(part) for part in jobs["nightly"]["strategy"]["matrix"]["part"]] == parts
