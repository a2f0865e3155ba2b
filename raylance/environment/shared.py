"""Owns large values of which one copy serves all processes of a run, in Ray's object store where Ray runs; never makes
them, and never starts Ray.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy.typing as npt

from raylance.environment.connection import current_session, fetch, ray_session
from raylance.errors import HelperError

if TYPE_CHECKING:
    import ray

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHARED_BYTES = 1 << 20  # values above this travel through the object store
_FETCH_S = 120.0


class Shared(Generic[T]):
    """A value that is pickled as a reference to one copy and, where it has one, the recipe that makes it again.

    The reference serves while the process that put the copy lives. After that (a task that returned a handle and ended,
    a pickle that is loaded in another Ray session) the recipe is followed. Without a recipe the value itself is
    pickled, unless `of_run` says that the process that has put it outlives whoever gets it.
    """

    def __init__(self, what: str, value: T, nbytes: int, make: Callable[[], T] | None = None) -> None:
        """Takes a value.

        Args:
            what: What it is, for a warning.
            value: The value, picklable; NumPy arrays in it are read without a copy.
            nbytes: Its bytes; small ones are not worth a reference.
            make: The recipe, picklable: makes an equal value, or raises.
        """
        self._what, self._nbytes, self._make = what, nbytes, make
        self._value: T | None = value
        self._fetched_in = ""  # the session whose object store `_value` lies in, "" where it is this process's own
        self._ref: ray.ObjectRef[T] | None = None
        self._ref_session = ""
        self._is_of_run = False

    def get(self) -> T:
        """The value, fetched or made again where this process does not have it.

        Raises:
            RaylanceError: As the recipe does, where it had to be followed.
        """
        session = ray_session()
        if self._fetched_in not in ("", session):
            self._value, self._fetched_in = None, ""
        if self._value is None and self._ref is not None and self._ref_session == session:
            import ray

            try:
                self._value, self._fetched_in = fetch(self._ref, session, _FETCH_S), session
            except (ray.exceptions.RayError, HelperError) as error:
                if self._make is None:
                    raise
                logger.warning("the shared %s is lost (%s), and is made again", self._what, type(error).__name__)
                self._ref = None
        if self._value is None:
            if self._make is None:
                raise HelperError(
                    f"the {self._what} lay in the object store of a Ray session that this process has left. Nothing "
                    "can be delivered without it. Open the dataset again with raylance.dataset(…), and load the state."
                )
            self._value = self._make()
        return self._value

    def share(self) -> None:
        """Puts a large value into the object store of the Ray session there is, once."""
        session = ray_session()
        if not session or self._ref_session == session or self._nbytes <= _SHARED_BYTES:
            return
        value = self.get()
        with current_session() as current:
            if current == session:
                import ray

                self._ref, self._ref_session = ray.put(value), session

    def of_run(self) -> Self:
        """The same, for processes that this one outlives: a large value is shared, and sent as a reference alone."""
        self.share()
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, _is_of_run=True)
        return copy

    def here(self) -> "Shared[T]":
        """The same, pickled as the value itself: for processes that have no Ray, and no time for the recipe."""
        return Shared(self._what, self.get(), 0)

    def __getstate__(self) -> dict[str, Any]:
        self.share()
        state = self.__dict__ | {"_fetched_in": ""}
        is_here = self._ref is not None and self._ref_session == ray_session()
        if is_here and (self._make is not None or self._is_of_run):
            import ray

            # As bytes of their own: a reference cannot be loaded without Ray, and then the recipe must still be. Ray
            # counts it all the same where it carries this object itself.
            return state | {"_value": None, "_ref": ray.cloudpickle.dumps(self._ref)}  # type: ignore[no-untyped-call]
        return state | {"_value": self.get(), "_ref": None, "_ref_session": ""}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._ref is not None:
            packed, self._ref = state["_ref"], None
            with current_session() as session:
                if self._ref_session == session:
                    import ray

                    self._ref = ray.cloudpickle.loads(packed)


class SharedTables(Mapping[str, npt.NDArray[Any]]):
    """Arrays by name, all of them one shared value."""

    def __init__(self, shared: Shared[dict[str, npt.NDArray[Any]]]) -> None:
        """Takes the value."""
        self.shared = shared

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.shared.get()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shared.get())

    def __len__(self) -> int:
        return len(self.shared.get())
