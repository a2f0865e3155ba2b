"""Owns the rules of the house: layers, the public surface, lazy imports, errors that travel."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import raylance
from raylance import errors

PACKAGE = Path(raylance.__file__).parent
ROOT = PACKAGE.parent

# A file imports only from lower layers.
LAYERS = [
    {"errors", "permutation", "columns"},
    {"arguments", "order", "state", "metrics", "split", "worker"},
    {"lanes", "mixing", "sampling", "plan", "selection", "reader", "images", "collate"},
    {"catalog", "decoding", "quality"},
    {"sharing"},
    {"spec", "faults"},
    {"readahead"},
    {"actors", "mixfeed", "packing", "summary", "resume"},
    {"placement", "batches"},
    {"pool"},
    {"stream"},
    {"passing"},
    {"loader"},
    {"seats"},
    {"handle"},
    {"opening", "mixture"},
    {"torch_data", "train"},
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
# What a file may import from outside, besides NumPy, pyarrow and the standard library.
ALLOWED: dict[str, set[str]] = {
    "selection": {"lance"},
    "reader": {"lance", "tenacity"},
    "images": {"PIL", "torch"},
    "collate": {"torch"},
    "faults": {"ray"},
    "sharing": {"ray"},
    "actors": {"ray", "torch"},
    "placement": {"ray"},
    "pool": {"ray"},
    "stream": {"ray"},
    "loader": {"torch"},
    "batches": {"torch"},
    "handle": {"pandas"},
    "opening": {"lance"},
    "worker": {"torch"},
    "train": {"ray", "torch"},
    "torch_data": {"torch"},
}
PURE = {"catalog", "lanes", "mixing", "order", "permutation", "plan", "quality", "summary"}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {f"raylance.{alias.name}" for alias in node.names} if module == "raylance" else {module}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_run_downward(path: Path) -> None:
    if path.stem == "__init__":
        return
    assert path.stem in LAYER_OF, "a new file needs a layer"
    modules = imported(path)
    ours = {name.split(".")[1] for name in modules if name.startswith("raylance.")}
    upward = {name for name in ours if LAYER_OF[name] >= LAYER_OF[path.stem]}
    assert not upward, f"{path.name} imports {upward} from its own layer or above"
    tops = {name.split(".")[0] for name in modules} - {"raylance", "numpy", "pyarrow"} - sys.stdlib_module_names
    assert tops <= ALLOWED.get(path.stem, set())
    if path.stem in PURE:
        assert "pyarrow" not in modules


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_files_say_what_they_own_and_stay_short(path: Path) -> None:
    text = path.read_text()
    assert (ast.get_docstring(ast.parse(text)) or "").startswith("Owns ")
    assert text.count("\n") <= 350, "past 350 lines the design is asking for something"


def test_no_file_reaches_into_private_parts_of_others() -> None:
    for path in PACKAGE.glob("*.py"):
        for module in imported(path):
            assert not any(part.startswith("_") and part != "__future__" for part in module.split(".")), (path, module)


def test_import_loads_neither_ray_nor_torch() -> None:
    script = "import sys, raylance; raylance.RaylanceError; assert not {'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_torch_data_loads_no_ray() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, raylance.torch_data; assert 'ray' not in sys.modules"], check=True
    )


def test_the_pure_core_loads_numpy_alone() -> None:
    script = (
        "import sys, importlib, pkgutil, raylance.orders, raylance.planning\n"
        "for package in (raylance.orders, raylance.planning):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "assert not {'ray', 'torch', 'pyarrow', 'lance', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_public_surface() -> None:
    names = """
        BadRowError Batches CenterCrop ClassBalanced ConfigError CoverageError DataConfig Dataset DatasetError
        FractionSplit HelperError Image Options Order PackTokens PlacementError RandomResizedCrop RangeSplit RankLoader
        RaylanceError RowShuffle Sequential ShardShuffle StateError ValueSplit Weighted WindowShuffle dataset mix report
        restore row_rng
    """
    assert sorted(raylance.__all__) == names.split()
    for name in raylance.__all__:
        assert getattr(raylance, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = raylance.nothing


def test_errors_survive_pickling() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == 8
    for kind in kinds:
        error = kind("image", 3, "why") if kind is errors.BadRowError else kind("what, why, fix")
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is kind
        assert str(copy) == str(error)


def test_top_level_holds_nothing_else() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    tops = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {top for top in tops if not top.startswith(".")} <= {
        "pyproject.toml", "raylance", "jobs", "tests", "docs", "k8s", "README.md", "CHANGELOG.md", "LICENSE",
        "constraints.txt",
    }  # fmt: skip
