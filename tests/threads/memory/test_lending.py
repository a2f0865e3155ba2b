"""Memory that is lent, kept by the C library, and copied beyond what Arrow does."""

import platform
import subprocess
import sys

from raylance.memory.lending import Lender


def test_glibc_takes_the_settings_for_freed_memory() -> None:
    """In a process of its own, which keeps them."""
    code = "from raylance.memory.malloc import keep_freed_memory; print(keep_freed_memory())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(platform.libc_ver()[0] == "glibc")


def test_a_short_loan_takes_the_smallest_memory_that_is_not_far_too_large() -> None:
    lender = Lender(100 << 20)
    loans = [lender.lend(mebibytes << 20) for mebibytes in (16, 8, 32)]
    del loans[:]
    assert sorted(len(spare) >> 20 for spare in lender._spare.values()) == [8, 16, 32]
    short = lender.lend(5 << 20)
    assert lender.lent_bytes == 8 << 20
    assert (len(short), len(lender.lend(1 << 20))) == (8 << 20, 1 << 20), "a small column leaves large memory alone"
    lender.most_bytes = 25 << 20
    del short
    assert sum(map(len, lender._spare.values())) <= 25 << 20, "what came back first is dropped"


AT_EXIT = """
import sys, threading, time, weakref
from raylance.memory.lending import Lender
from raylance.source.limits import Calls

class Held: ...

held = [Held() for _ in range(100_000)]
for each in held:
    weakref.finalize(each, print).atexit = False  # as other libraries have
lender, borrowed = Lender(0), []

def work():
    while True:
        borrowed.append((lender.lend(1 << 20), Calls(1, "calls")))

threading.Thread(target=work, daemon=True).start()
sys.setswitchinterval(1e-6)
time.sleep(0.02)
"""


def test_a_process_ends_without_errors_while_threads_still_borrow() -> None:
    """As a program does that ends without closing its loader."""
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in ended.stderr
