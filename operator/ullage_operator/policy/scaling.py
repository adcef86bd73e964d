"""Changing the number of engines: when it begins, how it goes on, when it is taken back.

A step up is in flight until the new engine is ready; meanwhile the other checks go on, so that eviction and throttle
bridge the time. A step down takes one engine out of traffic, waits until it has nothing in flight, and only then
removes it; until that moment it is taken back whenever risk rises.
"""

from __future__ import annotations

from ullage_operator.model import Parameters, Phase, Remediation, RemedyAction, Stage
from ullage_operator.observation import Observation
from ullage_operator.policy.begin import begin
from ullage_operator.policy.rungs import demand_lasts, next_rung, scale_up_state
from ullage_operator.policy.situation import SCALING, Situation, throttled
from ullage_operator.policy.types import Decision, Inputs, Reason, Verdict, Watch
from ullage_operator.remediation import Step, enter, finish

WATCH_GAP_S = 30.0
"""A longer break between two looks ends what was so: nobody knows what was in between."""
ENDPOINT_SECONDS = 5.0
"""After an engine left the Service, until no more requests are expected: endpoints and proxies follow by then."""
STEP_WINDOW_S = 120.0
"""Seconds for which a step that the API refuses, or the agent does not answer, is tried again."""
STEP_ATTEMPTS = 4
"""Times that it is tried at least, however much of that time the operator or the API was away."""
LEAVING_WINDOW_S = 120.0
"""Seconds in which the drained engine must be on its way out, once one engine less is wanted."""
SETTLED_S = 10.0
"""Seconds after which nobody else leaves, once the fleet has the wanted size: the cluster chose another engine."""


def watch(inputs: Inputs, now: float) -> Watch:
    """What is so now, and since when, going on from `inputs.watch`."""
    s, before = Situation(inputs, now), inputs.watch
    unbroken = before.seen_at is not None and 0 <= now - before.seen_at <= WATCH_GAP_S
    same_size = unbroken and before.replicas == s.replicas
    high_before = before.high_since if unbroken else None
    floor = s.policy.release_threshold if high_before is not None else s.policy.risk_threshold
    high = any(s.warm(o) and o.score >= floor for o in s.fresh)
    calm_before = before.calm_since if same_size else None
    return Watch(
        seen_at=now,
        replicas=s.replicas,
        high_since=(now if high_before is None else high_before) if high else None,
        calm_since=(now if calm_before is None else calm_before) if spare(s) else None,
    )


def spare(s: Situation) -> bool:
    """Whether the engines but one could carry today's load, by readings of every one of them."""
    replicas, count = s.inputs.service.spec.replicas, len(s.fleet.ready)
    settled = s.scalable and s.scaling is None and count == s.replicas == len(s.fleet.pods)
    if not settled or not s.policy.scale_down.enabled or count <= max(1, replicas.min) or s.alert() is not None:
        return False
    seen = [o for o in s.fresh if s.fleet.pod(o.target.uid)]
    if len(seen) != count or s.stale or not all(_quiet(s, o) for o in seen):
        return False
    loads = [load for o in seen if (load := o.load) is not None]
    return len(loads) == count and sum(loads) / (count - 1) <= s.policy.scale_down.load_limit


def check_growth(s: Situation) -> Decision | None:
    """Follow a step up: ask again, find it done, or take it back. Holds up nothing else."""
    record = s.scaling
    if record is None or record.spec.action != "scaleUp":
        return None
    if record.status.answered_at is None:
        if _since_stage(s, record) >= STEP_WINDOW_S:
            return _end(s, record, "Failed", Reason.OVERDUE, f"not accepted by the API: {record.status.message}")
        return _go_on(record, Reason.SCALING, f"{record.metadata.name}: {record.status.stage} once more")
    if record.status.stage == "Cancelling":
        return _end(s, record, "Ineffective", Reason.PENDING_CANCELLED, record.status.message)
    return _growing(s, record)


def check_shrink(s: Situation) -> Decision | None:
    """Follow a step down, stage by stage."""
    record = s.scaling
    if record is None or record.spec.action != "scaleDown":
        return None
    pod, stage = s.fleet.pod(record.spec.pod_uid), record.status.stage
    if pod is None or pod.leaving:
        return _gone(s, record)
    if stage == "Draining" and (why := _unwanted(s, record)):
        return _stage(s, record, "Restoring", Reason.SCALE_DOWN_CANCELLED, f"taken back: {why}")
    if record.status.answered_at is None:
        if stage == "Removing" and (why := _overtaken(s, record)):
            return _stage(s, record, "Restoring", Reason.SCALE_DOWN_CANCELLED, f"taken back: {why}")
        if stage == "Restoring" and _reopening_overdue(s, record):
            message = f"{record.status.message}; delete {pod.name} if its engine still admits nothing"
            return _end(s, record, "Failed", Reason.OVERDUE, message)
        return _go_on(record, Reason.DRAINING, f"{record.metadata.name}: {stage} once more")
    if stage == "Restoring":
        return _end(s, record, "Ineffective", Reason.SCALE_DOWN_CANCELLED, record.status.message)
    if stage == "Removing":
        smaller = len(s.fleet.staying) <= (record.spec.parameters.to_replicas or 0)
        if _since_stage(s, record) >= (SETTLED_S if smaller else LEAVING_WINDOW_S):
            message = f"taken back: {pod.name} was not the one removed"
            return _stage(s, record, "Restoring", Reason.SCALE_DOWN_CANCELLED, message)
        return _hold(record, Reason.DRAINED, f"{pod.name} is on its way out")
    return _draining(s, record)


def check_lasting(s: Situation) -> Decision | None:
    """Demand has stayed: one engine more, whatever the steps on the engines still bring."""
    if not demand_lasts(s):
        return None
    return next((grown for o in s.at_risk if (grown := grow(s, o, Reason.SCALE_UP))), None)


def check_scale_down(s: Situation) -> Decision | None:
    """One engine less, once the load has fitted for the whole window."""
    policy, since = s.policy.scale_down, s.inputs.watch.calm_since
    if since is None or s.now - since < policy.window_seconds or s.at_risk or not spare(s):
        return None
    last = s.last_ended(SCALING)
    if last is not None and s.since_end(last) < policy.window_seconds + policy.cooldown_seconds:
        return None
    if s.open_proposal(SCALING) or s.running or not s.budget_left("scaleDown"):
        return None
    victim = min(s.fresh, key=lambda o: _leaves_first(s, o))
    load = sum(o.load or 0.0 for o in s.fresh) / (s.replicas - 1)
    message = (
        f"{s.replicas} engines' load would be {load:.0f} % on one less, at most {policy.load_limit:g} % "
        f"for {policy.window_seconds:g} s: {victim.target.pod} leaves, with {victim.warm_blocks} warm blocks"
    )
    return begin(s, victim, _step(s, "scaleDown", Reason.SCALE_DOWN, message))


def grow(s: Situation, observation: Observation, reason: Reason) -> Decision | None:
    """One engine more on account of this one; None where that is not to be had now."""
    if scale_up_state(s, observation) != "ready" or not s.budget_left("scaleUp"):
        return None
    rung = next_rung(s, observation)
    lasting = "steps on the engine do not help" if rung and rung.action == "scaleUp" else "demand stays"
    why = "memory outside the cache is short" if reason is Reason.EMERGENCY else lasting
    message = f"{observation.target.pod} is at {observation.score:.0f} and {why}: {s.replicas + 1} engines"
    return begin(s, observation, _step(s, "scaleUp", reason, message))


def applies(s: Situation, record: Remediation) -> bool:
    """Whether a proposed change of size still makes sense."""
    if not s.scalable or s.scaling is not None or record.spec.parameters.from_replicas != s.replicas:
        return False
    return spare(s) if record.spec.action == "scaleDown" else True


def _step(s: Situation, action: RemedyAction, reason: Reason, message: str) -> Step:
    change = 1 if action == "scaleUp" else -1
    parameters = Parameters(from_replicas=s.replicas, to_replicas=s.replicas + change)
    return Step(action=action, parameters=parameters, reason=reason.value, message=message)


def _growing(s: Situation, record: Remediation) -> Decision | None:
    wanted, waited = record.spec.parameters.to_replicas or 0, _since_stage(s, record)
    if len(s.fleet.ready) >= wanted:
        return _end(s, record, "Succeeded", Reason.EFFECTIVE, f"{wanted} engines are ready after {waited:.0f} s")
    if not s.scalable or s.replicas not in (wanted, record.spec.parameters.from_replicas):
        return _end(s, record, "Ineffective", Reason.OVERDUE, f"replicas were set to {s.replicas} by someone else")
    if waited < s.policy.scale_up.pending_seconds:
        return None
    problems = [f"{pod.name} {pod.problem}".strip() for pod in s.fleet.pending] or ["no pod was created"]
    message = f"taken back, not ready after {waited:.0f} s: {problems[0]}"
    return _stage(s, record, "Cancelling", Reason.PENDING_CANCELLED, message)


def _draining(s: Situation, record: Remediation) -> Decision:
    observation, answered_at = s.fresh_of(record.spec.pod_uid), record.status.answered_at
    in_flight = observation.in_flight if observation else None
    since = answered_at.timestamp() + ENDPOINT_SECONDS if answered_at else s.now
    if observation is not None and in_flight == 0 and observation.sampled_at >= since:
        return _stage(s, record, "Removing", Reason.DRAINED, f"{record.spec.pod} has nothing in flight: removed")
    return _hold(record, Reason.DRAINING, f"{record.spec.pod} has {'?' if in_flight is None else in_flight} in flight")


def _unwanted(s: Situation, record: Remediation) -> str | None:
    """Why an engine that drains should take requests again."""
    others = [pod for pod in s.fleet.ready if pod.uid != record.spec.pod_uid]
    if s.at_risk:
        return f"risk of {s.at_risk[0].target.pod} rose to {s.at_risk[0].score:.0f}"
    if alert := s.alert():
        return f"{alert} fires"
    if overtaken := _overtaken(s, record):
        return overtaken
    if len(others) < (record.spec.parameters.to_replicas or 0):
        return "another engine is not ready"
    if _since_stage(s, record) >= s.policy.scale_down.drain_seconds:
        return f"requests were in flight for {s.policy.scale_down.drain_seconds:g} s"
    return None


def _overtaken(s: Situation, record: Remediation) -> str | None:
    if not s.scalable:
        return "replicas are managed by someone else now"
    if s.replicas not in (record.spec.parameters.from_replicas, record.spec.parameters.to_replicas):
        return f"replicas were set to {s.replicas} by someone else"
    return None


def _reopening_overdue(s: Situation, record: Remediation) -> bool:
    """Whether the engine was asked to reopen for long enough: meanwhile nothing is done for the others."""
    over = _since_stage(s, record) >= STEP_WINDOW_S and record.status.attempts >= STEP_ATTEMPTS
    return bool(record.status.closed) and over


def _gone(s: Situation, record: Remediation) -> Decision:
    if record.status.stage == "Removing":
        if record.status.answered_at is None and s.fleet.pod(record.spec.pod_uid) is None:
            return _end(s, record, "Ineffective", Reason.OVERDUE, f"{record.spec.pod} went by itself")
        return _end(s, record, "Succeeded", Reason.EFFECTIVE, f"{record.spec.pod} left with nothing in flight")
    return _end(s, record, "Ineffective", Reason.OVERDUE, f"{record.spec.pod} went before it was drained")


def _leaves_first(s: Situation, observation: Observation) -> tuple[int, float, str]:
    """The least warm cache, then the youngest, whom a cluster that knows no deletion costs removes as well."""
    pod = s.fleet.pod(observation.target.uid)
    return observation.warm_blocks, -(pod.ready_at or 0.0) if pod else 0.0, observation.target.pod


def _quiet(s: Situation, observation: Observation) -> bool:
    snapshot = observation.report.snapshot if observation.report else None
    idle = snapshot is not None and not snapshot.waiting and not throttled(observation)
    return idle and observation.score < s.policy.release_threshold and s.warm(observation)


def _since_stage(s: Situation, record: Remediation) -> float:
    began = record.status.stage_at or record.status.started_at or record.status.proposed_at
    return s.now - began.timestamp()


def _stage(s: Situation, record: Remediation, stage: Stage, reason: Reason, message: str) -> Decision:
    entered = enter(record, stage, message=message, now=s.now)
    return _decision(entered, "Act", reason, message, updates=(entered,), execute=entered)


def _go_on(record: Remediation, reason: Reason, message: str) -> Decision:
    return _decision(record, "Act", reason, message, execute=record)


def _end(s: Situation, record: Remediation, phase: Phase, reason: Reason, message: str) -> Decision:
    ended = finish(record, phase, message=message, now=s.now)
    return _decision(ended, "Conclude", reason, message, updates=(ended,))


def _hold(record: Remediation, reason: Reason, message: str) -> Decision:
    return _decision(record, "Hold", reason, message)


def _decision(
    record: Remediation,
    verdict: Verdict,
    reason: Reason,
    message: str,
    *,
    updates: tuple[Remediation, ...] = (),
    execute: Remediation | None = None,
) -> Decision:
    return Decision(
        verdict=verdict,
        reason=reason,
        message=message,
        pod=record.spec.pod,
        action=record.spec.action,
        parameters=record.spec.parameters,
        updates=updates,
        execute=execute,
    )
