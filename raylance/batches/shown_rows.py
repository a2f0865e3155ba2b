"""The display of rows in a notebook: tables with thumbnails and counts of classes."""

import base64
import html
import io
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import PIL.Image

from raylance.decode.arrays import OFFSETS

_SIDE = 96  # maximum height and width of a thumbnail in pixels
_FRAMES = 8  # number of pictures of a sample that are shown
_VALUES = 4  # number of values of a vector that are shown
_TEXT = 60  # number of characters of a text that are shown
_CLASSES = 20
_STYLE = "border-collapse:collapse;font-size:90%;text-align:left"


class Display:
    """Shows HTML in a notebook, and text elsewhere."""

    def __init__(self, markup: str, text: str) -> None:
        self._markup, self._text = markup, text

    def _repr_html_(self) -> str:
        return self._markup

    def __repr__(self) -> str:
        return self._text


def by_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a batch with one value for each row; a jagged column has one array for each row."""
    columns = dict(batch)
    for name, values in batch.items():
        offsets = batch.get(name + OFFSETS)
        if getattr(values, "is_nested", False):
            columns[name] = values.unbind()
        elif offsets is not None and offsets[0] == 0 and offsets[-1] == len(values):  # a jagged column of a NumPy batch
            columns[name] = [values[start:end] for start, end in itertools.pairwise(offsets)]
            del columns[name + OFFSETS]
    return columns


def display_rows(batch: Mapping[str, Any], rows: int, title: str, label: str, classes: Sequence[str] | None) -> Display:
    """Displays the first rows of a batch. Images are uint8 (n, H, W, 3), or (n, 3, H, W) in tensors. If `classes` are
    given, the column `label` holds indices of classes; the batch need not have this column.
    """
    columns = {name: [_plain(value) for value in values[:rows]] for name, values in batch.items()}
    named = dict(columns)
    if classes is not None and label in columns:
        named[label] = [_named(value, classes) for value in columns[label]]
    cells = {name: [_cell(value) for value in values] for name, values in named.items()}
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in zip(*cells.values(), strict=True)]
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in cells)
    text = [title, "\t".join(named)]
    text += ["\t".join(_text(value) for value in row) for row in zip(*named.values(), strict=True)]
    markup = f"<div>{html.escape(title)}</div><table style='{_STYLE}'><tr>{heads}</tr>{''.join(lines)}</table>"
    return Display(markup, "\n".join(text))


def facts_table(facts: Mapping[str, Any]) -> str:
    """Returns HTML of a table of names and values."""
    lines = (
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in facts.items()
    )
    return f"<table style='{_STYLE}'>{''.join(lines)}</table>"


def display_counts(labels: Sequence[Any], classes: Sequence[str] | None, of: str) -> Display:
    """Displays the number of rows of each class, the most frequent first."""
    counts = Counter(map(_plain, labels))
    named = [(_text(_named(value, classes or ())), count) for value, count in counts.most_common(_CLASSES)]
    bars = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{count:,}</td><td><div style='background:#8ab;height:.8em;"
        f"width:{200 * count / named[0][1]:.0f}px'></div></td></tr>"
        for name, count in named
    )
    title = f"{len(counts):,} class{'es' * (len(counts) != 1)} among {of}"
    title += f", the first {_CLASSES}" if len(counts) > _CLASSES else ""
    text = "\n".join([title, *(f"{name}\t{count:,}" for name, count in named)])
    return Display(f"<div>{html.escape(title)}</div><table style='{_STYLE}'>{bars}</table>", text)


def stacked(*parts: Display) -> Display:
    """Displays one part below the other."""
    return Display("".join(part._repr_html_() for part in parts), "\n".join(map(repr, parts)))


def _named(value: Any, classes: Sequence[str]) -> Any:
    has_name = isinstance(value, int) and 0 <= value < len(classes) and classes[value] != str(value)
    return f"{value} ({classes[value]})" if has_name else value


def _plain(value: Any) -> Any:
    """Returns a value as a NumPy array or Python object; images get their channels last."""
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
        if value.dtype == np.uint8 and value.ndim in (3, 4):
            value = np.moveaxis(value, -3, -1)
    return value.item() if isinstance(value, np.generic) or getattr(value, "ndim", 1) == 0 else value


def _cell(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (3, 4) and value.shape[-1] == 3:
        return _strip(value.reshape(-1, *value.shape[-3:]))
    return html.escape(_text(value))


def _strip(frames: np.ndarray) -> str:
    """Returns HTML of pictures (k, H, W, 3) beside each other, the first ones of many."""
    tags = []
    for frame in frames[:_FRAMES]:
        image = PIL.Image.fromarray(np.ascontiguousarray(frame))
        image.thumbnail((_SIDE, _SIDE))
        image.save(buffer := io.BytesIO(), "PNG")
        encoded = base64.b64encode(buffer.getvalue()).decode()
        tags.append(f"<img src='data:image/png;base64,{encoded}' title='{frame.shape[1]} × {frame.shape[0]}'>")
    more = f" and {len(frames) - _FRAMES} more" if len(frames) > _FRAMES else ""
    return "".join(tags) + more


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return f"{value.dtype} {value.shape}"
    if isinstance(value, np.ndarray | list | tuple):
        first = ", ".join(
            f"{item:.4g}" if isinstance(item, float | np.floating) else str(item) for item in value[:_VALUES]
        )
        return f"[{first}, … {len(value):,} values]" if len(value) > _VALUES else f"[{first}]"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}…"
