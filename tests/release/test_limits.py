"""A process that ends while Lance is called."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pyarrow as pa

ENDING = """
import sys, threading, time
import lance, numpy as np
from raylance.source.limits import Calls

dataset, calls = lance.dataset(sys.argv[1]), Calls(8, "test")
kept = [{number: [number]} for number in range(300_000)]  # the interpreter takes a while to end
for _ in range(8):
    calls.submit(time.sleep, 0.3)
for _ in range(4000):
    calls.submit(lambda: dataset.take(np.random.randint(0, 1000, 500)))
print("done", flush=True)
"""


def test_a_process_that_ends_begins_no_more_calls(write_dataset: Callable[..., str]) -> None:
    """A thread that returned from Lance would abort it: status -6, although all work was done."""
    uri = write_dataset(pa.table({"id": np.arange(1000)}))
    ended = subprocess.run([sys.executable, "-c", ENDING, uri], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr[-2000:]
