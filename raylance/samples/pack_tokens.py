"""How `PackTokens` cuts the string of all tokens into sequences.

The selected documents, each with its end-of-sequence token, form one string in storage order. A sequence is a part of
it; a table of the documents' ends locates it.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from raylance.arguments import check_integer
from raylance.errors import ConfigError
from raylance.orders.permutation import Int64Array
from raylance.samples.table import Described, Located, Ranges, ResolvingTable


@dataclasses.dataclass(frozen=True, slots=True)
class PackTokens:
    """Joins documents, which are lists of tokens, and cuts the tokens into sequences of one length. Pass it to
    `raylance.dataset` as `pack`. It is to go: new code takes `Pack(column, length=…, shuffle=False, labels=None)`.

    Attributes:
        column: Column of lists of integers, one document per row.
        length: Number of tokens of a sequence.
        eos_id: Token to put after each document; None for no token.
        pad_id: Token that fills up the last sequence.
    """

    column: str
    length: int
    eos_id: int | None = None
    pad_id: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The column to read."""
        return (self.column,)

    def __post_init__(self) -> None:
        if not (isinstance(self.column, str) and self.column):
            raise ConfigError(f"PackTokens(column={self.column!r}): give the name of the column of tokens.")
        object.__setattr__(self, "length", check_integer("PackTokens: length", self.length, 1))
        tokens = {"pad_id": self.pad_id} | ({} if self.eos_id is None else {"eos_id": self.eos_id})
        for name, token in tokens.items():  # only checked, because the fingerprint includes the repr
            if not -(2**63) <= check_integer(f"PackTokens: {name}", token, None) < 2**63:
                raise ConfigError(f"PackTokens: {name}={token}: sequences are of int64, which cannot hold it.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The sequences as selected rows, computed from the ends of the selected documents in the string of tokens."""

    ends: Int64Array  # tokens up to the end of each document, end-of-sequence tokens included; (documents,)
    pack: PackTokens

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return -(-int(self.ends[-1]) // self.pack.length)

    @property
    def fingerprint(self) -> str:
        """Hash of the ends and the settings."""
        digest = hashlib.blake2b(self.ends.tobytes(), digest_size=16)
        digest.update(repr(self.pack).encode())
        return digest.hexdigest()

    @property
    def block_ends(self) -> None:
        """See `Selected.block_ends`."""

    @property
    def tokens(self) -> None:
        """See `Selected.tokens`."""

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Returns `selected`: the offset of a sequence is its number."""
        return selected

    def samples(self, documents: Callable[[Int64Array], Int64Array]) -> "CutSamples":
        """Returns the samples; `documents` converts numbers of documents into row offsets."""
        return CutSamples(self, documents)


class CutSamples(ResolvingTable):
    """The sequences, by number, as samples of ranges of the selected documents."""

    columns: ClassVar[Mapping[str, int]] = {}

    def __init__(self, table: Documents, documents: Callable[[Int64Array], Int64Array]) -> None:
        """See `Documents.samples`."""
        self._table, self._documents = table, documents

    @property
    def fingerprint(self) -> str:
        """See `SampleTable.fingerprint`."""
        return self._table.fingerprint

    def rows(self, anchors: Int64Array) -> Mapping[str, Int64Array]:
        """See `SampleTable.rows`."""
        return {}

    def resolve(self, anchors: Int64Array) -> tuple[Int64Array, Located]:
        """See `SampleTable.resolve`."""
        pack, ends = self._table.pack, self._table.ends
        begins = anchors * pack.length
        stops = np.minimum(begins + pack.length, ends[-1])
        first, last = np.searchsorted(ends, begins, side="right"), np.searchsorted(ends, stops, side="left")
        counts = last - first + 1
        before = np.cumsum(counts) - counts
        sample = np.repeat(np.arange(len(anchors)), counts)
        document = np.arange(len(sample)) + np.repeat(first - before, counts)
        opens = np.where(document > 0, ends[document - 1], 0)
        low, high = np.maximum(begins[sample], opens), np.minimum(stops[sample], ends[document])
        kept = np.flatnonzero(high > low)
        documents, at = np.unique(document[kept], return_inverse=True)
        ranges = Ranges(
            length=pack.length,
            firsts=np.searchsorted(sample[kept], np.arange(len(anchors) + 1)),
            at=at,
            start=(low - opens)[kept],
            size=(high - low)[kept],
            after=np.full(len(anchors), pack.eos_id or 0),
            padding=np.full(len(anchors), pack.pad_id),
        )
        located = Located(anchors, np.zeros_like(anchors), np.empty((len(anchors), 0), np.int64), ranges)
        return self._documents(documents), located

    def describe(self, stored: Int64Array, ranges: Ranges) -> dict[str, Described]:
        """See `SampleTable.describe`."""
        of_tokens = np.full((ranges.samples, ranges.length), -1, dtype=np.int64)
        places = np.arange(ranges.length)
        of_tokens[places < ranges.values[:, None]] = np.repeat(stored[ranges.at], ranges.size)
        firsts = ranges.firsts[:-1]
        return {"doc_ids": of_tokens, "first_row": stored[ranges.at[firsts]], "first_token": ranges.start[firsts]}
