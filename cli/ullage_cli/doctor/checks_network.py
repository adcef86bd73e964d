"""Whether NetworkPolicies let in who must come in. Pure; a policy's own meaning is that of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..api import Object
from .facts import SERVICE_LABEL, Facts, ServiceFacts
from .findings import Finding, error, info, ok, unknown, warning


@dataclass(frozen=True, slots=True)
class Door:
    """A port and who must come in by it."""

    port: int
    name: str
    """Of the container's port: policies may use it in place of the number."""
    labels: Mapping[str, str] | None = None
    """Of those who must come in; None: anybody at all."""


def check_network(facts: Facts, service: ServiceFacts) -> Iterator[Finding]:
    """Do NetworkPolicies let in who must come in?"""
    subject, spec = f"network of {service.namespace}/{service.name}", service.obj.get("spec") or {}
    if reason := service.unread.get("NetworkPolicies"):
        yield unknown(subject, reason, "run this as somebody who may list NetworkPolicies")
        return
    own = next((p for p in service.policies if p["metadata"]["name"] == service.name), None)
    wanted = (spec.get("network") or {}).get("policy", True)
    if wanted and own is None and service.service is not None:
        yield warning(subject, "the NetworkPolicy is missing", "see Progressing in the status")
    selecting = [p for p in service.policies if _selects_pods(p, service) and _about_ingress(p)]
    if not selecting:
        if not wanted:
            yield info(subject, "no NetworkPolicy: everybody may reach the action port, token and TLS alone guard it")
        return
    agent = spec.get("agent") or {}
    ports = {
        "actions": Door(int(agent.get("actionPort", 9401)), "actions", _operator_labels(facts)),
        "metrics": Door(int(agent.get("metricsPort", 9400)), "metrics"),
        "requests": Door(int((spec.get("engine") or {}).get("port", 8000)), "http"),
    }
    closed = [use for use, door in ports.items() if not any(_lets_in(p, door) for p in selecting)]
    for use in closed:
        names = ", ".join(p["metadata"]["name"] for p in selecting)
        yield error(
            subject,
            f"{names}: nobody who must come in for {use} may reach port {ports[use].port}",
            "delete the policy that was added, or allow that port; the operator restores its own",
        )
    if not closed:
        yield ok(subject, "requests, metrics and the operator's calls are let in")


def _operator_labels(facts: Facts) -> Mapping[str, str]:
    labels: dict[str, str] = {"app.kubernetes.io/name": "ullage-operator"}
    for operator in facts.operators:
        labels = dict(operator.deployment["spec"]["template"]["metadata"].get("labels") or {})
    return labels


def _about_ingress(policy: Object) -> bool:
    return "Ingress" in (policy["spec"].get("policyTypes") or ["Ingress"])


def _selects_pods(policy: Object, service: ServiceFacts) -> bool:
    selector = policy["spec"].get("podSelector") or {}
    pods = service.pods or [{"metadata": {"labels": {SERVICE_LABEL: service.name}}}]
    return any(_selected(selector, _labels(pod)) for pod in pods)


def _lets_in(policy: Object, door: Door) -> bool:
    """Whether some rule opens a port for those who must come in."""
    for rule in policy["spec"].get("ingress") or []:
        ports = rule.get("ports")
        if ports and not any(_covers(entry, door) for entry in ports):
            continue
        peers = rule.get("from")
        if not peers or door.labels is None or any(_peer(peer, door.labels) for peer in peers):
            return True
    return False


def _covers(entry: Mapping[str, Any], door: Door) -> bool:
    low = entry.get("port")
    if low is None or low == door.name:
        return True
    return isinstance(low, int) and low <= door.port <= int(entry.get("endPort", low))


def _peer(peer: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if "podSelector" in peer:
        return _selected(peer["podSelector"], labels)
    return "namespaceSelector" in peer


def _selected(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions") or []:
        there, values = labels.get(expression["key"]), expression.get("values") or []
        holds = {
            "In": there in values,
            "NotIn": there not in values,
            "Exists": there is not None,
            "DoesNotExist": there is None,
        }[expression["operator"]]
        if not holds:
            return False
    return True


def _labels(obj: Object) -> dict[str, str]:
    return dict(obj["metadata"].get("labels") or {})
