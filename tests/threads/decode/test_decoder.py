"""Decoders of others: through every way to the batches, and what `check_decoder` finds."""

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import logging
import pickle
import threading
import time
import wave
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.utils.data

import raylance
from raylance.api.dataset import opened_of
from raylance.decode.arrays import to_arrow
from raylance.decode.decoding import Decoding
from raylance.decode.open_decoding import OpenDecoding
from raylance.errors import ConfigError, DatasetError
from raylance.testing import check_decoder
from raylance.torch_data import IterableDataset, MapDataset, RowSampler
from tests.helpers.images import encode, make_images, wav


@dataclasses.dataclass(frozen=True)
class Npy(raylance.Decoder):
    """Arrays as `numpy.save` writes them, of the shape of the first row where none is given."""

    shape: tuple[int, ...] = ()
    dtype = np.float32

    def open(self) -> "Npy":
        return self

    def resolve(self, encoded: memoryview) -> "Npy":
        return self if self.shape else dataclasses.replace(self, shape=np.load(io.BytesIO(encoded)).shape)

    def decode_into(self, encoded: memoryview, draws: np.ndarray, out: np.ndarray) -> None:
        array = np.load(io.BytesIO(encoded))
        if array.shape != out.shape:
            raise ValueError(f"has shape {array.shape}, where others have {out.shape}")
        out[...] = array


@dataclasses.dataclass(frozen=True, slots=True)
class Waveform(raylance.Decoder):
    """Mono WAV of 16 bits as float32 (length,), from a random sample on where there are more."""

    length: int
    draws, dtype = 1, "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def open(self) -> "OpenWaveform":
        return OpenWaveform()


class OpenWaveform:
    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def decode_into(self, encoded: memoryview, draws: np.ndarray, out: np.ndarray) -> None:
        assert threading.get_ident() == self.thread
        with wave.open(io.BytesIO(encoded)) as file:
            frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            if len(frames) < max(file.getnframes(), len(out)):
                raise ValueError(f"has {len(frames)} of {file.getnframes()} frames, {len(out)} are needed")
        start = int(draws[0] * (len(frames) - len(out) + 1))
        np.divide(frames[start : start + len(out)], 32768, out=out)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


ROWS = 60
ARRAYS = np.random.default_rng(0).normal(size=(ROWS, 2, 3)).astype(np.float32)
SOUNDS = [wav(np.arange(row, row + 30 + row % 3)) for row in range(ROWS)]


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    """Arrays, sounds and images; the array of row 7 is damaged, and that of row 8 missing."""
    arrays: list[bytes | None] = [npy(array) for array in ARRAYS]
    arrays[7:9] = [b"damaged", None]
    columns = {"array": arrays, "sound": SOUNDS, "image": make_images(ROWS)}
    table = {name: pa.array(values, pa.binary()) for name, values in columns.items()}
    return write_dataset(pa.table({"id": np.arange(ROWS), **table}))


def open_all(uri: str, **changes: Any) -> raylance.Dataset:
    decode = [Npy("array"), Waveform("sound", 20), raylance.Image("image", size=8)]
    arguments = {"decode": decode, "on_bad_row": "mask", "remainder": "ragged"} | changes
    return raylance.dataset(uri, **arguments)


def check_rows(batch: dict[str, Any]) -> None:
    ids = np.asarray(batch["id"])
    valid = ~np.isin(ids, (7, 8))
    assert np.asarray(batch["_valid"]).tolist() == valid.tolist()
    np.testing.assert_array_equal(np.asarray(batch["array"]), ARRAYS[ids] * valid[:, None, None])
    sound = np.asarray(batch["sound"])
    assert sound.dtype == np.float32
    np.testing.assert_allclose(sound - sound[:, :1], np.tile(np.arange(20) / 32768, (len(ids), 1)), atol=1e-7)
    start = np.rint(sound[:, 0] * 32768) - ids
    assert ((start >= 0) & (start <= 10 + ids % 3)).all()


def test_decoders_of_ones_own_are_read_in_place(uri: str) -> None:
    dataset = open_all(uri)
    assert dataset.schema.field("array").type == pa.fixed_shape_tensor(pa.float32(), (2, 3))
    assert dataset.schema.field("sound").type == pa.fixed_shape_tensor(pa.float32(), (20,))
    rows = dataset[:]
    check_rows(rows | {"_valid": ~np.isin(rows["id"], (7, 8))})
    assert len(set((rows["sound"][:, 0] * 32768 - rows["id"]).round().tolist())) > 5, "draws decide where it begins"
    with pytest.raises(raylance.BadRowError, match="column 'array' of row offset 7 of .*ValueError: .*pickled"):
        open_all(uri, on_bad_row="raise").head(8)
    with pytest.raises(raylance.BadRowError, match="row offset 8 .*is null"):
        _ = open_all(uri, on_bad_row="raise")[8]


@pytest.mark.parametrize("decoders", [0, 1])
def test_decoders_of_ones_own_in_every_format(uri: str, decoders: int) -> None:
    dataset = open_all(uri)
    with dataset.loader(num_decoders=decoders) as loader:
        for batch in loader.iter_batches(global_batch_size=25):
            check_rows(batch)
        for batch in loader.iter_torch_batches(global_batch_size=25, dtypes={"id": torch.int32}):
            check_rows(batch)
            assert batch["array"].shape[1:] == (2, 3)
            assert batch["image"].shape[1:] == (3, 8, 8)
        for table in loader.iter_batches(global_batch_size=25, batch_format="pyarrow"):
            assert table.schema.field("array").type == Npy("array", (2, 3)).arrow_type
        for frame in loader.iter_batches(global_batch_size=25, batch_format="pandas"):
            arrays = np.stack(list(frame["array"])).reshape(-1, 2, 3)  # pandas has them flat
            check_rows(frame.to_dict("list") | {"array": arrays})


def test_a_run_continues_with_an_equal_decoder(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    with open_all(uri).loader(num_decoders=0) as loader:
        batches = iter(loader.iter_batches(global_batch_size=20))
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = list(batches)
    assert state["decode"][:2] == [
        {"class": "Npy", "column": "array", "shape": [2, 3]},
        {"class": "Waveform", "column": "sound", "length": 20},
    ]
    with caplog.at_level(logging.WARNING, logger="raylance"), open_all(uri).loader(num_decoders=0) as loader:
        loader.load_state_dict(state)
        again = list(loader.iter_batches(global_batch_size=20))
        assert not caplog.records
        other = open_all(uri, decode=[Npy("array"), Waveform("sound", 5), raylance.Image("image", size=8)])
        other.loader().load_state_dict(state)
    assert "decode: saved" in caplog.text
    assert "'length': 5" in caplog.text
    assert len(rest) == len(again) == 2
    for one, other_batch in zip(rest, again, strict=True):
        assert all(np.array_equal(one[name], other_batch[name]) for name in one)


@dataclasses.dataclass(frozen=True)
class Raw(raylance.Decoder):
    """The numbers themselves, after a mark."""

    shape: Any = (4,)
    dtype: Any = "float32"
    draws: Any = 0
    open = Npy.open

    def decode_into(self, encoded: memoryview, draws: np.ndarray, out: np.ndarray) -> None:
        if encoded[:4] != b"raw:":
            raise ValueError("has no mark")
        out[...] = np.frombuffer(encoded[4:], out.dtype).reshape(out.shape)


def raw(values: Any, dtype: Any = "float32") -> bytes:
    return b"raw:" + np.asarray(values, dtype).tobytes()


KINDS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32", "float64"]
SHAPES = [(), (1,), (2, 3), (2, 1, 3)]


def test_every_dtype_and_shape(write_dataset: Callable[..., str]) -> None:
    decoders, columns, wanted = [], {}, {}
    for kind, shape in itertools.product(KINDS, SHAPES):
        name = f"{kind} {shape}"
        decoders.append(Raw(name, shape, kind))
        values = np.random.default_rng(1).integers(0, 2 if kind == "bool" else 100, (6, *shape)).astype(kind)
        values[5] = 0
        samples = [raw(value, kind) for value in values[:5]]
        if len({*samples}) > 1:
            check_decoder(decoders[-1], samples)
        columns[name], wanted[name] = pa.array([*samples, b"bad"], pa.binary()), values
    uri = write_dataset(pa.table(columns))
    dataset = raylance.dataset(uri, decode=decoders, on_bad_row="mask", remainder="ragged", order="sequential")
    rows = dataset.head(6)
    (batch,) = IterableDataset(dataset, global_batch_size=6, dist_info=(0, 1))
    assert batch["_valid"].tolist() == [True] * 5 + [False]
    for decoder in decoders:
        values = wanted[decoder.column]
        assert rows[decoder.column].dtype == values.dtype
        np.testing.assert_array_equal(rows[decoder.column], values)
        np.testing.assert_array_equal(batch[decoder.column].numpy(), values)
        assert dataset.schema.field(decoder.column).type == decoder.arrow_type == to_arrow(values).type
    assert opened_of(dataset).read.decoding is not None
    assert opened_of(dataset).read.decoding.row_bytes == sum(values[0].nbytes for values in wanted.values())


class Returns(Raw):
    def decode_into(self, encoded: memoryview, draws: np.ndarray, out: np.ndarray) -> Any:
        return np.zeros_like(out)


class Fails(Raw):
    def open(self) -> Any:
        raise FileNotFoundError("model.onnx")


class Resolves(Raw):
    def resolve(self, encoded: memoryview) -> Any:
        return Raw("other")


@dataclasses.dataclass(frozen=True)
class Shapeless(raylance.Decoder):
    dtype = np.uint8
    open = Raw.open


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (object(), "raylance.Decoder"),
        (Raw, "raylance.Decoder"),
        ([Raw("raw"), 5], "raylance.Decoder"),
        (Raw("raw", [4]), r"Raw\('raw'\).shape=\[4\]: must be a tuple"),
        (Raw("raw", (4, 0)), "at least 1"),
        (Raw("raw", (4,), "complex64"), "dtype='complex64': must be a NumPy dtype of numbers"),
        (Raw("raw", (4,), ">f4"), "native byte order"),
        (Raw("raw", (4,), "nonsense"), "dtype='nonsense'"),
        (Raw("raw", draws=-1), "draws=-1: must be an integer of at least 0"),
        (Shapeless("raw"), r"Shapeless\('raw'\).shape=None"),
        (Returns("raw"), "'raw' of row offset 0 was returned as ndarray: .*write it into `out`"),
        (Fails("raw"), r"Fails\('raw'\) cannot be opened \(FileNotFoundError: model.onnx\)\."),
        (Resolves("raw"), r"Resolves.*resolve\(\) gave Raw\(column='other'"),
    ],
)
def test_what_cannot_decode_is_refused_at_the_opening(
    write_dataset: Callable[..., str], decoder: Any, message: str
) -> None:
    uri = write_dataset(pa.table({"raw": pa.array([raw(range(4))] * 3, pa.binary())}))
    with pytest.raises(ConfigError, match=message):
        raylance.dataset(uri, decode=decoder)


def test_rows_of_another_shape(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"raw": pa.array([raw(range(4)), raw(range(5))], pa.binary()), "id": [0, 1]}))
    with pytest.raises(raylance.BadRowError, match=r"row offset 1 .*cannot reshape array of size 5"):
        raylance.dataset(uri, decode=Raw("raw"))[1]
    with pytest.raises(DatasetError, match="'raw' "):
        raylance.dataset(uri, decode=Raw("raw", (7,)))
    with pytest.raises(DatasetError, match="'id' is int64"):
        raylance.dataset(uri, decode=Raw("id"))


CLIPS = 2000
LONG = np.random.default_rng(2).random(CLIPS) < 0.436  # of healthy clips, which a decoder of one length refuses
LONG[np.linspace(0, CLIPS - 1, 16).astype(int)] = False
DAMAGED = [700, 701, 702, 1500]


@pytest.fixture(scope="module")
def clips(write_dataset: Callable[..., str]) -> str:
    """Clips of two lengths, and others of which a few are damaged."""
    columns = {"clip": [raw(range(6 if is_long else 4)) for is_long in LONG]}
    columns["other"] = [b"bad" if row in DAMAGED else raw(range(4)) for row in range(CLIPS)]
    table = {name: pa.array(values, pa.binary()) for name, values in columns.items()}
    return write_dataset(pa.table({"id": np.arange(CLIPS), **table}))


def open_clips(uri: str, column: str, **changes: Any) -> raylance.Dataset:
    arguments = {"decode": Raw(column), "on_bad_row": "mask", "order": "sequential", "remainder": "ragged"}
    return raylance.dataset(uri, columns=["id", column], **(arguments | changes))


def read_until_too_many(batches: Any) -> tuple[list[int], raylance.BadRowError]:
    seen: list[int] = []
    with pytest.raises(raylance.BadRowError, match="cannot be decoded, more than max_bad_rows=") as caught:
        for batch in batches:
            seen += np.asarray(batch["id"]).tolist()
    return seen, caught.value


@pytest.mark.parametrize("decoders", [0, 3])
def test_a_decoder_that_fits_too_few_rows_ends_the_epoch(clips: str, decoders: int) -> None:
    with open_clips(clips, "clip").loader(num_decoders=decoders) as loader:
        seen, error = read_until_too_many(loader.iter_batches(batch_size=64))
        assert seen == list(range(960)), "the batch that makes it 1,024 rows is not handed out"
        assert loader.state_dict()["position"] == 960
        assert f"{LONG[:1024].sum()} of 1,024 rows that this rank was handed since its start" in str(error)
        assert f"clip of row offset {error.row_offset} of {clips} (ValueError: cannot reshape" in str(error)
        assert LONG[error.row_offset]
        assert (error.column, error.dataset) == ("clip", clips)
        assert read_until_too_many(loader.iter_batches(batch_size=64))[0] == [], "it is no better the second time"


@pytest.mark.parametrize(
    ("most", "seen"),
    [
        (np.int64(2), 700),
        (3, 1500),
        (4, None),  # a count is of different rows: epochs do not add up
        (0.0, 950),  # a fraction is looked at from 1,000 rows on
        (0.0029, 950),
        (0.003, None),
        (None, None),
    ],
)
def test_how_many_bad_rows_there_may_be(clips: str, most: Any, seen: int | None) -> None:
    with open_clips(clips, "other", max_bad_rows=most).loader(num_decoders=0) as loader:
        if seen is not None:
            assert len(read_until_too_many(loader.iter_batches(batch_size=50))[0]) == seen
            return
        for _ in range(2):
            valid = np.concatenate([batch["_valid"] for batch in loader.iter_batches(batch_size=50)])
            assert np.flatnonzero(~valid).tolist() == DAMAGED


def test_ranks_and_passes_count_by_themselves(clips: str) -> None:
    handle = open_clips(clips, "other", max_bad_rows=3)
    with handle.loader(rank=0, world_size=2) as first, handle.loader(rank=1, world_size=2) as second:
        assert len(read_until_too_many(first.iter_batches(global_batch_size=20))[0]) == 750
        assert len(list(second.iter_batches(global_batch_size=20))) == 100, "it had none of them"
    halves = open_clips(clips, "other", max_bad_rows=0.0015, filter="id < 800")
    with halves.loader() as loader:  # counted since the loader's start, over its epochs
        for _ in loader.iter_batches(batch_size=50):
            pass
        assert len(read_until_too_many(loader.iter_batches(batch_size=50))[0]) == 150
        loader.close()
        assert read_until_too_many(loader.iter_batches(batch_size=50))[0] == []
    with halves:  # those of a handle, over its passes
        batches = halves.iter_batches(batch_size=50)
        assert len(list(batches)) == 16
        assert len(read_until_too_many(batches)[0]) == 150


def test_too_many_bad_rows_under_torchs_dataloader(clips: str) -> None:
    handle = open_clips(clips, "clip")
    batches = IterableDataset(handle, global_batch_size=64, dist_info=(0, 1))
    assert len(read_until_too_many(batches)[0]) == 960
    sampler = RowSampler(handle, global_batch_size=64, dist_info=(0, 1))
    assert len(read_until_too_many(torch.utils.data.DataLoader(MapDataset(handle), batch_sampler=sampler))[0]) == 960
    assert (~handle.head(1200)["_valid"]).sum() == LONG[:1200].sum(), "who looks at rows sees them"


def test_limits_of_bad_rows_are_checked(clips: str) -> None:
    for most in (-1, True, "0.1", 1.5, float("nan")):
        with pytest.raises(ConfigError, match=f"max_bad_rows={most!r}: "):
            open_clips(clips, "other", max_bad_rows=most)
    parts = {str(most): (open_clips(clips, "other", max_bad_rows=most), 1) for most in (5, 0.5)}
    with pytest.raises(ConfigError, match="'0.5' has max_bad_rows=0.5, '5' has 5"):
        raylance.mix(parts)
    mixed = raylance.mix({name: (open_clips(clips, "other", max_bad_rows=4), 1) for name in "ab"}, remainder="ragged")
    with mixed.loader() as loader:
        seen, error = read_until_too_many(loader.iter_batches(batch_size=50))
    assert len(seen) == 1400, "rows of unlike datasets are different"
    assert f"row offset 700 of a ({clips})" in str(error)
    assert f"row offset 700 of b ({clips})" in str(error)


IMAGES = make_images(3)
RAW = [raw(np.arange(4) + start) for start in (1, 5, 9)]
GREY = [encode(np.full((24, 32), grey, np.uint8)) for grey in (3, 200)]


@pytest.mark.parametrize(
    ("decoder", "samples"),
    [
        (raylance.Image("image"), IMAGES),
        (raylance.Image("image"), GREY),
        (raylance.Image("image", size=16), IMAGES),
        (raylance.Image("image", size=(10, 40), augment=raylance.CenterCrop(), hflip=1.0), IMAGES),
        (raylance.Image("image", size=16, augment=raylance.RandomResizedCrop(), hflip=0.5), IMAGES),
        (raylance.Image("image", size=16, augment=raylance.RandomResizedCrop(), hflip=0.5), GREY),
        (raylance.Image("image", size=16, augment=raylance.RandomResizedCrop(), hflip=0.5, views=2), IMAGES),
        (Npy("array"), [npy(array) for array in ARRAYS[:4]]),
        (Waveform("sound", 20), SOUNDS[:4]),
        (Raw("raw"), RAW),
    ],
)
def test_right_decoders_keep_the_promises(decoder: raylance.Decoder, samples: list[bytes]) -> None:
    check_decoder(decoder, samples)


def test_a_decode_fn_keeps_them_too() -> None:
    def decode_fn(data: bytes) -> np.ndarray:
        return np.full((2, 3, 3), len(data), np.uint8)

    check_decoder(raylance.Image("image", decode_fn=decode_fn, hflip=0.5), [b"a", b"bc"], bad=())


class Thawed(Raw):
    __setattr__ = object.__setattr__


@dataclasses.dataclass(frozen=True)
class Locked(Raw):
    lock: Any = dataclasses.field(default_factory=threading.Lock)


def decodes_by(decode: Callable[[memoryview, np.ndarray], Any]) -> Raw:
    methods = {"decode_into": lambda self, encoded, draws, out: decode(encoded, out)}
    return type(decode.__name__, (Raw,), methods)("raw")


def decode_raw(encoded: memoryview, out: np.ndarray) -> None:
    Raw("raw").decode_into(encoded, np.empty(0), out)


def partial(encoded: memoryview, out: np.ndarray) -> None:
    decode_raw(encoded, scratch := np.empty_like(out))
    out[:-1] = scratch[:-1]


def noisy(encoded: memoryview, out: np.ndarray) -> None:
    decode_raw(encoded, out)
    out += np.random.default_rng().normal()


SCRATCH = np.empty(4, np.float32)


def sharing(encoded: memoryview, out: np.ndarray) -> None:
    decode_raw(encoded, SCRATCH)
    time.sleep(0.001)
    out[:] = SCRATCH


def overwriting(encoded: memoryview, out: np.ndarray) -> None:
    decode_raw(encoded, out)
    torch.frombuffer(encoded, dtype=torch.uint8)[4] += 1


def lenient(encoded: memoryview, out: np.ndarray) -> None:
    out[:] = 0
    with contextlib.suppress(ValueError):
        decode_raw(encoded, out)


def constant(encoded: memoryview, out: np.ndarray) -> None:
    out[:] = 0


def opens(change: Callable[[list[Any], memoryview, np.ndarray], Any]) -> Raw:
    """Opens row decoders that decode rightly, and do something after each row, with a list of their own."""

    class Opened:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def decode_into(self, encoded: memoryview, draws: np.ndarray, out: np.ndarray) -> None:
            try:
                decode_raw(encoded, out)
            finally:
                change(self.seen, encoded, out)

    return type(change.__name__, (Raw,), {"open": lambda self: Opened()})("raw")


def keeping(seen: list[Any], encoded: memoryview, out: np.ndarray) -> None:
    seen.append(encoded[4:])


def remembering(seen: list[Any], encoded: memoryview, out: np.ndarray) -> None:
    seen.append(out.sum())
    out -= seen[0] != out.sum()


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (object(), "is not a raylance.Decoder"),
        (Thawed("raw"), "its field column can be set"),
        (Locked("raw"), "cannot be copied, compared, pickled .*lock"),
        (decodes_by(partial), "sample 0 leaves parts of `out`"),
        (decodes_by(noisy), "sample 0 decodes differently each time"),
        (opens(remembering), "sample 1 decodes differently after others"),
        (decodes_by(sharing), "decodes differently while another thread decodes"),
        (opens(keeping), "sample 0 is kept"),
        (decodes_by(overwriting), "sample 0 was changed"),
        (decodes_by(lenient), "0 bad bytes, b''…, decode: raise"),
        (Returns("raw"), "was returned as ndarray"),
        (Fails("raw"), "cannot be opened|model.onnx"),
        (Raw("raw", (2, 3)), r"cannot decode the first sample .*reshape"),
        (decodes_by(constant), "all samples decode to the same"),
        (Resolves("raw"), "gave Raw"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_wrong_decoders_are_caught(decoder: Any, message: str) -> None:
    with pytest.raises((AssertionError, ConfigError), match=message):
        check_decoder(decoder, RAW)


@pytest.mark.parametrize("mask", [False, True])
def test_a_codec_that_is_not_installed_makes_no_row_bad(mask: bool) -> None:
    class Foreign(Raw):
        def decode_into(self, encoded: memoryview, draws: np.ndarray, out: np.ndarray) -> None:
            import no_such_codec  # noqa: F401

    decoding = OpenDecoding(Decoding(decoders=(Foreign("raw"),), seed=0, mask_bad_rows=mask))
    with pytest.raises(ConfigError, match="no_such_codec"):
        decoding.apply(pa.table({"raw": [b""], "_rowoffset": [0]}), 0)


def test_each_thread_opens_its_own() -> None:
    """`OpenWaveform` refuses to work in another thread than the one that opened it."""
    decoding = OpenDecoding(Decoding(decoders=(Waveform("sound", 20),), seed=0, mask_bad_rows=False))
    table = pa.table({"sound": SOUNDS, "_rowoffset": range(ROWS)})
    alone = decoding.apply(table, 0, own_memory=True)[0]
    with ThreadPoolExecutor(4) as threads:
        assert decoding.apply(table, 0, threads, own_memory=True)[0].equals(alone)
        both = list(threads.map(lambda epoch: decoding.apply(table, epoch, own_memory=True)[0], [0, 1, 0, 1]))
    assert [one.equals(alone) for one in both] == [True, False, True, False]
    assert both[1].equals(both[3])


@dataclasses.dataclass(frozen=True)
class Tagged(raylance.Image):
    """An image decoder of a user's, without slots."""

    tag: str = ""

    def __post_init__(self) -> None:
        raylance.Image.__post_init__(self)
        self.__dict__["made"] = self.tag.upper()


def test_a_subclass_of_a_setting_need_not_have_slots(images_uri: str) -> None:
    for size in (8, None):
        data = raylance.dataset(images_uri, columns=[Tagged("image", size=size, tag="a")], filter="id < 1")
        assert data.head(1)["image"].shape[0] == 1
    tagged = Tagged("image", size=8, tag="a")
    assert copy.copy(tagged) == pickle.loads(pickle.dumps(tagged)) == tagged
    assert tagged.resolve(b"").made == "A"  # type: ignore[attr-defined]
