"""Owns the alerts: when somebody is called, and what they are told; never who."""

from typing import Any

from k8s.grafana.source import expressions
from k8s.grafana.source.expressions import NAMES, Scope

OF_A_RUN, OF_A_DATASET = "run", "run, dataset"
FIXES = {
    "reading": 'num_readers="auto", fewer columns, smaller rows by jobs/materialize.py, or data nearer to the nodes',
    "decoding": "num_decoders=(2, 16) and CPUs for them, or smaller images by jobs/materialize.py --shorter-side",
    "finishing": "a cheaper collate_fn, or a larger prefetch_batches",
    "starting": "see `ray status`: helpers that find no place, or nodes that boot; loader.prepare(…) hides their start",
}


def _cause(then: str) -> str:
    """What the trainer waits for most, in an annotation: Prometheus asks for it when the alert is raised.

    Args:
        then: What is said of it, in Go's templates, as .Labels.cause.
    """
    name = NAMES["raylance_wait_seconds_total"]
    asked = f"topk(1, sum by (cause) (rate({name}{{run=%q,dataset=%q}}[10m])))"
    return f"{{{{ range printf `{asked}` $labels.run $labels.dataset | query }}}}{then}{{{{ end }}}}"


def _fix() -> str:
    """What helps against it, for the same place."""
    chosen = [f'{{{{ if eq .Labels.cause "{cause}" }}}}{fix}{{{{ end }}}}' for cause, fix in FIXES.items()]
    return _cause("".join(chosen))


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
    alerts = [
        _alert(
            "TrainerStarves", f"{share} > 0.2", "10m", "warning",
            f"{of}: the trainers wait for {{{{ $value | humanizePercentage }}}} of their time, most of it for {cause}",
            f"Training gets slower by as much. What helps against waiting for {cause}: {_fix()}. The dashboard "
            "'raylance' shows it by rank, and loader.explain() says how much of it.",
        ),
        _alert(
            "InFlightLimitHoldsHelpersBack", f"{full} > 0.95 and on ({OF_A_DATASET}) ({share} > 0.2)", "10m", "warning",
            f"{of}: bytes in flight are at their limit while the trainers wait",
            "The limit on the bytes in flight keeps helpers idle that could work. Raise max_inflight_bytes, as far "
            "as the object store has room for that much of each rank and dataset; or lower num_decoders or batch "
            "sizes, if it has not.",
        ),
        _alert(
            "HelpersCrashLoop", f"{scope.during('15m').grown('helpers_replaced_total')} > 5", "0m", "warning",
            f"{of}: {{{{ $value }}}} helper actors were replaced in 15 minutes",
            "Helpers die or hang again and again; each costs seconds, and the fourth death on the same rows ends the "
            "run. Mostly it is memory: lower max_window_bytes (shard actors), max_inflight_bytes or num_decoders, or "
            "give the nodes more. Else a row that crashes its decoder, or nodes that are taken away: `ray list "
            "actors --filter state=DEAD --detail` gives the causes of death, and the run's log the rows.",
        ),
        _alert(
            "NoProgress", f"({lives} and on (run) {begun}) unless on (run) ({moves})", "1m", "critical",
            "run {{ $labels.run }}: no batch for 15 minutes, though its workers live",
            "No rank of the run has got a batch of any dataset for a quarter of an hour, though its workers still "
            "publish metrics. Either training hangs (a collective of which one rank is missing; a compilation; a "
            "checkpoint that does not end): `ray stack` on the workers' nodes shows where. Or the loader waits for a "
            "helper, storage or CPUs: the log names what it waits for, and `ray status` what has found no place.",
        ),
        _alert(
            "BadRows", f"{scope.during('15m').grown('bad_rows_total')} > 0", "0m", "warning",
            f"{of}: {{{{ $value }}}} rows of the last 15 minutes could not be decoded, and were handed out as zeros",
            "The run goes on (on_bad_row='mask'), and such rows have _valid False: a loss that does not look at it "
            "learns from black images. loader.stats() and the log name rows and reasons: mend them in the dataset, "
            "or leave them out with filter=.",
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
