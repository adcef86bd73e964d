"""Checks that begin something new on an engine, or hold and say why."""

from __future__ import annotations

from ullage_operator.model import Parameters
from ullage_operator.observation import Observation
from ullage_operator.policy.begin import begin, hold
from ullage_operator.policy.rungs import Rung, in_throttle_range, next_rung
from ullage_operator.policy.scaling import grow
from ullage_operator.policy.situation import Situation, capable, throttled
from ullage_operator.policy.types import Decision, Reason
from ullage_operator.remediation import Step

SHORTAGE = frozenset({"forecast", "thrash"})
"""Terms that say that admitted work needs more than the cache has, reclaimable blocks included."""
RENEW_SHARE = 0.5
"""Share of a throttle's time left from which it is renewed while a new engine is on its way."""


def check_paused(s: Situation) -> Decision | None:
    """A suspended service is left as it is."""
    if not s.inputs.service.spec.suspend:
        return None
    return Decision(verdict="Hold", reason=Reason.PAUSED, message="spec.suspend is true")


def check_all_stale(s: Situation) -> Decision | None:
    """Without one fresh reading nothing is decided."""
    return None if s.fresh else _hold_stale(s)


def check_emergency(s: Situation) -> Decision | None:
    """Memory outside the cache is nearly gone: fewer long prompts at once, then one engine more."""
    limit = s.policy.emergency_threshold
    for observation in (o for o in s.fresh if o.outside_score >= limit):
        cooling = s.cooling("throttle", observation.target.uid) or s.open_proposal(("throttle",))
        if in_throttle_range(s, observation) and not cooling and s.budget_left("throttle"):
            why = f"{_winner(observation)} is at {observation.outside_score:.0f}, which no eviction lowers"
            return begin(s, observation, _throttle(s, Reason.EMERGENCY, why))
        if throttled(observation) and (grown := grow(s, observation, Reason.EMERGENCY)):
            return grown
    return None


def check_rate(s: Situation) -> Decision | None:
    """The budget of the hour is spent. Lifting a throttle is not counted, so it is not held up."""
    if not s.at_risk or s.releasable is not None:
        return None
    rungs = [rung for o in s.at_risk if (rung := next_rung(s, o)) and rung.state == "ready"]
    if any(s.budget_left(rung.action) for rung in rungs) or not (rungs or _spent(s)):
        return None
    limit = s.policy.max_actions_per_hour
    what = f"{limit} actions" if _spent(s) else f"as many of {rungs[0].action} as allowed"
    return hold(s.at_risk[0], Reason.RATE_LIMITED, f"{what} were started within the last hour")


def check_cooldown(s: Situation) -> Decision | None:
    """Every engine at risk for which there is a step had one a moment ago, or waits for a person."""
    rungs = [(o, rung) for o in s.at_risk if (rung := next_rung(s, o))]
    if s.releasable is not None or any(rung.state == "ready" for _, rung in rungs):
        return None
    for observation, rung in rungs:
        if rung.state == "awaiting":
            return _awaiting(s, observation, rung)
        seconds = s.policy.of(rung.action).cooldown_seconds
        message = f"risk {observation.score:.0f}; {seconds:g} s between two steps of {rung.action}"
        return hold(observation, Reason.COOLING_DOWN, message)
    return None


def check_evict(s: Situation) -> Decision | None:
    """First rung: drop the coldest blocks of the engine at the greatest risk."""
    observation = _turn(s, "evict")
    if observation is None:
        return None
    ratio, of_what = _evict_share(s, observation)
    message = f"{_risk(s, observation)}: evict {s.policy.evict.ratio:.0%} of the {of_what}"
    step = Step(action="evict", parameters=Parameters(ratio=ratio), reason=Reason.EVICT.value, message=message)
    return begin(s, observation, step)


def check_compact(s: Situation) -> Decision | None:
    """Second rung: close holes where eviction does not help, and this frees blocks or free ones lie scattered."""
    observation = _turn(s, "compact")
    if observation is None:
        return None
    budget = s.policy.compact.budget_ms
    snapshot = observation.report.snapshot if observation.report else None
    spare = snapshot.compactable_blocks if snapshot else None
    holes = "free blocks lie scattered" if spare is None else f"{spare} blocks could be freed by closing holes"
    message = f"{_risk(s, observation)} and {holes}: compact for at most {budget} ms"
    step = Step(action="compact", parameters=Parameters(budget_ms=budget), reason=Reason.COMPACT.value, message=message)
    return begin(s, observation, step)


def check_throttle(s: Situation) -> Decision | None:
    """Third rung: refuse long prompts where eviction did not help or is not to be had."""
    observation = _turn(s, "throttle")
    if observation is None:
        return None
    return begin(s, observation, _throttle(s, Reason.THROTTLE, f"{_risk(s, observation)} and eviction does not help"))


def check_scale_up(s: Situation) -> Decision | None:
    """Last rung: nothing on the engine is left to try."""
    observation = _turn(s, "scaleUp")
    return None if observation is None else grow(s, observation, Reason.SCALE_UP)


def check_bridge(s: Situation) -> Decision | None:
    """A throttle holds until the new engine is ready: renew the one that lapses before."""
    if not s.growing or not s.budget_left("throttle"):
        return None
    for observation in s.fresh:
        snapshot = observation.report.snapshot if observation.report else None
        left = snapshot.admission_expires_in_s if snapshot else None
        lapsing = left is not None and left <= RENEW_SHARE * s.policy.throttle.ttl_seconds
        ours = s.last_ended(("throttle",), observation.target.uid)
        if not (lapsing and ours and capable(observation, "throttle")) or s.open_proposal(("throttle",)):
            continue
        if observation.score > s.policy.release_threshold and not s.cooling("throttle", observation.target.uid):
            return begin(s, observation, _throttle(s, Reason.BRIDGE, "a new engine is not ready yet"))
    return None


def check_release(s: Situation) -> Decision | None:
    """Lift our own throttle once risk is down, or the engine it bridged for is there. It only undoes."""
    observation = s.releasable
    if observation is None:
        return None
    down = observation.score <= s.policy.release_threshold
    because = f"down to the release threshold {s.policy.release_threshold:g}" if down else "shared with a new engine"
    message = f"risk {observation.score:.0f} is {because}"
    step = Step(action="release", parameters=Parameters(), reason=Reason.RELEASE.value, message=message)
    return begin(s, observation, step)


def check_exhausted(s: Situation) -> Decision | None:
    """Risk is high and nothing is left to do."""
    if not s.at_risk:
        return None
    waiting = "; a new engine is on its way" if s.growing else "; no step is left"
    reason = Reason.SCALING if s.growing else Reason.EXHAUSTED
    return hold(s.at_risk[0], reason, f"{_risk(s, s.at_risk[0])}{waiting}")


def check_awaiting(s: Situation) -> Decision | None:
    """A proposal is open, though its engine's risk is below the threshold now."""
    record = next((r for r in s.open_records if r.status.phase in ("Proposed", "Approved")), None)
    observation = s.fresh_of(record.spec.pod_uid) if record else None
    if record is None or observation is None:
        return None
    return hold(observation, Reason.AWAITING_APPROVAL, f"{record.metadata.name} waits for spec.approved: true")


def check_some_stale(s: Situation) -> Decision | None:
    """Engines that are read are well; of the others nothing is known."""
    return _hold_stale(s) if s.stale else None


def check_healthy(s: Situation) -> Decision | None:
    """All engines were read and none is at risk."""
    worst = s.fresh[0]
    return hold(worst, Reason.HEALTHY, f"greatest risk is {worst.score:.0f}")


def _evict_share(s: Situation, observation: Observation) -> tuple[float, str]:
    """Share of the occupied blocks to evict, and in words what the policy's ratio refers to.

    Engines give up cached blocks first. Where admitted work is about to outgrow the cache, those count as supply
    already and freeing them changes nothing: the ratio is taken of the hot blocks then, on top of the cached ones.
    """
    ratio = s.policy.evict.ratio
    snapshot = observation.report.snapshot if observation.report else None
    hot, cached = (snapshot.hot_blocks, snapshot.reclaimable_blocks) if snapshot else (None, None)
    winner = observation.report.winner if observation.report else None
    if winner not in SHORTAGE or not hot or cached is None:
        return ratio, "occupied blocks"
    return (cached + ratio * hot) / (cached + hot), "hot blocks, after the cached ones"


def _turn(s: Situation, action: str) -> Observation | None:
    """The engine at the greatest risk that can be helped now, if this is its step and the budget has one left."""
    for observation in s.at_risk:
        rung = next_rung(s, observation)
        if rung is not None and rung.state == "ready" and s.budget_left(rung.action):
            return observation if rung.action == action else None
    return None


def _spent(s: Situation) -> bool:
    return not s.budget_left("release")


def _awaiting(s: Situation, observation: Observation, rung: Rung) -> Decision:
    record = s.open_proposal((rung.action,))
    name = record.metadata.name if record else rung.action
    return hold(observation, Reason.AWAITING_APPROVAL, f"{name} waits for spec.approved: true")


def _throttle(s: Situation, reason: Reason, why: str) -> Step:
    policy = s.policy.throttle
    return Step(
        action="throttle",
        parameters=Parameters(max_prompt_tokens=policy.max_prompt_tokens, ttl_seconds=policy.ttl_seconds),
        reason=reason.value,
        message=f"{why}: refuse prompts over {policy.max_prompt_tokens} tokens for {policy.ttl_seconds:g} s",
    )


def _hold_stale(s: Situation) -> Decision:
    if not s.stale:
        return Decision(verdict="Hold", reason=Reason.STALE_DATA, message="no engine to read")
    first = s.stale[0]
    others = f" (and {len(s.stale) - 1} more)" if len(s.stale) > 1 else ""
    return hold(first, Reason.STALE_DATA, f"{first.target.pod} {first.problem(now=s.now)}{others}")


def _winner(observation: Observation) -> str:
    terms = observation.report.terms if observation.report else {}
    return max(("device", "host"), key=lambda name: terms.get(name, 0.0)) + " memory"


def _risk(s: Situation, observation: Observation) -> str:
    winner = observation.report.winner if observation.report else None
    by = f" ({winner})" if winner else ""
    alert = s.alert(observation)
    because = f" while {alert} fires" if alert else ""
    return f"risk {observation.score:.0f}{by} is at or above {s.threshold(observation):g}{because}"
