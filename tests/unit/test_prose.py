"""Owns the rules for the words of docstrings and comments that a machine can check; never judges code."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import raylance

PACKAGE = Path(raylance.__file__).parent

# What a first-time reader has to read twice, with what to write instead.
WORDS = {
    r"(?<![Tt]here )\b(is|are) no\b(?! longer\b)": "is not a, has no",
    r"\bso many\b": "the number",
    r"(?<!`)\b[Bb]esides\b(?!:)": "also, in addition",
    r"\b[Nn]one where\b": "None if",
    r"(^|[.:;] )Of \b": "a sentence with a subject",
    r"\b([Ww]hoever|[Ww]hatever|[Ll]ikewise|anew|reckon\w*|told|goes on)\b": "a plain word",
    r"\bas to [a-z]+\b": "a clause with if or when",
}
WHERE = re.compile(r"\b[Ww]here\b")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a file, each with its first line."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:", "# fmt:")):
            yield token.start[0], token.string.lstrip("# ")


FOUND = [(path, line, text) for path in sorted(PACKAGE.rglob("*.py")) for line, text in texts(path)]


@pytest.mark.parametrize(("pattern", "instead"), WORDS.items(), ids=WORDS.values())
def test_docstrings_and_comments_are_plain(pattern: str, instead: str) -> None:
    wrong = [f"{path}:{line}: {text[:100]!r}" for path, line, text in FOUND if re.search(pattern, text, re.MULTILINE)]
    assert not wrong, f"write: {instead}"


def test_where_names_a_place() -> None:
    """A condition is written with if."""
    places = [f"{path}:{line}: {text[:100]!r}" for path, line, text in FOUND if WHERE.search(text)]
    assert len(places) <= 5, places
