"""What the API server serves beyond the kinds that every cluster has. Pure; `discovery` asks."""

from __future__ import annotations

from dataclasses import dataclass

DISRUPTION_BUDGETS = ("policy/v1", "policy/v1beta1")
PROMETHEUS = "monitoring.coreos.com/v1"
LEADER_WORKER_SET = "leaderworkerset.x-k8s.io/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Optional kinds and their versions. Absent ones are not made."""

    disruption_budget: str | None = None
    """Version of PodDisruptionBudget."""
    pod_monitor: bool = False
    prometheus_rule: bool = False
    leader_worker_set: bool = False
