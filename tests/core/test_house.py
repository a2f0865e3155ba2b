"""The rules of the house: layers, the public surface, lazy imports, errors that travel, where tests lie."""

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raylance
from raylance import errors

PACKAGE = Path(raylance.__file__).parent

ROOT = PACKAGE.parent

TESTS = Path(__file__).parents[1]


def test_imports_run_downward() -> None:
    """The layers stand in pyproject.toml."""
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


ALONE = {
    "raylance": (  # neither Ray nor torch; what works without Ray, no Ray
        "raylance.RaylanceError; assert not {'ray', 'torch'} & set(sys.modules)\n"
        "raylance.testing, raylance.audit.EpochAudit, raylance.torch_data  # without an import of their own\n"
        "for name in 'raylance.audit', 'raylance.api.opening', 'raylance.runtime.runtime':\n"
        "    importlib.import_module(name)\n"
        "    assert 'ray' not in sys.modules, name"
    ),
    "raylance.runtime.ray.shard_actor": "assert not {'torch', 'lance_namespace'} & set(sys.modules)",
    "raylance.runtime.ray.decode_actor": "assert not {'torch', 'lance'} & set(sys.modules)",
    "raylance.orders, raylance.planning": (  # the pure core: NumPy alone
        "for package in (raylance.orders, raylance.planning):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "assert not {'ray', 'torch', 'pyarrow', 'lance', 'PIL'} & set(sys.modules)"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """They take a second each, beside the other tests of this file."""
    scripts = [f"import sys, importlib, pkgutil, {names}\n{script}" for names, script in ALONE.items()]
    made = [subprocess.Popen([sys.executable, "-c", script]) for script in scripts]
    yield made
    for process in made:
        process.wait(timeout=100)


def test_errors_survive_pickling() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == 8
    rows = [("image", 5, "cut", "x.lance"), (None, 5, "EOFError", "x.lance")]
    made = [kind("what, why, fix") for kind in kinds if kind is not errors.BadRowError]
    made += [errors.BadRowError(*given, **more) for given in rows for more in ({}, {"message": "too many"})]
    for error in made:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


PUBLIC = {
    "raylance", "raylance.__version__", "raylance.audit", "raylance.errors", "raylance.images", "raylance.namespaces",
    "raylance.orders.permutation", "raylance.runs", "raylance.testing", "raylance.text", "raylance.torch_data",
    "raylance.torchft", "raylance.tracking", "raylance.writing",
    "raylance.observe.metrics",  # names that dashboards and alerts are made of, which a user's own may be as well
}  # fmt: skip


def names_used(tree: ast.AST) -> Iterator[str]:
    """Dotted names of modules that a file imports, and of what it takes from raylance."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in (None, "raylance"):
            yield from (f"raylance.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raylance":
            yield f"raylance.{node.attr}"


START = "sys.path[0] = str(Path(__file__).resolve().parents[1])\n"  # so that a script's modules have the names of `-m`


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").rglob("*.py")), ids=lambda path: path.stem)
def test_jobs_use_public_names_and_no_trick(path: Path) -> None:
    text = path.read_text()
    used = {name for name in names_used(ast.parse(text)) if name.split(".")[0] == "raylance"}
    assert used <= PUBLIC | {f"raylance.{name}" for name in raylance.__all__}
    text = text.replace(START, "")
    for trick in ("register_pickle_by_value", "sys.path", "sys.modules", "spec_from_file_location", "import_module"):
        assert trick not in text, "a job can be imported, and what it sends is pickled as anybody's code is"


THREADS = {  # who may own threads, and what for; nobody else has any, so that a dispatcher's decision is all there is
    "runtime/feeder.py": "makes batches of what arrives, while the trainer trains",
    "runtime/notes.py": "takes what the garbage collector must not wait for",
    "runtime/threads.py": "is the runtime of threads: readers and decoders",
    "work/read_work.py": "decodes in a reader that has no decoders beside it",
    "source/reads.py": "reads pieces of one call of a reader side by side",
    "source/limits.py": "is the pool, and gives a call of Lance a deadline",
    "source/costs.py": "computes costs of all rows before a run, for which no reader exists",
    "planning/steps.py": "sorts costs of all rows before a run",
    "observe/recording.py": "writes samples and spans, which must not hold up a batch",
    "testing/decoders.py": "checks that a decoder may run in several threads",
    "reports/watching.py": "is the page of a running run, in a process of its own",
    "reports/reading.py": "reads the files of ranks side by side, in a process of its own",
}
CODECS = {"PIL", "av", "simplejpeg", "nvidia", "torch", "torchcodec"}
DECODES = {"source/lerobot.py"}  # torch's random numbers, as LeRobot draws them


def test_only_who_is_named_has_threads() -> None:
    owners = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if not re.search("Thread|Calls", text):
            continue  # parsing all of them takes a second
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in {"Thread", "ThreadPoolExecutor", "Calls"}:
                    owners.add(path.relative_to(PACKAGE).as_posix())
    assert owners == set(THREADS)


def test_only_decode_knows_codecs() -> None:
    found = set()
    for path in (PACKAGE / "source").rglob("*.py"):
        if CODECS & {name.split(".")[0] for name in names_used(ast.parse(path.read_text()))}:
            found.add(path.relative_to(PACKAGE).as_posix())
    assert found == DECODES


KINDS_OF_SAMPLES = "PackTable|PackedRows|PackedSamples|WindowTable"
ASK_FOR_KINDS = {"audit/selected.py"}  # it computes the rows of each kind in a way of its own


def test_nobody_asks_of_which_kind_samples_are() -> None:
    asks = re.compile(rf"isinstance\([^)]*\b({KINDS_OF_SAMPLES})\b")
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if asks.search(path.read_text())}
    assert found == ASK_FOR_KINDS


def test_top_level_holds_nothing_else() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    tops = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {top for top in tops if not top.startswith(".")} <= {
        "pyproject.toml", "raylance", "jobs", "tests", "k8s", "docs", "README.md", "CHANGELOG.md",
        "LICENSE", "constraints.txt",
    }  # fmt: skip


def test_no_test_module_imports_another() -> None:
    """What several tests need lies in tests/helpers or tests/simulation."""
    wrong = []
    for path in TESTS.rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), f"{path.parent}: a folder of tests is a package"
        text = path.read_text()
        if not re.search(r"^\s*(from \.|(from|import) tests\b.*\b(test_|conftest\b))", text, re.MULTILINE):
            continue  # parsing all of them takes a second
        for node in ast.walk(ast.parse(text)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import"
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            wrong += [f"{path}: {name}" for name in modules if re.match(r"tests\.(.*\.)?(test_|conftest\b)", name)]
    assert not wrong


def test_tiers_mirror_the_package() -> None:
    packages = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/__init__.py")}
    tested = {path.parent.name for tier in ("core", "threads") for path in (TESTS / tier).glob("*/test_*.py")}
    assert tested - {"integration"} == packages
    assert not list(TESTS.glob("test_*.py")), "each test lies in a folder"


def test_imports_load_no_more_than_they_need(started: list[subprocess.Popen[bytes]]) -> None:
    assert [process.wait(timeout=100) for process in started] == [0] * len(ALONE)
