"""The figures of ranks that a verdict is given on."""

from typing import Any

from raylance.observe.figures import RankFigures
from raylance.observe.stats import NUMBERS


def figures(**changes: float) -> dict[str, float]:
    return dict.fromkeys((*NUMBERS, "epoch", "position"), 0.0) | changes


OPTIONS = {"decoder_cpus": 1.0}


def part(rank: int = 0, facts: dict[str, Any] | None = None, **changes: float) -> RankFigures:
    """A rank that took 1,000 rows in ten batches; reading and decoding them took a second each."""
    base = {
        "rows": 1000.0,
        "batches": 10.0,
        "read_bytes": 1e6,
        "storage_s": 1.0,
        "decoded_rows": 1000.0,
        "decode_s": 1.0,
    }
    known = {"rank": rank, "row_bytes": 1000.0, "order": "window", "options": OPTIONS, "cluster_cpus": 4.0}
    return RankFigures(
        figures=figures(**(base | {"readers": 1.0, "decoders": 1.0} | changes)), facts=known | (facts or {})
    )
