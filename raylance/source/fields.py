"""Names of a schema's fields, those inside structs included, such as "image.bytes"."""

import pyarrow as pa
import pyarrow.compute as pc


def find_field(schema: pa.Schema, name: str) -> pa.Field | None:
    """Returns the field of a column, or one inside its structs; None if there is none. Columns' names have no dots."""
    root, *inner = name.split(".")
    if (at := schema.get_field_index(root)) < 0:  # also of a name that occurs twice
        return None
    field: pa.Field = schema.field(at)
    for part in inner:
        if not pa.types.is_struct(field.type) or (at := field.type.get_field_index(part)) < 0:
            return None
        field = field.type.field(at)
    return field


def is_blob(field: pa.Field) -> bool:
    """Whether a field is blob-encoded, by either encoding version: a plain read gives descriptors, not bytes."""
    return (field.metadata or {}).get(b"lance-encoding:blob") == b"true" or str(field.type).startswith(
        "extension<lance.blob"
    )


def is_bytes(field: pa.Field) -> bool:
    """Whether the values of a field are bytes, in the row or as a blob."""
    return is_blob(field) or pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type)


def blobs_inside(field: pa.Field, name: str) -> list[str]:
    """Returns the names of the blobs inside a field that is not a blob itself; `name` is its own name."""
    if is_blob(field):
        return []
    inner = [field.type.field(place) for place in range(field.type.num_fields)]
    named = [(f"{name}.{each.name}", each) for each in inner]
    return [blob for path, each in named for blob in ([path] if is_blob(each) else blobs_inside(each, path))]


def leaf_names(field: pa.Field, name: str) -> list[str]:
    """Returns the names of the fields inside a struct, at any depth; `name` alone if the field is not a struct."""
    if is_blob(field) or not pa.types.is_struct(field.type):
        return [name]
    inner = [field.type.field(place) for place in range(field.type.num_fields)]
    return [leaf for each in inner for leaf in leaf_names(each, f"{name}.{each.name}")]


def select_fields(table: pa.Table, names: list[str]) -> pa.Table:
    """Returns columns of a table by their names; a null struct gives nulls for the fields inside it."""
    if table.column_names == names:
        return table
    columns = []
    for name in names:
        root, *inner = [name] if name in table.column_names else name.split(".")
        columns.append(pc.struct_field(table[root], inner) if inner else table[root])
    return pa.table(columns, names=names)
