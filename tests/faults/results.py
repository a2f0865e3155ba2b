"""How outcomes of the fault suite are shown: a line each, and the table of all."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

HEADERS = ("fault", "times", "phases", "seconds to continue: median", "worst", "Ray's: median", "worst")
Outcome = dict[str, Any]


def line(outcome: Outcome) -> str:
    injected = ", ".join(
        f"{each['kind']} ({each['phase']}: {each['whole_s']:.1f} s, Ray's {each['ray_s']:.1f})"
        for each in outcome["injected"]
    )
    verdict = "FAILED" if outcome["problems"] else "passed" if injected else "hit nothing"
    text = f"{outcome['name']:>7}  {verdict}  {outcome['took_s']:.0f} s  {outcome['workload']}: {injected or '-'}"
    return "\n".join([text, *[f"         {problem}" for problem in outcome["problems"]]])


def table(outcomes: Sequence[Outcome]) -> str:
    """A table in Markdown: by fault, how often it was injected, in which phases, and the pauses after it."""
    counted = [outcome for outcome in outcomes if outcome["injected"]]
    faults: dict[str, list[dict[str, Any]]] = {}
    for each in (each for outcome in counted for each in outcome["injected"]):
        faults.setdefault(each["kind"], []).append(each)
    rows = [HEADERS, ("---",) * len(HEADERS)]
    for kind, found in sorted(faults.items()):
        whole, rays = ([each[name] for each in found] for name in ("whole_s", "ray_s"))
        phases = Counter(each["phase"] for each in found).most_common()
        figures = [statistics.median(whole), max(whole), statistics.median(rays), max(rays)]
        in_phases = ", ".join(f"{phase} {count}" for phase, count in phases)
        rows.append((kind, str(len(found)), in_phases, *[f"{value:.1f}" for value in figures]))
    injected = sum(map(len, faults.values()))
    failed = [outcome["name"] for outcome in outcomes if outcome["problems"]]
    summary = (
        f"{len(counted)} schedules of {len({outcome['name'].rpartition(':')[0] for outcome in counted})} seeds, "
        f"{injected} faults; {len(outcomes) - len(counted)} more hit nothing. Failed: {', '.join(failed) or 'none'}."
    )
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", summary])
