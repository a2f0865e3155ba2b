"""What is large and shared: one copy a run, however many ranks there are, and none that cannot be had again."""

import pickle
from collections.abc import Callable

import pytest

import raylance
from tests.helpers.large_values import LARGE, first_ids, large_table


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(large_table())


@pytest.mark.parametrize("name", LARGE)
def test_a_handle_is_pickled_without_ray(uri: str, name: str) -> None:
    dataset = raylance.dataset(uri, columns=["id"], **LARGE[name]())
    copy = pickle.loads(pickle.dumps(dataset))
    assert first_ids(copy.loader()) == first_ids(dataset.loader())
