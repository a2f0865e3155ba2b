"""The first tier: pure code, which loads neither Ray nor Lance."""

import sys
from collections.abc import Iterator

import pytest

HEAVY = {"lance", "ray"}


@pytest.fixture(scope="session", autouse=True)
def without_ray_and_lance() -> Iterator[None]:
    """Fails if a test of this tier loads one of them, in a process that runs no other tier."""
    absent = HEAVY - sys.modules.keys()
    yield
    assert not absent & sys.modules.keys()
