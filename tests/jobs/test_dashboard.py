"""Owns the checks that dashboard and alerts name what there is, and that a real Prometheus answers their queries."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.grafana.source import command, panels
from k8s.grafana.source.expressions import CAUSES, Scope, limit, parts_of_time, rates_of_stages
from raylance.observe.diagnoses import DIAGNOSES, what_to_change
from raylance.observe.figures import RankFigures, training_rate
from raylance.observe.metrics import LABELS, METRICS
from raylance.observe.stats import NUMBERS
from tests.helpers import prometheus_api

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s" / "grafana"
DASHBOARD = json.loads((FOLDER / "raylance.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = yaml.safe_load((FOLDER / "prometheus.rules").read_text(encoding="utf-8"))["groups"][0]["rules"]
KINDS = {f"ray_{metric.name}": metric.kind for metric in METRICS}

SHOWN = [target["expr"] for _, target in prometheus_api.queries(DASHBOARD)]
VARIABLES = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
ALERTED = [rule["expr"] for rule in RULES] + [text for rule in RULES for text in rule["annotations"].values()]

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool, which comes with Prometheus")


def named(expr: str) -> set[str]:
    """The metrics of an expression."""
    return set(re.findall(r"\bray_\w+", expr))


def test_files_are_what_the_code_says() -> None:
    assert command.main(["--check"]) == 0, "run python -m k8s.grafana.source"


def test_a_file_that_is_not_current_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--folder", str(tmp_path)]) == 0
    assert command.main(["--folder", str(tmp_path), "--check"]) == 0
    (tmp_path / "alerts.yaml").write_text("groups: []")
    capsys.readouterr()
    assert command.main(["--folder", str(tmp_path), "--check"]) == 1
    assert "alerts.yaml" in capsys.readouterr().out


def test_expressions_name_metrics_that_there_are() -> None:
    for expr in SHOWN + VARIABLES + ALERTED:
        assert named(expr) <= KINDS.keys(), expr
        matchers = " ".join(re.findall(r"ray_\w+{(.*?)}", expr))
        assert set(re.findall(r"(\w+)(?:=~|!=|=)", matchers)) <= {*LABELS, "cause"}, expr


def test_every_metric_is_shown() -> None:
    assert set().union(*(named(expr) for expr in SHOWN)) == KINDS.keys()


def test_counters_are_rated_and_gauges_are_not() -> None:
    for expr in SHOWN + ALERTED:
        for name in re.findall(r"(?:rate|increase)\((ray_\w+)", expr):
            assert KINDS[name] == "counter", expr


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(KeyError, match="raylance_row_total"):
        Scope("", "5m").rate("row_total")


def test_causes_are_those_of_the_metrics() -> None:
    assert set(CAUSES) == {metric.cause for metric in METRICS} - {""}
    for cause in CAUSES:
        assert f"| **{cause}** | {DIAGNOSES[cause].means} | {what_to_change(cause)} |" in panels.TO_DO


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_how_to_read_it(panel: dict[str, Any]) -> None:
    assert len(panel["description"] if panel["type"] != "text" else panel["options"]["content"]) > 60
    for target in panel.get("targets", ()):
        assert target["datasource"]["uid"] == "${datasource}"
        assert '$run"' in target["expr"], "it would add up all runs"


def test_panels_fill_the_page() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, f"{panel['title']} lies on another one"
        taken |= cells
    assert len(taken) == 24 * (1 + max(y for _, y in taken))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "run", "dataset", "rank"]


def test_kubernetes_can_hold_it() -> None:
    """`kubectl apply` keeps what it applied in an annotation, of 256 KiB at most."""
    assert (FOLDER / "raylance.json").stat().st_size < 200_000
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (made,) = kustomization["configMapGenerator"]
    assert made["options"]["labels"] == {"grafana_dashboard": "1"}
    assert all((FOLDER / name).is_file() for name in [*made["files"], *kustomization["resources"]])
    rule = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((FOLDER / "prometheus.rules").read_text())
    monitor = yaml.safe_load((ROOT / "k8s" / "pod-monitor.ray.yaml").read_text())
    assert rule["metadata"]["labels"] == monitor["metadata"]["labels"], "one Prometheus selects both"


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
def test_kustomize_makes_a_dashboard_that_grafana_finds() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True)
    made = {doc["kind"]: doc for doc in yaml.safe_load_all(done.stdout)}
    assert made.keys() == {"ConfigMap", "PrometheusRule"}
    assert made["ConfigMap"]["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(made["ConfigMap"]["data"]["raylance.json"]) == DASHBOARD


def promtool(folder: Path, *words: str) -> None:
    done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_rules(folder: Path, tests: dict[str, Any]) -> None:
    """Has promtool make a test of the alerts, with a value a minute."""
    content = {"rule_files": [str(FOLDER / "prometheus.rules")], "tests": [{"interval": "1m", **tests}]}
    (folder / "test.yaml").write_text(yaml.safe_dump(content | {"evaluation_interval": "1m"}, allow_unicode=True))
    promtool(folder, "test", "rules", "test.yaml")


@needs_promtool
def test_promtool_takes_rules_and_configuration() -> None:
    promtool(FOLDER, "check", "rules", "prometheus.rules")
    promtool(FOLDER, "check", "config", "prometheus.yml")


# Of a run r whose dataset is train, one value a minute for an hour.
QUIET = {
    'ray_raylance_wait_seconds_total{cause="decoding",%s}': "0+2x60",
    'ray_raylance_wait_seconds_total{cause="reading",%s}': "0+1x60",
    "ray_raylance_train_seconds_total{%s}": "0+57x60",
    "ray_raylance_batches_total{%s}": "0+100x60",
    "ray_raylance_epoch{%s}": "0x60",
    "ray_raylance_inflight_bytes{%s}": "99x60",
    "ray_raylance_inflight_limit_bytes{%s}": "100x60",
}
SITUATIONS: dict[str, tuple[dict[str, str], dict[str, tuple[str, str]]]] = {
    "all is well": ({}, {}),
    "waits for decoders": (
        {"wait_seconds_total{cause=\"decoding\"": "0+29x60", "train_seconds_total{": "0+30x60",
         "inflight_bytes{": "50x60"},
        {"TrainerStarves": ("50%", "decoding")},
    ),
    "waits for storage, at the limit of bytes in flight": (
        {"wait_seconds_total{cause=\"reading\"": "0+28x60", "train_seconds_total{": "0+30x60"},
        {"TrainerStarves": ("50%", "reading"), "InFlightLimitHoldsHelpersBack": ("0.99", "")},
    ),
    "waited ten minutes ago": (
        {"wait_seconds_total{cause=\"reading\"": "0+57x14 798x46", "train_seconds_total{": "0x14 0+57x46"},
        {},
    ),
    "a single bad row": ({"bad_rows_total{": "_x25 1x35"}, {"BadRows": ("1", "")}),
    "a bad row, long ago": ({"bad_rows_total{": "_x5 1x55"}, {}),
    "helpers die": ({"helpers_replaced_total{": "_x18 1+1x42"}, {"HelpersCrashLoop": ("13", "")}),
    "helpers died, some": ({"helpers_replaced_total{": "_x20 1x5 3x35"}, {}),
    "a standstill": (
        {"batches_total{": "0+100x10 1000x50", "wait_seconds_total": "40x60", "train_seconds_total{": "600x60"},
        {"NoProgress": ("1", "")},
    ),
    "never a batch": ({"batches_total{": "_x60", "train_seconds_total{": "_x60"}, {"NoProgress": ("1", "")}),
    "its workers are gone": (
        {"batches_total{": "0+100x10 1000x50", "train_seconds_total{": "600x60", "wait_seconds_total": "40x60",
         "epoch{": "0x10 stale _x49"},
        {},
    ),
    "it has just begun": (
        {"batches_total{": "_x60", "train_seconds_total{": "_x60", "epoch{": "_x25 0x35", "wait_seconds_total": "_x60"},
        {},
    ),
}  # fmt: skip


def written(text: str, value: str, cause: str) -> str:
    """An annotation as Prometheus writes it."""
    text = text.replace("{{ $labels.run }}", "r").replace("{{ $labels.dataset }}", "train")
    text = re.sub(r"{{ \$value[^}]*}}", value, text)
    text = re.sub(r"{{ range [^}]*{[^}]*}[^}]*}}{{ .Labels.cause }}{{ end }}", cause, text)
    return re.sub(r"{{ range .*}}.*{{ end }}", what_to_change(cause) if cause else "", text)


@needs_promtool
@pytest.mark.parametrize("name", SITUATIONS)
def test_alerts_are_raised_when_they_should_be(name: str, tmp_path: Path) -> None:
    changes, raised = SITUATIONS[name]
    series = QUIET | {f"ray_raylance_{key}%s}}": values for key, values in changes.items() if key[-1] == "{"}
    for key, values in changes.items():
        series |= {old: values for old in series if old.startswith(f"ray_raylance_{key}")}
    found = []
    for rule in RULES:
        alert = rule["alert"].removeprefix("Raylance")
        labels = {"run": "r", "severity": rule["labels"]["severity"]}
        labels |= {} if alert == "NoProgress" else {"dataset": "train"}
        texts = {key: written(text, *raised.get(alert, ("", ""))) for key, text in rule["annotations"].items()}
        expected = [{"exp_labels": labels, "exp_annotations": texts}] if alert in raised else []
        found.append({"eval_time": "30m", "alertname": rule["alert"], "exp_alerts": expected})
    of = 'run="r",dataset="train",rank="0"'
    given = [{"series": key % of, "values": values} for key, values in series.items()]
    check_rules(tmp_path, {"input_series": given, "alert_rule_test": found})


@needs_promtool
def test_training_alone_is_what_the_verdict_says_of_ranks_that_keep_step(tmp_path: Path) -> None:
    """Rank 1 waits for rows, and ranks 0 and 2 for rank 1, in collective operations; rank 3 has
    ended, and its counters are still there."""
    trained, waited = [4.0, 1.0, 4.0], [0.0, 3.0, 0.0]
    series = {}
    for rank in range(4):
        of = f'{{run="r",dataset="train",rank="{rank}"}}'
        grown = {"rows_total": 600.0, "batches_total": 6.0, "train_seconds_total": 6.0}
        if rank < 3:
            grown["train_seconds_total"] = 6 * trained[rank]
            grown |= {"wait_seconds_total": 6 * waited[rank]} if waited[rank] else {}
        series |= {
            f"ray_raylance_{name}{of}": f"0+{each:g}x60" if rank < 3 else f"{each:g}x60" for name, each in grown.items()
        }
    base = dict.fromkeys(NUMBERS, 0.0) | {"rows": 600.0, "batches": 6.0}
    parts = [
        RankFigures(figures=base | {"user_s": 6 * train_s, "wait_read_s": 6 * wait_s}, facts={"rank": rank})
        for rank, (train_s, wait_s) in enumerate(zip(trained, waited, strict=True))
    ]
    shown = re.match(r"clamp_max\((.*), 5 \* scalar", rates_of_stages(Scope('run="r"', "5m"))["training"])
    assert shown
    wanted = [{"labels": "{}", "value": training_rate(parts)}]
    given = [{"series": key, "values": values} for key, values in series.items()]
    asked = [{"expr": shown[1], "eval_time": "30m", "exp_samples": wanted}]
    check_rules(tmp_path, {"input_series": given, "promql_expr_test": asked})


def answers(source: prometheus_api.Prometheus, values: dict[str, str]) -> dict[str, list[prometheus_api.Series]]:
    """What each query of the dashboard gives."""
    return {
        f"{title} {target['refId']}": source.values(
            prometheus_api.filled(target["expr"], values), now=target["instant"], step=1
        )
        for title, target in prometheus_api.queries(DASHBOARD)
    }


# Ray with endpoints and files of its own: what else runs on this machine stays apart.
TRAINING = """
import runpy, subprocess, sys, ray
data, folder, *arguments = sys.argv[1:]
made = [sys.executable, "jobs/create_dataset.py", "demo", "--out", data, "--no-progress"]
subprocess.run(made, check=True)
ray.init(address="local", num_cpus=4, include_dashboard=True, _temp_dir=folder, log_to_driver=False)
sys.argv = ["jobs/train_images.py", "--data", data, *arguments]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A run of train_images that runs until it is ended; gives the folder where Ray writes its nodes, and it."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # a short name: Ray's sockets lie in it
    arguments = f"--storage-path {tmp_path / 'runs'} --run-name digits --epochs 100000 --no-progress --num-workers 2"
    arguments += " --num-decoders 1 --checkpoint-every-steps 10"
    environment = os.environ | {"RAY_metrics_report_interval_ms": "2000", "RAY_ADDRESS": "local"}
    command = [sys.executable, "-c", TRAINING, tmp_path / "digits.lance", folder, *arguments.split()]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield folder, process
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def prometheus(training: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path) -> Iterator[str]:
    """A Prometheus with the configuration of k8s/grafana, for that Ray, but that it asks each second."""
    text = (FOLDER / "prometheus.yml").read_text()
    assert "/tmp/ray/" in text
    text = text.replace("/tmp/ray/", f"{training[0]}/").replace("_interval: 10s", "_interval: 1s")
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(FOLDER / "prometheus.rules", tmp_path)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    options = [f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address={address}"]
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", "--config.file=prometheus.yml", *options], cwd=tmp_path, stdout=log, stderr=log
        )
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus to ask")
def test_a_real_run_answers_every_query(training: tuple[Path, subprocess.Popen[bytes]], prometheus: str) -> None:
    values, deadline = {"run": "digits", "window": "15s"}, time.monotonic() + 300
    missing = ["anything"]
    while missing and training[1].poll() is None and time.monotonic() < deadline:
        time.sleep(5)
        source = prometheus_api.Prometheus(url=prometheus, start=time.time() - 60, end=time.time())
        try:
            found = answers(source, values)
        except OSError:
            continue  # it is starting
        missing = [title for title, series in found.items() if not series]
    assert not missing, f"no data for {missing}"
    scope = Scope('run="digits",dataset="train"', "15s")
    ((labels, _),) = source.values(limit(scope), now=True)
    assert labels["cause"] in {*CAUSES, "training"}
    parts = [source.values(expr, now=True)[0][1][0][1] for expr in parts_of_time(scope).values()]
    assert sum(parts) == pytest.approx(1)
    ranks = source.values(scope.keeping("rank").rate("rows_total"), now=True)
    assert {labels["rank"] for labels, _ in ranks} == {"0", "1"}
    for definition in VARIABLES:
        asked, label = re.fullmatch(r"label_values\((.*), (\w+)\)", definition).groups()
        known = source.ask("series", **{"match[]": prometheus_api.filled(asked, values), "start": source.start})
        assert {"run": "digits", "dataset": "train", "rank": "0"}[label] in {one[label] for one in known}
    (group,) = source.ask("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert len(group["rules"]) == len(RULES)
