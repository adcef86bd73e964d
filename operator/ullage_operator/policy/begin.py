"""How something new begins: a record, as far as its mode and the budgets let it go at once."""

from __future__ import annotations

from ullage_operator.model import RemedyAction
from ullage_operator.observation import Observation, evidence
from ullage_operator.policy.situation import Situation
from ullage_operator.policy.types import Decision, Reason
from ullage_operator.remediation import Step, approve, finish, propose, start

DISRUPTIVE: frozenset[RemedyAction] = frozenset({"evict", "compact", "throttle", "scaleDown"})
"""Actions that requests may feel. At most one is in flight per service, and so many over all services."""


def begin(s: Situation, observation: Observation, step: Step) -> Decision:
    """Observe notes the step down, Propose asks for it, Enforce starts it; lifting a throttle asks nobody."""
    target, seen = observation.target, evidence(observation)
    mode = s.policy.mode_of(step.action)
    if mode == "Enforce" and (full := _slots_full(s, observation, step)):
        return full
    record = propose(s.inputs.service, step, pod=target.pod, uid=target.uid, inputs=seen, now=s.now)
    if mode == "Observe":
        record = finish(record, "Expired", message=f"not done, mode is Observe: {step.message}", now=s.now)
    elif mode == "Enforce" or step.action == "release":
        record = start(approve(record), before=seen, now=s.now)
    acts = record.status.phase == "Running"
    return Decision(
        verdict="Act" if acts else "Observe" if mode == "Observe" else "Propose",
        reason=Reason(step.reason),
        message=step.message,
        pod=target.pod,
        action=step.action,
        parameters=step.parameters,
        updates=(record,),
        execute=record if acts else None,
    )


def hold(observation: Observation, reason: Reason, message: str) -> Decision:
    """Do nothing, and say why."""
    return Decision(verdict="Hold", reason=reason, message=message, pod=observation.target.pod)


def slots_full(s: Situation, action: RemedyAction) -> bool:
    """Whether the budget over all services has no place for such an action."""
    return action in DISRUPTIVE and s.inputs.slots_left is not None and s.inputs.slots_left <= 0


def _slots_full(s: Situation, observation: Observation, step: Step) -> Decision | None:
    if not slots_full(s, step.action):
        return None
    return hold(observation, Reason.GLOBAL_BUDGET, f"other services' actions come first; then: {step.message}")
