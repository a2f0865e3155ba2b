"""What goes to workers of torch's DataLoader and comes back, and how a worker ends."""

import io
import multiprocessing.connection
import multiprocessing.spawn
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.utils.data

from raylance.errors import ConfigError, RaylanceError

_DO = (
    "Return tensors, arrays, numbers, strings, or lists and dicts of these; make anything else of the batch in the "
    "training loop, or use handle.loader(), whose threads send nothing."
)


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
    """A function that workers call; it is sent by `pack`, and what it returns or raises can be sent back."""

    def __init__(self, what: str, function: Callable[..., Any]) -> None:
        """Takes a name for messages, such as "collate_fn=", and the function."""
        self.what, self.function = what, function

    def __getstate__(self) -> dict[str, Any]:
        return {"what": self.what, "function": pack(self.what, self.function)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.what, self.function = state["what"], pickle.loads(state["function"])

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function; in a worker, checks that the result can be sent."""
        with errors_travel():
            made = self.function(*arguments)
        check_sendable(f"{self.what} {_name(self.function)}", made)
        return made


class WorkerStart:
    """A `worker_init_fn` that lets a worker end with the process that started it, and calls another `worker_init_fn`.

    torch compares the id of the parent process with the one that it saw first. If the parent was killed before, while
    the worker was starting, the worker never ends.
    """

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        """Starts worker number `worker`."""
        if (parent := multiprocessing.parent_process()) is not None:
            threading.Thread(target=_end_with, args=(parent.sentinel,), name="raylance-parent", daemon=True).start()
        if self._function is not None:
            self._function(worker)


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@contextmanager
def workers_start() -> Iterator[None]:
    """Lets workers start in the body if the script comes from stdin: multiprocessing would run a file "<stdin>"."""
    main: Any = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or os.path.exists(path) or getattr(main, "__spec__", None) is not None:
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


@contextmanager
def errors_travel() -> Iterator[None]:
    """In a worker, replaces an error whose class the training process cannot import, which would never arrive."""
    try:
        yield
    except Exception as error:
        if torch.utils.data.get_worker_info() is None or _fault_of(type(error)) is None:
            raise
        raise RaylanceError(f"{type(error).__name__}: {error}") from error


def check_sendable(what: str, made: Any) -> None:
    """Raises ConfigError in a worker if a value, which `what` has made, cannot be sent to the training process. torch
    would only print an error there, and the training process would wait for ever.
    """
    if torch.utils.data.get_worker_info() is None or (fault := _fault_of(made)) is None:
        return
    at, part = "", made
    if isinstance(made, Mapping | list | tuple):
        parts = made.items() if isinstance(made, Mapping) else enumerate(made)
        at, part = next(((f" at {key!r}", value) for key, value in parts if _fault_of(value)), (at, part))
    raise ConfigError(
        f"{what} returned a {type(part).__name__}{at}, which a worker of DataLoader cannot send ({fault}); the batch "
        f"would never come. {_DO}"
    )


def _fault_of(value: Any) -> str | None:
    try:
        _Probe(io.BytesIO()).dump(value)
    except Exception as error:  # any class: the value is the user's
        return f"{type(error).__name__}: {error}"
    return None


class _Probe(ForkingPickler):
    """Pickles as DataLoader's queue does, without the content of tensors and arrays."""

    def persistent_id(self, obj: Any) -> Any:
        """Skips objects that torch can always send."""
        is_tensor = isinstance(obj, torch.Tensor) and not (obj.requires_grad and not obj.is_leaf)
        is_array = isinstance(obj, np.ndarray) and not obj.dtype.hasobject
        return 0 if is_tensor or is_array or isinstance(obj, str | bytes) else None


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
