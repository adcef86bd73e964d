"""Which step of the ladder is next for an engine at risk: evict, compact, throttle, scale up.

Each step waits for the measured effect of the one before: a step is passed over only while it is not to be had, is
known not to have helped a moment ago, or is in force already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ullage_operator.model import RemedyAction
from ullage_operator.observation import Observation
from ullage_operator.policy.situation import Situation, capable, throttled

LADDER_WINDOW_S = 60.0
"""Seconds for which a step that did not help is passed over; later it is tried again."""

LADDER: tuple[RemedyAction, ...] = ("evict", "compact", "throttle", "scaleUp")
State = Literal["ready", "cooling", "awaiting", "passed", "absent"]


@dataclass(frozen=True, slots=True)
class Rung:
    """The next step and whether it can be taken now."""

    action: RemedyAction
    state: Literal["ready", "cooling", "awaiting"]


def next_rung(s: Situation, observation: Observation) -> Rung | None:
    """The next step for the engine; None when none is left."""
    waiting: Rung | None = None
    for action in LADDER:
        state = _state(s, observation, action)
        if state in ("absent", "passed") or (waiting and s.policy.mode_of(action) != "Enforce"):
            continue
        if state == "ready":
            return Rung(action, "ready")
        if state == "awaiting" or s.policy.mode_of(action) == "Observe":
            # Not done, only asked for or noted down: those further up that may act do not wait for it.
            waiting = waiting or Rung(action, "awaiting" if state == "awaiting" else "cooling")
            continue
        return waiting or Rung(action, "cooling")
    return waiting or _again(s, observation)


def in_throttle_range(s: Situation, observation: Observation) -> bool:
    """Whether refusing long prompts is to be had and not done yet."""
    return s.policy.throttle.enabled and capable(observation, "throttle") and not throttled(observation)


def scale_up_state(s: Situation, observation: Observation) -> State:
    """Whether one engine more may be asked for on account of this one."""
    replicas, policy = s.inputs.service.spec.replicas, s.policy.scale_up
    if not (s.scalable and policy.enabled and s.replicas < replicas.max and s.warm(observation)):
        return "absent"
    if s.scaling is not None or s.fleet.pending or len(s.fleet.staying) < s.replicas:
        return "absent"  # one is on its way; a second is not asked for before it has shown its effect
    if s.open_proposal(("scaleUp",)):
        return "awaiting"
    last = s.last_ended(("scaleUp", "scaleDown"))
    if last is None:
        return "ready"
    failed = last.spec.action == "scaleUp" and last.status.phase in ("Ineffective", "Failed")
    wait = max(policy.cooldown_seconds, policy.retry_seconds if failed else 0.0)
    return "cooling" if s.since_end(last) < wait else "ready"


def demand_lasts(s: Situation) -> bool:
    """Whether risk has stayed at the threshold for as long as the policy asks, or an alert says so."""
    since = s.inputs.watch.high_since
    lasting = since is not None and s.now - since >= s.policy.scale_up.persist_seconds
    return lasting or s.alert() is not None


def _state(s: Situation, observation: Observation, action: RemedyAction) -> State:
    if action == "scaleUp":
        return scale_up_state(s, observation)
    if not _useful(s, observation, action):
        return "absent"
    if s.open_proposal((action,)):
        return "awaiting"
    if action != "throttle" and _let_down(s, observation, action):
        return "passed" if _beyond(s, observation, action) else _pace(s, observation, action)
    return _pace(s, observation, action)


def _pace(s: Situation, observation: Observation, action: RemedyAction) -> State:
    return "cooling" if s.cooling(action, observation.target.uid) else "ready"


def _useful(s: Situation, observation: Observation, action: RemedyAction) -> bool:
    if not (s.policy.of(action).enabled and capable(observation, action)):
        return False
    if action == "throttle":
        return not throttled(observation)
    if observation.pool_score < s.threshold(observation):
        return False  # the cache is not what is at risk
    return _occupied(observation) if action == "evict" else _compactable(s, observation)


def _beyond(s: Situation, observation: Observation, action: RemedyAction) -> bool:
    """Whether a step above this one is to be had at all."""
    above = LADDER[LADDER.index(action) + 1 :]
    return any(
        scale_up_state(s, observation) != "absent" if step == "scaleUp" else _useful(s, observation, step)
        for step in above
    )


def _again(s: Situation, observation: Observation) -> Rung | None:
    """Nothing is left above: eviction is tried again in time, though it did not help."""
    if not _useful(s, observation, "evict"):
        return None
    return Rung("evict", "cooling" if s.cooling("evict", observation.target.uid) else "ready")


def _let_down(s: Situation, observation: Observation, action: RemedyAction) -> bool:
    """Whether the last step on this engine was this one and brought nothing a moment ago."""
    uid = observation.target.uid
    last = s.last_ended((action,), uid)
    if last is None or last.status.phase not in ("Ineffective", "Failed") or s.since_end(last) >= LADDER_WINDOW_S:
        return False
    throttle = s.last_ended(("throttle",), uid)
    return throttle is None or throttled(observation) or s.since_end(throttle) > s.since_end(last)


def _occupied(observation: Observation) -> bool:
    """Whether anything could be evicted; an engine that cannot say is taken to hold something."""
    snapshot = observation.report.snapshot if observation.report else None
    if snapshot is None:
        return False
    if snapshot.total_blocks is not None and snapshot.free_blocks is not None:
        return snapshot.total_blocks > snapshot.free_blocks
    return (snapshot.hot_blocks, snapshot.reclaimable_blocks) != (0, 0)


def _compactable(s: Situation, observation: Observation) -> bool:
    """Whether compaction would free blocks; of an engine that can't say, whether its free blocks lie scattered."""
    snapshot = observation.report.snapshot if observation.report else None
    if snapshot is not None and snapshot.compactable_blocks is not None:
        return snapshot.compactable_blocks > 0
    if snapshot is None or not snapshot.free_blocks or snapshot.largest_free_run_blocks is None:
        return False
    return 1 - snapshot.largest_free_run_blocks / snapshot.free_blocks >= s.policy.compact.fragmentation
