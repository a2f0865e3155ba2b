"""Owns the alerts: their queries, and how urgent they are; what they say comes from `raylance.observe.diagnoses`."""

from typing import Any

from k8s.grafana.source import expressions
from k8s.grafana.source.expressions import CAUSES, NAMES, Scope
from raylance.observe.diagnoses import DIAGNOSES, what_to_change

OF_A_RUN, OF_A_DATASET = "run", "run, dataset"


def _cause(then: str) -> str:
    """What the trainer waits for most, in an annotation: Prometheus asks for it when the alert is raised. `then` is the
    text about it in Go's templates, as .Labels.cause.
    """
    name = NAMES["raylance_wait_seconds_total"]
    asked = f"topk(1, sum by (cause) (rate({name}{{run=%q,dataset=%q}}[10m])))"
    return f"{{{{ range printf `{asked}` $labels.run $labels.dataset | query }}}}{then}{{{{ end }}}}"


def _alert(name: str, expr: str, for_: str, severity: str, summary: str, description: str) -> dict[str, Any]:
    return {
        "alert": f"Raylance{name}",
        "expr": expr,
        "for": for_,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }


def rules() -> dict[str, Any]:
    """What a rule file of Prometheus holds."""
    scope = Scope("", "5m", OF_A_DATASET)
    share = expressions.waiting_share(scope)
    full = f"avg by ({OF_A_DATASET}) ({scope.series('inflight_bytes')} / {scope.series('inflight_limit_bytes')})"
    lives = f"count by (run) ({scope.series('epoch')})"
    moves = f"sum by (run) (increase({scope.series('batches_total')}[15m])) > 0"
    begun = f"count by (run) ({scope.series('epoch')} offset 15m)"
    of = "run {{ $labels.run }}, dataset {{ $labels.dataset }}"
    cause = _cause("{{ .Labels.cause }}")
    chosen = [f'{{{{ if eq .Labels.cause "{name}" }}}}{what_to_change(name)}{{{{ end }}}}' for name in CAUSES]
    changes = _cause("".join(chosen))
    alerts = [
        _alert(
            "TrainerStarves", f"{share} > 0.2", "10m", "warning",
            f"{of}: the trainers wait for {{{{ $value | humanizePercentage }}}} of their time, most of it for {cause}",
            f"Training gets slower by as much. Against waiting for {cause}: {changes}. The dashboard 'raylance' "
            "shows the waiting by rank, and loader.explain() gives the numbers.",
        ),
        _alert(
            "InFlightLimitHoldsHelpersBack", f"{full} > 0.95 and on ({OF_A_DATASET}) ({share} > 0.2)", "10m", "warning",
            f"{of}: {DIAGNOSES['inflight_limit'].means}",
            f"Helpers are idle that could work. What to change: {what_to_change('inflight_limit')}.",
        ),
        _alert(
            "HelpersCrashLoop", f"{scope.during('15m').grown('helpers_replaced_total')} > 5", "0m", "warning",
            f"{of}: {DIAGNOSES['crash_loop'].means}, {{{{ $value }}}} in 15 minutes",
            "Each death costs seconds, and the fourth on the same rows ends the run. Causes, and what to change: "
            f"{what_to_change('crash_loop')}.",
        ),
        _alert(
            "NoProgress", f"({lives} and on (run) {begun}) unless on (run) ({moves})", "1m", "critical",
            f"run {{{{ $labels.run }}}}: {DIAGNOSES['no_progress'].means}",
            "No rank of the run has got a batch of any dataset for a quarter of an hour, though its workers still "
            f"publish metrics. Causes, and where to look: {what_to_change('no_progress')}.",
        ),
        _alert(
            "BadRows", f"{scope.during('15m').grown('bad_rows_total')} > 0", "0m", "warning",
            f"{of}: {{{{ $value }}}} {DIAGNOSES['bad_rows'].means}, in the last 15 minutes",
            f"The run continues. What to change: {what_to_change('bad_rows')}.",
        ),
    ]  # fmt: skip
    return {"groups": [{"name": "raylance", "rules": alerts}]}


def prometheus_rule() -> dict[str, Any]:
    """The same for the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "raylance", "labels": {"release": "prometheus"}},
        "spec": rules(),
    }
