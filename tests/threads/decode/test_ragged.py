"""Ragged decoders: rows of any length through every way to the batches, padded, jagged, as lists."""

import dataclasses
import io
import wave
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance import Pad
from raylance.api.loader import consumer_of
from raylance.decode.arrays import to_arrow, to_numpy
from raylance.errors import ConfigError, DatasetError
from raylance.testing import check_decoder
from raylance.torch_data import IterableDataset, Loader, MapDataset
from tests.helpers.images import wav
from tests.helpers.scripts import FORKED

ROWS = 60
LENGTHS = np.random.default_rng(0).integers(1, 50, ROWS)
BAD = 7, 8  # damaged, and missing


@dataclasses.dataclass(frozen=True)
class Speech(raylance.RaggedDecoder):
    """Mono WAV of 16 bits as float32 (length,), at a random volume."""

    volume: float = 0.0
    shape, dtype = (), "float32"
    draws = 1

    def open(self) -> "Speech":
        return self

    def decode(self, encoded: memoryview, draws: np.ndarray) -> np.ndarray:
        with wave.open(io.BytesIO(encoded)) as file:
            frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            if len(frames) < file.getnframes():
                raise ValueError(f"has {len(frames)} of {file.getnframes()} frames")
        return (frames / np.float32(32768) * np.float32(1 + self.volume * draws[0])).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Boxes(raylance.RaggedDecoder):
    """Boxes as bytes of float32, (length, 4)."""

    shape, dtype, content = (4,), np.dtype(np.float32), "boxes"
    open = Speech.open

    def decode(self, encoded: memoryview, draws: np.ndarray) -> np.ndarray:
        return np.frombuffer(encoded, np.float32).reshape(-1, 4)


def sound(row: int) -> np.ndarray:
    return np.arange(0 if row in BAD else LENGTHS[row]) / np.float32(32768)


def boxes(row: int) -> np.ndarray:
    return np.full((0 if row in BAD else row % 4, 4), row, np.float32)


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    sounds: list[bytes | None] = [wav(np.arange(length)) for length in LENGTHS]
    sounds[BAD[0]], sounds[BAD[1]] = b"damaged", None
    packed: list[bytes | None] = [np.full((row % 4, 4), row, np.float32).tobytes() for row in range(ROWS)]
    packed[BAD[0]], packed[BAD[1]] = b"bad", None
    columns = {"sound": pa.array(sounds, pa.binary()), "boxes": pa.array(packed, pa.binary())}
    return write_dataset(pa.table({"id": np.arange(ROWS), **columns}))


def open_all(uri: str, **changes: Any) -> raylance.Dataset:
    arguments = {"decode": [Speech("sound"), Boxes("boxes")], "on_bad_row": "mask", "remainder": "ragged"} | changes
    return raylance.dataset(uri, **arguments)


PADS: dict[str, Any] = {"sound": Pad(-1.0, multiple=8), "boxes": Pad(0, length=5)}


@pytest.mark.parametrize("decoders", [0, 2])
def test_ragged_rows_in_every_format(uri: str, decoders: int) -> None:
    handle = open_all(uri)
    assert handle.schema.field("sound").type == Speech("sound").arrow_type == pa.list_(pa.float32())
    assert handle.schema.field("boxes").type == Boxes("boxes").arrow_type
    with handle.loader(num_decoders=decoders) as loader:
        seen = 0
        for batch in loader.iter_batches(batch_size=16, pad_lists={"sound": None, "boxes": None}):
            for row, number in enumerate(batch["id"]):
                np.testing.assert_array_equal(batch["sound"][row], sound(number))
                np.testing.assert_array_equal(batch["boxes"][row], boxes(number))
                seen += 1
        assert seen == ROWS
        for batch in loader.iter_torch_batches(batch_size=16, pad_lists=PADS):
            assert batch["sound"].shape[1] % 8 == 0
            assert batch["boxes"].shape[1:] == (5, 4)
            assert batch["sound"].dtype == torch.float32
            assert batch["sound_length"].dtype == torch.int64
            for row, number in enumerate(batch["id"].tolist()):
                wanted = sound(number)
                assert batch["sound_length"][row] == len(wanted)
                np.testing.assert_array_equal(batch["sound"][row, : len(wanted)], wanted)
                assert (batch["sound"][row, len(wanted) :] == -1).all()
                assert batch["boxes_length"][row] == len(boxes(number))
                np.testing.assert_array_equal(batch["boxes"][row, : number % 4][: len(boxes(number))], boxes(number))
        for batch in loader.iter_torch_batches(batch_size=16, pad_lists={"sound": "jagged", "boxes": "jagged"}):
            for name, of in (("sound", sound), ("boxes", boxes)):
                nested = batch[name]
                assert nested.layout == torch.jagged
                assert nested.shape[0] == len(batch["id"])
                for made, number in zip(nested.unbind(), batch["id"].tolist(), strict=True):
                    np.testing.assert_array_equal(made, of(number))
        for batch in loader.iter_batches(batch_size=16, pad_lists={"sound": "jagged", "boxes": 0}):
            cuts = np.split(batch["sound"], batch["sound_offsets"][1:-1])
            for made, number in zip(cuts, batch["id"], strict=True):
                np.testing.assert_array_equal(made, sound(number))
            assert "boxes_length" not in batch
        (frame,) = loader.iter_batches(batch_size=ROWS, batch_format="pandas")
        assert {len(values) for values in frame["sound"]} == {0, *LENGTHS.tolist()}
        why = {offset: reason for offset, _, reason in consumer_of(loader).recorder.stats.bad_rows}
    assert set(why) == set(BAD)


def test_values_do_not_depend_on_ranks(uri: str) -> None:
    """P4: values and lengths; padded bytes too, where the length is fixed."""

    def hashes(world_size: int) -> list[bytes]:
        parts = []
        for rank in range(world_size):
            steps = IterableDataset(
                open_all(uri, decode=[Speech("sound", volume=0.5), Boxes("boxes")], remainder="drop"),
                global_batch_size=12,
                dist_info=(rank, world_size),
                pad_lists={"sound": Pad(0, length=64), "boxes": Pad(0, length=4)},
            )
            parts.append([batch["sound"].numpy() for batch in steps])
        return [np.concatenate(step).tobytes() for step in zip(*parts, strict=True)]

    assert hashes(1) == hashes(2) == hashes(3)


@dataclasses.dataclass(frozen=True)
class Clips(raylance.RaggedDecoder):
    """Frames (length, H, W, C) of one byte a value; or rows (length, W, C) of an image of any height."""

    shape: tuple[int, ...] = (2, 5, 3)
    dtype, channels_last = "uint8", True
    open = Speech.open

    def decode(self, encoded: memoryview, draws: np.ndarray) -> np.ndarray:
        return np.frombuffer(encoded, np.uint8).reshape(-1, *self.shape)


@pytest.mark.parametrize("shape", [(2, 5, 3), (5, 3)])
def test_channels_come_first_however_lists_are_given(write_dataset: Callable[..., str], shape: tuple[int, ...]) -> None:
    clips = [np.full((row % 3 + 1, *shape), row, np.uint8) for row in range(8)]
    for clip in clips:
        clip[..., 0] += 100
    uri = write_dataset(pa.table({"clip": pa.array([clip.tobytes() for clip in clips], pa.binary())}))
    handle = raylance.dataset(uri, decode=Clips("clip", shape), order="sequential")
    wanted = [torch.from_numpy(clip) for clip in clips]
    if len(shape) == 3:
        wanted = [clip.movedim(-1, -3) for clip in wanted]
    given: dict[str, Any] = {"batch_size": 8, "dtypes": torch.float16}
    (padded,) = handle.iter_torch_batches(pad_lists={"clip": Pad(0)}, **given)
    (jagged,) = handle.iter_torch_batches(pad_lists={"clip": "jagged"}, **given)
    (lists,) = handle.iter_torch_batches(pad_lists={"clip": None}, **given)
    for row, (clip, single) in enumerate(zip(wanted, MapDataset(handle).__getitems__(list(range(8))), strict=True)):
        assert torch.equal(padded["clip"][row, : len(clip)], clip.half())
        assert torch.equal(jagged["clip"].unbind()[row], clip.half())
        assert torch.equal(lists["clip"][row], clip.half())
        assert torch.equal(single["clip"], clip)
    assert {each.dtype for each in (padded["clip"], jagged["clip"], *lists["clip"])} == {torch.float16}


def test_ragged_rows_under_torchs_dataloader(uri: str) -> None:
    steps = IterableDataset(open_all(uri), batch_size=10, dist_info=(0, 1), pad_lists={"sound": "jagged", "boxes": 0})
    rows = 0
    for batch in Loader(steps, num_workers=1, multiprocessing_context=FORKED):
        for made, number in zip(batch["sound"].unbind(), batch["id"].tolist(), strict=True):
            np.testing.assert_array_equal(made, sound(number))
            rows += 1
    assert rows == ROWS
    row = MapDataset(open_all(uri)).__getitems__([5])[0]
    np.testing.assert_array_equal(row["sound"], sound(5))


def test_a_transform_gets_and_gives_arrays_of_any_length(uri: str) -> None:
    def louder(batch: dict[str, Any]) -> dict[str, Any]:
        assert all(each.shape == (len(each), 4) for each in batch["boxes"])
        return {"id": batch["id"], "sound": pa.array([2 * each for each in batch["sound"]], pa.list_(pa.float32()))}

    handle = open_all(uri, transform=louder)
    (batch,) = handle.iter_batches(batch_size=ROWS, pad_lists={"sound": None})
    for made, number in zip(batch["sound"], batch["id"], strict=True):
        np.testing.assert_array_equal(made, 2 * sound(number))


def test_what_cannot_be_padded_so(uri: str) -> None:
    handle = open_all(uri)
    for pads, message in (
        ({"sound": Pad(1e300)}, "cannot hold"),
        ({"sound": "ragged"}, 'a number or a raylance.Pad, take values and offsets with "jagged"'),
        ({"id": Pad()}, "holds no lists of numbers"),
    ):
        with pytest.raises(ConfigError, match=message):
            handle.iter_torch_batches(batch_size=4, pad_lists=pads)
    for make, message in (
        (lambda: Pad(length=0), "at least 1"),
        (lambda: Pad(length=8, multiple=2), "Leave multiple= out"),
        (lambda: Pad(truncate=True), "without length="),
        (lambda: Pad(lengths="no"), "must be True or False"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    with pytest.raises(DatasetError, match=r"49 values, .* 20"):
        list(handle.iter_batches(batch_size=ROWS, pad_lists={"sound": Pad(length=20)}))
    (cut,) = handle.iter_batches(batch_size=ROWS, pad_lists={"sound": Pad(length=20, truncate=True), "boxes": None})
    assert cut["sound"].shape == (ROWS, 20)
    for row, number in enumerate(cut["id"]):
        assert cut["sound_length"][row] == min(20, len(sound(number)))
        np.testing.assert_array_equal(cut["sound"][row, : len(sound(number))], sound(number)[:20])


def test_a_column_of_the_name_of_the_lengths(write_dataset: Callable[..., str]) -> None:
    table = pa.table({"tokens": [[1], [1, 2]], "tokens_length": [1, 2]})
    handle = raylance.dataset(write_dataset(table))
    with pytest.raises(ConfigError, match="adds a column 'tokens_length'"):
        handle.iter_batches(batch_size=2, pad_lists={"tokens": Pad()})
    (batch,) = handle.iter_batches(batch_size=2, pad_lists={"tokens": Pad(lengths=False)})
    assert batch["tokens"].shape == (2, 2)


@given(
    st.lists(st.one_of(st.lists(st.integers(0, 99), max_size=6)), max_size=8),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 7)),
    st.sampled_from([(), (2,), (2, 3)]),
)
def test_padding_keeps_every_value(
    rows: list[list[int]], multiple: int, length: int | None, shape: tuple[int, ...]
) -> None:
    values = [np.array(row, np.int32).repeat(int(np.prod(shape))).reshape(-1, *shape) for row in rows]
    flat = np.concatenate([np.empty((0, *shape), np.int32), *values])
    ends = pa.array(np.cumsum([0, *map(len, rows)]), pa.int32())
    table = pa.table({"x": pa.ListArray.from_arrays(ends, to_arrow(flat))})
    pad = Pad(np.array(-1), multiple=multiple) if length is None else Pad(np.array(-1), length=length, truncate=True)
    batch = to_numpy(pa.concat_tables([table.slice(0, 3), table.slice(3)]), {"x": pad})
    assert batch["x"].shape[0] == len(rows)
    assert batch["x"].shape[2:] == shape
    assert batch["x"].shape[1] % (multiple if length is None else length) == 0
    for made, used, wanted in zip(batch["x"], batch["x_length"], values, strict=True):
        np.testing.assert_array_equal(made[:used], wanted[:length])
        assert used == len(wanted[:length])
        assert (made[used:] == -1).all()


class Wrong(Speech):
    def decode(self, encoded: memoryview, draws: np.ndarray) -> Any:
        return super().decode(encoded, draws).astype(np.float64)


def test_wrong_ragged_decoders_are_named(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"'sound' of row offset 0 was decoded to float64 \(\d+,\)"):
        raylance.dataset(uri, decode=Wrong("sound"), columns=["sound"])
    with pytest.raises(ConfigError, match="was decoded to float64"):
        check_decoder(Wrong("sound"), [wav(np.arange(5)), wav(np.arange(9))])
    check_decoder(Speech("sound", volume=1.0), [wav(np.arange(length)) for length in (5, 9, 50)])
    check_decoder(Boxes("boxes"), [boxes(1).tobytes(), boxes(2).tobytes()], bad=[b"bad"])
