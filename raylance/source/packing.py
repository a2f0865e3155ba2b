"""Opens packed documents: finds their lengths, and how they are packed."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raylance.descriptions import written
from raylance.environment.shared import Shared
from raylance.errors import DatasetError, filter_of_nulls
from raylance.memory.arrow import sum_lists
from raylance.orders.permutation import Int64Array
from raylance.planning.pace import Pace
from raylance.samples.pack_tokens import Documents, PackTokens
from raylance.samples.packs import Pack, PackTable, find_bins, make_table
from raylance.source.costs import FEW_ROWS, Costs, TokensOf, check_cost, load_costs
from raylance.source.fields import find_field
from raylance.source.packed import PackCompletion, PackedRows, tokens_of
from raylance.source.rows import Completion, RowSource
from raylance.source.selection import Selection
from raylance.source.version import Source

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 16 << 20  # bytes of documents to read at once
_FIRST_ROWS = 4  # documents in the first read, because their size is unknown
_PACKING = 1  # the number of the way in which bins are found; another way needs another number


@dataclasses.dataclass(frozen=True, slots=True)
class AddedTokens:
    """A cost: how many tokens the images of a document have, without one for each, its placeholder.

    Attributes:
        media: See `Pack.media`.
    """

    media: Any

    @property
    def reads(self) -> Sequence[str]:
        """See `MeasuredCost.reads`."""
        reads: Sequence[str] = self.media.reads
        return reads

    def measure(self, rows: pa.Table, *, heads: bool = False) -> Int64Array:
        """See `MeasuredCost.measure`."""
        patches, lengths = self.media.measure_images(rows, heads=heads)
        return sum_lists(np.where(patches < 0, -1, tokens_of(self.media, patches) - 1), lengths)


def pack_sequences(
    source: Source, opened: lance.LanceDataset, documents: RowSource, pack: Pack, seed: int, folder: Any
) -> PackedRows:
    """Packs the documents of a dataset; reads their lengths now, unless a file has them.

    Raises:
        DatasetError: If a column has another type; also as `make_table`, `check_cost` and `share_costs`.
    """
    _check_columns(opened, pack)
    column = pack.names[0]
    costs = [check_cost(opened, TokensOf(column), folder, f"Pack: the length of {column!r}")]
    if pack.expand:
        added = check_cost(opened, AddedTokens(pack.media), folder, f"Pack: the tokens of {pack.media}")
        costs.append(dataclasses.replace(added, may_be_zero=True))
    make = functools.partial(_make_table, source, costs, documents, pack, seed)
    table = make(opened)
    if left_out := table.tokens_left_out:
        logger.warning(
            '%s: too_long="%s" leaves out %s of %s tokens.',
            source.uri,
            pack.too_long,
            f"{left_out:,}",
            f"{int(table.lengths.sum(dtype=np.int64)):,}",
        )
    shared = Shared(f"lengths in {pack.names[0]}", table, table.nbytes, make)
    row_bytes = pack.length * (4.0 * len(pack.names) + 0.125)
    measure = "of 4 bytes a token and column that is read, and one bit"
    if pack.media is not None:
        row_bytes += documents.row_bytes * len(table.lengths) / table.rows
        measure += ", and the images of a few documents"
    return _packed(documents, shared, pack, pack.outputs, row_bytes, measure, "int32", PackCompletion(pack))


def pack_rows(documents: RowSource, pack: PackTokens) -> PackedRows:
    """Packs the documents of a dataset; reads their lengths now. Raises DatasetError: see `count_tokens`."""
    make = functools.partial(count_tokens, documents, pack)
    table = make()
    shared = Shared(f"lengths in {pack.column}", table, table.ends.nbytes, make)
    columns = ("input_ids", "doc_ids", "first_row", "first_token")
    return _packed(documents, shared, pack, columns, 16.0 * pack.length, "of 16 bytes a token", "int64", None)


def _packed(
    documents: RowSource,
    table: Shared[Any],
    pack: Pack | PackTokens,
    columns: Sequence[str],
    row_bytes: float,
    measure: str,
    ids: str,
    completion: Completion | None,
) -> PackedRows:
    return PackedRows(
        uri=documents.uri,
        branch=documents.branch,
        version=documents.version,
        identity=documents.identity,
        windows=written(pack),
        columns=columns,
        row_bytes=row_bytes,
        likely_row_bytes=row_bytes,
        measure=measure,
        sample_bytes=row_bytes,
        documents=documents,
        table=table,
        pack=pack,
        ids=ids,
        completion=completion,
    )


def _make_table(
    source: Source,
    costs: Sequence[Costs],
    documents: RowSource,
    pack: Pack,
    seed: int,
    opened: lance.LanceDataset | None = None,
) -> PackTable:
    rows = documents.load_selection()
    if not isinstance(rows, Selection):
        raise TypeError(f"{type(rows).__name__} is not the selection of one table")
    dataset, bins = opened or source.open(), None
    lengths, *added = (load_costs(source, dataset, each, rows) for each in costs)
    for tokens in added:
        lengths = lengths + tokens
    if rows.rows > FEW_ROWS and pack.policy == "whole":
        # Bins depend on fewer settings, but these are all that there are in most cases.
        name = hashlib.blake2b(f"{costs[0].name(source, rows)} {pack} {_PACKING}".encode(), digest_size=16).hexdigest()
        bins = costs[0].files.keep(f"{name}.bins.npy", functools.partial(find_bins, pack, lengths))
    return make_table(pack, lengths, seed, rows.fingerprint, bins)


def count_tokens(source: RowSource, pack: PackTokens) -> Documents:
    """Reads the lengths of all selected documents, some MiB at once. Raises DatasetError if the column holds other
    types than lists of integers, a null, a token beyond int64, or no token.
    """
    documents, reader = source.load_selection(), source.open_reader()
    lengths = [np.empty(0, dtype=np.int64)]
    pace, start = Pace(target_bytes=_BLOCK_BYTES, row_bytes=1, limit_rows=_FIRST_ROWS), 0
    while start < documents.rows:
        rows = np.arange(start, min(start + pace.next_rows(), documents.rows), dtype=np.int64)
        column = reader.read(documents.offsets(rows))[pack.column]
        start += len(rows)
        pace.record(len(rows), column.nbytes)
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
            raise DatasetError(
                f"PackTokens: column {pack.column!r} is {kind}, not lists of integers; nothing was started. Tokenise "
                "first, and store one list of token ids a row."
            )
        if column.null_count:
            raise DatasetError(
                f"PackTokens: column {pack.column!r} has nulls instead of documents; nothing was started. Leave "
                f"them out: {filter_of_nulls(pack.column)}."
            )
        tokens = column.combine_chunks().flatten()
        if tokens.null_count:
            raise DatasetError(
                f"PackTokens: a document of column {pack.column!r} holds a null instead of a token; nothing was "
                "started. Write the dataset without null tokens."
            )
        if pa.types.is_uint64(kind.value_type) and (most := pc.max(tokens).as_py() or 0) >= 2**63:
            raise DatasetError(
                f"PackTokens: a document of column {pack.column!r} of {source.uri!r}, version {source.version}, holds "
                f"the token {most}, and sequences are of int64, which cannot hold it; nothing was started. Write the "
                "dataset with token ids of less than 2**63."
            )
        lengths.append(pc.list_value_length(column).to_numpy().astype(np.int64))
    ends = np.cumsum(np.concatenate(lengths) + (pack.eos_id is not None), dtype=np.int64)
    if not len(ends) or ends[-1] == 0:
        raise DatasetError(f"PackTokens: column {pack.column!r} holds no token, so there is no sequence to make.")
    return Documents(ends=ends, pack=pack)


def _check_columns(opened: lance.LanceDataset, pack: Pack) -> None:
    """Raises DatasetError if the columns are not lists of numbers, or the first one's are not integers."""
    for name in pack.names:
        field = find_field(opened.schema, name)
        kind: Any = None if field is None else field.type
        is_ids, is_list = name == pack.names[0], isinstance(kind, pa.ListType | pa.LargeListType)
        is_whole = is_list and pa.types.is_integer(kind.value_type)
        if not is_whole and (is_ids or not is_list or not pa.types.is_floating(kind.value_type)):
            wanted = "integers" if is_ids else "numbers"
            raise DatasetError(
                f"Pack: column {name!r} of {opened.uri!r} is {kind}, not lists of {wanted}; nothing was started. Store "
                "one list a document, with one value for each token."
            )
