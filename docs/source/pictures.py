"""The picture docs/orders.png, which shows what each order reads when, and the figures beside it."""

import tempfile
from pathlib import Path

import lance
import numpy as np
import PIL.Image
import pyarrow as pa

import raylance

ROWS, BATCH, RANKS, CLASSES = 16_384, 256, 2, 10
ORDERS = (
    raylance.Sequential(),
    raylance.ShardShuffle(shard_rows=512, lanes=2),
    raylance.WindowShuffle(shard_rows=512, window_shards=4, lanes=2),  # so few that each is seen
    raylance.RowShuffle(),
)
MORE = tuple(raylance.WindowShuffle(shard_rows=64, window_shards=4, lanes=lanes) for lanes in (8, 32))  # figures alone
COLOURS = 48


def make_pictures(folder: Path) -> None:
    """Draws the orders side by side, and prints their shuffle quality on rows that are sorted by class."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    axes = plt.subplots(1, len(ORDERS), figsize=(11, 3.2), sharey=True, layout="constrained", dpi=90)[1]
    labels = np.arange(ROWS) * CLASSES // ROWS  # sorted by class: the worst case
    print(f"{ROWS:,} rows sorted by class, {CLASSES} classes, {BATCH} a batch, {RANKS} ranks; row shuffle is 1")
    with tempfile.TemporaryDirectory() as temp:
        uri = str(Path(temp) / "rows.lance")
        lance.write_dataset(pa.table({"id": np.arange(ROWS)}), uri)
        for order, one in zip(ORDERS + MORE, [*axes, *[None] * len(MORE)], strict=True):
            plan = raylance.dataset(uri, order=order).plan(BATCH, RANKS)
            quality = plan.shuffle_quality(labels)
            print(f"{quality.class_divergence:6.1f} class divergence, {quality.spread.ratio:.2f} spread: {order}")
            if one is not None:
                plan.plot(axes=one)
                one.set(title=f'order="{order.name}"', ylabel=one.get_ylabel() if one is axes[0] else "")
                one.get_legend().remove()
    axes[0].legend(loc="lower right", markerscale=4)
    path = folder / "orders.png"
    plt.savefig(path)
    with PIL.Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLOURS)
    small.save(path, optimize=True)
    print(f"wrote {path}")
