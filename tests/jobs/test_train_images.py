"""jobs/train_images.py on a real Ray head with its job server: training, tracking, stopping, continuing, refusing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
import yaml

import raylance
from jobs import common, trackers
from jobs import train_images as job
from jobs.create_dataset import command as create_dataset
from jobs.train_images import count_classes, open_data
from raylance.api.dataset import opened_of
from raylance.errors import ConfigError, DatasetError
from tests.helpers.cluster import free_ports
from tests.helpers.created import write_digits
from tests.helpers.images import encode
from tests.helpers.scripts import read_to
from tests.helpers.tracked import INSTALLED, curves_of_mlflow, curves_of_tensorboard, inputs_of_mlflow

JOBS = Path(__file__).parents[2] / "jobs"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
TOKEN = secrets.token_hex(16)
STOPPED_IN_INIT = """
import ray, runpy, signal, sys
def join(*args, init=ray.init, **options):
    init(*args, **options)
    signal.raise_signal(signal.SIGTERM)
ray.init, sys.argv = join, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # a script whose path follows


def stop(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Sends a signal, SIGINT to the whole group as terminals do, which ends a job; returns the rest of its output."""
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    return read_stopped(process, number)


def read_stopped(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """The rest of the output of a process that a signal stops."""
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, rest
    assert "Traceback" not in rest
    assert f"stopped by {number.name}" in rest, rest
    return rest


class Head(NamedTuple):
    jobs: str
    env: dict[str, str]

    def submit(self, script: str, *options: object) -> subprocess.CompletedProcess[str]:
        """Runs a script of jobs/ as a job; stdout holds the job's whole output."""
        return run([*RAY, "job", "submit", "--address", self.jobs, "--", sys.executable, JOBS / script, *options])

    def python(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Runs Python as a driver of this Ray."""
        return run([sys.executable, *command], self.env)

    @contextlib.contextmanager
    def start(self, *command: object) -> Iterator[subprocess.Popen[str]]:
        """Starts Python as a driver of this Ray, in a group of its own; kills what is left of it."""
        words = [sys.executable, *map(str, command)]
        process = subprocess.Popen(
            words, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def run(
    command: list[object], env: dict[str, str] | None = None, stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    words, pipes = list(map(str, command)), {"stdout": subprocess.PIPE, "stderr": stderr}
    return subprocess.run(words, env=env or clean_environment(), cwd=JOBS.parent, text=True, timeout=240, **pipes)


def clean_environment() -> dict[str, str]:
    """The environment without an address of another Ray, and without a way to W&B."""
    addresses = "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_ID"
    kept = {name: value for name, value in os.environ.items() if name not in addresses}
    return kept | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "WANDB_MODE": "offline"}


def is_up(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True  # it answers, be it only to ask who we are
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A head of two CPUs in a process group of its own, so that ending it ends no other Ray."""
    temporary = tempfile.mkdtemp(prefix="ray")  # not tmp_path: Ray's sockets need a short one
    dashboard, agent, client = free_ports(3)
    command = [*RAY, "start", "--head", "--block", "--port", 0, "--num-cpus", 2, "--temp-dir", temporary]
    command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", dashboard, "--disable-usage-stats"]
    command += ["--dashboard-agent-listen-port", agent, "--ray-client-server-port", client]
    with open(f"{temporary}/start.log", "w") as log:
        process = subprocess.Popen(
            list(map(str, command)), env=clean_environment(), stdout=log, stderr=log, start_new_session=True
        )
    try:
        url, found = f"http://127.0.0.1:{dashboard}", Path(temporary, "ray_current_cluster")
        deadline = time.monotonic() + 90
        while not (found.exists() and is_up(f"{url}/api/version")):
            assert process.poll() is None, Path(temporary, "start.log").read_text()
            assert time.monotonic() < deadline, Path(temporary, "start.log").read_text()
            time.sleep(0.2)
        yield Head(url, clean_environment() | {"RAY_ADDRESS": found.read_text().strip()})
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a SIGTERM would be a request to drain the node first
        process.wait()
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits") / "digits.lance")


class Run(NamedTuple):
    options: list[object]
    place: Path

    def checkpoints(self) -> list[Path]:
        return sorted(path for path in self.place.glob("checkpoint_*") if path.is_dir())


def read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "raylance_state.json").read_text())


@pytest.fixture(scope="module")
def make_run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    storage = tmp_path_factory.mktemp("runs") / ".data"  # hidden, as quickstart.sh has it

    def make(name: str) -> Run:
        options = ["--data", digits, "--storage-path", storage, "--run-name", name, "--epochs", 2]
        options += ["--order", "shard", "--checkpoint-every-steps", 15, "--target-accuracy", 0.9, "--max-failures", 0]
        return Run(options, storage / name)

    return make


@pytest.fixture(scope="module")
def trained(ray_session: None, make_run: Callable[[str], Run]) -> tuple[Run, str]:
    """A run on the Ray of the session that is finished, and all that the job printed."""
    made, printed = make_run("whole"), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert job.main(list(map(str, [*made.options, "--num-decoders", 0]))) == 0, printed.getvalue()
    return made, printed.getvalue()


def test_a_job_trains_and_leaves_checkpoints(trained):
    made, text = trained
    accuracy = float(re.search(r"^validation accuracy ([\d.]+)% after 2 epochs, [\d,]+ images/s$", text, re.M)[1])
    assert accuracy >= 90
    assert re.search(r"^[a-z ]+ is the limit( at times)?: ", text, re.M)  # which one: the machine's load decides
    middle, end = made.checkpoints()  # two are kept: step 15 of 25 of the last epoch, and its end
    assert f"checkpoint {end}\n" in text
    state = read_state(middle)
    assert (state["epoch"], state["position"], state["dp_size"]) == (1, 15 * 64, 2)
    assert (read_state(end)["epoch"], read_state(end)["position"]) == (2, 0)
    weights = torch.load(end / "state.pt", weights_only=True)["model"]
    assert not any(name.startswith("module.") for name in weights)


def test_what_ray_prints_is_in_a_file_and_the_report_beside_it(trained):
    made, text = trained
    assert not [line for line in text.splitlines() if re.search(r"pid=|INFO|WARNING|Traceback", line)]
    assert f"what Ray and its workers print: {made.place / 'output.log'}\n" in text
    assert "python " in (made.place / "output.log").read_text().splitlines()[0]
    assert f"report: {made.place / 'report.html'}\n" in text
    assert "<html" in (made.place / "report.html").read_text()


def test_a_run_is_tracked_by_tensorboard(trained):
    made, _ = trained
    pytest.importorskip("tensorboard", reason="it is what the run is tracked by")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = curves_of_tensorboard(made.place / "tensorboard")
    assert found["loss"] == found["learning_rate"] == found["waiting"] == [20, 40]  # every 20 steps
    assert found["train_loss"] == [15, 25, 40, 50]  # checkpoints in mid-epoch, and the ends of epochs
    assert found["val_accuracy"] == [25, 50]
    assert found["images_per_s"] == [15, 20, 25, 40, 40, 50]
    events = EventAccumulator(str(made.place / "tensorboard")).Reload()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert '"learning_rate": 0.002' in texts["arguments/text_summary"]
    assert "digits.lance" in texts["data/text_summary"]


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that asks for Ray fails."""
    monkeypatch.setattr(common, "connect", lambda: pytest.fail("it asks for Ray"))


@pytest.mark.usefixtures("no_ray")
def test_the_same_command_says_that_the_run_is_finished_before_it_asks_for_ray(trained, capsys):
    made, text = trained
    before = made.checkpoints()
    assert job.main(list(map(str, made.options))) == 0
    printed = capsys.readouterr().out
    assert "run whole was finished already; nothing was done" in printed
    result = re.compile(r"^validation accuracy .*$", re.M)
    assert result.findall(printed) == result.findall(text)
    assert made.checkpoints() == before


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "1"], "saved 0, now 1"),
        (["--model", "resnet18"], "of model and classes ['small_cnn', 10], not of ['resnet18', 10]"),
        (["--epochs", "1"], None),
    ],
)
def test_a_run_that_cannot_continue_is_refused_before_ray_is_asked_for(trained, capsys, monkeypatch, options, message):
    made, _ = trained
    monkeypatch.setattr(job, "check_model", lambda *_: None)  # torchvision need not be installed
    assert job.main([*map(str, made.options), *options]) == (2 if message else 0)
    assert (message or "") in capsys.readouterr().err


def test_a_run_with_a_damaged_list_of_checkpoints_continues_under_another_name(trained, tmp_path):
    """From the middle of an epoch: the newest checkpoint was cut off, as its list was."""
    made, _ = trained
    copy = tmp_path / made.place.name
    shutil.copytree(made.place, copy)
    (copy / "checkpoint_manager_snapshot.json").write_bytes(b"")
    newest = max(copy.glob("checkpoint_2*"))
    (newest / "state.pt").write_bytes((newest / "state.pt").read_bytes()[:1000])
    options = ["--storage-path", tmp_path, "--run-name", "again", "--continue-from", copy, "--num-decoders", 0]
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    ran = run([sys.executable, JOBS / "train_images.py", *made.options, *options], env, stderr=subprocess.STDOUT)
    assert ran.returncode == 0, ran.stdout
    assert "epoch 1 of 2: train loss 0." in ran.stdout
    assert "epoch 0 of 2: " not in ran.stdout
    assert f"the epoch is not proven before position {15 * 64}" in str(raylance.prove_run(tmp_path / "again"))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("file", "held", "message"),
    [
        ("checkpoint_manager_snapshot.json", b"{", "is damaged, or cannot be read"),
        ("checkpoint_manager_snapshot.json", b"[]", "is damaged, or cannot be read"),
        ("checkpoint_*/state.pt", b"", "state.pt of the checkpoint is damaged"),
        ("checkpoint_*/raylance_state.json", b"{", "raylance_state.json is truncated or damaged"),
        ("", b"no folder", "cannot be written to"),
    ],
    ids=["list", "another list", "state", "position", "a file"],
)
def test_a_run_that_is_damaged_is_refused(trained, tmp_path, capsys, file, held, message):
    made, _ = trained
    copy = tmp_path / made.place.name
    if file:
        shutil.copytree(made.place, copy)
        for path in copy.glob(file):
            path.write_bytes(held)
    else:
        copy.write_bytes(held)
    assert job.main([*map(str, made.options), "--storage-path", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_failed_continues_in_mid_epoch_to_the_same_weights(head, make_run, trained):
    made = make_run("broken")
    made.options.extend(["--track", ",".join(INSTALLED) or "none"])
    script = f"""
import sys
from jobs import train_images as job
learning_rate, train_fn = job.learning_rate, job.train_fn
def fail_late(peak, progress):
    if progress > 0.85:
        raise RuntimeError("the cat pulled the plug")
    return learning_rate(peak, progress)
def train_until_then(config):
    job.learning_rate = fail_late
    return train_fn(config)
job.train_fn = train_until_then
sys.exit(job.main({[str(option) for option in made.options]}))
"""
    failed = head.python("-c", script)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "train_images.py: training failed: RuntimeError: the cat pulled the plug" in failed.stderr
    assert f"(the traceback is in {made.place / 'output.log'})" in failed.stderr
    assert "in fail_late" in (made.place / "output.log").read_text()
    assert read_state(made.checkpoints()[-1])["position"] == 15 * 64
    ran = head.submit("train_images.py", *made.options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "epoch 0 of 2:" not in ran.stdout
    assert "epoch 1 of 2:" in ran.stdout
    assert f"continues from checkpoint {made.checkpoints()[0]}" in ran.stdout
    losses, reports = [20, 40], [15, 25, 40, 50]
    if "tensorboard" in INSTALLED:
        found = curves_of_tensorboard(made.place / "tensorboard")
        assert (found["loss"], found["train_loss"]) == (losses, reports)
    if "wandb" in INSTALLED:  # which drops the points of steps that a run has
        assert len({file.name for file in made.place.glob("wandb/offline-run-*/*.wandb")}) == 1, (
            "each attempt has an id"
        )
    if "mlflow" in INSTALLED:
        found, status = curves_of_mlflow(f"sqlite:///{made.place.parent}/mlflow.db")
        assert (found["loss"], found["train_loss"], status) == (losses, reports, "FINISHED")
        inputs = inputs_of_mlflow(f"sqlite:///{made.place.parent}/mlflow.db")
        assert {name: source["filter"] for name, source in inputs.items()} == {
            "train": "split = 'train'",
            "val": "split = 'val'",
        }
    wanted, found = (torch.load(run.checkpoints()[-1] / "state.pt", weights_only=True) for run in (trained[0], made))
    for name, weights in wanted["model"].items():
        torch.testing.assert_close(found["model"][name], weights, rtol=1e-4, atol=1e-5)


def test_a_job_of_several_files_is_submitted_with_its_working_directory(head, digits, tmp_path):
    """Its tasks find what they need where nothing but that directory is on their path."""
    for name in ("jobs", "raylance"):
        shutil.copytree(JOBS.parent / name, tmp_path / "here" / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [*RAY, "job", "submit", "--address", head.jobs, "--working-dir", tmp_path / "here", "--", sys.executable]
    made = run([*command, "jobs/materialize.py", "--data", digits, "--out", tmp_path / "copy.lance"])
    assert made.returncode == 0, made.stdout + made.stderr
    assert "1,797, each once" in made.stdout


def test_the_submitter_of_kubernetes_fails_if_the_job_does(head):
    """The command of its pod, as the manifest has it; a second pod follows the same job."""
    manifest = Path(__file__).parents[2] / "k8s" / "ray-job.train-images.yaml"
    [doc] = [doc for doc in yaml.safe_load_all(manifest.read_text()) if doc["kind"] == "RayJob"]
    [container] = doc["spec"]["submitterPodTemplate"]["spec"]["containers"]
    assert container["args"] == [doc["spec"]["entrypoint"]]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name, entrypoint, fails in (
        ("good", "python -c 'print(\"it runs\")'", False),
        ("bad", "python -c '1/0'", True),
    ):
        variables = {"RAY_DASHBOARD_ADDRESS": head.jobs.removeprefix("http://"), "RAY_JOB_SUBMISSION_ID": name}
        for _ in range(2):
            pod = subprocess.run(
                [*container["command"], entrypoint],
                env=clean_environment() | variables | {"PATH": path},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert (pod.returncode != 0) == fails, pod.stdout + pod.stderr
            assert ("ZeroDivisionError" if fails else "it runs") in pod.stdout


def test_a_run_that_is_stopped_says_how_to_continue(head, make_run):
    made = make_run("stopped")
    command = [JOBS / "train_images.py", *made.options, "--epochs", 50]
    with head.start(*command) as started:
        read_to(started, "epoch 1 of 50: ")
        rest = stop(started, signal.SIGINT)
    assert f"\n{shlex.join(['python', *map(str, command)])}\n" in rest
    with head.start(*command) as started:
        last = Path(read_to(started, "continues from checkpoint").split()[-1])
        assert read_state(last)["epoch"] >= 1
        stop(started, signal.SIGTERM)


def test_sigterm_is_named_while_rays_handler_stands(head, make_run):
    with head.start("-c", STOPPED_IN_INIT, JOBS / "train_images.py", *make_run("joining").options) as started:
        read_stopped(started, signal.SIGTERM)


def test_a_cluster_that_may_grow_is_waited_for_until_the_run_is_stopped(head, make_run):
    made = make_run("large")
    with head.start(JOBS / "train_images.py", *made.options, "--num-workers", 16) as started:
        said = read_to(started, "train_images.py: ")
        assert "needs 16 CPUs, and Ray has 2. It waits for nodes" in said
        stop(started, signal.SIGINT)


@pytest.mark.parametrize(
    ("options", "numbers", "fix"),
    [
        (["--num-workers", 1000], r"needs 1000 CPUs, .* has \d+ ", "fewer --num-workers or --num-decoders, or set"),
        (["--use-gpu"], r"needs 2 GPUs, .* has 0 ", "or set RAY_ADDRESS"),
    ],
)
def test_a_ray_of_its_own_that_is_too_small_is_refused_at_once(digits, tmp_path, options, numbers, fix):
    command = ["--data", digits, "--storage-path", tmp_path, "--global-batch-size", 1000, *options]
    alone = clean_environment() | {"RAY_ADDRESS": "local", "CUDA_VISIBLE_DEVICES": ""}
    ran = run([sys.executable, JOBS / "train_images.py", *command], alone)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    text = next(line for line in ran.stderr.splitlines() if line.startswith("train_images.py: "))
    assert re.search(numbers, text)
    assert fix in text
    assert "Traceback" not in ran.stderr


@pytest.fixture(scope="module")
def small(write_dataset: Callable[..., str]) -> str:
    """Thirty images of two sizes, the first ten of one; labels up to 4, which no metadata names."""
    sizes = [(8, 8) if row < 10 else (12, 8) for row in range(30)]
    table = {
        "image": pa.array([encode(np.full((*size, 3), row, np.uint8)) for row, size in enumerate(sizes)], pa.binary()),
        "label": pa.array([row % 5 for row in range(30)], pa.int64()),
        "split": pa.array(["val" if row % 3 == 0 else "train" for row in range(30)]),
        "size": pa.array([height for height, _ in sizes], pa.int64()),
        "score": pa.array([0.5] * 30),
    }
    return write_dataset(pa.table(table))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere.lance"], "no Lance dataset can be opened at"),
        (["--train-filter", "split ="], "val-filter 'split ='"),
        (["--val-filter", "label > 7", "--image-size", "8"], "label > 7"),
        (["--version", "7"], "has no version 7"),
        (["--image-column", "photo"], "no column 'photo'"),
        (["--label-column", "split", "--image-size", "8"], "--label-column split of "),
        (["--label-column", "score", "--image-size", "8"], "--label-column score of "),
        (["--image-column", "size"], "not binary"),
        (["--model", "no_such_model", "--image-size", "8"], "--model no_such_model"),
        (["--image-size", "1"], "images of 1x1"),
        (["--augment", "crop"], "needs --image-size PIXELS"),
        ([], "to resize them"),
        (["--image-column", "label", "--image-size", "8"], "not binary"),
        (["--image-size", "8", "--global-batch-size", "64"], "20 rows and the global batch 64"),
        (["--image-size", "8", "--global-batch-size", "1"], "global batch of 1 rows on 2"),
        (["--image-size", "8", "--global-batch-size", "8", "--storage-path", "/dev/null/runs"], "/dev/null/runs"),
    ],
)
def test_input_that_cannot_be_used_is_refused_before_anything_starts(small, capsys, options, message):
    data = [] if "--data" in options else ["--data", small]
    assert job.main([*data, *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("train_images.py: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_string_labels_become_classes_by_the_command_that_the_refusal_names(small, write_dataset, capsys):
    uri = write_dataset(lance.dataset(small).to_table())
    assert job.main(["--data", uri, "--image-size", "8", "--label-column", "split"]) == 2
    text = capsys.readouterr().err
    command = shlex.split(re.search(r"`python (jobs/create_dataset.py classes .+)`", text)[1])
    assert create_dataset.main(command[1:]) == 0
    named = re.search(r"and train with (--label-column \w+)", text)[1].split()
    assert f"jobs/train_images.py --data {uri} {' '.join(named)}" in capsys.readouterr().out
    args = job.parse_args(["--data", uri, "--image-size", "8", *named])
    train, _ = open_data(args)
    assert count_classes(args, train) == 2
    assert set(train.head(20)[args.label_column]) == {0}  # train comes before val


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("num_decoders=4 takes 8 CPUs", "--num-decoders 4 takes 8 CPUs"),
        ("`num_decoders=(2, 16)`, with CPUs", "`--num-decoders 2-16`, with CPUs"),
        ("without size= all must be alike", "without --image-size all must be alike"),
        ('on_bad_row="mask" leaves it out', "--on-bad-row mask leaves it out"),
        ("Pass Image('image', size=(41, 50)), height first, to", "Pass --image-size PIXELS, the side of a square, to"),
        ("filter='x=1' cannot", "--train-filter or --val-filter x=1 cannot"),
        ("raylance.report(…, checkpoint_upload_mode=A.ASYNC)", "raylance.report(…, checkpoint_upload_mode=A.ASYNC)"),
    ],
)
def test_messages_of_the_library_have_the_options_of_the_job(message, shown):
    assert job.as_options(message) == shown


def test_printed_commands_are_what_a_shell_takes():
    words = ["python", "split = 'train'", "a's $HOME", "plain", "two words", "'!'"]
    assert shlex.split(common.show_command(words)) == words
    assert common.show_command(words[:2]) == "python \"split = 'train'\"", "easier to read"


def test_printed_commands_hide_secrets_and_such_a_command_is_refused():
    words = ["x.py", "--storage-options", "aws_secret_access_key=abc", "--storage-options=session_token=d e"]
    shown = common.show_command([*words, "--name", "abc=1", "--storage-options", "region=x"])
    assert shown == (
        "x.py --storage-options 'aws_secret_access_key=…' '--storage-options=session_token=…' --name abc=1 "
        "--storage-options region=x"
    )
    with pytest.raises(common.RefusedError, match="stands for a secret that was not printed"):
        common.store_options([common.key_value(shlex.split(shown)[2])])


def test_an_endpoint_that_nothing_would_reach_is_refused(monkeypatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    endpoint = ("aws_endpoint", "http://127.0.0.1:1")
    with pytest.raises(common.RefusedError, match="allow_http=true"):
        common.store_options([endpoint])
    allowed = [endpoint, ("allow_http", "true")]
    assert common.store_options(allowed) == dict(allowed)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--epochs", ["0", "many"]),
        ("--num-decoders", ["some", "-1"]),
        ("--num-readers", ["0", "-1"]),
        ("--target-accuracy", ["97"]),
        ("--augment", ["rotate"]),
        ("--max-failures", ["-2"]),
        ("--track", ["tensorboard,paper", "none,tensorboard"]),
    ],
)
def test_values_out_of_range_are_refused(capsys, option, values):
    for value in values:
        with pytest.raises(SystemExit, match="2"):
            job.main(["--data", "x.lance", option, value])
        assert f"argument {option}" in capsys.readouterr().err


def test_rows_to_validate_on_may_lie_elsewhere(small, write_dataset):
    """As they must, if the dataset is a copy of the rows to train on."""
    given = ["--data", small, "--image-size", "8", "--val-filter", "split = 'none'"]
    other = write_dataset(pa.table({"image": [encode(np.zeros((9, 9), np.uint8))] * 7, "label": [1] * 7}))
    train, val = open_data(job.parse_args([*given[:-1], "", "--val-data", other]))
    assert (len(train), len(val), opened_of(val).read.source.uri) == (20, 7, other)
    for uri, names in ((small, ["a", "b", "c", "d", "e"]), (other, ["e", "d", "c", "b", "a"])):
        lance.dataset(uri).update_schema_metadata({"classes": json.dumps(names)})
    with pytest.raises(DatasetError, match="names other classes than --data"):
        open_data(job.parse_args([*given[:-1], "", "--val-data", other]))


def test_classes_are_counted_from_the_command_line_the_schema_or_the_labels(small, write_dataset):
    def count(uri: str, *options: str) -> int:
        args = job.parse_args(["--data", uri, "--image-size", "8", *options])
        return count_classes(args, open_data(args)[0])

    named = lance.dataset(small).to_table().replace_schema_metadata({"classes": json.dumps(list("abcdefg"))})
    assert count(small) == 5
    assert count(write_dataset(named)) == 7


def test_trackers_are_chosen_by_what_is_installed_and_where_runs_are_kept(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    assert trackers.choose(None, is_local=True) == ["tensorboard"]
    assert trackers.choose([], is_local=True) == []
    assert trackers.choose(["mlflow"], is_local=True) == ["mlflow"]
    for asked in ("wandb", "mlflow"):  # not installed; nowhere to write
        with pytest.raises(ConfigError, match=f"--track {asked}"):
            trackers.choose([asked], is_local=False)
