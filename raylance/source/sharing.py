"""Owns how a selection gets to other processes: by reference to one copy in Ray's object store, or built again where
that copy is gone; never decides which rows are selected.
"""

import logging
from typing import TYPE_CHECKING, Any

from raylance.errors import DatasetError
from raylance.source.selection import Selection, Source, select
from raylance.source.splits import Split
from raylance.store import ray_session

if TYPE_CHECKING:
    import ray

logger = logging.getLogger(__name__)

_SHARED_BYTES = 1 << 20  # selections above this travel through the object store
_FETCH_S = 120.0


class SharedSelection:
    """A selection that is pickled as a reference and as what it was made from.

    The reference serves while the process that put the object lives. After that (a task that returned a handle and
    ended, a pickle that is loaded in another Ray session) the rows are selected again from the pinned version. The
    process that built a selection keeps it, and needs neither.
    """

    def __init__(self, source: Source, filter: str | None, split: Split | None, selection: Selection) -> None:
        """Takes a selection and what `select` made it from."""
        self._source, self._filter, self._split = source, filter, split
        self._fingerprint = selection.fingerprint
        self._local: Selection | None = selection
        self._fetched_in = ""  # the session whose object store `_local` lies in, or "" where it is this process's own
        self._ref: ray.ObjectRef[Selection] | None = None
        self._ref_session = ""

    def get(self) -> Selection:
        """The selection, fetched or built again where this process does not have it.

        Raises:
            DatasetError: If it had to be built again and is another one, or the dataset is gone.
        """
        session = ray_session()
        if self._fetched_in not in ("", session):
            self._local, self._fetched_in = None, ""
        if self._local is None and self._ref is not None and self._ref_session == session:
            import ray

            try:
                self._local, self._fetched_in = ray.get(self._ref, timeout=_FETCH_S), session
            except ray.exceptions.RayError as error:
                logger.warning(
                    "the shared selection of %s is lost (%s), so its rows are selected again.",
                    self._source.uri,
                    type(error).__name__,
                )
                self._ref = None
        if self._local is None:
            self._local = self._build()
        return self._local

    def share(self) -> None:
        """Puts a large selection into the object store of the Ray session there is, once."""
        session = ray_session()
        if not session or (self._ref is not None and self._ref_session == session):
            return
        selection = self.get()
        if selection.nbytes <= _SHARED_BYTES:
            return
        import ray

        self._ref, self._ref_session = ray.put(selection), session

    def _build(self) -> Selection:
        selection = select(self._source, self._filter, self._split)
        if selection.fingerprint != self._fingerprint:
            raise DatasetError(
                f"filter={self._filter!r}, split={self._split} selected the rows {self._fingerprint} of "
                f"{self._source.uri!r} at version {self._source.version} when the dataset was opened, and selects "
                f"{selection.fingerprint} now; nothing is read. The dataset was written anew meanwhile: open it again "
                "with raylance.dataset(…)."
            )
        return selection

    def __getstate__(self) -> dict[str, Any]:
        self.share()
        state = self.__dict__ | {"_fetched_in": ""}
        if self._ref is not None and self._ref_session == ray_session():
            import ray

            # As bytes of their own: a reference cannot be loaded without Ray, and then the recipe must still be. Ray
            # counts it all the same where it carries this object itself.
            state |= {"_local": None, "_ref": ray.cloudpickle.dumps(self._ref)}  # type: ignore[no-untyped-call]
        else:
            state |= {"_local": self.get(), "_ref": None, "_ref_session": ""}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._ref is not None:
            packed, self._ref = state["_ref"], None
            if self._ref_session == ray_session():
                import ray

                self._ref = ray.cloudpickle.loads(packed)
