"""Objects that several tests of the command line need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ullage_operator.model import Remediation

RECORD: dict[str, Any] = {
    "apiVersion": "ullage.dev/v1alpha1",
    "kind": "Remediation",
    "metadata": {"name": "demo-evict-1", "namespace": "default", "labels": {"ullage.dev/service": "demo"}},
    "spec": {
        "service": "demo",
        "pod": "demo-0",
        "podUID": "u0",
        "action": "evict",
        "parameters": {"ratio": 0.2},
        "reason": "EvictColdBlocks",
        "inputs": {"sampledAt": "2026-01-01T00:00:00Z", "score": 88.4, "winner": "classic"},
        "mode": "Enforce",
    },
    "status": {"phase": "Running", "proposedAt": "2026-01-01T00:00:00Z", "message": "risk 88"},
}


@pytest.fixture
def make_record() -> Callable[..., Remediation]:
    """A remediation; keywords change its status, `name` its name, `spec` parts of its spec."""

    def make(name: str = "demo-evict-1", spec: dict[str, Any] | None = None, **status: Any) -> Remediation:
        return Remediation.read(
            RECORD
            | {
                "metadata": RECORD["metadata"] | {"name": name},
                "spec": RECORD["spec"] | (spec or {}),
                "status": RECORD["status"] | status,
            }
        )

    return make


@pytest.fixture
def effective(make_record: Callable[..., Remediation]) -> Remediation:
    """An eviction that helped."""
    return make_record(
        phase="Succeeded",
        answeredAt="2026-01-01T00:00:01Z",
        finishedAt="2026-01-01T00:00:06Z",
        blocksFreed=42,
        bytesFreed=42 * 195840,
        before={"sampledAt": "2026-01-01T00:00:00Z", "score": 88.4},
        after={"sampledAt": "2026-01-01T00:00:06Z", "score": 71.2},
    )
