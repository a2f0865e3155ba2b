"""Owns the runs of what docs/ show: each page's snippets, one behind the other in one namespace."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def snippets(page: Path) -> str:
    """The page's Python, at the lines where it stands in the page."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        fence = re.match(r"```(\w*)", line)
        lines.append(line if inside and not fence else "")
        if fence:
            inside = not inside and fence[1] == "python"
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """As a script of its own, in an empty folder: what it defines is sent to helpers as a user's would be."""
    code = snippets(page)
    if not code.strip():
        pytest.skip("shows no Python")
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
