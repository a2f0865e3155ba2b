"""Replicas that come and go: a rank that dies costs the others a step, and no restart.

With torchft, the ranks that live make the next step, and Ray Train replaces the one that died, which takes the
weights over from another. `raylance.torchft.batches` deals each step's rows out to those who take part in it, so that
each row is trained on once, in the same global batches as in an undisturbed run. Only if all ranks die, the run starts
again from its newest checkpoint. docs/frameworks.md says how to kill a rank by hand, and how to prove the run.

The dataset is passed in the training function's configuration and not as `datasets=`: for a rank that is replaced,
Ray Train 2.60 waits in `get_dataset_shard` until rank 0 asks, which has asked before.

    pip install 'raylance[torchft]'
    python -m jobs.examples.torchft_ddp --data digits.lance --epochs 50
"""

import sys
from datetime import timedelta
from typing import Any

import ray.train
import ray.train.torch
import torch

import raylance
import raylance.torchft
from jobs.common import bringing
from jobs.examples import common

with bringing("raylance[torchft]", __name__):
    import torchft
    from ray.train.v2.torch.torchft_config import TorchftConfig


def average(model: torch.nn.Module, manager: torchft.Manager) -> None:
    """Averages gradients over the replicas, in one reduction; if that fails, the step does not count.

    In torchft 0.2, its DistributedDataParallel raises instead, which would end a rank that lives.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains as one replica, until all epochs are over."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    loader = config["train"].loader(rank=rank, world_size=world_size)
    model = common.build_model(config["image_size"])
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    saved = raylance.restore(loader)
    if saved is not None:
        load(saved)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        replica_id=f"replica-{rank}",
    )
    optimizer, metrics = torchft.Optimizer(manager, inner), {}
    sizes = {"global_batch_size": config["global_batch_size"], "epochs": config["epochs"]}
    for batch in raylance.torchft.batches(loader, manager, **sizes):
        step = manager.current_step()
        optimizer.zero_grad()
        loss = common.loss_of(model, batch)
        loss.backward()
        average(model, manager)
        optimizer.step()
        if manager.current_step() == step:  # it was not committed, and comes again
            continue
        metrics = {"loss": loss.item(), "step": step}
        if manager.current_step() % config["checkpoint_every_steps"] == 0:
            raylance.torchft.report_if_all(metrics, loader, manager, state=state())
    raylance.torchft.report_if_all(metrics, loader, manager, state=state())
    loader.close()
    manager.shutdown(wait=False)
    return metrics


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    common.start_ray()
    data = common.open_data(args)["train"]
    trainer = ray.train.torch.TorchTrainer(
        train_fn,
        train_loop_config=vars(args) | {"train": data},
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers),
        run_config=common.run_config(args, max_failures=20),
    )
    print(f"run {args.run_name}: {trainer.fit().return_value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
