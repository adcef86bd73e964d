"""What rules are made of, and how they are written out. Pure.

Durations are Prometheus's: `90s`, `5m`. PromQL is written on one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["critical", "warning", "info"]
"""critical: requests fail now or within minutes; warning: look today; info: worth knowing, wakes nobody."""

ENGINE = "namespace, ullage_service, pod, instance"
"""Labels that name one engine. Where nothing but `instance` is set, as outside Kubernetes, that one does."""
SERVICE = "namespace, ullage_service"
"""Labels that name one InferenceService."""
WHO = "{{ or $labels.pod $labels.instance }}"
"""The engine an alert is about, in its texts."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A recording rule. Names are `level:metric:operation`, the level being `engine` or `service`."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alerting rule with what a person needs who is called by it."""

    name: str
    expr: str
    hold: str
    """For how long it must be true before it fires."""
    severity: Severity
    summary: str
    """One sentence: what is wrong, and where."""
    description: str
    """What it means and what comes next; with the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rules that are evaluated one after another, in this order."""

    name: str
    rules: tuple[Record | Alert, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an installation may change when the files are rendered."""

    runbooks: str = "docs/runbooks"
    """Where the runbooks are published: a URL, or the folder of this repository."""
    longest_hold: str | None = None
    """Upper bound on every alert's waiting time, for demonstrations and tests; None leaves them as defined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFile:
    """One file of rules, and one PrometheusRule."""

    name: str
    about: str
    groups: tuple[Group, ...] = field(default=())

    def alerts(self) -> Iterator[Alert]:
        """Its alerting rules."""
        return (rule for group in self.groups for rule in group.rules if isinstance(rule, Alert))

    def render(self, settings: Settings) -> dict[str, Any]:
        """Content of the rule file, which is a PrometheusRule's `spec`, too."""
        return {
            "groups": [
                {"name": group.name, "rules": [_render(rule, settings) for rule in group.rules]}
                for group in self.groups
            ]
        }


def seconds(duration: str) -> int:
    """Seconds of a duration with one unit.

    Raises:
        ValueError: not such a duration.
    """
    match = re.fullmatch(r"(\d+)([smhd])", duration)
    if match is None:
        raise ValueError(f"{duration!r} is no duration; give a number and s, m, h or d")
    return int(match[1]) * _SECONDS[match[2]]


def risen(counter: str, window: str) -> str:
    """How much a counter rose within a window. A series that began within it, whose first value `increase` takes for
    given, counts from zero."""
    return f"(increase({counter}[{window}]) > 0 or ({counter} unless {counter} offset {window}))"


def _render(rule: Record | Alert, settings: Settings) -> dict[str, Any]:
    if isinstance(rule, Record):
        return {"record": rule.name, "expr": rule.expr}
    rendered: dict[str, Any] = {"alert": rule.name, "expr": rule.expr, "for": _bounded(rule.hold, settings)}
    rendered["labels"] = {"severity": rule.severity}
    rendered["annotations"] = {
        "summary": rule.summary,
        "description": rule.description,
        "runbook_url": f"{settings.runbooks.rstrip('/')}/{rule.name}.md",
    }
    return rendered


def _bounded(duration: str, settings: Settings) -> str:
    bound = settings.longest_hold
    return bound if bound is not None and seconds(bound) < seconds(duration) else duration
