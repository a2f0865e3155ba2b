"""The checkers of raylance.testing catch what breaks; orders of one's own work through loader, state and resume."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError
from raylance.testing import check_order
from raylance.torch_data import IterableDataset
from tests.helpers import own_orders as own
from tests.helpers.own_orders import Reversed, ShortFirst

LENGTHS = np.arange(400) * 37 % 101


def test_orders_of_ones_own_that_keep_everything() -> None:
    check_order(Reversed())
    check_order(ShortFirst(column="length"), columns={"length": LENGTHS})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (own.Halved(), r"every row comes exactly once.*rows \[1\] are missing and \[0\] come again.*bijection"),
        (own.Beyond(), r"rows of epoch 0 of 1 rows .*lie in it; but \[1\] do not"),
        (own.Floats(), "int64 of that shape; but they are float64"),
        (own.Generator(), "settings, selection, seed and epoch alone.*generator"),
        (own.SortsWhatIsAsked(), "not on what else is asked"),
        (own.Overwrites(), "positions are only read"),
        (own.AllAtOnce(), "however long the epoch is.*100 of 10,000,000 rows took .* MiB"),
        (own.DependsOnTheProcess(), "other processes and has the same rows there"),
        (own.Forgetful(), "other processes and has the same rows there"),
        (own.Eager(), r"completed_shards\(\) finds the shards all of whose rows are consumed"),
        (own.NeverResolved(), r'resolve\(\) fills every "auto"; but it leaves \[\'shard_rows\'\]'),
        (own.Tuples(), "comes back from JSON as it was.*numbers, strings or lists"),
        (own.OtherSizes(), "an epoch of all rows unless it repeats some; but it has {'epoch_rows': 2} over 1 rows"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, raylance.Order) else "",
)
def test_what_an_order_breaks_is_named(wrong: raylance.Order, message: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        check_order(wrong, other_process=isinstance(wrong, own.DependsOnTheProcess | own.Forgetful))


def test_orders_that_lack_what_every_order_has() -> None:
    no_rows = type("NoRows", (raylance.Order,), {"name": "no_rows"})
    no_name = type("NoName", (raylance.Order,), {"rows_of": lambda self, epoch, positions: positions})
    for order, message in (
        (no_rows(), r"NoRows a method rows_of\(epoch, positions\)"),
        (no_name(), "NoName a class att"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_order(order)
        with pytest.raises(ConfigError, match=message):
            raylance.dataset("nowhere.lance", order=order)
    with pytest.raises(ConfigError, match="order=<class .*Reversed'> is unknown"):
        raylance.dataset("nowhere.lance", order=Reversed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(400), "length": LENGTHS}))


def test_an_order_of_ones_own_under_torch_and_in_mixtures(uri: str) -> None:
    short = raylance.dataset(uri, columns=["id"], order=ShortFirst(column="length"))
    last = raylance.dataset(uri, columns=["id"], order=Reversed())
    batches = IterableDataset(last, global_batch_size=100, dist_info=(0, 1))
    assert [batch["id"].tolist() for batch in batches] == np.arange(400)[::-1].reshape(4, 100).tolist()
    mixed = raylance.mix({"short": (short, 1), "last": (last, 1)})
    ids = np.concatenate([batch["id"] for batch in IterableDataset(mixed, global_batch_size=50, dist_info=(0, 1))])
    assert ids[1::2].tolist() == list(range(399, -1, -1))
