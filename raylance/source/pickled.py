"""Refuses columns whose values a reader would unpickle."""

from typing import Any

import pyarrow as pa

from raylance.errors import DatasetError

_NAME = "ray.data.arrow_pickled_object"  # a type that Ray Data registers with Arrow; `to_numpy` unpickles its values


def refuse_pickled(schema: pa.Schema, where: str) -> None:
    """Raises DatasetError if a schema has columns of Ray Data's pickled objects; the message names them."""
    if found := [field.name for field in schema if _is_pickled(field)]:
        raise DatasetError(
            f"{where} has pickled objects in {', '.join(map(repr, found))}, which Ray Data wrote: to read them would "
            "run the code that they name. Nothing was read. Write these columns as numbers, strings, bytes or lists."
        )


def _is_pickled(field: pa.Field) -> bool:
    """Whether a field, or a field in it, has the type `_NAME`. Without Ray Data, only the metadata names the type."""
    kind: Any = field.type
    names = (getattr(kind, "extension_name", ""), (field.metadata or {}).get(b"ARROW:extension:name", b"").decode())
    if _NAME in names:
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return _is_pickled(pa.field("", kind.storage_type))
    if pa.types.is_dictionary(kind):
        return _is_pickled(pa.field("", kind.value_type))
    return any(_is_pickled(kind.field(number)) for number in range(kind.num_fields))
