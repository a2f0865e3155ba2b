"""Checks the thread between helpers and consumer: what a consumer may do to it, and that nothing of it is left."""

import concurrent.futures.thread
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.api.loader import consumer_of
from raylance.errors import ConfigError, HelperError
from raylance.observe import Stats
from raylance.observe.observations import Status
from raylance.orders.order import Epoch
from raylance.orders.permutation import Int64Array
from raylance.planning.cursor import Cursor
from raylance.runtime import feeder as feeder_module
from raylance.source.version import Source
from tests.helpers.images import make_images
from tests.helpers.own_orders import with_rows

ROWS, BATCH = 400, 20

BAD = 203


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    cells = [b"" if row == BAD else row.to_bytes(4, "little") for row in range(ROWS)]
    return write_dataset(pa.table({"id": np.arange(ROWS), "cell": pa.array(cells, pa.binary())}))


def loader_of(uri: str, **settings: Any) -> raylance.RankLoader:
    options = {name: settings.pop(name) for name in ("inflight_bytes", "num_decoders") if name in settings}
    dataset = raylance.dataset(uri, columns=["id"], order="sequential", **settings)
    return dataset.loader(runtime="threads", **options)


def fails_at_the_bad_row(batch: dict[str, Any]) -> dict[str, Any]:
    if BAD in batch["id"]:
        raise ValueError("row 203 is damaged")
    return batch


def ids_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "raylance-feeder"]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A test that drops a loader does not wait for its thread, which ends by itself."""
    yield
    gc.collect()
    wait_until(lambda: not feeders())


def test_batches_are_made_off_the_training_thread(uri: str) -> None:
    makers = set()

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        makers.add(threading.get_ident())
        return batch

    loader = loader_of(uri)
    assert ids_of(loader.batches(global_batch_size=BATCH, collate_fn=collate)) == list(range(ROWS))
    assert len(makers) == 1
    assert threading.get_ident() not in makers


def test_position_and_state_are_those_of_what_was_handed_out(uri: str) -> None:
    loader = loader_of(uri)
    for step, _ in enumerate(loader.batches(global_batch_size=BATCH, prefetch_batches=8)):
        time.sleep(0.01)  # the feeder is ahead now
        assert loader.state_dict()["position"] == (step + 1) * BATCH % ROWS
        assert loader.stats()["rows"] == (step + 1) * BATCH
        if step == 6:
            break
    saved = loader.state_dict()
    assert saved["position"] == 7 * BATCH
    other = loader_of(uri)
    other.load_state_dict(saved)
    assert ids_of(other.batches(global_batch_size=10)) == list(range(7 * BATCH, ROWS))


@pytest.mark.parametrize("prefetch_batches", [0, 2, 30])
@pytest.mark.parametrize("num_decoders", [0, 2])
def test_an_error_comes_after_the_last_good_batch(uri: str, prefetch_batches: int, num_decoders: int) -> None:
    # Made of no row at the opening: the rows sampled there do not hold the bad one.
    loader = loader_of(uri, transform=fails_at_the_bad_row, num_decoders=num_decoders)
    seen = []
    with pytest.raises(raylance.BadRowError, match="row offset 203 .*row 203"):
        for batch in loader.batches(global_batch_size=BATCH, prefetch_batches=prefetch_batches):
            seen += batch["id"].tolist()
    assert seen == list(range(BAD // BATCH * BATCH))
    assert loader.state_dict()["position"] == len(seen), "what comes next is the step that failed"
    with pytest.raises(raylance.BadRowError, match="row offset 203 .*row 203"):
        next(loader.batches(global_batch_size=BATCH))
    loader.close()


def raises_late(error: Exception) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A collate_fn that raises an error at the sixth batch."""

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["id"][0] == 5 * BATCH:
            raise error
        return batch

    return collate


@pytest.mark.parametrize("error", [KeyError("no such thing"), EOFError(""), StopIteration()], ids=repr)
def test_an_error_of_collate_fn_comes_after_the_last_good_batch_and_names_its_rows(uri: str, error: Exception) -> None:
    loader, seen = loader_of(uri), []
    with pytest.raises(HelperError if isinstance(error, StopIteration) else type(error)) as caught:
        for batch in loader.batches(global_batch_size=BATCH, collate_fn=raises_late(error)):
            seen += batch["id"].tolist()
    assert seen == list(range(5 * BATCH))
    assert loader.state_dict()["position"] == len(seen)
    rows = f"row offsets between {5 * BATCH} and {6 * BATCH - 1} of {uri}"
    assert rows in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert caught.value is error or caught.value.__cause__ is error


def test_an_epoch_that_fails_prepares_no_other(uri: str) -> None:
    """Its error waits while good batches are handed out: the next epoch was begun, and kept what it had brought."""
    loader, collate = loader_of(uri), raises_late(KeyError("no such thing"))
    batches = iter(loader.batches(global_batch_size=BATCH, collate_fn=collate, prefetch_batches=30))
    next(batches)
    wait_until(lambda: not feeders())
    next(batches)
    assert not feeders()
    with pytest.raises(KeyError):
        list(batches)


@pytest.fixture(scope="module")
def many(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(70_000)}))


WHOLE, BY_COST = {"global_batch_size": 1000}, {"budget": raylance.Budget(50_000_000, padded=False)}

UNEVEN = {"cost": "id", "balance": raylance.Balance(equal_rows=False)}
LATE = 60_650  # a position of rank 1's part of a step, which is not in the sample that is checked of an epoch


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("settings", "size"), [({}, WHOLE), ({"cost": "id"}, BY_COST), (UNEVEN, WHOLE)], ids=["rows", "cost", "uneven"]
)
def test_an_epoch_that_fails_costs_no_batch_of_the_one_before(
    many: str, settings: dict[str, Any], size: dict[str, Any], *, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is begun ahead while the last batches wait to be taken, and nobody has asked for it. A late failure is not in
    the sample of an epoch that is checked before it begins.
    """
    asked = []

    def rows_of(epoch: Epoch, positions: Int64Array) -> Int64Array:
        if epoch.number and (not late or LATE in positions):
            asked.append(len(positions))
            raise LookupError(epoch.number)
        return positions

    dataset = raylance.dataset(many, columns=["id"], order=with_rows("OneEpoch", rows_of)(), **settings)
    ranks = [dataset.loader(runtime="threads", rank=rank, world_size=2) for rank in range(2)]
    other, whole = (loader.batches(**size, prefetch_batches=4) for loader in ranks)
    first, second = ids_of(whole), list[int]()
    assert whole.state_dict()["epoch"] == 1
    if not late:
        assert len(asked) <= 4, "once by each look-ahead, not again for each event"
        assert "could not be read" not in caplog.text
    with pytest.raises(ConfigError, match=r"OneEpoch\.rows_of.*LookupError"):
        for batch in whole:
            second += batch["id"].tolist()
    assert whole.state_dict()["epoch"] == 1
    assert sorted(first + ids_of(other)) == list(range(70_000))
    assert second == first[: len(second)]
    assert bool(second) == (late and "balance" not in settings), "it counts the rows of a whole chunk at once"


def test_a_break_an_exception_and_another_pass(uri: str) -> None:
    loader = loader_of(uri)
    for batch in loader.batches(global_batch_size=BATCH):
        assert batch["id"][0] == 0
        break
    wait_until(lambda: not feeders())
    with pytest.raises(ZeroDivisionError):
        for _ in loader.batches(global_batch_size=BATCH):
            _ = 1 / 0
    assert loader.state_dict()["position"] == 2 * BATCH
    left_alone = iter(loader.batches(global_batch_size=BATCH))
    next(left_alone)
    assert ids_of(loader.batches(global_batch_size=BATCH)) == list(range(3 * BATCH, ROWS))
    with pytest.raises(raylance.RaylanceError, match="superseded"):
        next(left_alone)


def test_whole_passes_begin_at_the_start_also_after_one_that_was_left(uri: str) -> None:
    """As a validation that Lightning's sanity check has begun, and one with a limit of batches."""
    loader = loader_of(uri)
    batches = loader.batches(global_batch_size=BATCH, whole=True)
    for _ in range(2):
        assert ids_of(itertools.islice(batches, 2)) == list(range(2 * BATCH))
    batches.prepare()
    assert ids_of(batches) == ids_of(loader.iter_batches(global_batch_size=BATCH, whole=True)) == list(range(ROWS))
    assert loader.epoch == 2
    next(iter(batches))
    with pytest.raises(ConfigError, match="whole='yes'"):
        loader.batches(global_batch_size=BATCH, whole="yes")
    assert len(ids_of(loader.batches(global_batch_size=BATCH))) == ROWS - BATCH, "others continue"
    loader.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("taken", [1, ROWS // BATCH], ids=["in a pass", "after one"])
def test_the_garbage_collector_ends_a_pass_wherever_it_runs(uri: str, taken: int) -> None:
    """Also in a thread that is just giving work to an executor, and so holds its lock."""
    before = threading.active_count()
    loader = loader_of(uri)
    batches = iter(loader.batches(global_batch_size=BATCH))
    assert len([next(batches) for _ in range(taken)]) == taken
    garbage: list[Any] = [loader, batches]
    garbage.append(garbage)
    del batches, loader, garbage
    with concurrent.futures.thread._global_shutdown_lock:
        gc.collect()
    wait_until(lambda: threading.active_count() <= before)  # the threads of the runtime went with the loader


def test_a_stalled_consumer_holds_no_more_than_allowed(uri: str) -> None:
    made = []

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        made.append(len(batch["id"]))
        return batch

    loader = loader_of(uri)
    batches = iter(loader.batches(global_batch_size=BATCH, collate_fn=collate, prefetch_batches=3))
    next(batches)
    wait_until(lambda: len(made) >= 4)
    time.sleep(0.1)
    assert len(made) == 4, "the one that was handed out, and three more"
    batches.close()


def test_a_pass_that_is_closed_needs_nothing_of_a_module_that_the_interpreter_has_cleared(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = iter(loader_of(uri).batches(global_batch_size=BATCH))
    next(batches)
    feeder_module._close_all()  # as at the interpreter's end
    for name in ("Wake", "threading", "_alive"):
        monkeypatch.setattr(feeder_module, name, None)
    batches.close()


def test_an_interrupt_reaches_a_consumer_that_waits(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where user code hangs in the thread that makes batches."""
    monkeypatch.setattr(feeder_module, "_JOIN_S", 0.1)
    loader, seen, released = loader_of(uri), [], threading.Event()

    def hang(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["id"][0] == 5 * BATCH:
            wait_until(lambda: consumer_of(loader).session._running.feeder._is_awaited)
            os.kill(os.getpid(), signal.SIGINT)
            released.wait(30)
        return batch

    with pytest.raises(KeyboardInterrupt):
        for batch in loader.batches(global_batch_size=BATCH, collate_fn=hang, prefetch_batches=1):
            seen += batch["id"].tolist()
    assert loader.state_dict()["position"] == len(seen) == 5 * BATCH
    assert feeders(), "nobody waits for it"
    released.set()


def interrupted_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, before: bool, times: int = 1) -> None:
    """Has an interrupt come before a method of raylance or threading does its work, or after it."""
    original, left = getattr(owner, name), [times]

    def interrupt(self: Any, *arguments: Any, **named: Any) -> Any:
        is_due = threading.current_thread() is threading.main_thread() and left[0] > 0
        left[0] -= is_due
        if is_due and before:
            raise KeyboardInterrupt
        result = original(self, *arguments, **named)
        if is_due:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupt)


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("owner", "name", "before", "times"),
    [
        (feeder_module.Feeder, "start", False, 1),
        (feeder_module.Feeder, "bind", True, 2),
        (feeder_module.Feeder, "close", True, 3),
        (threading.Thread, "start", True, 1),
        (Cursor, "advance", False, 1),
        (Cursor, "advance", True, 1),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as a generator is closed
def test_an_interrupt_at_any_place_costs_no_row(
    uri: str, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: bool, times: int
) -> None:
    loader, seen, interrupts = loader_of(uri), [], 0
    interrupted_in(monkeypatch, owner, name, before=before, times=times)
    while loader.epoch == 0:
        try:
            for batch in loader.batches(global_batch_size=BATCH):
                seen += batch["id"].tolist()
                if name == "close" and len(seen) == 5 * BATCH:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            interrupts += 1
            assert loader.state_dict()["position"] == len(seen)
            if owner is Cursor:  # the last step was not handed out, so that there is none to repeat
                with pytest.raises(ConfigError):
                    loader.repeat()
    assert interrupts >= times
    assert seen == list(range(ROWS))
    monkeypatch.undo()
    loader.close()


def test_a_pass_that_began_as_an_interrupt_came_ends_with_its_loader(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(uri)
    interrupted_in(monkeypatch, feeder_module.Feeder, "bind", before=True)
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader.batches(global_batch_size=BATCH)))
    assert feeders()
    del loader


@pytest.mark.parametrize("taken", [1, ROWS // BATCH])
def test_a_loader_that_is_known_to_its_collate_fn_is_collected(uri: str, taken: int) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.loader = loader_of(uri)

        def collate(self, batch: dict[str, Any]) -> dict[str, Any]:
            return batch

    trainer = Trainer()
    batches = iter(trainer.loader.batches(global_batch_size=BATCH, collate_fn=trainer.collate))
    assert len(list(itertools.islice(batches, taken))) == taken
    gone = weakref.ref(trainer)
    del trainer, batches
    wait_until(lambda: gc.collect() < 0 or gone() is None)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_fork_in_mid_pass_is_an_error(uri: str, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not another batch was finished before."""
    monkeypatch.setattr(feeder_module, "_LOOK_S", 0.1)
    loader = loader_of(uri)
    batches = iter(loader.batches(global_batch_size=BATCH, prefetch_batches=1))
    next(batches)
    feeder = consumer_of(loader).session._running.feeder
    wait_until(lambda: not is_there or bool(feeder._finished))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        message = b"nothing"
        try:
            for _ in batches:
                pass
        except raylance.RaylanceError as error:
            message = str(error).encode()
        os.write(writing, message)
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked in the middle of a pass" in os.read(reading, 10_000)
    batches.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_good_batches_come_before_the_error(uri: str) -> None:
    loader, seen = loader_of(uri, transform=fails_at_the_bad_row), []
    with pytest.raises(raylance.BadRowError, match="row offset 203 .*row 203"):
        for batch in loader.batches(global_batch_size=BATCH, device="cuda"):
            assert batch["id"].is_cuda
            seen += batch["id"].tolist()
    assert seen == list(range(BAD // BATCH * BATCH))


def test_the_next_epoch_is_prepared_while_the_last_batches_are_consumed(images_uri: str) -> None:
    """Also by another call with the same sizes; and what was prepared for nothing is given up."""
    arguments = {"decode": raylance.Image("image", size=16), "order": "window", "seed": 1, "filter": "id < 160"}
    dataset = raylance.dataset(images_uri, **arguments)
    with dataset.loader(runtime="threads", num_decoders=2) as fresh:
        wanted = []
        for epoch in range(3):
            fresh.set_epoch(epoch + 7)  # never what is expected
            fresh.set_epoch(epoch)
            wanted.append(offsets_of(fresh))
    with dataset.loader(runtime="threads", num_decoders=2) as loader:
        for epoch in range(3):
            assert offsets_of(loader) == wanted[epoch]
            wait_until(lambda: prepared_rows(loader) >= 16)
            time.sleep(0.1)
            assert prepared_rows(loader) <= 160, "the next epoch's, and none of the epoch after it"
        loader.set_epoch(1)
        assert offsets_of(loader) == wanted[1]
        assert len(feeders()) == 1
        loader.load_state_dict(loader.state_dict() | {"epoch": 2, "position": 8})
        assert offsets_of(loader) == wanted[2][1:]
    assert not feeders()


def test_a_helper_that_cannot_be_called_ends_one_pass_only(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_no_load(thread: threading.Thread) -> None:
        if thread.name.startswith("raylance-load"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with loader_of(uri, filter="id < 40") as loader:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", start_no_load)
            ids_of(loader.batches(global_batch_size=BATCH))
        assert len(ids_of(loader.batches(global_batch_size=BATCH))) == 40


def test_an_observer_that_fails_ends_one_pass_only(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one waited for the answer to a call that was never made."""

    def fail(*_: Any) -> None:
        raise OSError("no log")

    with loader_of(uri, filter="id < 40") as loader:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no log"):
            patch.setitem(Stats._TAKE, Status, fail)
            ids_of(loader.batches(global_batch_size=BATCH))
        assert len(ids_of(loader.batches(global_batch_size=BATCH))) == 40


class PanicError(BaseException):
    """What Lance's Rust code raises."""


class FirstByte(raylance.Decoder):
    shape, dtype = (), "uint8"

    def open(self) -> "FirstByte":
        return self

    def decode_into(self, encoded: memoryview, draws: np.ndarray, out: np.ndarray) -> None:
        out[...] = encoded[0]


def test_a_bad_row_is_named_also_if_its_file_cannot_be_found(
    write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = pa.array([b"" if row == 53 else b"1" for row in range(60)], pa.binary())
    uri = write_dataset(pa.table({"cell": cells, "file": [f"{row}.png" for row in range(60)]}))

    def panic(*_: Any) -> None:
        raise PanicError

    dataset = raylance.dataset(uri, decode=FirstByte("cell"), order="sequential")
    with dataset.loader(runtime="threads") as loader:
        for found, patches in ((None, [(Source, "open_once", panic)]), ("53.png", [])):
            batches = iter(loader.batches(global_batch_size=BATCH))
            next(batches)
            with monkeypatch.context() as patch, pytest.raises(raylance.BadRowError) as caught:
                for each in patches:
                    patch.setattr(*each)
                list(batches)
            assert (caught.value.row_offset, caught.value.file) == (53, found)
            loader.set_epoch(1)


def test_what_was_prepared_whole_is_handed_out_at_once(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows that are wanted are here, so that no event follows: asking for them wakes the thread."""
    monkeypatch.setattr(feeder_module, "_LOOK_S", 1000.0)
    with loader_of(uri, filter="id < 40") as loader:
        batches = loader.prepare(global_batch_size=BATCH)
        wait_until(lambda: prepared_rows(loader) == 40)
        time.sleep(0.1)  # it waits for its consumer
        taking = threading.Thread(target=lambda: ids_of(batches), daemon=True)
        taking.start()
        taking.join(60)
        assert not taking.is_alive()


def offsets_of(loader: raylance.RankLoader) -> list[list[int]]:
    batches = loader.iter_torch_batches(global_batch_size=8, with_row_offset=True)
    return [batch["_rowoffset"].tolist() for batch in batches]


def prepared_rows(loader: raylance.RankLoader) -> int:
    """Rows that lie ready of a pass that was not asked for."""
    prepared = consumer_of(loader).session._prepared
    return 0 if prepared is None else sum(rows.count for rows, *_ in prepared.feeder._assembly._steps)


def test_preparing_begins_before_the_first_batch_is_asked_for(images_uri: str) -> None:
    dataset = raylance.dataset(images_uri, decode=raylance.Image("image", size=16))
    with dataset.loader(runtime="threads", num_decoders=1) as loader:
        batches = loader.prepare(global_batch_size=8)
        wait_until(lambda: prepared_rows(loader) >= 16)
        assert prepared_rows(loader) <= 32, "whole items, the second of two steps"
        assert loader.state_dict()["position"] == 0
        assert len(list(batches)) == len(batches)
        with pytest.raises(ConfigError, match="no argument"):
            loader.prepare(global_batch_sise=8)


def test_an_error_of_what_was_prepared_comes_when_it_is_asked_for(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"image": pa.array([b"no image"] * 2 + make_images(30), pa.binary())}))
    dataset = raylance.dataset(uri, decode=raylance.Image("image", size=16), order="sequential")
    with dataset.loader(runtime="threads", num_decoders=1) as loader:
        batches = loader.prepare(global_batch_size=8)
        time.sleep(0.2)
        for _ in range(2):
            with pytest.raises(raylance.BadRowError):
                next(iter(batches))
