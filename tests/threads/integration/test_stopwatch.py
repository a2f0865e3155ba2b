"""P10: what is shown of a loader agrees with a stopwatch. Loaders run as they are, in virtual time, limited by causes
that sleep; a stopwatch of the test's own adds up what each has slept, and all figures are compared with it exactly:
sleeps are sums of powers of two.
"""

import dataclasses
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance import top
from raylance.api.loader import consumer_of
from raylance.observe import metrics
from raylance.observe.verdict import Verdict
from raylance.observe.wait_clock import WAITS
from raylance.reports.page import render
from raylance.reports.progress import progress
from raylance.reports.reading import Run, read_run
from raylance.reports.timeline import timeline
from raylance.runtime.session import Session
from tests.helpers.slow_reading import opened_slowly
from tests.helpers.virtual_time import VirtualTime

ROWS, BATCH = 128, 8
STEPS = ROWS // BATCH


class Watch:
    """A stopwatch: adds up what each cause has slept, and how long the consumer waited. Reads at the same time are one
    time in which storage is read.
    """

    def __init__(self, time: VirtualTime) -> None:
        self.time, self.slept, self.waits, self.rows_read = time, Counter[str](), list[float](), 0
        self._lock, self._until, self.read_s = threading.Lock(), dict[str, float](), 0.0

    def sleep(self, cause: str, seconds: float) -> None:
        begin = self.time.now()
        self.time.sleep(seconds)
        with self._lock:
            end = begin + seconds
            since = max(begin, self._until.get(cause, begin)) if cause == "reading" else begin
            self.slept[cause] += max(0.0, end - since)
            self.read_s += seconds * (cause == "reading")
            self._until[cause] = max(end, self._until.get(cause, end))


@dataclasses.dataclass(frozen=True)
class Slow:
    """What decodes takes a while; so does opening."""

    column: str
    watch: Any = None
    row_s: float = 0.0
    open_s: float = 0.0

    shape, dtype = (), np.float32

    def open(self) -> Any:
        self.watch.sleep("opening", self.open_s)
        return self


class SlowDecoder(Slow, raylance.Decoder):
    def decode_into(self, encoded: memoryview, draws: np.ndarray, out: np.ndarray) -> None:
        self.watch.sleep("decoding", self.row_s)
        out[...] = len(encoded)


class SlowDevice(Slow, raylance.BatchDecoder):
    on_device = True

    def decode_batch(self, encoded: Sequence[Any], draws: np.ndarray, out: Any) -> None:
        self.watch.sleep("decoding", self.row_s * len(encoded))
        out[:] = len(encoded[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What things take, in seconds; opening a decoder is what a start takes."""

    read_row_s: float = 0.0
    decode_row_s: float = 0.0
    open_s: float = 0.0
    collate_s: float = 0.0
    train_s: float = 0.0
    save_s: float = 0.0
    save_every: int = 0
    on_device: bool = False


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualTime]:
    made = VirtualTime()
    made.put_in_place(monkeypatch)
    monkeypatch.setattr("raylance.observe.recording._TICK_S", 3600.0)  # samples are taken where the test asks for them
    monkeypatch.setattr("raylance.observe.recording._current", None)
    made.enter()
    yield made
    made.end()


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    cells = pa.array([bytes(100)] * ROWS, pa.binary())
    return write_dataset(pa.table({"id": np.arange(ROWS), "cell": cells}))


def make_loader(uri: str, watch: Watch, costs: Costs, name: str = "train", **options: Any) -> raylance.RankLoader:
    """A loader that does not begin the next epoch by itself: what is read ahead of it would be nobody's yet."""
    kind = SlowDevice if costs.on_device else SlowDecoder
    decoder = kind("cell", watch, costs.decode_row_s, costs.open_s)
    dataset: Any = raylance.dataset(uri, decode=decoder, order="sequential")

    def read(rows: int) -> None:
        watch.sleep("reading", costs.read_row_s * rows)
        watch.rows_read += rows

    spec = opened_slowly(dataset, read)
    options = {"runtime": "threads", "num_decoders": 1, "name": name} | options
    watch.slept.clear()  # of what opening the dataset tried
    made = raylance.Options(**options)
    return raylance.RankLoader(spec, made, session=Session(spec.read, made, 1, loads_next_epoch=False))


def train(
    loader: raylance.RankLoader, watch: Watch, costs: Costs, in_step: Callable[[int], None] = lambda step: None
) -> None:
    """An epoch; reports are of the loader alone, as Ray Train is not here."""

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        watch.sleep("collating", costs.collate_s)
        return batch

    batches = iter(loader.iter_torch_batches(global_batch_size=BATCH, collate_fn=collate, device="cpu"))
    for step in range(STEPS + 1):
        asked = watch.time.now()
        batch = next(batches, None)
        watch.waits.append(watch.time.now() - asked)
        if batch is None:
            assert step == STEPS
            return
        watch.sleep("training", costs.train_s)
        in_step(step)
        if costs.save_every and step % costs.save_every == costs.save_every - 1:
            with consumer_of(loader).reporting({"step": step}):
                watch.sleep("saving", costs.save_s)


def cells_of(page: str) -> list[list[str]]:
    return [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def published(figures: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """What the metrics show of figures: by name and cause."""
    seen: dict[tuple[str, str], float] = Counter()

    class Metric:
        def __init__(self, metric: metrics.Metric) -> None:
            self.name = metric.name

        def inc(self, value: float, labels: dict[str, str]) -> None:
            seen[self.name, labels.get("cause", "")] += value

        def set(self, value: float, labels: dict[str, str]) -> None:
            seen[self.name, ""] = value

    monkeypatch.setattr(metrics, "_of_ray", Metric)
    metrics.Publisher("run", "train", 0).publish(figures)
    return seen


def check_stats(stats: dict[str, Any], watch: Watch) -> None:
    """`loader.stats()` against the stopwatch."""
    slept = watch.slept
    assert (stats["batches"], stats["rows"]) == (STEPS, ROWS)
    assert stats["wait_s"] == sum(watch.waits)
    assert stats["first_batch_s"] == stats["wait_start_s"] == watch.waits[0]
    assert sum(stats[name] for name in WAITS.values()) == stats["wait_s"], "each second of waiting has one cause"
    assert stats["user_s"] == slept["training"] + slept["saving"]
    assert stats["save_s"] == slept["saving"]
    assert stats["other_s"] == 0
    # A load of the next epoch is counted when its answer is taken, which may be in the next pass.
    ahead_s = slept["reading"] * max(0, watch.rows_read - ROWS) / watch.rows_read
    assert slept["reading"] - ahead_s <= stats["storage_s"] <= slept["reading"]
    assert stats["decode_s"] == slept["decoding"]
    assert stats["transform_s"] == 0
    assert stats["collate_s"] == stats["collate_fn_s"] == slept["collating"]
    assert stats["decoded_rows"] == ROWS


def check_verdict(verdict: Verdict, limit: str, watch: Watch) -> None:
    """A verdict against the stopwatch."""
    slept, later_s = watch.slept, sum(watch.waits[1:])
    steady_s = slept["training"] + later_s
    waits_for = limit if limit in WAITS else "decoding"
    seconds = dict.fromkeys(WAITS, 0.0) | {"starting": watch.waits[0]} | ({waits_for: later_s} if later_s else {})
    spent = seconds | {"training": slept["training"], "saving": slept["saving"], "other datasets": 0.0}
    assert verdict.limit == limit
    assert verdict.seconds == spent
    assert verdict.waiting == later_s / sum(spent.values())
    assert verdict.rates["delivered"] == pytest.approx(ROWS / steady_s, rel=1e-12)
    assert verdict.rates["training"] == pytest.approx(ROWS / slept["training"], rel=1e-12)
    had = ROWS / steady_s  # it also works in other time than that
    alone = ROWS / slept["decoding"] if slept["decoding"] else np.inf
    assert verdict.rates["decoding"] == pytest.approx(max(alone, had), rel=1e-12)
    # Two reads may run at once.
    one = watch.rows_read / watch.read_s if watch.read_s else np.inf
    assert max(one, had) * (1 - 1e-12) <= verdict.rates["reading"] <= max(2 * one, had) * (1 + 1e-12)


def check_pages(run: Run, watch: Watch) -> None:
    """The report, `top` and the progress line, which round, against the stopwatch."""
    slept, waited_s = watch.slept, sum(watch.waits)
    later_s = waited_s - watch.waits[0]
    steady_s = slept["training"] + later_s
    verdict, rate = run.verdict("train"), f"{ROWS / steady_s:,.0f}"
    page = render(run)
    (rank,) = (row for row in cells_of(page) if len(row) == 13)
    spent = (slept["training"], slept["saving"], waited_s, *(verdict.seconds[cause] for cause in WAITS))
    assert rank[2:11] == [f"{ROWS}", rate, *(f"{seconds:,.1f}" for seconds in spent)]
    assert verdict.summary[1:] in page
    found = progress(run)
    assert (found.epoch, found.rows, found.epoch_rows) == (0, ROWS, ROWS)
    assert found.rate == pytest.approx(ROWS / steady_s, rel=1e-12)
    assert found.waiting == pytest.approx(waited_s / (waited_s + slept["training"] + slept["saving"]), rel=1e-12)
    shown = top.show(run, run.records[0].last + 1)
    assert f"epoch 0, {ROWS}/{ROWS} rows, {found.describe()}" in shown
    assert f"all starts: {verdict}" in shown
    begun, last = run.records[0].started, run.records[0].last
    assert last - begun == waited_s + slept["training"] + slept["saving"], "all of its time, and no more"
    strips = timeline(run, bins=1).shares[0]
    for part, seconds in verdict.seconds.items():
        assert strips[part][0] == pytest.approx(seconds / (last - begun), rel=1e-9)


LIMITED = {  # epochs of less than 15 s, which the progress line looks back
    "training": Costs(read_row_s=1 / 1024, decode_row_s=1 / 256, open_s=1.0, train_s=0.5),
    "reading": Costs(read_row_s=1 / 16, train_s=1 / 8),
    "decoding": Costs(decode_row_s=1 / 16, train_s=1 / 8),
    "finishing": Costs(collate_s=0.5, train_s=1 / 8),
    "saving": Costs(decode_row_s=1 / 256, train_s=0.25, save_s=1.0, save_every=2),
    "starting": Costs(open_s=3.0, train_s=1 / 8, decode_row_s=1 / 1024),
}


@pytest.mark.promise("P10")
@pytest.mark.parametrize("limit", LIMITED)
def test_all_that_is_shown_agrees_with_a_stopwatch(
    limit: str, uri: str, time: VirtualTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, costs, folder = Watch(time), LIMITED[limit], str(tmp_path / "run")
    with make_loader(uri, watch, costs, record=folder) as loader:
        train(loader, watch, costs)
        stats, live, figures = loader.stats(), loader.explain(), consumer_of(loader).recorder.stats.sample()
    check_stats(stats, watch)
    check_verdict(live, limit, watch)
    run = read_run(folder)
    check_verdict(raylance.explain_run(folder), limit, watch)
    check_pages(run, watch)
    for name, value in stats.items():
        if isinstance(value, int | float):
            assert run.records[0].at(name, run.records[0].last) == value, name
    shown = published(figures, monkeypatch)
    for metric in metrics.METRICS:
        wanted = stats["user_s"] if metric.field == "train_s" else stats.get(metric.field, 0)
        assert shown.get((metric.name, metric.cause), 0) == wanted, metric
    in_ray = {name.removeprefix("data_iter_"): value for (name, _), value in shown.items() if "data_iter_" in name}
    assert (in_ray["rows_total"], in_ray["batches_total"]) == (ROWS, STEPS)
    assert in_ray["total_blocked_seconds"] == sum(watch.waits)
    assert in_ray["user_seconds"] == stats["user_s"]


def test_decoding_on_a_device_is_decoding(uri: str, time: VirtualTime) -> None:
    """No row counted as decoded, no second as decoding, the encoded bytes as handed out; collating was blamed."""
    nbytes = {}
    for on_device in (False, True):
        watch = Watch(time)
        costs = Costs(decode_row_s=1 / 16, collate_s=1 / 8, train_s=0.25, open_s=1.0, on_device=on_device)
        with make_loader(uri, watch, costs) as loader:
            train(loader, watch, costs)
            stats, verdict = loader.stats(), loader.explain()
        check_stats(stats, watch)
        assert stats["device_decode_s"] == (watch.slept["decoding"] if on_device else 0)
        assert verdict.limit == "decoding"
        steady_s = watch.slept["training"] + sum(watch.waits[1:])
        assert verdict.rates["decoding"] == max(ROWS / watch.slept["decoding"], ROWS / steady_s)
        assert verdict.seconds["decoding"] >= watch.slept["decoding"] - watch.waits[0] - watch.slept["training"]
        nbytes[on_device] = stats["nbytes"]
    assert nbytes[True] == nbytes[False]


@pytest.mark.parametrize("slow", ["a", "b"])
def test_datasets_that_are_iterated_side_by_side_are_all_trained_on(
    slow: str, uri: str, time: VirtualTime, tmp_path: Path
) -> None:
    """As by zip(): the one that is waited for is judged, whichever comes first; the rows of both are proven."""
    folder, watches = str(tmp_path / "run"), {"a": Watch(time), "b": Watch(time)}
    costs = {name: Costs(decode_row_s=1 / 4 * (name == slow)) for name in watches}
    costs["val"], watches["val"] = Costs(train_s=0.25), Watch(time)
    loaders = {name: make_loader(uri, watches[name], costs[name], name=name, record=folder) for name in watches}
    passes = {name: iter(loaders[name].iter_batches(global_batch_size=BATCH)) for name in "ab"}
    trained_s, waits_s = STEPS * 0.5, {"a": list[float](), "b": list[float]()}
    for step in range(STEPS):
        for name, batches in passes.items():
            begin = time.now()
            next(batches)
            waits_s[name].append(time.now() - begin)
        if step == 1:  # within a step of both
            train(loaders["val"], watches["val"], costs["val"])
        time.sleep(0.5)
    for name in loaders:
        list(passes.get(name, ()))
        loaders[name].close()
    run = read_run(folder)
    later_s = {name: sum(waits_s[name][1:]) for name in waits_s}
    assert run.trained_on == sorted(waits_s, key=lambda name: -later_s[name])
    verdict = raylance.explain_run(folder)
    main, other = run.trained_on
    assert main == slow
    assert verdict.seconds["training"] == trained_s
    assert verdict.seconds["decoding"] == later_s[main] > 0
    assert verdict.summary.startswith(f"{main}, iterated side by side with {other}: decoding is the limit")
    assert "is waited for, too" not in str(verdict)
    proven = f"epoch 0: {ROWS} rows were handed out: every selected row exactly once"
    assert verdict.rows.startswith((f"a, {proven}; b, {proven}", f"a, {proven}\nb, {proven}"))
    assert "val, epoch 0: " in verdict.rows
    val_s = watches["val"].slept["training"] + sum(watches["val"].waits)
    assert verdict.seconds["other datasets"] == val_s + sum(waits_s[other])
    live = run.verdict(main, last_s=1e9)
    assert (live.summary, live.seconds) == (verdict.summary, verdict.seconds)


def test_what_is_under_way_is_shown_up_to_now(uri: str, time: VirtualTime) -> None:
    """In a step and in a report; and what was prepared is waited for no longer than it takes."""
    watch, costs = Watch(time), Costs(open_s=4.0, decode_row_s=1 / 256, train_s=0.5)
    with make_loader(uri, watch, costs) as loader:
        batches = loader.prepare(global_batch_size=BATCH, device="cpu")
        watch.sleep("building the model", 3.0)
        asked = time.now()
        first = next(batches)
        assert len(first["id"]) == BATCH
        waited_s = watch.slept["opening"] + BATCH / 256 - 3.0
        assert loader.stats()["wait_s"] == loader.stats()["wait_start_s"] == time.now() - asked == waited_s
        watch.sleep("training", 0.5)
        assert loader.stats()["user_s"] == 0.5
        with consumer_of(loader).reporting({}):
            watch.sleep("saving", 0.25)
            assert (loader.stats()["user_s"], loader.stats()["save_s"]) == (0.75, 0.25)
        assert consumer_of(loader).recorder.stats.sample()["train_s"] == 0.75
        kept = iter(loader.iter_torch_batches(global_batch_size=BATCH, device="cpu"))
        asked = time.now()
        next(kept)  # the pass before is left alone, with its batch in hand
        assert loader.stats()["user_s"] == 0.75
        assert loader.stats()["wait_s"] == waited_s + time.now() - asked


@pytest.mark.promise("P10")
def test_top_shows_the_last_seconds_of_a_run_that_is_under_way(uri: str, time: VirtualTime, tmp_path: Path) -> None:
    """Samples are taken after each step; steps take a second each, half of it waiting for decoders."""
    watch, costs, folder = Watch(time), Costs(decode_row_s=1 / 8, train_s=0.5), str(tmp_path / "run")
    with make_loader(uri, watch, costs, record=folder) as loader:
        pages: list[str] = []

        def look(step: int) -> None:
            loader.record()
            if step == STEPS - 1:
                pages.append(top.show(read_run(folder), time.now()))

        train(loader, watch, costs, look)
    (page,) = pages
    assert "epoch 0, 128/128 rows, 8 rows/s, waiting 50% (for decoding)" in page
    assert "decoding is the limit: 1 decoder delivers 8 rows/s, the trainer takes 16 rows/s; of the time: 49% " in page
