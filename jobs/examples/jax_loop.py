"""JAX: NumPy batches become JAX arrays, under Ray's JaxTrainer.

`iter_batches` gives NumPy arrays that belong to their consumer; `jax.device_put` moves them. The state is plain
NumPy, too, which `report` takes as tensors.

    python -m jobs.examples.jax_loop --data digits.lance --num-workers 1
"""

import sys
from typing import Any

import numpy as np
import ray.train
import torch

import raylance
from jobs.common import bringing
from jobs.examples import common

with bringing("jax", __name__):
    import jax
    import jax.numpy as jnp
    from ray.train.v2.jax import JaxTrainer

Weights = dict[str, jax.Array]


def loss_of(weights: Weights, image: jax.Array, label: jax.Array) -> jax.Array:
    """Cross-entropy of uint8 images (n, H, W, 3) and int64 labels (n,)."""
    flat = image.reshape(len(image), -1).astype(jnp.float32) / 255
    scores = jax.nn.relu(flat @ weights["in"]) @ weights["out"]
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), label[:, None], axis=1).mean()


@jax.jit
def step_of(weights: Weights, image: jax.Array, label: jax.Array) -> tuple[Weights, jax.Array]:
    """One step of gradient descent."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, image, label)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients), loss


def train_fn(config: dict[str, Any]) -> None:
    """Trains a network of two layers."""
    loader = ray.train.get_dataset_shard("train")
    rng = np.random.default_rng(0)
    weights: Weights = {
        "in": jnp.asarray(rng.normal(0, 0.03, (3 * config["image_size"] ** 2, 64)), dtype=jnp.float32),
        "out": jnp.asarray(rng.normal(0, 0.1, (64, 10)), dtype=jnp.float32),
    }
    saved = raylance.restore(loader)
    if saved is not None:
        weights = {name: jnp.asarray(weight.numpy()) for name, weight in saved["weights"].items()}
    for epoch in range(loader.epoch, config["epochs"]):
        for step, batch in enumerate(loader.iter_batches(global_batch_size=config["global_batch_size"]), 1):
            weights, loss = step_of(weights, jax.device_put(batch["image"]), jax.device_put(batch["label"]))
            if step % config["checkpoint_every_steps"] == 0 or loader.epoch > epoch:
                state = {"weights": {name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()}}
                raylance.report({"loss": float(loss), "epoch": loader.epoch}, loader, state=state)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.set_defaults(num_workers=1)
    return common.fit(parser.parse_args(argv), train_fn, JaxTrainer)


if __name__ == "__main__":
    sys.exit(main())
