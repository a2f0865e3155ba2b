"""Owns docs/reference.md, made from the docstrings of public names; never imports what it describes.

griffe reads the sources and takes Google docstrings apart; here it is only written down, as Markdown that reads well
without a site around it. Types stand in the signatures alone, as in the sources.
"""

import functools
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference.md"
HEAD = """\
# Reference

Every public name, from its docstring. Made by `python -m docs.source reference`; a test checks that it is current. What
to use when: [guide.md](guide.md). The words: [concepts.md](concepts.md).
"""
# By the folder or file of raylance/ that owns a name; one that is not here goes by its own name.
GROUPS = {
    "api": "Datasets",
    "api.loader": "Loaders",
    "batches": "Loaders",
    "settings": "Loaders",
    "integrations": "Ray Train",
    "orders": "Orders",
    "decode": "Decoding",
    "source": "Selecting and packing",
    "source.write_back": "Writing a column",
    "reports": "Seeing a run",
    "errors": "Errors",
}
# Of their own pages' worth: the names of a package's __all__, and single ones that __all__ has not.
PACKAGES = ("torch_data", "torchft", "audit", "testing")
MORE = {
    "What `plan()` returns": [
        "planning.summary.PlanSummary",
        "planning.quality.ShuffleQuality",
        "planning.quality.Measure",
    ],
    "What `loader.explain()` says": ["observe.verdict.Verdict"],
    "What `loader.stats()` holds": ["observe.Stats"],
    "For orders of your own": [f"orders.permutation.{name}" for name in ("permute", "subkeys", "uniform")],
}
# Made by other names, never by a call of their own.
MADE = ("Batches", "Dataset", "RankLoader")
# Of `Stats` and `torch_data`: called by raylance's other parts, never by those who read this.
INNER = {"add", "awaits", "begin", "count_move", "end", "is_timed", "moves", "observe", "record_event", "timed"}
WIDTH = 100  # of signatures, before each parameter gets a line


def render_reference() -> str:
    """The whole page."""
    package = _load()
    defaults = {each.name: str(each.default) for each in _target(package["Options"]).parameters}
    entries = [_target(package[name]) for names in (_public(package), *MORE.values()) for name in names]
    entries += [_target(package[name][member]) for name in PACKAGES for member in _public(package[name])]
    links = {entry.name: _anchor(entry) for entry in entries}
    parts = [HEAD]
    for title, names in _groups(package).items():
        parts += [f"## {title}\n", *(_object(_target(package[name]), name, links) for name in names)]
    for name in PACKAGES:
        module = package[name]
        parts += [f"## raylance.{name}\n", _docstring(module, links)]
        parts += [_object(_target(module[member]), member, links) for member in _public(module)]
    for title, names in MORE.items():
        parts += [f"## {title}\n", *(_object(_target(package[name]), name.split(".")[-1], links) for name in names)]
    parts += ["## Types in the signatures\n", *_types(package, "\n".join(parts))]
    page = re.sub(r"_DEFAULTS\.(\w+)", lambda match: defaults[match[1]], "\n".join(parts))  # `_DEFAULTS = Options()`
    return page.rstrip() + "\n"


def _load() -> Any:
    loader = griffe.GriffeLoader(
        search_paths=[ROOT],
        docstring_parser=griffe.Parser.google,
        docstring_options={"returns_named_value": False, "returns_multiple_items": False, "warnings": False},
    )
    package = loader.load("raylance")
    loader.resolve_aliases(external=False)
    return package


def _types(package: Any, page: str) -> Iterator[str]:
    """The aliases that the page names, with what they stand for."""
    named = set(re.findall(r"\b[A-Z]\w*[a-z]\w*\b", page))
    found = {}
    for module in _modules(package):
        for name, member in module.members.items():
            if name in named and not member.is_alias and member.is_attribute:
                found[name] = str(member.value)
    yield _items("Each stands for", ((f"`{name}`", f"`{found[name]}`") for name in sorted(found)))


def _modules(package: Any) -> Iterator[Any]:
    yield package
    for module in package.modules.values():
        yield from _modules(module)


def _public(module: Any) -> list[str]:
    """The names of `__all__`, functions first: they are where one begins."""
    return sorted((str(name) for name in module.exports), key=lambda name: (_target(module[name]).is_class, name))


def _groups(package: Any) -> dict[str, list[str]]:
    """Names by title, in the order of `GROUPS`."""
    groups: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    for name in _public(package):
        _, owner, file, *_ = _target(package[name]).canonical_path.split(".")
        title = GROUPS.get(f"{owner}.{file}") or GROUPS.get(owner, owner.capitalize())
        groups.setdefault(title, []).append(name)
    return {title: names for title, names in groups.items() if names}


def _target(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def _heading(found: Any, name: str) -> str:
    if found.is_class:
        return f"class {name}"
    return f"{name}()" if found.is_function else name


def _anchor(found: Any) -> str:
    """As GitHub and MkDocs both make it of a heading."""
    return re.sub(r"[^\w\- ]", "", _heading(found, found.name).lower()).replace(" ", "-")


def _object(found: Any, name: str, links: dict[str, str]) -> str:
    parts = [f"### {_heading(found, name)}\n"]
    if found.is_class:
        if name not in MADE and len(found.parameters) > 1:
            parts.append(_code(_call(name, found.parameters, None)))
        bases = [base for base in found.mro() if base.name in links]
        if bases:
            parts.append(f"A subclass of [`{bases[0].name}`](#{links[bases[0].name]}).\n")
        parts.append(_docstring(found, links, None if name in MADE else _described(found)))
        inherited = {name for base in bases for name in base.all_members}
        members = [member for member in _members(found) if member.name not in inherited]
        parts += [_member(member, name, links) for member in members if not _is_short(member)]
        short = [
            (f"`{_shown(member, sys.maxsize)}`", member.docstring.value) for member in members if _is_short(member)
        ]
        if short:
            parts.append(_linked(_items("Besides", short), links))
    else:
        parts += [_code(_signature(found, name)), _docstring(found, links)]
    return "\n".join(parts)


def _member(member: Any, owner: str, links: dict[str, str]) -> str:
    heading = f"{owner}.{member.name}" + ("" if member.is_attribute else "()")
    return "\n".join([f"#### {heading}\n", _code(_shown(member)), _docstring(member, links)])


def _shown(member: Any, width: int = WIDTH) -> str:
    """A method's signature, or a property with its type."""
    return f"{member.name}: {member.annotation}" if member.is_attribute else _signature(member, member.name, width)


def _is_short(member: Any) -> bool:
    """Whether a line says it all."""
    return len(member.docstring.value) + len(_shown(member)) < 240 and "\n\n" not in member.docstring.value


def _members(found: Any) -> Iterator[Any]:
    """Public ones with a docstring, also of bases that have no entry of their own; magic ones where they say more."""
    for name, member in (found.members | found.inherited_members).items():
        hidden = name.startswith("_") and not (name.startswith("__") and name.endswith("__"))
        if hidden or name in ("__init__", "__post_init__") or name in INNER:
            continue
        target = _target(member)
        if not target.canonical_path.startswith("raylance.") or target.docstring is None:
            continue
        if target.is_function or "property" in target.labels:
            yield target


def _described(found: Any) -> Any:
    """What describes the arguments of a class: its own docstring, or `__init__`'s."""
    init = found.all_members.get("__init__")
    return init if init is not None and init.docstring is not None else None


def _signature(found: Any, name: str, width: int = WIDTH) -> str:
    return _call(name, found.parameters, found.returns, width)


def _call(name: str, parameters: Iterable[Any], returns: Any, width: int = WIDTH) -> str:
    shown, keyword_only = [], False
    for parameter in parameters:
        if parameter.name in ("self", "cls") or (parameter.name.startswith("_") and parameter.default is not None):
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            keyword_only = True
            shown.append("*")
        keyword_only = keyword_only or parameter.kind is griffe.ParameterKind.var_positional
        shown.append(_parameter(parameter))
    arrow = f" -> {returns}" if returns is not None and str(returns) != "None" else ""
    line = f"{name}({', '.join(shown)}){arrow}"
    if len(line) <= width:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){arrow}"


def _parameter(parameter: Any) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not None:
        text += f": {str(parameter.annotation).strip(chr(34))}"
    if parameter.default is not None and parameter.kind not in stars:
        text += f" = {parameter.default}"
    return text


def _code(text: str) -> str:
    return f"```py\n{text}\n```\n"


def _docstring(found: Any, links: dict[str, str], init: Any = None) -> str:
    parts = []
    for described in (found, init):
        if described is None or described.docstring is None:
            continue
        for section in described.docstring.parsed:
            if described is init and str(section.value).startswith("Makes a"):
                continue  # which says nothing beside the class's
            parts.append(_section(section, described))
    return _linked("\n".join(parts), links)


def _section(section: Any, found: Any) -> str:
    kind = section.kind
    if kind is griffe.DocstringSectionKind.text:
        text = str(section.value)
        if found.is_module:  # "Owns the audit of epochs …": the house's way to begin a file
            text = text.removeprefix("Owns ")
            text = text[0].upper() + text[1:]
        return f"{text}\n"
    if kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes):
        what = "Arguments" if kind is griffe.DocstringSectionKind.parameters else "Attributes"
        return _items(what, ((f"`{each.name}`", each.description) for each in section.value))
    if kind is griffe.DocstringSectionKind.raises:
        return _items("Raises", ((_errors(each.annotation), each.description) for each in section.value))
    if kind in (griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields):
        [each] = section.value
        type_ = str(each.annotation or "")
        known = {"", str(getattr(found, "returns", "") or ""), str(getattr(found, "annotation", "") or "")}
        text = each.description if type_ in known else f"{type_}: {each.description}"
        return f"**{kind.value.capitalize()}:** {text}\n"
    raise ValueError(f"{found.path}: the docstring has a section {kind.value!r}, which nothing writes down")


def _errors(names: Any) -> str:
    """One error, or several that stand in one line."""
    return ", ".join(f"`{name.strip()}`" for name in str(names).strip("()").split(","))


def _items(title: str, items: Iterable[tuple[str, str]]) -> str:
    lines = [f"**{title}:**\n"]
    lines += [textwrap.indent(f"{name}: {text}", "  ").replace("  ", "- ", 1) for name, text in items]
    return "\n".join(lines) + "\n"


def _linked(text: str, links: dict[str, str]) -> str:
    """Code spans that name an entry lead there; blocks of code stay as they are."""

    def link(match: re.Match[str]) -> str:
        written = match[1] or match[2]
        name = written.removeprefix("raylance.")
        return f"[`{written}`](#{links[name]})" if name in links else match[0]

    # The name of an argument or attribute is no entry, though it may be called as one.
    replace = functools.partial(re.sub, r"(?<!\[)(?<!^- )`([\w.]+)`|(?<=^- )`(\w+Error)`", link)
    return "\n".join(line if line.startswith("    ") else replace(line) for line in text.split("\n"))
