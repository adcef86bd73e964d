"""The life of a `Remediation`, as pure functions: each takes a record and returns the next one.

    Proposed ──▶ Approved ──▶ Running ──▶ Succeeded | Ineffective | Failed
        └────────────┴──▶ Expired

Under Enforce the policy itself approves; under Observe a proposal expires at once. Final phases are final.
While a change of size is Running it passes through stages (`STAGES`), each written down before its step is taken.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ullage_agent.wire import ActionResult
from ullage_operator.errors import IllegalTransition
from ullage_operator.fields import moment
from ullage_operator.model import (
    Evidence,
    InferenceService,
    ObjectMeta,
    Parameters,
    Phase,
    Remediation,
    RemediationSpec,
    RemediationStatus,
    RemedyAction,
    Stage,
)

SERVICE_LABEL = "ullage.dev/service"
"""Label on every child and record of a service; its value is the service's name."""
HOUR_S = 3600.0

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    "Proposed": frozenset({"Approved", "Expired"}),
    "Approved": frozenset({"Running", "Expired"}),
    "Running": frozenset({"Succeeded", "Ineffective", "Failed"}),
    "Succeeded": frozenset(),
    "Ineffective": frozenset(),
    "Failed": frozenset(),
    "Expired": frozenset(),
}


FIRST_STAGE: dict[RemedyAction, Stage] = {"scaleUp": "Scaling", "scaleDown": "Draining"}
STAGES: dict[Stage | None, frozenset[Stage]] = {
    None: frozenset({"Scaling", "Draining"}),
    "Scaling": frozenset({"Cancelling"}),
    "Cancelling": frozenset(),
    "Draining": frozenset({"Removing", "Restoring"}),
    "Removing": frozenset({"Restoring"}),
    "Restoring": frozenset(),
}
"""Stages of a running scaling record and what each leads to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that the policy wants taken on one engine."""

    action: RemedyAction
    parameters: Parameters
    reason: str
    message: str


def propose(service: InferenceService, step: Step, *, pod: str, uid: str, inputs: Evidence, now: float) -> Remediation:
    """A new record. Its name, the idempotency key, follows from service, step, engine and time alone."""
    metadata = service.metadata
    return Remediation(
        metadata=ObjectMeta(
            name=f"{metadata.name}-{step.action.lower()}-{_base36(round(now * 1000))}-{_digest(uid)}",
            namespace=metadata.namespace,
            labels={SERVICE_LABEL: metadata.name},
        ),
        spec=RemediationSpec(
            service=metadata.name,
            pod=pod,
            pod_uid=uid,
            action=step.action,
            parameters=step.parameters,
            reason=step.reason,
            inputs=inputs,
            mode=service.spec.remediation.mode_of(step.action),
        ),
        status=RemediationStatus(phase="Proposed", proposed_at=moment(now), message=step.message),
    )


def approve(record: Remediation) -> Remediation:
    """Proposed → Approved."""
    return _move(record, "Approved")


def start(record: Remediation, *, before: Evidence, now: float) -> Remediation:
    """Approved → Running. Write this down before the action is sent."""
    running = _move(record, "Running", started_at=moment(now), before=before)
    first = FIRST_STAGE.get(record.spec.action)
    return running if first is None else enter(running, first, message=record.status.message, now=now)


def enter(record: Remediation, stage: Stage, *, message: str, now: float) -> Remediation:
    """Begin a stage of a running scaling record. Write this down before the stage's step is taken.

    Raises:
        IllegalTransition: the present stage does not lead there.
    """
    present = record.status.stage
    if record.status.phase != "Running" or stage not in STAGES[present]:
        raise IllegalTransition(f"{record.metadata.name}: {record.status.phase}/{present} does not lead to {stage}")
    entered = _update(record, stage=stage, stage_at=moment(now), answered_at=None, attempts=0, message=message)
    return _update(entered, closed=True) if stage == "Removing" else entered


def stepped(record: Remediation, message: str, *, now: float) -> Remediation:
    """The stage's step was taken; its effect is still to be seen."""
    return _update(record, answered_at=moment(now), message=message)


def sent(record: Remediation) -> Remediation:
    """Count one more sending of a running record."""
    if record.status.phase != "Running":
        raise IllegalTransition(f"{record.metadata.name}: {record.status.phase} is not sent")
    return _update(record, attempts=record.status.attempts + 1)


def unanswered(record: Remediation, message: str) -> Remediation:
    """Still Running: it was sent, and no answer came that can be trusted."""
    return _update(record, message=message)


def answered(record: Remediation, result: ActionResult, *, now: float) -> Remediation:
    """Take the agent's result: a success stays Running until its effect is measured, all else is final."""
    figures = _update(
        record,
        answered_at=moment(now),
        bytes_freed=max(0, result.bytes_freed),
        blocks_freed=max(0, result.blocks_freed),
        message=result.message,
    )
    if result.outcome == "Succeeded":
        return figures
    phase: Phase = "Ineffective" if result.outcome == "Ineffective" else "Failed"
    return finish(figures, phase, message=result.message, now=now)


def finish(
    record: Remediation, phase: Phase, *, message: str, now: float, after: Evidence | None = None
) -> Remediation:
    """Enter a final phase.

    Raises:
        IllegalTransition: the record's phase does not lead there.
    """
    return _move(record, phase, finished_at=moment(now), message=message, after=after)


def surplus(records: Sequence[Remediation], *, limit: int, now: float, max_age_s: float = math.inf) -> list[str]:
    """Names of finished records to delete, oldest first: beyond `limit` or older than `max_age_s`.

    The last hour stays in any case, because the budget of actions per hour is counted from the records.
    """
    finished = sorted((r for r in records if r.final), key=age_order)
    over = max(0, len(finished) - limit)
    kept_s = max(HOUR_S, max_age_s)

    def old(record: Remediation, seconds: float) -> bool:
        return record.status.proposed_at.timestamp() < now - seconds

    return [r.metadata.name for i, r in enumerate(finished) if old(r, HOUR_S if i < over else kept_s)]


def age_order(record: Remediation) -> tuple[float, str]:
    """Sort key: oldest first, the same on every machine."""
    return record.status.proposed_at.timestamp(), record.metadata.name


def _move(record: Remediation, phase: Phase, **changes: Any) -> Remediation:
    present = record.status.phase
    if phase not in TRANSITIONS[present]:
        raise IllegalTransition(f"{record.metadata.name}: {present} does not lead to {phase}")
    return _update(record, phase=phase, **changes)


def _update(record: Remediation, **changes: Any) -> Remediation:
    return record.model_copy(update={"status": record.status.model_copy(update=changes)})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:4]


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    text = ""
    while number > 0:
        number, rest = divmod(number, 36)
        text = digits[rest] + text
    return text or "0"
