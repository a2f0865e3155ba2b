"""Fine-tuning by a budget of tokens: every GPU has the same work in every step, and little padding.

The order "bucket" brings documents of similar length together. A step has as many of them as its budget of tokens
allows, padding included. `Balance` swaps a few between ranks, so that no rank waits for another. Each step comes as
micro-batches that fit into memory, as many on every rank. Losses are summed, and divided by the tokens of the step, so
that the gradient is that of one large batch, however it is divided.

Cost: the lengths of all documents are read once, 4 bytes each. Rows of a step are alike, which is a weaker shuffle:
`bucket_steps=8` mixes eight steps, for a little more padding; `plan()` says how much.

    python -m jobs.examples.made_data documents documents.lance
    python -m jobs.examples.fine_tuning --data documents.lance
"""

import sys
from typing import Any

import ray.train
import torch

import raylance
from jobs.common import locate
from jobs.examples import common
from jobs.examples.language_model import TinyGPT

STEP_TOKENS, MICRO_TOKENS = 512, 128
SIZE: dict[str, Any] = {"budget": raylance.Budget(STEP_TOKENS, micro=MICRO_TOKENS)}


def loss_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The sum of the cross-entropies of a micro-batch."""
    ids, lengths = batch["tokens"].long(), batch["tokens_length"]
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    is_token = places < lengths[:, None]
    logits = model(ids, places, torch.where(is_token, 0, -1))
    labels = torch.where(is_token, ids, -100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains, and reports every few steps."""
    loader = ray.train.get_dataset_shard("train")
    batches = loader.prepare(**SIZE, pad_lists={"tokens": raylance.Pad(0)})
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if (saved := raylance.restore(loader)) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    parallel = ray.train.torch.prepare_model(model)
    world, metrics = ray.train.get_context().get_world_size(), dict[str, float]()
    for epoch in range(loader.epoch, config["epochs"]):
        for step, micro_batches in enumerate(batches, 1):
            optimizer.zero_grad()
            total = torch.zeros(())
            for micro in micro_batches:
                loss = loss_of(parallel, micro) * (world / micro["_step_cost"])  # DDP divides by the world
                loss.backward()
                total += loss.detach()
            optimizer.step()
            if step % config["checkpoint_every_steps"] == 0 or loader.epoch > epoch:
                metrics = {"loss": total.item(), "epoch": loader.epoch}
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                raylance.report(metrics, loader, state=state)
    return metrics


def open_data(uri: str, **changes: Any) -> raylance.Dataset:
    """The documents to train on, none longer than a sequence of the model."""
    arguments: dict[str, Any] = {"filter": "split = 'train'", "cost": raylance.TokensOf("tokens"), "order": "bucket"}
    arguments |= {"columns": ["tokens"], "balance": raylance.Balance()}
    return raylance.dataset(locate(uri), **arguments | changes)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    data = open_data(args.data)
    print(data.plan(world_size=max(1, args.num_workers), budget=raylance.Budget(STEP_TOKENS)))
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
