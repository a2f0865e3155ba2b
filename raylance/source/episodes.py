"""Reads where the episodes of a dataset begin and end, and selects the anchors of windows."""

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raylance.environment.shared import Shared
from raylance.errors import ConfigError, DatasetError
from raylance.orders.permutation import Int64Array
from raylance.samples.table import IS_PAD, SampleTable
from raylance.samples.windows import Episodes, Windows, WindowTable
from raylance.source.fields import find_field, is_bytes
from raylance.source.lance_errors import LANCE_ERRORS, readable_text
from raylance.source.limits import requests_of
from raylance.source.provenance import KEY
from raylance.source.retrying import patiently
from raylance.source.selection import Selection
from raylance.source.version import Source

_SCAN_ROWS = 1 << 18
# Episodes of the versions that handles of this process have open: training and validation mostly open the same one.
_known: "weakref.WeakValueDictionary[tuple[Any, ...], Episodes]" = weakref.WeakValueDictionary()
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def share_windows(
    source: Source, opened: lance.LanceDataset, windows: Windows | SampleTable, selection: Shared[Selection]
) -> tuple[Shared[SampleTable], Shared[Selection]]:
    """Reads the episodes of a dataset; returns the table of samples and the anchors among the selected rows, as values
    that all processes of a run share.

    Raises:
        DatasetError: If a row has no episode, timestamps are not regular, no selected row is an anchor, or the storage
            fails.
        ConfigError: If offsets in seconds are not whole numbers of rows, or the column of episodes has another type.
    """
    if isinstance(windows, SampleTable):
        nbytes = sum(each.nbytes for each in vars(windows).values() if isinstance(each, np.ndarray))
        shared: Shared[SampleTable] = Shared(f"samples of {source.uri}", windows, nbytes)
        whole: SampleTable = windows
    else:
        whole = table = make_table(source, windows, selection, opened)
        kept, make = table.of_anchors(), functools.partial(_of_anchors, source, windows, selection)
        shared = Shared(f"episodes of {source.uri}", kept, kept.episodes.nbytes, make)
    anchors = select_anchors(source, whole, selection.get())
    again = functools.partial(_select_again, source, windows, selection)
    return shared, Shared(f"anchors of {source.uri}", anchors, anchors.nbytes, again)


def _of_anchors(source: Source, windows: Windows, selection: Shared[Selection]) -> WindowTable:
    return make_table(source, windows, selection).of_anchors()


def _select_again(source: Source, windows: Windows | SampleTable, selection: Shared[Selection]) -> Selection:
    table = make_table(source, windows, selection) if isinstance(windows, Windows) else windows
    return select_anchors(source, table, selection.get())


def make_table(
    source: Source, windows: Windows, selection: Shared[Selection], opened: lance.LanceDataset | None = None
) -> WindowTable:
    """Reads the episodes of a dataset. `opened` is the open dataset; None if it must be opened."""
    key = source.uri, source.version, source.identity, *windows.needs, windows.fps, windows.tolerance_s
    episodes = _known.get(key) or _find_episodes(source, windows, opened)
    _known[key] = episodes
    offsets = windows.in_rows(episodes.fps)
    if windows.neighbours == "selected":
        rows = selection.get()
        episodes = episodes.cut_at(rows.offsets(np.arange(rows.rows)))
    return WindowTable(windows=windows, episodes=episodes, offsets=offsets)


def _find_episodes(source: Source, windows: Windows, opened: lance.LanceDataset | None) -> Episodes:
    dataset = source.open() if opened is None else opened
    try:
        read = functools.partial(_read_episodes, dataset, windows)
        return patiently(read, functools.partial(requests_of, dataset))
    except (ConfigError, DatasetError):
        raise
    except LANCE_ERRORS as error:
        raise DatasetError(
            f"the episodes of {source.uri!r}, version {source.version}, cannot be read ({readable_text(error)}); "
            "nothing was started. Check that its files are there, whole and readable."
        ) from error


def select_anchors(source: Source, samples: SampleTable, rows: Selection) -> Selection:
    """Returns the selected rows that are anchors; their fingerprint also depends on the windows."""
    runs = samples.anchor_runs(rows.rows)
    if runs is not None:
        rows = Selection.from_runs(*runs)
    elif not samples.are_all_anchors:
        rows = Selection.from_offsets(each[samples.are_anchors(each)] for each in _blocks(rows))
    if not rows.rows:
        raise DatasetError(
            f"no selected row of {source.uri!r}, version {source.version}, is the anchor of a sample; nothing was "
            "started. at_ends='drop' leaves out rows without whole windows, and stride= counts from the first possible "
            "row of each episode, selected or not."
        )
    digest = hashlib.blake2b((rows.fingerprint + samples.fingerprint).encode(), digest_size=16)
    return dataclasses.replace(rows, fingerprint=digest.hexdigest())


def check_windows(
    opened: lance.LanceDataset,
    windows: Windows | SampleTable,
    stored: Sequence[str],
    made: Sequence[str],
    decoded: Sequence[str],
) -> None:
    """Checks that windows fit a dataset, whose columns are delivered as they are stored, made by readers, or decoded.

    Raises:
        ConfigError: If a column with a window is not among them, or its windows cannot be tensors.
        DatasetError: If the dataset lacks the column of episodes, or of timestamps, or is a shuffled copy.
    """
    schema = opened.schema
    if isinstance(windows, Windows) and windows.timestamp is None and KEY in (schema.metadata or {}):
        raise DatasetError(
            f"{opened.uri!r} is a copy that jobs/materialize.py made, as {KEY.decode()!r} in its metadata says, whose "
            "rows are shuffled, so that those of an episode do not follow one another; nothing was started. Open its "
            "source with samples=; or, if the rows were sorted again, give timestamp=, by which that is checked."
        )
    for name in windows.needs if isinstance(windows, Windows) else ():
        if name not in schema.names:
            raise DatasetError(
                f"Windows needs the column {name!r}, which {opened.uri!r} does not have; nothing was started. Its "
                f"columns are {', '.join(schema.names)}."
            )
    for name in windows.columns:
        if name not in (*stored, *made):
            raise ConfigError(
                f"Windows: {name!r} is none of the columns that are delivered: {', '.join((*stored, *made))}. Nothing "
                "was started. Put it into columns=: its name, or what decodes it value by value, such as "
                f"raylance.Image({name!r}); or give it no window."
            )
        if f"{name}{IS_PAD}" in {*stored, *made, *decoded} and not (
            isinstance(windows, Windows) and windows.at_ends == "drop"
        ):
            raise ConfigError(
                f"Windows: batches have another column {name + IS_PAD!r}, which is the name of the one that says which "
                f"rows of the window of {name!r} are padding. Nothing was started. Leave it out, or rename it."
            )
        field = find_field(schema, name)
        if name not in made and field is not None and not (is_bytes(field) or _is_dense(field.type)):
            raise ConfigError(
                f"Windows: column {name!r} is {field.type}; windows are of numbers, of lists of one length, or of "
                "bytes. Nothing was started. Store it so, or give it no window."
            )


def _is_dense(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name == "lance.bfloat16" or _is_dense(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return _is_dense(kind.value_type)
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _read_episodes(dataset: lance.LanceDataset, windows: Windows) -> Episodes:
    clock = _Clock(dataset, windows) if windows.timestamp else None
    # For each run of rows of one episode in storage: the episode; the length; the first and the last time, (runs, 2).
    values: list[pa.Array] = []
    counts: list[Int64Array] = []
    spans: list[npt.NDArray[np.float64]] = []
    first = 0
    for batch in dataset.scanner(columns=windows.needs, batch_size=_SCAN_ROWS).to_batches():
        column = batch[windows.episode]
        column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        _check_episodes(dataset, windows.episode, column, first)
        encoded = pc.run_end_encode(column)
        ends = encoded.run_ends.to_numpy().astype(np.int64)
        values.append(encoded.values)
        counts.append(np.diff(ends, prepend=0))
        if clock is not None:
            times = clock.times_of(batch[windows.timestamp], first)
            clock.check_within(times, ends, first)
            spans.append(np.stack([times[np.r_[0, ends[:-1]]], times[ends - 1]], axis=1))
        first += len(column)
    if not values:
        raise DatasetError(f"{dataset.uri!r} is empty, so it has no episodes; nothing was started.")
    lengths = np.concatenate(counts)
    codes = pa.chunked_array(values).dictionary_encode().combine_chunks()
    codes = codes.chunk(0) if isinstance(codes, pa.ChunkedArray) else codes
    numbers = codes.indices.to_numpy().astype(np.int64)
    if clock is not None:
        clock.check_between(numbers, lengths, np.concatenate(spans))
    is_new = np.diff(numbers, prepend=-1) != 0  # a batch may end inside an episode
    starts = np.flatnonzero(is_new)
    fps = windows.fps if clock is None else clock.fps
    return Episodes.of_runs(numbers[starts], np.add.reduceat(lengths, starts), fps)


def _check_episodes(dataset: lance.LanceDataset, name: str, column: pa.Array, first: int) -> None:
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ConfigError(
            f"Windows: the column of episodes {name!r} of {dataset.uri!r} is {kind}; nothing was started. Name a "
            "column of integers or strings."
        )
    if column.null_count:
        row = first + pc.index(column.is_null(), True).as_py()
        raise DatasetError(
            f"Windows: the row at offset {row} of {dataset.uri!r} has no value in {name!r}, so it belongs to no "
            "episode; nothing was started. Give it a value, or delete the row."
        )


class _Clock:
    """Checks that rows of an episode follow one another at one distance in time.

    Attributes:
        fps: Rows a second; None before the first two rows of one episode, if `Windows` does not say it.
    """

    def __init__(self, dataset: lance.LanceDataset, windows: Windows) -> None:
        self.fps, self._tolerance_s = windows.fps, windows.tolerance_s
        self._uri, self._name, self._episode = dataset.uri, windows.timestamp, windows.episode
        self._dtype: np.dtype[Any] = np.dtype(np.int64)  # dtype of the timestamps

    def times_of(self, column: pa.Array, first: int) -> npt.NDArray[np.float64]:
        """Returns timestamps in seconds; `first` is the offset of the first one."""
        kind = column.type
        is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
        if not (is_number or pa.types.is_timestamp(kind)):
            raise ConfigError(
                f"Windows: the column of timestamps {self._name!r} of {self._uri!r} is {kind}, not numbers."
            )
        if column.null_count:
            row = first + pc.index(column.is_null(), True).as_py()
            raise DatasetError(
                f"Windows: the row at offset {row} of {self._uri!r} has no timestamp in {self._name!r}; nothing was "
                "started. Give it one, or leave timestamp= out."
            )
        if pa.types.is_timestamp(kind):
            return np.asarray(column.cast(pa.int64()).to_numpy() * _UNITS[kind.unit])
        values = column.to_numpy()
        self._dtype = values.dtype
        return np.asarray(values, dtype=np.float64)

    def _rounding(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns by how much the distance of two times may be rounded."""
        return 2 * time_rounding(times.astype(self._dtype))

    def check_within(self, times: npt.NDArray[np.float64], ends: Int64Array, first: int) -> None:
        """Checks rows that follow one another in storage; runs of one episode end at the indices `ends`."""
        steps = np.diff(times)
        is_inside = np.ones(len(steps), dtype=np.bool_)
        is_inside[ends[:-1] - 1] = False
        self._check(steps, is_inside, self._rounding(times[1:]), np.arange(1, len(times)) + first)

    def check_between(self, codes: Int64Array, lengths: Int64Array, times: npt.NDArray[np.float64]) -> None:
        """Checks runs that follow one another in their episode, with the times of their first and last rows."""
        by_code = np.argsort(codes, kind="stable")
        begins = (np.cumsum(lengths) - lengths)[by_code]
        firsts, lasts = times[by_code].T
        is_inside = np.diff(codes[by_code]) == 0
        self._check(firsts[1:] - lasts[:-1], is_inside, self._rounding(firsts[1:]), begins[1:])

    def _check(
        self,
        steps: npt.NDArray[np.float64],
        is_inside: npt.NDArray[np.bool_],
        rounding: npt.NDArray[np.float64],
        rows: Int64Array,
    ) -> None:
        if not is_inside.any():
            return
        if self.fps is None:
            found = float(steps[is_inside][0])
            if not found > 0:
                self._refuse(rows[is_inside][0], found, "and how far rows are apart is not known")
            self.fps = 1 / found
        coarse = np.flatnonzero(is_inside & (rounding >= 0.5 / self.fps))
        if len(coarse):
            self._refuse(
                int(rows[coarse[0]]), float(steps[coarse[0]]), f"a type that rounds by {rounding[coarse[0]]:g} s"
            )
        is_right = np.abs(steps - 1 / self.fps) <= self._tolerance_s + rounding  # False for NaN
        wrong = np.flatnonzero(is_inside & ~is_right)
        if len(wrong):
            self._refuse(int(rows[wrong[0]]), float(steps[wrong[0]]), f"instead of {1 / self.fps:g} s")

    def _refuse(self, row: int, step_s: float, why: str) -> None:
        raise DatasetError(
            f"Windows: the row at offset {row} of {self._uri!r} follows the one before it in its {self._episode!r} by "
            f"{step_s:g} s in {self._name!r}, {why} (tolerance_s={self._tolerance_s:g}): rows around it are not where "
            "offsets expect them; nothing was started. If timestamps are only rounded, give fps= and a larger "
            "tolerance_s=; else repair them, or leave the episode out of the dataset."
        )


def time_rounding(times: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Returns by how much the type of times may round each: a float32 of an hour by a quarter of a millisecond."""
    if times.dtype.kind != "f":
        return np.zeros(len(times))
    with np.errstate(invalid="ignore"):  # NaN and infinity
        steps: npt.NDArray[np.float64] = np.spacing(np.abs(times)).astype(np.float64)
    return np.nan_to_num(steps, posinf=0.0)


def _blocks(rows: Selection) -> Iterator[Int64Array]:
    """Yields the offsets of selected rows, some at once."""
    for at in range(0, rows.rows, _SCAN_ROWS):
        yield rows.offsets(np.arange(at, min(at + _SCAN_ROWS, rows.rows)))
