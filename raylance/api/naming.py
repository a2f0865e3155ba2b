"""The names under which this process's loaders appear in the run's records."""

import itertools
import threading
import weakref
from collections.abc import Collection

_given: dict[tuple[str, str, str, int], str] = {}  # names by `data` of choose_name() and number
_held: "weakref.WeakKeyDictionary[object, tuple[int, tuple[str, str, str], int]]" = weakref.WeakKeyDictionary()
_naming = threading.Lock()  # loaders may begin in several threads


def choose_name(loader: object, rank: int, data: tuple[str, str, str], others: Collection[str]) -> tuple[str, int]:
    """Chooses a loader's name, and its number among the loaders of the same data that one rank iterates concurrently.

    Loaders of different data never share a name while the process lives. Two loaders of the same data that one rank
    iterates concurrently do not share a name either, because their figures would be added up.

    Args:
        loader: The loader, which keeps its number until `release_name` is called.
        rank: Rank of the loader's worker.
        data: Folder of the records, name of the dataset, and identity of the loader's data. If loaders would share the
            name of the dataset, a number is added to it.
        others: Names of other loaders of this process, which Ray Train gave them.
    """
    folder, stem, _ = data
    with _naming:
        taken = {number for other, (*of, number) in _held.items() if other is not loader and of == [rank, data]}
        number = next(number for number in itertools.count(1) if number not in taken)
        _held[loader] = rank, data, number
        used = {name for (there, *_), name in _given.items() if there == folder}.union(others)
        names = itertools.chain([stem], (f"{stem}-{count}" for count in itertools.count(2)))
        return _given.setdefault((*data, number), next(name for name in names if name not in used)), number


def release_name(loader: object) -> None:
    """Frees a loader's number; its name stays reserved for the same data."""
    with _naming:
        _held.pop(loader, None)
