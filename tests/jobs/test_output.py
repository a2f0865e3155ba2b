"""Checks that what jobs show while Ray works for them has all that a user needs; starts no Ray."""

import contextlib
import io
import logging
import signal
import subprocess
import sys
import threading

import pytest

from jobs import output

WORKER = "(RayTrainWorker pid=25027, ip=10.0.0.7) "


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{WORKER}raylance: the record of train cannot be written", "the record of train cannot be written"),
        ("raylance: the source has moved on", "the source has moved on"),
        (
            "(ShardActor pid=7) the storage failed (reset). The next attempt begins",
            "the storage failed (reset). The next attempt begins",
        ),
        ("(DecodeActor(x) pid=7) rows could not be read", "rows could not be read"),
        ("(autoscaler +12s) Error: No available node types can fulfill", "Error: No available node types can fulfill"),
        ("(ShardActor pid=7) rows fail\x1b[32m [repeated 3x across cluster] (Ray deduplicates)\x1b[0m", "rows fail"),
        ("(autoscaler +12s) Adding 2 node(s) of type cpu.", None),
        (f"{WORKER}Reporting training result 1: TrainingReport(…)", None),
        (f"{WORKER}Traceback (most recent call last):", None),
        ("(ShardActor pid=7) Traceback (most recent call last):", None),
        ("2026-11-22 13:49:47 INFO worker.py:2029 -- Started a local Ray instance.", None),
    ],
)
def test_what_concerns_a_user_is_separated_from_the_rest(line, message):
    assert output.message_in(line) == message


def test_what_is_printed_goes_to_the_file_and_what_is_marked_to_the_user_once(tmp_path, capsys):
    path = tmp_path / "output.log"
    ray = logging.getLogger("ray.of.this.test")
    before = io.StringIO()
    handler = logging.StreamHandler(before)
    ray.addHandler(handler)
    with output.separate_output(str(path), "python job.py", "job.py: ") as user:
        print("chatter")
        print("chatter, too", file=sys.stderr)
        ray.warning("of a handler that holds a stream")
        for _ in range(3):
            print(f"{WORKER}raylance: rank 1 failed")
        print("job.py: a half cannot be removed", file=sys.stderr)
        logging.getLogger("raylance.of.this.test").warning("two\nlines")
        thread = threading.Thread(target=lambda: print("of a thread", end=""))
        thread.start()
        thread.join()
        print("whole")
        user.show("the result")
    ray.warning("after")
    printed, log = capsys.readouterr(), path.read_text()
    assert printed.out == "the result\n"
    assert printed.err == "job.py: rank 1 failed\njob.py: a half cannot be removed\njob.py: two lines\n"
    assert before.getvalue() == "after\n"
    assert "chatter\nchatter, too\nof a handler that holds a stream\n" in log
    assert log.count("raylance: rank 1 failed") == 3
    assert log.endswith("whole\nof a thread\n")
    assert "python job.py" in log.splitlines()[0]
    ray.removeHandler(handler)


def test_the_traceback_of_what_fails_is_in_the_file_which_is_kept(tmp_path, capsys):
    path = tmp_path / "output.log"
    path.write_text("of the attempt before\n")
    with pytest.raises(ValueError, match="no"), output.separate_output(str(path), "x", "x: "):
        raise ValueError("no")
    log = path.read_text()
    assert log.startswith("of the attempt before\n")
    assert "Traceback" in log
    assert "ValueError: no" in log
    assert capsys.readouterr().err == ""


def test_a_handler_that_was_made_meanwhile_writes_to_the_user_again(tmp_path, capsys):
    ray = logging.getLogger("ray.of.another.test")
    with output.separate_output(str(tmp_path / "output.log"), "x", "x: "):
        handler = logging.StreamHandler()
        ray.addHandler(handler)
        held = sys.stdout
    ray.warning("after")
    ray.removeHandler(handler)
    print("of a library that holds the stream", file=held)
    assert capsys.readouterr().err == "after\n"


def test_a_signal_within_a_line_may_print(tmp_path):
    """Ray Train's handler of SIGINT does; a lock that its thread holds already would be waited for without end."""

    class Signals(io.StringIO):
        def write(self, text):
            if text == "whole\n":
                signal.raise_signal(signal.SIGUSR1)
            return super().write(text)

    log = Signals()
    log_filter = output.LogFilter(log, sys.stderr, "x: ")
    before = signal.signal(signal.SIGUSR1, lambda *_: print("of the handler", file=log_filter))
    try:
        print("whole", file=log_filter)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(log.getvalue().splitlines()) == ["of the handler", "whole"]


def test_what_is_not_pythons_goes_to_the_file_too(tmp_path):
    path = tmp_path / "output.log"
    with output.separate_output(str(path), "x", "x: "):
        subprocess.run([sys.executable, "-c", "print('of another process')"], stdout=sys.stdout, check=True)
    assert "of another process" in path.read_text()


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, None])
def test_a_temporary_file_stays_where_something_failed(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(output.tempfile, "tempdir", str(tmp_path))
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        if kind is OSError:
            failed = stack.enter_context(pytest.raises(OSError, match="full"))
        stack.enter_context(output.separate_output_once("job"))
        print("chatter")
        if kind is not None:
            raise kind("full")
    found = list(tmp_path.iterdir())
    if kind is OSError:
        assert output.notes_of(failed.value) == f"; what Ray and its workers printed is in {found[0]}"
        assert "chatter" in found[0].read_text()
    assert len(found) == (kind is OSError)
