"""What a disturbed run was trained on, from what its ranks wrote down."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults import workloads

Event = dict[str, Any]
Rows = list[tuple[int, int]]  # with their checksums
Line = dict[tuple[int, int], Rows]  # by epoch and step


@dataclasses.dataclass
class Start:
    """One start of the ranks by Ray Train."""

    world: int
    begins: tuple[int, int] | None  # epoch and position; None if no rank came so far
    steps: dict[tuple[int, int], list[tuple[int, Rows]]]  # by epoch and step: group and rows of each rank


def read(folder: Path) -> dict[str, list[Event]]:
    """Events of each file of a folder, by its name; a line that was cut off is left out."""
    files = {}
    for path in sorted(folder.glob("*.jsonl")):
        files[path.stem] = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return files


def starts_of(files: dict[str, list[Event]], problems: list[str]) -> list[Start]:
    """The starts of a run, the first one first."""
    ranks = [events for name, events in files.items() if name.startswith("rank") and events]
    starts: dict[str, Start] = {}
    for events in sorted(ranks, key=lambda events: _at(events[0])):
        first = events[0]
        start = starts.setdefault(first["start"], Start(first["world"], None, {}))
        for event in events:
            if event["what"] == "restored":
                begins = tuple(event["at"])
                if event["saved"] is not None and tuple(event["saved"]) != begins:
                    problems.append(f"the model was saved at {event['saved']}, and the loader stands at {begins}")
                if start.begins not in (None, begins):
                    problems.append(f"ranks of one start begin at {start.begins} and at {begins}")
                start.begins = begins
            elif event["what"] == "step":
                rows = [(row, crc) for row, crc in event["rows"]]
                start.steps.setdefault((event["epoch"], event["step"]), []).append((event["group"], rows))
    return list(starts.values())


def committed(starts: list[Start], batch: int, problems: list[str]) -> Line:
    """The global batches of the line of history: without what later starts rolled back.

    A step counts if no later start begins at it or before it.
    """
    line: Line = {}
    limit: tuple[int, int] | None = None
    for start in reversed([start for start in starts if start.begins is not None]):
        for at, parts in sorted(start.steps.items()):
            if limit is not None and at >= limit:
                continue
            groups: dict[int, Rows] = {}
            for group, rows in parts:
                if groups.setdefault(group, rows) != rows:
                    problems.append(f"peers got other rows at epoch {at[0]}, step {at[1]}")
            if len(parts) != start.world:
                problems.append(f"{len(parts)} of {start.world} ranks took epoch {at[0]}, step {at[1]}, and it counts")
            if at in line:
                problems.append(f"epoch {at[0]}, step {at[1]} was trained on twice")
            line[at] = [row for group in sorted(groups) for row in groups[group]]
        assert start.begins is not None
        limit = (start.begins[0], start.begins[1] // batch)
    return line


def compare(line: Line, wanted: Sequence[Sequence[Rows]]) -> dict[str, int]:
    """How many rows were lost, came twice or were altered, and how many global batches differ."""
    counts = Counter({"lost": 0, "twice": 0, "altered": 0, "other batches": 0})
    for epoch, steps in enumerate(wanted):
        due = Counter(row for step in steps for row, _ in step)
        crcs = {row: crc for step in steps for row, crc in step}
        given = [(row, crc) for at, rows in line.items() if at[0] == epoch for row, crc in rows]
        got = Counter(row for row, _ in given)
        counts["lost"] += (due - got).total()
        counts["twice"] += (got - due).total()
        counts["altered"] += sum(row in crcs and crcs[row] != crc for row, crc in given)
        for number, step in enumerate(steps):
            counts["other batches"] += [row for row, _ in line.get((epoch, number), [])] != [row for row, _ in step]
    return dict(counts)


def _of_ranks(files: dict[str, list[Event]]) -> list[Event]:
    """Events of all ranks and starts, the first one first."""
    return sorted((e for name, found in files.items() if name.startswith("rank") for e in found), key=_at)


def phase_at(files: dict[str, list[Event]], at_s: float, lost_s: Sequence[float]) -> str:
    """In which phase of the run a moment lies, by what its ranks had written until then, and when ranks were lost."""
    events = _of_ranks(files)
    before = [event for event in events if event["at_s"] <= at_s]
    begun = max((event["at_s"] for event in before if event["what"] == "start"), default=0.0)
    if any(begun < lost < at_s for lost in lost_s):
        return "restart"
    if not before:
        return "start"
    if len(before) == len(events):
        return "end"
    last = before[-1]
    names = {"start": "start", "restored": "first batch", "report": "report", "validate": "validation"}
    if last["what"] == "validated" or last.get("step") == workloads.STEPS - 1:
        return "epoch's turn"
    return names.get(last["what"], "mid-window")


@dataclasses.dataclass(frozen=True)
class Pause:
    """What a fault cost."""

    whole_s: float  # the longest time without a step, in which the fault lies or which came next
    ray_s: float  # the part of `whole_s` until Ray Train called the training function again; 0 if it did not have to


def pause_after(files: dict[str, list[Event]], at_s: float, until_s: float) -> Pause:
    """The longest pause between steps of the run from a fault to the next one, or to the end."""
    events = _of_ranks(files)
    works = ("step", "reported", "validated", "end")
    marks = [event["at_s"] for event in events if event["what"] in works]
    earlier = max((mark for mark in marks if mark <= at_s), default=at_s)
    ends = [mark for mark in marks if at_s < mark] or [at_s]
    times = [max(earlier, at_s), *[mark for mark in ends if mark <= until_s or mark == ends[0]]]
    gap, begin, end = max(
        (after - before, before, after) for before, after in zip(times, times[1:] or times, strict=False)
    )
    starts = [event["at_s"] for event in events if event["what"] == "start" and begin < event["at_s"] <= end]
    return Pause(gap, max(starts) - begin if starts else 0.0)


def growth(files: dict[str, list[Event]]) -> dict[str, int]:
    """By how much threads, descriptors and memory of a rank grew at most from its first epoch's end to its last."""
    grown = {"threads": 0, "descriptors": 0, "bytes": 0}
    for events in files.values():
        held = [event for event in events if event["what"] == "holds"]
        for name, most in grown.items() if held else ():
            grown[name] = max(most, held[-1][name] - held[0][name])
    return grown


def left_in_driver(files: dict[str, list[Event]]) -> list[str]:
    """Threads of raylance and files of the datasets that a driver still had when its run had ended."""
    done = [event for events in files.values() for event in events if event["what"] == "done"]
    return [name for event in done for name in (*event["threads"], *event["files"])]


def _at(event: Event) -> float:
    return float(event["at_s"])
