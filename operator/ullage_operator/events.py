"""Kubernetes Events for decisions. Pure construction."""

from __future__ import annotations

import secrets
from typing import Any

from ullage_operator.fields import moment
from ullage_operator.kube import SPEC_MANAGER
from ullage_operator.model import API_VERSION, InferenceService
from ullage_operator.policy import Decision, Reason

WORRYING = frozenset({Reason.STALE_DATA, Reason.RATE_LIMITED, Reason.EXHAUSTED, Reason.INEFFECTIVE})
"""Decisions that are shown as warnings."""
MESSAGE_LIMIT = 1000
"""Characters; the API refuses longer ones at 1024."""


def decision_event(service: InferenceService, decision: Decision, *, now: float) -> dict[str, Any]:
    """The Event that tells of a decision."""
    where = f"{decision.pod}: " if decision.pod else ""
    kind = "Warning" if decision.reason in WORRYING else "Normal"
    return event(service, kind=kind, reason=decision.reason.value, message=f"{where}{decision.message}", now=now)


def event(service: InferenceService, *, kind: str, reason: str, message: str, now: float) -> dict[str, Any]:
    """An Event about a service; `kind` is Normal or Warning."""
    metadata = service.metadata
    stamp = moment(now).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata.name}.{secrets.token_hex(8)}",
            "namespace": metadata.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": "InferenceService",
            "name": metadata.name,
            "namespace": metadata.namespace,
            "uid": metadata.uid,
        },
        "type": kind,
        "reason": reason,
        "message": message[:MESSAGE_LIMIT],
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
        "source": {"component": SPEC_MANAGER},
    }
