"""Evaluation over all ranks, with the exact metric: each row counts once, however many ranks and restarts there are.

The rows come in storage order, and `remainder="ragged"` shares the last ones out: no row is repeated to fill a batch,
as samplers of other loaders do. Each rank counts; the counts of all ranks are added before each checkpoint, which has
them beside the position. A killed run continues with the very next row.

Cost: one small collective call a checkpoint. Metrics that are no sums need their parts gathered: store scores and
labels of each row, as `inference.py` does, and compute on them. For a validation set of a few seconds, leave
checkpoints out.

    python -m jobs.examples.evaluation --data digits.lance
"""

import sys
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed

import raylance
from jobs.common import locate
from jobs.examples import common


def train_fn(config: dict[str, Any]) -> dict[str, Any]:
    """Evaluates a network; returns the metric."""
    loader, device = ray.train.get_dataset_shard("train"), ray.train.torch.get_device()
    model = common.build_model(config["image_size"]).to(device).eval()
    saved = raylance.restore(loader)
    # Correct rows, and all: of this rank since the last checkpoint, and of all ranks until then.
    mine = torch.zeros(2, dtype=torch.int64, device=device)
    total = mine.clone() if saved is None else saved["counts"].to(device)
    if loader.epoch == 0:  # else it had ended when it was killed
        for step, batch in enumerate(loader.batches(global_batch_size=config["global_batch_size"]), 1):
            with torch.inference_mode():
                correct = model(batch["image"].float() / 255).argmax(1) == batch["label"]
            mine += torch.stack([correct.sum(), torch.tensor(len(correct), device=device)])
            if step % config["checkpoint_every_steps"] == 0 or loader.epoch:
                torch.distributed.all_reduce(mine)
                total, mine = total + mine, torch.zeros_like(mine)
                raylance.report({"rows": int(total[1])}, loader, state={"counts": total.cpu()})
    return {"accuracy": (total[0] / total[1]).item(), "correct": int(total[0]), "rows": int(total[1])}


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    data = raylance.dataset(
        locate(args.data),
        columns=[raylance.Image("image", size=args.image_size), "label"],
        filter="split = 'train'",
        order="sequential",
        remainder="ragged",
    )
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
