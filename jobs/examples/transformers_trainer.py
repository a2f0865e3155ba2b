"""Hugging Face Transformers: its Trainer iterates over `loader.batches(…)`, and Ray Train keeps its checkpoints.

The Trainer resumes by skipping batches, for which it takes DataLoaders apart; `ignore_data_skip=True` leaves that to
raylance, which stands at the row already. It also calls `set_epoch`, which would go back to the start of the epoch:
`Epochs` has none.

    python -m jobs.examples.transformers_trainer --data digits.lance
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray.train
import torch

import raylance
from jobs.common import bringing
from jobs.examples import common

with bringing("raylance[examples]", __name__):
    import transformers


class Epochs:
    """What the Trainer needs of a loader: one epoch each time that it is iterated, and its length."""

    def __init__(self, batches: raylance.Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The rest of the epoch."""
        for batch in self.batches:
            yield {"image": batch["image"], "labels": batch["label"]}

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return len(self.batches)


class Network(torch.nn.Module):
    """The network, with its loss, as the Trainer calls models."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.model = common.build_model(image_size)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """uint8 images (n, 3, H, W), int64 labels (n,)."""
        return {"loss": common.loss_of(self.model, {"image": image, "label": labels})}


class Trainer(transformers.Trainer):
    """Trains on what it is given, without a DataLoader around it."""

    def get_train_dataloader(self) -> Any:
        """The epochs."""
        return self.train_dataset


class Report(transformers.TrainerCallback):
    """Reports the Trainer's checkpoint to Ray Train as soon as it is saved."""

    def __init__(self, batches: raylance.Batches) -> None:
        self.batches = batches

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every rank comes here; rank 0 has written."""
        metrics = {"step": state.global_step, "epoch": self.batches.epoch} | (state.log_history or [{}])[-1]
        saved = transformers.trainer.get_last_checkpoint(args.output_dir) if self.batches.loader.rank == 0 else None
        raylance.report(metrics, self.batches, checkpoint=saved)


def train_fn(config: dict[str, Any]) -> None:
    """Trains with Transformers' loop."""
    loader = ray.train.get_dataset_shard("train")
    batches = loader.batches(global_batch_size=config["global_batch_size"])
    with tempfile.TemporaryDirectory() as directory:
        resumed = Path(directory, "resumed")
        saved = raylance.restore(batches, load=lambda checkpoint: shutil.copytree(checkpoint, resumed))
        arguments = transformers.TrainingArguments(
            output_dir=str(Path(directory, "saved")),
            num_train_epochs=config["epochs"],
            ignore_data_skip=True,
            save_steps=config["checkpoint_every_steps"],
            save_total_limit=1,
            logging_steps=config["checkpoint_every_steps"],
            learning_rate=3e-3,
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
        )
        trainer = Trainer(
            model=Network(config["image_size"]),
            args=arguments,
            train_dataset=Epochs(batches),
            callbacks=[Report(batches)],
        )
        trainer.train(resume_from_checkpoint=None if saved is None else str(resumed))


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    return common.fit(common.parser(__file__, __doc__).parse_args(argv), train_fn)


if __name__ == "__main__":
    sys.exit(main())
