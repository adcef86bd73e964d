"""Alerts that fire about a service: a second witness for decisions, never an order. Pure.

While an alert fires, the engines it is about count as at risk from the release threshold on instead of the risk
threshold, its demand counts as lasting, no throttle is lifted and no engine is removed. Nothing is done on an alert
without a fresh reading of the engine. Non-goal: receiving them (`receiver`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

ALERT_TTL_S = 4 * 3600.0
"""Seconds after which an alert that was not told of again is forgotten; Alertmanager repeats every 4 h by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One firing alert about a service or one of its pods."""

    name: str
    received_at: float
    """Unix seconds by the operator's clock when it was last told of."""
    pod: str | None = None
    """None: the whole service."""
    fingerprint: str = ""
    """Alertmanager's identity of it."""

    def concerns(self, pod: str, *, now: float) -> bool:
        """Whether it still counts, and for that pod."""
        return now - self.received_at <= ALERT_TTL_S and self.pod in (None, pod)


class AlertBoard:
    """Alerts that fire, by service. In memory only: Alertmanager repeats what still fires."""

    def __init__(self) -> None:
        self._firing: dict[Hashable, dict[str, Alert]] = {}

    def fire(self, service: Hashable, alert: Alert) -> None:
        """It fires, or is told of again."""
        self._firing.setdefault(service, {})[alert.fingerprint] = alert

    def resolve(self, service: Hashable, fingerprint: str) -> None:
        """It ended."""
        self._firing.get(service, {}).pop(fingerprint, None)

    def of(self, service: Hashable, *, now: float) -> tuple[Alert, ...]:
        """What fires about a service, in a fixed order."""
        firing = self._firing.get(service, {})
        for fingerprint in [f for f, alert in firing.items() if now - alert.received_at > ALERT_TTL_S]:
            del firing[fingerprint]
        return tuple(sorted(firing.values(), key=lambda alert: (alert.name, alert.fingerprint)))

    def forget(self, service: Hashable) -> None:
        """A service is gone."""
        self._firing.pop(service, None)
