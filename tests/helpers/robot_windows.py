"""Rows of episodes, windows over them, and the samples that they must give."""

from typing import Any

import numpy as np
import pyarrow as pa

import raylance

ROWS = 400

OFFSETS = {"action": (0, 1, 2, 3), "state": (-3, 0), "done": (1,)}

WINDOWS = raylance.Windows(episode="episode", offsets=OFFSETS)


def frames(seed: int = 0, rows: int = ROWS, first_episode: int = 0) -> pa.Table:
    """Rows of episodes of 1 to 20 frames, ten frames a second."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 21, rows)
    episode = np.repeat(np.arange(rows), lengths)[:rows]
    frame = np.concatenate([np.arange(length) for length in lengths])[:rows]
    return pa.table(
        {
            "episode": episode + first_episode,
            "time": pa.array((frame / 10).astype(np.float32)),
            "action": pa.FixedSizeListArray.from_arrays(pa.array(rng.random(rows * 3, dtype=np.float32)), 3),
            "state": rng.integers(0, 1000, rows),
            "done": frame % 3 == 0,
            "name": [f"frame {row}" for row in range(rows)],
        }
    )


def expected(
    table: pa.Table, windows: raylance.Windows = WINDOWS, selected: set[int] | None = None
) -> dict[int, dict[str, Any]]:
    """The samples by the row offset of their anchors, by plain lists. `selected` limits anchors, and also neighbours if
    the windows ask for it.
    """
    columns = {name: table[name].to_pylist() for name in table.column_names}
    chosen = set(range(table.num_rows)) if selected is None else selected
    members: dict[Any, list[int]] = {}
    for row, code in enumerate(columns["episode"]):
        members.setdefault(code, []).append(row)
    samples = {}
    for rows in members.values():
        anchors = []
        for at, row in enumerate(rows):
            low, high = 0, len(rows)
            if windows.neighbours == "selected":
                while high > at and not all(each in chosen for each in rows[at:high]):
                    high -= 1
                while low < at and not all(each in chosen for each in rows[low:at]):
                    low += 1
            sample = {name: values[row] for name, values in columns.items()}
            is_whole = True
            for name, offsets in windows.offsets.items():
                places = [at + offset for offset in offsets]
                sample[name] = (
                    [columns[name][rows[min(max(place, low), high - 1)]] for place in places] if high else None
                )
                sample[f"{name}_is_pad"] = [not low <= place < high for place in places]
                is_whole = is_whole and not any(sample[f"{name}_is_pad"])
            if row in chosen and (is_whole or windows.at_ends == "pad"):
                anchors.append((row, sample))
        samples |= dict(anchors[:: windows.stride] if selected is None else anchors)
    return samples


def check(batch: dict[str, Any], samples: dict[int, dict[str, Any]]) -> list[int]:
    """Compares a batch with the samples; returns the row offsets of its anchors."""
    offsets = [int(offset) for offset in batch["_rowoffset"]]
    for place, offset in enumerate(offsets):
        for name, values in batch.items():
            if not name.startswith("_"):
                value = values[place]
                found = value.tolist() if hasattr(value, "tolist") else value
                assert found == samples[offset][name], (offset, name)
    return offsets
