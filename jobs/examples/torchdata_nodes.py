"""torchdata: `loader.batches(…)` at the root of a pipeline of nodes, whose state it becomes a part of.

`torchdata.nodes` saves and restores what has `state_dict` and `load_state_dict`: nothing is skipped on a resume. The
other half of torchdata, `StatefulDataLoader`, takes `raylance.torch_data.IterableDataset`.

    python -m jobs.examples.torchdata_nodes --data digits.lance
"""

import sys

import torch

import raylance
from jobs.common import bringing
from jobs.examples import common

with bringing("raylance[examples]", __name__):
    import torchdata.nodes


def pipeline(batches: raylance.Batches) -> torchdata.nodes.Loader[dict[str, torch.Tensor]]:
    """Batches with images as floats, made two ahead in a thread."""

    def to_float(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return batch | {"image": batch["image"].float() / 255}

    source = torchdata.nodes.IterableWrapper(batches)
    prefetched = torchdata.nodes.Prefetcher(torchdata.nodes.Mapper(source, to_float), prefetch_factor=2)
    return torchdata.nodes.Loader(prefetched)


def main(argv: list[str] | None = None) -> int:
    """Goes through an epoch, with a new pipeline after some steps that continues from the state of the first."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    train = common.open_data(args)["train"]
    rows, state = 0, None
    with train.loader() as loader:
        nodes = pipeline(loader.batches(global_batch_size=args.global_batch_size))
        for step, batch in enumerate(nodes, 1):
            rows += len(batch["label"])
            if step == args.checkpoint_every_steps:
                state = nodes.state_dict()
                break
    if state is not None:
        with train.loader() as loader:
            nodes = pipeline(loader.batches(global_batch_size=args.global_batch_size))
            nodes.load_state_dict(state)
            for batch in nodes:
                rows += len(batch["label"])
    print(f"{rows:,} rows, of {len(train):,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
