"""Owns values that are kept once a run in Ray's object store, where Ray runs; never makes them."""

import sys


def ray_session() -> str:
    """Names this process's connection to Ray, "" where there is none.

    A notebook may end one and begin another, at the same address or as another job of the same cluster: actors and
    objects of the one before are gone then.
    """
    if "ray" not in sys.modules:  # DataLoader workers take selections too, and have no Ray
        return ""
    import ray

    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.get_session_name()}/{context.get_job_id()}"
