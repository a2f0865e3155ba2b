"""The loader over real Ray actors: what is delivered, resume, lost helpers, limits and their errors."""

import itertools
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.api.loader import RankLoader
from raylance.errors import ConfigError
from raylance.planning.digest import Digest
from tests.helpers.damaged_rows import check_bad_row, damaged
from tests.helpers.epochs import assert_same, batches_of, join, open_images


@pytest.fixture(scope="module")
def undisturbed(images_uri: str) -> list[dict[str, torch.Tensor]]:
    """The first epoch, on one rank, by threads."""
    with open_images(images_uri).loader(runtime="threads", num_decoders=0, decode_threads=2) as loader:
        return join([batches_of(loader, 36)])


def selected_offsets(uri: str, filter: str) -> list[int]:
    return lance.dataset(uri).scanner(columns=["_rowoffset"], filter=filter).to_table()["_rowoffset"].to_pylist()


@pytest.mark.promise("P1")
def test_every_row_once_with_its_own_values(images_uri: str, undisturbed: list[dict[str, torch.Tensor]]) -> None:
    offsets = torch.cat([batch["_rowoffset"] for batch in undisturbed])
    assert sorted(offsets.tolist()) == selected_offsets(images_uri, "label != 3")
    labels = lance.dataset(images_uri).take(offsets.tolist(), columns=["label"])["label"].to_pylist()
    assert torch.cat([batch["label"] for batch in undisturbed]).tolist() == labels
    first = undisturbed[0]["image"]
    assert first.dtype == torch.uint8
    assert first.shape == (36, 3, 16, 20)


@pytest.mark.promise("P3", "P4")
@pytest.mark.parametrize(("world", "decoders"), [(2, 1), (3, 0)])
def test_same_global_batches_and_bytes_for_every_world_and_decoder_count(
    images_uri: str, undisturbed: list[dict[str, torch.Tensor]], world: int, decoders: int
) -> None:
    dataset = open_images(images_uri, order=raylance.WindowShuffle(shard_rows=20, window_shards=2, lanes=18))
    # lanes="auto" may depend on the world size; it settles on 18 for one rank, 36 rows.
    ranks = []
    for rank in range(world):
        with dataset.loader(rank=rank, world_size=world, num_decoders=decoders) as loader:
            ranks.append(batches_of(loader, 36))
    assert_same(join(ranks), undisturbed)


@pytest.mark.promise("P1")
@pytest.mark.parametrize("order", ["sequential", "shard", "row"])
def test_other_orders_deliver_every_row_once(images_uri: str, order: str) -> None:
    dataset = raylance.dataset(images_uri, columns=["id"], order=order, remainder="ragged")
    ids = []
    for rank in range(2):
        with dataset.loader(rank=rank, world_size=2) as loader:
            ids.append([batch["id"] for batch in loader.iter_batches(global_batch_size=100)])
    steps = [np.concatenate(parts) for parts in zip(*ids, strict=True)]
    live = [row for row in range(1003) if not 200 <= row < 250]
    delivered = np.concatenate(steps).tolist()
    assert sorted(delivered) == live
    assert (delivered == live) == (order == "sequential")


@pytest.mark.promise("P5")
def test_resume_at_every_stop_with_other_ranks_and_batches(
    images_uri: str, undisturbed: list[dict[str, torch.Tensor]]
) -> None:
    """A resume of a resume: 1 rank, then 2 of another batch size, then 1 again; the state goes through JSON text."""
    dataset = open_images(images_uri)
    wanted = torch.cat([batch["_rowoffset"] for batch in undisturbed]).tolist()
    pixels = torch.cat([batch["image"] for batch in undisturbed])
    with dataset.loader(num_decoders=0) as loader:
        first = join([batches_of(loader, 36, limit=5)])
        state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["position"]) == (0, 180)
    ranks, states = [], []
    for rank in range(2):
        with dataset.loader(rank=rank, world_size=2, num_decoders=0) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == {**state, "dp_size": 2}, "loading and asking again changes nothing"
            ranks.append(batches_of(loader, 50, limit=3))
            states.append(loader.state_dict())
    assert {**states[0], "dp_size": 0} == {**states[1], "dp_size": 0}, "the state is the same on every rank"
    with dataset.loader(num_decoders=0) as loader:
        loader.load_state_dict(states[1])
        last = join([batches_of(loader, 36)])
        assert loader.epoch == 1
        assert loader.state_dict()["position"] == 0
    parts = first + join(ranks) + last
    delivered = torch.cat([batch["_rowoffset"] for batch in parts]).tolist()
    assert sorted(delivered) == sorted(wanted)
    assert delivered[:180] == wanted[:180]
    # The bytes of a row do not depend on the step that it came in.
    where = {offset: place for place, offset in enumerate(wanted)}
    assert torch.equal(torch.cat([batch["image"] for batch in parts]), pixels[[where[row] for row in delivered]])


def test_a_bad_row_is_named(write_dataset: Callable[..., str]) -> None:
    check_bad_row(damaged(write_dataset), 0)


@pytest.mark.promise("P2")
def test_a_rank_may_get_no_row_and_makes_the_step_all_the_same(images_uri: str) -> None:
    dataset = open_images(images_uri, filter="id < 21")
    ranks = []
    for rank in range(5):
        with dataset.loader(rank=rank, world_size=5, num_decoders=0) as loader:
            ranks.append(batches_of(loader, 9))
    assert [len(batch["label"]) for batch in ranks[0]] == [1, 1, 0]
    assert ranks[0][2]["image"].shape == (0, 3, 16, 20)
    assert len(torch.cat([batch["_rowoffset"] for batch in join(ranks)]).unique()) == 21


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give exactly one of them"),
        ({"global_batch_size": 8, "batch_size": 8}, "give exactly one of them"),
        ({"global_batch_size": 0}, "at least 1"),
        ({"batch_size": -3}, "at least 1"),
        ({"global_batch_size": 5000}, "rows and the global batch 5000.*ragged"),
        ({"global_batch_size": 8, "prefetch_batches": -1}, "prefetch_batches=-1"),
        ({"global_batch_size": 8, "device": "cudnn"}, "device='cudnn'"),
    ],
)
def test_bad_arguments_are_refused_before_any_actor_starts(
    images_uri: str, arguments: dict[str, Any], message: str
) -> None:
    loader = raylance.dataset(images_uri, columns=["id"]).loader()
    with pytest.raises(ConfigError, match=message):
        loader.iter_torch_batches(**arguments)


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2 lies outside a world of 2"),
        ({"num_decoders": -1}, "num_decoders=-1"),
        ({"num_decoder": 2}, r"loader\(\) has no argument num_decoder=: did you mean num_decoders="),
        ({"reader_bytes": 0}, "reader_bytes=0"),
        ({"rank": 0.0}, "rank=0.0: must be an integer"),
        ({"world_size": 0}, "world_size=0: must be an integer of at least 1"),
        *[
            ({name: value}, f"{name}={value}: must be ")
            for names, values in (
                (("reader_bytes", "inflight_bytes"), (float("inf"), 0.5, -1)),
                (("placement_timeout_s", "work_timeout_s"), (float("nan"), 0, 10**10)),
                (("decoder_cpus",), (float("inf"), -1)),
            )
            for name, value in itertools.product(names, values)
        ],
        ({"read_timeout_s": True}, "read_timeout_s=True: must be a number"),
        ({"record": ""}, "record='': must be True, False, or the folder"),
    ],
)
def test_bad_options(images_uri: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raylance.dataset(images_uri, columns=["id"]).loader(**arguments)
    with pytest.raises(ConfigError, match="set_epoch"):
        raylance.dataset(images_uri, columns=["id"]).loader().set_epoch(-1)


@pytest.mark.promise("P1")
def test_certificates_of_the_ranks_add_up_to_the_selection(images_uri: str) -> None:
    dataset = raylance.dataset(images_uri, columns=["id"], filter="label != 3", remainder="pad", order="row")
    offsets = np.array(selected_offsets(images_uri, "label != 3"))
    total = Digest.of(offsets)
    certificates = []
    for rank in range(2):
        with dataset.loader(rank=rank, world_size=2) as loader:
            assert loader.stats()["epoch_certificate"] is None
            for _ in loader.iter_batches(global_batch_size=100):
                pass
            certificates.append(loader.stats()["epoch_certificate"])
    assert [certificate["positions"] for certificate in certificates] == [[0, len(offsets)]] * 2
    assert sum(certificate["rows"] for certificate in certificates) == total.rows
    assert sum(certificate["hash"] for certificate in certificates) % 2**64 == total.hash
    assert sum(certificate["padding"] for certificate in certificates) == -len(offsets) % 100 > 0


def test_steps_are_counted_through_epochs_and_resumes(images_uri: str) -> None:
    handle = raylance.dataset(images_uri, columns=["label"], remainder="drop")
    counts: list[tuple[int, int, int]] = []

    def go(loader: RankLoader, batch: int, steps: int) -> None:
        for _, _ in zip(range(steps), loader.iter_batches(global_batch_size=batch), strict=False):
            counts.append((loader.epoch, loader.step, loader.global_step))

    with handle.loader(runtime="threads") as first:
        assert (first.step, first.global_step) == (0, 0)
        go(first, 400, 2)  # of two steps
        go(first, 400, 1)
        state = first.state_dict()
    with handle.loader(runtime="threads") as second:
        second.load_state_dict(state)
        assert (second.step, second.global_step) == (1, 3)
        go(second, 100, 9)  # of 553 rows, another batch size: steps are counted, not positions
        second.set_epoch(1)
        assert (second.step, second.global_step) == (0, 8)
        with pytest.raises(ConfigError, match=r"set_epoch\(\): epoch=.*must be less than 2\*\*63"):
            second.set_epoch(2**70)
    assert counts == [(0, 1, 1), (1, 0, 2), (1, 1, 3), *((1, step, 2 + step) for step in range(2, 6)), (2, 0, 8)]


@pytest.mark.parametrize(("kind", "order"), [("numbers", "sequential"), ("nulls", "row")])
def test_work_grows_with_the_columns_and_not_with_their_square(
    write_dataset: Callable[..., str], kind: str, order: str
) -> None:
    values = {"numbers": [0.5] * 100, "nulls": [None, 0.5] * 50}[kind]

    def calls_of(columns: int) -> int:
        """The calls of functions in all threads during an opening, an epoch, and the first batch of the next. A loader
        prepares the next epoch, so that without this batch, more or less of it was read when the loader was closed.
        """
        uri, calls = write_dataset(pa.table({f"c{number}": values for number in range(columns)})), [0]

        def count(frame: Any, event: str, argument: Any) -> None:
            calls[0] += event in ("call", "c_call")

        threading.setprofile(count)
        sys.setprofile(count)
        try:
            with raylance.dataset(uri, order=order).loader(runtime="threads") as loader:
                batches = loader.iter_batches(batch_size=10, batch_format="pyarrow")
                assert sum(map(len, batches)) == 100
                assert len(next(iter(batches))) == 10
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.setprofile(None)
        return calls[0]

    # The smaller of two counts, because other work only adds: the first one imports modules.
    few, many = (min(calls_of(columns), calls_of(columns)) for columns in (150, 300))
    assert many < 2.5 * few, f"twice the columns took {many / few:.1f} times the calls"
