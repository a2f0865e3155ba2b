"""A namespace that vends credentials, through Ray."""

import lance
import lance_namespace
import pyarrow as pa
import pytest
from lance.namespace import RestAdapter

import raylance
from raylance.errors import DatasetError
from raylance.namespaces import NamespaceTable
from tests.helpers.faulty_store import bucket_of, store_options
from tests.helpers.namespace_tables import ROWS, ids


@pytest.mark.usefixtures("ray_session")
def test_a_table_of_a_rest_service_that_vends_options_of_its_store_is_read_by_threads_and_through_ray(
    s3_port: int,
) -> None:
    bucket_of(s3_port, "lake")
    stored = {f"storage.{name}": value for name, value in store_options(s3_port).items()}
    # What expires in a minute or less is renewed before each request: Lance asks the service while it reads.
    vends = {"vend_input_storage_options": "true", "vend_input_storage_options_refresh_interval_millis": "5000"}
    backend = {"root": "s3://lake/tables", **stored, **vends}
    numbers = pa.table({"id": range(ROWS)})
    lance.write_dataset(numbers, namespace_client=lance_namespace.connect("dir", backend), table_id=["numbers"])
    with RestAdapter("dir", backend, port=0) as service:
        table = NamespaceTable(["numbers"], "rest", {"uri": f"http://127.0.0.1:{service.port}"})
        with pytest.raises(DatasetError, match="absent"):
            raylance.dataset(NamespaceTable("absent", "rest", table.namespace_properties))
        data = raylance.dataset(table)
        assert str(s3_port) not in repr(data), "what the service vends is not shown"
        assert sorted(ids(data)) == [*range(ROWS)]
        assert sorted(ids(data, runtime="ray")) == [*range(ROWS)]
