"""Owns the making of the copy from its plan to its commit, all of it or nothing; never decides where a row goes."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import lance
import pyarrow as pa
import ray
import ray.data
from lance.file import LanceFileSession
from lance.fragment import FragmentMetadata

import raylance
from jobs.common import exists, own_progress, taken

from .layout import Run, plan_buckets
from .planning import Bar, Plan, Wish, task_bytes
from .shuffle import Work, gather, scatter
from .survey import WORD

MOST_BLOCKS = 10_000  # of Ray Data, each a task

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
        stack.push(lambda kind, *_: remove(work.scratch, options, looks=_LOOKS if kind else 1))
        if not present:
            stack.push(lambda kind, *_: remove_half(work.out, options) if kind else None)
        work.mark_running()
        stack.push(lambda kind, *_: remove(work.scratch, options) if kind else None)  # tasks then write nothing more
        sorting = stack.enter_context(contextlib.closing(each(scatter, plan.found.chunks, work)))
        runs = [run for done in sorting for run in counted(progress, "sorting", done)]
        runs.sort(key=lambda run: (run.first, run.part))
        commit(work.scratch, work.scratch_schema, [run.fragment for run in runs], options)
        buckets = plan_buckets(plan.fragments, work.bounds, runs, work.bucket_bytes)
        writing = stack.enter_context(contextlib.closing(each(gather, buckets, work)))
        made = [one for done in writing for one in counted(progress, "writing", done)]
        made.sort(key=lambda one: one.start)
        rows, total = sum(one.rows for one in made), sum(one.checksum for one in made) & WORD
        if (rows, total) != (plan.found.rows, plan.found.checksum):
            raise raylance.CoverageError(
                f"{rows:,} rows with checksum {total:016x} were written, and {plan.found.rows:,} with "
                f"{plan.found.checksum:016x} are selected. Nothing was committed. Run it again, and report this if it "
                "comes again."
            )
        if not present and exists(work.out, options):
            raise raylance.DatasetError(
                f"--out {work.out} became a dataset of another run meanwhile. It is left as it is, and nothing "
                "was committed. Choose another --out."
            )
        return commit(work.out, work.schema, [one.fragment for one in made], options)


def counted(progress: Bar, phase: str, done: list[Any]) -> list[Any]:
    """What was done, after the bar has counted it."""
    progress(phase, sum(int(one.slot_rows.sum()) if isinstance(one, Run) else one.rows for one in done))
    return done


def each(task: Callable[..., pa.Table], items: list[Any], work: Work) -> Iterator[list[Any]]:
    """Runs a task on each item, as many at a time as CPUs and memory allow, in no order of their ends."""
    need = task_bytes(work.bucket_bytes)
    has = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if need > has:
        raise raylance.ConfigError(
            f"a task needs {need:,} bytes of memory for buckets of {work.bucket_bytes:,}, and no node has more than "
            f"{has:,.0f}. None would ever start. Give a smaller --bucket-bytes."
        )
    with own_progress():
        tasks = [{"task": pickle.dumps(item)} for item in items]
        results = ray.data.from_items(tasks, override_num_blocks=min(len(tasks), MOST_BLOCKS)).map_batches(
            task, fn_kwargs={"work": work}, batch_format="pyarrow", batch_size=1, num_cpus=1, memory=need
        )
        for batch in results.iter_batches(batch_format="pyarrow", batch_size=None):
            for result in batch["result"]:
                yield pickle.loads(result.as_py())


def commit(uri: str, schema: pa.Schema, fragments: list[str], options: dict[str, str]) -> lance.LanceDataset:
    """Makes a version of fragments, in their order."""
    found = [FragmentMetadata.from_json(text) for text in fragments]
    return lance.LanceDataset.commit(uri, lance.LanceOperation.Overwrite(schema, found), storage_options=options)


def check_target(wish: Wish, present: bool) -> None:
    """Refuses a target that is taken."""
    if present and not wish.overwrite:
        raise taken(wish.out)
    if not present and (files := list_files(wish.out, wish.storage_options)):
        raise raylance.ConfigError(
            f"--out {wish.out} is no Lance dataset, and {len(files):,} files lie there, such as {files[0]}. A run that "
            "was killed leaves such. Remove them, or choose another --out."
        )


def list_files(uri: str, options: dict[str, str]) -> list[str]:
    """Files below a URI of whatever storage Lance knows."""
    return sorted(LanceFileSession(uri, storage_options=options).list())


def remove_half(uri: str, options: dict[str, str]) -> None:
    """Removes what was written for a dataset that was not committed; a committed version stays."""
    remove(uri, options, unless="_versions/", looks=_LOOKS)


def remove(uri: str, options: dict[str, str], unless: str | None = None, looks: int = 1) -> None:
    """Removes what lies below a URI, unless a file's name begins so; where it cannot, it prints that, and is no error.

    Tasks of a run that was stopped may still write a file: so many looks in a row must find nothing new.
    """
    end, quiet = time.monotonic() + _LONGEST_S, 0
    try:
        while quiet < looks and time.monotonic() < end:
            files = list_files(uri, options)
            if unless is not None and any(file.startswith(unless) for file in files):
                return
            session = LanceFileSession(uri, storage_options=options)
            for file in files:
                session.delete_file(file)
            if "://" not in uri:  # folders are left
                shutil.rmtree(uri, ignore_errors=True)
            quiet = 0 if files and looks > 1 else quiet + 1
            time.sleep(_LOOK_S if quiet < looks else 0)
    except (OSError, ValueError, RuntimeError) as error:
        print(
            f"materialize.py: the files at {uri} cannot be removed ({error}). Nothing needs them. Remove them by hand.",
            file=sys.stderr,
        )
