"""What the examples share: arguments, data, a small network and the plainest loop."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

import raylance
from jobs.common import locate

Loss = Callable[[torch.nn.Module, Mapping[str, Any]], torch.Tensor]


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The text as it is, and the default of each argument."""


def parser(file: str, doc: str | None) -> argparse.ArgumentParser:
    """The arguments that all examples take; their descriptions are their modules' docstrings."""
    made = argparse.ArgumentParser(description=doc, formatter_class=_Help)
    add, name = made.add_argument, Path(file).stem
    add("--data", required=True, metavar="URI", help="a dataset of `jobs/create_dataset.py demo`, or alike")
    add("--storage-path", default="~/raylance-runs", metavar="URI", help="where runs are kept")
    add("--run-name", default=f"example-{name}", metavar="NAME", help="one that exists and has not finished continues")
    add("--num-workers", type=int, default=2, metavar="N", help="ranks; 0 is Ray Train's local mode")
    add("--epochs", type=int, default=2, metavar="N", help="passes over the training rows")
    add("--global-batch-size", type=int, default=64, metavar="N", help="rows of a step, over all ranks")
    add("--checkpoint-every-steps", type=int, default=10, metavar="N", help="besides one at the end of each epoch")
    add("--image-size", type=int, default=16, metavar="PIXELS", help="side of the square that images become")
    return made


def open_data(args: argparse.Namespace) -> dict[str, raylance.Dataset]:
    """The datasets of a run: shuffled rows to train on, and all rows to validate on, in order."""
    image = raylance.Image("image", size=args.image_size)
    return {
        split: raylance.dataset(
            locate(args.data), columns=[image, "label"], filter=f"split = '{split}'", order=order, remainder="ragged",
        )
        for split, order in (("train", "window"), ("val", "sequential"))
    }  # fmt: skip


def run_config(args: argparse.Namespace, *, max_failures: int = 1) -> ray.train.RunConfig:
    """Where a run is kept, and how often it may restart by itself."""
    return ray.train.RunConfig(
        name=args.run_name,
        storage_path=locate(args.storage_path),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        failure_config=ray.train.FailureConfig(max_failures=max_failures),
    )


def start_ray() -> None:
    """Joins the Ray of RAY_ADDRESS, which `ray job submit` sets, or starts one on this machine."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False)


def build_model(image_size: int) -> torch.nn.Sequential:
    """A network of two layers for ten classes; the same weights wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(3 * image_size**2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )


def loss_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross-entropy of a batch: uint8 images (n, 3, H, W), int64 labels (n,)."""
    return torch.nn.functional.cross_entropy(model(batch["image"].float() / 255), batch["label"])


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any], loss_fn: Loss | None = None
) -> torch.Tensor:
    """One step of plain PyTorch; returns the loss, which is `loss_of` unless another one is given."""
    optimizer.zero_grad()
    loss = (loss_fn or loss_of)(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def fit(
    args: argparse.Namespace,
    train_fn: Callable[[dict[str, Any]], Any],
    trainer: Callable[..., Any] = ray.train.torch.TorchTrainer,
    *,
    train_data: raylance.Dataset | None = None,
    **changes: Any,
) -> int:
    """Runs a training function under a trainer, and prints how it ended; a run that fails raises.

    `train_data` replaces the datasets of `open_data`; `changes` are the trainer's arguments.
    """
    if args.num_workers:
        start_ray()
    datasets = open_data(args) if train_data is None else {"train": train_data}
    arguments = {
        "train_loop_config": vars(args),
        "datasets": datasets,
        "dataset_config": raylance.DataConfig(["train"]),
        "scaling_config": ray.train.ScalingConfig(num_workers=args.num_workers),
        "run_config": run_config(args),
    }
    result = trainer(train_fn, **(arguments | changes)).fit()
    print(f"run {args.run_name}: {result.return_value or result.metrics}")
    return 0


def train(
    config: Mapping[str, Any],
    *,
    ask_every: int | None = None,
    model: torch.nn.Module | None = None,
    loss_fn: Loss | None = None,
    batching: Mapping[str, Any] | None = None,
    **reporting: Any,
) -> dict[str, float]:
    """The plainest training function, for the guides that are not about the loop; returns the last metrics.

    Args:
        config: The arguments of `parser`, by name.
        ask_every: Steps after which to ask Ray if a node will be taken away; then there is one more checkpoint.
        model: A network other than `build_model`'s, with the same weights on all ranks.
        loss_fn: A loss other than `loss_of`.
        batching: More arguments of `loader.batches`; with `budget`, steps have that cost.
        **reporting: Those of `raylance.report`.
    """
    loader = ray.train.get_dataset_shard("train")
    given = dict(batching or {})
    if "budget" not in given:
        given["global_batch_size"] = config["global_batch_size"]
    batches = loader.prepare(**given)
    inner = build_model(config["image_size"]) if model is None else model
    optimizer = torch.optim.AdamW(inner.parameters(), lr=config.get("learning_rate", 3e-3))
    saved = raylance.restore(loader)
    if saved is not None:
        inner.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    parallel = ray.train.torch.prepare_model(inner)
    metrics: dict[str, float] = {}

    def state() -> dict[str, Any]:
        return {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}

    for epoch in range(loader.epoch, config["epochs"]):
        for step, batch in enumerate(batches, 1):
            loss = train_step(parallel, optimizer, batch, loss_fn)
            if step % config["checkpoint_every_steps"] == 0 or loader.epoch > epoch:
                metrics = {"loss": loss.item(), "epoch": loader.epoch}
                raylance.report(metrics, loader, state=state(), **reporting)
            elif ask_every is not None and step % ask_every == 0:
                raylance.runs.report_if_preempted(
                    {"loss": loss.item(), "epoch": loader.epoch}, loader, state, **reporting
                )
    return metrics
