"""Sampled rows come as often as their weights say, and impossible weights are refused."""

import hashlib
import tracemalloc

import numpy as np
import pytest

from raylance.errors import ConfigError
from raylance.orders.order import Epoch, Facts, Order
from raylance.orders.permutation import subkeys, uniform
from raylance.orders.sampling import ClassBalanced, Weighted
from raylance.testing import SampleRows
from tests.helpers.orders import every_row, resolve, sample


def draw(order: Order, n: int) -> np.ndarray:
    return np.array(every_row(resolve(order, n, seed=0, global_batch_size=20)))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_rows_come_as_often_as_their_weights() -> None:
    counts = np.bincount(draw(Weighted(weights="weight", rows_per_epoch=60_000), 100), minlength=100)
    weights = np.asarray(sample(100).columns["weight"])
    assert (counts[weights == 0] == 0).all()
    drawn = weights > 0
    # 85 rows have a weight; 128 is about the 99.8 % point of chi-square with 84 degrees of freedom.
    assert chi_square(counts[drawn], 60_000 * weights[drawn] / weights.sum()) < 128


def test_weights_as_an_array() -> None:
    weights = np.zeros(100)
    weights[[3, 70]] = 1, 3
    rows = draw(Weighted(weights=weights, rows_per_epoch=4000), 100)
    assert set(rows.tolist()) == {3, 70}
    bound, tables = Weighted(weights=weights).bind(sample(100))
    assert (bound.weights.shape, list(tables)) == ((0,), ["cumulative"]), "the array is kept once, in the tables"
    assert 0.70 < (rows == 70).mean() < 0.80


def test_classes_come_equally_often_however_rare_and_so_do_rows_of_a_class() -> None:
    classes = np.asarray(sample(100).columns["class"])
    rows = draw(ClassBalanced(column="class", rows_per_epoch=30_000), 100)
    _, counts = np.unique(classes[rows], return_counts=True)
    assert chi_square(counts, np.full(3, 10_000)) < 13.8  # the 99.9 % point with 2 degrees of freedom
    of_class = np.bincount(rows, minlength=100)[classes == "class 0"]
    assert chi_square(of_class, np.full(len(of_class), of_class.mean())) < 2 * len(of_class) + 25


def test_class_weights() -> None:
    order = ClassBalanced(column="class", rows_per_epoch=8000, class_weights={"class 0": 1, "class 4": 3})
    drawn = np.asarray(sample(100).columns["class"])[draw(order, 100)]
    assert set(drawn.tolist()) == {"class 0", "class 4"}
    assert 0.72 < (drawn == "class 4").mean() < 0.78


def test_batches_of_some_classes() -> None:
    order = ClassBalanced(column="class", classes_per_batch=2, rows_per_epoch=20_000)
    drawn = np.asarray(sample(100).columns["class"])[draw(order, 100)].reshape(-1, 20)
    for batch in drawn:
        _, counts = np.unique(batch, return_counts=True)
        assert counts.tolist() == [10, 10]
    _, totals = np.unique(drawn, return_counts=True)
    assert totals.min() > 0.9 * totals.max()


def test_draws_depend_on_labels_and_not_on_storage_order() -> None:
    classes = np.asarray(sample(100).columns["class"])
    drawn = []
    for stored in (classes, classes[::-1]):
        rows = SampleRows(count=100, columns={"class": stored})
        order, tables = ClassBalanced(column="class", rows_per_epoch=500).bind(rows)
        drawn.append(stored[every_row(order.resolve(Facts(rows=100, seed=0, tables=tables)))].tolist())
    assert drawn[0] == drawn[1]


# Frozen, as test_order.GOLDEN is.
GOLDEN: list[tuple[Order, list[int]]] = [
    (Weighted(weights="weight", rows_per_epoch=8), [26, 20, 13, 11, 27, 23, 29, 20]),
    (ClassBalanced(column="class", rows_per_epoch=8), [10, 15, 23, 26, 9, 1, 0, 4]),
    (ClassBalanced(column="class", classes_per_batch=2, batch_rows=4, rows_per_epoch=8), [10, 17, 20, 27, 5, 1, 0, 4]),
]


@pytest.mark.parametrize(("order", "wanted"), GOLDEN, ids=["weighted", "class", "classes per batch"])
def test_golden_draws(order: Order, wanted: list[int]) -> None:
    assert draw(order, 30).tolist() == wanted


def unmix64(word: int) -> int:
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        word = (word ^ word >> shift ^ word >> 2 * shift) * pow(factor, -1, 2**64) % 2**64
    return word


def position_of(key: int, draw: int, word: int) -> int:
    """The position whose draw, counted from 1, is made of a word."""
    gamma = 0x9E3779B97F4A7C15
    subkey = (unmix64(word) - draw * gamma) % 2**64
    return (unmix64(unmix64(subkey) ^ key) * pow(gamma, -1, 2**64) - 1) % 2**64


def extremes(epoch: Epoch, purpose: str, draw: int) -> list[int]:
    """Rows at the smallest number that is ever drawn, 0, and at the largest one below 1."""
    found = []
    for words, number in ((range(64), 0.0), (range(2**64 - 64, 2**64), 1 - 2.0**-53)):  # one has a position below 2**63
        positions = [position_of(epoch.key(purpose), draw, word) for word in words]
        position = np.array([min(positions)])
        assert uniform(subkeys(epoch.key(purpose), position), draw)[0, -1] == number
        found.append(int(epoch.rows(position)[0]))
    return found


@pytest.mark.parametrize("least", [1.0, 5e-324, 2.0**1022])
def test_the_ends_of_the_weights(least: float) -> None:
    order = Weighted(weights=np.array([0, 0, 1, 1, 0]) * least)
    assert extremes(resolve(order, 5).epoch(0), "weighted", 1) == [2, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 1000])
def test_the_ends_of_a_class(size: int) -> None:
    rows = SampleRows(count=size + 2, columns={"class": np.r_[0, np.ones(size, dtype=np.int64), 2]})
    order, tables = ClassBalanced(column="class", class_weights={1: 1}).bind(rows)
    epoch = order.resolve(Facts(rows=size + 2, seed=0, tables=tables)).epoch(0)
    assert extremes(epoch, "class_balanced", 2) == [1, size]


def many_classes(classes: int = 20_000) -> SampleRows:
    """60,000 rows of 20,000 classes, or of as many as asked for."""
    return SampleRows(count=3 * classes, columns={"class": np.arange(3 * classes) * 7 % classes})


@pytest.mark.parametrize(
    ("some", "wanted"), [(None, "dbcd59ba0480ce46"), (3, "0ab62587ca88941c")], ids=["all classes", "some"]
)
def test_batches_of_many_classes_are_as_they_were_in_little_memory(some: int | None, wanted: str) -> None:
    """Frozen draws of 0.1.0, which drew the numbers of all classes for all batches at once, and sorted them."""
    weights = None if some is None else {label: 1.0 + label % 5 for label in range(0, 20_000, some)}
    order = ClassBalanced(column="class", classes_per_batch=8, class_weights=weights)
    order, tables = order.bind(many_classes())
    epoch = order.resolve(Facts(rows=60_000, seed=3, tables=tables, global_batch_size=64)).epoch(1)
    positions = np.r_[np.arange(64 * 40), np.arange(10**9, 10**9 + 200)]
    parts = [epoch.rows(part) for part in (positions[: 64 * 40], positions[64 * 40 :])]
    assert hashlib.blake2b(np.concatenate(parts).astype("<i8").tobytes(), digest_size=8).hexdigest() == wanted
    tracemalloc.start()
    epoch.rows(np.arange(64 * 100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20, "numbers of 100 batches and 20,000 classes would be 16 MB each time they are copied"


def test_weights_of_many_classes() -> None:
    """Quadratic work would be far past the time that a test has."""
    classes = 100_000
    weights = dict.fromkeys(range(classes), 1.0)
    tables = ClassBalanced(column="class", class_weights=weights).look_up(many_classes(classes))
    assert len(tables["weights"]) == classes
    with pytest.raises(ConfigError, match=r"names \[-1\], of which .*and 99,980 more") as caught:
        ClassBalanced(column="class", class_weights=weights | {-1: 1.0}).bind(many_classes(classes))
    assert len(str(caught.value)) < 1000


def test_weights_whose_sum_is_no_number() -> None:
    small, large = np.array([1.0, 4, 0, 4]), np.array([1.0, 4, 0, 4]) * 2.0**1021
    draws = [draw(Weighted(weights=weights, rows_per_epoch=500), 4).tolist() for weights in (small, large)]
    assert draws[0] == draws[1]
    for per_batch in (None, 2):
        draws = []
        for weight in (1.0, 2.0**1022):
            weights = {"class 0": weight, "class 1": 2 * weight, "class 4": 2 * weight}
            sizes = {"classes_per_batch": per_batch, "rows_per_epoch": 500}
            draws.append(draw(ClassBalanced(column="class", class_weights=weights, **sizes), 100).tolist())
        assert draws[0] == draws[1]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (Weighted(weights=np.array([1.0, -1, 1])), "weight -1.0 at selected row 1"),
        (Weighted(weights=np.array([1.0, np.nan, 1])), "weight nan at selected row 1"),
        (Weighted(weights=np.zeros(3)), "all weights of the array are 0"),
        (Weighted(weights=np.ones(4)), r"shape \(4,\).*the selection has 3 rows"),
        (Weighted(weights="class"), "column 'class' is str.*, not a number"),
        (ClassBalanced(column="class", classes_per_batch=4), "only 3 classes"),
        (ClassBalanced(column="class", classes_per_batch=3, class_weights={"class 0": 1, "class 1": 1}), "only 2 "),
        (ClassBalanced(column="class", class_weights={"class 9": 1}), "names \\['class 9'\\], of which.*no row"),
        (ClassBalanced(column="class", class_weights={9: 1, "b": 1}), "names \\[9, 'b'\\], of which.*no row"),
        (ClassBalanced(column="class", class_weights={"class 0": -1}), "gives \\['class 0'\\]: .*not negative"),
        (ClassBalanced(column="class", class_weights={"class 4": np.inf}), "gives \\['class 4'\\]: .*finite"),
        (ClassBalanced(column="class", class_weights={"class 0": 0}), "gives all .* weight 0: .*one of them positive"),
    ],
)
def test_impossible_weights(order: Order, message: str) -> None:
    rows = SampleRows(count=3, columns={"class": np.array(["class 0", "class 1", "class 4"])})
    with pytest.raises(ConfigError, match=message):
        order.bind(rows)
