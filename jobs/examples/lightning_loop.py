"""PyTorch Lightning: its Trainer takes `loader.batches(…)` where it expects a DataLoader, and saves its state by
itself.

Lightning keeps the state of a stateful loader in its own checkpoints, of rank 0 alone: raylance's is the same on
every rank, so that `trainer.fit(…, ckpt_path=…)` continues at the row, also in mid-epoch and on another number of
ranks.

    python -m jobs.examples.lightning_loop --data digits.lance
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
import torch

import raylance
from jobs.common import bringing
from jobs.examples import common

with bringing("raylance[examples]", __name__):
    import lightning.pytorch as pl
    import ray.train.lightning

FILE = "lightning.ckpt"


class Classifier(pl.LightningModule):
    """The network, and how it is trained."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.model = common.build_model(image_size)

    def training_step(self, batch: Mapping[str, Any], index: int) -> torch.Tensor:
        """One step."""
        loss = common.loss_of(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Report(pl.Callback):
    """Reports Lightning's checkpoint to Ray Train every some steps, and at the end of each epoch."""

    def __init__(self, batches: raylance.Batches, every_steps: int) -> None:
        self.batches, self.every_steps = batches, every_steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Every rank comes here at the same step."""
        if trainer.global_step % self.every_steps and not trainer.is_last_batch:
            return
        with tempfile.TemporaryDirectory() as directory:
            trainer.save_checkpoint(Path(directory, FILE))  # rank 0 writes
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
            raylance.report(metrics | {"step": trainer.global_step}, self.batches, checkpoint=directory)


def train_fn(config: dict[str, Any]) -> None:
    """Trains with Lightning's loop."""
    loader = ray.train.get_dataset_shard("train")
    batches = loader.batches(global_batch_size=config["global_batch_size"])
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        accelerator="auto",
        devices="auto",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[Report(batches, config["checkpoint_every_steps"])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer = ray.train.lightning.prepare_trainer(trainer)
    model = Classifier(config["image_size"])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(model, train_dataloaders=batches)
        return
    with checkpoint.as_directory() as directory:
        trainer.fit(model, train_dataloaders=batches, ckpt_path=Path(directory, FILE))


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    return common.fit(common.parser(__file__, __doc__).parse_args(argv), train_fn)


if __name__ == "__main__":
    sys.exit(main())
