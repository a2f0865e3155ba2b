"""Owns what each rank does: network, optimizer, loader, steps, checkpoints; never runs outside of a worker."""

import argparse
import math
import os
import random
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import raylance
from jobs import output
from jobs.train_images.model import build_model, check_network, learning_rate, scores_of
from jobs.train_images.tracking import Tracking

# What is reported to Ray Train, and what it is called where the run is tracked.
REPORTED = {
    "epoch": "epoch",
    "train_loss": "epoch_loss",
    "val_accuracy": "val_accuracy",
    "images_per_s": "images_per_s",
}


class Training:
    """One rank's network, optimizer and loader, and the steps that they make; `resume` continues from a checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        context = ray.train.get_context()
        self.rank, self.ranks = context.get_world_rank(), context.get_world_size()
        self.config, self.args = config, argparse.Namespace(**config["arguments"])
        args = self.args
        # Ray allows one thread for each CPU that it counts for a rank; a GPU rank counts none, and others may lie idle.
        here = ray.get_runtime_context().get_node_id()
        cpus = next(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == here)
        torch.set_num_threads(max(1, int(min(cpus, os.cpu_count() or 1) / context.get_local_world_size())))
        torch.manual_seed(args.seed)
        self.loader = ray.train.get_dataset_shard("train")
        self.batches = {"global_batch_size": args.global_batch_size, "prefetch_batches": args.prefetch_batches}
        self.loader.prepare(**self.batches)  # its helpers start while the model is built
        self.network = build_model(*config["network"]).to(memory_format=torch.channels_last)
        self.model = ray.train.torch.prepare_model(self.network)
        weights = self.network.parameters()
        self.optimizer = torch.optim.AdamW(weights, args.learning_rate, weight_decay=args.weight_decay)
        self.steps = self.loader.steps_per_epoch(global_batch_size=args.global_batch_size)
        self.made = 0  # steps since the run began, whatever the batch was
        self.pace, self.lap = (Pace(self.loader, args.global_batch_size) for _ in range(2))
        self.tracking = Tracking()

    @property
    def step(self) -> int:
        """Steps of the epoch that are done."""
        return self.loader.state_dict()["position"] // self.args.global_batch_size

    def resume(self) -> str:
        """Continues from the run's checkpoint, where there is one; returns why it cannot.

        A checkpoint that does not fit is returned and not raised: after an error Ray would only try again.
        """
        try:
            saved = raylance.restore(self.loader, ray.train.get_checkpoint() or self.config["other"])
            if saved is None:
                return ""
            check_network(saved, self.config["network"])
        except raylance.StateError as error:
            return str(error)
        self.network.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.made = saved.get("steps", self.loader.epoch * self.steps + self.step)
        return ""

    def track(self) -> None:
        """Begins to log this run, where it is tracked; rank 0 does."""
        if self.rank == 0 and self.loader.epoch < self.args.epochs:
            facts = {"arguments": self.config["arguments"], "data": self.loader.identity()}
            self.tracking = Tracking(self.config["trackers"], self.made, facts)

    def report(self, metrics: dict[str, float]) -> None:
        """Reports to Ray Train, with a checkpoint. Learning rate and random numbers follow from the position in it."""
        self.tracking.log(self.made, {REPORTED[name]: value for name, value in metrics.items() if name in REPORTED})
        self.tracking.keep()
        state = {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.made}
        raylance.report(metrics, self.loader, state=state | {"network": self.config["network"]})

    def train_step(self, epoch: int, step: int, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Makes one step; returns the loss of the global batch, as far as it is this rank's."""
        args = self.args
        torch.manual_seed(random.Random(f"{args.seed} {epoch} {step} {self.rank}").getrandbits(63))  # for dropout
        progress = (epoch + (step - 0.5) / self.steps) / args.epochs
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(args.learning_rate, progress)
        scores = scores_of(self.model, batch[args.image_column], args.precision)
        losses = cross_entropy(scores, batch[args.label_column].long(), reduction="none")
        # DDP averages over ranks, whose shares may differ by a row: this makes it the mean of the global batch.
        loss = (losses * batch.get("_valid", 1)).sum() * (self.ranks / args.global_batch_size)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.made += 1
        return loss.detach()

    def train_epoch(self, epoch: int) -> tuple[torch.Tensor, int]:
        """Makes the rest of an epoch; returns the sum of the losses, and how many steps there were."""
        first = step = self.step
        loss_sum = torch.zeros((), device=ray.train.torch.get_device())
        self.network.train()
        self.lap.begin(self.made)
        for step, batch in enumerate(self.loader.iter_torch_batches(**self.batches), first + 1):
            loss = self.train_step(epoch, step, batch)
            loss_sum += loss
            if self.tracking and self.made % self.args.track_every_steps == 0:  # not often: a GPU has to be waited for
                rate = self.optimizer.param_groups[0]["lr"]
                pace = self.lap.since(self.made)
                self.tracking.log(self.made, {"loss": loss.item(), "learning_rate": rate, **pace})
                if pace:
                    self.lap.begin(self.made)
            if step % self.args.checkpoint_every_steps == 0 and step < self.steps:
                self.report({"epoch": epoch, "step": step, "train_loss": loss_sum.item() / (step - first)})
        return loss_sum, step - first


class Pace:
    """How fast training is, and the share of its time that it waits for data, since some step.

    As in `explain()` and the report, time is training and waiting, without starting, saving and validation.
    """

    def __init__(self, loader: raylance.RankLoader, batch: int) -> None:
        self._loader, self._batch = loader, batch
        self.begin(0)

    def begin(self, steps: int) -> None:
        """Starts counting after so many steps."""
        self._before = self._now(steps)

    def since(self, steps: int) -> dict[str, float]:
        """The figures since then, up to a step; none where no time has passed."""
        trained, waited, made = (now - before for now, before in zip(self._now(steps), self._before, strict=True))
        if made <= 0 or trained + waited <= 0:
            return {}
        return {"images_per_s": made * self._batch / (trained + waited), "waiting": waited / (trained + waited)}

    def _now(self, steps: int) -> tuple[float, float, int]:
        stats = self._loader.stats()
        trained = stats["user_s"] - stats["save_s"] - stats["other_s"]
        return trained, sum(stats[f"wait_{cause}_s"] for cause in ("read", "decode", "finish")), steps


def train_fn(config: dict[str, Any]) -> dict[str, Any]:
    """Trains on one rank; returns figures for the summary, or under `refused` why the run cannot continue."""
    with output.warnings_to_user():
        training = Training(config)
        if refused := training.resume():
            return {"refused": refused}
        training.track()
        with training.tracking:
            return train(training)


def train(training: Training) -> dict[str, Any]:
    """Trains and validates, epoch by epoch; returns figures for the summary."""
    val = ray.train.get_dataset_shard("val")
    args = training.args
    training.pace.begin(training.made)
    to_run = range(training.loader.epoch, args.epochs)
    if to_run:
        val.prepare(global_batch_size=args.global_batch_size)  # its helpers start while the first epoch is trained
    for epoch in to_run:
        first = training.step
        loss_sum, steps = training.train_epoch(epoch)
        sums = torch.stack([loss_sum / training.ranks, *count_right(training.network, val, args)])
        torch.distributed.all_reduce(sums)
        loss_of_ranks, right, rows = sums.tolist()
        # After a checkpoint at the end of an epoch there are no steps left; where all rows are masked, no rows.
        metrics = {
            "epoch": epoch,
            "epochs": epoch + 1,  # done
            "step": first + steps,
            "train_loss": loss_of_ranks / steps if steps else math.nan,
            "val_accuracy": right / rows if rows else math.nan,
            "images_per_s": training.pace.since(training.made).get("images_per_s", math.nan),
        }
        training.report(metrics)
    for loader in (training.loader, val):
        loader.close()  # its record then says that it has ended
    return {"epochs": len(to_run), **training.loader.stats()}


@torch.inference_mode()
def count_right(network: nn.Module, val: raylance.RankLoader, args: argparse.Namespace) -> torch.Tensor:
    """Counts right answers and rows in this rank's share of the validation rows; shape (2,)."""
    # Each rank has running statistics of its own; those of rank 0 are what checkpoints hold.
    for buffer in network.buffers():
        torch.distributed.broadcast(buffer, 0)
    network.eval()
    counts = torch.zeros(2, device=next(network.parameters()).device)
    for batch in val.iter_torch_batches(global_batch_size=args.global_batch_size):
        labels = batch[args.label_column]
        if len(labels):  # the last step is smaller, and may have no row for this rank
            valid = batch.get("_valid", torch.ones_like(labels, dtype=torch.bool))
            scores = scores_of(network, batch[args.image_column], args.precision)
            right = (scores.argmax(1) == labels) & valid
            counts += torch.stack([right.sum(), valid.sum()])
    return counts
