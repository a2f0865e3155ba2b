"""Shared values of a run, as references into the object store."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.environment.shared import Shared
from raylance.samples.pack_tokens import PackTokens
from tests.helpers.large_values import LARGE, first_ids, large_table


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(large_table())


@pytest.fixture(scope="module")
def tokens_uri(write_dataset: Callable[..., str]) -> str:
    documents = pa.ListArray.from_arrays(np.arange(200_001, dtype=np.int32), pa.array(np.arange(200_000)))
    return write_dataset(pa.table({"tokens": documents}))


def loaders_of_run(dataset: raylance.Dataset, ranks: int) -> list[raylance.RankLoader]:
    return [out["train"] for out in raylance.DataConfig().configure({"train": dataset}, ranks, None, None)]


@pytest.mark.parametrize("name", LARGE)
def test_ranks_of_a_run_get_references(uri: str, ray_session: None, name: str) -> None:
    import ray

    dataset = raylance.dataset(uri, columns=["id"], **LARGE[name]())
    expected = first_ids(dataset.loader(runtime="threads"))
    loaders = loaders_of_run(dataset, 3)
    sizes = [len(ray.cloudpickle.dumps(loader)) for loader in loaders]
    assert max(sizes) < 20_000, "a table of this dataset has more than three megabytes"

    @ray.remote(num_cpus=0)
    def rank_in_a_worker(loader: raylance.RankLoader) -> list[int]:
        return first_ids(loader)

    (loader,) = loaders_of_run(dataset, 1)
    assert ray.get(rank_in_a_worker.remote(loader)) == expected


@pytest.mark.parametrize("name", ["selection", "weights of an array"])
def test_a_handle_comes_back_from_a_task_that_ended(uri: str, ray_session: None, name: str) -> None:
    import ray

    settings = LARGE[name]

    @ray.remote(num_cpus=0, max_calls=1)
    def open_it() -> raylance.Dataset:
        dataset = raylance.dataset(uri, columns=["id"], **settings())
        dataset.share()
        return dataset

    dataset = ray.get(open_it.remote())
    expected = first_ids(raylance.dataset(uri, columns=["id"], **settings()).loader(runtime="threads"))
    assert first_ids(dataset.loader(runtime="threads")) == expected


def test_packing_tables_are_shared(tokens_uri: str, ray_session: None) -> None:
    import ray

    dataset = raylance.dataset(tokens_uri, samples=PackTokens("tokens", length=64))
    (loader,) = loaders_of_run(dataset, 1)
    assert len(ray.cloudpickle.dumps(loader)) < 20_000
    copy = ray.cloudpickle.loads(ray.cloudpickle.dumps(loader))
    assert copy.steps_per_epoch(global_batch_size=10) == 200_000 // 64 // 10


def test_the_recipe_is_followed_where_the_copy_is_gone(ray_session: None) -> None:
    made = []

    def make() -> np.ndarray:
        made.append(1)
        return np.zeros(1 << 18)

    shared = Shared("zeros", np.zeros(1 << 18), 2 << 20, make)
    state = shared.__getstate__()
    assert state["_value"] is None
    assert state["_ref"] is not None
    other = object.__new__(Shared)
    other.__setstate__(state | {"_ref": state["_ref"]._replace(session="a session that is over")})
    assert len(other.get()) == 1 << 18
    assert made == [1]
    assert len(other.get()) == 1 << 18
    assert made == [1], "and kept"


def test_without_a_recipe_the_value_itself_is_sent(ray_session: None) -> None:
    shared = Shared("ones", np.ones(1 << 18), 2 << 20)
    assert shared.__getstate__()["_value"] is not None
    assert shared.of_run().__getstate__()["_value"] is None, "but in a run, whose driver outlives its ranks"
    assert Shared("few", np.ones(4), 32).of_run().__getstate__()["_value"] is not None, "small values are sent"
