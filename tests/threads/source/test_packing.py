"""Packing: every token once, boundaries right."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.decode.sample_reading import read_samples
from raylance.errors import ConfigError, DatasetError
from raylance.samples.pack_tokens import Documents, PackTokens
from raylance.source.packed import DocumentReader
from tests.helpers.in_memory import InMemory

EOS, PAD = 99, 0


@given(
    documents=st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=15).filter(any),
    length=st.integers(1, 9),
    eos=st.booleans(),
    data=st.data(),
)
def test_sequences_are_the_cuts_of_one_string(
    documents: list[list[int]], length: int, eos: bool, data: st.DataObject
) -> None:
    pack = PackTokens("tokens", length, EOS if eos else None, PAD)
    string = [token for document in documents for token in (*document, *([EOS] if eos else []))]
    owners = [2 * row for row, document in enumerate(documents) for _ in range(len(document) + eos)]
    memory = InMemory(pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))}))
    ends = np.cumsum([len(document) + eos for document in documents])
    table = Documents(ends=ends, pack=pack)
    assert table.rows == -(-len(string) // length)
    chosen = sorted(data.draw(st.sets(st.integers(0, table.rows - 1), min_size=1)))
    reader = DocumentReader(reader=memory, names={"tokens": "input_ids"}, ids=np.dtype(np.int64), uri="memory")
    found = read_samples(reader, table.samples(memory.offsets), np.array(chosen, dtype=np.int64))[0].to_pydict()
    for place, sequence in enumerate(chosen):
        tokens = string[sequence * length : (sequence + 1) * length]
        padding = length - len(tokens)
        assert found["input_ids"][place] == tokens + [PAD] * padding
        assert found["doc_ids"][place] == owners[sequence * length : (sequence + 1) * length] + [-1] * padding
        assert found["first_row"][place] == owners[sequence * length]
        before = string[: sequence * length]
        same = [owner for owner in owners[: len(before)] if owner == found["first_row"][place]]
        assert found["first_token"][place] == len(same)


def corpus() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 90, size).tolist() for size in rng.integers(0, 60, 300)]


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    documents = corpus()
    tables = [
        pa.table(
            {"tokens": pa.array(documents[low : low + 90], pa.list_(pa.int32())), "id": range(low, min(low + 90, 300))}
        )
        for low in range(0, 300, 90)
    ]
    return write_dataset(*tables)


def test_every_token_comes_once_through_the_loader(uri: str) -> None:
    pack = PackTokens("tokens", 32, EOS, PAD)
    data = raylance.dataset(uri, filter="id % 3 != 0", samples=pack, order="row", remainder="ragged")
    wanted = [corpus()[row] for row in range(300) if row % 3]
    with data.loader() as loader:
        batches = list(loader.iter_batches(global_batch_size=16))
    ids, docs, begins = (
        np.concatenate([batch[name] for batch in batches]) for name in ("input_ids", "doc_ids", "first_token")
    )
    assert ids.shape == (len(data), 32)
    tokens: dict[int, list[tuple[int, int]]] = {}
    for row, (sequence, owners) in enumerate(zip(ids, docs, strict=True)):
        for owner in np.unique(owners[owners >= 0]):
            start = int(begins[row]) if owner == owners[0] else 0
            places = np.flatnonzero(owners == owner)
            tokens.setdefault(int(owner), []).extend(
                (start + index, int(sequence[place])) for index, place in enumerate(places)
            )
    rebuilt = [[token for _, token in sorted(tokens[row])] for row in sorted(tokens)]
    assert rebuilt == [[*document, EOS] for document in wanted]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array(["a b"]), "is string, not lists of integers"),
        (pa.array([[0.5]]), "is list.*double.*, not lists of integers"),
        (pa.array([[1], None]), "has nulls"),
        (pa.array([[1, None]]), "holds a null instead of a token"),
        (pa.array([[1, 2**63 + 5]], pa.list_(pa.uint64())), "data.lance', .* holds the token 9223372036854775813"),
        (pa.array([[], []], pa.list_(pa.int32())), "holds no token"),
    ],
)
def test_columns_that_hold_no_documents(write_dataset: Callable[..., str], column: pa.Array, message: str) -> None:
    uri = write_dataset(pa.table({"tokens": column}))
    with pytest.raises(DatasetError, match=message):
        raylance.dataset(uri, samples=PackTokens("tokens", 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": PackTokens("text", 8)}, "has no column 'text'"),
        ({"samples": "tokens"}, "samples='tokens'.*raylance.Pack"),
        ({"samples": PackTokens("tokens", 8), "columns": ["id"]}, "columns="),
        ({"samples": PackTokens("tokens", 8), "order": raylance.Weighted(weights="id")}, "packs"),
    ],
)
def test_what_does_not_go_with_packing(uri: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(raylance.RaylanceError, match=message):
        raylance.dataset(uri, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length=0: must be an integer of at least 1"),
        ({"eos_id": 1.5}, "eos_id=1.5: must be an integer"),
        ({"eos_id": 2**63}, "eos_id=9223372036854775808: sequences are of int64"),
        ({"pad_id": None}, "pad_id=None: must be an integer"),
        ({"column": 5}, r"column=5\): give the name"),
    ],
)
def test_settings_that_are_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackTokens(**({"column": "tokens", "length": 8} | arguments))


def test_tokens_of_uint64_are_kept(write_dataset: Callable[..., str]) -> None:
    tokens = [2**63 - 1, 0, 7]
    uri = write_dataset(pa.table({"tokens": pa.array([tokens, []], pa.list_(pa.uint64()))}))
    assert raylance.dataset(uri, samples=PackTokens("tokens", 3)).head(1)["input_ids"].tolist() == [tokens]
