"""Status of a service from what was observed. Pure; the same observation gives an equal status, so that it is
written on change only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ullage_operator.desired import pod_labels
from ullage_operator.fields import moment
from ullage_operator.kube import Object
from ullage_operator.model import (
    Condition,
    InferenceService,
    LastAction,
    Remediation,
    RiskSummary,
    ServiceStatus,
)
from ullage_operator.observation import Observation
from ullage_operator.remediation import age_order
from ullage_operator.sweep import SweepResult

RISK_STEP = 3.0
"""Points by which the risk must change to be written again: status is for reading, metrics are for graphs."""

Tristate = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One condition before it gets its time stamp."""

    type: str
    status: Tristate
    reason: str
    message: str = ""


def observed_status(
    service: InferenceService,
    *,
    previous: ServiceStatus | None,
    deployment: Object | None,
    sweep: SweepResult | None,
    problem: str | None,
    now: float,
) -> ServiceStatus:
    """Status after one round. `sweep` is None when none was possible; `problem` is why reconciling failed."""
    before = previous or ServiceStatus()
    counts = (deployment or {}).get("status") or {}
    ready = int(counts.get("readyReplicas") or 0)
    fresh, stale = _split(service, sweep, now)
    facts = [
        _ready(service, ready),
        _progressing(service, deployment, problem),
        _reachable(fresh, stale),
        _risk_high(service, fresh),
        _throttled(fresh),
        _effective(sweep),
        _contract(fresh),
    ]
    facts.append(_degraded(service, facts, ready))
    return ServiceStatus(
        observed_generation=service.metadata.generation,
        phase=_phase(service, facts, ready),
        replicas=int(counts.get("replicas") or 0),
        ready_replicas=ready,
        selector=",".join(f"{key}={value}" for key, value in sorted(pod_labels(service).items())),
        throttled={"True": True, "False": False}.get(facts[4].status),
        risk=_risk(service, before.risk, fresh),
        last_action=_last_action(sweep) or before.last_action,
        conditions=_stamp(facts, before.conditions, service.metadata.generation, now),
    )


def invalid_status(
    previous: ServiceStatus | None, *, generation: int | None, problem: str, now: float
) -> ServiceStatus:
    """Status of a service whose spec cannot be used; what runs is left as it is."""
    before = previous or ServiceStatus()
    facts = [Fact("InvalidSpec", "True", "ValidationFailed", problem)]
    kept = [c for c in before.conditions if c.type != "InvalidSpec"]
    stamped = _stamp(facts, before.conditions, generation, now)
    return before.model_copy(
        update={"observed_generation": generation, "phase": "Invalid", "conditions": kept + stamped}
    )


def merge_body(status: ServiceStatus) -> dict[str, Any]:
    """As a merge patch: what is absent now is removed. Lists are replaced whole, so nothing in them says None."""
    body = status.model_dump(mode="json", by_alias=True)
    return {**body, "conditions": [condition.write() for condition in status.conditions]}


def _split(
    service: InferenceService, sweep: SweepResult | None, now: float
) -> tuple[list[Observation], list[Observation]]:
    observations = sweep.observations if sweep else ()
    limit = service.stale_after_s
    fresh = [o for o in observations if o.fresh(now=now, stale_after_s=limit)]
    stale = [o for o in observations if not o.fresh(now=now, stale_after_s=limit)]
    return sorted(fresh, key=lambda o: (-o.score, o.target.uid)), stale


def _ready(service: InferenceService, ready: int) -> Fact:
    wanted = service.spec.replicas.effective
    if ready >= wanted:
        return Fact("Ready", "True", "AllReady", f"{ready} of {wanted} engines are ready")
    reason = "SomeReady" if ready else "NoneReady"
    return Fact("Ready", "False", reason, f"{ready} of {wanted} engines are ready")


def _progressing(service: InferenceService, deployment: Object | None, problem: str | None) -> Fact:
    if service.spec.suspend:
        return Fact("Progressing", "False", "Suspended", "spec.suspend is true")
    if problem is not None:
        return Fact("Progressing", "False", "ReconcileFailed", problem)
    if deployment is None:
        return Fact("Progressing", "True", "Creating")
    status, spec = deployment.get("status") or {}, deployment.get("spec") or {}
    wanted = spec.get("replicas", 1)
    behind = status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0)
    if behind or status.get("updatedReplicas", 0) < wanted or status.get("replicas", 0) > wanted:
        return Fact("Progressing", "True", "RollingOut")
    if status.get("availableReplicas", 0) < wanted:
        return Fact("Progressing", "True", "WaitingForEngines")
    return Fact("Progressing", "False", "Complete")


def _reachable(fresh: Sequence[Observation], stale: Sequence[Observation]) -> Fact:
    if not fresh and not stale:
        return Fact("EngineReachable", "Unknown", "NoEngines", "no engine has an address yet")
    if stale:
        pods = ", ".join(sorted(o.target.pod for o in stale)[:5])
        total = len(fresh) + len(stale)
        return Fact("EngineReachable", "False", "StaleData", f"{len(stale)} of {total} not read: {pods}")
    return Fact("EngineReachable", "True", "Fresh")


def _risk_high(service: InferenceService, fresh: Sequence[Observation]) -> Fact:
    if not fresh:
        return Fact("RiskHigh", "Unknown", "StaleData", "no fresh reading")
    threshold = service.spec.remediation.risk_threshold
    if fresh[0].score >= threshold:
        return Fact("RiskHigh", "True", "AtThreshold", f"{fresh[0].target.pod} is at {threshold:g} or above")
    return Fact("RiskHigh", "False", "BelowThreshold")


def _throttled(fresh: Sequence[Observation]) -> Fact:
    if not fresh:
        return Fact("Throttled", "Unknown", "StaleData", "no fresh reading")
    limited = [o.target.pod for o in fresh if _limit(o) is not None]
    if limited:
        return Fact("Throttled", "True", "LimitInForce", f"long prompts are refused by {', '.join(limited[:5])}")
    return Fact("Throttled", "False", "NoLimit")


def _limit(observation: Observation) -> int | None:
    snapshot = observation.report.snapshot if observation.report else None
    return None if snapshot is None else snapshot.admission_max_prompt_tokens


def _effective(sweep: SweepResult | None) -> Fact:
    judged = [
        r
        for r in sorted(sweep.records if sweep else (), key=age_order)
        if r.status.phase in ("Succeeded", "Ineffective", "Failed")
    ]
    if not judged:
        return Fact("RemediationEffective", "Unknown", "NoRemediation")
    last = judged[-1]
    worked: Tristate = "True" if last.status.phase == "Succeeded" else "False"
    return Fact("RemediationEffective", worked, last.status.phase, f"{last.metadata.name}: {last.status.message}")


def _contract(fresh: Sequence[Observation]) -> Fact:
    """Whether the engines' metrics say what they should: a missing figure is never read as zero."""
    if not fresh:
        return Fact("MetricsContract", "Unknown", "StaleData", "no fresh reading")
    broken = [(o.target.pod, v) for o in fresh if o.report for v in o.report.violations]
    if not broken:
        return Fact("MetricsContract", "True", "Kept")
    pod, first = broken[0]
    more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
    return Fact("MetricsContract", "False", "Violated", f"{pod}: {first.metric} is {first.problem}{more}")


def _degraded(service: InferenceService, facts: Sequence[Fact], ready: int) -> Fact:
    """Whether something serves, and not all of it as it should."""
    if service.spec.suspend or ready == 0:
        return Fact("Degraded", "False", "NotServing")
    wrong = [f.type for f in facts if (f.type in _SOUND and f.status == "False") or (f.type, f.status) == _RISKY]
    if not wrong:
        return Fact("Degraded", "False", "AsExpected")
    return Fact("Degraded", "True", "NotAsExpected", ", ".join(wrong))


_SOUND = ("Ready", "EngineReachable", "MetricsContract")
_RISKY = ("RiskHigh", "True")


def _phase(
    service: InferenceService, facts: Sequence[Fact], ready: int
) -> Literal["Pending", "Ready", "Degraded", "Suspended"]:
    by_type = {fact.type: fact for fact in facts}
    if service.spec.suspend:
        return "Suspended"
    if ready == 0:
        return "Pending"
    healthy = by_type["Ready"].status == "True" and by_type["EngineReachable"].status != "False"
    return "Ready" if healthy else "Degraded"


def _risk(service: InferenceService, before: RiskSummary | None, fresh: Sequence[Observation]) -> RiskSummary | None:
    if not fresh:
        return None
    worst = fresh[0]
    report = worst.report
    forecast = report.forecast if report else None
    now_seen = RiskSummary(
        score=round(worst.score, 1),
        pod=worst.target.pod,
        term=(report.winner if report else None) or "",
        exhaustion_seconds=forecast.exhaustion_p50_s if forecast else None,
    )
    threshold = service.spec.remediation.risk_threshold
    same = before is not None and (
        (before.pod, before.term) == (now_seen.pod, now_seen.term)
        and abs(before.score - now_seen.score) < RISK_STEP
        and (before.score >= threshold) == (now_seen.score >= threshold)
    )
    return before if same else now_seen


def _last_action(sweep: SweepResult | None) -> LastAction | None:
    records: list[Remediation] = sorted(sweep.records if sweep else (), key=age_order)
    if not records:
        return None
    last = records[-1]
    return LastAction(
        name=last.metadata.name,
        action=last.spec.action,
        pod=last.spec.pod,
        phase=last.status.phase,
        message=last.status.message,
    )


def _stamp(facts: Sequence[Fact], previous: Sequence[Condition], generation: int | None, now: float) -> list[Condition]:
    known = {condition.type: condition for condition in previous}
    return [_stamped(fact, known.get(fact.type), generation, now) for fact in facts]


def _stamped(fact: Fact, old: Condition | None, generation: int | None, now: float) -> Condition:
    if old is not None and fact == Fact(old.type, old.status, old.reason, old.message):
        return (
            old if old.observed_generation == generation else old.model_copy(update={"observed_generation": generation})
        )
    same = old is not None and old.status == fact.status
    return Condition(
        type=fact.type,
        status=fact.status,
        reason=fact.reason,
        message=fact.message,
        observed_generation=generation,
        last_transition_time=old.last_transition_time if old and same else moment(now),
    )
