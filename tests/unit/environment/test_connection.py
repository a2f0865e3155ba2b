"""Owns the checks that no loader calls Ray outside of the session that its helpers are in, and that its end is said."""

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

ROWS = 4_000

BEGIN = """
import faulthandler, logging, sys, threading, time
import numpy as np, ray, raylance
from raylance.environment.connection import current_session, ray_session

faulthandler.dump_traceback_later(200, exit=True)
PAUSE_S = float(sys.argv[2])

def init():
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)

def slowly(batch):
    time.sleep(PAUSE_S)
    return {"id": batch["id"]}

def open_loader(**options):
    return raylance.dataset(sys.argv[1], order="window", transform=slowly, remainder="ragged").loader(**options)

def iterate(loader):
    return iter(loader.iter_batches(global_batch_size=40))

def ids_of(batches):
    return [number for batch in batches for number in batch["id"].tolist()]

def ends(batches, ids):
    '''What ends a pass, after the batches that were made already.'''
    try:
        for batch in batches:
            ids += batch["id"].tolist()
    except raylance.HelperError as error:
        return str(error)
    raise AssertionError("no error")
"""

SHUT_DOWN = (
    BEGIN
    + """
init()
loader = open_loader()  # num_decoders="auto": what the cluster has is asked for
batches, ids = iterate(loader), []
for _ in range(3):
    ids += next(batches)["id"].tolist()
assert type(loader._session.runtime).__name__ == "RayRuntime"
session = ray_session()
ray.shutdown()
said = ends(batches, ids)
assert session in said and "connected to none now" in said, said
loader.explain()
time.sleep(3)  # the threads of feeder and recorder have had their time
assert not ray.is_initialized(), "a thread has begun another Ray"
ids += ids_of(iterate(loader))
assert type(loader._session.runtime).__name__ == "ThreadRuntime"
assert sorted(ids) == list(range(4_000)), len(ids)
loader.close()
assert not ray.is_initialized()

init()
first = ray_session()
loader = open_loader(num_decoders=1)
batches, ids = iterate(loader), []
for _ in range(3):
    ids += next(batches)["id"].tolist()
ray.shutdown()
init()  # another session, which has none of the helpers
said = ends(batches, ids)
assert first in said, said
ids += ids_of(iterate(loader))
assert type(loader._session.runtime).__name__ == "RayRuntime"
assert sorted(ids) == list(range(4_000)), len(ids)

loader.prepare(global_batch_size=40)
ray.shutdown()
loader.close()  # between two passes
assert not ray.is_initialized()
assert sorted(ids_of(iterate(loader))) == list(range(4_000))
loader.close()
assert not ray.is_initialized()
print("all acts")
"""
)

WAITS = (
    BEGIN
    + """
init()
is_inside, may_leave, has_ended = threading.Event(), threading.Event(), threading.Event()

def hold():
    with current_session() as session:
        is_inside.set()
        may_leave.wait()
        assert session and session == ray_session()

def end():
    ray.shutdown()
    has_ended.set()

loader, caught = open_loader(num_decoders=1), []
batches = iterate(loader)

def consume():
    caught.append(ends(batches, []))

consumer = threading.Thread(target=consume)
consumer.start()  # the first batch takes its time in the transform: this thread waits, and so does the feeder's
while not loader.stats()["decoders"]:
    time.sleep(0.1)
holder, ender = threading.Thread(target=hold), threading.Thread(target=end)
holder.start()
is_inside.wait()
ender.start()
assert not has_ended.wait(2.0), "Ray has ended while a call was being made"
assert ray.is_initialized()
may_leave.set()
ender.join()
consumer.join()
assert "has ended" in caught[0], caught
assert not ray.is_initialized()
print("all acts")
"""
)


def in_a_process_of_its_own(script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", script, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all acts" in ran.stdout


@pytest.fixture(scope="module")
def numbers(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(ROWS)}))


def test_a_session_that_ends_in_mid_pass_is_said_and_the_next_pass_works(numbers: str) -> None:
    in_a_process_of_its_own(SHUT_DOWN, numbers, "0.01")


def test_a_consumer_that_waits_hears_that_the_session_ends(numbers: str) -> None:
    in_a_process_of_its_own(WAITS, numbers, "5")
