"""Tags that keep the versions of a run from clean-ups."""

import datetime
import threading
from collections.abc import Callable
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError
from raylance.runs import pin, unpin
from tests.helpers.videos import encode, scene, write_videos


def rows(begin: int) -> pa.Table:
    return pa.table({"id": [*range(begin, begin + 4)]})


def clean_up(uri: str) -> list[int]:
    """The versions that a clean-up leaves."""
    opened = lance.dataset(uri)
    opened.cleanup_old_versions(older_than=datetime.timedelta(0), error_if_tagged_old_versions=False)
    return [each["version"] for each in lance.dataset(uri).versions()]


def test_versions_stay_until_a_run_needs_them_no_more(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(rows(0))
    first = raylance.dataset(uri)
    pin(first, "llm-7b")
    pin(first, "llm-7b")
    for begin in (4, 8):
        lance.write_dataset(rows(begin), uri, mode="append")
    assert clean_up(uri) == [1, 3]
    second = raylance.dataset(uri)
    for run in ("llm-7b", "llm", "llm-7b.b"):  # names of which one contains another one
        pin(second, run)
    unpin(first, "llm-7b.b")
    unpin(second, "llm")
    lance.write_dataset(rows(12), uri, mode="append")
    assert clean_up(uri) == [1, 3, 4]
    assert first.take([3])["id"].tolist() == [3]
    unpin(second, "llm-7b")
    unpin(second, "llm-7b")
    assert lance.dataset(uri).tags.list() == {}
    assert clean_up(uri) == [4]


def test_all_datasets_of_a_mixture_and_branches_are_pinned(write_dataset: Callable[..., str]) -> None:
    uris = [write_dataset(rows(0)) for _ in range(2)]
    trial = lance.dataset(uris[1]).create_branch("trial/one")
    lance.write_dataset(rows(4), trial.uri, mode="append")
    lance.write_dataset(rows(8), uris[1], mode="append")
    branch = raylance.dataset(uris[1], version=("trial/one", None))
    parts = {"a": (raylance.dataset(uris[0]), 1), "b": (branch, 1), "c": (raylance.dataset(uris[1]), 1)}
    mixed = raylance.mix(parts)
    pin(mixed, "run")
    found = [[each["branch"] for each in lance.dataset(uri).tags.list().values()] for uri in uris]
    assert found[0] == [None]
    assert sorted(found[1], key=str) == [None, "trial/one"]
    unpin(mixed, "run")
    assert [lance.dataset(uri).tags.list() for uri in uris] == [{}, {}]


def test_videos_are_pinned_too(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    videos = write_videos(str(tmp_path / "videos.lance"), [encode(scene(0, 8))], "2.1")
    frames = pa.table({"video": [0] * 8, "frame": [*range(8)]})
    columns = ["frame", raylance.Video("top", videos, video="video", frame="frame")]
    data = raylance.dataset(write_dataset(frames), columns=columns)
    pin(data, "run")
    assert [*lance.dataset(videos).tags.list()] == ["raylance--run--1"]
    unpin(data, "run")
    assert lance.dataset(videos).tags.list() == {}


def test_all_ranks_may_pin_at_once(write_dataset: Callable[..., str]) -> None:
    data, errors = raylance.dataset(write_dataset(rows(0))), list[Exception]()

    def many() -> None:
        try:
            for number in range(5):
                pin(data, f"run{number}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("run", ["", "a b", "a/b", "..", 3, "a.", "a--b", "a.lock", "x" * 60 + " "])
def test_a_name_that_is_no_tag_is_refused(write_dataset: Callable[..., str], run: str) -> None:
    data = raylance.dataset(write_dataset(rows(0)))
    for change in (pin, unpin):
        with pytest.raises(ConfigError):
            change(data, run)
        with pytest.raises(ConfigError):
            change("uri", "run")  # type: ignore[arg-type]
