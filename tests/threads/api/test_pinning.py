"""Tags that keep the versions of a run from clean-ups."""

import datetime
from collections.abc import Callable

import lance
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError


def rows(begin: int) -> pa.Table:
    return pa.table({"id": [*range(begin, begin + 4)]})


def clean_up(uri: str) -> list[int]:
    """The versions that a clean-up leaves."""
    opened = lance.dataset(uri)
    opened.cleanup_old_versions(older_than=datetime.timedelta(0), error_if_tagged_old_versions=False)
    return [each["version"] for each in lance.dataset(uri).versions()]


def test_versions_stay_until_a_run_has_ended_well(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(rows(0))
    first = raylance.dataset(uri)
    with pytest.raises(KeyboardInterrupt), raylance.runs.pinned(first, "llm-7b"):
        lance.write_dataset(rows(4), uri, mode="append")
        lance.write_dataset(rows(8), uri, mode="append")
        raise KeyboardInterrupt
    assert clean_up(uri) == [1, 3]
    second = raylance.dataset(uri)
    with raylance.runs.pinned(second, "llm-7b"), raylance.runs.pinned(second, "llm"):
        with raylance.runs.pinned(first, "llm-7b-b"):  # a name that contains another one
            lance.write_dataset(rows(12), uri, mode="append")
        assert clean_up(uri) == [1, 3, 4]
        assert first.take([3])["id"].tolist() == [3]
    assert lance.dataset(uri).tags.list() == {}
    assert clean_up(uri) == [4]


def test_all_datasets_of_a_mixture_and_branches_are_pinned(write_dataset: Callable[..., str]) -> None:
    uris = [write_dataset(rows(0)) for _ in range(2)]
    trial = lance.dataset(uris[1]).create_branch("trial")
    lance.write_dataset(rows(4), trial.uri, mode="append")
    parts = {"a": (raylance.dataset(uris[0]), 1), "b": (raylance.dataset(uris[1], version=("trial", None)), 1)}
    with raylance.runs.pinned(raylance.mix(parts), "run"):
        found = [[*lance.dataset(uri).tags.list().values()] for uri in uris]
        assert [len(tags) for tags in found] == [1, 1]
        assert found[1][0]["branch"] == "trial"
    assert [lance.dataset(uri).tags.list() for uri in uris] == [{}, {}]


@pytest.mark.parametrize("run", ["", "a b", "a/b", "..", 3, "a."])
def test_a_name_that_is_no_tag_is_refused(write_dataset: Callable[..., str], run: str) -> None:
    data = raylance.dataset(write_dataset(rows(0)))
    with pytest.raises(ConfigError), raylance.runs.pinned(data, run):
        pass
    with pytest.raises(ConfigError), raylance.runs.pinned("uri", "run"):  # type: ignore[arg-type]
        pass
