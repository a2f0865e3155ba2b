"""Checks that the commands of docs/operations.md work as they stand, with a real Ray head."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.helpers.cluster import free_ports
from tests.helpers.created import write_digits
from tests.helpers.scripts import processes_with

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operations.md"
SECTION = "On one machine, and under a job server"
CONNECT = "from jobs import common; assert common.connect()"  # it starts a Ray


class Machine(NamedTuple):
    """A home folder, and a shell that has nothing of the tests' environment."""

    home: Path

    @property
    def env(self) -> dict[str, str]:
        programs = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        return {"HOME": str(self.home), "PATH": programs, "LANG": "C.UTF-8", "RAY_TMPDIR": str(self.home)}

    @property
    def token(self) -> Path:
        return self.home / ".ray" / "auth_token"

    def run(self, *words: str, **settings: str) -> tuple[int, str]:
        """Runs a program in the checkout; returns its exit status and all its output."""
        with tempfile.TemporaryFile("w+") as log:  # not a pipe: a Ray that stays would keep it open
            ran = subprocess.run(
                words, env=self.env | settings, cwd=ROOT, stdout=log, stderr=log, timeout=240, check=False
            )
            log.seek(0)
            return ran.returncode, log.read()

    def kill(self) -> None:
        """Kills what runs with this home, and no other Ray of this machine."""
        deadline = time.monotonic() + 30
        while left := processes_with("HOME", str(self.home)):
            assert time.monotonic() < deadline, left
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits") / "digits.lance", rows=320)


@contextlib.contextmanager
def new_machine() -> Iterator[Machine]:
    machine = Machine(Path(tempfile.mkdtemp(prefix="ray")))  # not tmp_path: Ray's sockets need a short one
    try:
        yield machine
    finally:
        machine.kill()
        shutil.rmtree(machine.home, ignore_errors=True)


def submit(machine: Machine, job: str) -> tuple[str, str, str]:
    """Runs the commands of the page, but for other ports and paths, a short job, and `ray stop`; returns what they
    print, and the addresses of the head that they leave.
    """
    gcs, dashboard, agent, client = free_ports(4)
    url = f"http://127.0.0.1:{dashboard}"
    ports = f"--disable-usage-stats --port={gcs} --dashboard-port={dashboard} --dashboard-agent-listen-port={agent}"
    changes = {
        "ray start --head": f"ray start --head {ports} --ray-client-server-port={client} --num-cpus=2",
        "http://127.0.0.1:8265": url,
        "jobs/train_images.py --data /data/photos.lance": job,
        "ray stop": ":",  # it would end every Ray of this machine
    }
    shown = re.search(rf"^## {SECTION}\n.*?^```\w*\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)[1]
    script = "set -euo pipefail\n" + re.sub(r" +#.*", "", shown).replace(".venv", sys.prefix)
    for words, others in changes.items():
        assert script.count(words) == 1, f"{words!r} is not once in the commands of {PAGE.name}:\n{script}"
        script = script.replace(words, others)
    status, output = machine.run("bash", "-c", script)
    assert status == 0, output
    return output, f"127.0.0.1:{gcs}", url


def run_quickstart(machine: Machine) -> None:
    """Starts a Ray as the quickstart's jobs do, which leaves a token."""
    status, output = machine.run(sys.executable, "-c", CONNECT, RAY_ADDRESS="local")
    assert status == 0, output
    assert machine.token.exists(), "Ray leaves no token any more: the page need not speak of it"


@pytest.mark.parametrize("ran_quickstart", [True, False])
def test_the_commands_of_the_page_train(digits: Path, ran_quickstart: bool) -> None:
    with new_machine() as machine:
        if ran_quickstart:
            run_quickstart(machine)
        assert machine.token.exists() == ran_quickstart
        short = f"--storage-path {machine.home}/runs --num-workers 1 --num-decoders 0 --epochs 1 --track none"
        output, _, url = submit(machine, f"jobs/train_images.py --data {digits} {short}")
        assert re.search(r"^validation accuracy [\d.]+% after 1 epoch", output, re.M), output
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/api/jobs/", timeout=10)


def test_every_submission_that_is_shown_sends_the_token() -> None:
    """Ray's commands send it only if RAY_AUTH_MODE says so."""
    texts = "README.md", "docs/*.md", "k8s/*.yaml", "jobs/*.sh", "jobs/**/*.ipynb"
    paths = [path for pattern in (*texts, "jobs/**/*.py", "raylance/**/*.py") for path in ROOT.glob(pattern)]
    blocks = [(path, block) for path in paths for block in re.split(r"\n#?\n", path.read_text(encoding="utf-8"))]
    shown = [(path.name, block) for path, block in blocks if re.search(r"ray job submit .*-- ", block)]
    assert len(shown) >= 5
    assert not [(name, block) for name, block in shown if "RAY_AUTH_MODE=token" not in block]


def test_a_job_says_that_the_ray_of_its_address_asks_for_a_token() -> None:
    with new_machine() as machine:
        run_quickstart(machine)
        _, gcs, _ = submit(machine, f"jobs/create_dataset.py demo --out {machine.home}/digits.lance")
        job = sys.executable, "jobs/create_dataset.py", "demo", "--out", f"{machine.home}/other.lance"
        for more in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"}):
            status, output = machine.run(*job, RAY_ADDRESS=gcs, RAY_NUM_REDIS_GET_RETRIES="1", **more)
            assert status == 2, output
            assert re.search(r"asks for a token.*Nothing can run\..*RAY_AUTH_MODE=token", output), output
            assert "Traceback" not in output
