"""Version pins, filters and row offsets, on real Lance datasets."""

from collections.abc import Callable

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.errors import DatasetError
from raylance.source.filters import depth_of
from raylance.source.lance_errors import describe_odd_option, readable_text
from raylance.source.selection import Selection, select
from raylance.source.version import pin

ranges = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=8)
# Scattered offsets, which are kept as they are, and long runs, which are kept as runs.
offset_sets = st.one_of(
    st.sets(st.integers(0, 300)),
    ranges.map(lambda found: {row for low, size in found for row in range(low, low + size)}),
).map(lambda found: np.array(sorted(found), dtype=np.int64))


@given(offsets=offset_sets, cuts=st.lists(st.integers(0, 300), max_size=4))
def test_offsets_round_trip_however_they_arrive(offsets: np.ndarray, cuts: list[int]) -> None:
    batches = np.split(offsets, sorted(min(cut, len(offsets)) for cut in cuts))
    selection = Selection.from_offsets(batches)
    assert selection.rows == len(offsets)
    np.testing.assert_array_equal(selection.offsets(np.arange(len(offsets))), offsets)
    if len(offsets):
        np.testing.assert_array_equal(selection.offsets(np.array([len(offsets) - 1, 0])), offsets[[-1, 0]])
    probes = np.arange(0, 360)
    np.testing.assert_array_equal(selection.count_before(probes), np.searchsorted(offsets, probes))
    assert selection.fingerprint == Selection.from_offsets([offsets]).fingerprint
    assert selection.nbytes <= 8 * max(1, len(offsets))


@given(left=offset_sets, right=offset_sets)
def test_fingerprints_are_equal_exactly_for_equal_offsets(left: np.ndarray, right: np.ndarray) -> None:
    same = Selection.from_offsets([left]).fingerprint == Selection.from_offsets([right]).fingerprint
    assert same == np.array_equal(left, right)


def numbers(rows: range) -> pa.Table:
    return pa.table({"id": pa.array(rows, pa.int64())})


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    """Version 1: a fragment of 100; 2: and one of 7; 3: without ids 10 to 19. Version 1 is tagged "first"."""
    uri = write_dataset(numbers(range(100)), numbers(range(100, 107)))
    lance.dataset(uri).tags.create("first", 1)
    lance.dataset(uri).delete("id >= 10 and id < 20")
    return uri


def test_a_scalar_index_gives_the_same_selection(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(numbers(range(2000)), numbers(range(2000, 3000)))
    plain = select(pin(uri, None, None), "id >= 500 and id < 2500")
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    assert select(pin(uri, None, None), "id >= 500 and id < 2500").fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("version", "filter", "message"),
    [
        (9, None, "no version 9.*versions 1 to 3"),
        ("best", None, "no tag 'best'"),
        (None, "id >>> 3", "id >>> 3"),
        (None, "colour = 'red'", "cannot be applied.*columns id"),
        (None, "id > 1000", "id > 1000"),
    ],
)
def test_what_is_not_there_is_said(uri: str, version: int | str | None, filter: str | None, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        select(pin(uri, version, None), filter)


def test_what_lance_says_comes_without_its_source_and_without_xml() -> None:
    path = "/home/runner/work/lance/rust/lance/src/dataset.rs:765:44"
    assert readable_text(OSError(f"Not found: x/_versions, {path}, {path}")) == "Not found: x/_versions"
    answer = (
        '<?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code><Message>no such</Message><HostId>7</HostId></Error>'
    )
    assert readable_text(OSError(f"Client error: {answer}, {path}")) == "Client error: NoSuchBucket: no such"
    assert readable_text(OSError("<Error><Code>AccessDenied</Code></Error>")) == "AccessDenied:"


@pytest.mark.parametrize(
    ("uri", "options", "expected"),
    [
        ("s3://b/x", {"aws_endpont": "https://x"}, "'aws_endpont' is unknown: was aws_endpoint meant?"),
        ("s3://b/x", {"request_timeout": "8s"}, "'request_timeout' is unknown: was aws_timeout meant?"),
        ("s3://b/x", {"client_max_retry": "8"}, "'client_max_retry' is unknown: was client_max_retries meant?"),
        ("s3://b/x", {"client_max_retries": "8", "aws_timeout": "8s"}, ""),
        ("s3://b/x", {"Secret_Acces_Key": "x"}, "'Secret_Acces_Key' is unknown: was aws_secret_access_key meant?"),
        ("s3://b/x", {"endpoint_url": "http://x"}, "http://x is not https: set allow_http=true"),
        ("s3://b/x", {"aws_endpoint": "http://x", "aws_allow_http": "true"}, ""),
        ("s3://b/x", {"something_else": "x"}, ""),
        ("s3://b/x", None, ""),
        ("/data/x", {"aws_endpont": "https://x"}, ""),
    ],
)
def test_storage_options_that_are_odd_are_named(uri: str, options: dict[str, str] | None, expected: str) -> None:
    """Only where a dataset does not open: what is unknown here may be known to Lance."""
    assert (expected in describe_odd_option(uri, options)) if expected else (describe_odd_option(uri, options) == "")


# ---- a filter that is too deep


def chains(count: int) -> dict[str, str]:
    """Filters with a chain of `count` operators. Lance ends the process if a chain is too long."""
    return {
        "or": " OR ".join(f"id = {number}" for number in range(count)),
        "and": " AND ".join(f"id != {number}" for number in range(count)),
        "between": "id BETWEEN 1 AND 2" + " AND id BETWEEN 1 AND 2" * count,
        "plus": "id = " + "+".join(["1"] * count),
        "text": "id = length(" + "||".join(["'a'"] * count) + ")",
        "null": "id" + " IS NULL" * count,
        "cast": "id" + "::int" * count + " = 1",
        "equal": "id" + "=1" * count,
        "like": "cast(id as string)" + " LIKE 'a'" * count,
        "nested": "(" * 20 + "id = 0" + "".join("+1" * (count // 20) + ")" for _ in range(20)),
    }


@pytest.mark.parametrize("kind", chains(1))
def test_a_filter_that_would_end_the_process_is_refused(uri: str, kind: str) -> None:
    deep = chains(20_000)[kind]
    with pytest.raises(DatasetError) as caught:
        raylance.dataset(uri, filter=deep)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("count", [100, 2000])
def test_long_filters_that_lance_bears_select_their_rows(uri: str, count: int) -> None:
    numbers = [*range(0, count, 2)]
    listed, by_terms = (
        raylance.dataset(uri, version=1, filter=text)
        for text in (
            f"id IN ({', '.join(map(str, numbers * 20))})",
            " OR ".join(f"(id = -{n} + {n * 2})" for n in numbers),
        )
    )
    assert len(listed) == len(by_terms) == len([number for number in numbers if number < 100])
    assert len(repr(listed)) < 3000


@given(text=st.text("abAND OR()[],'`\"=+-1.", max_size=60))
def test_any_text_has_a_depth(text: str) -> None:
    assert 0 <= depth_of(text) <= len(text) / 100
