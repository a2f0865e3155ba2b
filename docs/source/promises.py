"""The table of the tests that hold each promise, made from their marks."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- tests of each promise: python -m docs.source promises -->\n", "<!-- end -->"
PROMISES = tuple(f"P{number}" for number in range(1, 11))


def marked(path: Path) -> Iterator[tuple[str, str]]:
    """Promise and test of each `@pytest.mark.promise(…)` of a file."""
    for node in ast.parse(path.read_text()).body:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                for argument in mark.args:
                    yield ast.literal_eval(argument), node.name


def render_promises(page: str) -> str:
    """The page with the table as the marks are now."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for promise, test in marked(path):
            found[promise].append(f"[{test}](../{path.relative_to(ROOT)})")
    rows = ["| | tests |", "|---|---|", *[f"| {promise} | {', '.join(found[promise])} |" for promise in PROMISES]]
    before, _, after = page.partition(BEGIN)
    return "\n".join([before + BEGIN.rstrip(), "", *rows, "", END]) + after.partition(END)[2]
