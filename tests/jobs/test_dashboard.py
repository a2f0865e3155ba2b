"""Dashboard and alerts as files: each metric that they name is exported by raylance, and each expression parses."""

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from raylance.observe.metrics import LABELS, METRICS, TRAIN_ROW

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s" / "grafana"
DASHBOARD = json.loads((FOLDER / "raylance.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((FOLDER / "prometheus.rules").read_text(encoding="utf-8"))["groups"][0]["rules"]
KINDS = {f"ray_{metric.name}": metric.kind for metric in METRICS}  # Ray's prefix

SHOWN = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
VARIABLES = [
    re.fullmatch(r"label_values\((.*), \w+\)", variable["definition"])[1]
    for variable in DASHBOARD["templating"]["list"]
    if "definition" in variable
]
ASKED = [text for rule in RULES for note in rule["annotations"].values() for text in re.findall(r"`(topk.*?)`", note)]
EXPRESSIONS = [*SHOWN, *VARIABLES, *(rule["expr"] for rule in RULES), *ASKED]


def test_each_metric_and_each_label_that_is_named_is_exported() -> None:
    assert ASKED
    for expr in EXPRESSIONS:
        assert set(re.findall(r"\bray_\w+", expr)) <= KINDS.keys(), expr
        matchers = " ".join(re.findall(r"ray_\w+{(.*?)}", expr))
        assert set(re.findall(r"(\w+)(?:=~|!=|=)", matchers)) <= {*LABELS, "cause"}, expr
        assert {KINDS[name] for name in re.findall(r"(?:rate|increase)\((ray_\w+)", expr)} <= {"counter"}, expr
    for text in re.findall(r"\bray_raylance_\w+", (FOLDER / "raylance.json").read_text() + yaml.safe_dump(RULES)):
        assert text in KINDS, "in a description"


def test_each_expression_parses() -> None:
    """The parser checks the types, too: the rate of a single value is refused."""
    for expr in EXPRESSIONS:
        promql_parser.parse(
            expr.replace("$__rate_interval", "1m").replace("%q", '"a"')
        )  # as Grafana and the template fill in


def test_each_metric_is_shown_and_no_panel_adds_up_all_runs() -> None:
    assert {name for expr in SHOWN for name in re.findall(r"\bray_\w+", expr)} == KINDS.keys()
    assert all('$run"' in expr for expr in SHOWN)


def test_the_row_of_rays_own_dashboard_is_filled() -> None:
    panels = importlib.import_module("ray.dashboard.modules.metrics.dashboards.train_dashboard_panels")
    [row] = [row for row in panels.TRAIN_GRAFANA_ROWS if row.title == "Data Ingestion"]
    asked = {name for panel in row.panels for each in panel.targets for name in re.findall(r"ray_\w+", each.expr)}
    published = {f"ray_{metric.name}" for metric, _ in TRAIN_ROW}
    assert asked - published == {"ray_data_output_rows"}, "the operators of Ray Data"
    labels = {
        label for panel in row.panels for each in panel.targets for label in re.findall(r"by \((.*?)\)", each.expr)
    }
    assert {name.strip() for each in labels for name in each.split(",")} <= set(TRAIN_ROW[0][0].labels)


def test_kubernetes_can_hold_it() -> None:
    """`kubectl apply` keeps what it applied in an annotation, of 256 KiB at most."""
    assert (FOLDER / "raylance.json").stat().st_size < 200_000
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (made,) = kustomization["configMapGenerator"]
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
