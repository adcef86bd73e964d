"""Ask the API server which optional kinds it serves."""

from __future__ import annotations

from ullage_operator.features import DISRUPTION_BUDGETS, LEADER_WORKER_SET, PROMETHEUS, Features
from ullage_operator.kube import Cluster


async def discover(cluster: Cluster) -> Features:
    """Ask the API server.

    Raises:
        ClusterError: it does not answer.
    """
    prometheus = await cluster.resources(PROMETHEUS)
    budgets = [v for v in DISRUPTION_BUDGETS if "poddisruptionbudgets" in await cluster.resources(v)]
    return Features(
        disruption_budget=budgets[0] if budgets else None,
        pod_monitor="podmonitors" in prometheus,
        prometheus_rule="prometheusrules" in prometheus,
        leader_worker_set="leaderworkersets" in await cluster.resources(LEADER_WORKER_SET),
    )
