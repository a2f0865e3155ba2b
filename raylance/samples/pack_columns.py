"""The columns of packed sequences that follow from their tokens and from where pieces of documents begin.

Readers give one bit a token, which says where a piece begins. Positions, segments and labels are made of it on the side
of the trainer, so that nobody holds or sends them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from raylance.orders.permutation import Int32Array, Int64Array
from raylance.samples.packs import INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS, Pack

TOKENS_AT_ONCE = 1 << 20
"""Tokens whose columns are best made together: with fewer, threads wait for the GIL more often; with more, arrays do
not stay in the processor's cache.
"""

Bits = npt.NDArray[np.uint8]


def fill_columns(
    pack: Pack, begins: Bits, tokens: Int32Array, read: Mapping[str, npt.NDArray[Any]], into: Mapping[str, Int32Array]
) -> None:
    """Computes `position_ids`, `segment_ids`, and `labels` if there are any.

    Args:
        pack: The setting.
        begins: The column `BEGINS`, uint8, (n, ceil(length / 8)).
        tokens: The column `TOKENS`, int32, (n,).
        read: The columns that were read, each (n, length).
        into: Where to put the results, int32, (n, length).
    """
    rows = max(1, TOKENS_AT_ONCE // pack.length)
    names = [] if pack.labels is None else [INPUT_IDS, *([pack.label_mask] if pack.label_mask else [])]
    counting = np.arange(min(rows, len(tokens)) * pack.length, dtype=np.int32)
    for begin in range(0, len(tokens), rows):
        part = slice(begin, begin + rows)
        made = {name: array[part].reshape(-1) for name, array in into.items()}
        of_part = {name: read[name][part].reshape(-1) for name in names}
        _fill(pack, begins[part], tokens[part], counting, of_part, made)


def _fill(
    pack: Pack,
    begins: Bits,
    tokens: Int32Array,
    counting: Int32Array,
    read: Mapping[str, npt.NDArray[Any]],
    into: Mapping[str, Int32Array],
) -> None:
    length = pack.length
    padded = np.flatnonzero(tokens < length)
    is_begin = np.unpackbits(begins, axis=1, count=length)
    is_begin[padded, tokens[padded]] = 1  # padding is a piece, too
    firsts = np.flatnonzero(is_begin.reshape(-1).view(np.bool_))  # ten times as fast as for uint8
    sizes = np.diff(firsts, append=len(tokens) * length)
    paddings = np.searchsorted(firsts, padded * length + tokens[padded])
    padding = _ranges(firsts[paddings], sizes[paddings])

    before = np.repeat(firsts.astype(np.int32), sizes)
    positions = np.subtract(counting[: len(before)], before, out=into[POSITION_IDS])
    positions[padding] = 0

    first_of_row = np.searchsorted(firsts, np.arange(len(tokens)) * length)
    numbers = (np.arange(len(firsts)) - first_of_row[firsts // length]).astype(np.int32)
    numbers[paddings] = -1
    into[SEGMENT_IDS][:] = np.repeat(numbers, sizes)

    if pack.labels is not None:
        _fill_labels(pack, firsts, padding, read, into[LABELS])


def _fill_labels(
    pack: Pack, firsts: Int64Array, padding: Int64Array, read: Mapping[str, npt.NDArray[Any]], labels: Int32Array
) -> None:
    """Computes the label of each token. `firsts` are the tokens with which pieces and padding begin, `padding` all
    tokens of padding: both are no labels.
    """
    ids = read[INPUT_IDS]
    shift = 1 if pack.labels == "shifted" else 0
    labels[: len(ids) - shift] = ids[shift:]
    labels[len(ids) - shift :] = pack.ignore_index
    if pack.label_mask is not None:
        np.copyto(labels[: len(ids) - shift], pack.ignore_index, where=read[pack.label_mask][shift:] == 0)
    labels[firsts[1:] - shift if shift else firsts] = pack.ignore_index
    labels[padding] = pack.ignore_index


def _ranges(firsts: Int64Array, sizes: Int64Array) -> Int64Array:
    """Returns the numbers of all ranges that begin at `firsts` and have `sizes` numbers."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(firsts - before, sizes) + np.arange(int(sizes.sum()))
