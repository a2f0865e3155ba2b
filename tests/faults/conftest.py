"""What the tests of faults share: a disturbed S3 API for each module, which is well again after each of its tests."""

from collections.abc import Iterator

import lance
import pytest

from tests.helpers.faulty_store import FaultyStore, bucket_of, store_options


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest, s3_port: int) -> Iterator[FaultyStore]:
    """A proxy before the bucket of the module's `URI`, where its `TABLE` lies in three files, if it has one."""
    uri, table = request.module.URI, getattr(request.module, "TABLE", None)
    bucket_of(s3_port, uri.split("/")[2])
    proxy = FaultyStore(s3_port)
    if table is not None:
        arguments = {"max_rows_per_file": len(table) // 3, "storage_options": store_options(s3_port)}
        lance.write_dataset(table, uri, mode="overwrite", **arguments)
    yield proxy
    proxy.close()


@pytest.fixture(autouse=True)
def calm(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "store" in request.fixturenames:
        request.getfixturevalue("store").disturb("")
