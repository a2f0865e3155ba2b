"""A process that ends in mid-pass."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

ROWS = 400


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    cells = [row.to_bytes(4, "little") for row in range(ROWS)]
    return write_dataset(pa.table({"id": np.arange(ROWS), "cell": pa.array(cells, pa.binary())}))


ENDS_IN_MID_PASS = """
import os, raylance, sys
batches = iter(raylance.dataset(URI, columns=["id"], order="sequential").loader().iter_batches(batch_size=20))
next(batches)
os.kept = batches, sys.modules["raylance.api.loader"]  # modules are cleared in the reverse order of their imports
assert "ray" not in sys.modules
print("done")
"""

DECODER = """
import raylance, threading
class Hangs(raylance.Decoder):
    shape, dtype, at = (), "int64", -1
    def open(self):
        return self
    def decode_into(self, encoded, draws, out):
        if int.from_bytes(encoded, "little") == self.at:
            began.set()
            threading.Event().wait()
began = threading.Event()
order = raylance.WindowShuffle(shard_rows=100, window_shards=1, lanes=2)
loader = raylance.dataset(URI, decode=Hangs("cell"), order=order).loader(num_decoders=0)
"""

OUTLIVES_THE_MAIN_THREAD = f"""{DECODER}
def train():
    threading.main_thread().join()
    print(sum(len(batch["id"]) for _ in range(2) for batch in loader.iter_batches(batch_size=20)))
threading.Thread(target=train).start()
"""

DECODES_WITHOUT_END = f"""{DECODER}
Hangs.at = 60
def train():
    try:
        list(loader.iter_batches(batch_size=20))
    except raylance.RaylanceError:
        print("ended")
threading.Thread(target=train, daemon=True).start()
began.wait(60)
print("done")
"""

SAID = {ENDS_IN_MID_PASS: "done\n", OUTLIVES_THE_MAIN_THREAD: f"{2 * ROWS}\n", DECODES_WITHOUT_END: "done\nended\n"}


@pytest.fixture(scope="module", autouse=True)
def interpreters(uri: str) -> Iterator[list[subprocess.Popen[str]]]:
    """They take seconds each, beside the other tests of this file."""
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    made = [subprocess.Popen([sys.executable, "-c", each.replace("URI", repr(uri))], **pipes) for each in SAID]
    yield made
    for process in made:
        process.wait(timeout=60)


def test_an_interpreter_that_ends_in_mid_pass_ends_and_a_thread_that_outlives_the_main_one_gets_its_rows(
    interpreters: list[subprocess.Popen[str]],
) -> None:
    """Modules are gone, Ray was never loaded; `concurrent.futures` starts nothing more, and would wait for decoders."""
    for process, said in zip(interpreters, SAID.values(), strict=True):
        assert (*process.communicate(timeout=60), process.returncode) == (said, "", 0)
