"""Owns what the actors that help have in common; loads as little as it can, because each of them waits for it.

What they return is owned by the worker that called: tables go from a shard actor to a decoder without passing it.
"""

import os
import sys

import ray


class Actor:
    """A helper actor: a thin shell around the work that any helper does."""

    def __init__(self) -> None:
        # Parallel by actors: more threads would fight for the same cores. A torch loaded later reads the variable.
        os.environ["OMP_NUM_THREADS"] = "1"
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)

    def actor_id(self) -> str:
        """The ID of this actor, hex; answers once the actor is ready."""
        return str(ray.get_runtime_context().get_actor_id())
