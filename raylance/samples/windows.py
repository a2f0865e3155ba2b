"""Windows over episodes: a sample is a row, its anchor, with rows around it in the same episode."""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from raylance.arguments import check_integer, check_word, is_positive
from raylance.descriptions import Setting
from raylance.errors import ConfigError
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.samples.table import FindingTable, Found, Located, range_numbers

Ends = Literal["pad", "drop"]
Neighbours = Literal["episode", "selected"]
_FURTHEST = 1 << 48  # a row offset has less


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Windows(Setting):
    """Makes each sample of several rows of one episode. Pass it to `raylance.dataset` as `samples`.

    The samples of an epoch are the selected rows, called anchors. A column in `offsets` or `seconds` comes from k rows
    around the anchor, and has k values in each sample: (n, k, …) in batches. All other columns, and `_rowoffset`, come
    from the anchor. The rows of an episode are those with one value in the column `episode`, in storage order.

    Attributes:
        episode: Column of integers or strings whose value is the same in all rows of an episode, and differs between
            episodes. The rows of each must be stored in their order in time, which is checked only by `timestamp`.
        offsets: For each column, the rows of its window, relative to the anchor, which is 0: `{"action": range(16),
            "state": [-1, 0]}`.
        seconds: The same in seconds, for other columns than those in `offsets`. They must be whole numbers of rows by
            `fps`, or, if this is None, by the distance of the first two timestamps.
        fps: Rows a second.
        timestamp: Column of seconds (numbers, or Arrow timestamps), or, with `fps=1`, of the numbers of rows in their
            episode. If it is given, each row must follow the one before it in its episode by 1 / fps: each is checked
            when the dataset is opened.
        tolerance_s: By how many seconds offsets in seconds, and distances of timestamps, may differ from whole rows;
            distances also by the rounding of their type of floats.
        at_ends: "pad" repeats the first or last row of the episode in place of rows outside of it. Batches then have a
            column `<column>_is_pad`, bool (n, k), for each window. "drop" leaves out anchors whose windows are not
            whole.
        stride: Distance between the anchors of an episode in rows, from its first possible one on. Rows that are not
            selected count, too, unless the episode ends there.
        neighbours: "episode" also takes rows that filter or split have not selected, if they are near a selected one.
            With "selected", an episode ends for a window where the next row is not selected.
    """

    _hints: ClassVar = {
        "group": "episode= names the column",
        "horizon": 'offsets={"action": range(8)} are the rows of a column, 0 the row itself',
        "delta_timestamps": 'seconds={"action": [0.0, 0.1]}, with fps= or timestamp=',
    }
    episode: str
    offsets: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    fps: float | None = None
    timestamp: str | None = None
    tolerance_s: float = 1e-4
    at_ends: Ends = "pad"
    stride: int = 1
    neighbours: Neighbours = "episode"

    def __post_init__(self) -> None:
        if not (isinstance(self.episode, str) and self.episode):
            raise ConfigError(f"Windows(episode={self.episode!r}): give the name of the column that numbers episodes.")
        check_word("Windows: at_ends", self.at_ends, get_args(Ends))
        check_word("Windows: neighbours", self.neighbours, get_args(Neighbours))
        object.__setattr__(self, "stride", check_integer("Windows: stride", self.stride, 1))
        rows = {name: _numbers(name, each, "offsets") for name, each in _items("offsets", self.offsets)}
        whole = {
            name: tuple(check_integer(f"Windows: offsets[{name!r}]", n, None) for n in each)
            for name, each in rows.items()
        }
        object.__setattr__(self, "offsets", dict(sorted(whole.items())))
        for name, each in whole.items():
            _check_reach(name, each)
        seconds = {name: _numbers(name, each, "seconds") for name, each in _items("seconds", self.seconds)}
        given = {name: tuple(map(float, each)) for name, each in sorted(seconds.items())}
        object.__setattr__(self, "seconds", given)
        if not self.columns:
            raise ConfigError(
                "Windows(): no column has a window. Name some in offsets= or seconds=, or leave samples= out."
            )
        if both := sorted(self.offsets.keys() & self.seconds.keys()):
            raise ConfigError(f"Windows(): {both[0]!r} is in offsets= and in seconds=. Name it in one of them.")
        numbers: dict[str, Any] = {"tolerance_s": self.tolerance_s} | ({} if self.fps is None else {"fps": self.fps})
        for name, value in numbers.items():
            if not is_positive(value):
                raise ConfigError(f"Windows({name}={value!r}): must be a positive number.")
        if self.timestamp is not None and not (isinstance(self.timestamp, str) and self.timestamp):
            raise ConfigError(f"Windows(timestamp={self.timestamp!r}): give the name of a column.")
        if self.seconds and self.fps is None and self.timestamp is None:
            raise ConfigError(
                "Windows(seconds=…): how many rows a second has is not known. Give fps=, or the column timestamp=."
            )

    @property
    def columns(self) -> list[str]:
        """The columns that have windows."""
        return [*self.offsets, *self.seconds]

    @property
    def needs(self) -> list[str]:
        """The columns from which episodes and times are found."""
        return list(dict.fromkeys([self.episode, *([self.timestamp] if self.timestamp else [])]))

    def in_rows(self, fps: float | None) -> dict[str, tuple[int, ...]]:
        """Returns the offsets of each column in rows.

        Raises:
            ConfigError: If an offset in seconds is not a whole number of rows.
        """
        found = {name: tuple(offsets) for name, offsets in self.offsets.items()}
        if self.seconds and fps is None:
            raise ConfigError(
                f"Windows(seconds=…): no episode has two rows, so how far they are apart in {self.timestamp!r} is not "
                "known; nothing was started. Give fps=."
            )
        if fps is not None and self.tolerance_s >= 0.5 / fps:
            raise ConfigError(
                f"Windows: tolerance_s={self.tolerance_s:g} is half of {1 / fps:g} s or more, by which rows are apart: "
                "any time would be near a row. Nothing was started. Give a smaller one."
            )
        for name, seconds in self.seconds.items():
            rate = fps or math.nan
            _check_reach(name, [each * rate for each in seconds])
            rows = [round(each * rate) for each in seconds]
            for each, row in zip(seconds, rows, strict=True):
                if abs(each - row / rate) > self.tolerance_s:
                    raise ConfigError(
                        f"Windows: seconds[{name!r}] has {each:g} s, which is {each * rate:g} rows at {rate:g} rows a "
                        f"second; the nearest row is {abs(each - row / rate):g} s away, tolerance_s allows "
                        f"{self.tolerance_s:g} s. Nothing was started. Give whole multiples of {1 / rate:g} s; or "
                        "fps=, if it was inferred from rounded timestamps."
                    )
            found[name] = tuple(rows)
        return {name: found[name] for name in self.columns}


def _items(argument: str, given: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"Windows({argument}={given!r}): give a dict of column to offsets.")
    return given.items()


def _check_reach(name: str, offsets: Iterable[float]) -> None:
    for each in offsets:
        if abs(each) >= _FURTHEST:
            raise ConfigError(
                f"Windows: {name!r} has a row {each:g} rows from the anchor; row offsets are below {_FURTHEST:,}."
            )


def _numbers(name: Any, given: Any, argument: str) -> tuple[Any, ...]:
    is_array = isinstance(given, np.ndarray) and given.ndim != 1
    is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes) and not is_array
    values = tuple(given) if is_list else ()
    is_number = all(isinstance(each, int | float | np.number) and not isinstance(each, bool) for each in values)
    if not (isinstance(name, str) and values and is_number and all(map(math.isfinite, values))):
        raise ConfigError(
            f"Windows({argument}={{{name!r}: {given!r}}}): give a list of numbers for each column, such as range(8)."
        )
    return values


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Episodes:
    """Where episodes begin and end. A row's place is its number if rows are sorted by episode.

    Attributes:
        ends: The place after the last row of each episode, int64, ascending; the first one begins at place 0.
        offsets: The row offset at each place; None if the rows of each episode are stored together: then the place of a
            row is its offset.
        places: The place of each row offset; None if `offsets` is.
        fps: Rows a second; None if nothing says it.
    """

    ends: Int64Array
    offsets: Int64Array | None = None
    places: Int64Array | None = None
    fps: float | None = None

    @classmethod
    def of_runs(cls, codes: Int64Array, lengths: Int64Array, fps: float | None = None) -> "Episodes":
        """Makes episodes of runs of rows that follow one another in storage; equal codes are of one episode."""
        if (np.diff(codes) > 0).all() or len(np.unique(codes)) == len(codes):
            return cls(ends=np.cumsum(lengths), fps=fps)
        by_code = np.argsort(codes, kind="stable")
        starts = (np.cumsum(lengths) - lengths)[by_code]
        offsets = range_numbers(starts, lengths[by_code])
        places = np.empty_like(offsets)
        places[offsets] = np.arange(len(offsets))
        lasts = np.flatnonzero(np.diff(codes[by_code], append=codes.max() + 1))
        return cls(ends=np.cumsum(lengths[by_code])[lasts], offsets=offsets, places=places, fps=fps)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(each.nbytes for each in (self.ends, self.offsets, self.places) if each is not None)

    @property
    def fingerprint(self) -> str:
        """Hash of where episodes begin and end."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.ends, self.offsets):
            digest.update(b"" if array is None else np.ascontiguousarray(array, dtype="<i8").data)
        return digest.hexdigest()

    def place_of(self, offsets: Int64Array) -> Int64Array:
        """Converts row offsets to places."""
        return offsets if self.places is None else self.places[offsets]

    def offset_at(self, places: Int64Array) -> Int64Array:
        """Converts places to row offsets."""
        return places if self.offsets is None else self.offsets[places]

    def bounds(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns, for each place, the first place of its episode, and the place after its last one."""
        number = np.searchsorted(self.ends, places, side="right")
        return np.where(number > 0, self.ends[number - 1], 0), self.ends[number]

    def cut_at(self, selected: Int64Array) -> "Episodes":
        """Returns episodes that also end, or begin, where the next place is not selected.

        Args:
            selected: Row offsets, int64, strictly ascending.
        """
        places = np.sort(self.place_of(selected))
        firsts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        runs = np.r_[places[firsts], places[np.r_[firsts[1:] - 1, len(places) - 1]] + 1]
        ends = np.unique(np.r_[self.ends, runs])
        return dataclasses.replace(self, ends=ends[ends > 0])


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=False, kw_only=True)
class _Around(Episodes):
    """Stands for episodes whose rows are stored together, for anchors whose windows are known to lie inside: each
    anchor's episode reaches as far as its windows.
    """

    reach: tuple[int, int]
    known: str

    @property
    def fingerprint(self) -> str:
        return self.known

    def bounds(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        return places + self.reach[0], places + self.reach[1] + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowTable(FindingTable):
    """The samples that `Windows` makes of some episodes.

    Attributes:
        windows: The settings.
        episodes: The episodes.
        offsets: For each column, its window's rows relative to the anchor.
    """

    facts: ClassVar[int] = 2  # the number of rows before the anchor in its episode, and after it
    windows: Windows
    episodes: Episodes
    offsets: dict[str, tuple[int, ...]]

    @property
    def columns(self) -> dict[str, int]:
        """See `SampleTable.columns`."""
        return {name: len(offsets) for name, offsets in self.offsets.items()}

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides which rows a sample has."""
        settings = sorted(self.offsets.items()), self.windows.at_ends, self.windows.stride
        return hashlib.blake2b(f"{self.episodes.fingerprint}{settings!r}".encode(), digest_size=16).hexdigest()

    def of_anchors(self) -> "WindowTable":
        """Returns a table for anchors alone. With `at_ends="drop"`, it needs not know the episodes if their rows are
        stored together, because windows end before them.
        """
        if self.windows.at_ends == "pad" or self.episodes.offsets is not None:
            return self
        none, known = np.empty(0, dtype=np.int64), self.episodes.fingerprint
        return dataclasses.replace(
            self, episodes=_Around(ends=none, fps=self.episodes.fps, reach=self._reach, known=known)
        )

    def are_anchors(self, offsets: Int64Array) -> BoolArray:
        """Returns which of these rows are anchors, by the ends of episodes and the stride; bool, (n,)."""
        places = self.episodes.place_of(offsets)
        first, end = self.episodes.bounds(places)
        if self.windows.at_ends == "drop":
            lowest, highest = self._reach
            first, end = first + max(0, -lowest), end - max(0, highest)
        return np.asarray((first <= places) & (places < end) & ((places - first) % self.windows.stride == 0))

    def anchor_runs(self, selected: int) -> tuple[Int64Array, Int64Array] | None:
        """Returns the first offset and the number of consecutive anchors of each episode. None if all rows are anchors,
        if anchors do not lie next to each other, or if `selected`, the number of selected rows, is not that of all.
        """
        is_whole = selected == self.episodes.ends[-1] and self.episodes.offsets is None
        if self.are_all_anchors or self.windows.stride > 1 or not is_whole:
            return None
        lowest, highest = self._reach if self.windows.at_ends == "drop" else (0, 0)
        starts, ends = np.r_[0, self.episodes.ends[:-1]] - lowest, self.episodes.ends - highest
        lengths = ends - starts
        has_any = lengths > 0
        return (starts, lengths) if has_any.all() else (starts[has_any], lengths[has_any])

    @property
    def are_all_anchors(self) -> bool:
        """Whether every row is an anchor."""
        return self.windows.stride == 1 and (self.windows.at_ends == "pad" or self._reach == (0, 0))

    @property
    def knows_selected_alone(self) -> bool:
        """See `SampleTable.knows_selected_alone`; see `of_anchors`, too."""
        return self.windows.at_ends == "drop"

    @property
    def _reach(self) -> tuple[int, int]:
        every = [each for offsets in self.offsets.values() for each in offsets]
        return min(0, *every), max(0, *every)

    def stored(self, anchors: Int64Array) -> Int64Array:
        """See `SampleTable.stored`."""
        if len(anchors) and anchors.min() < 0:
            raise IndexError(f"row offset {anchors.min()} is negative")
        places = np.sort(self.episodes.place_of(anchors))
        first, end = self.episodes.bounds(places)
        starts, stops = [], []
        for low, high in self._read_runs:
            starts.append(np.clip(places + low, first, end - 1))
            stops.append(np.clip(places + high, first, end - 1) + 1)
        found = _union(np.concatenate(starts), np.concatenate(stops))
        return found if self.episodes.offsets is None else np.sort(self.episodes.offsets[found])

    def look_up(self, anchors: Int64Array) -> Int64Array:
        """See `SampleTable.look_up`."""
        places = self.episodes.place_of(anchors)
        first, end = self.episodes.bounds(places)
        return np.stack([places - first, end - 1 - places], axis=1)

    def find(self, stored: Int64Array, located: Located) -> Found:
        """See `SampleTable.find`."""
        made = {offsets: self._find_window(stored, located, offsets) for offsets in set(self.offsets.values())}
        windows = {name: made[offsets][0] for name, offsets in self.offsets.items()}
        pads = {name: made[offsets][1] for name, offsets in self.offsets.items()}
        return Found(windows, pads if self.windows.at_ends == "pad" else {})

    def _find_window(
        self, stored: Int64Array, located: Located, offsets: tuple[int, ...]
    ) -> tuple[Int64Array, BoolArray]:
        wanted, (before, after) = np.array(offsets), located.facts.T
        edge = np.flatnonzero((before < -wanted.min()) | (after < wanted.max()))
        if len(edge) and self.windows.at_ends == "drop":  # a row was asked for that is not an anchor
            raise IndexError(f"row {located.anchors[edge[0]]} has no whole window, and at_ends='drop' marks no padding")
        inside = np.clip(wanted, -before[edge, None], after[edge, None])  # the nearest offsets inside the episode
        is_pad = np.zeros((len(located.anchors), len(offsets)), dtype=np.bool_)
        is_pad[edge] = inside != wanted
        if self.episodes.offsets is None and self._is_near(offsets):
            # Rows from the anchor to the window are stored, and were read, one after the other.
            found = located.at[:, None] + wanted
            found[edge] = located.at[edge, None] + inside
            return found, is_pad
        places = self.episodes.place_of(located.anchors)[:, None] + wanted
        places[edge] += inside - wanted
        return np.searchsorted(stored, self.episodes.offset_at(places)), is_pad

    def _is_near(self, offsets: tuple[int, ...]) -> bool:
        """Whether all rows between the anchor and a window are read."""
        low, high = next(run for run in self._read_runs if run[0] <= 0 <= run[1])
        return low <= min(offsets) and max(offsets) <= high

    @property
    def _read_runs(self) -> list[tuple[int, int]]:
        """The first and last offset of each run of rows that is read for a sample."""
        return _runs({0}.union(*self.offsets.values()))


def _runs(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the first and last number of each run of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for each in sorted(set(offsets)):
        if runs and runs[-1][1] == each - 1:
            runs[-1] = (runs[-1][0], each)
        else:
            runs.append((each, each))
    return runs


def _union(starts: Int64Array, stops: Int64Array) -> Int64Array:
    """Returns the numbers that lie in at least one range, ascending."""
    if not len(starts):
        return starts
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    firsts = np.flatnonzero(np.r_[True, starts[1:] > stops[:-1]])
    lasts = np.r_[firsts[1:], len(starts)] - 1
    return range_numbers(starts[firsts], stops[lasts] - starts[firsts])
