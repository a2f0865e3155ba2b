"""Windows over episodes through handles and loaders: every sample once, every value and mark of padding right."""

import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lance
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import raylance
from raylance.errors import ConfigError, DatasetError, StateError
from raylance.samples.pack_tokens import PackTokens
from tests.helpers.images import encode
from tests.helpers.robot_windows import OFFSETS, ROWS, WINDOWS, check, expected, frames


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(*[frames().slice(at, 150) for at in range(0, ROWS, 150)])


def delivered(data: raylance.Dataset, samples: dict[int, dict[str, Any]], **arguments: Any) -> list[int]:
    batches = data.iter_torch_batches(with_row_offset=True, **({"batch_size": 32} | arguments))
    return [offset for batch in batches for offset in check(batch, samples)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"at_ends": "drop"}, {"stride": 3}, {"at_ends": "drop", "stride": 2}],
    ids=["pad", "drop", "stride", "drop and stride"],
)
def test_each_sample_comes_once(uri: str, changes: dict[str, Any]) -> None:
    windows = dataclasses.replace(WINDOWS, **changes)
    data, samples = raylance.dataset(uri, samples=windows, remainder="ragged"), expected(frames(), windows)
    assert len(data) == len(samples) > 0
    for epoch in range(2):
        assert sorted(delivered(data, samples, epoch=epoch)) == sorted(samples)
    assert ("action_is_pad" in data.schema.names) == (windows.at_ends == "pad")


@pytest.mark.parametrize("order", ["row", "sequential", "shard", raylance.WindowShuffle(shard_rows=7, lanes=3)])
def test_orders_and_worlds_and_resumes(uri: str, order: Any) -> None:
    """The global batches are the same for each world, also after a resume with another one."""
    data, samples = raylance.dataset(uri, samples=WINDOWS, order=order), expected(frames())
    whole = list(data.iter_batches(global_batch_size=24, with_row_offset=True))
    seen = [offset for batch in whole for offset in check(batch, samples)]
    assert len(set(seen)) == len(seen) == ROWS // 24 * 24
    for world in (2, 3):
        with data.loader(rank=0, world_size=world) as loader:
            batches = iter(loader.iter_batches(global_batch_size=24, with_row_offset=True))
            first = [check(next(batches), samples) for _ in range(5)]
            state = loader.state_dict()
        assert first == [batch["_rowoffset"][: 24 // world].tolist() for batch in whole[:5]]
        with data.loader(rank=1, world_size=2) as loader:
            loader.load_state_dict(state)
            rest = [check(each, samples) for each in loader.iter_batches(global_batch_size=24, with_row_offset=True)]
        assert rest == [batch["_rowoffset"][12:].tolist() for batch in whole[5:]]


@pytest.mark.parametrize("neighbours", ["episode", "selected"])
def test_filters_select_anchors(uri: str, neighbours: Any) -> None:
    windows = dataclasses.replace(WINDOWS, neighbours=neighbours)
    selected = {row for row, state in enumerate(frames()["state"].to_pylist()) if state % 3}
    data = raylance.dataset(uri, samples=windows, filter="state % 3 != 0", remainder="ragged")
    samples = expected(frames(), windows, selected)
    assert sorted(delivered(data, samples)) == sorted(selected)


def test_a_split_by_episode_keeps_neighbours_apart(uri: str) -> None:
    samples, found = expected(frames()), []
    for part in ("train", "val"):
        split = raylance.FractionSplit(fractions={"train": 0.7, "val": 0.3}, part=part, by="episode")
        data = raylance.dataset(uri, samples=WINDOWS, split=split, remainder="ragged")
        found.append(delivered(data, samples))
    episodes = [{samples[offset]["episode"] for offset in part} for part in found]
    assert not episodes[0] & episodes[1]
    assert sorted(found[0] + found[1]) == list(range(ROWS))


def test_rows_of_an_episode_need_not_be_stored_together(write_dataset: Callable[..., str]) -> None:
    table = frames()
    mixed = table.take(np.random.default_rng(1).permutation(ROWS))
    data = raylance.dataset(write_dataset(mixed), samples=WINDOWS, remainder="ragged")
    samples = expected(mixed)
    assert sorted(delivered(data, samples)) == list(range(ROWS))


def test_deleted_rows_and_appended_episodes(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(frames())
    lance.dataset(uri).delete("state < 100")
    lance.write_dataset(frames(1, 50, first_episode=1000), uri, mode="append")
    live = lance.dataset(uri).to_table()
    data = raylance.dataset(uri, samples=WINDOWS, remainder="ragged")
    assert sorted(delivered(data, expected(live))) == list(range(live.num_rows))


def test_rows_on_request(uri: str) -> None:
    data, samples = raylance.dataset(uri, samples=WINDOWS), expected(frames())
    assert check(data.head(7), samples) == list(range(7))
    assert check(data.take([399, 3, 3, 0]), samples) == [399, 3, 3, 0]
    assert check(data[100:110], samples) == list(range(100, 110))
    assert data[5]["action"].shape == (4, 3)
    for wrong in (-1, ROWS):
        with pytest.raises(DatasetError):
            data.take([wrong])
    assert "action" in repr(data.show(3))
    assert f"{ROWS} rows" in repr(data.plan(32))
    empty = raylance.dataset(uri, samples=dataclasses.replace(WINDOWS, stride=20), remainder="ragged_or_empty")
    with empty.loader(rank=0, world_size=3) as loader:
        shapes = [batch["action"].shape for batch in loader.iter_batches(global_batch_size=len(empty) - 1)]
    assert shapes[-1] == (0, 4, 3)


def test_map_style_rows(uri: str) -> None:
    from raylance import torch_data

    rows = torch_data.MapDataset(raylance.dataset(uri, samples=WINDOWS))
    assert [rows[3][name].tolist() for name in ("state", "action_is_pad")] == [
        expected(frames())[3][name] for name in ("state", "action_is_pad")
    ]


def test_shares_change_in_mid_epoch(uri: str) -> None:
    samples, data = expected(frames()), raylance.dataset(uri, samples=WINDOWS, order="row", remainder="ragged")
    loaders = [data.loader(rank=rank, world_size=2) for rank in range(2)]
    seen = []
    for loader in loaders:
        batches = iter(loader.iter_batches(global_batch_size=40, with_row_offset=True))
        for _ in range(4):
            seen += check(next(batches), samples)
    loaders[1].close()
    loaders[0].reshard(0, 1)
    with loaders[0] as loader:
        for batch in loader.iter_batches(global_batch_size=40, with_row_offset=True):
            seen += check(batch, samples)
    assert sorted(seen) == list(range(ROWS))


def test_weighted_samples_and_mixtures(uri: str, write_dataset: Callable[..., str]) -> None:
    samples = expected(frames())
    drawn = raylance.dataset(uri, samples=WINDOWS, order=raylance.Weighted(weights="state"))
    assert len(delivered(drawn, samples)) > len(set(delivered(drawn, samples))) > 100, "some come repeatedly"
    other = frames(5, 100, first_episode=7)
    parts = {
        "a": (raylance.dataset(uri, samples=WINDOWS), 0.75),
        "b": (raylance.dataset(write_dataset(other), samples=WINDOWS), 0.25),
    }
    mixture, of = raylance.mix(parts), [samples, expected(other)]
    seen: list[tuple[int, int]] = []
    for batch in mixture.iter_batches(batch_size=20, with_row_offset=True):
        for number in (0, 1):
            mine = batch["_component"] == number
            offsets = check({name: values[mine] for name, values in batch.items()}, of[number])
            seen += [(number, offset) for offset in offsets]
    assert len(set(seen)) == len(seen) > 300
    assert {number for number, _ in seen} == {0, 1}
    assert check(mixture.take([9, 2], component="b"), of[1]) == [9, 2]
    unlike = raylance.dataset(uri, samples=dataclasses.replace(WINDOWS, offsets={"state": (0, 1)}))
    with pytest.raises(ConfigError, match="schema"):
        raylance.mix({"a": (raylance.dataset(uri, samples=WINDOWS), 1), "b": (unlike, 1)})


def test_a_state_of_other_windows_is_refused(uri: str) -> None:
    with raylance.dataset(uri, samples=WINDOWS).loader() as loader:
        next(iter(loader.iter_batches(batch_size=16)))
        state = loader.state_dict()
    longer = dataclasses.replace(WINDOWS, offsets=OFFSETS | {"done": (1, 2)})
    for other, named in (({"samples": longer}, r"windows\.offsets\.done: saved"), ({}, r"windows: saved Windows\(")):
        with (
            raylance.dataset(uri, **other).loader() as loader,
            pytest.raises(StateError, match=named),
        ):
            loader.load_state_dict(state)


def test_pictures_come_from_the_anchor(write_dataset: Callable[..., str]) -> None:
    import io

    def png(value: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (8, 8), (value, value, value)).save(out, "png")
        return out.getvalue()

    table = frames(rows=100).append_column("image", pa.array([png(row) for row in range(100)]))
    data = raylance.dataset(
        write_dataset(table), samples=WINDOWS, decode=raylance.Image("image", size=(8, 8)), remainder="ragged"
    )
    seen = []
    for batch in data.iter_torch_batches(batch_size=16, with_row_offset=True):
        assert batch["image"].shape[1:] == (3, 8, 8)
        assert batch["image"][:, 0, 0, 0].tolist() == batch["_rowoffset"].tolist()
        seen += check({name: each for name, each in batch.items() if name != "image"}, expected(frames(rows=100)))
    assert sorted(seen) == list(range(100))
    with pytest.raises(ConfigError, match="'state_is_pad'"):
        raylance.dataset(
            data._spec.read.source.uri,
            samples=WINDOWS,
            decode=raylance.Image("image", size=(8, 8), name="state_is_pad"),
        )
    encoded = raylance.dataset(
        data._spec.read.source.uri,
        columns=["image"],
        samples=raylance.Windows(episode="episode", offsets={"image": [0, 1]}),
    )
    for batch in encoded.iter_batches(batch_size=20, batch_format="pyarrow", with_row_offset=True):
        offsets = batch["_rowoffset"].to_pylist()
        assert [value[0].as_py() for value in batch["image"]] == [png(row) for row in offsets]


def test_times_are_checked(write_dataset: Callable[..., str]) -> None:
    table = frames()
    by_time = raylance.Windows(episode="episode", seconds={"state": (-0.3, 0)}, timestamp="time")
    data = raylance.dataset(write_dataset(table), samples=by_time, columns=["state"], remainder="ragged")
    wanted = expected(table, raylance.Windows(episode="episode", offsets={"state": (-3, 0)}))
    assert sorted(delivered(data, wanted)) == list(range(ROWS))
    times = table["time"].to_numpy().copy()
    late = int(np.flatnonzero(np.diff(times) > 0)[40] + 1)
    times[late] += 0.05
    wrong = table.set_column(1, "time", pa.array(times))
    with pytest.raises(DatasetError, match=rf"offset {late} .*0\.15 s .*0\.1 s"):
        raylance.dataset(write_dataset(wrong), samples=by_time)


@pytest.mark.parametrize(
    ("times", "row"),
    [
        (pa.array([*np.arange(20) / 10, float("nan"), *np.arange(21, 40) / 10]), 20),
        (pa.array([*np.arange(20) / 10, *np.arange(21, 41) / 10]), 20),
        (pa.array([*(4e6 + np.arange(20) / 10), *np.arange(20) / 10], pa.float32()), 1),
        (pa.array(np.r_[np.arange(20), np.arange(19, 39)] * 100_000, pa.timestamp("us")), 20),
    ],
    ids=["NaN", "gap", "coarse", "twice"],
)
def test_times_that_are_not_regular_are_named(write_dataset: Callable[..., str], times: pa.Array, row: int) -> None:
    uri = write_dataset(pa.table({"e": np.zeros(40, np.int64), "x": np.arange(40), "t": times}))
    with pytest.raises(DatasetError, match=rf"offset {row} "):
        raylance.dataset(uri, samples=raylance.Windows(episode="e", offsets={"x": [0]}, timestamp="t", fps=10))


def test_types_of_windows(write_dataset: Callable[..., str]) -> None:
    """Also of eight flags, which Arrow keeps in one byte."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rows = 60
    bits = pa.array(np.arange(rows, dtype=np.float32).astype(ml_dtypes.bfloat16).view(np.uint16))
    tensor = pa.fixed_shape_tensor(pa.int16(), (2, 3), permutation=[1, 0])
    table = pa.table(
        {
            "e": pa.array([f"episode {row // 20}" for row in range(rows)]),
            "flag": np.arange(rows) % 3 == 0,
            "flags": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 8) % 5 == 0), 8),
            "half": np.arange(rows).astype(np.float16),
            "brain": pa.ExtensionArray.from_storage(
                lance.arrow.BFloat16Type(),
                pa.FixedSizeBinaryArray.from_buffers(pa.binary(2), rows, [None, bits.buffers()[1]]),
            ),
            "tensor": pa.ExtensionArray.from_storage(
                tensor, pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 6, dtype=np.int16)), 6)
            ),
            "nested": pa.StructArray.from_arrays([pa.array(np.arange(rows))], ["x"]),
        }
    )
    names = ["flag", "flags", "half", "brain", "tensor", "nested.x"]
    windows = raylance.Windows(episode="e", offsets={name: range(8) for name in names})
    data = raylance.dataset(write_dataset(table), columns=names, samples=windows, remainder="ragged")
    assert [data.head(2)[name].shape for name in names] == [(2, 8), (2, 8, 8), (2, 8), (2, 8), (2, 8, 3, 2), (2, 8)]
    seen = 0
    for batch in data.iter_batches(batch_size=16, with_row_offset=True):
        anchors = batch["_rowoffset"]
        wanted = np.minimum(anchors[:, None] + np.arange(8), anchors[:, None] // 20 * 20 + 19)
        assert (batch["flag"] == (wanted % 3 == 0)).all()
        assert (batch["flags"] == ((wanted[..., None] * 8 + np.arange(8)) % 5 == 0)).all()
        assert (batch["half"] == wanted).all()
        assert (batch["brain"].astype(np.float32) == wanted).all()
        whole = wanted[..., None, None] * 6 + np.arange(6).reshape(2, 3)
        assert (batch["tensor"] == whole.transpose(0, 1, 3, 2)).all()
        assert (batch["nested.x"] == wanted).all()
        assert (batch["flag_is_pad"] == (anchors[:, None] + np.arange(8) != wanted)).all()
        seen += len(anchors)
    assert seen == rows


@pytest.mark.parametrize(("at_ends", "most"), [("pad", 8), ("drop", 16)])
def test_bytes_of_an_episode_that_processes_get(at_ends: Any, most: int, write_dataset: Callable[..., str]) -> None:
    episodes, lengths = 20_000, np.random.default_rng(0).integers(5, 9, 20_000)
    rows = pa.table({"e": np.repeat(np.arange(episodes), lengths), "v": np.arange(lengths.sum())})
    windows = raylance.Windows(episode="e", offsets={"v": [0, 1]}, at_ends=at_ends)
    data = raylance.dataset(write_dataset(rows), samples=windows)
    assert len(data) == lengths.sum() - (at_ends == "drop") * episodes
    assert len(pickle.dumps(data)) < most * episodes + 20_000


def test_a_row_without_whole_windows_is_not_given_on_request(uri: str, write_dataset: Callable[..., str]) -> None:
    data = raylance.dataset(uri, samples=dataclasses.replace(WINDOWS, at_ends="drop"))
    with pytest.raises(DatasetError, match="row 0 "):
        data.take([0])
    assert data.take([int(offset) for offset in data.head(3)["_rowoffset"]])["action"].shape == (3, 4, 3)
    mixture = raylance.mix({"a": (data, 1.0), "b": (data, 1.0)})
    apart = frames().take(np.random.default_rng(2).permutation(ROWS))
    for each in (uri, write_dataset(apart)):  # also rows of whole windows, if they are not selected
        chosen = raylance.dataset(each, samples=dataclasses.replace(WINDOWS, at_ends="drop"), filter="state < 500")
        whole = raylance.dataset(each, samples=dataclasses.replace(WINDOWS, at_ends="drop"), filter="state >= 500")
        with pytest.raises(DatasetError, match="no sample"):
            chosen.take([int(whole.head(1)["_rowoffset"][0])])
    row = int(data.head(1)["_rowoffset"][0])
    assert mixture.take([row], component="b")["action"].shape == (1, 4, 3)
    with pytest.raises(DatasetError, match="row 0 "):
        mixture.take([0], component="b")


def test_mixtures_have_windows_in_all_parts_or_in_none(write_dataset: Callable[..., str]) -> None:
    rows = np.arange(40)
    uri = write_dataset(pa.table({"e": rows // 10, "v": rows}))
    lists = write_dataset(pa.table({"e": rows, "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(80)), 2)}))
    windows = raylance.Windows(episode="e", offsets={"v": [0, 1]}, at_ends="drop")
    parts = {"a": (raylance.dataset(uri, samples=windows), 1), "b": (raylance.dataset(lists), 1)}
    for names in ("ab", "ba"):
        with pytest.raises(ConfigError, match="samples="):
            raylance.mix({name: parts[name] for name in names})
    both = raylance.Windows(episode="e", offsets={"v": [0], "e": [0]})
    other = raylance.Windows(episode="e", offsets={"e": [0], "v": [0]})
    mixture = raylance.mix(
        {"a": (raylance.dataset(uri, samples=both), 1), "b": (raylance.dataset(uri, samples=other), 1)}
    )
    assert mixture.schema.names == ["e", "v", "e_is_pad", "v_is_pad"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"samples": "rows"}, ConfigError, "'rows'"),
        ({"samples": raylance.Windows(episode="nothing", offsets=OFFSETS)}, DatasetError, "'nothing'"),
        ({"samples": raylance.Windows(episode="time", offsets=OFFSETS)}, ConfigError, "float"),
        ({"samples": raylance.Windows(episode="episode", offsets={"name": [0]})}, ConfigError, "'name'.*string"),
        ({"samples": raylance.Windows(episode="episode", offsets={"none": [0]})}, ConfigError, "'none'"),
        ({"samples": WINDOWS, "columns": ["state"]}, ConfigError, "'action'"),
        (
            {"samples": dataclasses.replace(WINDOWS, offsets={"state": [0, 99]}, at_ends="drop")},
            DatasetError,
            "whole windows",
        ),
        ({"samples": dataclasses.replace(WINDOWS, stride=50), "filter": "state = 5"}, DatasetError, "stride="),
        ({"samples": WINDOWS, "pack": PackTokens("name", 8)}, ConfigError, "PackTokens"),
    ],
)
def test_what_cannot_be_honoured(uri: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        raylance.dataset(uri, **changes)


def test_a_row_without_an_episode_is_named(write_dataset: Callable[..., str]) -> None:
    table = frames()
    episodes = table["episode"].to_pylist()
    episodes[123] = None
    uri = write_dataset(table.set_column(0, "episode", pa.array(episodes)))
    with pytest.raises(DatasetError, match="offset 123"):
        raylance.dataset(uri, samples=WINDOWS)


def test_samples_that_need_more_rows_than_a_reader_may_hold(write_dataset: Callable[..., str]) -> None:
    """Scattered anchors have up to 64 rows each; a chunk of them is made smaller until its rows fit."""
    rows = 3000
    values = pa.array(np.arange(rows * 256, dtype=np.float32))
    table = pa.table({"e": np.arange(rows) // 500, "x": pa.FixedSizeListArray.from_arrays(values, 256)})
    uri = write_dataset(table)
    windows = raylance.Windows(episode="e", offsets={"x": range(-32, 32, 4)})
    data = raylance.dataset(uri, samples=windows, order="row", remainder="ragged")
    with data.loader(runtime="threads", reader_bytes=1 << 20, inflight_bytes=4 << 20) as loader:
        seen = []
        for batch in loader.iter_batches(global_batch_size=50, with_row_offset=True):
            anchors = batch["_rowoffset"]
            first = anchors // 500 * 500
            wanted = np.clip(anchors[:, None] + np.arange(-32, 32, 4), first[:, None], first[:, None] + 499)
            assert (batch["x"][:, :, 0] == wanted * 256).all()
            seen += anchors.tolist()
    assert sorted(seen) == list(range(rows))
    with (
        data.loader(runtime="threads", reader_bytes=8 << 10) as loader,
        pytest.raises(DatasetError, match="reader_bytes"),
    ):
        next(iter(loader.iter_batches(global_batch_size=50)))


def test_pictures_in_windows_get_one_crop(write_dataset: Callable[..., str]) -> None:
    """Pictures of a sample are cropped alike, with their masks; a sample with a bad one is masked."""
    rng, rows, offsets = np.random.default_rng(0), 40, [-1, 0, 2]
    back = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
    files = [encode(np.roll(back, row, 1)) for row in range(rows)]
    masks = [encode(np.roll(back[..., 0], row, 1)) for row in range(rows)]
    files[25] = b"no picture"
    uri = write_dataset(
        pa.table({"episode": np.arange(rows) // 20, "row": np.arange(rows), "image": files, "mask": masks})
    )
    cut = raylance.RandomResizedCrop(scale=(0.3, 0.3), ratio=(1.0, 1.0))
    data = raylance.dataset(
        uri, columns=["row", "image", "mask"], on_bad_row="mask", max_bad_rows=None, remainder="ragged",
        decode=[
            raylance.Image("image", size=8, augment=cut, hflip=0.5, interpolation="nearest"),
            raylance.Image("mask", like="image", mode="L", interpolation="nearest"),
        ],
        samples=raylance.Windows(episode="episode", offsets={"image": offsets, "mask": offsets}),
    )  # fmt: skip
    assert data.schema.names == ["row", "image", "mask", "image_is_pad", "mask_is_pad"]
    masked, seen = [], []
    for batch in data.iter_torch_batches(batch_size=8):
        assert batch["image"].shape[1:] == (3, 3, 8, 8)
        assert batch["mask"].shape[1:] == (3, 1, 8, 8)
        for place, row in enumerate(batch["row"].tolist()):
            seen.append(row)
            pictures = batch["image"][place]
            if not batch["_valid"][place]:
                masked.append(row)
                assert not pictures.any()
                continue
            assert (pictures[:, :1] == batch["mask"][place]).all(), "one part of all, and of their masks"
            first, last = row // 20 * 20, row // 20 * 20 + 19
            wanted = [min(max(row + each, first), last) for each in offsets]
            assert batch["image_is_pad"][place].tolist() == [not first <= row + each <= last for each in offsets]
            assert [(one == pictures[0]).all().item() for one in pictures] == [each == wanted[0] for each in wanted]
    assert sorted(seen) == list(range(rows))
    assert sorted(masked) == [23, 25, 26]
    with pytest.raises(ConfigError, match="'image'"):
        raylance.dataset(uri, decode=raylance.images.DeviceImage("image", size=8), samples=data_windows("image"))


@dataclasses.dataclass(frozen=True, slots=True)
class Counted(raylance.Decoder):
    """Decodes "3" to 3, and lists what it decodes, in any thread."""

    shape = ()
    dtype = np.int64
    content = "numbers"
    decoded: ClassVar[list[bytes]] = []

    def open(self) -> "Counted":
        return self

    def decode_into(self, encoded: memoryview, draws: Any, out: Any) -> None:
        self.decoded.append(bytes(encoded))
        out[...] = int(bytes(encoded))


def counted(
    write_dataset: Callable[..., str], bad: dict[int, bytes | None] | None = None, rows: int = 240, **arguments: Any
) -> raylance.Dataset:
    """Rows of encoded numbers in episodes of 60, and windows of the last eight, and of the one 20 rows before."""
    texts: list[bytes | None] = [b"%d" % row for row in range(rows)]
    for row, value in (bad or {}).items():
        texts[row] = value
    uri = write_dataset(pa.table({"episode": np.arange(rows) // 60, "near": texts, "far": texts}))
    windows = raylance.Windows(episode="episode", offsets={"near": range(-7, 1), "far": [-20, 0]})
    arguments = {"decode": [Counted("near"), Counted("far")], "samples": windows, "remainder": "ragged"} | arguments
    return raylance.dataset(uri, **arguments)


def of_window(row: int, offset: int) -> int:
    return max(row + offset, row // 60 * 60)


@pytest.mark.parametrize("decoders", [0, 1, 3])
@pytest.mark.parametrize("order", ["shard", "sequential", "window"])
def test_values_that_samples_share_are_decoded_once_a_chunk(
    write_dataset: Callable[..., str], order: str, decoders: int
) -> None:
    data, seen = counted(write_dataset, order=order), list[int]()
    Counted.decoded.clear()
    with data.loader(runtime="threads", num_decoders=decoders) as loader:
        for _ in range(2):
            for batch in loader.iter_batches(global_batch_size=240, with_row_offset=True):
                for row, near, far in zip(batch["_rowoffset"].tolist(), batch["near"], batch["far"], strict=True):
                    assert near.tolist() == [of_window(row, offset) for offset in range(-7, 1)]
                    assert far.tolist() == [of_window(row, -20), row]
                    seen.append(row)
    assert sorted(seen) == sorted([*range(240)] * 2)
    counts = Counter(Counted.decoded).values()
    assert min(counts) >= 2 * 2, "for two columns in two epochs"
    assert max(counts) <= 2 * 4, "and in two more epochs: a reader holds two chunks"


def test_values_that_no_sample_needs_are_not_decoded(write_dataset: Callable[..., str]) -> None:
    data = counted(write_dataset, filter="_rowoffset = 130", bad={118: b"bad", 131: b"bad"}, order="sequential")
    Counted.decoded.clear()
    (batch,) = data.iter_batches(global_batch_size=1)
    assert batch["near"].tolist() == [[*range(123, 131)]]
    assert sorted(map(int, Counted.decoded)) == [120, *range(123, 131), 130]


@pytest.mark.parametrize(("decoders", "order"), [(0, "window"), (2, "window"), (2, "row")])
def test_a_bad_value_masks_the_samples_that_have_it(
    write_dataset: Callable[..., str], decoders: int, order: str
) -> None:
    """Also if samples have few rows in common, so that each is decoded by itself."""
    bad = {75: b"bad", 130: None}
    data = counted(write_dataset, bad, on_bad_row="mask", max_bad_rows=None, order=order)
    wrong, zeros = set[int](), {"near": set[int](), "far": set[int]()}
    with data.loader(runtime="threads", num_decoders=decoders) as loader:
        for batch in loader.iter_batches(global_batch_size=32, with_row_offset=True):
            rows = batch["_rowoffset"]
            wrong |= set(rows[~batch["_valid"]].tolist())
            for name in zeros:
                zeros[name] |= {row for row, value in zip(rows.tolist(), batch[name], strict=True) if not value.any()}
        stats = loader.stats()
    near = {*range(75, 83), *range(130, 138)}
    far = {*range(60, 240)} & {row for row in range(240) for one in bad if one in (row, of_window(row, -20))}
    assert wrong == near | far
    assert stats["masked_rows"] == len(wrong)
    assert (zeros["near"] - {0}, zeros["far"] - {0, *range(1)}) == (near, far)


@dataclasses.dataclass(frozen=True, slots=True)
class Signs(raylance.Decoder):
    """Decodes to bools, which Arrow packs to bits, or to other numbers."""

    dtype: str = "bool"
    name: str | None = None
    shape = (3,)

    def open(self) -> "Signs":
        return self

    def decode_into(self, encoded: memoryview, draws: Any, out: Any) -> None:
        out[...] = int(bytes(encoded)) % 2


@pytest.mark.parametrize("transform", [None, dict])
def test_ranks_without_a_row_get_batches_of_the_same_columns(write_dataset: Callable[..., str], transform: Any) -> None:
    decoders = [Signs("near", name="signs"), Signs("near", "float16", name="halves"), Counted("far")]
    data = counted(write_dataset, decode=decoders, rows=10, remainder="ragged_or_empty", transform=transform)
    shapes, rows = [], []
    for rank in range(4):
        with data.loader(runtime="threads", rank=rank, world_size=4) as loader:
            batches = list(loader.iter_batches(global_batch_size=8, with_row_offset=True))
        assert len(batches) == 2
        shapes += [{name: (each.dtype, each.shape[1:]) for name, each in batch.items()} for batch in batches]
        for batch in batches:
            rows += batch["_rowoffset"].tolist()
            for row, signs, halves in zip(batch["_rowoffset"], batch["signs"], batch["halves"], strict=True):
                wanted = [[of_window(row, offset) % 2] * 3 for offset in range(-7, 1)]
                assert signs.tolist() == halves.tolist() == wanted
    assert sorted(rows) == [*range(10)]
    assert all(each == shapes[0] for each in shapes)
    assert shapes[0]["signs"] == (np.bool_, (8, 3))


def test_a_row_far_from_the_others_makes_no_long_shards(write_dataset: Callable[..., str]) -> None:
    """Else a goal far ahead would make the shuffle coarse."""
    offsets = {"near": range(-7, 1), "far": [0, 50]}
    windows = raylance.Windows(episode="episode", offsets=offsets)
    near = dataclasses.replace(windows, offsets={"near": range(-7, 1), "far": [0, 1]})
    plans = [str(counted(write_dataset, samples=each).plan(global_batch_size=8)) for each in (windows, near)]
    orders = [plan.splitlines()[0] for plan in plans]
    assert orders[0] == orders[1]
    assert "order window (shard_rows=" in orders[0]


def test_a_bad_value_is_named(write_dataset: Callable[..., str]) -> None:
    data = counted(write_dataset, {75: b"bad"}, order="sequential")
    seen = []
    with (
        data.loader(runtime="threads", num_decoders=2) as loader,
        pytest.raises(raylance.BadRowError, match="row offset 75 "),
    ):
        for batch in loader.iter_batches(global_batch_size=5, with_row_offset=True):
            seen += batch["_rowoffset"].tolist()
    assert seen == [*range(75)]


def test_too_many_bad_values_are_named_by_their_samples(write_dataset: Callable[..., str]) -> None:
    data = counted(write_dataset, {75: b"bad"}, on_bad_row="mask", max_bad_rows=3, order="sequential")
    with pytest.raises(raylance.BadRowError, match="row offset 75 .*invalid literal.*row offset 76 .*invalid literal"):
        list(data.iter_batches(global_batch_size=10))


def halved(batch: dict[str, Any]) -> dict[str, Any]:
    batch["near"] //= 2  # in place: no other sample has these values
    return {"half": batch["near"], "sum": batch["far"].sum(axis=1)}


@pytest.mark.parametrize("decoders", [0, 2])
@pytest.mark.parametrize("bad", [{}, {75: b"bad", 130: None}])
def test_a_transform_gets_whole_samples(
    write_dataset: Callable[..., str], decoders: int, bad: dict[int, bytes | None]
) -> None:
    data = counted(write_dataset, bad, transform=halved, on_bad_row="mask", max_bad_rows=None, order="window")
    wrong, seen = set[int](), list[int]()
    Counted.decoded.clear()
    with data.loader(runtime="threads", num_decoders=decoders) as loader:
        for batch in loader.iter_batches(global_batch_size=240, prefetch_batches=1, with_row_offset=True):
            fields = (batch[name].tolist() for name in ("_rowoffset", "_valid", "half", "sum"))
            for row, is_valid, half, total in zip(*fields, strict=True):
                seen.append(row)
                if not is_valid:
                    wrong.add(row)
                    continue
                assert half == [of_window(row, offset) // 2 for offset in range(-7, 1)]
                assert total == of_window(row, -20) + row
    assert sorted(seen) == [*range(240)]
    near = {row for row in range(240) for offset in range(-7, 1) if of_window(row, offset) in bad}
    assert wrong == near | {row for row in range(240) if of_window(row, -20) in bad}
    # Up to three further epochs are loaded ahead. Decoded for each sample, a row would count 10 times in each.
    assert max(Counter(Counted.decoded).values()) <= 2 * 4, "once a chunk"


def test_values_that_are_random_are_those_of_each_sample(write_dataset: Callable[..., str]) -> None:
    """A random crop is drawn for a sample, so that its pictures are decoded for it alone."""
    rng = np.random.default_rng(0)
    files = [encode(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)) for _ in range(60)]
    uri = write_dataset(pa.table({"episode": np.arange(60) // 30, "image": files, "plain": files}))
    decoders = [raylance.Image("image", size=8, hflip=0.5), raylance.Image("plain", size=8)]
    windows = raylance.Windows(episode="episode", offsets={"image": [-1, 0], "plain": [-1, 0]})
    data = raylance.dataset(uri, decode=decoders, samples=windows, order="shard")
    with data.loader(runtime="threads") as loader:
        (batch,) = loader.iter_batches(global_batch_size=60)
    flipped = batch["plain"][..., ::-1, :]
    turned = [(one == other).all() for one, other in zip(batch["image"], flipped, strict=True)]
    alike = [(one == other).all() for one, other in zip(batch["image"], batch["plain"], strict=True)]
    assert sum(turned) + sum(alike) == 60
    assert 10 < sum(turned) < 50


def data_windows(name: str) -> raylance.Windows:
    return raylance.Windows(episode="episode", offsets={name: [0, 1]})


@pytest.mark.parametrize("older", ["windows", "pack"])
def test_what_samples_has_replaced_works_with_a_warning(
    write_dataset: Callable[..., str], tmp_path: Path, older: str
) -> None:
    kind = WINDOWS if older == "windows" else raylance.Pack("tokens", length=8)
    table = frames() if older == "windows" else pa.table({"tokens": [[*range(5)]] * 40})
    uri = write_dataset(table)
    wanted = raylance.dataset(uri, samples=kind, remainder="ragged")
    with pytest.warns(FutureWarning, match=f"{older}=.*samples=") as caught:
        found = raylance.dataset(uri, **{older: kind}, remainder="ragged")
    assert {each.filename for each in caught} == {__file__}
    assert repr(found) == repr(wanted)
    assert raylance.dataset(uri, **{older: None}).schema == raylance.dataset(uri).schema, "no setting, no warning"
    with found.loader(record=str(tmp_path / "run")) as loader:
        for _ in loader.iter_batches(global_batch_size=8):
            pass
    with pytest.warns(FutureWarning, match=f"{older}=.*samples="):
        assert raylance.prove_run(str(tmp_path / "run"), **{older: kind}).ok
