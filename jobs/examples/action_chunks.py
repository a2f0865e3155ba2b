"""A robot's policy: the last two frames of two cameras and the last two states give the next eight actions.

The cameras are videos in a dataset of their own; each row names its frame in both. `raylance.Windows` makes a sample of
each row and of rows of the same episode around it. Where an episode ends, its last action stands in place of those that
there are not, and `action_is_pad` says so: the loss leaves these out.

Cost: frames are decoded once for all samples of a window of the shuffle, by the process that reads them. Datasets in
LeRobot's layout are opened by `raylance.lerobot.open`.

    python -m jobs.examples.made_data episodes episodes.lance
    python -m jobs.examples.action_chunks --data episodes.lance
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

import raylance
from jobs.common import locate
from jobs.examples import common
from jobs.examples.made_data import videos_of

CHUNK = 8  # actions
CAMERAS = ("top", "side")


class Policy(torch.nn.Module):
    """A convolution for each camera, and two layers over their features and the states."""

    def __init__(self) -> None:
        """Has the same weights wherever it is made."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.eyes = torch.nn.ModuleDict(
                {name: torch.nn.Sequential(torch.nn.Conv2d(6, 8, 5, 4), torch.nn.ReLU()) for name in CAMERAS}
            )
            self.head = torch.nn.Sequential(torch.nn.LazyLinear(64), torch.nn.ReLU(), torch.nn.Linear(64, CHUNK * 2))

    def forward(self, cameras: Mapping[str, torch.Tensor], state: torch.Tensor) -> torch.Tensor:
        """Takes uint8 (n, 2, 3, H, W) of each camera and float32 (n, 2, 4); returns (n, CHUNK, 2)."""
        seen = [self.eyes[name](cameras[name].flatten(1, 2).float() / 255).flatten(1) for name in CAMERAS]
        return self.head(torch.cat([*seen, state.flatten(1)], 1)).unflatten(1, (CHUNK, 2))


def loss_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Mean squared error of the actions that there are."""
    actions = model({name: batch[name] for name in CAMERAS}, batch["state"])
    is_real = ~batch["action_is_pad"]
    return torch.nn.functional.mse_loss(actions[is_real], batch["action"][is_real])


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains; see `common.train`."""
    policy, size = Policy(), config["image_size"]
    blank = {name: torch.zeros(1, 2, 3, size, size, dtype=torch.uint8) for name in CAMERAS}
    policy(blank, torch.zeros(1, 2, 4))  # the lazy layer learns its size
    return common.train(config, model=policy, loss_fn=loss_of)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    rows = locate(args.data)
    cameras = [
        raylance.Video(name, videos_of(rows), video=f"{name}_video", frame="frame", size=args.image_size)
        for name in CAMERAS
    ]
    windows = raylance.Windows(
        episode="episode_index", timestamp="timestamp",
        offsets={"action": range(CHUNK)}, seconds={name: [-0.1, 0] for name in (*CAMERAS, "state")},
    )  # fmt: skip
    data = raylance.dataset(
        rows, columns=["state", "action", *cameras], filter="split = 'train'", samples=windows, remainder="ragged",
    )  # fmt: skip
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
