"""Owns what several jobs need: Ray, places, storage options, refusals; never what a job does."""

import os
import re
import warnings

import lance
import ray

import jobs


class RefusedError(Exception):
    """What was asked can't be done; the text gives cause, consequence and fix."""


def connect() -> None:
    """Joins Ray, or starts one here; its workers need not find jobs/ to do what a job sends them."""
    ray.cloudpickle.register_pickle_by_value(jobs)
    if not ray.is_initialized():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="lance is not fork-safe")  # Ray forks only to start its daemons
            ray.init()  # honours RAY_ADDRESS, which `ray job submit` sets


def locate(path: str) -> str:
    """Makes a local path absolute: every node writes, and a worker's current directory is not that of the driver."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def parse_options(pairs: list[str]) -> dict[str, str]:
    """Returns what --storage-options says."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise RefusedError(f"--storage-options {wrong[0]} has no =: it would not be used; write it as KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def exists(uri: str, options: dict[str, str]) -> bool:
    """Tells whether a Lance dataset opens there; any other trouble with the place shows on writing."""
    try:
        lance.dataset(uri, storage_options=options)
    except (OSError, ValueError):
        return False
    return True


def reason(error: BaseException) -> str:
    """Returns one line that says what went wrong: in the text of a failed Ray task, the first error named."""
    named = re.search(r"^(?:[a-z_.]+\.)?([A-Z]\w+: .+)$", str(error), re.MULTILINE)
    return (named[1] if named else str(error) or type(error).__name__).splitlines()[0]
