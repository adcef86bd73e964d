"""What stands around a service's pods: disruption budget, network policy, scraping and alert rules. Pure."""

from __future__ import annotations

from typing import Any

from ullage_operator.features import PROMETHEUS, Features
from ullage_operator.model import InferenceService
from ullage_operator.pods import NAME_LABEL, pod_labels

Object = dict[str, Any]

SERVICE_ALERT_LABEL = "ullage_service"
"""Label of an alert that names its InferenceService; `namespace` and `pod` stand beside it."""
RUNBOOKS = "docs/runbooks"
"""Folder of this repository with a page for each alert."""


def surroundings(service: InferenceService, features: Features) -> list[tuple[str, str, Object]]:
    """apiVersion, kind and spec of each."""
    monitored = service.spec.monitoring.enabled
    found: list[tuple[str, str, Object]] = []
    if features.disruption_budget:
        found.append((features.disruption_budget, "PodDisruptionBudget", _budget(service)))
    if service.spec.network.policy:
        found.append(("networking.k8s.io/v1", "NetworkPolicy", _network(service)))
    if monitored and features.pod_monitor:
        found.append((PROMETHEUS, "PodMonitor", _monitor(service)))
    if monitored and features.prometheus_rule:
        found.append((PROMETHEUS, "PrometheusRule", _rules(service)))
    return found


def _selector(service: InferenceService) -> Object:
    return {"matchLabels": pod_labels(service)}


def _budget(service: InferenceService) -> Object:
    return {"maxUnavailable": 1, "selector": _selector(service)}


def _network(service: InferenceService) -> Object:
    """Requests and metrics from everywhere (metrics as narrowed), actions from operators alone."""
    engine, agent = service.spec.engine, service.spec.agent
    readers = [{"namespaceSelector": {"matchLabels": service.spec.network.metrics_from}}]
    metrics: Object = {"ports": [_port(agent.metrics_port)]}
    if service.spec.network.metrics_from:
        metrics["from"] = readers
    operators = [{"namespaceSelector": {}, "podSelector": {"matchLabels": {NAME_LABEL: "ullage-operator"}}}]
    among: list[Object] = [] if engine.nodes == 1 else [{"from": [{"podSelector": {}}]}]
    return {
        "podSelector": _selector(service),
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": [_port(engine.port)]},
            metrics,
            {"ports": [_port(agent.action_port)], "from": operators},
            *among,
        ],
    }


def _port(number: int) -> Object:
    return {"port": number, "protocol": "TCP"}


def _monitor(service: InferenceService) -> Object:
    interval = f"{service.spec.monitoring.interval_seconds}s"
    relabel = [{"action": "replace", "targetLabel": SERVICE_ALERT_LABEL, "replacement": service.metadata.name}]
    endpoints = [{"port": port, "path": "/metrics", "interval": interval, "relabelings": relabel} for port in _PORTS]
    return {"selector": _selector(service), "podMetricsEndpoints": endpoints}


_PORTS = ("metrics", "http")


def _rules(service: InferenceService) -> Object:
    name, policy = service.metadata.name, service.spec.remediation
    scope = f'{SERVICE_ALERT_LABEL}="{name}",namespace="{service.metadata.namespace}"'
    labels = {SERVICE_ALERT_LABEL: name}
    high = {
        "alert": "UllageRiskHigh",
        "expr": f"max by (namespace, pod, {SERVICE_ALERT_LABEL})"
        f" (llm_oom_risk_score{{{scope}}}) >= {policy.risk_threshold:g}",
        "for": "2m",
        "labels": {**labels, "severity": "warning"},
        "annotations": {
            "summary": "The KV cache of {{ $labels.pod }} is filling up faster than it is relieved.",
            "runbook_url": f"{RUNBOOKS}/UllageRiskHigh.md",
        },
    }
    silent = {
        "alert": "UllageAgentSilent",
        "expr": f"absent(llm_oom_risk_score{{{scope}}})",
        "for": "5m",
        "labels": {**labels, "severity": "warning"},
        "annotations": {
            "summary": f"No agent of {name} is scraped: nothing is decided on its risk.",
            "runbook_url": f"{RUNBOOKS}/UllageAgentSilent.md",
        },
    }
    return {"groups": [{"name": f"ullage-{name}", "rules": [high, silent]}]}
