"""What a run shows: records over restarts, lines, tables, and a page that needs no network."""

import base64
import dataclasses
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.fs
import pytest

import raylance
from raylance import top
from raylance.api.loader import consumer_of
from raylance.environment import process
from raylance.errors import ConfigError
from raylance.observe.record import Record, RecordFolder
from raylance.observe.stats import NUMBERS
from raylance.planning.shard_context import Assignment
from raylance.reports import watching
from raylance.reports.page import render
from raylance.reports.progress import events, progress, table
from raylance.reports.reading import Run, RunFolder, read_first_rows, read_run
from raylance.reports.timeline import PARTS, timeline
from tests.helpers.images import encode, make_images
from tests.helpers.scripts import run_script

Make = Callable[..., Run]
T0 = 1.7e9


@pytest.fixture
def make_run(tmp_path: Path) -> Make:
    """Writes records of so many seconds each and reads them: `grows` says by how much counters grow in a second."""

    def make(*loaders: dict[str, Any]) -> Run:
        for loader in loaders:
            facts = {
                "dataset": "train", "run": "r", "rank": 0, "world_size": 1, "host": "h", "split": True, "rows": 1000,
                "row_bytes": 100.0, "decodes": ["image"], "order": "window", "cpus": 2, "cluster_cpus": 2.0,
                "raylance": "0", "started": T0, "global_batch_size": 10, "steps": 100, "remainder": "drop",
                "options": {"decoder_cpus": 1.0}, "state": {"uri": "/nowhere.lance", "columns": ["image"]},
                "limits": {"inflight_limit_bytes": 1e6, "reader_limit_bytes": 2e6, "epoch_rows": 1000.0},
            }  # fmt: skip
            record = Record(facts | loader.get("facts", {}))
            for second in range(1, loader.get("seconds", 10) + 1):
                figures = dict.fromkeys((*NUMBERS, "epoch", "position"), 0.0) | {"decoders": 1.0, "readers": 1.0}
                record.add(figures | {name: second * each for name, each in loader.get("grows", {}).items()})
                record._samples.all()[-1][0] = record.facts["started"] + second
            latest = {name: loader.get(name) for name in ("events", "bad_rows", "ended", "shared_s")}
            RecordFolder(pa.fs.LocalFileSystem(), str(tmp_path / "r" / "raylance")).write(
                f"{record.name}.arrow", record.content(**latest)
            )
        return read_run(str(tmp_path / "r"))

    return make


TRAINS = {"rows": 80, "batches": 8, "user_s": 0.5, "wait_s": 0.5, "wait_decode_s": 0.4, "wait_read_s": 0.1,
          "decoded_rows": 80, "decode_s": 0.9, "read_bytes": 8000, "storage_s": 0.2, "position": 80}  # fmt: skip


def ranks_of(count: int, **more: Any) -> list[dict[str, Any]]:
    """Ranks that train alike."""
    return [{"facts": {"rank": rank, "world_size": count}, "grows": TRAINS, **more} for rank in range(count)]


def drain(loader: raylance.RankLoader, global_batch_size: int, pause_s: float = 0.0) -> None:
    """A pass that keeps no batch."""
    for _ in loader.iter_batches(global_batch_size=global_batch_size):
        time.sleep(pause_s)


# ---- reading


def test_figures_are_known_at_any_time(make_run: Make) -> None:
    (record,) = make_run({"grows": TRAINS}).records
    assert record.at("rows", np.array([T0 - 5, T0, T0 + 2.5, T0 + 10, T0 + 99])).tolist() == [0, 0, 200, 800, 800]
    assert record.at("position", np.array([T0 + 2.5])).tolist() == [160], "a position does not grow steadily"
    figures = record.rank_figures(T0 + 6).figures
    assert (figures["rows"], figures["decoders"]) == (320, 1)


def test_the_dataset_that_is_trained_on_is_found(make_run: Make) -> None:
    val = {"facts": {"dataset": "val"}, "grows": {"rows": 500, "user_s": 0.1}}
    assert make_run(val, {"grows": TRAINS}).main == "train"


def test_restarts_are_joined_and_ranks_that_went_do_not_count(make_run: Make) -> None:
    """Two ranks of ten seconds; an hour later one rank continues."""
    later = {
        "facts": {"started": T0 + 3600},
        "grows": TRAINS,
        "events": [(T0 + 3601, "resume", {"epoch": 0, "position": 80})],
    }
    run = make_run(*ranks_of(2), later)
    assert [record.started for record in run.newest("train")] == [T0 + 3600]
    assert run.verdict("train").seconds["decoding"] == pytest.approx(3 * 4.0)
    assert run.verdict("train", last_s=5).seconds["decoding"] == pytest.approx(2.0)
    found = timeline(run, bins=40)
    assert found.edges[-1] == pytest.approx(20), "the hour is left out"
    assert found.cuts == pytest.approx([10])
    assert found.run_s(T0 + 3605) == pytest.approx(15)
    assert found.rate[2] == pytest.approx(160)
    assert found.rate[-2] == pytest.approx(80)
    for shares in found.shares.values():
        whole = sum(shares.values())
        assert set(shares) == set(PARTS)
        assert whole.max() <= 1 + 1e-9
    assert found.shares[0]["decoding"][[3, 30]] == pytest.approx(0.4)
    assert found.shares[1]["training"][30] == 0


def test_a_loader_that_was_closed_and_continues_counts_once(images_uri: str, tmp_path: Path) -> None:
    data = raylance.dataset(images_uri, columns=["id"], remainder="ragged")
    loader = data.loader(runtime="threads", record=str(tmp_path))
    for _ in range(2):
        drain(loader, 100)
        loader.close()
    run = read_run(str(tmp_path))
    assert len(run.records) == 2
    assert sum(record.at("rows", record.last) for record in run.records) == loader.stats()["rows"] == 2 * 953
    assert [what["epoch"] for _, _, kind, what in events(run) if kind == "epoch"] == [0, 1]
    assert run.main == "images", "what the dataset is called"
    assert run.verdict("images").seconds["training"] == pytest.approx(loader.stats()["user_s"])


def test_a_record_counts_the_rows_of_an_epoch_and_not_of_the_selection(images_uri: str, tmp_path: Path) -> None:
    order = raylance.Weighted(weights="label", rows_per_epoch=100)
    data = raylance.dataset(images_uri, columns=["id"], order=order, remainder="ragged")
    with data.loader(runtime="threads", record=str(tmp_path)) as loader:
        list(loader.iter_batches(batch_size=30))
    (record,) = RunFolder(str(tmp_path)).read().records
    assert record.facts["limits"]["epoch_rows"] == 100


def test_what_is_no_run_is_refused_with_the_runs_beside_it(make_run: Make, tmp_path: Path) -> None:
    make_run({"grows": TRAINS})
    with pytest.raises(ConfigError, match=r"holds no record"):
        read_run(str(tmp_path))
    with pytest.raises(ConfigError, match="holds no record"):
        raylance.report_run(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"nothing://x cannot be opened"):
        read_run("nothing://x")


def test_a_dataset_that_each_rank_sees_whole_is_recorded_by_each(
    images_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loaders are rank 0 of 1 everywhere; their records lie beside each other all the same."""
    data = raylance.dataset(images_uri, columns=["id"])
    options = raylance.Options(runtime="threads", record=str(tmp_path))
    for rank in range(2):
        monkeypatch.setattr(process, "train_rank", lambda rank=rank: (rank, 2))
        with data().make_loader(0, 1, options, Assignment(name="val", is_split=False)) as loader:
            next(iter(loader.iter_batches(global_batch_size=100)))
    assert [record.rank for record in read_run(str(tmp_path)).newest("val")] == [0, 1]


def test_a_damaged_record_is_left_out(make_run: Make, tmp_path: Path) -> None:
    make_run({"grows": TRAINS})
    (path,) = (tmp_path / "r" / "raylance").glob("*.arrow")
    (path.parent / "train-rank00001-0.arrow").write_bytes(path.read_bytes()[:500])
    (path.parent / "train-rank00002-0.arrow").write_bytes(b"")
    assert [record.name for record in read_run(str(tmp_path / "r")).records] == [path.stem]


# ---- what is loaded


def test_a_loader_loads_nothing_that_draws(images_uri: str, tmp_path: Path) -> None:
    """An epoch with a record, in a process of its own: neither the pages nor what they need."""
    script = (
        "import sys, raylance\n"
        f"data = raylance.dataset({images_uri!r}, decode=raylance.Image('image', size=(8, 8)))\n"
        f"with data.loader(runtime='threads', record={str(tmp_path / 'run')!r}) as loader:\n"
        "    assert list(loader.iter_torch_batches(global_batch_size=25))\n"
        "    loader.explain(), loader.stats()\n"
        "unwanted = ('raylance.reports', 'matplotlib', 'jinja2')\n"
        "loaded = [name for name in sys.modules if name.startswith(unwanted)]\n"
        "assert not loaded, loaded\n"
    )
    run_script(script, tmp_path)
    assert read_run(tmp_path / "run").records


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_a_report_names_the_extra_that_it_needs(
    make_run: Make, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run({"grows": TRAINS})
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{module} .*pip install raylance\[report\]"):
        raylance.report_run(tmp_path / "r")


# ---- lines and tables


def test_progress_of_an_epoch_and_a_run(make_run: Make) -> None:
    found = progress(make_run(*ranks_of(2)))
    assert (found.epoch, found.rows, found.epoch_rows) == (0, 800, 1000)
    assert (found.rate, found.waiting, found.cause) == (pytest.approx(160), pytest.approx(0.5), "decoding")
    assert found.left_s() == pytest.approx(200 / 160)
    assert found.left_s(epochs=3) == pytest.approx(2200 / 160)
    assert found.describe() == "160 rows/s, waiting 50% (for decoding)"


def test_clocks_of_nodes_may_differ(make_run: Make) -> None:
    run = make_run(*(
        {"facts": {"rank": rank, "world_size": 2, "started": T0 - 300 * rank}, "grows": TRAINS} for rank in (0, 1)
    ))  # fmt: skip
    found = progress(run)
    assert found.rate == pytest.approx(160)
    assert found.left_s() == pytest.approx(200 / 160)
    assert "this start: decoding is the limit" in top.show(run, time.time())


def test_steps_that_take_long_have_a_rate(make_run: Make) -> None:
    """A batch of 64 rows each forty seconds, all of them training."""
    run = make_run({"grows": {"user_s": 1.0}, "seconds": 410})
    (record,) = run.records
    batches = 1 + record.series["user_s"] // 40
    record.series.update({"batches": batches, "rows": 64 * batches, "position": np.minimum(1000, 64 * batches)})
    found = progress(run)
    assert found.rate == pytest.approx(64 / 40, rel=0.4)
    assert "training is the limit: it takes 2 rows/s" in top.show(run, time.time())


def test_after_the_last_batch_an_epoch_has_all_its_rows(make_run: Make) -> None:
    found = progress(make_run({"grows": TRAINS | {"epoch": 0.1, "position": 0}}))
    assert (found.epoch, found.rows, found.left_s(1)) == (0, 1000, 0)


def test_rates_are_of_training_and_the_time_left_of_all_of_it(make_run: Make) -> None:
    """Half of the time goes to validation, which continues."""
    trains = TRAINS | {"user_s": 0.9, "other_s": 0.5, "wait_s": 0.1, "wait_read_s": 0.1, "wait_decode_s": 0.0}
    val = {"facts": {"dataset": "val"}, "grows": {"rows": 20, "position": 20, "user_s": 0.4, "wait_s": 0.1}}
    run = make_run({"grows": trains}, val)
    found = progress(run)
    assert (found.rate, found.waiting) == (pytest.approx(160), pytest.approx(0.1))
    assert found.left_s() == pytest.approx(200 / 80)
    assert found.describe() == "160 rows/s, waiting 10% (for reading); val 200/1,000"
    assert "val 200" not in progress(make_run({"grows": trains}, val | {"ended": T0 + 10})).describe()


def test_a_trainer_that_hangs_has_no_rate(make_run: Make) -> None:
    run = make_run({"grows": TRAINS, "seconds": 40})
    (record,) = run.records
    for name in ("rows", "batches", "wait_s", "wait_decode_s", "wait_read_s"):
        record.series[name] = np.minimum(record.series[name], record.series[name][20])
    assert (progress(run).rate, progress(run).waiting) == (0, 0)


def test_ranks_that_were_not_there_all_the_time_count_by_their_share(make_run: Make) -> None:
    """Of twenty seconds with two ranks, ten with two more."""
    two = [{"facts": {"rank": rank, "world_size": 2, "started": T0 + 10}, "grows": TRAINS} for rank in range(2)]
    verdict = make_run(*ranks_of(4), *two).verdict("train")
    assert verdict.rates["delivered"] == pytest.approx((4 * 80 + 2 * 80) / 2, rel=0.01)
    assert verdict.rates["training"] == pytest.approx(3 * 160, rel=0.01)


def test_the_table_names_each_loader_and_the_ones_that_wait_most(make_run: Make) -> None:
    waits = [dict.fromkeys(("wait_s", "wait_decode_s"), 0.1 * rank) | {"wait_read_s": 0.0} for rank in range(5)]
    ranks = [{"facts": {"rank": rank, "world_size": 5}, "grows": TRAINS | waits[rank]} for rank in range(5)]
    run = make_run(*ranks, {"facts": {"dataset": "val"}, "ended": T0 + 9, "grows": {"rows": 5}})
    whole = table(run, time.time())
    assert len(whole.splitlines()) == 7
    assert re.search(r"train +4 +h +0 +800/1,000 .* 44% +decoding +1/0 .* running", whole)
    assert re.search(r"val +0 +h +0 +0/1,000 +0 .* ended", whole), "no time, no rate"
    assert re.search(r"gone for (999|1,000) s", table(run, run.records[-1].written_s + 1000))
    through = make_run({"grows": TRAINS | {"rows": 200, "position": 100}})
    later = through.records[-1].written_s + 100
    assert re.search(r"1,000/1,000 .* ended", table(through, later)), "it was through with its epoch: nobody killed it"
    assert re.search(r"1,000/1,000 .* running", table(through, later - 50))
    short = table(run, time.time(), most=2).splitlines()
    assert [line.split()[1] for line in short[1:3]] == ["4", "3"]
    assert short[-1] == "… and 4 more, which wait less"


def test_a_start_after_a_kill_is_a_fault_that_was_survived(make_run: Make) -> None:
    def start(name: str, begun: float, rows: int, **more: Any) -> list[dict[str, Any]]:
        facts = {"start": name, "world_size": 2, "started": begun}
        grows = {"grows": TRAINS | {"position": rows / 10}}
        return [{"facts": facts | {"rank": rank}, **grows, **more} for rank in range(2)]

    resumes = {"events": [(T0 + 51, "resume", {"epoch": 0, "position": 640})]}
    killed = start("a", T0, 800)
    page = render(make_run(*killed, *start("b", T0 + 50, 900, **resumes)))
    (line,) = re.findall(r"<td>train, start 2</td><td>([^<]*)</td>", page)
    assert line == "start 1 ended after 800 rows of epoch 0; 40 s later the run continued with row 640 of epoch 0"


def test_of_a_first_batch_no_rate_is_shown(make_run: Make) -> None:
    run = make_run({"grows": {"rows": 8, "batches": 0.1, "wait_s": 1.0, "wait_start_s": 1.0, "position": 8}})
    assert progress(run).describe() == "waiting 100% (for starting)"


def test_a_pass_that_is_left_is_recorded_up_to_there(images_uri: str, tmp_path: Path) -> None:
    """Ray ends the process of a training function that returns."""
    loader = raylance.dataset(images_uri, columns=["id"]).loader(runtime="threads", record=str(tmp_path))
    for step, _ in enumerate(loader.iter_batches(global_batch_size=50)):
        if step == 7:
            break
    (record,) = read_run(tmp_path).records
    assert record.at("batches", record.last) == 8
    loader.close()


def test_starts_of_a_run_that_was_copied_are_in_their_order(images_uri: str, tmp_path: Path) -> None:
    """Files of a copy are written in any order."""
    data = raylance.dataset(images_uri, columns=["id"])
    for _ in range(2):
        with data.loader(runtime="threads", record=str(tmp_path)) as loader:
            drain(loader, 100)
            loader.record()
    begun = [record.started for record in read_run(tmp_path).records]
    assert begun == sorted(begun)
    for number, path in enumerate(sorted((tmp_path / "raylance").glob("*.arrow"), reverse=True)):
        os.utime(path, (T0 + number, T0 + number))
    assert [record.started for record in read_run(tmp_path).records] == begun


def test_a_run_is_named_by_a_path_too_and_not_by_a_file(make_run: Make, tmp_path: Path) -> None:
    make_run({"grows": TRAINS})
    out = raylance.report_run(tmp_path / "r", tmp_path / "there.html")
    assert out == str(tmp_path / "there.html")
    assert str(raylance.explain_run(tmp_path / "r"))
    with pytest.raises(ConfigError, match=r"there\.html"):
        raylance.explain_run(tmp_path / "there.html")


def test_top_shows_it_and_the_verdict(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run({"grows": TRAINS})
    assert top.main([str(tmp_path / "r"), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "run r, " in shown
    assert "epoch 0, 800/1,000 rows" in shown
    assert "decoding is the limit" in shown
    assert "ended" not in shown
    make_run({"grows": TRAINS, "ended": T0 + 10})
    assert top.main([str(tmp_path / "r"), "--once"]) == 0
    assert re.search(r"run r, [\d:]+, ended: epoch 0, 800/1,000 rows", capsys.readouterr().out)
    assert top.main([str(tmp_path), "--once"]) == 2
    assert "holds no record" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        top.main([str(tmp_path / "r"), "--every", "0"])
    assert "--every 0: give seconds" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_watching_shows_what_is_new_and_moves_one_line(
    images_uri: str, tmp_path: Path, kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real stream, watched from its start; what happens to it is shown once."""
    monkeypatch.setattr(watching, "_LOCAL_S", 0.1)
    monkeypatch.setattr(watching, "_LOG_S", 0.0)
    folder, out = str(tmp_path / "runs" / "images"), kind()
    data = raylance.dataset(images_uri, decode=raylance.Image("image", size=16))
    with raylance.watch(folder, epochs=2, file=out), data.loader(runtime="threads", record=folder) as loader:
        for _epoch in range(2):
            drain(loader, 100, 0.03)
            metrics = {"epoch": loader.epoch, "loss": 0.5, "name": "x"}
            with consumer_of(loader).recorder.reporting(metrics, has_checkpoint=False):
                pass
    shown = out.getvalue()
    assert shown.count("epoch 1: loss 0.5") == shown.count("epoch 2: loss 0.5") == 1
    assert re.search(r"epoch [01] of 2.*rows/s, waiting \d+%", shown)
    assert ("\r" in shown) == (kind is Terminal)
    assert kind is not Terminal or re.search(r"100%\|[#█]+\| epoch 1 of 2: 900/900 rows", shown)


def test_the_length_of_an_epoch_is_that_of_its_present_weights(
    write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    parts = [raylance.dataset(write_dataset(pa.table({"id": [*range(count)]}))) for count in (100, 300)]
    mixed, shown = raylance.mix({"a": (parts[0], 1), "b": (parts[1], 1)}), list[int]()
    with mixed.loader(runtime="threads", record=str(tmp_path / "run")) as loader:
        for step, _ in enumerate(loader.iter_batches(global_batch_size=10)):
            if step in (1, 8):
                loader.record()
                shown.append(progress(read_run(str(tmp_path / "run"))).epoch_rows)
            if step == 4:
                loader.reweight({"a": 1, "b": 3})
    assert shown == [200, 350]
    assert loader.global_step == 35


def test_changed_weights_and_steps_that_were_passed_over_are_shown(
    write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    parts = [raylance.dataset(write_dataset(pa.table({"id": [*range(100)]}))) for _ in range(2)]
    folder, out = str(tmp_path / "run"), io.StringIO()
    mixed = raylance.mix({"a": (parts[0], 1), "b": (parts[1], 1)}, stop=160)
    with raylance.watch(folder, file=out), mixed.loader(runtime="threads", record=folder) as loader:
        for step, _ in enumerate(loader.iter_batches(global_batch_size=8)):
            if step == 3:
                loader.reweight({"a": 3, "b": 1}, reason="loss of a")
            if step == 5:
                loader.skip(4, reason="loss\nspike")
        assert loader.global_step == 20
    assert "b 0.25 from epoch 0, position 32 on (loss of a)" in out.getvalue()
    assert "4 steps from epoch 0, position 48 on (loss spike)" in out.getvalue()
    assert raylance.prove_run(folder).ok
    raylance.report_run(folder, tmp_path / "report.html")  # with marks for both


def test_a_folder_that_no_record_came_to_is_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    with raylance.watch(str(tmp_path / "mistyped"), file=out):
        pass
    assert "no record of a loader came to" in out.getvalue()


def test_what_was_there_before_is_not_watched(make_run: Make, tmp_path: Path) -> None:
    """An earlier start, by a clock that is ahead, and one that continues it, by one that is late."""
    before = {"facts": {"started": T0 + 3600}, "grows": TRAINS, "events": [(T0 + 3601, "fault", "of before")]}
    make_run(before)
    out = io.StringIO()
    with raylance.watch(str(tmp_path / "r"), file=out):
        events = [(T0, "resume", {"epoch": 0, "position": 30}), (T0 + 1, "fault", "of now")]
        make_run({"grows": TRAINS | {"position": 50}, "events": events})
    shown = out.getvalue()
    assert "of before" not in shown
    assert "train, rank 0: of now\n" in shown
    assert "epoch 0: 500/1,000 rows" in shown


def test_faults_and_bad_rows_are_shown_while_it_runs(make_run: Make, tmp_path: Path) -> None:
    out, now = io.StringIO(), time.time()
    with raylance.watch(str(tmp_path / "r"), file=out):
        make_run({
            "facts": {"started": now + 1}, "grows": TRAINS | {"masked_rows": 1},
            "events": [(now + 2, "fault", "a helper is replaced"), (now + 3, "error", "BadRowError: x")],
            "bad_rows": [(7, "image", "OSError: cut")],
        })  # fmt: skip
    shown = out.getvalue()
    assert "train, rank 0: a helper is replaced\n" in shown
    assert "train, rank 0: BadRowError: x\n" in shown
    assert "train: image of row offset 7 is masked, OSError: cut\n" in shown


def test_bad_rows_of_mixtures_are_named_by_their_own_offset(make_run: Make, tmp_path: Path) -> None:
    out, now = io.StringIO(), time.time()
    facts = {"started": now + 1, "sources": ["a (/a.lance)", "b (/b.lance)"]}
    with raylance.watch(str(tmp_path / "r"), file=out):
        make_run({
            "facts": facts, "grows": TRAINS | {"masked_rows": 1}, "bad_rows": [((1 << 48) + 7, "image", "cut")],
        })  # fmt: skip
    assert "train: image of row offset 7 of b (/b.lance) is masked, cut\n" in out.getvalue()
    assert ">7</td><td>image</td><td>b (/b.lance)</td>" in render(read_run(str(tmp_path / "r")))


def slowly(batch: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.004 * len(batch["label"]))
    return {"image": batch["image"], "label": batch["label"]}


@pytest.fixture(scope="module")
def limited(write_dataset: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a run that is limited by a transform that sleeps."""
    images = write_dataset(pa.table({"image": pa.array(make_images(100), pa.binary()), "label": np.arange(100) % 7}))
    folder = str(tmp_path_factory.mktemp("runs") / "decoding")
    data = raylance.dataset(images, decode=raylance.Image("image", size=8), transform=slowly, remainder="ragged")
    with data.loader(num_decoders=1, runtime="threads", record=folder) as loader:
        drain(loader, 10, 0.002)
    return folder


def test_a_transform_that_waits_is_named_and_may_have_more_decoders_than_cpus(limited: str) -> None:
    (record,) = read_run(limited).records
    assert 0.5 * record.latest("decode_s") < record.latest("transform_s") <= record.latest("decode_s")
    assert 0 < record.latest("decode_cpu_s") < record.latest("transform_s")
    verdict = read_run(limited).verdict("data")
    assert "your transform=" in verdict.summary
    assert "num_decoders=2" in "\n".join(verdict.advice)


def test_first_rows_with_nulls_are_shown(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    """pyarrow's batches carry nulls, which no array does."""
    rows = pa.table({"id": [1, None, 3, 4], "blob": pa.array([b"x" * (5 << 20)] * 4)})
    folder, data = str(tmp_path / ".hidden" / "run"), raylance.dataset(write_dataset(rows))
    with data.loader(runtime="threads", record=folder) as loader:
        (batch,) = loader.iter_batches(global_batch_size=4, batch_format="pyarrow")
        del batch
    (record,) = read_run(folder).records
    assert record.ended
    assert "<td>None</td>" in read_first_rows(read_run(folder), record)


# ---- the page


def test_a_page_shows_it_all_and_needs_nothing_from_elsewhere(limited: str, tmp_path: Path) -> None:
    where = raylance.report_run(limited, str(tmp_path / "o.html"))
    assert where == str(tmp_path / "o.html")
    page = Path(where).read_text()
    assert "Decoding is the limit: 1 decoder delivers" in page
    assert "every selected row exactly once" in page
    assert "<td>all ranks together</td><td>0</td>" in page
    assert "correlation with the next epoch" in page, "the dataset was opened again"
    pictures = re.findall(r'src="data:image/(\S+);base64,([^"]+)"', page)
    assert len(pictures) == page.count("<img ") >= 6
    for kind, data in pictures:
        assert kind == "svg+xml" or PIL.Image.open(io.BytesIO(base64.b64decode(data))).size > (0, 0)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page, "a browser sees to it, too"
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "http://" not in re.sub(r"data:[^\"]*", "", page)
    assert raylance.report_run(limited).endswith("/decoding/report.html")


def test_bad_rows_are_shown_with_what_is_left_of_them(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    cells = make_images(40, size=(96, 128))
    cells[5], cells[6] = cells[5][: 3 * len(cells[5]) // 4], b"no image <at> all"
    uri = write_dataset(pa.table({"image": pa.array(cells, pa.binary())}))
    folder = str(tmp_path / "run")

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        if 9 in batch["_rowoffset"]:
            raise EOFError
        return batch

    decode = raylance.Image("image", size=16)
    data = raylance.dataset(uri, decode=decode, transform=transform, on_bad_row="mask", remainder="ragged")
    with data.loader(runtime="threads", record=folder) as loader:
        drain(loader, 8)
    page = Path(raylance.report_run(folder)).read_text()
    assert re.search(r'<td class="n">9</td><td>transform\(\)</td>', page)
    rows = re.findall(
        r'<td class="n">(\d+)</td><td>image</td><td>[^<]*</td><td>(.*?)</td><td>(.*?)</td>', page, re.DOTALL
    )
    assert sorted(row for row, _, _ in rows) == ["5", "6"]
    left = {row: made for row, made, _ in rows}
    assert left["5"].startswith("<img ")
    assert "no image &lt;at&gt; all" in left["6"]
    assert "3 times a row was handed out masked; 3 different ones are named. " in page
    shutil.rmtree(uri)
    assert "The dataset could not be opened for it" in Path(raylance.report_run(folder)).read_text()
    lance.write_dataset(pa.table({"image": pa.array(make_images(40, seed=1), pa.binary())}), uri)
    page = Path(raylance.report_run(folder)).read_text()
    assert "could not be opened for it (it was rewritten since: its files were " in page
    assert "what decodes of it" not in page, "rows of another dataset are no rows of this run"


def test_a_report_has_no_loader_of_its_process_take_damaged_rows(
    write_dataset: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While what is left of a damaged row is drawn, the same row is decoded beside it."""
    noise = np.random.default_rng(0).integers(0, 255, (10, 64, 64, 3), np.uint8)
    cells = [encode(pixels, "PNG") for pixels in noise]
    cells[5] = cells[5][: len(cells[5]) // 2]
    uri, folder = write_dataset(pa.table({"image": pa.array(cells, pa.binary())})), str(tmp_path / "run")
    data = raylance.dataset(uri, decode=raylance.Image("image", size=16), on_bad_row="mask", remainder="ragged")

    def masked() -> int:
        with data.loader(runtime="threads", record=folder if not seen else False) as loader:
            drain(loader, 10)
            return int(loader.stats()["masked_rows"])

    seen: list[int] = []
    seen.append(masked())
    shrink = PIL.Image.Image.thumbnail
    monkeypatch.setattr(PIL.Image.Image, "thumbnail", lambda *given: (seen.append(masked()), shrink(*given))[1])
    assert 'alt="what decodes of it"' in Path(raylance.report_run(folder)).read_text()
    assert seen == [1, 1]


def test_a_page_shows_no_password(make_run: Make) -> None:
    """pyarrow takes keys in URIs, and reports are handed on."""
    secret = "s3://me:hid/d@n@bucket/run"
    page = render(dataclasses.replace(make_run({"grows": TRAINS}), uri=secret))
    assert "s3://…@bucket/run" in page
    assert "hid/d" not in page


def test_a_run_that_failed_says_so_and_its_starts_are_counted(make_run: Make) -> None:
    """Two starts: the first ended with an error in mid-epoch; so did the second."""
    error = "BadRowError: column 'image' of row offset 7"
    waits = TRAINS | {"user_s": 5.0, "wait_s": 1.0, "wait_start_s": 1.0, "wait_read_s": 0, "wait_decode_s": 0}
    starts = [
        {"facts": {"started": T0 + 100 * start, "world_size": 1 + start}, "grows": waits, "events": [
            (T0 + 100 * start + 5, "error", error)]}
        for start in range(2)
    ]  # fmt: skip
    run = make_run(*starts)
    page = render(run)
    assert "The last start ended with an error." in page
    assert page.count("column &#39;image&#39; of row offset 7") == 3
    assert "<td>train, start 2</td><td>start 1 ended after 800 rows of epoch 0; 90 s later" in page
    assert "train: not all is proven, its records do not hold which rows were handed out" in page
    assert "1 and 2 ranks · 2 starts" in page
    continued = {"facts": {"started": T0 + 300, "world_size": 2}, "grows": TRAINS}
    assert "The last start ended" not in render(make_run(*starts, continued))
