"""Checks a filter's depth before Lance parses it, and shortens its text for errors.

Lance calls itself for each level of an expression, and a chain of operators has a level for each of them. A filter that
is too deep for the stack of a thread ends the process without an error.
"""

import re
from typing import Any

from raylance.errors import ConfigError, DatasetError

# A third of what a thread with a stack of 8 MiB, the usual one, bears.
_MOST_TERMS = 10_000  # AND and OR
_MOST_OPERATORS = 200  # each takes more of the stack, because its type is inferred
_SHOWN = 500
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'?|"[^"]*"?|`[^`]*`?"""  # strings and quoted names
    r"|(?P<word>[^\W\d]\w*)|[\d.]+|\s+|(?P<open>\()|(?P<close>[)\]])|(?P<comma>,)|(?P<operator>\[|[^\w\s'\"`(),\[\]]+)"
)
_TERMS = {"and", "or"}
_OPERATORS = {"between", "collate", "div", "ilike", "in", "is", "like", "mod", "not", "rlike", "similar", "xor"}


def check_filter(filter: Any) -> None:
    """Raises ConfigError if a filter is neither a string nor None, DatasetError if it is deeper than Lance bears."""
    if filter is None:
        return
    if not isinstance(filter, str):
        raise ConfigError(f"filter is a {type(filter).__name__}: give an SQL expression as a string, or None.")
    if depth_of(filter) > 1:
        raise DatasetError(
            f"filter={short_text(filter)!r} is deeper than Lance can parse: a chain of up to {_MOST_TERMS:,} terms "
            f"with AND or OR, or of {_MOST_OPERATORS} other operators, is allowed, because a longer one would end the "
            "process. Nothing was started. Write a list as `column IN (1, 2, …)`, which has no limit, or store a "
            "column that says which rows are wanted, and filter by it."
        )


def depth_of(filter: str) -> float:
    """Returns an upper bound of a filter's depth, its longest chain of nested operators, as a share of the allowed."""
    levels = [_Level()]
    for token in _TOKEN.finditer(filter):
        word, level = (token["word"] or "").lower(), levels[-1]
        if token["open"] or token["operator"] == "[":
            levels.append(_Level())
        elif token["close"]:
            if len(levels) > 1:
                levels.pop()
            levels[-1].inside = max(levels[-1].inside, level.depth)
            levels[-1].operators += token[0] == "]"
        elif token["comma"]:
            level.end_expression()
        elif word in _TERMS:
            level.end_term()
        elif token["operator"] or word in _OPERATORS:
            level.operators += 1
    while len(levels) > 1:
        inner = levels.pop()
        levels[-1].inside = max(levels[-1].inside, inner.depth)
    return levels[0].depth


class _Level:
    """What stands between two brackets: expressions with commas between them, of terms with AND and OR between them."""

    def __init__(self) -> None:
        self.operators = self._terms = 0
        self.inside = self._deepest_term = self._deepest = 0.0

    @property
    def depth(self) -> float:
        """The depth of the deepest expression so far."""
        term = max(self._deepest_term, self.operators / _MOST_OPERATORS + self.inside)
        return max(self._deepest, self._terms / _MOST_TERMS + term)

    def end_term(self) -> None:
        """AND or OR follows."""
        self._deepest_term = max(self._deepest_term, self.operators / _MOST_OPERATORS + self.inside)
        self._terms, self.operators, self.inside = self._terms + 1, 0, 0.0

    def end_expression(self) -> None:
        """A comma follows."""
        self._deepest = self.depth
        self._terms = self.operators = 0
        self.inside = self._deepest_term = 0.0


def short_text(text: str) -> str:
    """Returns a text without its middle if it is long, for an error."""
    if len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    return f"{text[:half]} … ({len(text):,} characters) … {text[-half:]}"
