"""Checks that begin something new: evict, throttle, release, or hold and say why."""

from __future__ import annotations

from ullage_operator.model import Parameters
from ullage_operator.observation import Observation, evidence
from ullage_operator.policy.situation import Situation
from ullage_operator.policy.types import Decision, Reason
from ullage_operator.remediation import Step, approve, finish, propose, start


def check_paused(s: Situation) -> Decision | None:
    """A suspended service is left as it is."""
    if not s.inputs.service.spec.suspend:
        return None
    return Decision(verdict="Hold", reason=Reason.PAUSED, message="spec.suspend is true")


def check_all_stale(s: Situation) -> Decision | None:
    """Without one fresh reading nothing is decided."""
    return None if s.fresh else _hold_stale(s)


def check_rate(s: Situation) -> Decision | None:
    """The budget of the hour is spent. Lifting a throttle is not counted, so it is not held up."""
    if not s.at_risk or s.releasable is not None or s.budget_left() > 0:
        return None
    limit = s.policy.max_actions_per_hour
    return _hold(s.at_risk[0], Reason.RATE_LIMITED, f"{limit} actions were started within the last hour")


def check_cooldown(s: Situation) -> Decision | None:
    """Every engine at risk for which there is a step had one a moment ago."""
    if s.actionable is not None or s.releasable is not None:
        return None
    cooling = next((o for o in s.at_risk if s.rung(o) == "cooling"), None)
    if cooling is None:
        return None
    seconds = s.policy.evict.cooldown_seconds
    return _hold(cooling, Reason.COOLING_DOWN, f"risk {cooling.score:.0f}; {seconds:g} s between two steps")


def check_evict(s: Situation) -> Decision | None:
    """First rung: drop the coldest blocks of the engine at the greatest risk."""
    if s.actionable is None or s.actionable[1] != "evict" or s.budget_left() <= 0:
        return None
    observation = s.actionable[0]
    ratio = s.policy.evict.ratio
    step = Step(
        action="evict",
        parameters=Parameters(ratio=ratio),
        reason=Reason.EVICT.value,
        message=f"{_risk(s, observation)}: evict {ratio:.0%} of the occupied blocks",
    )
    return _begin(s, observation, step)


def check_throttle(s: Situation) -> Decision | None:
    """Second rung: refuse long prompts where eviction did not help or is not to be had."""
    if s.actionable is None or s.actionable[1] != "throttle" or s.budget_left() <= 0:
        return None
    observation, policy = s.actionable[0], s.policy.throttle
    step = Step(
        action="throttle",
        parameters=Parameters(max_prompt_tokens=policy.max_prompt_tokens, ttl_seconds=policy.ttl_seconds),
        reason=Reason.THROTTLE.value,
        message=f"{_risk(s, observation)} and eviction does not help: refuse prompts over "
        f"{policy.max_prompt_tokens} tokens for {policy.ttl_seconds:g} s",
    )
    return _begin(s, observation, step)


def check_release(s: Situation) -> Decision | None:
    """Lift our own throttle once risk is down to the release threshold. It only undoes: no approval is asked."""
    observation = s.releasable
    if observation is None:
        return None
    message = f"risk {observation.score:.0f} is down to the release threshold {s.policy.release_threshold:g}"
    step = Step(action="release", parameters=Parameters(), reason=Reason.RELEASE.value, message=message)
    return _begin(s, observation, step)


def check_exhausted(s: Situation) -> Decision | None:
    """Risk is high and nothing is left to do."""
    if not s.at_risk:
        return None
    return _hold(s.at_risk[0], Reason.EXHAUSTED, f"{_risk(s, s.at_risk[0])}; no step is left")


def check_some_stale(s: Situation) -> Decision | None:
    """Engines that are read are well; of the others nothing is known."""
    return _hold_stale(s) if s.stale else None


def check_healthy(s: Situation) -> Decision | None:
    """All engines were read and none is at risk."""
    worst = s.fresh[0]
    return _hold(worst, Reason.HEALTHY, f"greatest risk is {worst.score:.0f}")


def _begin(s: Situation, observation: Observation, step: Step) -> Decision:
    """The record for a step, as far as the mode lets it go at once."""
    target, seen = observation.target, evidence(observation)
    record = propose(s.inputs.service, step, pod=target.pod, uid=target.uid, inputs=seen, now=s.now)
    mode = s.policy.mode
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


def _hold(observation: Observation, reason: Reason, message: str) -> Decision:
    return Decision(verdict="Hold", reason=reason, message=message, pod=observation.target.pod)


def _hold_stale(s: Situation) -> Decision:
    if not s.stale:
        return Decision(verdict="Hold", reason=Reason.STALE_DATA, message="no engine to read")
    first = s.stale[0]
    others = f" (and {len(s.stale) - 1} more)" if len(s.stale) > 1 else ""
    return _hold(first, Reason.STALE_DATA, f"{first.target.pod} {first.problem(now=s.now)}{others}")


def _risk(s: Situation, observation: Observation) -> str:
    winner = observation.report.winner if observation.report else None
    by = f" ({winner})" if winner else ""
    return f"risk {observation.score:.0f}{by} is at or above {s.policy.risk_threshold:g}"
