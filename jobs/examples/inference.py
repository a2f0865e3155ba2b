"""Inference that writes a new column of the same dataset: each row once, resumable.

First the column is added, with nulls: that writes no data. The rows to predict are those in which it is null. Ranks
predict them in storage order, and before each checkpoint they write what they predicted since the last one, by row
offset, into files beside the run. After a kill, the steps since the last checkpoint are predicted again; of a row that
was predicted twice, one value counts. At the end the values go into the dataset in one commit.

The run reads the version that it began with, held by a tag. Rows that were added meanwhile keep null, as do those of
fragments that were compacted meanwhile: run it again under another name, and it predicts what is null then. Where
another writer commits between, the values are written again on the newest version.

Cost: the values are written twice, as files and as the column. Where one machine can predict all, or where the
predictions belong into a dataset of their own, Ray Data with lance-ray is simpler.

    python -m jobs.examples.inference --data digits.lance --column digit
"""

import os
import sys
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import ray.train
import ray.train.torch
import tenacity
import torch
from lance.commit import CommitConflictError

import raylance
from jobs.common import locate
from jobs.examples import common


def train_fn(config: dict[str, Any]) -> dict[str, Any]:
    """Predicts the rows of this rank, and writes files of row offsets and values."""
    loader, device = ray.train.get_dataset_shard("train"), ray.train.torch.get_device()
    model = common.build_model(config["image_size"]).to(device).eval()
    raylance.restore(loader)
    witness = common.Witness(config, loader)
    offsets, values = [], []
    if loader.epoch == 0:  # else all rows were predicted when the run was killed
        batches = loader.batches(global_batch_size=config["global_batch_size"], with_row_offset=True)
        for step, batch in enumerate(batches, 1):
            witness.saw(batch)
            with torch.inference_mode():
                values.append(model(batch["image"].float() / 255).argmax(1).cpu().numpy())
            offsets.append(batch["_rowoffset"].cpu().numpy())
            if step % config["checkpoint_every_steps"] == 0 or loader.epoch:
                part = pa.table({"offset": np.concatenate(offsets), "value": np.concatenate(values)})
                state = loader.state_dict()
                name = f"{state['epoch']}-{state['position']}-{loader.rank}-of-{loader.world_size}.parquet"
                write_whole(part, Path(config["parts"]) / name)
                offsets, values = [], []
                raylance.report({"position": state["position"]}, loader)
    return {"parts": config["parts"]}


def write_whole(table: pa.Table, path: Path) -> None:
    """Writes a file that is there whole, or not at all."""
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    pyarrow.parquet.write_table(table, unfinished)
    unfinished.rename(path)


def read_values(parts: str, rows: int) -> dict[int, int]:
    """The predicted values by row offset.

    Raises:
        RuntimeError: If these are not as many rows as were selected.
    """
    files = [str(path) for path in Path(parts).glob("*.parquet")]
    table = pyarrow.dataset.dataset(files).to_table()
    values = dict(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True))
    if len(values) != rows:
        raise RuntimeError(
            f"{parts} has values of {len(values):,} rows, and {rows:,} were selected: nothing was written."
        )
    return values


@tenacity.retry(retry=tenacity.retry_if_exception_type(CommitConflictError), stop=tenacity.stop_after_attempt(5))
def write_column(uri: str, version: str, column: str, values: dict[int, int]) -> int:
    """Writes values by row offset of a version into the newest one, in one commit; returns the rows still null."""
    newest = lance.dataset(uri)
    kept = {fragment.fragment_id: fragment for fragment in newest.get_fragments()}
    changed, fields, start = [], set[int](), 0
    for old in lance.dataset(uri, version=version).get_fragments():
        ids = old.scanner(columns=[], with_row_id=True).to_table()["_rowid"].to_pylist()
        here = [(row, values[start + place]) for place, row in enumerate(ids) if start + place in values]
        start += len(ids)
        fragment = kept.get(old.fragment_id)
        if fragment is None or not here:
            continue
        table = pa.table(
            {"_rowid": pa.array([row for row, _ in here], pa.uint64()), column: [value for _, value in here]}
        )
        metadata, modified = fragment.update_columns(table)
        changed.append(metadata)
        fields |= {*modified}
    if changed:
        operation = lance.LanceOperation.Update(updated_fragments=changed, fields_modified=sorted(fields))
        newest = lance.LanceDataset.commit(uri, operation, read_version=newest.version)
    left: int = newest.count_rows(f"`{column}` IS NULL")
    return left


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.add_argument("--column", default="predicted", metavar="NAME", help="int64; added where it is not there")
    args = parser.parse_args(argv)
    uri, tag = locate(args.data), f"inference-{args.run_name}"
    args.parts = os.path.join(locate(args.storage_path), args.run_name, "parts")
    dataset = lance.dataset(uri)
    if args.column not in dataset.schema.names:
        dataset.add_columns(pa.field(args.column, pa.int64()))
    if tag not in dataset.tags.list():
        dataset.tags.create(tag, lance.dataset(uri).version)
    data = raylance.dataset(
        uri,
        version=tag,
        columns=["image"],
        filter=f"`{args.column}` IS NULL",
        decode=raylance.Image("image", size=args.image_size),
        order="sequential",
        remainder="ragged",
    )
    os.makedirs(args.parts, exist_ok=True)
    status = common.fit(args, train_fn, train_data=data)
    left = write_column(uri, tag, args.column, read_values(args.parts, len(data)))
    dataset.tags.delete(tag)
    print(f"{uri}: {len(data):,} rows were predicted; {args.column!r} is null in {left:,}")
    return status


if __name__ == "__main__":
    sys.exit(main())
