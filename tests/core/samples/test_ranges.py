"""Ranges of values, of which samples are made: parts of them, some of them, and several joined."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raylance.samples.table import Ranges

LENGTH = 30
samples = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(1, 6)), max_size=4), min_size=1, max_size=8
)


def ranges_of(each: list[list[tuple[int, int, int]]]) -> Ranges:
    at, start, size = np.array([piece for pieces in each for piece in pieces], dtype=np.int64).reshape(-1, 3).T
    numbers = np.arange(len(each))
    firsts = np.append(0, np.cumsum([len(pieces) for pieces in each]))
    return Ranges(LENGTH, firsts, at, start, size, after=100 + numbers, padding=200 + numbers)


def lists_of(ranges: Ranges) -> list[tuple[list[tuple[int, int, int]], int, int]]:
    """The ranges of each sample, and its two values."""
    pieces = list(zip(*(each.tolist() for each in (ranges.at, ranges.start, ranges.size)), strict=True))
    bounds = ranges.firsts.tolist()
    parts = [pieces[low:high] for low, high in itertools.pairwise(bounds)]
    return list(zip(parts, ranges.after.tolist(), ranges.padding.tolist(), strict=True))


@given(each=samples, data=st.data())
def test_some_samples_keep_their_ranges(each: list[list[tuple[int, int, int]]], data: st.DataObject) -> None:
    ranges = ranges_of(each)
    wanted = lists_of(ranges)
    chosen = data.draw(st.lists(st.integers(0, len(each) - 1), max_size=9))
    assert lists_of(ranges.take(np.array(chosen, dtype=np.int64))) == [wanted[at] for at in chosen]
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(each))] * 2)))
    assert lists_of(ranges.part(low, high)) == wanted[low:high]
    assert lists_of(Ranges.of([ranges.part(low, high), ranges])) == wanted[low:high] + wanted


@given(each=samples)
def test_where_ranges_lie_in_their_samples(each: list[list[tuple[int, int, int]]]) -> None:
    ranges = ranges_of(each)
    sizes = [[size for _, _, size in pieces] for pieces in each]
    assert ranges.values.tolist() == [sum(of_sample) for of_sample in sizes]
    assert ranges.place.tolist() == [sum(of_sample[:at]) for of_sample in sizes for at in range(len(of_sample))]
    assert ranges.sample.tolist() == [number for number, of_sample in enumerate(sizes) for _ in of_sample]
