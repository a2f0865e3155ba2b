"""Owns the proof that the checkers of raylance.testing catch what they are there for, and that orders of one's own work
through loader, state and resume.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.orders.order import Epoch, Facts, Resolved, Rows, Tables
from raylance.orders.permutation import BoolArray, Int64Array, permute, subkeys
from raylance.testing import check_order
from raylance.torch_data import IterableDataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reversed(raylance.Order):
    """Storage order, from its end."""

    name: ClassVar[str] = "reversed"

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return epoch.order.rows - 1 - positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortFirst(raylance.Order):
    """Rows by length, shuffled in windows."""

    name: ClassVar[str] = "short_first"
    column: str
    window_rows: int = 16

    def look_up(self, rows: Rows) -> Tables:
        return {"by_length": np.argsort(rows.column(self.column).values(), kind="stable")}

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        start = positions // self.window_rows * self.window_rows
        size = np.minimum(self.window_rows, epoch.order.rows - start)
        keys = subkeys(epoch.key("short_first"), start)
        return epoch.order.tables["by_length"][start + permute(positions - start, size, keys)]


LENGTHS = np.arange(400) * 37 % 101


def test_orders_of_ones_own_that_keep_everything() -> None:
    check_order(Reversed())
    check_order(ShortFirst(column="length"), columns={"length": LENGTHS})


class Halved(Reversed):
    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return positions // 2


class Beyond(Reversed):
    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return positions + 1


class Floats(Reversed):
    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return positions / 1  # type: ignore[return-value]


class Generator(Reversed):
    """Keeps what it drew, of a generator of the process."""

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return np.random.permutation(epoch.order.rows)[positions]


class SortsWhatIsAsked(Reversed):
    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return np.sort(positions)


class Overwrites(Reversed):
    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        rows = epoch.order.rows - 1 - positions
        positions[:] = 0
        return rows


class AllAtOnce(Reversed):
    """A permutation of the whole epoch for each row that is asked for."""

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        n = epoch.order.rows
        return permute(np.arange(n), n, epoch.key())[positions] if n < 1000 else np.arange(n)[positions]


class DependsOnTheProcess(Reversed):
    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return permute(positions, epoch.order.rows, hash("salted by process") % 2**64)


class Forgetful(Reversed):
    """The first epoch that was asked for is kept for all."""

    kept: ClassVar[dict[int, int]] = {}

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return permute(positions, epoch.order.rows, self.kept.setdefault(epoch.order.seed, epoch.key()))


class EagerEpoch(Epoch):
    def completed_shards(self, position: int) -> BoolArray:
        done = super().completed_shards(position)
        return np.ones_like(done) if position else done


class EagerResolved(Resolved):
    def epoch(self, number: int) -> Epoch:
        return EagerEpoch(self, number)


class Eager(Reversed):
    """Takes shards for complete at their first row."""

    def resolve(self, facts: Facts) -> Resolved:
        return EagerResolved(**vars(super().resolve(facts)))


class NeverResolved(Reversed):
    def resolve(self, facts: Facts) -> Resolved:
        return dataclasses.replace(super().resolve(facts), settings=self)


class ResolvedAgain(Reversed):
    """Another shard size for each global batch, a recorded one included."""

    def resolve(self, facts: Facts) -> Resolved:
        auto = dataclasses.replace(self, shard_rows="auto")
        return super(ResolvedAgain, auto).resolve(dataclasses.replace(facts, row_bytes=facts.row_bytes * 1e4))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuples(Reversed):
    stages: tuple[int, ...] = (1, 2)


class OtherSizes(Reversed):
    def resolve(self, facts: Facts) -> Resolved:
        resolved = super().resolve(facts)
        return dataclasses.replace(resolved, epoch_rows=resolved.epoch_rows + 1)


class LanesOfNumPy(Reversed):
    def resolve(self, facts: Facts) -> Resolved:
        return dataclasses.replace(super().resolve(facts), lane_count=np.int64(2))


class CompleteWhereRowsRepeat(Reversed):
    repeats: ClassVar[bool] = True

    def resolve(self, facts: Facts) -> Resolved:
        return RepeatsResolved(**vars(super().resolve(facts)))


class RepeatsResolved(Resolved):
    @property
    def shard_count(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Halved(), r"every row comes exactly once.*rows \[1\] are missing and \[0\] come again.*bijection"),
        (Beyond(), r"rows of epoch 0 of 1 rows .*lie in it; but \[1\] do not"),
        (Floats(), "int64 of that shape; but they are float64"),
        (Generator(), "settings, selection, seed and epoch alone.*generator"),
        (SortsWhatIsAsked(), "not on what else is asked"),
        (Overwrites(), "positions are only read"),
        (AllAtOnce(), "however long the epoch is.*100 of 10,000,000 rows took .* MiB"),
        (DependsOnTheProcess(), "other processes and has the same rows there"),
        (Forgetful(), "other processes and has the same rows there"),
        (Eager(), r"completed_shards\(\) finds the shards all of whose rows are consumed"),
        (NeverResolved(), r'resolve\(\) fills every "auto"; but it leaves \[\'shard_rows\'\]'),
        (ResolvedAgain(), "a resolved order stays as it is"),
        (ResolvedAgain(shard_rows=5), r"resolve\(\) keeps what was given"),
        (Tuples(), "comes back from JSON as it was.*numbers, strings or lists"),
        (OtherSizes(), "an epoch of all rows unless it repeats some; but it has {'epoch_rows': 2} over 1 rows"),
        (LanesOfNumPy(), "sizes of at least 1, int"),
        (CompleteWhereRowsRepeat(), "no shard is complete where rows repeat"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, raylance.Order) else "",
)
def test_what_an_order_breaks_is_named(wrong: raylance.Order, message: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        check_order(wrong)


def test_orders_that_lack_what_every_order_has() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class NoRows(raylance.Order):
        name: ClassVar[str] = "no_rows"

    class NoName(raylance.Order):
        def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
            return positions

    for order, message in (
        (NoRows(), r"NoRows a method rows_of\(epoch, positions\)"),
        (NoName(), "NoName a class att"),
    ):
        with pytest.raises(raylance.ConfigError, match=message):
            check_order(order)
        with pytest.raises(raylance.ConfigError, match=message):
            raylance.dataset("nowhere.lance", order=order)
    with pytest.raises(raylance.ConfigError, match="order=<class .*Reversed'> is unknown"):
        raylance.dataset("nowhere.lance", order=Reversed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(400), "length": LENGTHS}))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_an_order_of_ones_own_through_the_loader_with_resume_on_another_world(uri: str) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Local(ShortFirst):
        """Of no module that actors could import, as in a user's script: it is sent by value."""

        name: ClassVar[str] = "local"

    order = Local(column="length", window_rows=40)
    handle = raylance.dataset(uri, columns=["id"], order=order)
    with handle.loader(num_decoders=0) as loader:
        whole = [batch["id"].tolist() for batch in loader.iter_batches(global_batch_size=20)]
    assert sorted(row for batch in whole for row in batch) == list(range(400))
    lengths = LENGTHS[np.array(whole)]
    assert all(lengths[step].max() <= lengths[step + 2].min() for step in range(0, 18, 2)), "short ones come first"
    with handle.loader(num_decoders=0) as loader:
        for _, batch in zip(range(7), loader.iter_batches(global_batch_size=20), strict=False):
            assert batch["id"].tolist() == whole[loader.state_dict()["position"] // 20 - 1]
        state = loader.state_dict()
    assert state["order"] == {"name": "local", "shard_rows": 100, "column": "length", "window_rows": 40}
    ranks = []
    for rank in range(2):
        with handle.loader(rank=rank, world_size=2, num_decoders=0) as loader:
            loader.load_state_dict(state)
            ranks.append([batch["id"].tolist() for batch in loader.iter_batches(global_batch_size=20)])
    assert [first + second for first, second in zip(*ranks, strict=True)] == whole[7:]
    other = raylance.dataset(uri, columns=["id"], order=Local(column="length", window_rows=8))
    with pytest.raises(raylance.StateError, match="order.window_rows: saved 40, now 8"):
        other.loader().load_state_dict(state)
    with pytest.raises(raylance.StateError, match="order.name: saved 'local', now 'window'"):
        raylance.dataset(uri, columns=["id"]).loader().load_state_dict(state)


def test_an_order_of_ones_own_under_torch_and_in_mixtures(uri: str) -> None:
    short = raylance.dataset(uri, columns=["id"], order=ShortFirst(column="length"))
    last = raylance.dataset(uri, columns=["id"], order=Reversed())
    batches = IterableDataset(last, global_batch_size=100, dist_info=(0, 1))
    assert [batch["id"].tolist() for batch in batches] == np.arange(400)[::-1].reshape(4, 100).tolist()
    mixed = raylance.mix({"short": (short, 1), "last": (last, 1)})
    ids = np.concatenate([batch["id"] for batch in IterableDataset(mixed, global_batch_size=50, dist_info=(0, 1))])
    assert ids[1::2].tolist() == list(range(399, -1, -1))
