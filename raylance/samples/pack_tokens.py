"""How `PackTokens` cuts the string of all tokens into sequences.

The selected documents, each with its end-of-sequence token, form one string in storage order. A sequence is a part of
it; a table of the documents' ends locates it.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from raylance.arguments import check_integer
from raylance.descriptions import Setting
from raylance.errors import ConfigError
from raylance.orders.permutation import Int64Array
from raylance.samples.packs import PackedSamples, Pieces
from raylance.samples.table import Described, Ranges, range_numbers


@dataclasses.dataclass(frozen=True, slots=True)
class PackTokens(Setting):
    """Joins documents, which are lists of tokens, and cuts the tokens into sequences of one length. Pass it to
    `raylance.dataset` as `samples`. It is to go: new code takes `Pack(column, length=…, shuffle=False, labels=None)`.

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

    block_ends: ClassVar[None] = None  # see `Selected`, as the next one
    tokens: ClassVar[None] = None
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

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Returns `selected`: the offset of a sequence is its number."""
        return selected

    def pieces(self, sequences: Int64Array, epoch: int) -> Pieces:
        """See `PackTable.pieces`; they are the same in each epoch."""
        begins = sequences * self.pack.length
        stops = np.minimum(begins + self.pack.length, self.ends[-1])
        first, last = np.searchsorted(self.ends, begins, side="right"), np.searchsorted(self.ends, stops, side="left")
        counts = last - first + 1
        sequence, document = np.repeat(np.arange(len(sequences)), counts), range_numbers(first, counts)
        opens = np.where(document > 0, self.ends[document - 1], 0)
        low, high = np.maximum(begins[sequence], opens), np.minimum(stops[sequence], self.ends[document])
        kept = np.flatnonzero(high > low)
        return Pieces(sequence[kept], document[kept], (low - opens)[kept], (high - low)[kept])

    def samples(self, documents: Callable[[Int64Array], Int64Array]) -> "CutSamples":
        """See `PackTable.samples`."""
        return CutSamples(self, documents)


class CutSamples(PackedSamples):
    """Sequences with the documents of their tokens."""

    def describe(self, stored: Int64Array, ranges: Ranges) -> dict[str, Described]:
        """See `SampleTable.describe`."""
        of_tokens = np.full((ranges.samples, ranges.length), -1, dtype=np.int64)
        places = np.arange(ranges.length)
        of_tokens[places < ranges.values[:, None]] = np.repeat(stored[ranges.at], ranges.size)
        firsts = ranges.firsts[:-1]
        return {"doc_ids": of_tokens, "first_row": stored[ranges.at[firsts]], "first_token": ranges.start[firsts]}
