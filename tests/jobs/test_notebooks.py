"""Runs jobs/notebooks/ cell by cell, and checks what a notebook shows of datasets, plans and batches."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError
from raylance.samples.pack_tokens import PackTokens
from tests.helpers.images import make_images

NOTEBOOKS = Path(__file__).parents[2] / "jobs" / "notebooks"


def execute(name: str, folder: Path) -> str:
    """Runs a notebook in a folder, in a kernel of its own; returns all that it printed or showed as text."""
    book: Any = nbformat.read(shutil.copy(NOTEBOOKS / name, folder), 4)
    nbclient.NotebookClient(book, timeout=240, kernel_name="python3").execute(cwd=str(folder))
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def test_notebooks_are_kept_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert not any(cell.get("outputs") for cell in nbformat.read(path, 4).cells), path.name


def test_audit_a_loss_spike(tmp_path: Path) -> None:
    execute("audit_a_loss_spike.ipynb", tmp_path)
    text = execute("audit_a_loss_spike.ipynb", tmp_path)  # where it was run before
    assert "OK: 1,781 rows" in text


def test_explore_and_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    execute("explore_and_train.ipynb", tmp_path)
    text = execute("explore_and_train.ipynb", tmp_path)  # where it was run before
    assert "interrupted" in text
    assert "epoch 1: 1,797 rows, 1,797 different ones, of 1,797" in text


@pytest.fixture
def labelled(write_dataset: Callable[..., str]) -> raylance.Dataset:
    """30 pictures of three classes, two of them in the second half."""
    classes = b'["ant", "bee", "<cat>"]'
    labels = [0] * 15 + [1, 2] * 7 + [2]
    table = pa.table(
        {"image": make_images(30), "label": labels, "vector": pa.array([[0.5] * 8] * 30, pa.list_(pa.float32(), 8))}
    )
    uri = write_dataset(table.replace_schema_metadata({"classes": classes}))
    return raylance.dataset(uri, decode=raylance.Image("image", size=(16, 24)))


def test_a_dataset_shows_itself(labelled: raylance.Dataset) -> None:
    markup = labelled._repr_html_()
    assert markup.count("<img src='data:image/png;base64,") == 4
    assert "title='24 × 16'" in markup, "width × height"
    assert "3 classes among 30 rows" in markup
    assert "2 (&lt;cat&gt;)" in markup, "what data says is escaped"
    shown = labelled.show(6)
    assert shown._repr_html_().count("<img") == 6
    text = repr(shown)
    assert "6 of 30 rows" in text
    assert "0 (ant)\t15" in text
    assert "[0.5, 0.5, 0.5, 0.5, … 8 values]" in text
    assert labelled.show(0)._repr_html_().count("<img") == 0
    with pytest.raises(ConfigError, match="rows"):
        labelled.show(-1)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_batch_is_shown(labelled: raylance.Dataset, kind: str) -> None:
    with labelled.loader(runtime="threads") as loader:
        iterate = loader.iter_torch_batches if kind == "torch" else loader.iter_batches
        batch = next(iter(iterate(global_batch_size=20)))
    shown = labelled.show(batch)
    assert shown._repr_html_().count("<img") == 16
    assert "16 of 20 rows" in repr(shown)
    assert "classes among 20 rows" in repr(shown)


@pytest.mark.parametrize(
    ("labels", "classes", "text"),
    [
        (["cat", "dog", "cat", "<b>"], None, "cat\t2"),
        (pa.array(["cat", "dog", "cat", "cat"]).dictionary_encode(), None, "cat\t3"),
        ([True, False, True, True], None, "True\t3"),
        ([0, 1, 1, 0], b"of another program", "0\t2"),
        ([0, 1, 1, 0], b'{"a": 0}', "0\t2"),
        ([0, 1, 1, 0], b"[10, 20]", "0 (10)\t2"),
        ([[1, 2], [3], [4], [5]], None, None),
        ([{"a": 1}] * 4, None, None),
        ([b"a"] * 4, None, None),
        ([0.5, 1.5, 2.5, 3.5], None, None),
    ],
    ids=["text", "dictionary", "bools", "no json", "no list", "numbers", "lists", "structs", "bytes", "floats"],
)
def test_labels_of_any_kind_are_counted_or_none(
    write_dataset: Callable[..., str], labels: Any, classes: bytes | None, text: str | None
) -> None:
    table = pa.table({"label": labels}).replace_schema_metadata(classes and {"classes": classes})
    data = raylance.dataset(write_dataset(table), order="sequential")
    batch = next(iter(data.loader(runtime="threads").iter_batches(global_batch_size=4)))
    for shown in (data.show(4), data.show(batch)):
        assert (f"\n{text}" in repr(shown)) if text else ("among" not in repr(shown))
        assert "<b>" not in shown._repr_html_()
    with pytest.raises(ConfigError, match="make no rows"):
        data.show({"label": [1, 2], "id": [1]})


def test_a_jagged_batch_is_shown(write_dataset: Callable[..., str]) -> None:
    """Torch's nested tensors cannot be sliced (a RuntimeError), and NumPy's values were "columns that make no rows"."""
    table = pa.table({"id": range(20), "tokens": [list(range(row % 3)) for row in range(20)]})
    data = raylance.dataset(write_dataset(table), order="sequential")
    arguments: dict[str, Any] = {"batch_size": 20, "pad_lists": {"tokens": "jagged"}}
    for batch in (next(iter(data.iter_torch_batches(**arguments))), next(iter(data.iter_batches(**arguments)))):
        shown = repr(data.show(batch)).splitlines()
        assert shown[:5] == ["16 of 20 rows", "id\ttokens", "0\t[]", "1\t[0]", "2\t[0, 1]"]
        assert len(shown) == 18


def test_a_row_that_cannot_be_read_hides_nothing_else(write_dataset: Callable[..., str]) -> None:
    table = pa.table({"image": [*make_images(3), b"no image"], "label": [0, 1, 0, 1]})
    data = raylance.dataset(write_dataset(table), decode=raylance.Image("image", size=8))
    assert "cannot be decoded" in data._repr_html_()
    assert "version" in data._repr_html_()


def test_other_datasets_show_themselves(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"tokens": pa.array([[1, 2, 3]] * 40, pa.list_(pa.int32()))}))
    packed = raylance.dataset(uri, samples=PackTokens("tokens", length=8, eos_id=0))
    assert "input_ids" in packed._repr_html_()
    mixed = raylance.mix({"a": (raylance.dataset(uri), 0.5), "b": (raylance.dataset(uri), 0.5)}, stop=30)
    assert "<td>80 rows (30 an epoch)</td>" in mixed._repr_html_()


def test_a_plan_is_plotted(labelled: raylance.Dataset) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    plan = labelled.plan(global_batch_size=8, world_size=2)
    axes = plan.plot(epoch=1)
    rows = np.concatenate([line.get_ydata() for line in axes.get_lines()])
    assert sorted(rows.tolist()) == sorted(plan.plan.select(1, np.arange(24)).tolist())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "rank 1"]
    assert "3 steps" in plan._repr_html_()
    into = matplotlib.figure.Figure().subplots()
    assert labelled.plan(global_batch_size=8).plot(axes=into) is into
