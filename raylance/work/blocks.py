"""Columns of windows that come in blocks: each stored row once for a chunk, so that samples are made of them last."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import pyarrow as pa

from raylance.columns import VALID
from raylance.decode.block_rows import of_several
from raylance.memory.arrow import width_of
from raylance.source.encoded_frames import ENCODED, last_keyframe

if TYPE_CHECKING:
    from raylance.opened import ReadSpec  # loads Lance, which decode actors do without

_WIDE_BYTES = 1 << 10  # least bytes of a value; the index that an item has instead takes 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumns:
    """The columns of which readers give samples only the numbers of their rows. The rows come in blocks.

    Attributes:
        sent: Columns that are sent by block as they are stored.
        decoded: Encoded columns, each with the names of the columns that decoders make of it.
        sample_bytes: Bytes of a sample that are not in its row of numbers.
        row_bytes: Bytes of a stored row that decoding adds.
        for_helpers: Encoded columns of which helpers need samples, for a transform or a decoder.
        for_trainer: Those of which the trainer makes samples.
        kinds: Types of the decoded columns, as samples have them.
    """

    sent: Sequence[str] = ()
    decoded: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    sample_bytes: int = 0
    row_bytes: int = 0
    for_helpers: frozenset[str] = frozenset()
    for_trainer: frozenset[str] = frozenset()
    kinds: Mapping[str, pa.DataType] = dataclasses.field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, read_spec: "ReadSpec", *, sends: bool) -> "BlockColumns":
        """Returns the columns of a loader. With `sends`, also those that are worth sending by block: of several rows a
        sample, with wide values of one size, and neither decoded nor transformed in helpers. Neighbouring samples share
        rows, so blocks have fewer bytes than samples.
        """
        samples = read_spec.source.load_samples()
        counts = {} if samples is None else samples.columns
        sizes = _wide_columns(read_spec, counts) if sends else {}
        decoding = read_spec.in_helpers
        shared = None if decoding is None else decoding.of_blocks
        if decoding is None or shared is None:
            return cls(sent=tuple(sizes), sample_bytes=sum(sizes.values()))
        nbytes, items = shared.value_bytes, decoding.of_items
        of_sample = sum(nbytes[each.output_name] * counts.get(each.column, 1) for each in shared.made)
        made = {*shared.names_by_column}
        needed = made if decoding.transform is not None else made & {*(items.columns if items is not None else ())}
        return cls(
            sent=tuple(sizes),
            decoded=shared.names_by_column,
            sample_bytes=sum(sizes.values()) + of_sample,
            row_bytes=sum(nbytes.values()),
            for_helpers=frozenset(needed),
            for_trainer=frozenset(made - needed),
            kinds={each.output_name: of_several(each.arrow_type, counts.get(each.column)) for each in shared.made},
        )

    def fill_in_none(self, items: pa.Table) -> pa.Table:
        """Returns a table of no sample with decoded columns in place of the encoded ones; see `BlockRows.fill_in`."""
        fields = list[pa.Field]()
        for field in items.schema:
            made = [pa.field(name, self.kinds[name]) for name in self.decoded.get(field.name, ())]
            fields += made or [field]
        return pa.schema([*fields, pa.field(VALID, pa.bool_())]).empty_table()

    def cut(self, rows: pa.Table) -> int:
        """Returns after how many rows a block should rather end, so that frames of videos are decoded once."""
        return min((last_keyframe(rows[name]) for name in self.decoded if rows[name].type == ENCODED), default=0)

    @property
    def names(self) -> list[str]:
        """Names of the columns, as they are stored."""
        return [*self.sent, *self.decoded]

    @property
    def tables(self) -> int:
        """Number of the tables that a load gives of its rows: one of `sent`, if any, and one of `decoded`, if any."""
        return bool(self.sent) + bool(self.decoded)


def _wide_columns(read_spec: "ReadSpec", counts: Mapping[str, int]) -> dict[str, int]:
    """Returns the columns that are worth sending by block, with the bytes that a sample has of each."""
    decoding = read_spec.in_helpers
    if read_spec.schema is None or (decoding is not None and decoding.transform is not None):
        return {}
    decoded = [each.column for each in decoding.made] if decoding is not None else []
    return {
        field.name: nbytes
        for field in read_spec.schema
        if counts.get(field.name, 1) > 1
        and field.name not in decoded
        and (nbytes := width_of(field.type)) >= _WIDE_BYTES * counts[field.name]
    }
