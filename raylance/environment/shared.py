"""Large values that all processes of a run share as one copy, in Ray's object store if Ray runs."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy.typing as npt

from raylance.environment.connection import current_session, fetch, ray_session
from raylance.errors import HelperError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHARED_BYTES = 1 << 20  # larger values are sent through the object store
_FETCH_S = 120.0


class _Value(NamedTuple):
    """A value in this process, and the session whose object store holds its memory; "" if this process holds it."""

    value: Any
    session: str


class _Reference(NamedTuple):
    """A reference to a shared value's copy in the object store of a Ray session."""

    ref: Any  # as bytes while it is pickled
    session: str


class Shared(Generic[T]):
    """A value that processes share. If Ray runs, a large value is pickled as a reference to one copy in Ray's object
    store, together with its recipe, if it has one: a function that makes the value again.

    The reference is valid while the process that put the copy lives. After that (a task returned a handle and ended, or
    a pickle is loaded in another Ray session), the recipe is used. The value itself is pickled if it is small, if Ray
    does not run, or if it has no recipe; but a copy from `of_run` needs no recipe, because its reference stays valid.

    Several threads may use one object at once: value and reference are each read and replaced as a whole.
    """

    def __init__(self, what: str, value: T, nbytes: int, make: Callable[[], T] | None = None) -> None:
        """Takes a picklable value, whose NumPy arrays are read without a copy; its name for messages; its bytes: a
        small one is not worth a reference; and its recipe, a picklable function that returns an equal value, or raises
        an error.
        """
        self._what, self._nbytes, self._make = what, nbytes, make
        self._value: _Value | None = _Value(value, "")
        self._ref: _Reference | None = None
        self._is_of_run = False

    def get(self) -> T:
        """Returns the value; fetches it or makes it again if this process does not have it. Raises the errors of the
        recipe. Without a recipe, raises HelperError if the value's Ray session has ended, and RayError if Ray has lost
        the value or does not return it in 120 s.
        """
        session = ray_session()
        held, reference = self._value, self._ref
        if held is not None and held.session in ("", session):
            return held.value  # type: ignore[no-any-return]
        if reference is not None and reference.session == session:
            import ray

            try:
                self._value = held = _Value(fetch(reference.ref, session, _FETCH_S), session)
                return held.value  # type: ignore[no-any-return]
            except (ray.exceptions.RayError, HelperError) as error:
                if self._make is None:
                    raise
                logger.warning("the shared %s is lost (%s), and is made again", self._what, type(error).__name__)
                self._ref = None
        if self._make is None:
            raise HelperError(
                f"the {self._what} lay in the object store of a Ray session that this process has left. Nothing can be "
                "delivered without it. Open the dataset again with raylance.dataset(…), and load the state."
            )
        self._value = held = _Value(self._make(), "")
        return held.value  # type: ignore[no-any-return]

    def share(self) -> None:
        """Puts a large value into the object store of the current Ray session, once."""
        session = ray_session()
        if not session or self._is_shared_in(session) or self._nbytes <= _SHARED_BYTES:
            return
        value = self.get()
        with current_session() as current:  # one thread at a time
            if current == session and not self._is_shared_in(session):
                import ray

                self._ref = _Reference(ray.put(value), session)

    def of_run(self) -> Self:
        """Returns a copy to send to processes that end before this one: a large value is sent only as a reference."""
        self.share()
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, _is_of_run=True)
        return copy

    def here(self) -> "Shared[T]":
        """Returns a copy that is pickled as the value itself, for processes without Ray, as workers of DataLoader."""
        return Shared(self._what, self.get(), 0)

    def _is_shared_in(self, session: str) -> bool:
        return self._ref is not None and self._ref.session == session

    def __getstate__(self) -> dict[str, Any]:
        self.share()
        reference, session = self._ref, ray_session()
        is_here = reference is not None and reference.session == session
        if reference is not None and is_here and (self._make is not None or self._is_of_run):
            import ray

            # The reference becomes bytes of its own, because a process without Ray cannot load a reference, and must
            # still get the recipe. If Ray itself sends this object, it still counts the reference.
            packed = ray.cloudpickle.dumps(reference.ref)  # type: ignore[no-untyped-call]
            return self.__dict__ | {"_value": None, "_ref": _Reference(packed, session)}
        return self.__dict__ | {"_value": _Value(self.get(), ""), "_ref": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._ref is not None:
            packed, self._ref = self._ref, None
            with current_session() as session:
                if packed.session == session:
                    import ray

                    self._ref = _Reference(ray.cloudpickle.loads(packed.ref), session)


class SharedTables(Mapping[str, npt.NDArray[Any]]):
    """Arrays by name. Together they are one shared value."""

    def __init__(self, shared: Shared[dict[str, npt.NDArray[Any]]]) -> None:
        self.shared = shared

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.shared.get()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shared.get())

    def __len__(self) -> int:
        return len(self.shared.get())
