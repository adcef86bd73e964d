"""What a dashboard asks Prometheus, as Grafana would ask it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack import MONITORING, Prometheus

BOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
RATE_INTERVAL = "1m"
"""Grafana's $__rate_interval is at least four scrape intervals; four of the usual 15 s."""
_LABEL_VALUES = re.compile(r"label_values\((?:(?P<series>.+), *)?(?P<label>\w+)\)")


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel and its queries, variables still in them."""

    board: str
    title: str
    queries: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.board} / {self.title}"


def load(path: Path) -> dict[str, Any]:
    """A dashboard."""
    return dict(json.loads(path.read_text()))


def panels(path: Path) -> Iterator[Panel]:
    """The panels that show data; those of collapsed rows, too."""
    board = load(path)
    nested = [panel for row in board["panels"] for panel in row.get("panels") or []]
    for panel in [*board["panels"], *nested]:
        if panel["type"] != "row":
            yield Panel(board["title"], panel["title"], tuple(target["expr"] for target in panel["targets"]))


def annotations(path: Path) -> Iterator[str]:
    """Queries whose results are marked on all panels."""
    for mark in load(path).get("annotations", {}).get("list", []):
        yield mark["expr"]


def variables(path: Path) -> Iterator[tuple[str, str]]:
    """Name and query of each variable that Prometheus fills."""
    for variable in load(path)["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]


def fill(query: str, values: Mapping[str, str]) -> str:
    """A query with its variables replaced; those not given stand for all."""
    filled = query.replace("$__rate_interval", RATE_INTERVAL)
    return re.sub(r"\$(\w+)", lambda match: values.get(match[1], ".*"), filled)


def choices(prometheus: Prometheus, query: str, values: Mapping[str, str]) -> list[str]:
    """What a variable's list offers."""
    match = _LABEL_VALUES.fullmatch(fill(query, values))
    assert match is not None, query
    return list(prometheus.get(f"label/{match['label']}/values", **{"match[]": [match["series"]]}))


def has_data(prometheus: Prometheus, query: str, values: Mapping[str, str]) -> bool:
    """Whether a query had a number at any time since this Prometheus began."""
    series = prometheus.over_time(fill(query, values))
    return any(math.isfinite(float(value)) for found in series for _, value in found["values"])
