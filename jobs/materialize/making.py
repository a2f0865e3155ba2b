"""The making of the copy from its plan to its commit, all of it or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import lance
import ray
from lance.file import LanceFileSession

import raylance
from jobs.common import exists, remove_files, run_tasks, taken

from .layout import Run, plan_buckets
from .planning import Bar, Plan, Wish, task_bytes
from .shuffle import Work, gather, scatter
from .survey import WORD

_LOOKS, _LOOK_S, _LONGEST_S = 4, 0.5, 20.0  # for what tasks of a run that was stopped still write


def make(plan: Plan, progress: Bar) -> lance.LanceDataset:
    """Makes the copy and commits it. Until then nothing can be opened under its name; what fails leaves nothing there.

    Raises:
        CoverageError: If rows are missing or doubled.
        ray.exceptions.RayError: If a task failed, with the task's error as text.
    """
    work, options = plan.work, plan.wish.storage_options
    present = exists(work.out, options)
    check_target(plan.wish, present)
    work = dataclasses.replace(work, mode="overwrite" if present else "create")
    with contextlib.ExitStack() as stack:
        half = None if present else work.out
        stack.push(
            lambda kind, *_: sweep(work.scratch, half, options) if kind else sweep(work.scratch, None, options, 1)
        )
        work.mark_running()
        sorting = stack.enter_context(contextlib.closing(each(scatter, plan.found.chunks, work)))
        runs = [run for done in sorting for run in counted(progress, "sorting", done)]
        runs.sort(key=lambda run: (run.first, run.part))
        operation = lance.LanceOperation.Overwrite(work.scratch_schema, [run.fragment for run in runs])
        lance.LanceDataset.commit(work.scratch, operation, storage_options=options)
        buckets = plan_buckets(plan.fragments, work.bounds, runs, work.bucket_bytes)
        writing = stack.enter_context(contextlib.closing(each(gather, buckets, work)))
        made = [one for done in writing for one in counted(progress, "writing", done)]
        made.sort(key=lambda one: one.start)
        rows, total = sum(one.rows for one in made), sum(one.checksum for one in made) & WORD
        if (rows, total) != (plan.found.rows, plan.found.checksum):
            raise raylance.errors.CoverageError(
                f"{rows:,} rows with checksum {total:016x} were written, and {plan.found.rows:,} with "
                f"{plan.found.checksum:016x} are selected. Nothing was committed. Run it again, and report this if it "
                "comes again."
            )
        if not present and exists(work.out, options):
            raise raylance.errors.DatasetError(
                f"--out {work.out} became a dataset of another run meanwhile. It is left as it is, and nothing "
                "was committed. Choose another --out."
            )
        operation = lance.LanceOperation.Overwrite(work.schema, [one.fragment for one in made])
        return lance.LanceDataset.commit(work.out, operation, storage_options=options)


def counted(progress: Bar, phase: str, done: list[Any]) -> list[Any]:
    """What was done, after the bar has counted it."""
    progress(phase, sum(int(one.slot_rows.sum()) if isinstance(one, Run) else one.rows for one in done))
    return done


def each(task: Callable[[Any, Work], list[Any]], items: list[Any], work: Work) -> Iterator[list[Any]]:
    """Runs a task on each item, as many at a time as CPUs and memory allow."""
    need = task_bytes(work.bucket_bytes)
    has = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if need > has:
        raise raylance.errors.ConfigError(
            f"a task needs {need:,} bytes of memory for buckets of {work.bucket_bytes:,}, and no node has more than "
            f"{has:,.0f}. None would ever start. Give a smaller --bucket-bytes."
        )
    return run_tasks(task, items, work, num_cpus=1, memory=need)


def check_target(wish: Wish, present: bool) -> None:
    """Refuses a target that is taken."""
    if present and not wish.overwrite:
        raise taken(wish.out)
    if not present and (files := list_files(wish.out, wish.storage_options)):
        raise raylance.errors.ConfigError(
            f"--out {wish.out} is not a Lance dataset, and {len(files):,} files lie there, such as {files[0]}. A run "
            "that was killed leaves such. Remove them, or choose another --out."
        )


def list_files(uri: str, options: dict[str, str]) -> list[str]:
    """Files below a URI of whatever storage Lance knows."""
    return sorted(LanceFileSession(uri, storage_options=options).list())


def sweep(scratch: str, half: str | None, options: dict[str, str], looks: int = _LOOKS) -> None:
    """Removes the scratch dataset, without which tasks write nothing more, and a dataset that was not committed.

    Tasks of a run that was stopped may still write a file, or remove it: so many looks in a row must find nothing new.
    What cannot be removed is printed, and is no error.
    """
    places, end, quiet = [scratch, *([half] if half else [])], time.monotonic() + _LONGEST_S, 0
    while quiet < looks and time.monotonic() < end:
        found, failed = False, {}
        for uri in places:
            try:
                found |= clear(uri, options, keeps_versions=uri == half)
            except (OSError, ValueError, RuntimeError) as error:
                failed[uri] = error
        quiet = 0 if found and looks > 1 else quiet + 1
        time.sleep(_LOOK_S if quiet < looks else 0)
    for uri, error in failed.items():
        print(
            f"materialize.py: the files at {uri} cannot be removed ({error}). Nothing needs them. Remove them by hand.",
            file=sys.stderr,
        )


def clear(uri: str, options: dict[str, str], keeps_versions: bool) -> bool:
    """Removes the files below a URI, unless a version that is to be kept was committed; returns whether any were."""
    if keeps_versions and any(file.startswith("_versions/") for file in list_files(uri, options)):
        return False
    return remove_files(uri, options) > 0
