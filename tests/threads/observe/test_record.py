"""A run's folder: any name that Ray takes is found as Ray writes it."""

import os
import re
import string
from pathlib import Path

import pyarrow.fs
import pytest
import ray.train
from hypothesis import assume, example, given
from hypothesis import strategies as st

import raylance
from raylance.errors import ConfigError
from raylance.integrations.checkpoint_files import as_checkpoint

NAMES = st.text(st.characters(exclude_characters="/\0\\", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
ODD = st.text(string.punctuation.replace("/", "").replace("\\", "") + "a0 é", min_size=1, max_size=8)
STORAGES = ["file:///tmp/runs", "s3://bucket/runs?region=us-east-1", "s3://bucket/my runs/a%?region=us-east-1"]


@pytest.mark.parametrize("storage", STORAGES)
@given(name=(NAMES | ODD).filter(lambda name: name not in (".", "..")))
@example("lr=0.1#2").via("another run's folder")
@example("what?")
@example("a?lr=1")
@example("100%41")
@example("a b")
def test_a_name_is_what_ray_makes_of_it(storage: str, name: str) -> None:
    # Whether there is a folder with %41 or one with A is asked for; of S3, by the network.
    assume(storage.startswith("file") or not re.search("%[0-9a-fA-F]{2}", f"{storage}/{name}"))
    place, _, options = storage.partition("?")
    filesystem, path = raylance.runs.open_folder(f"{place}/{name}" + f"?{options}" * bool(options))
    inside = place.partition("://")[2]
    assert path == f"/{inside.lstrip('/')}/{name}" if place.startswith("file") else path == f"{inside}/{name}"
    kind = pyarrow.fs.LocalFileSystem if place.startswith("file") else pyarrow.fs.S3FileSystem
    assert isinstance(filesystem, kind)


@pytest.mark.parametrize("name", ["lr=0.1#2", "what?", "100%41", "a b", "é", "a?region=b", "x&y=1", "[a]{b}|c^"])
def test_a_run_is_found_where_ray_wrote_it(name: str, tmp_path: Path) -> None:
    """As Ray Train joins storage path and name, on a disk; beside a run with the name that a URI would cut."""
    storage = pyarrow.fs.FileSystem.from_uri(tmp_path.as_uri())[1]
    for each in (name, "lr=0.1", "what", "100A"):
        (Path(storage) / each).mkdir(exist_ok=True)
        (Path(storage) / each / "own").write_text(each)
    found, path = raylance.runs.open_folder(f"{tmp_path.as_uri()}/{name}")
    assert found.open_input_stream(f"{path}/own").read().decode() == name
    checkpoint = as_checkpoint(f"{tmp_path.as_uri()}/{name}")
    assert isinstance(checkpoint, ray.train.Checkpoint)
    assert os.listdir(checkpoint.path) == ["own"]
    assert Path(checkpoint.path, "own").read_text() == name


def test_an_encoded_storage_path_is_decoded_if_that_is_what_there_is(tmp_path: Path) -> None:
    """Ray Train decodes %20 in a storage path, so its folder has the space."""
    (tmp_path / "my runs" / "a").mkdir(parents=True)
    assert raylance.runs.open_folder(f"file://{tmp_path}/my%20runs/a")[1] == str(tmp_path / "my runs" / "a")
    (tmp_path / "my%20runs" / "a").mkdir(parents=True)
    assert raylance.runs.open_folder(f"file://{tmp_path}/my%20runs/a")[1] == str(tmp_path / "my%20runs" / "a")


def test_a_local_uri_with_one_slash_is_found_and_one_with_a_host_is_refused(tmp_path: Path) -> None:
    """Ray Train takes file:/runs for /runs; of file://runs/a, /a was read, which may be another run."""
    assert raylance.runs.open_folder(f"file:{tmp_path}/a#1")[1] == f"{tmp_path}/a#1"
    assert raylance.runs.open_folder(f"file://localhost{tmp_path}/a")[1] == f"{tmp_path}/a"
    with pytest.raises(ConfigError, match="'runs'"):
        raylance.runs.open_folder("file://runs/a")
