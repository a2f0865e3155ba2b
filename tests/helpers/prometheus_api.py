"""What a dashboard's queries give: variables filled in as Grafana does, and a Prometheus asked."""

import dataclasses
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

Series = tuple[dict[str, str], list[tuple[float, float]]]  # labels; seconds since 1970, values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """Where queries are asked.

    Attributes:
        url: Its address, without a path.
        start: Seconds since 1970.
        end: The same; what asks for the last value asks for the one of then.
    """

    url: str
    start: float
    end: float

    def ask(self, path: str, **fields: object) -> Any:
        """What its HTTP API answers.

        Raises:
            OSError: It is not there.
            ValueError: It finds the query wrong; the text has the query and why.
        """
        body = urllib.parse.urlencode(fields)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{body}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code not in (400, 422):
                raise
            raise ValueError(f"{self.url} does not understand {fields}: {error.read().decode()}") from error

    def values(self, expr: str, *, now: bool, step: int = 5) -> list[Series]:
        """What a query gives, over the time or at its end."""
        span = {"time": self.end} if now else {"start": self.start, "end": self.end, "step": step}
        found = self.ask("query" if now else "query_range", query=expr, **span)["result"]
        values = [[one["value"]] if now else one["values"] for one in found]
        series = [[(float(at), float(value)) for at, value in each] for each in values]
        return [(one["metric"], each) for one, each in zip(found, series, strict=True)]


def filled(expr: str, values: Mapping[str, str]) -> str:
    """A query with its variables replaced, all others by all; `window` is that of its rates."""
    expr = expr.replace("$__rate_interval", values.get("window", "1m"))
    for name in ("run", "dataset", "rank"):
        expr = expr.replace(f"${name}", values.get(name, ".*"))
    return expr


def queries(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each query of a dashboard with the title of its panel."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target
