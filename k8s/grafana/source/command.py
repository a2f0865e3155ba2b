"""Owns the command line of the dashboard's and the alerts' files: it writes them, or checks that they are current.

python -m k8s.grafana.source            # writes k8s/grafana/: the dashboard, and the alerts in both of their forms
python -m k8s.grafana.source --check    # exit status 1 when they are not what this would write

raylance.json        the dashboard: import it, or have it provisioned (docs/operations.md, "Metrics")
alerts.yaml          the alerts for the Prometheus operator
prometheus.rules     the same alerts as a rule file, which prometheus.yml beside it loads

Expressions name metrics of raylance/observe/metrics.py only; the tests ask a real Prometheus for each.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from k8s.grafana.source import alerts, panels

FOLDER = Path(__file__).resolve().parents[1]
MADE = "Made by `python -m k8s.grafana.source`; changes here are lost."
OPERATOR = "Change the label `release` to what your Prometheus selects rules by (`ruleSelector`)."


def contents() -> dict[str, str]:
    """What is written, by file name."""
    return {
        "raylance.json": json.dumps(panels.dashboard(), indent=1, ensure_ascii=False) + "\n",
        "alerts.yaml": _yaml(alerts.prometheus_rule(), MADE, OPERATOR),
        "prometheus.rules": _yaml(alerts.rules(), MADE),
    }


def main(argv: list[str] | None = None) -> int:
    """Writes or checks; returns the exit status."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m k8s.grafana.source", description=__doc__, formatter_class=as_written
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when a file is not current")
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help="where the files are (%(default)s)")
    args = parser.parse_args(argv)
    made = contents()
    stale = [name for name, content in made.items() if _read(args.folder / name) != content]
    if args.check:
        for name in stale:
            print(f"{args.folder / name} is not current: it shows an older state. Run `python -m k8s.grafana.source`")
        return 1 if stale else 0
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (args.folder / name).write_text(made[name], encoding="utf-8")
        print(f"wrote {args.folder / name}")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _yaml(content: dict[str, Any], *comments: str) -> str:
    said = "".join(f"# {comment}\n" for comment in comments)
    return said + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110)


if __name__ == "__main__":
    sys.exit(main())
