"""torchdata: `loader.batches(…)` at the root of a pipeline of nodes, whose state it becomes a part of.

`torchdata.nodes` saves and restores what has `state_dict` and `load_state_dict`: nothing is skipped on a resume. The
other half of torchdata, `StatefulDataLoader`, takes `raylance.torch_data.IterableDataset`.

    python -m jobs.examples.torchdata_nodes --data digits.lance
"""

import itertools
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
    """Goes through half an epoch, and through the rest with a new pipeline, from the state of the first."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    train = common.open_data(args)["train"]
    with train.loader() as loader:
        batches = loader.batches(global_batch_size=args.global_batch_size)
        nodes = pipeline(batches)
        rows = sum(len(batch["label"]) for batch in itertools.islice(nodes, len(batches) // 2))
        state = nodes.state_dict()
    with train.loader() as loader:
        nodes = pipeline(loader.batches(global_batch_size=args.global_batch_size))
        nodes.load_state_dict(state)
        rows += sum(len(batch["label"]) for batch in nodes)
    print(f"{rows:,} rows, of {len(train):,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
