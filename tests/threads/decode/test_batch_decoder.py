"""Batch decoders: whole items at once, and rows by themselves where one is damaged."""

import dataclasses
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.api.loader import consumer_of
from raylance.errors import ConfigError, HelperError
from raylance.testing import check_decoder
from raylance.torch_data import IterableDataset, Loader, MapDataset
from tests.helpers.images import make_images
from tests.helpers.scripts import FORKED

ROWS = 50
VALUES = np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32)
BAD = 7, 8  # too short, and missing


@dataclasses.dataclass(frozen=True)
class Scaled(raylance.BatchDecoder):
    """Six floats, times a random number, all rows in one operation."""

    shape, dtype, draws = (2, 3), "float32", 1

    def open(self) -> "Scaled":
        return self

    def decode_batch(self, encoded: Sequence[memoryview], draws: np.ndarray, out: np.ndarray) -> None:
        rows = np.frombuffer(b"".join(encoded), np.float32).reshape(len(encoded), 2, 3)
        np.multiply(rows, draws[:, :, None].astype(np.float32), out=out)


class Named(Scaled):
    name = "b"


class OfTheBatch(Scaled):
    def decode_batch(self, encoded: Sequence[memoryview], draws: np.ndarray, out: np.ndarray) -> None:
        super().decode_batch(encoded, draws, out)
        out -= out.mean(axis=0) if len(out) > 1 else 0


class AloneOnly(Scaled):
    def decode_batch(self, encoded: Sequence[memoryview], draws: np.ndarray, out: np.ndarray) -> None:
        if len(encoded) > 1:
            raise ValueError("one at a time")
        super().decode_batch(encoded, draws, out)


class Returning(Scaled):
    def decode_batch(self, encoded: Sequence[memoryview], draws: np.ndarray, out: np.ndarray) -> Any:
        return out


@dataclasses.dataclass(frozen=True)
class NoMethod(raylance.BatchDecoder):
    shape, dtype = (), "int8"

    def open(self) -> Any:
        return object()


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    encoded: list[bytes | None] = [row.tobytes() for row in VALUES]
    encoded[BAD[0]], encoded[BAD[1]] = b"short", None
    columns = {"values": pa.array(encoded, pa.binary()), "image": pa.array(make_images(ROWS), pa.binary())}
    return write_dataset(pa.table({"id": np.arange(ROWS), **columns}))


@pytest.mark.parametrize("decoders", [0, 2])
def test_items_are_decoded_together(uri: str, decoders: int) -> None:
    decode = [Scaled("values"), raylance.Image("image", size=8)]
    handle = raylance.dataset(uri, decode=decode, on_bad_row="mask", remainder="ragged")
    assert handle.schema.field("values").type == pa.fixed_shape_tensor(pa.float32(), (2, 3))
    epochs = []
    with handle.loader(num_decoders=decoders) as loader:
        for _ in range(2):
            batches = list(loader.iter_batches(batch_size=20))
            rows = {name: np.concatenate([batch[name] for batch in batches]) for name in ("id", "values", "_valid")}
            assert np.sort(rows["id"]).tolist() == list(range(ROWS))
            assert sorted(rows["id"][~rows["_valid"]]) == list(BAD)
            made = rows["values"][np.argsort(rows["id"])].reshape(ROWS, 6)
            assert not made[list(BAD)].any()
            good = np.setdiff1d(np.arange(ROWS), BAD)
            ratios = made[good] / VALUES[good]
            np.testing.assert_allclose(ratios, ratios[:, :1] * np.ones(6), rtol=1e-4)
            assert len(np.unique(ratios[:, 0].round(6))) > 40
            epochs.append(made)
        assert loader.stats()["fallback_rows"] > 0, "the item with the damaged row was decoded row by row"
        why = {offset: reason for offset, _, reason in consumer_of(loader).recorder.stats.bad_rows}
    assert not np.array_equal(*epochs)
    assert why[8] == "ValueError: is null"
    assert why[7] == "ValueError: buffer size must be a multiple of element size"
    alone = handle.take([9, 20])
    np.testing.assert_array_equal(alone["values"].reshape(2, 6), epochs[0][[9, 20]])


def test_bad_rows_are_named(uri: str) -> None:
    for row, why in ((7, "buffer size|reshape"), (8, "is null")):
        handle = raylance.dataset(uri, decode=Scaled("values"), columns=["id", "values"], order="sequential")
        with pytest.raises(raylance.BadRowError, match=f"column 'values' of row offset {row} .*({why})"):
            filtered = raylance.dataset(uri, decode=Scaled("values"), filter=f"id in (3, {row}, 4)")
            list(filtered.iter_batches(batch_size=3))
        assert handle.head(5)["values"].shape == (5, 2, 3)


def test_wrong_batch_decoders_are_refused(uri: str) -> None:
    good = [row.tobytes() for row in VALUES[:4]]
    check_decoder(Scaled("values"), good, bad=[b"short"])
    with pytest.raises(AssertionError, match="sample 0 "):
        check_decoder(OfTheBatch("values"), good, bad=[b"short"])
    with pytest.raises(AssertionError, match=r"cannot decode samples \(ValueError: one at a time\)"):
        check_decoder(AloneOnly("values"), good, bad=[b"short"])
    for decoder, message in (
        (Returning("values"), "'values' of row offset 0 was returned as ndarray: decode_batch must write"),
        (NoMethod("values"), r"NoMethod\('values'\) cannot be opened \(AttributeError.*with decode_batch\(encoded"),
    ):
        with pytest.raises(ConfigError, match=message):
            raylance.dataset(uri, decode=decoder, columns=["values"])
    handle = raylance.dataset(uri, decode=Scaled("values"), columns=["values"], filter="id > 8")
    assert handle.head(1)["values"].shape == (1, 2, 3)
    with pytest.raises(HelperError, match=r"fails on row offsets .* together \(ValueError: one at a time\)"):
        raylance.dataset(uri, decode=AloneOnly("values"), columns=["values"], filter="id = 9 or id = 10")


@dataclasses.dataclass(frozen=True)
class OnDevice(raylance.BatchDecoder):
    """As `Scaled`, on the device of the batches; of three axes, the last one as channels."""

    seen = []  # noqa: RUF012 -- number of rows of each call
    shape, dtype, draws, on_device, channels_last, codec = (1, 2, 3), "float32", 1, True, True, "ours 1"

    def open(self) -> Any:
        raise AssertionError("a decoder of the device is opened there")

    def open_on(self, device: torch.device) -> "OnDevice":
        assert device.type == "cpu"
        return self

    def decode_batch(self, encoded: Sequence[torch.Tensor], draws: np.ndarray, out: torch.Tensor) -> None:
        self.seen.append(len(encoded))
        assert all(each.dtype == torch.uint8 for each in encoded)
        rows = torch.cat(list(encoded)).view(torch.float32).reshape(out.shape)
        torch.mul(rows, torch.from_numpy(draws[:, :, None, None].astype(np.float32)), out=out)


def open_on_device(uri: str, **changes: Any) -> raylance.Dataset:
    arguments = {"decode": OnDevice("values"), "on_bad_row": "mask", "remainder": "ragged", "columns": ["values", "id"]}
    return raylance.dataset(uri, **(arguments | changes))


@pytest.mark.parametrize("others", [[], [raylance.Image("image", size=8)]])
def test_a_batch_is_decoded_on_its_device(uri: str, others: list[raylance.Decoder]) -> None:
    """The same rows and draws as in decode actors, under another class; bad rows are masked and counted as there."""
    in_helpers = open_on_device(uri, decode=Scaled("values"), order="sequential")
    by_id = [next(iter(in_helpers.iter_batches(epoch=epoch, batch_size=ROWS)))["values"] for epoch in range(2)]
    assert not np.array_equal(*by_id), "each epoch has draws of its own"
    columns = ["values", *(each.column for each in others), "id"]
    handle = open_on_device(uri, decode=[OnDevice("values"), *others], columns=columns)
    assert handle.schema.names == columns
    np.testing.assert_array_equal(handle.head(ROWS)["values"][:, 0], by_id[0])
    OnDevice.seen.clear()
    with handle.loader(num_decoders=2) as loader:
        for epoch in range(2):
            seen = []
            for batch in loader.iter_torch_batches(batch_size=20):
                assert list(batch) == [*columns, "_valid"]
                assert batch["values"].shape[1:] == (3, 1, 2)
                ids = batch["id"].numpy()
                assert batch["_valid"].tolist() == (~np.isin(ids, BAD)).tolist()
                np.testing.assert_array_equal(batch["values"].movedim(1, -1)[:, 0], by_id[epoch][ids])
                seen += ids.tolist()
            assert sorted(seen) == list(range(ROWS))
        assert max(OnDevice.seen) in (19, 20), "whole batches"
        stats = loader.stats()
        assert stats["masked_rows"] == 2 * len(BAD)
        why = {offset: (column, reason) for offset, column, reason in consumer_of(loader).recorder.stats.bad_rows}
        assert set(why) == set(BAD)
        assert why[8] == ("values", "ValueError: is null")
        (frame,) = loader.iter_batches(batch_size=ROWS, batch_format="pandas")
        assert list(frame.columns) == [*columns, "_valid"]
        (arrays,) = loader.iter_batches(batch_size=ROWS)
        assert arrays["values"].shape == (ROWS, 1, 2, 3)
        (given,) = loader.iter_torch_batches(batch_size=ROWS, collate_fn=dict)
        assert isinstance(given["values"], torch.Tensor)
        (halves,) = loader.iter_torch_batches(batch_size=ROWS, dtypes={"values": torch.float16})
        assert halves["values"].dtype == torch.float16


def test_too_many_bad_rows_of_a_device_end_the_epoch(uri: str) -> None:
    with pytest.raises(raylance.BadRowError, match=f"column 'values' of row offset {BAD[0]} .*as a batch|values"):
        list(open_on_device(uri, on_bad_row="raise").iter_torch_batches(batch_size=10))
    with pytest.raises(raylance.BadRowError, match="2 different rows .*max_bad_rows=1"):
        list(open_on_device(uri, max_bad_rows=1).iter_torch_batches(batch_size=ROWS))


def test_draws_of_a_device_are_those_of_the_row(uri: str) -> None:
    """On any number of ranks, resumed, and where rows repeat and are padded."""
    data = open_on_device(uri, filter="id > 8", order="window", seed=3, remainder="pad")
    whole = [batch["values"] for batch in IterableDataset(data, global_batch_size=16, dist_info=(0, 1))]
    for workers in (0, 1):
        options = {"num_workers": workers, "multiprocessing_context": FORKED if workers else None}
        shares = [IterableDataset(data, global_batch_size=16, dist_info=(rank, 2)) for rank in range(2)]
        for one, *two in zip(whole, *(Loader(share, **options) for share in shares), strict=True):
            assert torch.equal(one, torch.cat([batch["values"] for batch in two]))
    weighted = raylance.Weighted(weights="id", rows_per_epoch=200)
    drawn = open_on_device(uri, filter="id > 8", order=weighted)
    copies: dict[int, set[bytes]] = {}
    for batch in drawn.iter_batches(batch_size=50):
        for number, made in zip(batch["id"].tolist(), batch["values"], strict=True):
            copies.setdefault(number, set()).add(made.tobytes())
    assert max(map(len, copies.values())) > 2, "the draws of each copy of a row are its own"
    row = MapDataset(data).__getitems__([4])[0]
    np.testing.assert_array_equal(row["values"].movedim(0, -1), data.head(5)["values"][4])


def test_where_a_column_is_decoded(uri: str) -> None:
    handle = open_on_device(uri)
    state = handle.loader().state_dict()
    assert state["decode"] == [{"class": "OnDevice", "column": "values"}]
    assert state["codecs"] == {"values": "ours 1"}
    for changes, message in (
        ({"transform": dict}, r"transform= runs in decode actors, before OnDevice\('values'\) decodes on the"),
        ({"decode": [OnDevice("values"), Named("values")]}, "Decode a column in one place"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_on_device(uri, **changes)


@dataclasses.dataclass(frozen=True)
class InPlace(raylance.BatchDecoder):
    """Changes the bytes that it is lent, as a decoder may by mistake; fails beside a row that is too short."""

    shape, dtype, on_device = (6,), "float32", True
    open = Scaled.open

    def decode_batch(self, encoded: Sequence[torch.Tensor], draws: np.ndarray, out: torch.Tensor) -> None:
        for each in encoded:
            each.bitwise_not_()
        out.copy_(torch.stack([each.view(torch.float32) for each in encoded]))


def test_rows_of_a_batch_that_failed_are_decoded_from_their_own_bytes(uri: str) -> None:
    handle = raylance.dataset(uri, decode=InPlace("values"), on_bad_row="mask", columns=["values"], order="sequential")
    (batch,) = handle.iter_torch_batches(batch_size=ROWS)
    good = np.setdiff1d(np.arange(ROWS), BAD)
    assert np.flatnonzero(batch["_valid"]).tolist() == good.tolist()
    wanted = np.invert(VALUES.view(np.uint8)).view(np.float32)
    assert batch["values"][good].numpy().tobytes() == wanted[good].tobytes()
    with pytest.raises(AssertionError, match="sample 0 "):
        check_decoder(InPlace("values"), [row.tobytes() for row in VALUES[:3]], bad=[b"short"])


@dataclasses.dataclass(frozen=True)
class Model(OnDevice):
    opened = []  # noqa: RUF012

    def open_on(self, device: torch.device) -> Any:
        made = dataclasses.replace(self)
        self.opened.append(weakref.ref(made))
        return made


def test_what_decodes_on_a_device_is_opened_once_a_loader(uri: str) -> None:
    handle = raylance.dataset(uri, decode=Model("values"), columns=["values"], filter="id > 8", on_bad_row="mask")
    Model.opened.clear()
    with handle.loader() as loader:
        batches = loader.batches(batch_size=20)
        assert not Model.opened
        for _ in range(80):
            assert len(list(batches)) == 2
        assert len(list(loader.iter_torch_batches(batch_size=20))) == 2
        assert len(Model.opened) == 1
    del batches
    gc.collect()
    assert Model.opened[0]() is None
    Model.opened.clear()
    for _ in range(3):
        list(handle.iter_torch_batches(batch_size=20))
    assert len(Model.opened) == 1, "passes over a handle share what they opened"
