"""What goes to workers of torch's DataLoader."""

import io
import multiprocessing.spawn
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from raylance.errors import ConfigError


def pack(what: str, value: Any) -> bytes:
    """Returns a value as bytes for `pickle.loads` in a worker; functions and classes that it cannot import, such as a
    notebook's, go by value. Raises ConfigError if the value cannot be sent.
    """
    file = io.BytesIO()
    try:
        _ByValue(file).dump(value)
    except Exception as error:  # any class: the value is the user's
        raise ConfigError(
            f"{what} {_name(value)} cannot be sent to the workers of DataLoader ({type(error).__name__}: {error}), so "
            "no batch can follow. Let it hold no lock, file, generator or connection: make these at its first call."
        ) from error
    return file.getvalue()


class _ByValue(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Sends functions and classes by value if a worker cannot import them."""
        if not isinstance(obj, types.FunctionType | type) or _is_importable(obj):
            return NotImplemented
        return pickle.loads, (cloudpickle.dumps(obj),)


def _is_importable(made: Any) -> bool:
    """Whether a worker, which runs the file of a script again, finds a function or class by its name."""
    module: Any = sys.modules.get(made.__module__)
    if made.__module__ == "__main__":
        again = multiprocessing.spawn.get_preparation_data("")
        path = again.get("init_main_from_path", "")
        code = getattr(made, "__code__", None)
        if "init_main_from_name" not in again and not os.path.exists(path):
            return False
        if code is not None and not os.path.exists(code.co_filename):  # typed at a prompt after the script
            return False
    for name in made.__qualname__.split("."):
        module = getattr(module, name, None)
    return module is made


class Function:
    """A function that workers call; it is sent by `pack`."""

    def __init__(self, what: str, function: Callable[..., Any]) -> None:
        """Takes a name for messages, such as "collate_fn=", and the function."""
        self.what, self.function = what, function

    def __getstate__(self) -> dict[str, Any]:
        return {"what": self.what, "function": pack(self.what, self.function)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.what, self.function = state["what"], pickle.loads(state["function"])

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        return self.function(*arguments)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
