"""torchtitan 0.3.0: a dataloader of its contract around `loader.batches(…)`, for runs that its Trainer drives.

torchtitan builds its dataloader from a `Config`, iterates over (inputs, labels), and puts `state_dict()` into its
distributed checkpoints. Its own dataloader keeps a state for each data-parallel rank and refuses another number of
them; raylance's is one state for all, of a few numbers.

    python -m jobs.examples.torchtitan_loader --data tokens.lance
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import raylance
from jobs.common import bringing

with bringing("raylance[examples]", __name__):
    from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError


class LanceDataLoader(BaseDataLoader):
    """Packed token sequences from a Lance dataset, in torchtitan's form."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`dataset_path` is the URI of the dataset."""

        tokens_column: str = "tokens"
        eos_id: int = 0
        epochs: int = 1

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        """Takes what torchtitan's Trainer passes when it builds its dataloader."""
        packed = raylance.Pack(config.tokens_column, length=seq_len + 1, eos_id=config.eos_id, labels=None)
        handle = raylance.dataset(str(config.dataset_path), samples=packed)
        loader = handle.loader(rank=dp_rank, world_size=dp_world_size)
        self.batches = loader.batches(batch_size=local_batch_size, device="cpu")
        self._epochs = config.epochs

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Epoch after epoch, as torchtitan counts steps alone."""
        while self.batches.epoch < self._epochs:
            for batch in self.batches:
                tokens = batch["input_ids"].long()  # a loss takes no labels of int32
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]
        raise DataloaderExhaustedError

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank."""
        return self.batches.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a saved position; torchtitan passes nothing on a fresh start."""
        if state_dict:
            self.batches.load_state_dict(state_dict)


def main(argv: list[str] | None = None) -> int:
    """Takes some steps as torchtitan would, saves and loads a distributed checkpoint, and takes the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="URI", help="a dataset with a column of token lists")
    parser.add_argument("--seq-len", type=int, default=128, metavar="N")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="before the checkpoint")
    args = parser.parse_args(argv)
    config = LanceDataLoader.Config(dataset_path=args.data)
    build = {"dp_world_size": 1, "dp_rank": 0, "seq_len": args.seq_len, "local_batch_size": 4}
    first, taken = LanceDataLoader(config, **build), []
    with tempfile.TemporaryDirectory() as directory:
        for step, (inputs, _) in enumerate(first, 1):
            taken.append(inputs["input"])
            if step == args.steps:
                dcp.save({"dataloader": first}, checkpoint_id=directory, no_dist=True)
                break
        second = LanceDataLoader(config, **build)
        dcp.load({"dataloader": second}, checkpoint_id=directory, no_dist=True)
    try:
        for inputs, _ in second:
            taken.append(inputs["input"])
    except DataloaderExhaustedError:
        print(f"{len(taken)} steps, {sum(inputs.numel() for inputs in taken):,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
