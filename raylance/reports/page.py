"""The report of a run: one HTML file that needs no network."""

import base64
import contextlib
import html
import io
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import PIL.Image
import pyarrow as pa

from raylance.api.dataset import opened_of
from raylance.audit.reopening import reopen
from raylance.columns import ROW_OFFSET, TRANSFORM, dataset_of, split_offsets
from raylance.descriptions import in_words
from raylance.errors import DatasetError
from raylance.observe.figures import STAGES, RankFigures
from raylance.observe.record import open_folder
from raylance.observe.verdict import Verdict, judge
from raylance.observe.wait_clock import WAITS
from raylance.planning.state import identity_of
from raylance.planning.step_size import CostLimit, Size, budget_of
from raylance.reports import drawing
from raylance.reports.progress import events
from raylance.reports.proving import FEW_ROWS, RunProof, of_epochs, prove_records, storage_argument
from raylance.reports.reading import LoaderRecord, Run, read_first_rows, read_run
from raylance.reports.timeline import Timeline, timeline
from raylance.secrets import public_uri
from raylance.source.rows import TableRows
from raylance.source.storage_options import StorageOptions

_MUCH = 0.25  # share of the time: if a stage is the limit at times, for less, the page has the colour of training
_RANKS = 16  # most ranks that are drawn
_LINES = 100  # most lines of a table
_BAD_ROWS = 24  # most bad rows that are shown
_SIDE = 96  # pixels of a thumbnail
_QUALITY_STEPS = 64  # steps of the epoch that are sampled


def report_run(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    storage_filesystem: Any = None,
    storage_options: StorageOptions | None = None,
) -> str:
    """Writes the report of a run, during or after the run. It shows what limits the run and what to change, how each
    rank spent its time, throughput, survived faults, rows that could not be decoded, which rows the run was trained on
    (see `prove_run`), examples of the data, and how well the rows were shuffled.

    Args:
        path: The run's folder, <storage path>/<run name>, as a path or URI.
        out: Local path of the report; None for report.html in the run's folder.
        storage_filesystem: A file system of pyarrow, as for `ray.train.RunConfig`; `path` is then a path in it.
        storage_options: Options of the dataset's storage. The dataset is opened again, to examine its shuffle and its
            damaged rows; if it cannot be opened, the report says so.

    Returns:
        The path or URI of the report.

    Raises:
        ConfigError: If there is no record of the run, or if matplotlib or jinja2 is not installed.
    """
    run = read_run(path, storage_filesystem)
    first_rows = next(
        (found for r in run.of(run.main) if r.rank == 0 and (found := read_first_rows(run, r, storage_filesystem))), ""
    )
    content = render(run, first_rows, storage_options).encode()
    if out is not None:
        filesystem, where = open_folder(out)
    else:
        filesystem, folder = open_folder(path, storage_filesystem)
        where, out = f"{folder}/report.html", f"{run.uri.rstrip('/')}/report.html"
    with filesystem.open_output_stream(where) as stream:
        stream.write(content)
    return os.fspath(out)


def render(run: Run, first_rows: str = "", storage_options: StorageOptions | None = None) -> str:
    """Returns the report as HTML; `first_rows` is the HTML of the first rows."""
    template = _template()
    found, verdict, main = timeline(run), run.verdict(run.main), run.of(run.main)
    parts = run.ranks(run.main)
    ranks = sorted(part.facts["rank"] for part in sorted(parts, key=lambda part: -part.figures["wait_s"])[:_RANKS])
    happened = events(run)
    marks = [(when, record.rank, kind) for when, record, kind, _ in happened if record.dataset == run.main]
    lists = {kind: [(when, r, what) for when, r, of, what in happened if of == kind] for kind in ("fault", "error")}
    reports = [(found.run_s(at), what["metrics"]) for at, r, kind, what in happened if kind == "report" and not r.rank]
    proof = prove_records(run, run.datasets, most_rows=FEW_ROWS, **storage_argument(storage_options))
    is_at_times = verdict.limit in STAGES and verdict.waiting < _MUCH
    epochs, verdicts = _epochs(proof), {name: judge(run.ranks(name)) for name in run.datasets}
    pictures = {
        "shares": drawing.draw_shares(verdict.seconds),
        "rates": drawing.draw_rates(verdict.rates, verdict.limit),
        "strips": drawing.draw_timeline(found, marks, ranks),
        "rate": drawing.draw_rate(found),
        "helpers": drawing.draw_helpers(found, main),
        "costs": drawing.draw_costs(found),
        "metrics": drawing.draw_metrics(reports),
        "first_rows": first_rows,
    }
    page: str = template.render(
        name=run.name,
        subtitle=_subtitle(run, main, found),
        verdict=verdict,
        color=drawing.COLORS.get("training" if is_at_times else verdict.limit, "#8a8f98"),
        main=run.main,
        shown_ranks=len(ranks),
        hidden_ranks=len(parts) - len(ranks),
        cuts=len(found.cuts),
        rank_heads=_HEADS,
        dataset_heads=_DATASET_HEADS,
        rank_rows=[_rank_row(part) for part in parts if part.facts["rank"] in ranks],
        smoothed_s=f"{found.smoothed_s:,.1f}",
        starts_late=any(_starts_late(run.ranks(name), verdict) for name, verdict in verdicts.items()),
        datasets=[_dataset_row(name, run.ranks(name), verdict) for name, verdict in verdicts.items()],
        epochs=epochs[-_LINES:],
        more_epochs=max(0, len(epochs) - _LINES),
        proof=proof,
        faults=[*_restarts(run), *_describe_events(lists["fault"])],
        more_faults=max(0, len(lists["fault"]) - _LINES),
        errors=_describe_events(lists["error"]),
        failed=_failed(run, lists["error"]),
        masked=_describe_masked(run),
        identity=_identity(main[-1]),
        has_decoders=any(record.has_decoders for record in main),
        on_device=any(record.latest("device_decode_s") for record in main),
        look_columns=", ".join([*main[-1].facts["state"]["columns"], ROW_OFFSET]),
        **pictures,
        **_reopened(run, storage_options),
    )
    return page


def _template() -> Any:
    """Returns the template of the page. It marks values that are HTML with `safe`; all other values are escaped."""
    jinja2 = drawing.of_report_extra("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("raylance.reports", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.jinja")


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _describe_events(events: Sequence[tuple[float, LoaderRecord, Any]]) -> list[tuple[str, str, Any]]:
    return [(_clock(when), f"{r.dataset}, rank {r.rank}", what) for when, r, what in events[:_LINES]]


def _restarts(run: Run) -> list[tuple[str, str, str]]:
    """Returns a line for each start after an abnormal end: time, name, and where the run ended and continued."""
    by_start: dict[str, list[LoaderRecord]] = {}
    for record in run.of(run.main):
        by_start.setdefault(record.start or record.name, []).append(record)
    starts, lines = list(by_start.values()), []
    for number, (before, after) in enumerate(itertools.pairwise(starts), start=2):
        epoch, rows = max(record.position for record in before)
        is_whole = rows >= max(record.facts["limits"]["epoch_rows"] for record in before)
        if all(record.ended or is_whole for record in before) and not any(_errors(record) for record in before):
            continue
        resumed = [what for record in after for _, kind, what in record.events if kind == "resume"]
        again = resumed[0] if resumed else {"epoch": 0, "position": 0}
        gap_s = min(record.started for record in after) - max(record.last for record in before)
        lines.append(
            (
                _clock(min(record.started for record in after)),
                f"{run.main}, start {number}",
                f"start {number - 1} ended after {rows:,} rows of epoch {epoch}; {max(0.0, gap_s):,.0f} s later the "
                f"run continued with row {again['position']:,} of epoch {again['epoch']}",
            )
        )
    return lines


def _errors(record: LoaderRecord) -> list[Any]:
    return [what for _, kind, what in record.events if kind == "error"]


def _failed(run: Run, errors: Sequence[tuple[float, LoaderRecord, Any]]) -> str:
    """Returns the error that ended the last start; "" if there is none."""
    last = {id(record) for record in run.newest(run.main)}
    return next((str(what) for _, record, what in reversed(errors) if id(record) in last), "")


def _describe_masked(run: Run) -> str:
    """Says how often a masked row was handed out, and how many masked rows, some only decoded, the records name."""
    times = int(sum(record.latest("masked_rows") for record in run.records))
    rows = {(record.dataset, *row[:2]) for record in run.records for row in record.bad_rows}
    ahead = ", some of what was decoded and not handed out yet" * (len(rows) > times)
    return f"{times:,} times a row was handed out masked; {len(rows):,} different ones are named{ahead}"


def _subtitle(run: Run, main: Sequence[LoaderRecord], found: Timeline) -> str:
    begin, end = min(r.started for r in run.records), max(r.last for r in run.records)
    last, starts = main[-1], len({record.start or record.name for record in main if record.rank == 0})
    sizes = sorted({record.facts["world_size"] for record in main})
    parts = [
        f"{_clock(begin)} to {_clock(end)}",
        *([f"{found.edges[-1]:,.0f} s of it with loaders"] if found.cuts else []),
        f"{' and '.join(map(str, sizes))} rank{'s' * (sizes != [1])}",
        f"{starts} start{'s' * (starts != 1)}",
        f"raylance {last.facts['raylance']}",
        public_uri(run.uri),
    ]
    return " · ".join(parts)


_HEADS = (
    "rank", "host", "rows", "rows/s", "training, s", "saving, s", "waiting, s",
    *(f"of it: {cause}" if cause == "starting" else cause for cause in WAITS), "replaced", "masked rows",
)  # fmt: skip


_DATASET_HEADS = ("dataset", "ranks", "rows", "rows/s", "s of each rank", "waiting", "of it: starting, s", "mostly")


def _dataset_row(name: str, parts: Sequence[RankFigures], verdict: Verdict) -> tuple[str, ...]:
    spent = sum(part.total_s for part in parts)
    return (
        name,
        str(len(parts)),
        f"{sum(part.figures['rows'] / part.peers for part in parts):,.0f}",
        f"{verdict.rates['delivered']:,.0f}",
        f"{spent / len(parts):,.1f}",
        f"{sum(part.waited_s + part.figures['wait_start_s'] for part in parts) / max(1e-9, spent):.0%}",
        f"{verdict.seconds['starting'] / len(parts):,.1f}",
        _longest(verdict),
    )


def _longest(verdict: Verdict) -> str:
    """Returns the part that took the most time: a key of `Verdict.seconds`."""
    return max(verdict.seconds, key=lambda part: verdict.seconds[part])


def _starts_late(parts: Sequence[RankFigures], verdict: Verdict) -> bool:
    """Returns whether a dataset's start took the most time, and some rank did not prepare it."""
    return _longest(verdict) == "starting" and not all(part.facts.get("prepared") for part in parts)


def _rank_row(part: RankFigures) -> tuple[str, ...]:
    figures = part.figures
    seconds = (part.trained_s, *(figures[name] for name in ("save_s", "wait_s", *WAITS.values())))
    return (
        str(part.facts["rank"]),
        str(part.facts["host"]),
        f"{figures['rows']:,.0f}",
        f"{part.rate:,.0f}",
        *(f"{value:,.1f}" for value in seconds),
        f"{figures['helpers_replaced']:.0f}",
        f"{figures['masked_rows']:.0f}",
    )


def _epochs(proof: RunProof) -> list[dict[str, Any]]:
    """Returns the proofs of all epochs, as the template shows them."""
    return [
        {
            "dataset": each.dataset,
            "who": each.who or "all ranks together",
            "epochs": of_epochs(one).removeprefix("each of ").removeprefix("epoch").removeprefix("s").strip(),
            "text": one.text,
            "color": {"proven": "good", "fault": "bad"}.get(one.status, ""),
        }
        for each in proof.datasets
        for one in each.epochs
    ]


def _identity(record: LoaderRecord) -> list[tuple[str, Any]]:
    """Returns names and values that describe the data that was read, and the settings."""
    facts = record.facts
    options = {name: value for name, value in facts["options"].items() if value is not None}
    return [
        *((name, in_words(value)) for name, value in identity_of(facts["state"]).items()),
        ("global batch", _size_in_words(facts) + (f", {facts['steps']:,} steps an epoch" if facts["steps"] else "")),
        ("remainder", facts["remainder"]),
        ("options", ", ".join(f"{name}={value!r}" for name, value in options.items())),
        ("CPUs", f"{facts['cpus']} of this process's node, {facts.get('cluster_cpus') or '?'} of the cluster"),
    ]


def _reopened(run: Run, storage_options: StorageOptions | None) -> dict[str, Any]:
    """Returns the parts of the page that need the dataset: the quality of its shuffle, and its damaged rows."""
    record = run.of(run.main)[-1]
    rows = ((r.dataset, *row, tuple(r.facts.get("sources", ()))) for r in run.records for row in r.bad_rows)
    bad = list(dict.fromkeys(rows))[:_BAD_ROWS]
    found: dict[str, Any] = {"quality": None, "quality_note": "", "bad_note": ""}
    pictures = ["" for _ in bad]
    try:
        options = storage_argument(storage_options)
        opened = _open_again(record.facts, options)
        ranks = record.facts["world_size"] // record.peers if record.facts["split"] else 1
        budget = record.facts.get("budget")
        size: Size = CostLimit(**budget) if budget else record.facts["global_batch_size"]
        summary = opened.plan(world_size=ranks, **budget_of(size))
        quality = summary.shuffle_quality(sample_steps=_QUALITY_STEPS)
        found["quality"] = {
            "summary": _describe_quality(quality.class_divergence),
            "table": repr(quality),
            "picture": drawing.draw_plan(summary),
        }
        data = {run.main: opened}
        for of in {of for of, *_ in bad} - data.keys():
            data[of] = _open_again(run.of(of)[-1].facts, options)
        pictures = [_remains_of(data[of], row, column) for of, row, column, _, _ in bad]
    except Exception as error:  # a storage fails, or a dataset was moved: the rest of the page is still written
        why = (
            f"The dataset could not be opened for it ({(str(error).splitlines() or [repr(error)])[0]}). If only a "
            "setting is missing that no record holds (order=, samples=, storage_options=), "
            "raylance.audit.reopen(state, …) takes it, and .plan(…).shuffle_quality() of that says it."
        )
        found |= {"quality_note": why, "bad_note": why if bad else ""}
    found["bad_rows"] = [
        {
            "offset": split_offsets(offset)[1],
            "column": column,
            "of": dataset_of(offset, sources) or of,
            "why": why,
            "picture": made,
        }
        for (of, offset, column, why, sources), made in zip(bad, pictures, strict=True)
    ]
    return found


def _size_in_words(facts: Mapping[str, Any]) -> str:
    """Returns the size of a step over all ranks."""
    budget = facts.get("budget")
    rows = f"{facts['global_batch_size']:,} rows"
    return f"{CostLimit(**budget).text}, about {rows}" if budget else rows


def _open_again(facts: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Opens the dataset of a record; refuses another dataset that now lies in its place, with other rows."""
    opened, saved = reopen(facts["state"], remainder=facts["remainder"], **options), facts["state"].get("identity")
    if saved is not None and (found := opened_of(opened).read.source.identity) != saved:
        raise DatasetError(f"it was rewritten since: its files were {saved}, and are {found} now")
    return opened


def _describe_quality(ratio: float) -> str:
    if ratio < 1.25:
        return "A batch is as good a mix of the rows as one of a full shuffle."
    return (
        f"A batch is {ratio:.1f} times as far from the mix of all rows as one of a full shuffle, if neighbours in "
        "storage are similar: if they are sorted, use more lanes or larger windows; if they are stored in random "
        "order, it does not matter."
    )


def _remains_of(data: Any, offset: int, column: str) -> str:
    """Returns HTML of a damaged row: what can be decoded of the picture, else its first bytes; "" if no single stored
    value is damaged, as in a mixture, in packed rows, or if a transform failed.
    """
    source = opened_of(data).read.source
    if not isinstance(source, TableRows) or split_offsets(offset)[0] or column == TRANSFORM:
        return ""
    value = source.pinned.open().take(pa.array([offset]), columns=[column])[column][0].as_py()
    if not value:
        return "null" if value is None else "empty"
    try:
        with PIL.Image.open(io.BytesIO(value)) as image:
            image.draft("RGB", (_SIDE, _SIDE))
            # Not LOAD_TRUNCATED_IMAGES: it is global, so loaders that decode in this process would accept damaged rows.
            with contextlib.suppress(Exception):  # any error of a codec on damaged bytes
                image.load()
            image.tile = []  # the rest cannot be decoded
            made = image.convert("RGB")
            made.thumbnail((_SIDE, _SIDE))
            made.save(sink := io.BytesIO(), "PNG")
        encoded = base64.b64encode(sink.getvalue()).decode()
        return f'<img alt="what decodes of it" src="data:image/png;base64,{encoded}">'
    except Exception:  # not an image, or nothing of it decodes
        return f"<code>{html.escape(repr(bytes(value[:24])))}…</code> {len(value):,} bytes"
