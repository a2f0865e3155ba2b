"""What is counted: counters only grow, records are bounded and read back."""

import contextlib
import dataclasses
import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.feather
import pytest

from raylance.observe import metrics, record
from raylance.observe import recording as recordings
from raylance.observe.figures import RunFigures
from raylance.observe.observations import Receipt
from raylance.observe.record import COLUMNS, Record, RecordFolder
from raylance.observe.stats import Stats
from tests.helpers.figures import figures, part


class Clock:
    """Time that a test moves, and a little whenever it is looked at."""

    def __init__(self) -> None:
        self.now, self.tick_s = 100.0, 1e-6

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("raylance.observe.clock.now", made)
    return made


# ---- stats


def test_masked_rows_are_named_once_and_not_without_end() -> None:
    stats = Stats()
    stats.add(Receipt(bad_rows=((5, "image", "cut"), (5, "image", "cut"), (5, "other", "null"))))
    assert stats.bad_rows == [(5, "image", "cut"), (5, "other", "null")]
    for offset in range(1000):
        stats.add(Receipt(bad_rows=((offset, "image", "cut"),)))
    assert len(stats.bad_rows) == 100


# ---- records


def read(content: bytes) -> tuple[Any, dict[str, Any]]:
    table = pyarrow.feather.read_table(pyarrow.BufferReader(content))
    return table, json.loads(table.schema.metadata[b"raylance"])


def make_record(**facts: Any) -> Record:
    return Record({"dataset": "train", "rank": 3, "limits": {}, **facts})


@pytest.mark.parametrize("samples", [0, 1, 2048, 2049, 9001])
def test_a_record_is_bounded_and_ends_with_what_is_known_last(samples: int) -> None:
    made = make_record(uri="a")
    for number in range(samples):
        made.add(figures(rows=number))
    table, facts = read(made.content(events=[(1.0, "fault", "x")], ended=None))
    rows = table["rows"].to_pylist()
    assert table.column_names == list(COLUMNS)
    assert len(rows) <= 2050
    assert rows == sorted(set(rows))
    assert not samples or (rows[0], rows[-1]) == (0, samples - 1)
    assert len(rows) == samples or len(rows) > 1000, "not fewer than it has room for"
    assert (facts["uri"], facts["events"], facts["format"]) == ("a", [[1.0, "fault", "x"]], record.FORMAT)


def place(path: Path) -> RecordFolder:
    return RecordFolder(pyarrow.fs.LocalFileSystem(), str(path / "run" / "raylance"))


def test_a_recording_is_written_at_its_end_and_when_its_loader_is_gone(tmp_path: Path) -> None:
    stats, loader, looked = Stats(rows=7), Cursor(), []
    stats.first_rows = pyarrow.table({"x": [1, 2]})
    recording = begin(place(tmp_path), stats, loader, to_html=lambda rows: looked.append(rows) or f"<p>{len(rows)}</p>")
    recording.flush()
    folder = tmp_path / "run" / "raylance"
    (path,) = folder.glob("*.arrow")
    assert path.name.startswith("train-rank00003-")
    table, facts = read(path.read_bytes())
    assert (table["rows"][-1].as_py(), table["epoch"][-1].as_py(), table["position"][-1].as_py()) == (7, 2, 30)
    assert facts["ended"] is None
    assert [page.read_text() for page in folder.glob("*.html")] == ["<p>2</p>"]
    stats.rows = 9
    recording.flush()
    assert len(looked) == 1
    stats.rows = 11
    del loader
    recording.tick()
    assert recording.write() is False, "nobody comes back to it"
    assert last_rows(folder) == 11
    begin(place(tmp_path / "b"), stats).end()
    (path,) = (tmp_path / "b" / "run" / "raylance").glob("*.arrow")
    assert read(path.read_bytes())[1]["ended"] > 0


def test_a_storage_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    recording = begin(place(tmp_path))
    recording.flush()
    recording.flush()
    recording.end()
    lines = [entry.message for entry in caplog.records if "cannot be written" in entry.message]
    assert len(lines) == 1
    assert "The run continues" in lines[0]


class Storage:
    """A folder whose storage hangs until `gate` is set."""

    is_local = True

    def __init__(self, path: Path) -> None:
        self.inner, self.gate = RecordFolder(pyarrow.fs.LocalFileSystem(), str(path)), threading.Event()
        self.written_s = self.inner.written_s

    def write(self, name: str, content: bytes) -> None:
        self.gate.wait(60)
        self.inner.write(name, content)


class Cursor:
    epoch, position = 2, 30


CURSOR = Cursor()


def begin(folder: Any, stats: Stats | None = None, cursor: Cursor = CURSOR, **more: Any) -> recordings.Recording:
    publisher, to_html = more.get("publisher"), more.get("to_html", str)
    return recordings.Recording(make_record(), stats or Stats(), cursor, folder, publisher, to_html)


def last_rows(folder: Path) -> float:
    (path,) = folder.glob("*.arrow")
    return read(path.read_bytes())[0]["rows"][-1].as_py()


def test_a_storage_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the writing thread waits for it; others wait once, and not for long."""
    monkeypatch.setattr(recordings, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(recordings, "_current", None)
    storage, done = Storage(tmp_path), threading.Event()
    recording = begin(storage)

    def train() -> None:
        recording.flush()
        recording.flush(may_wait=False)
        recording.flush()
        recording.end()
        done.set()

    threading.Thread(target=train, daemon=True).start()
    try:
        assert done.wait(10)
        assert not list(tmp_path.iterdir())
    finally:
        storage.gate.set()


def test_a_name_hides_no_record(tmp_path: Path) -> None:
    names = {dataset: Record({"dataset": dataset, "rank": 0}).name for dataset in (".cache", "a/b c", "é")}
    assert [name.partition("-")[0] for name in names.values()] == ["cache", "a_b_c", "é"]


def test_an_iterator_that_is_left_alone_takes_no_step_from_the_other(clock: Clock) -> None:
    train, val = Stats(), Stats()
    val.begin("user_s")  # and is never asked again
    for _ in range(3):
        with train.timed("wait_s"):
            clock.now += 1
        with train.timed("user_s"):
            clock.now += 2
    assert train.other_s == 0
    assert val.sample()["train_s"] == pytest.approx(0, abs=1e-4)


def test_a_pass_that_is_dropped_leaves_the_clock_to_the_next_one() -> None:
    """Its iterator is collected at any time, with a batch of the next one in hand."""
    stats, dropped, continued = Stats(), contextlib.ExitStack(), contextlib.ExitStack()
    dropped.enter_context(stats.timed("user_s"))
    continued.enter_context(stats.timed("user_s"))
    dropped.close()
    assert stats.is_timed("user_s")
    assert stats.user_s == 0
    continued.close()
    assert stats.user_s > 0


def test_reports_are_kept_from_the_first_on_and_faults_to_the_last() -> None:
    stats = Stats()
    for number in range(5000):
        stats.record_event("report", number)
        stats.record_event("fault", number)
    kept = {kind: [what for _, each, what in stats.events if each == kind] for kind in ("report", "fault")}
    assert kept["fault"] == list(range(4500, 5000)), "reports push out no fault"
    assert stats.events == sorted(stats.events, key=lambda event: event[0])
    assert kept["report"][-500:] == kept["fault"]
    older = kept["report"][:-500]
    assert 125 <= len(older) <= 250
    assert max(b - a for a, b in itertools.pairwise([0, *older, 4500])) <= 2 * 4500 / 125, "all of the run"


def test_counters_of_a_record_never_fall() -> None:
    """A sample that comes between the end of a timed step and its sum lacks that step."""
    kept = make_record()
    figures = Stats().sample() | {"epoch": 1.0, "position": 30.0}
    for user_s, position in ((5.0, 30.0), (1.0, 10.0), (6.0, 20.0)):
        kept.add(figures | {"user_s": user_s, "position": position})
    table, _ = read(kept.content())
    assert table["user_s"].to_pylist() == [5, 5, 6]
    assert table["position"].to_pylist() == [30, 10, 20]


def test_rows_that_cannot_be_shown_and_metrics_that_fail_leave_the_record(tmp_path: Path) -> None:
    class Broken(metrics.Publisher):
        def publish(self, figures: Any) -> None:
            raise RuntimeError("no Ray")

    def look(rows: Any) -> str:
        raise ValueError("odd rows")

    stats = Stats(first_rows=pyarrow.table({"x": [1]}))
    recording = begin(place(tmp_path), stats, publisher=Broken("run", "train", 0), to_html=look)
    recording.flush()
    stats.rows = 9
    recording.end()
    assert last_rows(tmp_path / "run" / "raylance") == 9
    assert stats.first_rows.num_rows == 0, "they are not kept"


def test_helpers_of_a_loader_that_is_gone_leave_the_metrics() -> None:
    class Ends(metrics.Publisher):
        def publish(self, figures: Any) -> None:
            seen.append(dict(figures))

    seen: list[dict[str, float]] = []
    for ends in (lambda recording: recording.end(), lambda recording: recording.tick()):
        loader = Cursor()
        publisher = Ends("r", "train", 0)
        recording = begin(None, Stats(decoders=2), loader, publisher=publisher)
        recording.flush()
        assert seen[-1]["decoders"] == 2
        del loader
        ends(recording)
        assert seen[-1]["decoders"] == 0
        assert "rows" not in seen[-1], "what was counted stays"


def test_of_peers_each_publishes_an_equal_part_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()

    class Metric:
        def __init__(self, metric: metrics.Metric) -> None:
            self.name = metric.name

        def inc(self, value: float, _: dict[str, str]) -> None:
            seen[self.name] += value

        def set(self, *_: object) -> None: ...

    monkeypatch.setattr(metrics, "_of_ray", Metric)
    for rank in range(3):
        publisher = metrics.Publisher("run", "train", rank, {"rows": 3.0}, peers=3)
        for rows in (9.0, 15.0):
            publisher.publish({"rows": rows, "decoded_rows": 2 * rows, "read_bytes": 10 * rows})
    wanted = {"rows": 12.0, "decoded_rows": 30.0, "read_bytes": 450.0}
    assert seen == {f"raylance_{name}_total": value for name, value in wanted.items()}


def test_rates_of_a_run_count_the_rows_of_peers_once() -> None:
    spent = {"user_s": 2.0, "wait_read_s": 0.5}
    alone = RunFigures([part(rank, **spent) for rank in range(2)]).rates
    peers = [dataclasses.replace(part(rank, **spent), peers=2.0) for rank in range(4)]
    assert RunFigures(peers).rates == alone
