"""What the tests of faults share: a store that is well again after each of them."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def calm(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "store" in request.fixturenames:
        request.getfixturevalue("store").disturb("")
