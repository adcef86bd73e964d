"""Checks on records that have begun: do they still stand, were they answered, did they help?"""

from __future__ import annotations

from ullage_operator.model import Evidence, Phase, Remediation
from ullage_operator.observation import Observation, evidence
from ullage_operator.policy.begin import slots_full
from ullage_operator.policy.scaling import applies
from ullage_operator.policy.situation import SCALING, Situation
from ullage_operator.policy.types import Decision, Reason
from ullage_operator.remediation import approve, finish, start

RETRY_WINDOW_S = 120.0
"""Seconds for which a lost answer is asked for again; well inside the ten minutes that keys are kept."""
MAX_ATTEMPTS = 4
"""Times that one action is sent before it counts as failed."""
VERIFY_WINDOW_S = 60.0
"""Seconds after settling in which a fresh reading must judge an action, else it counts as Ineffective."""
EFFECT_MARGIN = 5.0
"""Points by which risk must fall to call an eviction effective while still at or above the threshold."""


def check_overdue(s: Situation) -> Decision | None:
    """End records whose time is over or whose engine is gone. It acts on nothing, so it needs no fresh data."""
    for record in s.open_records:
        ending = _overdue(s, record)
        if ending is not None:
            phase, message = ending
            return _conclude(record, phase, Reason.OVERDUE, message, now=s.now)
    return None


def check_proposal(s: Situation) -> Decision | None:
    """End proposals that are no longer needed; carry out those that were approved and still apply.

    One that waits holds up no other action: the ladder says what it waits for.
    """
    proposals = (r for r in s.open_records if r.status.phase in ("Proposed", "Approved"))
    return next((decision for r in proposals if (decision := _proposal(s, r))), None)


def check_unanswered(s: Situation) -> Decision | None:
    """Send an action again whose answer was lost, under the same key."""
    record = next((r for r in s.running if r.status.answered_at is None), None)
    if record is None:
        return None
    if s.fresh_of(record.spec.pod_uid) is None:
        return _hold(record, Reason.STALE_DATA, f"{record.spec.pod} has no fresh reading")
    return _send(record, Reason.UNANSWERED, f"asking again for the result of {record.metadata.name}")


def check_effect(s: Situation) -> Decision | None:
    """Judge an answered action by the first reading that was taken after it settled."""
    record = next((r for r in s.running if r.status.answered_at is not None), None)
    if record is None:
        return None
    observation = _judging(s, record)
    if observation is None:
        return _hold(record, Reason.SETTLING, f"{record.metadata.name} was carried out; effect awaited")
    now_seen = evidence(observation)
    effective, message = _judge(s, record, now_seen)
    phase: Phase = "Succeeded" if effective else "Ineffective"
    reason = Reason.EFFECTIVE if effective else Reason.INEFFECTIVE
    return _conclude(record, phase, reason, message, now=s.now, after=now_seen)


def _proposal(s: Situation, record: Remediation) -> Decision | None:
    observation, approved, action = s.fresh_of(record.spec.pod_uid), record.spec.approved, record.spec.action
    if observation is None:
        stale = f"{record.spec.pod} has no fresh reading"
        return _hold(record, Reason.STALE_DATA, stale) if approved else None
    if passed := _passed(s, record, observation):
        return _conclude(record, "Expired", Reason.RISK_PASSED, passed, now=s.now)
    if not approved:
        return None
    granted = approve(record) if record.status.phase == "Proposed" else record
    if not s.budget_left(action):
        return _hold(granted, Reason.RATE_LIMITED, "approved, but this hour's actions are spent", changed=True)
    if slots_full(s, action):
        return _hold(granted, Reason.GLOBAL_BUDGET, "approved, but other services come first", changed=True)
    running = start(granted, before=evidence(observation), now=s.now)
    by = f" by {record.spec.approved_by}" if record.spec.approved_by else ""
    return _send(running, Reason.APPROVED, f"approved{by}: {record.status.message}", changed=True)


def _passed(s: Situation, record: Remediation, observation: Observation) -> str | None:
    """Why a proposal is needed no longer."""
    pod, action = record.spec.pod, record.spec.action
    if action in SCALING and not applies(s, record):
        return "the number of engines or their load changed before it was approved"
    if observation.score <= s.policy.release_threshold and action not in ("release", "scaleDown"):
        return f"risk of {pod} fell to {observation.score:.0f} before it was approved"
    return None


def _overdue(s: Situation, record: Remediation) -> tuple[Phase, str] | None:
    running = record.status.phase == "Running"
    if running and record.spec.action in SCALING:
        return None  # followed stage by stage
    if not s.exists(record.spec.pod_uid):
        return ("Failed" if running else "Expired"), f"{record.spec.pod} is gone"
    if not running:
        return _proposal_overdue(s, record)
    answered_at, started_at = record.status.answered_at, record.status.started_at
    if answered_at is None:
        waited = s.now - (started_at or record.status.proposed_at).timestamp()
        if waited >= RETRY_WINDOW_S or record.status.attempts >= MAX_ATTEMPTS:
            return "Failed", f"no result after {record.status.attempts} attempts; what was done is not known"
        return None
    settled = answered_at.timestamp() + s.policy.settle_seconds
    if s.now >= settled + VERIFY_WINDOW_S and _judging(s, record) is None:
        return "Ineffective", f"no fresh reading within {VERIFY_WINDOW_S:.0f} s showed an effect"
    return None


def _proposal_overdue(s: Situation, record: Remediation) -> tuple[Phase, str] | None:
    if record.spec.mode != "Propose":
        return "Expired", "the operator stopped before it was started"
    if s.policy.mode_of(record.spec.action) == "Observe":
        return "Expired", f"the mode of {record.spec.action} is Observe now"
    if s.now - record.status.proposed_at.timestamp() >= s.policy.approval_seconds:
        return "Expired", f"not carried out within {s.policy.approval_seconds:g} s"
    return None


def _judging(s: Situation, record: Remediation) -> Observation | None:
    """A fresh reading of the record's engine, taken after the action had settled."""
    answered_at = record.status.answered_at
    observation = s.fresh_of(record.spec.pod_uid)
    if answered_at is None or observation is None:
        return None
    settled = answered_at.timestamp() + s.policy.settle_seconds
    return observation if observation.sampled_at >= settled else None


def _judge(s: Situation, record: Remediation, after: Evidence) -> tuple[bool, str]:
    if record.spec.action == "throttle":
        in_force = after.max_prompt_tokens is not None
        return (
            in_force,
            f"prompts over {after.max_prompt_tokens} tokens wait" if in_force else "no limit in force",
        )
    if record.spec.action == "release":
        lifted = after.max_prompt_tokens is None
        return lifted, "long prompts are admitted again" if lifted else "the limit is still in force"
    before = record.status.before or record.spec.inputs
    lower = after.score < s.policy.risk_threshold or after.score <= before.score - EFFECT_MARGIN
    if record.spec.action == "compact":
        return lower, f"{_closed(record, before, after)}; risk went from {before.score:.0f} to {after.score:.0f}"
    freed = record.status.bytes_freed or 0
    message = f"freed {freed} bytes; risk went from {before.score:.0f} to {after.score:.0f}"
    return freed > 0 and lower, message


def _closed(record: Remediation, before: Evidence, after: Evidence) -> str:
    """What a compaction did, in the terms for which it was decided."""
    if before.compactable_blocks is None:
        return f"longest free run went from {before.largest_free_run_blocks} to {after.largest_free_run_blocks} blocks"
    return f"freed {record.status.bytes_freed or 0} bytes"


def _conclude(
    record: Remediation,
    phase: Phase,
    reason: Reason,
    message: str,
    *,
    now: float,
    after: Evidence | None = None,
) -> Decision:
    ended = finish(record, phase, message=message, now=now, after=after)
    return Decision(
        verdict="Conclude",
        reason=reason,
        message=message,
        pod=record.spec.pod,
        action=record.spec.action,
        parameters=record.spec.parameters,
        updates=(ended,),
    )


def _hold(record: Remediation, reason: Reason, message: str, *, changed: bool = False) -> Decision:
    return Decision(
        verdict="Hold",
        reason=reason,
        message=message,
        pod=record.spec.pod,
        action=record.spec.action,
        updates=(record,) if changed else (),
    )


def _send(record: Remediation, reason: Reason, message: str, *, changed: bool = False) -> Decision:
    return Decision(
        verdict="Act",
        reason=reason,
        message=message,
        pod=record.spec.pod,
        action=record.spec.action,
        parameters=record.spec.parameters,
        updates=(record,) if changed else (),
        execute=record,
    )
