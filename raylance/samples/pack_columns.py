"""The columns of packed sequences that follow from their tokens and from where pieces of documents begin.

Readers give the places at which pieces begin. Positions, segments and labels are made of them on the side of the
trainer, so that nobody holds or sends them. They are made by sums and copies, which do not hold the GIL.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from raylance.orders.permutation import Int32Array, Int64Array
from raylance.samples.packs import INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS, Pack
from raylance.samples.table import range_numbers

TOKENS_AT_ONCE = 1 << 20
"""Tokens whose columns are best made together: with fewer, threads wait for the GIL more often; with more, arrays do
not stay in the processor's cache.
"""


def fill_columns(
    pack: Pack,
    places: npt.NDArray[Any],
    ends: npt.NDArray[Any],
    tokens: Int32Array,
    read: Mapping[str, npt.NDArray[Any]],
    into: Mapping[str, Int32Array],
) -> None:
    """Computes `position_ids`, `segment_ids`, and `labels` if there are any.

    Args:
        pack: The setting.
        places: The places of sequences with which pieces of documents begin, integers, (pieces,).
        ends: The index of the first of these for each sequence, and their number, integers, (n + 1,).
        tokens: The column `TOKENS`, int32, (n,).
        read: The columns that were read, each (n, length).
        into: Where to put the results, int32, (n, length).
    """
    rows = max(1, TOKENS_AT_ONCE // pack.length)
    names = [] if pack.labels is None else [INPUT_IDS, *([pack.label_mask] if pack.label_mask else [])]
    for begin in range(0, len(tokens), rows):
        part, bounds = slice(begin, begin + rows), ends[begin : begin + rows + 1].astype(np.int64)
        made = {name: array[part].reshape(-1) for name, array in into.items()}
        of_part = {name: read[name][part].reshape(-1) for name in names}
        _fill(pack, places[bounds[0] : bounds[-1]], bounds - bounds[0], tokens[part], of_part, made)


def by_axis(ids: npt.NDArray[Any], segments: Int32Array, placeholder: int, grids: Int64Array, merge: int) -> Int32Array:
    """Returns the positions of tokens by time, height and width, int32, (n, 3, length); 0 in padding.

    Args:
        ids: Tokens of sequences, (n, length).
        segments: Their `segment_ids`, (n, length).
        placeholder: The token that stands for a part of an image.
        grids: The numbers of patches of each image in time, height and width, in the order of the tokens, (m, 3).
        merge: Patches that become a token, by height and by width.
    """
    merged = grids[grids.prod(axis=1) > 0] // np.array([1, merge, merge])  # images without a size have no tokens
    sizes, count = merged.prod(axis=1), ids.shape[1]
    tokens, pieces = ids.reshape(-1), segments.reshape(-1)
    places = np.flatnonzero(tokens == placeholder)
    steps = np.ones(len(tokens), dtype=np.int64)  # how far the next token is, from each token
    steps[places] = 0
    steps[places[np.cumsum(sizes) - 1]] = merged.max(axis=1, initial=0)
    before = np.cumsum(steps) - steps
    firsts = np.flatnonzero((np.diff(pieces, prepend=-2) != 0) | (np.arange(len(tokens)) % count == 0))
    before -= np.repeat(before[firsts], np.diff(firsts, append=len(tokens)))
    found = np.repeat(before[:, None], 3, axis=1)
    within, wide = range_numbers(np.zeros_like(sizes), sizes), np.repeat(merged[:, 2], sizes)
    plane = np.repeat(merged[:, 1] * merged[:, 2], sizes)
    found[places] += np.stack([within // plane, within % plane // wide, within % wide], axis=1)
    found[pieces < 0] = 0
    return found.reshape(-1, count, 3).transpose(0, 2, 1).astype(np.int32)


def _fill(
    pack: Pack,
    places: npt.NDArray[Any],
    ends: Int64Array,
    tokens: Int32Array,
    read: Mapping[str, npt.NDArray[Any]],
    into: Mapping[str, Int32Array],
) -> None:
    begins, counts = np.arange(len(tokens)) * pack.length, np.diff(ends)
    padded = np.flatnonzero(tokens < pack.length)
    paddings = ends[1:][padded] + np.arange(len(padded))  # padding is a piece, too: the last one of its sequence
    firsts = np.insert(np.repeat(begins, counts) + places, ends[1:][padded], begins[padded] + tokens[padded])
    numbers = np.insert(np.arange(len(places)) - np.repeat(ends[:-1], counts), ends[1:][padded], -1)
    sizes = np.diff(firsts, append=len(tokens) * pack.length)
    padding = range_numbers(firsts[paddings], sizes[paddings])

    # Sums of differences: from one token to the next, and from the end of a piece to the begin of the next one.
    positions, lasts = into[POSITION_IDS], sizes - 1
    lasts[paddings] = 0
    positions[:] = 1
    positions[padding] = 0
    positions[firsts] = np.append(0, -lasts[:-1])
    np.add.accumulate(positions, out=positions)

    segments = into[SEGMENT_IDS]
    segments[:] = 0
    segments[firsts] = np.diff(numbers, prepend=0)
    np.add.accumulate(segments, out=segments)

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
