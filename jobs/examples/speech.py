"""Speech by seconds: sounds of any length, in batches of about the same time, padded with little waste.

A ragged decoder gives each row its own length. `cost=` says how long a row is, and the order "bucket" brings rows of
similar length together, so that each step has as many as three seconds hold, padding included. `Pad(multiple=…)` rounds
the longest of a batch up, so that a compiler sees few shapes; the column `sound_length` says what is padding.
`"jagged"` in its place gives a nested tensor.

Cost: values travel as they are decoded, four bytes a sample, padded only in the batch. Where clips are all of one
length, or cut to one, a row decoder is simpler and its batches need no padding. The duration must be a column: a sound
that is not decoded does not say it. Steps have different numbers of rows; where that matters, weigh losses by them.

    python -m jobs.examples.made_data sounds sounds.lance
    python -m jobs.examples.speech --data sounds.lance
"""

import dataclasses
import io
import sys
import wave
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import raylance
from jobs.common import locate
from jobs.examples import common


@dataclasses.dataclass(frozen=True)
class Sound(raylance.RaggedDecoder):
    """Mono WAV of 16 bits as float32 (length,)."""

    shape, dtype, content = (), "float32", "WAV"

    def open(self) -> "Sound":
        """Keeps nothing between rows."""
        return self

    def decode(self, encoded: memoryview, draws: np.ndarray) -> np.ndarray:
        """Reads the frames of one file."""
        with wave.open(io.BytesIO(encoded)) as file:
            frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            if len(frames) < file.getnframes():
                raise ValueError(f"has {len(frames)} of {file.getnframes()} frames")
        return frames.astype(np.float32) / 32768


PIECE = 400  # samples, 50 ms at 8 kHz: batches are padded to a multiple of them, and so costs count them
SIZE: dict[str, Any] = {"budget": raylance.Budget(60)}


class Listener(torch.nn.Module):
    """Two convolutions, and the mean over what is no padding."""

    def __init__(self) -> None:
        """Has the same weights wherever it is made."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.heard = torch.nn.Sequential(
                torch.nn.Conv1d(1, 16, 32, 8, 16), torch.nn.ReLU(), torch.nn.Conv1d(16, 32, 5, 1, 2), torch.nn.ReLU()
            )
            self.head = torch.nn.Linear(32, 4)

    def forward(self, sound: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Takes (n, longest) and (n,); returns (n, 4)."""
        heard = self.heard(sound[:, None])  # (n, 32, longest / 8 + 1)
        is_sound = torch.arange(heard.shape[2], device=heard.device) * 8 < length[:, None]
        return self.head((heard * is_sound[:, None]).sum(2) / is_sound.sum(1, keepdim=True))


def loss_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross-entropy of the pitch."""
    return torch.nn.functional.cross_entropy(model(batch["sound"], batch["sound_length"]), batch["label"])


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains; see `common.train`."""
    padding = {"sound": raylance.Pad(0.0, multiple=PIECE)}
    return common.train(config, model=Listener(), loss_fn=loss_of, batching={"pad_lists": padding, **SIZE})


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    data = raylance.dataset(
        locate(args.data), columns=[Sound("sound"), "label"], filter="split = 'train'",
        cost=f"seconds * 8000 / {PIECE}", order="bucket", remainder="ragged",
    )  # fmt: skip
    print(data.plan(world_size=max(1, args.num_workers), **SIZE))
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
