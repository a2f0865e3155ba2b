"""What `raylance.report` adds to Ray Train's own: each way of reporting a checkpoint, by two real ranks."""

from pathlib import Path
from typing import Any

import pytest
from ray.train import Checkpoint

import raylance
from raylance.errors import ConfigError
from raylance.integrations import checkpoint_files, checkpoints
from raylance.planning.shard_context import Assignment

BATCH = 100


@pytest.fixture
def loader(images_uri: str) -> raylance.RankLoader:
    return raylance.dataset(images_uri, columns=["id"], order="sequential").loader(runtime="threads")


def save(loader: raylance.RankLoader, position: int, directory: Path, state: dict[str, Any] | None) -> Checkpoint:
    """What a report leaves in a directory that is used for several of them."""
    checkpoint = Checkpoint(directory)
    checkpoint_files.write_files(checkpoint, loader.state_dict() | {"position": position}, state)
    return checkpoint


@pytest.mark.promise("P8")
@pytest.mark.parametrize("held", [b"", b"no state at all", b"PK\x03\x04 cut short"], ids=["empty", "other", "cut"])
def test_a_damaged_state_is_refused_and_nothing_is_moved(
    loader: raylance.RankLoader, tmp_path: Path, held: bytes
) -> None:
    checkpoint = save(loader, 200, tmp_path, {"step": 2})
    (tmp_path / "state.pt").write_bytes(held)
    with pytest.raises(raylance.StateError, match=r"state.pt"):
        raylance.restore(loader, checkpoint)
    assert loader.state_dict()["position"] == 0


def test_of_several_loaders_all_are_moved_or_none(loader: raylance.RankLoader, images_uri: str, tmp_path: Path) -> None:
    other = raylance.dataset(images_uri, columns=["id"], order="sequential", seed=1).loader(runtime="threads")
    states = {name: loader.state_dict() | {"position": 300} for name in ("a", "b")}
    checkpoint = Checkpoint(tmp_path)
    checkpoint_files.write_files(checkpoint, {"format": states["a"]["format"], "loaders": states}, {"step": 3})
    with pytest.raises(raylance.StateError, match="seed"):
        raylance.restore({"a": loader, "b": other}, checkpoint)
    assert loader.state_dict()["position"] == 0
    assert raylance.restore({"a": loader, "b": loader}, checkpoint) == {"step": 3}
    assert loader.state_dict()["position"] == 300


def test_loaders_are_not_reported_under_the_names_of_one_another(images_uri: str) -> None:
    """Of unlike data, a resume would refuse them; of the same data, it exchanged their positions in silence."""
    handle = raylance.dataset(images_uri, columns=["id"])
    a, b = (handle().make_loader(0, 1, raylance.Options(), Assignment(name=name, is_split=True)) for name in "ab")
    for given in ({"a": b, "b": a}, {"b": a, "other": b}):
        with pytest.raises(ConfigError, match=r"'[ab]' was given as '[ab]'"):
            checkpoints._by_name(given)
    for given in ({"a": a, "b": b}, {"a": a}, {"mine": a, "yours": b}):
        assert checkpoints._by_name(given) == given


def test_outside_of_ray_train_the_way_that_works_there_is_named(images_uri: str) -> None:
    with raylance.dataset(images_uri, columns=["id"]).loader(runtime="threads") as loader:
        next(iter(loader.batches(global_batch_size=BATCH)))
        for call in (lambda: raylance.report({"loss": 1}), lambda: raylance.report({"loss": 1}, loader, state={})):
            with pytest.raises(ConfigError, match=r"report\(\).*loader\.state_dict\(\)"):
                call()
        for given in (loader, None):
            with pytest.raises(ConfigError, match=r"restore\(\).*loader\.load_state_dict"):
                raylance.restore(given)
        assert loader.state_dict()["position"] == BATCH


def test_a_file_with_the_name_of_the_state_is_neither_overwritten_nor_restored(
    loader: raylance.RankLoader, tmp_path: Path
) -> None:
    """The user's own, or that of an earlier report to the same directory, which would go with a later position."""
    save(loader, 100, tmp_path, {"step": 1})
    save(loader, 200, tmp_path, {"step": 2})
    with pytest.raises(ConfigError, match=r"state.pt"):
        save(loader, 300, tmp_path, None)
    assert raylance.restore(loader, Checkpoint(tmp_path)) == {"step": 2}
    assert loader.state_dict()["position"] == 200
    (tmp_path / "raylance_state.json").unlink()
    for state in ({"step": 3}, None):
        with pytest.raises(ConfigError, match="holds a state.pt"):
            save(loader, 300, tmp_path, state)


def test_a_checkpoint_without_a_state_needs_a_function_to_load_it(loader: raylance.RankLoader, tmp_path: Path) -> None:
    checkpoint = save(loader, 300, tmp_path, None)
    assert raylance.restore(loader, checkpoint, load=lambda _: None) == {}
    assert loader.state_dict()["position"] == 300
    with pytest.raises(raylance.StateError, match=r"state.pt"):
        raylance.restore(None, checkpoint)
