"""Owns what the dashboard shows and how to read it; never how Grafana writes it."""

from k8s.grafana.source import expressions, grafana
from k8s.grafana.source.expressions import Scope
from k8s.grafana.source.grafana import GREEN, ORANGE, RED, Panel, query
from raylance.observe.diagnoses import DIAGNOSES, what_to_change
from raylance.observe.figures import STAGES

RUN = 'run="$run",dataset=~"$dataset"'
RANKS = f'{RUN},rank=~"$rank"'
WINDOW = "$__rate_interval"

ALL = Scope(RANKS, WINDOW)
BY_RANK = ALL.keeping("rank")
BY_DATASET = Scope(RUN, WINDOW, "dataset")  # of all ranks: an epoch is theirs together
POSITION, EPOCH_ROWS = (BY_DATASET.total(name, "max") for name in ("position_rows", "epoch_rows"))
DONE = f"{POSITION} / ({EPOCH_ROWS} > 0)"

LIMITS = ("training", *STAGES, "starting")
TO_DO = "\n".join([
    "| the limit is | so that | do this |",
    "|---|---|---|",
    *(f"| **{cause}** | {DIAGNOSES[cause].means} | {what_to_change(cause)} |" for cause in LIMITS),
    "",
    "`loader.explain()` says it in words, with numbers. More: *Metrics* in docs/operations.md.",
    "",
])  # fmt: skip


def _or_0(expr: str) -> str:
    """A counter, and 0 while it is not there yet."""
    return f"{expr} or 0 * {ALL.total('epoch', 'max')}"


def _glance() -> list[tuple[Panel, int, int]]:
    waiting = [(0.0, GREEN), (0.05, ORANGE), (0.2, RED)]
    faults = [(0.0, GREEN), (1.0, RED)]
    ends = f"({EPOCH_ROWS} - {POSITION}) / ({BY_DATASET.rate('rows_total')} > 0)"
    return [
        (grafana.stat(
            "The limit",
            "What the run would have to do faster to be faster. Green, 'training': the trainer waits for less than 5 "
            "% of its time, and the data costs nothing. Any other word is what the rows that the trainer waits for "
            "were doing most of the time; the table below has what to do about it.",
            [query(expressions.limit(ALL), "{{cause}}", now=True)], names=True, empty="no batches now",
        ), 5, 4),
        (grafana.stat(
            "Rows/s",
            "Rows handed out to the trainers a second, all chosen ranks together. Compare it with 'Each stage "
            "alone'.",
            [query(ALL.rate("rows_total"), "rows/s")],
        ), 4, 4),
        (grafana.stat(
            "Trainer waits",
            "Share of the trainers' time in which they waited for a batch, the start and saving left out. Below 5 % "
            "there is nothing to gain; above 20 % an alert is raised after ten minutes.",
            [query(expressions.held_up(ALL), "waiting")], unit="percentunit", steps=waiting, decimals=1,
        ), 4, 4),
        (grafana.stat(
            "Epoch done",
            "How much of the epoch was handed out, over all ranks. It begins at 0 with each epoch.",
            [query(DONE, "{{dataset}}", now=True)], unit="percentunit", decimals=0,
        ), 4, 4),
        (grafana.stat(
            "Epoch ends in",
            "Rows that are left, at the speed of now. Empty while no rows are handed out.",
            [query(ends, "{{dataset}}", now=True)], unit="s", decimals=0,
        ), 3, 4),
        (grafana.stat(
            "Bad rows",
            "Rows that could not be decoded and were handed out as zeros (on_bad_row='mask'), since the workers "
            f"began. More than none: {what_to_change('bad_rows')}.",
            [query(_or_0(ALL.total("bad_rows_total")), now=True)], steps=faults,
        ), 2, 4),
        (grafana.stat(
            "Replaced",
            "Helper actors that died or hung and were replaced, since the workers began. No row is lost by it, but "
            "time. A few on nodes that may be taken away are normal; more: `ray logs` of the dead ones.",
            [query(_or_0(ALL.total("helpers_replaced_total")), now=True)],
            steps=[(0.0, GREEN), (1.0, ORANGE), (10.0, RED)],
        ), 2, 4),
        (grafana.lines(
            "What the trainer's time goes to",
            "Shares of the time of the chosen ranks' trainers; choose one rank above to see it alone. All green: "
            "training is the limit, and that is what GPUs are paid for. Blue: it waits for storage. Orange: it waits "
            "for decoders. Yellow: batches are being made, or brought to it. Violet: helpers are starting, which is "
            "normal at the beginning. Grey: checkpoints are being saved; save less often where that is much.",
            [query(expr, name) for name, expr in expressions.parts_of_time(ALL).items()],
            unit="percentunit", stacked=True, most=1,
        ), 10, 9),
        (grafana.bars(
            f"Each stage alone, rows/s ({expressions.SHOWN} × delivered at most)",
            "Rows a second that each stage would do if it never waited for another one. 'delivered' is what comes "
            "out: about the shortest of the bars, which is the limit. The next longer one shows what would be gained "
            "by making that one faster, and no more than 'training' can ever be gained. Bars end at some times what "
            "is delivered, as the title says. Reading needs some minutes to show.",
            [query(expr, name, now=True) for name, expr in expressions.rates_of_stages(ALL).items()],
        ), 6, 9),
        (grafana.text("What to do", TO_DO), 8, 9),
    ]  # fmt: skip


def _ranks() -> list[tuple[Panel, int, int]]:
    return [
        (grafana.lines(
            "Waiting, by rank",
            "Share of each rank's time in which it waited for a batch. All alike: the whole loader is slow. One "
            "above the others: its node is slow, or its helpers lie badly; with collectives the others then wait for "
            "it while training.",
            [query(expressions.waiting_share(BY_RANK), "rank {{rank}}")], unit="percentunit",
        ), 8, 7),
        (grafana.lines(
            "Training a batch, by rank",
            "Seconds from a batch to the question for the next one, saving included. It should be flat. A rank above "
            "the others has a slower GPU or more work; all of them rising together: the model, or the collectives.",
            [query(BY_RANK.ratio("train_seconds_total", "batches_total"), "rank {{rank}}")], unit="s",
        ), 8, 7),
        (grafana.lines(
            "Saving, by rank",
            f"Share of each rank's time in raylance.report. Much of it: {what_to_change('saving')}.",
            [query(
                f"({BY_RANK.rate('save_seconds_total')} or 0 * {BY_RANK.rate('train_seconds_total')})"
                f" / ({BY_RANK.rate('wait_seconds_total')} + {BY_RANK.rate('train_seconds_total')})", "rank {{rank}}",
            )], unit="percentunit",
        ), 8, 7),
    ]  # fmt: skip


def _throughput() -> list[tuple[Panel, int, int]]:
    return [
        (grafana.lines(
            "Rows/s, by rank",
            "Rows handed out, the ranks stacked: the upper edge is the whole run. Ranks get the same number of rows "
            "in each step, so their bands are equally wide.",
            [query(BY_RANK.rate("rows_total"), "rank {{rank}}")], stacked=True,
        ), 8, 7),
        (grafana.lines(
            "Bytes/s",
            "Bytes read from storage, and bytes handed out after decoding. Reading comes in bursts, of a window "
            "each. Much more handed out than read is what decoding does: images grow.",
            [query(ALL.rate("read_bytes_total"), "read"), query(ALL.rate("delivered_bytes_total"), "handed out")],
            unit="Bps",
        ), 8, 7),
        (grafana.lines(
            "Rows decoded and handed out",
            "Rows a second, all ranks. Decoding runs ahead of the trainer until the bytes in flight reach their "
            "limit; after that, both lines go together.",
            [query(ALL.rate("decoded_rows_total"), "decoding"), query(ALL.rate("rows_total"), "delivered")],
        ), 8, 7),
    ]  # fmt: skip


def _helpers() -> list[tuple[Panel, int, int]]:
    # Datasets of a process share its decoders.
    there, wanted, busy = (
        f"sum({BY_RANK.total(name, 'max')})" for name in ("decoders", "decoders_wanted", "decoders_busy")
    )
    return [
        (grafana.lines(
            "Decoders",
            "Fewer there than wanted, for minutes: the cluster has no CPUs for them (`ray status`). All busy while "
            "the trainer waits: more are needed, or less work. Hardly any busy: fewer would do.",
            [query(there, "there"), query(busy, "busy"), query(wanted, "wanted")], dashed=["wanted"],
        ), 8, 7),
        (grafana.lines(
            "Readers",
            "Shard actors, which read storage: one of each rank and dataset, or more where num_readers says so. "
            "Fewer than wanted: they are starting, or found no place.",
            [query(ALL.total("readers"), "there"), query(ALL.total("readers_wanted"), "wanted")], dashed=["wanted"],
        ), 8, 7),
        (grafana.lines(
            "Helpers replaced in 5 min",
            "Actors that died or hung, and got a successor that did their work again. One now and then costs "
            f"seconds. Many, again and again: {what_to_change('crash_loop')}. The fourth death on the same rows ends "
            "the run.",
            [query(_or_0(ALL.during("5m").grown("helpers_replaced_total")), "replaced")],
        ), 8, 7),
    ]  # fmt: skip


def _memory() -> list[tuple[Panel, int, int]]:
    return [
        (grafana.lines(
            "Bytes in flight, by rank",
            "Bytes that are read, decoded, or wait for the trainer. At the limit while training is the limit: good, "
            f"the loader is ahead. At the limit while the trainer waits: {what_to_change('inflight_limit')}. Far below "
            "it while the trainer waits: the stage that is the limit gives no more.",
            [query(BY_RANK.total("inflight_bytes"), "rank {{rank}}"),
             query(ALL.total("inflight_limit_bytes", "max"), "limit")], unit="bytes", dashed=["limit"],
        ), 8, 7),
        (grafana.lines(
            "Windows, by rank",
            "Bytes of raw rows that shard actors hold. They fill up to the limit by design, and no further: what the "
            "next window needs waits until there is room. A limit that its node has no memory for kills the actor: "
            "lower max_window_bytes.",
            [query(BY_RANK.total("window_bytes", "max"), "rank {{rank}}"),
             query(ALL.total("window_limit_bytes", "max"), "limit")], unit="bytes", dashed=["limit"],
        ), 8, 7),
        (grafana.lines(
            "Items in flight, and ready batches",
            "Pieces of work on their way, and batches that lie ready, on the rank that has the fewest. No batch ready "
            "all the time: that trainer starves.",
            [query(ALL.total("inflight_items", "min"), "items in flight"),
             query(ALL.total("ready_batches", "min"), "ready batches")],
        ), 8, 7),
    ]  # fmt: skip


def _stages() -> list[tuple[Panel, int, int]]:
    slowly = ALL.during("5m")
    return [
        (grafana.lines(
            "Decoding a row",
            "Seconds that one decoder takes for a row. Rising: larger images, or decoders that share CPUs with "
            "something else. Materialising at the size that is trained on makes it less (jobs/materialize.py).",
            [query(ALL.ratio("decode_seconds_total", "decoded_rows_total"), "decoding")], unit="s",
        ), 6, 7),
        (grafana.lines(
            "Storage, while it is read",
            "Bytes a second that one shard actor gets while it reads, over five minutes. Low: the store throttles, "
            "is far away, or rows are read one by one (order='row'); more readers help where a single stream is slow.",
            [query(slowly.ratio("read_bytes_total", "storage_seconds_total"), "reading")], unit="Bps",
        ), 6, 7),
        (grafana.lines(
            "Readers wait for storage",
            "Seconds a second that shard actors waited because storage had not answered, over five minutes. "
            "Near 0: reading ahead hides it all. Near the number of readers: storage is all they do, and it is the "
            "limit.",
            [query(f"{slowly.rate('read_wait_seconds_total')} or 0 * {ALL.total('readers')}", "reading"),
             query(ALL.total("readers"), "readers")],
            dashed=["readers"],
        ), 6, 7),
        (grafana.lines(
            "A batch: collating and transfer",
            "Seconds to make a batch of its rows, and to bring it to the device, beside the training thread. They "
            "cost the trainer nothing while they are shorter than training a batch.",
            [query(ALL.ratio("collate_seconds_total", "batches_total"), "collating"),
             query(ALL.ratio("transfer_seconds_total", "batches_total"), "transfer")], unit="s",
        ), 6, 7),
    ]  # fmt: skip


def _epochs() -> list[tuple[Panel, int, int]]:
    bad, left = (_or_0(ALL.during("5m").grown(name)) for name in ("bad_rows_total", "fallback_rows_total"))
    return [
        (grafana.lines(
            "Epoch and position",
            "Epochs done, with the part of the current one: a straight line is a steady run, a flat piece a "
            "standstill, a step down a return to a checkpoint.",
            [query(f"{BY_DATASET.total('epoch', 'max')} + {DONE}", "{{dataset}}")],
        ), 8, 7),
        (grafana.lines(
            "Bad rows and rows left to Pillow, in 5 min",
            "Bad rows could not be decoded, and were handed out as zeros. Rows left to Pillow are JPEGs that the "
            "fast codec does not take (CMYK, damaged): correct, at twice the time.",
            [query(bad, "bad"), query(left, "left to Pillow")],
        ), 8, 7),
        (grafana.lines(
            "Waited for first batches, by rank",
            "Seconds waited for the first batch of each pass over a dataset, all passes so far together. It rises in "
            "steps, one a pass; high ones: loader.prepare(…) before the model is built.",
            [query(BY_RANK.total("first_batch_seconds"), "rank {{rank}}")], unit="s",
        ), 8, 7),
    ]  # fmt: skip


SECTIONS = {
    "At a glance": _glance,
    "Rank by rank": _ranks,
    "Throughput": _throughput,
    "Helpers": _helpers,
    "Memory": _memory,
    "What each stage costs": _stages,
    "Epoch, position and rows": _epochs,
}


def dashboard() -> Panel:
    """The dashboard, as Grafana imports it."""
    panels = []
    for title, section in SECTIONS.items():
        panels += [(grafana.row(title), 24, 1), *section()]
    epoch = expressions.NAMES["raylance_epoch"]
    variables = [
        grafana.source_variable(),
        grafana.label_variable(
            "run", "Run", f"label_values({epoch}, run)", several=False, help="The run's name in Ray Train."
        ),
        grafana.label_variable(
            "dataset", "Dataset", f'label_values({epoch}{{run="$run"}}, dataset)', several=True,
            help="The dataset's name in the run; a run that validates has several.",
        ),
        grafana.label_variable(
            "rank", "Rank", f'label_values({epoch}{{run="$run"}}, rank)', several=True,
            help="One rank of the run, or all of them together.",
        ),
    ]  # fmt: skip
    description = "What limits a run that raylance feeds, and what to change. Made by `python -m k8s.grafana.source`."
    return grafana.page("raylance", "raylance", grafana.place(panels), variables, description)
