"""How outcomes of the fault suite are shown: a line each, and the table of all."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

HEADERS = (
    "fault", "times", "phases", "rows lost", "twice", "altered", "hangs", "left", "seconds to continue: median",
    "worst", "Ray's: median", "worst",
)  # fmt: skip
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
    """A table in Markdown: by fault, how often it was injected and what became of it."""
    counted = [outcome for outcome in outcomes if outcome["injected"]]
    faults: dict[str, list[tuple[dict[str, Any], Outcome]]] = {}
    for outcome in counted:
        for each in outcome["injected"]:
            faults.setdefault(each["kind"], []).append((each, outcome))
    rows = [HEADERS, ("---",) * len(HEADERS)]
    for kind, found in sorted(faults.items()):
        whole = [each["whole_s"] for each, _ in found]
        rays = [each["ray_s"] for each, _ in found]
        owners = {outcome["name"]: outcome for _, outcome in found}.values()
        sums = [sum(outcome["counts"].get(name, 0) for outcome in owners) for name in ("lost", "twice", "altered")]
        sums.append(sum(any(problem.startswith("hangs") for problem in outcome["problems"]) for outcome in owners))
        sums.append(sum(sum(outcome["left"].values()) for outcome in owners))
        phases = Counter(each["phase"] for each, _ in found)
        figures = [statistics.median(whole), max(whole), statistics.median(rays), max(rays)]
        rows.append((
            kind, str(len(found)), ", ".join(f"{phase} {count}" for phase, count in phases.most_common()),
            *map(str, sums), *[f"{value:.1f}" for value in figures],
        ))  # fmt: skip
    injected = sum(map(len, faults.values()))
    failed = [outcome["name"] for outcome in outcomes if outcome["problems"]]
    summary = (
        f"{len(counted)} schedules of {len({outcome['name'].rpartition(':')[0] for outcome in counted})} seeds, "
        f"{injected} faults; {len(outcomes) - len(counted)} more hit nothing. Failed: {', '.join(failed) or 'none'}."
    )
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", summary])
