"""The processes that tests fork from one which has loaded torch and raylance: they start in a tenth of the time.

Lance refuses a fork of a process that has used it, and warns of any; the server has loaded it, and never uses it.
"""

import contextlib
import logging
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import psutil

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch", "raylance.torch_data"])


def run_script(text: str, folder: Path, limit_s: float = 280) -> str:
    """Runs a script in a folder as `python script.py` would, and returns what it prints; its error is an error here."""
    script, output = folder / "script.py", folder / "output.txt"
    script.write_text(text)
    process = FORKED.Process(target=_run, args=(script, output, dict(os.environ)))
    process.start()
    process.join(timeout=limit_s)
    process.kill()  # if it hangs
    printed = output.read_text()
    assert process.exitcode == 0, printed[-3000:]
    return printed


def read_to(process: Any, what: str) -> str:
    """The output of a process up to a line; the test's own time limit ends one that says nothing."""
    read = ""
    for line in process.stdout:
        read += line
        if what in line:
            return read
    raise AssertionError(f"it ended without {what!r}: {read[-3000:]}")


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Living processes that have this in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def log_to(path: Path, _worker: int) -> None:
    """For a worker of DataLoader, which logs to its stderr: logs to a file."""
    logging.basicConfig(filename=path)


def _run(script: Path, output: Path, environment: dict[str, str]) -> None:
    with open(output, "w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(script.parent)
    sys.argv, sys.path = [str(script)], [str(script.parent), *sys.path]
    runpy.run_path(str(script), run_name="__main__")
