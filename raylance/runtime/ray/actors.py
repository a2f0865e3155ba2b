"""The common base of helper actors; it imports little, because each actor waits for its imports.

The calling worker owns the actors' results, but tables go from a shard actor to a decoder without passing the worker.
"""

import os
import sys

import ray


class Actor:
    """A helper actor. Its methods only call code that does not depend on Ray."""

    def __init__(self) -> None:
        # Actors run in parallel, so more threads would compete for cores. torch reads this if it is loaded later.
        os.environ["OMP_NUM_THREADS"] = "1"
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)

    def actor_id(self) -> str:
        """Returns the ID of this actor in hex. The call is answered once the actor is ready."""
        return str(ray.get_runtime_context().get_actor_id())
