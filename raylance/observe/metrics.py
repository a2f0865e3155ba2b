"""The metrics that raylance gives to Ray for Prometheus.

Names follow Prometheus' conventions: base units, counters end in `_total`. Ray adds the prefix `ray_`, and its own
labels (node, worker, session). A counter exists from its first increase on; before, it is absent, not 0.
"""

import dataclasses
import importlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from raylance.columns import COST
from raylance.observe.stats import COST_COUNTERS, GAUGES
from raylance.observe.wait_clock import WAITS

LABELS = ("run", "dataset", "rank")
"""Labels of each metric: the run's name in Ray Train, or "interactive"; the dataset's name in the run; the rank."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric that raylance publishes."""

    name: str  # its name, without the prefix `ray_`
    kind: Literal["counter", "gauge"]  # counters only grow; gauges show the present state
    field: str  # the figure: a number of `Stats.sample`, the position, or a limit
    help: str  # its meaning, and how to read it
    cause: str = ""  # value of the label `cause` if several figures share the metric
    labels: tuple[str, ...] = LABELS  # without `cause`


def _counter(name: str, field: str, help: str, cause: str = "") -> Metric:
    labels = (*LABELS, COST) if field in COST_COUNTERS else LABELS
    return Metric(name=f"raylance_{name}_total", kind="counter", field=field, help=help, cause=cause, labels=labels)


def _gauge(name: str, field: str, help: str) -> Metric:
    return Metric(name=f"raylance_{name}", kind="gauge", field=field, help=help)


_WAIT = (
    "Seconds that the trainer waited for its next batch, by cause: helpers were starting, the awaited rows were being "
    "read, were being decoded or waited for a decoder, or were being brought here and made a batch."
)

_PEERS = " Peers (ranks with the same rows) each count an equal share: the sum over all ranks is the run's."
_OF_PEERS = frozenset(
    ["rows", "decoded_rows", "masked_rows", *COST_COUNTERS]
)  # the figures that are divided among peers

METRICS: tuple[Metric, ...] = (
    _counter("rows", "rows", "Rows handed out to the trainer, padding included." + _PEERS),
    _counter("batches", "batches", "Batches handed out to the trainer."),
    _counter("delivered_bytes", "nbytes", "Bytes handed out to the trainer, decoded."),
    _counter(
        "cost",
        "cost",
        "Costs of the rows handed out to the trainer, as cost= of the dataset says; the label cost has the name of one "
        "of several." + _PEERS,
    ),
    _counter("padded_cost", "padded_cost", "The same, where a batch costs its rows times its costliest row." + _PEERS),
    _counter("max_rank_cost", "dearest_cost", "The largest of these that a rank had in each step." + _PEERS),
    _counter("read_bytes", "read_bytes", "Bytes of rows read from storage."),
    _counter("decoded_rows", "decoded_rows", "Rows that were decoded, ahead of time or not." + _PEERS),
    _counter("bad_rows", "masked_rows", "Rows handed out as zeros because they could not be decoded." + _PEERS),
    _counter("fallback_rows", "fallback_rows", "JPEGs that the fast codec left to Pillow."),
    *(_counter("wait_seconds", field, _WAIT, cause) for cause, field in WAITS.items()),
    _counter(
        "train_seconds",
        "train_s",
        "Seconds between handing out a batch and being asked for the next one, but those "
        "in which another loader was iterated, such as for validation.",
    ),
    _counter("save_seconds", "save_s", "Seconds of these in raylance.report."),
    _counter("storage_seconds", "storage_s", "Seconds in which storage was being read, all shard actors together."),
    _counter("read_wait_seconds", "read_s", "Seconds that shard actors took to gather requested rows."),
    _counter("decode_seconds", "decode_s", "Seconds of decoding, all decoders together."),
    _counter("transform_seconds", "transform_s", "Seconds of decoding in the user's transform=."),
    _counter("decode_cpu_seconds", "decode_cpu_s", "CPU seconds of decoding: few of its seconds if decoders wait."),
    _counter("collate_seconds", "collate_s", "Seconds of turning tables into batches, beside the training thread."),
    _counter("transfer_seconds", "transfer_s", "Seconds of pinning batches and sending them to the device."),
    _counter("helpers_replaced", "helpers_replaced", "Helper actors that died or hung and were replaced."),
    _gauge("first_batch_seconds", "first_batch_s", "Seconds waited for first batches of passes, of all passes so far."),
    _gauge("inflight_bytes", "inflight_bytes", "Bytes on their way to the rank, or waiting for its trainer."),
    _gauge("inflight_limit_bytes", "inflight_limit_bytes", "What inflight_bytes allows."),
    _gauge("inflight_items", "inflight_items", "Pieces of work on their way."),
    _gauge("ready_batches", "ready_batches", "Batches that wait for the trainer; always 0: it starves."),
    _gauge("reader_bytes", "reader_bytes", "Bytes of raw rows that the shard actor holds."),
    _gauge("reader_limit_bytes", "reader_limit_bytes", "What reader_bytes allows."),
    _gauge("decoders", "decoders", "Decoders that run."),
    _gauge("decoders_wanted", "decoders_wanted", "Decoders that there should be."),
    _gauge("decoders_busy", "decoders_busy", "Decoders that have work."),
    _gauge("readers", "readers", "Shard actors that run."),
    _gauge("readers_wanted", "readers_wanted", "Shard actors that there should be."),
    _gauge("epoch", "epoch", "The epoch, from 0."),
    _gauge("position_rows", "position", "Rows of the epoch that were handed out, over all ranks."),
    _gauge("epoch_rows", "epoch_rows", "Rows of an epoch, over all ranks."),
)


def _as_in_ray(name: str, *fields: str) -> tuple[Metric, tuple[str, ...]]:
    help = "As Ray Data's own metric of this name, of a loader of raylance."
    return Metric(name=f"data_iter_{name}", kind="gauge", field="", help=help, labels=("dataset", "split")), fields


TRAIN_ROW = (
    _as_in_ray("total_blocked_seconds", *WAITS.values()),
    _as_in_ray("time_to_first_batch_seconds", "first_batch_s"),
    _as_in_ray("user_seconds", "train_s"),
    _as_in_ray("batches_total", "batches"),
    _as_in_ray("rows_total", "rows"),
    _as_in_ray("get_ref_bundles_seconds", WAITS["starting"], WAITS["reading"], WAITS["decoding"]),
    _as_in_ray("get_seconds", WAITS["finishing"]),
    _as_in_ray("next_batch_seconds"),
    _as_in_ray("format_batch_seconds"),
    _as_in_ray("collate_batch_seconds", "collate_s"),
    _as_in_ray("finalize_batch_seconds", "transfer_s"),
)
"""The metrics that the row "Data Ingestion" of Ray's own dashboard of Ray Train reads, and the figures that are added
up for each. Ray Data publishes them, as gauges of totals. Ray's panel of stages is empty without those that are always
0.
"""

_made: dict[str, Any] = {}  # metrics of this process, by name
_lock = threading.Lock()


class Publisher:
    """Publishes one loader's figures as Ray metrics."""

    def __init__(
        self, run: str, dataset: str, rank: int, before: Mapping[str, float] | None = None, *, peers: int = 1
    ) -> None:
        """Publishes nothing yet. `before` holds figures already published; `peers` ranks get its rows."""
        self._peers = peers
        self._labels = dict(zip(LABELS, (run, dataset, str(rank)), strict=True))
        self._before: dict[str, float] = dict(before or {})

    def publish(self, figures: Mapping[str, float]) -> None:
        """Publishes figures: a gauge as it is, a counter as its increase since the last call."""
        for field, (metric, value) in self._by_field(figures):
            labels = self._labels | ({"cause": metric.cause} if metric.cause else {})
            if COST in metric.labels:
                labels |= {COST: field.partition(".")[2]}
            if metric.kind == "gauge":
                _of_ray(metric).set(value, labels)
                continue
            added = value - self._before.get(field, 0.0)
            if added > 0:
                _of_ray(metric).inc(added / (self._peers if metric.field in _OF_PEERS else 1), labels)
                self._before[field] = value
        run, dataset, rank = (self._labels[name] for name in LABELS)
        for metric, fields in TRAIN_ROW:
            if figures.keys() >= set(fields):
                total = sum(figures[field] for field in fields)
                _of_ray(metric).set(total, {"dataset": f"{run}/{dataset}", "split": rank})

    @staticmethod
    def _by_field(figures: Mapping[str, float]) -> Iterator[tuple[str, tuple[Metric, float]]]:
        """Yields each figure that a metric shows, with its name, which may end in the name of a cost."""
        for metric in METRICS:
            for field in (metric.field, *(name for name in figures if name.startswith(f"{metric.field}."))):
                if field in figures:
                    yield field, (metric, figures[field])

    def end(self) -> None:
        """Sets the gauges in `GAUGES`, such as `decoders`, to 0; otherwise Ray keeps publishing their last values."""
        self.publish(dict.fromkeys(GAUGES, 0.0))


def _of_ray(metric: Metric) -> Any:
    with _lock:
        if metric.name not in _made:
            kinds: Any = importlib.import_module("ray.util.metrics")  # loaded already: only loaders under Ray publish
            make = kinds.Counter if metric.kind == "counter" else kinds.Gauge
            labels = (*metric.labels, "cause") if metric.cause else metric.labels
            _made[metric.name] = make(metric.name, description=metric.help, tag_keys=labels)
        return _made[metric.name]
