"""Owns the command `python -m k8s.grafana.source`; `command` has what it writes."""

import sys

from k8s.grafana.source.command import main

if __name__ == "__main__":
    sys.exit(main())
