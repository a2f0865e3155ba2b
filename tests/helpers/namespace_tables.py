"""Tables of a Lance namespace in a folder."""

from pathlib import Path
from typing import Any

import lance
import lance_namespace
import pyarrow as pa
import pytest

import raylance

ROWS = 500


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A directory namespace with the table `numbers`, and `nested`.`numbers`, which has the rows twice."""
    root = str(tmp_path / "lake")
    catalog = lance_namespace.connect("dir", {"root": root})
    catalog.create_namespace(lance_namespace.CreateNamespaceRequest(id=["nested"]))
    numbers = pa.table({"id": range(ROWS)})
    lance.write_dataset(numbers, namespace_client=catalog, table_id=["numbers"])
    lance.write_dataset(pa.concat_tables([numbers, numbers]), namespace_client=catalog, table_id=["nested", "numbers"])
    return root


def ids(handle: raylance.Dataset, runtime: Any = "threads") -> list[int]:
    with handle.loader(runtime=runtime) as loader:
        return [number for batch in loader.iter_batches(global_batch_size=50) for number in batch["id"].tolist()]
