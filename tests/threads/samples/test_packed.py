"""Documents of real datasets, packed into sequences."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.errors import DatasetError
from raylance.samples.packs import Pack, make_table
from tests.helpers.packing import sequences_of


@pytest.fixture(scope="module")
def documents(write_dataset: Callable[..., str]) -> str:
    random = np.random.default_rng(1)
    texts = [random.integers(10, 1000, size).tolist() for size in random.integers(0, 30, 200)]
    masks = [[int(value % 3 > 0) for value in text] for text in texts]
    scores = [[value / 2 for value in text] for text in texts]
    columns = {"id": range(200), "tokens": texts, "mask": masks, "score": scores}
    types = {"tokens": pa.list_(pa.int64()), "mask": pa.list_(pa.uint8()), "score": pa.list_(pa.float32())}
    table = pa.table({name: pa.array(list(each), types.get(name)) for name, each in columns.items()})
    return write_dataset(table, max_rows_per_file=70)


@pytest.mark.parametrize("policy", ["stream", "whole"])
@pytest.mark.parametrize("labels", ["shifted", "same"])
def test_batches_are_those_of_a_plain_loop(documents: str, policy: Any, labels: Any) -> None:
    pack = Pack(
        ["tokens", "mask", "score"],
        length=32,
        policy=policy,
        eos_id=2,
        pad_id=1,
        labels=labels,
        label_mask="mask",
        block_rows=50,
    )
    dataset = raylance.dataset(
        documents, samples=pack, filter="id % 7 != 3", seed=5, order="sequential", remainder="ragged"
    )
    rows = dataset.head(0) | {}
    assert set(rows) == {"input_ids", "mask", "score", "labels", "position_ids", "segment_ids", "_rowoffset"}
    stored = [row for row in dataset_rows(documents) if row["id"] % 7 != 3]
    table = make_table(pack, np.array([len(row["tokens"]) for row in stored], dtype=np.int32), 5, "")
    for epoch in (0, 1):
        found = list(dataset.iter_batches(global_batch_size=5, epoch=epoch))
        whole = {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}
        assert whole["input_ids"].dtype == whole["labels"].dtype == whole["segment_ids"].dtype == np.int32
        assert whole["mask"].dtype == np.uint8
        for number, pieces in enumerate(sequences_of(table, epoch)):
            wanted: dict[str, list[Any]] = {name: [] for name in whole}
            for segment, piece in enumerate(pieces):
                for position, (document, token) in enumerate(piece):
                    row = stored[document]
                    is_eos = token == len(row["tokens"])
                    last = {name: (row[name] or [0])[-1] for name in ("mask", "score")}
                    wanted["input_ids"].append(2 if is_eos else row["tokens"][token])
                    wanted["mask"].append(last["mask"] if is_eos else row["mask"][token])
                    wanted["score"].append(last["score"] if is_eos else row["score"][token])
                    wanted["position_ids"].append(position)
                    wanted["segment_ids"].append(segment)
            padding = 32 - len(wanted["input_ids"])
            for name, pad in (("input_ids", 1), ("mask", 0), ("score", 0), ("position_ids", 0), ("segment_ids", -1)):
                wanted[name] += [pad] * padding
            for at in range(32):
                of = at + (labels == "shifted")
                is_label = of < 32 and wanted["segment_ids"][of] >= 0 and bool(wanted["mask"][of])
                is_label = is_label and of > 0 and wanted["segment_ids"][of] == wanted["segment_ids"][of - 1]
                wanted["labels"].append(wanted["input_ids"][of] if is_label else -100)
            for name, values in wanted.items():
                assert whole[name][number].tolist() == values, f"{name} of sequence {number} in epoch {epoch}"


@pytest.mark.parametrize("labels", ["shifted", "same"])
def test_packed_datasets_are_mixed_whatever_their_labels(documents: str, labels: Any) -> None:
    def packed(**settings_: Any) -> raylance.Dataset:
        pack = Pack(["tokens", "mask"], length=16, policy="whole", block_rows=30, **settings_)
        return raylance.dataset(documents, samples=pack, seed=2)

    parts = [packed(), packed(labels=labels, label_mask="mask")]
    mixed = raylance.mix({"plain": (parts[0], 2), "masked": (parts[1], 1)})
    wanted = [
        {
            int(offset): {name: batch[name][at].tolist() for name in batch}
            for batch in part.iter_batches(global_batch_size=4, drop_last=False, with_row_offset=True)
            for at, offset in enumerate(batch["_rowoffset"])
        }
        for part in parts
    ]
    assert wanted[0][0]["labels"] != wanted[1][0]["labels"]
    seen = 0
    for batch in mixed.iter_batches(global_batch_size=8, with_row_offset=True):
        for at, (component, offset) in enumerate(zip(batch.pop("_component"), batch["_rowoffset"], strict=True)):
            assert {name: batch[name][at].tolist() for name in batch} == wanted[component][offset]
            seen += 1
    assert seen > 100
    offsets = [int(offset) for offset in list(wanted[1])[:5]]
    found = parts[1].take(offsets)
    assert [found["labels"][at].tolist() for at in range(5)] == [wanted[1][offset]["labels"] for offset in offsets]


def test_ranks_without_a_sequence_get_empty_batches(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"t": [[1, 2, 3]]}))
    dataset = raylance.dataset(uri, samples=Pack("t", length=3), remainder="ragged_or_empty")
    counts = []
    for rank in range(3):
        with dataset.loader(rank=rank, world_size=3, record=False) as loader:
            [batch] = loader.iter_batches(global_batch_size=3)
            assert {array.shape[1:] for array in batch.values()} == {(3,)}
            counts.append(len(batch["labels"]))
    assert counts == [0, 0, 1]


def test_bins_are_found_once(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    """The second start takes them from the folder; without one, batches are the same."""
    texts = pa.ListArray.from_arrays(np.arange(70_001, dtype=np.int32) * 3, np.arange(210_000, dtype=np.int32))
    uri, pack = write_dataset(pa.table({"t": texts})), Pack("t", length=100, policy="whole")
    folders = [tmp_path / "kept", tmp_path / "kept", "/proc/nothing"]
    first, second, without = (raylance.dataset(uri, samples=pack, cost_folder=folder) for folder in folders)
    assert len(first) == len(second) == len(without) > 70_000 // 34
    [kept] = (tmp_path / "kept").glob("*.npy")
    assert without.head(1)["input_ids"].tolist() == second.head(1)["input_ids"].tolist()
    np.save(kept, np.zeros_like(np.load(kept)))
    assert len(raylance.dataset(uri, samples=pack, cost_folder=tmp_path / "kept")) < 100, "what is kept is used"


def dataset_rows(uri: str) -> list[dict[str, Any]]:
    import lance

    found: list[dict[str, Any]] = lance.dataset(uri).to_table().to_pylist()
    return found


def test_no_token_attends_to_another_document(documents: str) -> None:
    """Attention over `cu_seqlens`, piece by piece, is attention under the mask of `segment_ids`."""
    dataset = raylance.dataset(documents, samples=Pack("tokens", length=24, policy="whole", block_rows=40), seed=2)
    batch = next(iter(dataset.iter_torch_batches(global_batch_size=6)))
    ids, segments = batch["input_ids"], batch["segment_ids"]
    torch.manual_seed(0)
    states = torch.nn.Embedding(1000, 8)(ids)
    is_same = (segments[:, :, None] == segments[:, None, :]) & torch.ones(24, 24, dtype=torch.bool).tril()
    masked = torch.nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=is_same)
    ends, longest = raylance.text.cu_seqlens(segments)
    assert ends.dtype == torch.int32
    assert longest == int(ends.diff().max())
    flat = states.reshape(-1, 8)
    by_piece = [
        torch.nn.functional.scaled_dot_product_attention(*[flat[low:high][None]] * 3, is_causal=True)[0]
        for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    torch.testing.assert_close(torch.cat(by_piece).reshape(masked.shape), masked)
    arrays, count = raylance.text.cu_seqlens(segments.numpy())
    assert arrays.tolist() == ends.tolist()
    assert count == longest


@pytest.mark.promise("P3", "P5")
@pytest.mark.parametrize("order", ["window", "row", raylance.ShardShuffle(shard_rows=3)])
def test_sequences_are_the_same_on_any_world_and_after_any_resume(documents: str, order: Any) -> None:
    dataset = raylance.dataset(
        documents,
        samples=Pack("tokens", length=16, policy="whole", block_rows=30),
        order=order,
        remainder="ragged",
        seed=4,
    )
    whole = [batch["input_ids"].tolist() for batch in dataset.iter_batches(global_batch_size=8, epoch=1)]
    for world in (2, 3):
        steps: list[list[Any]] = [[] for _ in whole]
        for rank in range(world):
            with dataset.loader(rank=rank, world_size=world, record=False) as loader:
                loader.set_epoch(1)
                taken = iter(loader.iter_batches(global_batch_size=8))
                first = [next(taken)["input_ids"].tolist() for _ in range(2)]
                state = loader.state_dict()
            with dataset.loader(rank=rank, world_size=world, record=False) as loader:
                loader.load_state_dict(state)
                rest = [batch["input_ids"].tolist() for batch in loader.iter_batches(global_batch_size=8)]
            for step, rows in zip(steps, [*first, *rest], strict=True):
                step.extend(rows)
        assert steps == whole


@pytest.mark.promise("P8")
def test_documents_that_cannot_be_packed(write_dataset: Callable[..., str]) -> None:
    def read(columns: dict[str, Any], pack: Pack) -> None:
        list(raylance.dataset(write_dataset(pa.table(columns)), samples=pack).iter_batches(global_batch_size=1))

    pair = Pack(["t", "m"], length=4)
    with pytest.raises(DatasetError, match="'t' and 1 in 'm'"):
        read({"t": [[1, 2]], "m": [[1]]}, pair)
    with pytest.raises(DatasetError, match="'m'"):
        read({"t": [[1, 2]], "m": ["x"]}, pair)
    with pytest.raises(DatasetError, match="nulls"):
        read({"t": [[1, None]]}, Pack("t", length=4))
    with pytest.raises(DatasetError, match="null"):
        read({"t": [[1], None]}, Pack("t", length=4))
    with pytest.raises(DatasetError, match=str(2**31)):
        read({"t": [[2**31]]}, Pack("t", length=4))
    with pytest.raises(DatasetError, match="Pack"):
        read({"t": pa.array([[], []], pa.list_(pa.int32()))}, Pack("t", length=4))
    with pytest.raises(DatasetError, match="document 1 has 9"):
        read({"t": [[1], [1] * 9]}, Pack("t", length=4, policy="whole", too_long="raise"))
    with pytest.raises(DatasetError, match="'t'"):
        read({"t": ["abc"]}, Pack("t", length=4))


def test_tokens_that_are_left_out_are_counted(
    write_dataset: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    uri = write_dataset(pa.table({"t": [[1] * 3, [2] * 9, [3] * 4]}))
    for too_long, count in (("drop", 9), ("truncate", 5)):
        caplog.clear()
        dataset = raylance.dataset(uri, samples=Pack("t", length=4, policy="whole", too_long=too_long))  # type: ignore[arg-type]
        assert f"{count} of 16" in caplog.text
        tokens = sum(int((batch["segment_ids"] >= 0).sum()) for batch in dataset.iter_batches(global_batch_size=1))
        assert tokens == 16 - count


@pytest.mark.parametrize(("too_long", "named"), [("split", True), ("drop", False)])
def test_sequences_without_a_label_are_named_once(
    write_dataset: Callable[..., str], caplog: pytest.LogCaptureFixture, too_long: Any, named: bool
) -> None:
    """A long prompt is cut, and its first piece has nothing to learn."""
    uri = write_dataset(pa.table({"t": [[1] * 9, [2] * 3], "m": [[0] * 8 + [1], [0, 1, 1]]}))
    pack = Pack(["t", "m"], length=4, policy="whole", label_mask="m", too_long=too_long)
    dataset = raylance.dataset(uri, samples=pack)
    for _ in range(2):
        labels = np.concatenate([batch["labels"] for batch in dataset.iter_batches(global_batch_size=1)])
    assert bool((labels == -100).all(axis=1).any()) == named
    assert caplog.text.count("have no label") == named


def test_the_number_of_sequences_is_known(documents: str) -> None:
    tokens = sum(len(row["tokens"]) for row in dataset_rows(documents))
    assert len(raylance.dataset(documents, samples=Pack("tokens", length=7))) == math.ceil(tokens / 7)


@pytest.mark.parametrize("order", ["window", "row"])
def test_documents_that_a_reader_does_not_hold_together_give_the_same_sequences(
    write_dataset: Callable[..., str], order: Any
) -> None:
    """A window of documents has five times the bytes that a reader may hold: it is loaded in parts, documents again."""
    rng = np.random.default_rng(4)
    texts = [rng.integers(1, 1 << 15, size) for size in rng.integers(0, 700, 4000)]
    uri = write_dataset(pa.table({"t": pa.array(texts, pa.list_(pa.int64()))}))
    data = raylance.dataset(uri, samples=Pack("t", length=512, eos_id=1), order=order, window_bytes=64 << 20)
    found = []
    for limit in (1 << 30, 1 << 20):
        with data.loader(reader_bytes=limit) as loader:
            found.append([batch["input_ids"] for batch in loader.iter_batches(global_batch_size=64)])
            held = loader.stats()["held_bytes"]
    assert held <= 1 << 20
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))
