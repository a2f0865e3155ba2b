"""Documents packed into sequences: each token once, neighbours that differ, labels as a plain loop makes them."""

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.samples.packs import Pack, PackTable, best_fit, make_table
from tests.helpers.packing import sequences_of

lengths_of_documents = st.lists(
    st.integers(0, 12) | st.sampled_from([0, 1, 5, 5, 40, 97]), min_size=1, max_size=60
).filter(any)


def table_of(lengths: list[int], seed: int = 3, **settings_: Any) -> PackTable:
    pack = Pack("tokens", **{"length": 10, "block_rows": 16} | settings_)
    return make_table(pack, np.array(lengths, dtype=np.int32), seed, "identity")


def texts_of(lengths: list[int], eos: int | None) -> list[list[tuple[int, int]]]:
    """The tokens of each document, as (document, number of the token)."""
    return [[(at, token) for token in range(length + (eos is not None))] for at, length in enumerate(lengths)]


@pytest.mark.promise("P1")
@given(
    lengths=lengths_of_documents,
    eos=st.none() | st.just(7),
    length=st.integers(1, 50),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_a_stream_is_the_string_of_all_tokens(
    lengths: list[int], eos: int | None, length: int, shuffle: bool, epoch: int
) -> None:
    table = table_of(lengths, length=length, eos_id=eos, shuffle=shuffle)
    found = [[token for piece in pieces for token in piece] for pieces in sequences_of(table, epoch)]
    assert all(len(each) == length for each in found[:-1]), "only the last sequence has padding"
    string = [token for each in found for token in each]
    texts = texts_of(lengths, eos)
    for first in range(0, len(lengths), 16):  # each block is the documents of that block, in some order
        block = [token for text in texts[first : first + 16] for token in text]
        own, string = string[: len(block)], string[len(block) :]
        assert sorted(own) == sorted(block)
        order = list(dict.fromkeys(document for document, _ in own))
        assert own == [token for document in order for token in texts[document]], "a document is in one stretch"
        assert shuffle or order == sorted(order)
    assert not string


@pytest.mark.promise("P1")
@given(
    lengths=lengths_of_documents,
    eos=st.none() | st.just(7),
    length=st.integers(2, 50),
    too_long=st.sampled_from(["split", "truncate", "drop"]),
    epoch=st.integers(0, 3),
)
def test_whole_documents_are_never_cut_and_bins_are_few(
    lengths: list[int], eos: int | None, length: int, too_long: str, epoch: int
) -> None:
    texts = texts_of(lengths, eos)
    if too_long == "drop" and not any(0 < len(text) <= length for text in texts):
        return
    table = table_of(lengths, length=length, eos_id=eos, policy="whole", too_long=too_long)
    found = sequences_of(table, epoch)
    pieces = Counter(tuple(piece) for each in found for piece in each)
    wanted = Counter[tuple[tuple[int, int], ...]]()
    for text in texts:
        cut = [tuple(text[at : at + length]) for at in range(0, len(text), length)]
        wanted.update({"split": cut, "truncate": cut[:1], "drop": cut if len(cut) == 1 else []}[too_long])
    assert pieces == wanted
    assert all(0 < sum(map(len, each)) <= length for each in found)
    assert len(found) == len(sequences_of(table, epoch + 1)), "every epoch has the same number of sequences"
    bins = 0
    for first in range(0, len(lengths), 16):  # first fit decreasing, by a plain loop
        rooms: list[int] = []
        sizes = sorted((len(p) for p in wanted.elements() if first <= p[0][0] < first + 16), reverse=True)
        for size in sizes:
            at = next((at for at, room in enumerate(rooms) if room >= size), None)
            if at is None:
                rooms.append(length - size)
            else:
                rooms[at] -= size
        bins += len(rooms)
    assert len(found) <= bins * 11 / 9 + 1


@given(sizes=st.lists(st.integers(1, 30), max_size=80))
def test_each_piece_goes_to_the_fullest_bin_with_room(sizes: list[int]) -> None:
    sizes = sorted(sizes, reverse=True)
    found, count = best_fit(np.array(sizes, dtype=np.int64), 30)
    rooms: list[int] = []
    for size in sizes:
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms[rooms.index(min(fitting))] -= size
        else:
            rooms.append(30 - size)
    held = np.bincount(found, weights=sizes, minlength=count).astype(int) if sizes else np.zeros(0, dtype=int)
    assert sorted(30 - held) == sorted(rooms)


@given(lengths=st.lists(st.integers(3, 9), min_size=30, max_size=60), policy=st.sampled_from(["stream", "whole"]))
@settings(max_examples=10)
def test_any_sequence_is_found_by_itself(lengths: list[int], policy: str) -> None:
    table = table_of(lengths, policy=policy)
    whole = sequences_of(table, 2)
    sent: PackTable = pickle.loads(pickle.dumps(table))
    for number in range(table.rows):
        pieces = sent.pieces(np.array([number]), 2)
        assert [
            [(document, token) for token in range(start, start + size)]
            for _, document, start, size in zip(*(each.tolist() for each in pieces), strict=True)
        ] == whole[number]


def test_lognormal_lengths_leave_little_padding_and_neighbours_differ_each_epoch() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 50_000), 16, 1024).astype(np.int32)
    for length in (2048, 4096):
        table = make_table(Pack("tokens", length=length, policy="whole"), lengths, 0, "")
        assert 1 - lengths.sum() / (table.rows * length) < 0.005
    together = []
    for epoch in (0, 1):
        pieces = table.pieces(np.arange(table.rows), epoch)
        pairs = zip(pieces.document[:-1].tolist(), pieces.document[1:].tolist(), strict=True)
        is_same = (pieces.sequence[1:] == pieces.sequence[:-1]).tolist()
        together.append({pair for pair, same in zip(pairs, is_same, strict=True) if same})
    assert len(together[0] & together[1]) < 0.05 * len(together[0])


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"columns": []}, "columns"),
        ({"columns": ["tokens", "labels"]}, "labels"),
        ({"columns": ["tokens", "mask", "mask"]}, "mask"),
        ({"length": 0}, "length"),
        ({"policy": "cut"}, "policy"),
        ({"labels": "next"}, "labels"),
        ({"label_mask": "mask"}, "label_mask"),
        ({"too_long": "keep"}, "too_long"),
        ({"block_rows": 0}, "block_rows"),
        ({"pad_id": 2**31}, "pad_id"),
        ({"eos_id": 1.5}, "eos_id"),
    ],
)
def test_settings_that_cannot_be(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Pack(**{"columns": "tokens", "length": 8} | arguments)
