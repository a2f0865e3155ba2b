"""Rows of datasets with deletions are those that Lance takes, of any fragments, in the order that is asked for."""

from collections.abc import Callable

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylance.source.live_rows import LiveRows

BLOB = pa.field("file", pa.large_binary(), metadata={"lance-encoding:blob": "true"})


@pytest.fixture(scope="module", params=[False, True], ids=["addresses", "stable row ids"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    """Five fragments: one whole, one without its first rows, one with holes, one of which two rows are left."""
    uri, ids = str(tmp_path_factory.mktemp("data") / "data.lance"), np.arange(100)
    table = pa.table(
        [
            ids,
            [f"text {each}" for each in ids],
            [{"x": each, "y": str(each)} for each in ids],
            [b"%d" % each for each in ids],
        ],
        schema=pa.schema(
            [("id", pa.int64()), ("text", pa.string()), ("in", pa.struct({"x": pa.int64(), "y": pa.string()})), BLOB]
        ),
    )
    lance.write_dataset(table, uri, max_rows_per_file=20, enable_stable_row_ids=request.param)
    lance.dataset(uri).delete("id >= 20 AND id < 27 OR id >= 40 AND id < 60 AND id % 3 = 0 OR id >= 62 AND id < 80")
    return lance.dataset(uri)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_rows_are_those_that_are_there(dataset: lance.LanceDataset, data: st.DataObject) -> None:
    ids = dataset.to_table(columns=["id"])["id"].to_numpy()
    asked = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), min_size=1)))
    live = LiveRows(dataset)
    table = live.take(np.array(asked), ["text", "id"])
    assert table.equals(dataset.take(asked, columns=["text", "id"]))
    assert table["id"].to_pylist() == ids[asked].tolist()
    fields = live.take(np.array(asked), ["in.y", "id", "in.x"])  # not in the order in which they are stored
    assert fields["in.y"].to_pylist() == [str(each) for each in fields["id"].to_pylist()]
    assert fields["in.x"].equals(fields["id"])
    found = dataset.read_blobs("file", addresses=live.addresses(np.array(asked)), preserve_order=True)
    assert [value for _, value in found] == [b"%d" % ids[each] for each in asked]


def test_no_row_is_read_one_by_one(write_dataset: Callable[..., str]) -> None:
    """Lance's own take of an offset counts the deleted rows of its fragment: this took minutes."""
    uri = write_dataset(pa.table({"id": np.arange(200_000)}))
    lance.dataset(uri).delete("id % 40 = 7")
    dataset = lance.dataset(uri)
    asked = np.arange(0, dataset.count_rows(), 3)
    ids = dataset.to_table()["id"].to_numpy()
    assert LiveRows(dataset).take(asked, ["id"])["id"].to_pylist() == ids[asked].tolist()
