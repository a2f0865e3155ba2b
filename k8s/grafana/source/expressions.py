"""Owns the PromQL that panels and alerts share; never where it is shown.

What is peculiar to these metrics: Ray publishes a counter from its first step on, so that one that is still 0 is not
there; counters of a process that has ended stay until its node goes; gauges of one are gone after 20 seconds.
"""

import dataclasses

from raylance.observe.figures import IN_STEP
from raylance.observe.metrics import METRICS
from raylance.observe.verdict import WAITS

NAMES = {metric.name: f"ray_{metric.name}" for metric in METRICS}  # Ray's prefix
CAUSES = tuple(metric.cause for metric in METRICS if metric.cause)
STARTING, LATER = 'cause="starting"', 'cause!="starting"'
SHOWN = 5  # times what is delivered: as much as is shown of what a stage could do


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """What an expression is about: its series, and over which time their rates are taken.

    Attributes:
        labels: Matchers of the series; "" for all.
        window: A range as PromQL writes it, without brackets.
        by: Labels to keep in sums; "" for one sum of all.
    """

    labels: str
    window: str
    by: str = ""

    def keeping(self, by: str) -> "Scope":
        """The same, with other labels kept."""
        return dataclasses.replace(self, by=by)

    def during(self, window: str) -> "Scope":
        """The same, with rates over another time."""
        return dataclasses.replace(self, window=window)

    def series(self, name: str, extra: str = "") -> str:
        """A selector of a metric, named without prefixes.

        Raises:
            KeyError: Where METRICS has no such name.
        """
        matchers = ",".join(part for part in (self.labels, extra) if part)
        return NAMES[f"raylance_{name}"] + (f"{{{matchers}}}" if matchers else "")

    def total(self, name: str, how: str = "sum") -> str:
        """Series as they are, summed or whatever `how` does."""
        return f"{how}{self._by()}({self.series(name)})"

    def rate(self, name: str, extra: str = "") -> str:
        """What a counter grows by in a second, summed."""
        return f"sum{self._by()}(rate({self.series(name, extra)}[{self.window}]))"

    def rate_or_0(self, name: str, extra: str = "") -> str:
        """The same, and 0 where it is not there yet; for one sum alone."""
        return f"({self.rate(name, extra)} or vector(0))"

    def ratio(self, name: str, other: str) -> str:
        """What a counter grows by while another one grows by 1; 0 where the first is not there yet."""
        return f"({self.rate(name)} or 0 * {self.rate(other)}) / {self.rate(other)}"

    def grown(self, name: str) -> str:
        """What a counter has grown by within the window, exactly, one that has just appeared counted from 0.

        `increase` would see nothing of a counter that appears as 1 and stays 1, as that of a single bad row does.
        """
        series = self.series(name)
        return f"sum{self._by()}(({series} - {series} offset {self.window}) or {series})"

    def _by(self) -> str:
        return f" by ({self.by}) " if self.by else ""


def waiting_share(scope: Scope) -> str:
    """Share of the trainer's time that it waited for batches, the start included, in [0, 1]."""
    waited = scope.rate("wait_seconds_total")
    return f"{waited} / ({waited} + {scope.rate('train_seconds_total')})"


def parts_of_time(scope: Scope) -> dict[str, str]:
    """Shares of the trainer's time, by what it went to; they add up to 1."""
    whole = f"({scope.rate_or_0('wait_seconds_total')} + {scope.rate_or_0('train_seconds_total')})"
    saving = scope.rate_or_0("save_seconds_total")
    parts = {"training": f"({scope.rate_or_0('train_seconds_total')} - {saving})", "saving": saving}
    parts |= {cause: scope.rate_or_0("wait_seconds_total", f'cause="{cause}"') for cause in CAUSES}
    return {name: f"{part} / {whole}" for name, part in parts.items()}


def rates_of_stages(scope: Scope) -> dict[str, str]:
    """Rows a second that each stage would do if it never waited for another; the least of them is the limit.

    What does more than SHOWN times what is delivered is shown as that much: a trainer that does next to nothing would
    hide the other bars. Reading comes in bursts of a window, so its speed is taken over ten minutes; and how many bytes
    a row has, from all that was read so far.
    """
    ranks, slowly = scope.keeping("rank"), scope.during("10m").keeping("rank")
    stages = {
        "training": _training_alone(ranks),
        "decoding": f"sum({ranks.ratio('decoded_rows_total', 'decode_seconds_total')} * {_many(ranks, 'decoders')})",
        "reading": (
            f"sum({slowly.ratio('read_bytes_total', 'storage_seconds_total')} * {_many(ranks, 'readers')})"
            f" / ({scope.total('read_bytes_total')} / {scope.total('rows_total')})"
        ),
    }
    delivered = scope.rate("rows_total")
    shown = {name: f"clamp_max({rate}, {SHOWN} * scalar({delivered}))" for name, rate in stages.items()}
    return shown | {"delivered": delivered}


def held_up(scope: Scope) -> str:
    """Share of the time of training and waiting that was waiting, the start and saving left out; one sum alone."""
    steady = scope.rate_or_0("wait_seconds_total", LATER)
    return f"({steady} / ({steady} + {_steady_training(scope)}))"


def limit(scope: Scope) -> str:
    """One series, whose label `cause` names what limits; its value is what `held_up` gives.

    The rules are those of `RankLoader.explain`: waiting for less than a twentieth of the time does not limit.
    """
    share, longest = held_up(scope), f"topk(1, {scope.keeping('cause').rate('wait_seconds_total', LATER)})"
    steady = f"({scope.rate_or_0('wait_seconds_total', LATER)} + {_steady_training(scope)})"
    begins = f"({scope.rate_or_0('wait_seconds_total', STARTING)} > 0.5 * {steady})"
    return (
        f"(({longest} > 0) * 0 + on() group_left() ({share} >= {WAITS}))"
        f' or on() label_replace({share} and on() {begins}, "cause", "starting", "", "")'
        f' or on() label_replace({share}, "cause", "training", "", "")'
    )


def _steady_training(scope: Scope) -> str:
    return f"({scope.rate('train_seconds_total')} - {scope.rate_or_0('save_seconds_total')})"


def _training_alone(ranks: Scope) -> str:
    """As `raylance.observe.figures.training_rate` has it: a rank that waits for its loader is waited for by those that
    keep step with it, which counts as their training, so that the one of them that trains shortest speaks for all.
    """
    alone, later = f"({ranks.rate('rows_total')} / {_trained(ranks)})", ranks.rate("wait_seconds_total", LATER)
    step = f"((({_trained(ranks)} + {later}) or {_trained(ranks)}) / {ranks.rate('batches_total')})"
    return f"count({alone} >= 0) * max({alone} and {step} >= {IN_STEP} * scalar(max({step})))"


def _trained(scope: Scope) -> str:
    """Seconds of training alone; a rank that has never saved has no series of it."""
    trained, saved = scope.rate("train_seconds_total"), scope.rate("save_seconds_total")
    return f"(({trained} - {saved}) or {trained})"


def _many(scope: Scope, name: str) -> str:
    """How many helpers a rank has, 1 where threads do their work; datasets of a process share them."""
    return f"clamp_min({scope.total(name, 'max')}, 1)"
