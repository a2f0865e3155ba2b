"""Owns methods that have a new name, where a user's class may still override or call the old one; never changes what a
method does.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def old_name(old: str, method: Method) -> Method:
    """Makes the method that a class keeps under an old name: it warns, and calls `method` of that very class.

    It never looks `method` up in the object: `super().old()` of a subclass would then call that subclass again.
    """

    def call(self: Any, *args: Any) -> Any:
        warnings.warn(
            f"{type(self).__name__}.{old}() has the name {method.__name__}() since raylance 0.9.0. The old name still "
            f"works. Call {method.__name__}() instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        return method(self, *args)

    call.__name__, call.__doc__ = old, f"Deprecated: the old name of `{method.__name__}`."
    return call  # type: ignore[return-value]


def accept_old_name(kind: type, old: str, new: str) -> None:
    """Gives a new class both names of a method that it defines under one of them; for `__init_subclass__`."""
    owner = next(base for base in kind.__mro__ if old in vars(base) or new in vars(base))
    if new not in vars(owner):
        method = vars(owner)[old]
        setattr(kind, new, method)
        code = getattr(method, "__code__", None)  # the warning names the line to change
        warnings.warn_explicit(
            f"{kind.__qualname__} overrides {old}(), which has the name {new}() since raylance 0.9.0. The old name "
            f"still works. Rename the method, and calls of super().{old}() in it, to {new}.",
            DeprecationWarning,
            filename=code.co_filename if code else kind.__module__,
            lineno=code.co_firstlineno if code else 1,
            module=kind.__module__,
        )
    elif owner is kind and old not in vars(kind):
        setattr(kind, old, old_name(old, vars(kind)[new]))
