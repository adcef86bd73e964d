"""Alertmanager's webhook body, read into alerts by service. Pure; what is done about them is decided elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ullage_operator.alerts import Alert
from ullage_operator.book import ServiceKey
from ullage_operator.surroundings import SERVICE_ALERT_LABEL


@dataclass(frozen=True, slots=True)
class Told:
    """One alert as told: it fires, or it ended."""

    service: ServiceKey
    alert: Alert
    firing: bool


def read_alerts(body: object, *, now: float) -> Iterator[Told | None]:
    """Each alert of the body; None for one that names no service.

    Raises:
        ValueError: not Alertmanager's format.
    """
    alerts = body.get("alerts") if isinstance(body, dict) else None
    if not isinstance(alerts, list):
        raise ValueError("there is no list 'alerts'; send Alertmanager's webhook format, version 4")
    for entry in alerts:
        if not isinstance(entry, dict) or not isinstance(entry.get("labels"), dict):
            raise ValueError("an alert has no labels")
        yield _told(entry, entry["labels"], now)


def _told(entry: dict[str, Any], labels: dict[str, Any], now: float) -> Told | None:
    namespace, service = labels.get("namespace"), labels.get(SERVICE_ALERT_LABEL)
    if not (isinstance(namespace, str) and isinstance(service, str) and namespace and service):
        return None
    pod = labels.get("pod")
    alert = Alert(
        name=str(labels.get("alertname") or "alert")[:200],
        received_at=now,
        pod=pod if isinstance(pod, str) and pod else None,
        fingerprint=str(entry.get("fingerprint") or _fingerprint(labels))[:200],
    )
    return Told(ServiceKey(namespace, service), alert, firing=entry.get("status") == "firing")


def _fingerprint(labels: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(labels, sort_keys=True).encode()).hexdigest()[:16]
