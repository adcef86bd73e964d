"""What `top` shows: services, their engines, and what was done lately. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..api import Object
from ..exposition import AgentMetrics

Order = Literal["risk", "name", "waiting"]
ORDERS: tuple[Order, ...] = ("risk", "name", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One engine."""

    name: str
    metrics: AgentMetrics | None = None
    problem: str = ""
    """Why there are no figures, or what is wrong."""

    @property
    def risk(self) -> float:
        """For sorting: unknown comes after everything known."""
        return -1.0 if self.metrics is None or self.metrics.risk is None else self.metrics.risk


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRow:
    """One service."""

    namespace: str
    name: str
    phase: str
    """Of the status; in local mode `Running`."""
    mode: str
    threshold: float
    ready: int | None
    wanted: int
    risk: float | None
    term: str
    exhaustion_s: float | None
    engines: tuple[EngineRow, ...] = ()

    @property
    def waiting(self) -> float:
        """Requests that wait, over all engines."""
        return sum(row.metrics.waiting or 0.0 for row in self.engines if row.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRow:
    """One remediation."""

    at: float
    """Unix seconds of its last change."""
    name: str
    service: str
    action: str
    pod: str
    phase: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Everything at one time."""

    at: float
    """Unix seconds."""
    source: str
    """Where it comes from."""
    services: tuple[ServiceRow, ...] = ()
    actions: tuple[ActionRow, ...] = ()
    """Newest first."""
    problem: str = ""
    """Why it could not be read this time; what is shown is older then."""


def service_row(obj: Object, engines: Sequence[EngineRow]) -> ServiceRow:
    """From an InferenceService as stored."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    risk, policy = status.get("risk") or {}, spec.get("remediation") or {}
    replicas = spec.get("replicas") or {}
    worst = max(engines, key=lambda row: row.risk, default=None)
    live = worst.metrics if worst is not None and worst.risk >= 0 else None
    return ServiceRow(
        namespace=obj["metadata"]["namespace"],
        name=obj["metadata"]["name"],
        phase=str(status.get("phase") or "New"),
        mode=str(policy.get("mode") or "Observe"),
        threshold=float(policy.get("riskThreshold") or 85),
        ready=status.get("readyReplicas"),
        wanted=int(replicas.get("desired") or replicas.get("min") or 1),
        risk=live.risk if live else risk.get("score"),
        term=live.winner if live else str(risk.get("term") or ""),
        exhaustion_s=live.exhaustion_s if live else risk.get("exhaustionSeconds"),
        engines=tuple(sorted(engines, key=lambda row: row.name)),
    )


def action_row(obj: Object, seconds: float) -> ActionRow:
    """From a Remediation as stored; `seconds` is when it last changed."""
    spec, status = obj["spec"], obj.get("status") or {}
    return ActionRow(
        at=seconds,
        name=obj["metadata"]["name"],
        service=spec["service"],
        action=spec["action"],
        pod=spec["pod"],
        phase=str(status.get("phase") or "Proposed"),
        message=str(status.get("message") or ""),
    )


def ordered(services: Sequence[ServiceRow], order: Order) -> list[ServiceRow]:
    """By risk (greatest first), by name, or by requests that wait."""
    if order == "name":
        return sorted(services, key=lambda s: (s.namespace, s.name))
    if order == "waiting":
        return sorted(services, key=lambda s: (-s.waiting, s.namespace, s.name))
    return sorted(services, key=lambda s: (-(-1.0 if s.risk is None else s.risk), s.namespace, s.name))


def as_dict(fleet: Fleet) -> dict[str, Any]:
    """For programs; null where something is not known."""
    return {
        "at": fleet.at,
        "source": fleet.source,
        "services": [_service_dict(service) for service in fleet.services],
        "remediations": [
            {name: getattr(row, name) for name in ("at", "name", "service", "action", "pod", "phase", "message")}
            for row in fleet.actions
        ],
        **({"problem": fleet.problem} if fleet.problem else {}),
    }


def _service_dict(service: ServiceRow) -> dict[str, Any]:
    return {
        "namespace": service.namespace,
        "name": service.name,
        "phase": service.phase,
        "mode": service.mode,
        "ready": service.ready,
        "wanted": service.wanted,
        "risk": service.risk,
        "term": service.term,
        "exhaustionSeconds": service.exhaustion_s,
        "engines": [_engine_dict(row) for row in service.engines],
    }


def _engine_dict(row: EngineRow) -> dict[str, Any]:
    found = row.metrics
    if found is None:
        return {"name": row.name, "problem": row.problem}
    figures: Mapping[str, Any] = {
        "name": row.name,
        "engine": found.engine,
        "model": found.model,
        "risk": found.risk,
        "terms": found.terms,
        "memoryBytes": found.memory,
        "fragmentation": found.fragmentation,
        "exhaustionSeconds": found.exhaustion_s,
        "running": found.running,
        "waiting": found.waiting,
        "limitTokens": found.limit_tokens,
        "sampleAgeSeconds": found.sample_age_s,
        "liveness": found.liveness,
    }
    return {**figures, **({"problem": row.problem} if row.problem else {})}


def engine_row(name: str, found: AgentMetrics | str) -> EngineRow:
    """From what reading its agent gave."""
    if isinstance(found, str):
        return EngineRow(name=name, problem=found)
    if not found.sources.get("engine", True):
        return EngineRow(name=name, metrics=found, problem="the agent cannot read its engine")
    if found.violations:
        metric, problem = found.violations[0]
        return EngineRow(name=name, metrics=found, problem=f"{metric} is {problem}")
    return EngineRow(name=name, metrics=found)


@dataclass(slots=True)
class Trail:
    """Risks of the last readings of each service, for the little curves. Bounded."""

    length: int = 30
    risks: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)

    def enter(self, fleet: Fleet) -> None:
        """Add a reading; services that are gone are forgotten."""
        kept = {}
        for service in fleet.services:
            key = (service.namespace, service.name)
            kept[key] = [*self.risks.get(key, []), service.risk][-self.length :]
        self.risks = kept
