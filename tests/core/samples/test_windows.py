"""Windows against a plain list: which rows each sample has, and which of them are padding."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.errors import ConfigError
from raylance.samples.windows import Episodes, WindowTable

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)
OFFSETS = st.lists(st.integers(-5, 5), min_size=1, max_size=5).map(tuple)


def episodes_of(codes: list[int]) -> Episodes:
    runs = [(code, len(list(run))) for code, run in itertools.groupby(codes)]
    return Episodes.of_runs(np.array([code for code, _ in runs]), np.array([length for _, length in runs]))


def make(episodes: Episodes, offsets: dict[str, tuple[int, ...]], **settings: Any) -> WindowTable:
    windows = raylance.Windows(episode="e", offsets=offsets, **settings)
    return WindowTable(windows=windows, episodes=episodes, offsets=windows.in_rows(None))


def window(codes: list[int], anchor: int, offsets: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    """The row offsets of a window, and which are padding, by a list of the episode's rows."""
    mine = [row for row, code in enumerate(codes) if code == codes[anchor]]
    at = mine.index(anchor)
    rows = [mine[min(max(0, at + offset), len(mine) - 1)] for offset in offsets]
    return rows, [not 0 <= at + offset < len(mine) for offset in offsets]


@given(lengths=LENGTHS, first=OFFSETS, second=OFFSETS, is_mixed=st.booleans(), data=st.data())
def test_a_sample_has_the_rows_of_its_episode(
    lengths: list[int], first: tuple[int, ...], second: tuple[int, ...], is_mixed: bool, data: st.DataObject
) -> None:
    codes = [code for code, length in enumerate(lengths) for _ in range(length)]
    if is_mixed:  # rows of an episode are not stored together
        codes = data.draw(st.permutations(codes))
    table = make(episodes_of(codes), {"a": first, "b": second})
    anchors = np.array(data.draw(st.lists(st.integers(0, len(codes) - 1), min_size=1, max_size=20)))
    stored = table.stored(anchors)
    assert (np.diff(stored) > 0).all()
    located = table.locate(stored, anchors)
    found = table.find(stored, located)
    needed = set()
    for place, anchor in enumerate(anchors.tolist()):
        assert stored[located.at[place]] == anchor
        for name, offsets in (("a", first), ("b", second)):
            rows, is_pad = window(codes, anchor, offsets)
            needed |= {anchor, *rows}
            assert stored[found.windows[name][place]].tolist() == rows
            assert found.pads[name][place].tolist() == is_pad
    assert needed <= set(stored.tolist()) <= needed | set(range(len(codes)))


@given(lengths=LENGTHS, offsets=OFFSETS, stride=st.integers(1, 4), is_dropped=st.booleans(), data=st.data())
def test_anchors_have_whole_windows_and_their_distance(
    lengths: list[int], offsets: tuple[int, ...], stride: int, is_dropped: bool, data: st.DataObject
) -> None:
    codes = data.draw(st.permutations([code for code, length in enumerate(lengths) for _ in range(length)]))
    episodes = episodes_of(codes)
    table = make(episodes, {"a": offsets}, at_ends="drop" if is_dropped else "pad", stride=stride)
    wanted = []
    for code in dict.fromkeys(codes):
        mine = [row for row, each in enumerate(codes) if each == code]
        whole = [row for row in mine if not is_dropped or not any(window(codes, row, offsets)[1])]
        wanted += whole[::stride]
    are = table.are_anchors(np.arange(len(codes)))
    assert np.flatnonzero(are).tolist() == sorted(wanted)
    assert not table.are_all_anchors or are.all()


@given(lengths=LENGTHS, offsets=OFFSETS, data=st.data())
def test_episodes_that_end_at_unselected_rows(
    lengths: list[int], offsets: tuple[int, ...], data: st.DataObject
) -> None:
    codes = data.draw(st.permutations([code for code, length in enumerate(lengths) for _ in range(length)]))
    selected = sorted(data.draw(st.sets(st.integers(0, len(codes) - 1), min_size=1)))
    table = make(episodes_of(codes).cut_at(np.array(selected)), {"a": offsets})
    stored = table.stored(np.array(selected))
    assert set(stored.tolist()) == set(selected), "no other row is read"
    found = table.find(stored, table.locate(stored, np.array(selected)))
    pieces = {}  # the rows of an episode up to one that is not selected
    for code in dict.fromkeys(codes):
        mine = [row for row, each in enumerate(codes) if each == code]
        for number, row in enumerate(mine):
            if row in selected:
                before = mine[number - 1] if number else None
                pieces[row] = pieces.get(before, f"{row}")
    renamed = [list(dict.fromkeys(pieces.values())).index(pieces[row]) for row in selected]
    for place, row in enumerate(selected):
        rows, is_pad = window(renamed, place, offsets)
        assert stored[found.windows["a"][place]].tolist() == [selected[each] for each in rows], row
        assert found.pads["a"][place].tolist() == is_pad


def test_offsets_in_seconds_are_whole_rows() -> None:
    windows = raylance.Windows(episode="e", offsets={"x": [0]}, seconds={"y": [-0.1, 0, 0.05]}, fps=20)
    assert windows.in_rows(20) == {"x": (0,), "y": (-2, 0, 1)}
    with pytest.raises(ConfigError, match=r"0\.07 s.*1\.4 rows at 20 rows"):
        raylance.Windows(episode="e", seconds={"y": [0.07]}, fps=20).in_rows(20)
    with pytest.raises(ConfigError, match="tolerance_s=0.03"):
        raylance.Windows(episode="e", seconds={"y": [0.07]}, fps=20, tolerance_s=0.03).in_rows(20)
    with pytest.raises(ConfigError, match="'y'"):
        raylance.Windows(episode="e", seconds={"y": [1e300]}, fps=1e3).in_rows(1e3)
    with pytest.raises(ConfigError, match="fps="):
        raylance.Windows(episode="e", seconds={"y": [0.1]}, timestamp="t").in_rows(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no column has a window"),
        ({"offsets": {"x": []}}, "'x'"),
        ({"offsets": {"x": [0.5]}}, "0.5"),
        ({"offsets": {"x": "ab"}}, "'ab'"),
        ({"offsets": [1]}, r"\[1\]"),
        ({"offsets": {"x": [0]}, "seconds": {"x": [0.1]}, "fps": 10}, "'x'"),
        ({"seconds": {"x": [0.1]}}, "fps="),
        ({"seconds": {"x": [float("nan")]}, "fps": 10}, "nan"),
        ({"offsets": {"x": [0]}, "fps": 0}, "fps=0"),
        ({"offsets": {"x": [0]}, "stride": 0}, "stride"),
        ({"offsets": {"x": [0]}, "at_ends": "wrap"}, "'wrap'"),
        ({"offsets": {"x": [0]}, "episode": ""}, "episode"),
        ({"offsets": {"x": [0]}, "timestamp": 5}, "timestamp=5"),
        ({"offsets": {"x": [0]}, "tolerance_s": None}, "tolerance_s=None"),
        ({"offsets": {"x": [2**62]}}, "'x'"),
        ({"offsets": {"x": [-(2**63)]}}, "'x'"),
        ({"offsets": {"x": [2**63]}}, "x"),
        ({"offsets": {"x": np.array(3)}}, "array"),
    ],
)
def test_settings_that_cannot_be_honoured(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raylance.Windows(**({"episode": "e"} | arguments))
