"""Settings as JSON, which states hold, and as text, which command lines have; and the settings that these mean.

A setting is a frozen dataclass that users construct. Its JSON is `{"class": name, field: value, …}`, equal in every
process: functions stand there by name, never by address. Its text is its `repr`.
"""

import ast
import dataclasses
import datetime
import decimal
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from raylance.arguments import refuse_unknown
from raylance.errors import ConfigError

CLASS = "class"
"""Key of the name of a setting's class in its description."""
_OMITTED = "raylance.omit_default"
OMIT_DEFAULT = {_OMITTED: True}
"""Metadata of a field that a later version of raylance added to a setting. If it has its default, `describe` leaves it
out, so that the description is equal to that of earlier versions.
"""
_ORDERED = "raylance.ordered"
ORDERED = {_ORDERED: True}
"""Metadata of a field whose mapping has an order that counts. It is described as pairs: JSON tools sort keys."""
# Values that JSON does not have: their types by name, and how they become text and come back.
_VALUES: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
}
_kinds: dict[str, type["Setting"]] = {}
# Where settings are that states hold: a process that reads states need not have loaded them.
_HOMES = {
    "raylance.source.splits": ("FractionSplit", "RangeSplit", "ValueSplit"),
    "raylance.samples.windows": ("Windows",),
    "raylance.samples.packs": ("Pack",),
    "raylance.samples.pack_tokens": ("PackTokens",),
    "raylance.source.costs": ("TokensOf",),
    "raylance.source.derived": ("Constant", "Renamed"),
    "raylance.decode.clips": ("Clip",),
    "raylance.decode.patches": ("FramePatches", "Patches"),
    "raylance.source.videos": ("Video",),
    "raylance.source.lerobot": ("Camera", "DepthCamera", "Task"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


class Setting:
    """Base class of raylance's settings, which `read_description` and `read_setting` know by their names. A class that
    users derive from one of them is not known, because checkpoints do not hold its code.
    """

    __slots__: ClassVar[tuple[str, ...]] = ()
    _hints: ClassVar[Mapping[str, str]] = {}
    """What to write in place of fields that a user may try, by their names."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuses fields that raylance's own settings do not have, and sets the fields that users do not give to their
        defaults. Raises ConfigError, which names the right field.
        """
        if given and _kinds.get(cls.__qualname__) is cls:
            known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
            unknown = {name: value for name, value in given.items() if name not in known}
            refuse_unknown(f"{cls.__name__}()", unknown, known, cls._hints)
        made = super().__new__(cls)
        for field in getattr(cls, "__dataclass_fields__", {}).values():
            if not field.init:  # an opening sets them later; the `__init__` of a subclass without slots never does
                object.__setattr__(made, field.name, field.default)
        return made

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            _kinds[cls.__qualname__] = cls


def kind_of_setting(name: Any) -> type[Setting] | None:
    """Returns the class of raylance's settings that has this name; None if there is none."""
    if isinstance(name, str) and name not in _kinds and name in _HOME_OF:
        importlib.import_module(_HOME_OF[name])
    return _kinds.get(name) if isinstance(name, str) else None


def written(setting: Any) -> Any:
    """Returns what a state holds of a setting, or of None: its description; or its repr, if the description would not
    give the same setting, as for a class of the user's.
    """
    described = describe(setting)
    try:
        is_same = repr(read_description(described)) == repr(setting)
    except ConfigError:
        is_same = False
    return described if is_same else repr(setting)


def describe(value: Any) -> Any:
    """Returns the description of a setting, or of a value in one."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: describe(list(found.items()) if _ORDERED in field.metadata else found)
            for field in dataclasses.fields(value)
            if field.repr and ((found := getattr(value, field.name)) != field.default or _OMITTED not in field.metadata)
        }
        return {CLASS: type(value).__qualname__, **fields}
    if isinstance(value, functools.partial):
        return {"partial": describe(value.func), "args": describe(value.args), "keywords": describe(value.keywords)}
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    for name, (kind, to_text, _) in _VALUES.items():
        if isinstance(value, kind):
            return {CLASS: name, "text": to_text(value)}
    if isinstance(value, np.generic) and not isinstance(plain := value.item(), np.generic):
        return describe(plain)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    module = named.__module__.removesuffix("._local")  # only Python 3.13 has paths in pathlib._local
    return f"{module}.{named.__qualname__}"


def is_description(value: Any, kind: type[Setting] = Setting) -> bool:
    """Returns whether a value is the description of a setting of this kind, whose class is known."""
    found = kind_of_setting(value.get(CLASS)) if isinstance(value, Mapping) else None
    return found is not None and issubclass(found, kind)


def read_description(described: Any) -> Any:
    """Makes a setting, or a value in one, from its description. Sequences become tuples.

    Raises:
        ConfigError: If a class is not known, or has other fields.
    """
    if isinstance(described, list):
        return tuple(map(read_description, described))
    if not isinstance(described, Mapping):
        return described
    if not isinstance(described.get(CLASS), str):  # a mapping in a setting; columns may be called "class", too
        return {name: read_description(value) for name, value in described.items()}
    fields = {name: read_description(value) for name, value in described.items() if name != CLASS}
    try:
        if described[CLASS] in _VALUES:
            return _VALUES[described[CLASS]][2](fields["text"])
        kind = kind_of_setting(described[CLASS])
        if kind is None:
            raise ValueError("raylance has no setting of this class")
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            if _ORDERED in field.metadata and field.name in fields:
                fields[field.name] = dict(fields[field.name])
        return kind(**fields)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{dict(described)} cannot be read ({type(error).__name__}: {error}): it is not the description of a "
            "setting of raylance. Give the setting itself."
        ) from error


class _Scalars(ast.NodeTransformer):
    """Replaces NumPy's scalars, whose repr is np.float64(0.9) or np.True_, by constants."""

    def visit(self, node: ast.AST) -> Any:
        match super().visit(node):
            case ast.Call(ast.Attribute(ast.Name("np"), name), [ast.expr() as value], []):
                kind = getattr(np, name, None)
                if isinstance(kind, type) and issubclass(kind, np.number | np.character):
                    constant: Any = kind(ast.literal_eval(value))
                    return ast.Constant(constant)
            case ast.Attribute(ast.Name("np"), "True_" | "False_" as name):
                return ast.Constant(getattr(np, name))
        return node


def read_setting(saved: str | Mapping[str, Any]) -> Any:
    """Makes a setting, such as a split, an order or what makes samples, from what is written down of it.

    Args:
        saved: What a state holds of it, under "split" or "windows"; or the text of its repr, as errors and states
            before 0.12 have it: "FractionSplit(fractions={'train': 0.9, 'val': 0.1}, part='train', by='key')". The
            text is parsed, and no code in it runs.

    Raises:
        ConfigError: If it is neither, or its values are not those of a setting.
    """
    if isinstance(saved, Mapping):
        if not is_description(saved):
            raise ConfigError(f"{dict(saved)} is not the description of a setting: its class is one of {_names()}.")
        return read_description(saved)
    text = saved
    try:
        if not isinstance(text, str):
            raise TypeError("it is not a str")
        call = _Scalars().visit(ast.parse(text.strip(), mode="eval").body)
        kind = kind_of_setting(call.func.id) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
        if kind is None:
            raise ValueError("it is none of them")
        fields = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return kind(*map(ast.literal_eval, call.args), **fields)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deep
        raise ConfigError(f"{text!r} cannot be read ({error}): write one of {_names()} with plain values.") from error


def _names() -> str:
    return ", ".join(sorted(name for name, kind in _kinds.items() if not (inspect.isabstract(kind) or name[0] == "_")))


def in_words(described: Any) -> Any:
    """Returns the repr of a setting for its description; another value as it is."""
    try:
        return repr(read_description(described)) if is_description(described) else described
    except ConfigError:  # another version wrote it
        return described


def description_of(text: Any) -> Any:
    """Returns the description of the setting whose repr a state before 0.12 holds; `text` itself if it is another."""
    try:
        return describe(read_setting(text))
    except ConfigError:
        return text
