"""What MkDocs reads of this repository: the README as front page, and a page for each file that a page names."""

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FRONT = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}  # pages that lie outside of docs/
FRONT_SOURCES = {page: name for name, page in FRONT.items()}
SHOWN = "files"  # the folder of the site that holds pages of files
# Lines have up to 130 columns: what is no drawing is wrapped where the window is narrower.
WIDE = """.md-grid { max-width: 82rem; }
.md-typeset pre > code { font-size: 0.9em; }
.md-typeset .highlight:not(.language-text) pre > code { white-space: pre-wrap; }
"""
SHOWN_ALONE = re.compile(r"^```py$", re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)|(!\[[^\]]*\])\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/, and those of the files that any page names."""
    pages = {page: (ROOT / name).read_text() for name, page in FRONT.items()}
    texts = [(FRONT_SOURCES[page], text) for page, text in pages.items()]
    texts += [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    named: set[str] = set()
    for source, text in texts:
        named |= {target for target in _targets(source, text) if _is_shown(target)}
    for folder in [target for target in named if (ROOT / target).is_dir()]:
        named |= set(_listed(folder))
    for page, text in pages.items():
        files.append(File.generated(config, page, content=_moved(FRONT_SOURCES[page], page, text)))
    files.append(File.generated(config, "wide.css", content=WIDE))
    for target in sorted(named):
        files.append(File.generated(config, _page_of(target), content=_render(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of docs/ lead to pages of the site; code that the tests do not run has a title that explains it."""
    uri = page.file.src_uri
    if uri.startswith(f"{SHOWN}/"):
        return markdown
    if uri != "reference.md":  # its blocks are signatures
        markdown = SHOWN_ALONE.sub('```py title="another library\'s, or of a run in progress"', markdown)
    return markdown if uri in FRONT_SOURCES else _moved(f"docs/{uri}", uri, markdown)


def _targets(source: str, text: str) -> list[str]:
    """Files and folders of the repository that a text links to, from its top."""
    return [_resolve(source, match[2]) for match in LINK.finditer(text) if match[2]]


def _resolve(source: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _is_shown(target: str) -> bool:
    """Whether it is there, and has no page of its own."""
    return (ROOT / target).exists() and not target.startswith("docs/") and target not in FRONT


def _page_of(target: str) -> str:
    """The page of the site for a file of the repository."""
    if target in FRONT:
        return FRONT[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{SHOWN}/{target}.md"


def _moved(source: str, page: str, text: str) -> str:
    """A text whose links are those of its page."""

    def move(match: re.Match[str]) -> str:
        label, link, anchor = (match[4], match[5], "") if match[4] else (f"[{match[1]}]", match[2], match[3] or "")
        target = _resolve(source, link)
        if not (ROOT / target).exists():
            return match[0]  # MkDocs reports it
        return f"{label}({posixpath.relpath(_page_of(target), posixpath.dirname(page) or '.')}{anchor})"

    return LINK.sub(move, text)


def _listed(folder: str) -> list[str]:
    """The files of a folder that git knows."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def _render(target: str) -> str:
    """A page that shows a file, or lists a folder."""
    path = ROOT / target
    if path.is_dir():
        page = posixpath.dirname(_page_of(target))
        links = [f"- [{name}]({posixpath.relpath(_page_of(name), page)})" for name in _listed(target)]
        return f"# {target}\n\n" + "\n".join(links) + "\n"
    if path.suffix == ".ipynb":
        return f"# {target}\n\nA notebook of the repository: open it in Jupyter.\n"
    return f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"
