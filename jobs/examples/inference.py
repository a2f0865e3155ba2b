"""Inference that writes a new column of the same dataset: each row once, resumable.

First the column is added, with nulls: that writes no data. The rows to predict are those in which it is null. Ranks
predict them in storage order, and before each checkpoint they write what they predicted since the last one, by row
offset, into files beside the run. After a kill, the steps since the last checkpoint are predicted again; of a row that
was predicted twice, one value counts. At the end the values go into the dataset in one commit.

The run reads the version that it began with, held by a tag. Rows that were added meanwhile keep null, as do those of
fragments that were compacted meanwhile: run it again under another name, and it predicts what is null then. Where
another writer commits between, the values are written again on the newest version.

The column has the type that `VALUES` names: the class of an image, or the scores of all ten. A column of another type
is refused before the first prediction. For embeddings, take `pa.list_(pa.float32(), 768)`; for captions, `pa.string()`.

Cost: the values are written twice, as files and as the column. Where one machine can predict all, or where the
predictions belong into a dataset of their own, Ray Data with lance-ray is simpler.

    python -m jobs.examples.inference --data digits.lance --column digit
"""

import sys
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import ray.train
import ray.train.torch
import torch

import raylance
from jobs.common import locate
from jobs.examples import common

# What a row gets, by --predict: the type of the column, and the values of a batch's scores (n, 10).
VALUES = {
    "class": (pa.int64(), lambda scores: scores.argmax(1)),
    "scores": (pa.list_(pa.float32(), 10), lambda scores: scores),
}


def train_fn(config: dict[str, Any]) -> dict[str, Any]:
    """Predicts the rows of this rank, and writes files of row offsets and values."""
    loader, device = ray.train.get_dataset_shard("train"), ray.train.torch.get_device()
    model = common.build_model(config["image_size"]).to(device).eval()
    type, values_of = VALUES[config["predict"]]
    raylance.restore(loader)
    offsets, values = [], []
    if loader.epoch == 0:  # else all rows were predicted when the run was killed
        batches = loader.batches(global_batch_size=config["global_batch_size"], with_row_offset=True)
        for step, batch in enumerate(batches, 1):
            with torch.inference_mode():
                values.append(values_of(model(batch["image"].float() / 255)).cpu().numpy())
            offsets.append(batch["_rowoffset"].cpu().numpy())
            if step % config["checkpoint_every_steps"] == 0 or loader.epoch:
                raylance.writing.write_values(config["parts"], np.concatenate(offsets), np.concatenate(values), type)
                offsets, values = [], []
                raylance.report({"position": loader.state_dict()["position"]}, loader)
    return {"parts": config["parts"]}


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.add_argument("--column", default="predicted", metavar="NAME", help="added if it is not there")
    parser.add_argument("--predict", default="class", choices=VALUES, help="what a row gets")
    args = parser.parse_args(argv)
    uri, tag = locate(args.data), f"inference-{args.run_name}"
    args.parts = f"{locate(args.storage_path)}/{args.run_name}/parts"
    raylance.writing.add_column(uri, args.column, VALUES[args.predict][0])
    dataset = lance.dataset(uri)
    if tag not in dataset.tags.list():
        dataset.tags.create(tag, dataset.version)
    data = raylance.dataset(
        uri,
        version=tag,
        columns=[raylance.Image("image", size=args.image_size)],
        filter=f"`{args.column}` IS NULL",
        order="sequential",
        remainder="ragged",
    )
    common.fit(args, train_fn, train_data=data)
    values = raylance.writing.read_values(args.parts, len(data))
    left = raylance.writing.write_column(uri, args.column, values, version=tag)
    dataset.tags.delete(tag)
    print(f"{uri}: {len(data):,} rows were predicted; {left:,} of them were rewritten meanwhile and have no value yet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
