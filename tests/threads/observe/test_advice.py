"""What any text of ours advises is there: each flag is parsed by the job that it stands with, each option is one of
what takes options, and each order has the name that advice knows it by.

Texts are all string literals of raylance/ and of the programs, all pages, manifests, notebooks, dashboards and scripts:
nothing has to be entered here to be looked at.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import raylance
import raylance.audit
import raylance.testing
import raylance.torch_data
from raylance.api.loader import RankLoader
from raylance.observe.diagnoses import DIAGNOSES, Diagnosis
from raylance.observe.diagnoses.reading import BY_ROW
from raylance.observe.figures import Limit, RunFigures
from raylance.observe.verdict import judge
from raylance.orders.order import Order
from raylance.planning.summary import PlanSummary
from tests.helpers.figures import part

ROOT = Path(__file__).parents[3]
PROGRAMS = ("jobs", "docs/source")  # folders of what can be run

# ---- texts


def literals(path: Path) -> Iterator[str]:
    """The strings of a Python file, with … for what is filled in."""
    tree = ast.parse(path.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def strings_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_of(inner)
    elif isinstance(value, str):
        yield value


@functools.cache
def texts() -> list[tuple[str, str]]:
    """(file, text) of all that users read."""
    found: list[tuple[str, str]] = []
    for folder in ("raylance", *PROGRAMS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += [(str(path.relative_to(ROOT)), text) for text in literals(path)]
        for kind in ("*.jinja", "*.sh"):
            found += [(str(path.relative_to(ROOT)), path.read_text()) for path in sorted((ROOT / folder).rglob(kind))]
    manifests = sorted({*(ROOT / "k8s").rglob("*.y*ml")} - {ROOT / "k8s" / "redis.yaml"})  # which has flags of Redis
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *manifests]:
        found.append((str(path.relative_to(ROOT)), path.read_text()))
    for path in (*(ROOT / "k8s").rglob("*.json"), *(ROOT / "jobs").rglob("*.ipynb")):
        content = json.loads(path.read_text())
        cells = ["".join(cell["source"]) for cell in content["cells"]] if "cells" in content else strings_of(content)
        found += [(str(path.relative_to(ROOT)), text) for text in cells]
    return found


# ---- flags


@functools.cache
def flags_of(module: str) -> frozenset[str]:
    """What the parser of a job takes, as the job makes it."""
    found, add = set[str](), argparse._ActionsContainer.add_argument

    def adds(container: Any, *names: str, **options: Any) -> argparse.Action:
        action = add(container, *names, **options)
        found.update(action.option_strings)
        return action

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(argparse._ActionsContainer, "add_argument", adds)
        try:
            main = importlib.import_module(module).main
        except ImportError:  # of a framework that is not installed here: examples share a parser
            importlib.import_module("jobs.examples.common").parser(module, None)
        else:
            with pytest.raises(SystemExit):
                main(["--help"])
    return frozenset(found)


@functools.cache
def jobs() -> dict[str, str]:
    """What texts call a job, and its module; all that make a parser are found."""
    found = {"raylance.top": "raylance.top", "tests.faults": "tests.faults.__main__"}
    for path in sorted(path for folder in PROGRAMS for path in (ROOT / folder).rglob("*.py")):
        name, module = path.relative_to(ROOT), ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if name.parent.name == "examples" and "def main(" in path.read_text():
            found |= {path.name: module, module: module}
        elif "argparse.ArgumentParser(" in path.read_text() and "def main(" in path.read_text():
            script = f"{name.parts[1]}.py" if path.name == "command.py" else path.name
            folder = ".".join(name.parts[:-1]) if path.name == "command.py" else module
            is_script = (ROOT / "jobs" / script).exists()
            titles = [script, f"jobs.{name.parts[1].removesuffix('.py')}"] if is_script else [folder]
            found |= dict.fromkeys(titles, module)
    return found


# What takes flags of its own, as texts name it.
OTHERS = (
    "ray", "kubectl", "kind", "helm", "pip", "python -m venv", "python -m pip", "git", "docker", "promtool",
    "prometheus", "grafana", "pytest", "torchrun", "chromium", "aws", "gcloud", "uv", "tensorboard", "mlflow",
    "accelerate launch", "python -m tests.simulation", "tests.simulation", "ruff", "mypy", "tests/run", "nvidia-smi",
    "jupyter", "apt-get", "curl", "mkdocs", "systemd-run", "rayStartParams", "minikube", "numactl", "sed", "tail",
    "grep", "find", "kuberay-operator", "hf download",
)  # fmt: skip


@functools.cache
def names() -> re.Pattern[str]:
    """Who takes flags: the last one named before a flag does."""
    every = sorted((*jobs(), *OTHERS), key=len, reverse=True)
    return re.compile(r"(?<![\w./-])(?:[\w./-]*/)?(" + "|".join(map(re.escape, every)) + r")(?![\w-]|\.\w)")


def advised_flags(text: str) -> Iterator[tuple[str, str]]:
    """(who, flag) of a text; who is "" where no sentence says it."""
    text = re.sub(r"\\\n\s*|\n(?![\n|\-*`#\s])\s*", " ", text)  # commands and paragraphs in one line
    for line in re.split(r"\n|(?<=[.;:])\s", text):
        for flag in re.finditer(r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z0-9])(?![\w*…-])", line):
            named = names().findall(line[: flag.start()])
            yield (named[-1] if named else ""), flag[1]


@functools.cache
def allowed(file: str) -> frozenset[str]:
    """The flags of a file where nobody is named with them: of a job's own texts, those of this job and of others that
    it speaks of; elsewhere, those of all.
    """
    folder = ROOT / file
    every = set(jobs().values())
    own = {module for module in every if folder.parent == (ROOT / module.replace(".", "/")).parent}
    if folder.parent == ROOT / "jobs":  # jobs of one file, and what all jobs share
        own &= {".".join(Path(file).with_suffix("").parts)}
    if len(own) == 1:
        own |= {jobs()[name] for of, text in texts() if of == file for name in names().findall(text) if name in jobs()}
        own |= {jobs()["train_images.py"], jobs()["create_dataset.py"]}  # what one makes, the other trains on
    return frozenset(flag for module in (own if 0 < len(own) < len(every) / 2 else every) for flag in flags_of(module))


def test_flags_that_are_advised_are_parsed_by_their_job() -> None:
    assert {"train_images.py", "materialize.py", "create_dataset.py", "verify.py", "benchmark.py"} <= jobs().keys()
    modules = {"docs.source", "raylance.top"}
    assert modules | {"elastic.py"} <= jobs().keys()
    of_others = {"--object-store-memory", "--working-dir", "--detail", "--quiet"}  # Ray's, MkDocs': none is named
    wrong, seen = [], 0
    for file, text in texts():
        for who, flag in () if text.startswith("-") and " " not in text else advised_flags(text):
            seen += who in jobs()
            if who not in OTHERS and flag not in (flags_of(jobs()[who]) if who else allowed(file) | of_others):
                wrong.append(f"{file}: {who or 'no job'} takes no {flag}: {text[:100]!r}")
    assert not wrong, "\n".join(wrong)
    assert seen > 150


# ---- options


def parameters() -> set[str]:
    """What may be given by name to anything of raylance that a user calls."""
    modules = (raylance, raylance.audit, raylance.testing, raylance.torch_data)
    public = [getattr(module, name) for module in modules for name in dir(module) if not name.startswith("_")]
    found = {field.name for field in dataclasses.fields(raylance.Options)}
    for thing in (*public, RankLoader, PlanSummary):
        public_names = [name for name in dir(thing) if not name.startswith("_")] if inspect.isclass(thing) else []
        for each in (thing, *(getattr(thing, name) for name in public_names)):
            if callable(each):
                try:
                    found |= set(inspect.signature(each).parameters)
                except (TypeError, ValueError):  # of what is built in
                    continue
    return found


def advised_options(text: str) -> list[str]:
    """Names that a text has somebody write before a "=": of words, not of HTML or PromQL."""
    if text.startswith("<") or '="$' in text:
        return []
    return re.findall(r"(?<![\w.{\"'<%/&?-])([a-z_]{3,})=(?=[\w…\"'(\[{{.;:,)]|\s|$)", text)


# ---- the table of diagnoses


@pytest.mark.parametrize("diagnosis", DIAGNOSES.values(), ids=lambda diagnosis: diagnosis.cause)
def test_a_diagnosis_advises_what_there_is(diagnosis: Diagnosis) -> None:
    """The dashboard and the alerts, and `explain()` where it has numbers: each flag is parsed by the job that the same
    text names, each option is taken by something that users call.
    """
    lines = [*diagnosis.changes, *advice_of(diagnosis)]
    assert diagnosis.means
    assert diagnosis.changes
    for line in lines:
        for who, flag in advised_flags(line.replace("`", "")):
            assert who in OTHERS or flag in flags_of(jobs()[who]), line
        for name in advised_options(line.replace("`", "")):
            assert name in parameters(), line


def advice_of(diagnosis: Diagnosis) -> list[str]:
    """What it says of runs of several kinds."""
    if diagnosis.evidence is None:
        return []
    base = {"user_s": 1.0, "wait_start_s": 1.0, "wait_read_s": 1.0, "wait_decode_s": 1.0, "wait_finish_s": 1.0}
    kinds: list[dict[str, Any]] = [
        {},
        {"cluster_cpus": None, "cpus": 64},
        {"draft": [False], "row_bytes": 1e5, "sources": ["s3://bucket/a.lance"]},
        {"videos": ["top"]},
        *({"order": order} for order in BY_ROW),
    ]
    changes = [{}, {"collate_s": 9.0, "collate_fn_s": 8.0}, {"decoders": 0.0}, {"decoders": 8.0}, {"readers": 8.0}]
    found = []
    for facts, figures in itertools.product(kinds, changes):
        run = RunFigures([part(facts=facts, **(base | figures))])
        found += [diagnosis.evidence(run), *diagnosis.advice(run)]
    return found


def test_each_limit_has_a_diagnosis() -> None:
    assert set(get_args(Limit)) - {"unknown"} == {one.cause for one in DIAGNOSES.values() if one.evidence}


# ---- orders


def orders(kind: type = Order) -> Iterator[type[Order]]:
    for found in kind.__subclasses__():
        if found.__module__.startswith("raylance."):
            yield found
        yield from orders(found)


def test_orders_that_read_row_by_row_are_known_by_their_names() -> None:
    """A record holds the name; the advice what its user wrote."""
    named = {found.name: found for found in orders() if "name" in vars(found)}
    by_row = {name for name, found in named.items() if found.repeats is True} - {"mix"} | {"row"}  # mixed as it may be
    assert set(BY_ROW) == by_row
    for name, written in BY_ROW.items():
        assert written in (f'order="{name}"', f"order={named[name].__name__}")
        assert name == "row" or hasattr(raylance, named[name].__name__)
        (first, *_) = judge([part(facts={"order": name}, user_s=1.0, wait_read_s=1.0)]).advice
        assert first.startswith(f'{written} reads rows one by one: order="window" reads them in runs'), name
