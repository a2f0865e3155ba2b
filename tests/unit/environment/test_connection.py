"""Owns the checks that no loader calls Ray outside of its helpers' session, and that the end of that is an error."""

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

ROWS = 4_000

SCRIPT = """
import faulthandler, functools, os, sys, threading, time
import ray, raylance
from raylance.environment.connection import current_session, ray_session

faulthandler.dump_traceback_later(200, exit=True)

def init():
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)

def slowly(batch, pause_s, this_process):
    if os.getpid() != this_process:  # which only opens the dataset
        time.sleep(pause_s)
    return {"id": batch["id"]}

def open_loader(pause_s, **options):
    transform = functools.partial(slowly, pause_s=pause_s, this_process=os.getpid())
    return raylance.dataset(sys.argv[1], order="window", transform=transform, remainder="ragged").loader(**options)

def iterate(loader):
    return iter(loader.iter_batches(global_batch_size=40))

def ids_of(batches):
    return [number for batch in batches for number in batch["id"].tolist()]

def begin(loader):
    batches = iterate(loader)
    return batches, ids_of(next(batches) for _ in range(3))

def ends(batches, ids):
    '''What ends a pass, after the batches that were made already.'''
    try:
        for batch in batches:
            ids += batch["id"].tolist()
    except raylance.HelperError as error:
        return str(error)
    raise AssertionError("no error")

def runs_in(loader):
    return type(loader._session.runtime).__name__

init()
session = ray_session()
kept = open_loader(0.01, num_decoders=1)
kept_batches, kept_ids = begin(kept)
loader = open_loader(0.01)  # num_decoders="auto": what the cluster has is asked for
batches, ids = begin(loader)
assert runs_in(loader) == "RayRuntime"

is_inside, may_leave, has_ended = threading.Event(), threading.Event(), threading.Event()

def hold():
    with current_session() as held:
        is_inside.set()
        may_leave.wait()
        assert held and held == ray_session()

def end():
    ray.shutdown()
    has_ended.set()

waiting, caught = open_loader(30.0, num_decoders=1), []
consumer = threading.Thread(target=lambda: caught.append(ends(iterate(waiting), [])))
consumer.start()  # the first batch takes its time in the transform: this thread waits, and so does the feeder's
while not (waiting.stats()["readers"] and waiting.stats()["decoders"]):
    time.sleep(0.1)
holder, ender = threading.Thread(target=hold), threading.Thread(target=end)
holder.start()
is_inside.wait()
ender.start()
assert not has_ended.wait(1.0), "Ray has ended while a call was being made"
assert ray.is_initialized()
may_leave.set()
ender.join()
consumer.join()
assert "has ended" in caught[0], caught
print("a consumer that waits hears of it", flush=True)

text = ends(batches, ids)
assert session in text and "connected to none now" in text, text
loader.explain()
ids += ids_of(iterate(loader))
assert runs_in(loader) == "ThreadRuntime"
assert sorted(ids) == list(range(4_000)), len(ids)
time.sleep(2)  # the threads of feeder and recorder have had their time
assert not ray.is_initialized(), "a thread has begun another Ray"
loader.close()
assert not ray.is_initialized()
print("the next pass works without Ray", flush=True)

init()  # another session, which has none of the helpers
text = ends(kept_batches, kept_ids)
assert session in text, text
kept_ids += ids_of(iterate(kept))
assert runs_in(kept) == "RayRuntime"
assert sorted(kept_ids) == list(range(4_000)), len(kept_ids)
print("the next pass works in another session", flush=True)

kept.prepare(global_batch_size=40)
ray.shutdown()
kept.close()  # between two passes
assert not ray.is_initialized()
assert sorted(ids_of(iterate(kept))) == list(range(4_000))
kept.close()
assert not ray.is_initialized()
print("all acts")
"""


@pytest.mark.slow
def test_a_session_that_ends_in_mid_pass_is_named_and_the_next_pass_works(write_dataset: Callable[..., str]) -> None:
    """Without a session, or in another one; and to a consumer that waits, as soon as no call is being made."""
    uri = write_dataset(pa.table({"id": np.arange(ROWS)}))
    command = [sys.executable, "-c", SCRIPT, uri]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all acts" in ran.stdout
