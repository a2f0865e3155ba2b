"""How rows are changed on their way: labels, lists, images, splits."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.common import RefusedError
from jobs.create_dataset.fitting import fit
from jobs.create_dataset.labels import is_text, to_labels
from jobs.create_dataset.sources import SPLIT, Left, replaced, to_splits, where_from
from jobs.materialize.images import Reencode, why_no_image


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is done to each row; sent to every task."""

    schema: pa.Schema  # of the dataset
    source: pa.Schema  # of the first rows, which all others must fit
    label: str | None  # column whose strings become integers by `classes`
    classes: list[str] | None
    images: Reencode | None
    looks_at: str | None  # column of images that stay as they are, which are looked at
    decodes: bool  # whether these are decoded whole, and not their headers alone
    split_by: tuple[str, ...]  # columns whose content decides the split; none where the source names its splits
    val_fraction: float  # of the rows that are called val
    seed: int  # of that choice
    ragged: dict[str, tuple[int, int]]  # fewest and most values of the first lists of floats of no one length

    def apply(self, table: pa.Table, name: str) -> pa.Table:
        """Shapes a table; `name` says where it is from.

        Raises:
            ValueError: If its columns, or the lengths of its lists, are not those of the first rows, if a value would
                not be the same among them, and for rows without a label or a split.
        """
        where = where_from(table, name)
        table = fit(table, self.source, where)
        if self.split_by:
            table = table.append_column(SPLIT, self._draw_splits(table))
        else:
            table = replaced(table, SPLIT, to_splits(table[SPLIT], where))
        if self.label is not None:
            table = replaced(table, self.label, self._number(table[self.label], where))
        for field in self.schema:
            if pa.types.is_fixed_size_list(field.type) and not pa.types.is_fixed_size_list(table[field.name].type):
                check_lengths(table[field.name], field.type.list_size, field.name, where)
        return table.cast(self.schema)

    def encode(self, table: pa.Table, where: Callable[[int], str]) -> pa.Table:
        """Encodes the images of a shaped table as `images` says; `where` names the source of a row.

        Raises:
            ValueError: If an image can't be decoded.
        """
        if self.images is None:
            return table
        column = self.images.column
        return self.images.apply(
            table,
            lambda row, error: ValueError(
                f"{where(row)} has no image in {column} that can be decoded ({error}). It can't be encoded. Repair it, "
                "leave it out, or give neither --shorter-side nor --jpeg-quality: then all images stay as they are."
            ),
        )

    def no_images(self, table: pa.Table, where: Callable[[int], str]) -> list[Left]:
        """Which rows of a shaped table hold no image, as far as this looks: they are kept, and training meets them."""
        if self.looks_at is None:
            return []
        found = []
        for row, value in enumerate(table[self.looks_at]):
            if value.is_valid and (why := why_no_image(value.as_py(), whole=self.decodes)):
                found.append(Left(where(row), why))
        return found

    def _number(self, column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
        # A label that is none would be a class of its own to a loss, or an error in the middle of an epoch.
        labels = to_labels(column, self.classes or []) if is_text(column.type) else column
        if labels.null_count:
            raise ValueError(absent(self.label or "", labels.null_count, len(labels), where))
        limits = pc.min_max(labels).as_py()
        if self.classes is not None and len(labels) and not 0 <= limits["min"] <= limits["max"] < len(self.classes):
            is_odd = pc.or_(pc.less(labels, 0), pc.greater_equal(labels, len(self.classes)))
            odd = labels.filter(is_odd)
            raise ValueError(
                f"{self.label} is {odd[0]} in {len(odd):,} of {len(labels):,} rows of {where}, and there are "
                f"{len(self.classes):,} classes, from 0 on. They would have none. Give them a label, or leave them out "
                "(of a Lance dataset by --filter)."
            )
        return labels

    def _draw_splits(self, table: pa.Table) -> pa.Array:
        # A hash of the content: it depends on no order, and copies of a row never end up on both sides.
        key = str(self.seed).encode()
        columns = [contents(table[name]) for name in self.split_by]
        draws = []
        for parts in zip(*columns, strict=True):
            digest = hashlib.blake2b(digest_size=8, key=key)
            for part in parts:
                digest.update(part)
            draws.append(int.from_bytes(digest.digest(), "big") / 2**64)
        return pa.array(["val" if draw < self.val_fraction else "train" for draw in draws], pa.string())


def schema_of(first: pa.Table, keep_lists: Sequence[str]) -> pa.Schema:
    """The schema of the dataset, from its first rows: lists of floats that are all of one length get it for good."""
    fields = []
    for field in plain(first.schema):
        kind = field.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list and pa.types.is_floating(kind.value_type) and field.name not in keep_lists:
            lengths = pc.unique(pc.list_value_length(first[field.name])).to_pylist()
            if len(lengths) == 1 and lengths[0]:
                kind = pa.list_(kind.value_type, lengths[0])
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def plain(first: pa.Schema) -> pa.Schema:
    """A schema without dictionaries, of which each block has its own, and without what is noted beside the fields."""
    kinds = [field.type.value_type if pa.types.is_dictionary(field.type) else field.type for field in first]
    return pa.schema([pa.field(name, kind) for name, kind in zip(first.names, kinds, strict=True)])


def lengths_of(first: pa.Table, schema: pa.Schema) -> dict[str, tuple[int, int]]:
    """The fewest and the most values of lists of floats that the schema leaves as lists."""
    found = {}
    for field in schema:
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type):
            limits = pc.min_max(pc.list_value_length(first[field.name]))
            found[field.name] = limits["min"].as_py(), limits["max"].as_py()
    return found


def is_image(kind: pa.DataType) -> bool:
    """Whether it is how the `datasets` library stores images: their bytes beside a path."""
    return bool(kind == pa.struct({"bytes": pa.binary(), "path": pa.string()}))


def take_bytes(table: pa.Table, name: str) -> pa.Table:
    """Puts the bytes of images in the place of what the `datasets` library makes of them.

    Raises:
        ValueError: If an image is a path alone: it would be lost.
    """
    encoded = pc.struct_field(table[name], "bytes")
    if lost := encoded.null_count - table[name].null_count:
        raise ValueError(
            f"column {name} has {lost:,} images that are paths without bytes in {where_from(table, 'the source')}. "
            "They would be lost. Save them with their bytes."
        )
    return replaced(table, name, encoded)


def absent(label: str, count: int, rows: int, where: str) -> str:
    """The error of rows without a label."""
    return (
        f"{count:,} of {rows:,} rows of {where} have no {label}. They would have no class. Fill them, or leave them "
        f'out (of a Lance dataset by --filter "{label} IS NOT NULL").'
    )


def check_lengths(column: pa.ChunkedArray, length: int, name: str, where: str) -> None:
    """Refuses lists of another length than the first ones."""
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if None in lengths:
        raise ValueError(
            f"column {name} is null in {column.null_count:,} rows of {where}, and has {length} values in the first "
            f"rows. It would be no vector. Fill them, or give --keep-lists {name} to store lists and nulls."
        )
    if other := [found for found in lengths if found != length]:
        raise ValueError(
            f"column {name} has a list of {other[0]} values in {where}, and {length} in the first rows. It would be no "
            f"vector. Give --keep-lists {name} to store lists of any length."
        )


def contents(column: pa.ChunkedArray) -> Iterator[Any]:
    """The bytes of each value."""
    kind = column.type
    for chunk in column.chunks:
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            yield from (value.as_buffer() or b"" for value in chunk)
        elif pa.types.is_fixed_size_list(kind) and (
            pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)
        ):
            # Nulls may not change how their neighbours in a chunk are read: equal rows lie in other chunks, too.
            values = chunk.flatten()  # without those of lists that are null
            if pa.types.is_integer(kind.value_type):
                values = values.fill_null(0)
            rows = iter(values.to_numpy(zero_copy_only=False).reshape(-1, kind.list_size))
            yield from (next(rows).tobytes() if valid else b"" for valid in chunk.is_valid().to_pylist())
        else:
            yield from (repr(value).encode() for value in chunk.to_pylist())


def check_columns(source: pa.Schema, asked: Sequence[tuple[str, str | None]]) -> None:
    """Refuses columns that the source does not have; each is asked for by an option, or is None."""
    for flag, name in asked:
        if name is not None and name not in source.names:
            raise RefusedError(
                f"{flag} {name} is none of the columns {', '.join(source.names)}. The option would do nothing. Name "
                "one of them."
            )
