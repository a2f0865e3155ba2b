"""Owns that orders and decoders written before 0.9.0 work on: `settle` is the old name of `resolve`."""

import dataclasses
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

import raylance
from raylance.orders.order import Epoch, Facts, Order, Resolved
from raylance.orders.permutation import Int64Array
from raylance.testing import check_decoder, check_order

FACTS = Facts(rows=100, seed=3, row_bytes=1e6, global_batch_size=20)


def make_legacy_order() -> type[raylance.WindowShuffle]:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Legacy(raylance.WindowShuffle):
        name: ClassVar[str] = "legacy"

        def settle(self, facts: Facts) -> Resolved:
            return super().settle(dataclasses.replace(facts, global_batch_size=1))  # type: ignore[no-any-return]

    return Legacy


def make_legacy_decoder() -> type[raylance.Decoder]:
    @dataclasses.dataclass(frozen=True)
    class Legacy(raylance.Decoder):
        shape: tuple[int, ...] = ()
        dtype = np.dtype("float32")

        def settle(self, encoded: memoryview) -> Any:
            resolved = super().settle(encoded)
            return dataclasses.replace(resolved, shape=np.load(io.BytesIO(encoded)).shape)

        def open(self) -> Any:
            return self

        def decode_into(self, encoded: memoryview, draws: Any, out: npt.NDArray[Any]) -> None:
            out[...] = np.load(io.BytesIO(encoded))

    return Legacy


def npy(array: npt.NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


ARRAYS = np.arange(100 * 6, dtype=np.float32).reshape(100, 2, 3)
ENCODED = [npy(array) for array in ARRAYS]


@pytest.mark.parametrize("make", [make_legacy_order, make_legacy_decoder])
def test_a_class_that_overrides_the_old_name_is_named(make: Callable[[], type]) -> None:
    wanted = (
        r"Legacy overrides settle\(\).*still works\. Rename the method, and calls of super\(\)\.settle\(\) in it, to"
    )
    with pytest.warns(DeprecationWarning, match=wanted) as caught:
        make()
    assert [warning.filename for warning in caught] == [__file__]
    lines = Path(__file__).read_text().splitlines()
    assert "def settle" in lines[caught[0].lineno - 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_legacy_order_works_on(write_dataset: Callable[..., str]) -> None:
    legacy = make_legacy_order()
    assert raylance.WindowShuffle().resolve(FACTS).lane_count == 20
    assert legacy().resolve(FACTS).lane_count == legacy().settle(FACTS).lane_count == 1
    check_order(legacy())
    data = raylance.dataset(write_dataset(pa.table({"id": np.arange(100)})), order=legacy(), seed=1)
    with data.loader(runtime="threads") as loader:
        delivered = np.concatenate([batch["id"] for batch in loader.iter_batches(global_batch_size=20)])
        state = loader.state_dict()
    assert sorted(delivered) == list(range(100))
    assert (state["order"]["name"], state["order"]["lanes"]) == ("legacy", 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_legacy_decoder_works_on(write_dataset: Callable[..., str]) -> None:
    legacy = make_legacy_decoder()
    check_decoder(legacy("array"), ENCODED[:4])
    uri = write_dataset(pa.table({"id": range(100), "array": pa.array(ENCODED, pa.binary())}))
    data = raylance.dataset(uri, decode=legacy("array"))
    assert data.schema.field("array").type == pa.fixed_shape_tensor(pa.float32(), (2, 3))
    for batch in data.iter_batches(global_batch_size=20):
        assert np.array_equal(batch["array"], ARRAYS[batch["id"]])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_name_in_a_class_that_is_mixed_in_counts() -> None:
    class Half:
        """No order by itself: its method is found in a class that is mixed in."""

        def settle(self, facts: Facts) -> Resolved:
            resolved: Resolved = super().settle(facts)  # type: ignore[misc]
            return dataclasses.replace(resolved, epoch_rows=facts.rows // 2)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mixed(Half, Order):
        name: ClassVar[str] = "mixed"
        repeats: ClassVar[bool] = True

        def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
            return positions

    assert Mixed().resolve(FACTS).epoch_rows == 50
    check_order(Mixed(), rows=(2, 13, 97), other_process=False)


def test_old_and_new_names_in_one_line_of_classes() -> None:
    """Each method calls the next one of its line, under whichever name."""

    class New(raylance.RowShuffle):
        def resolve(self, facts: Facts) -> Resolved:
            return dataclasses.replace(super().resolve(facts), lane_count=2)

    with pytest.warns(DeprecationWarning, match="Old overrides"):

        class Old(New):
            def settle(self, facts: Facts) -> Resolved:
                return dataclasses.replace(super().settle(facts), read_positions=7)  # type: ignore[no-any-return]

    class Newest(Old):
        def resolve(self, facts: Facts) -> Resolved:
            return dataclasses.replace(super().resolve(facts), epoch_rows=9)

    with pytest.warns(DeprecationWarning, match="New.*resolve"):
        found = Newest().resolve(FACTS)
    assert (found.lane_count, found.read_positions, found.epoch_rows) == (2, 7, 9)


def test_a_class_with_both_names_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Both(raylance.RowShuffle):
            def resolve(self, facts: Facts) -> Resolved:
                return dataclasses.replace(super().resolve(facts), lane_count=2)

            settle = resolve  # for raylance 0.8.0

    assert Both().settle(FACTS) == Both().resolve(FACTS)


def test_calls_of_the_old_names_are_deprecated() -> None:
    data = npy(ARRAYS[0])
    for order in (raylance.WindowShuffle(), raylance.RowShuffle(), raylance.Sequential()):
        with pytest.warns(DeprecationWarning, match=rf"{type(order).__name__}\.settle\(\) has the name resolve\(\)"):
            assert order.settle(FACTS) == order.resolve(FACTS)
        with pytest.warns(DeprecationWarning, match="is_settled has the name is_resolved"):
            assert not order.is_settled
    image = raylance.Image("image", size=(4, 4))
    with pytest.warns(DeprecationWarning, match=r"Image\.settle\(\) has the name resolve\(\)"):
        assert image.settle(data) == image
