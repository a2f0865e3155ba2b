"""Keyed hashing and the Feistel bijection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.orders.permutation import derive_key, permute, row_rng, subkeys, uniform, unpermute

keys = st.integers(0, 2**64 - 1)


@given(n=st.integers(1, 5000), key=keys)
def test_is_a_bijection(n: int, key: int) -> None:
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@given(n=st.integers(1, 2**62), key=keys, data=st.data())
def test_inverse_at_any_size(n: int, key: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    image = permute(index, n, key)
    assert image.min() >= 0
    assert image.max() < n
    np.testing.assert_array_equal(unpermute(image, n, key), index)


@given(cases=st.lists(st.tuples(st.integers(1, 10_000), keys), min_size=1, max_size=20))
def test_many_domains_at_once_equal_one_by_one(cases: list[tuple[int, int]]) -> None:
    sizes = np.array([n for n, _ in cases], dtype=np.int64)
    many = permute(sizes - 1, sizes, np.array([key for _, key in cases], dtype=np.uint64))
    assert many.tolist() == [int(permute(n - 1, n, key)) for n, key in cases]


@pytest.mark.parametrize("shapes", [((5,), (1,), ()), ((1, 4), (3, 1), (3, 1)), ((), (3,), (3,)), ((2, 2), (), (2, 2))])
def test_arguments_are_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    index, n, key = (
        low + step * np.arange(np.prod(shape)).reshape(shape)
        for shape, low, step in zip(shapes, (0, 5, 7), (1, 90, 1), strict=True)
    )
    whole = permute(index, n, key)
    one_by_one = [int(permute(*each)) for each in np.broadcast(index, n, key)]
    assert (whole.shape, whole.dtype) == (np.broadcast_shapes(*shapes), np.int64)
    assert whole.ravel().tolist() == one_by_one


# Frozen. Whoever changes these makes every checkpoint that exists resume on other rows: raise state.FORMAT as well.
GOLDEN = {
    (1, 0): [0],
    (10, 7): [9, 1, 3, 2, 7, 4, 5, 8, 0, 6],
    (10**10, 5): [708784352, 9445868844, 4921361356, 8424318075, 1809093320],
}


@pytest.mark.parametrize(("n", "key"), GOLDEN)
def test_golden_permutations(n: int, key: int) -> None:
    wanted = GOLDEN[n, key]
    assert permute(np.arange(len(wanted)), n, key).tolist() == wanted


def test_golden_keys_and_numbers() -> None:
    assert derive_key(0, 1, "window") == 11577790840076578142
    assert subkeys(1, [0, 1]).tolist() == [11385487063155714807, 658006869215568080]
    assert uniform(subkeys(1, [0]), 2)[0].tolist() == [0.5225540511444501, 0.2864190728595838]


def test_golden_row_generators() -> None:
    raw = row_rng(1, 2, np.int64(3)).bit_generator.random_raw(2)
    assert raw.tolist() == [8895896060035382607, 18250708782240277499]


def test_keys_are_hashes_and_not_sums() -> None:
    parts = [(0, 1), (1, 0), (0, "1"), ("0", 1), (1,), (10,), (1, 0, 0), (-1, 2)]
    assert len({derive_key(*part) for part in parts}) == len(parts)


def test_all_permutations_of_four_are_about_equally_frequent() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for key in range(4800):
        image = tuple(permute(np.arange(4), 4, derive_key(key)).tolist())
        counts[image] = counts.get(image, 0) + 1
    assert len(counts) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < 49.7  # the 99.9 % point of chi-square with 23 degrees of freedom


def test_numbers_are_uniform_and_stable_in_the_number_of_draws() -> None:
    numbers = uniform(subkeys(3, np.arange(20_000)), 4)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    np.testing.assert_allclose(numbers.mean(axis=0), 0.5, atol=0.01)
    np.testing.assert_allclose(np.corrcoef(numbers.T) - np.eye(4), 0, atol=0.03)
    np.testing.assert_array_equal(uniform(subkeys(3, np.arange(5)), 2), numbers[:5, :2])
