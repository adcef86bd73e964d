"""Inputs seen from the checks' side: who is fresh, who is at risk, what was done lately.

Everything is derived from readings, records and the watch: a restarted operator knows all that the old one knew, but
for how long something has been so, which begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ullage_operator.fleet import Fleet
from ullage_operator.model import Remediation, RemediationPolicy, RemedyAction
from ullage_operator.observation import Observation
from ullage_operator.policy.types import Inputs
from ullage_operator.remediation import HOUR_S, age_order

SCALING: tuple[RemedyAction, ...] = ("scaleUp", "scaleDown")


@dataclass(frozen=True)
class Situation:
    """`inputs` at the time `now` (Unix seconds)."""

    inputs: Inputs
    now: float

    @property
    def policy(self) -> RemediationPolicy:
        """The service's remediation policy."""
        return self.inputs.service.spec.remediation

    @property
    def replicas(self) -> int:
        """Number of engines wanted now."""
        return self.inputs.service.spec.replicas.effective

    @property
    def fleet(self) -> Fleet:
        """The pods; empty where the number of engines cannot be changed."""
        return self.inputs.fleet or Fleet()

    @property
    def scalable(self) -> bool:
        """Whether the number of engines is ours to change."""
        return self.inputs.fleet is not None and self.inputs.service.spec.replicas.managed_by == "Ullage"

    @cached_property
    def records(self) -> list[Remediation]:
        """The service's records, oldest first."""
        name = self.inputs.service.metadata.name
        return sorted((r for r in self.inputs.records if r.spec.service == name), key=age_order)

    @cached_property
    def open_records(self) -> list[Remediation]:
        """Records that have not ended, oldest first."""
        return [r for r in self.records if not r.final]

    @cached_property
    def running(self) -> list[Remediation]:
        """Engine actions that have begun and not ended: at most one, but for what a crash left."""
        return [r for r in self.open_records if r.status.phase == "Running" and r.spec.action not in SCALING]

    @cached_property
    def scaling(self) -> Remediation | None:
        """The change of size that has begun and not ended."""
        found = [r for r in self.open_records if r.status.phase == "Running" and r.spec.action in SCALING]
        return found[0] if found else None

    @property
    def growing(self) -> bool:
        """Whether a new engine is on its way."""
        return self.scaling is not None and self.scaling.status.stage == "Scaling"

    @cached_property
    def fresh(self) -> list[Observation]:
        """Readings that may decide, the greatest risk first."""
        limit = self.inputs.service.stale_after_s
        usable = (o for o in self.inputs.observations if o.fresh(now=self.now, stale_after_s=limit))
        return sorted(usable, key=lambda o: (-o.score, o.target.uid))

    @cached_property
    def stale(self) -> list[Observation]:
        """Readings that may not, by name."""
        uids = {o.target.uid for o in self.fresh}
        rest = (o for o in self.inputs.observations if o.target.uid not in uids)
        return sorted(rest, key=lambda o: (o.target.pod, o.target.uid))

    @cached_property
    def at_risk(self) -> list[Observation]:
        """Fresh readings at the threshold or above, the greatest risk first."""
        return [o for o in self.fresh if o.score >= self.threshold(o)]

    @cached_property
    def releasable(self) -> Observation | None:
        """An engine that we throttled and that needs it no longer."""
        if self.policy.mode_of("throttle") == "Observe" or self.growing:
            return None
        return next((o for o in self.fresh if self._may_release(o)), None)

    def threshold(self, observation: Observation) -> float:
        """Risk from which the engine is acted on: that of release while an alert fires about it."""
        alerted = self.alert(observation) is not None
        return self.policy.release_threshold if alerted else self.policy.risk_threshold

    def alert(self, observation: Observation | None = None) -> str | None:
        """Name of an alert that fires about the engine, or about anything of the service."""
        for alert in self.inputs.alerts:
            pod = alert.pod if observation is None else observation.target.pod
            if alert.concerns(pod or "", now=self.now):
                return alert.name
        return None

    def exists(self, uid: str) -> bool:
        """Whether the engine still exists."""
        return any(o.target.uid == uid for o in self.inputs.observations) or self.fleet.pod(uid) is not None

    def fresh_of(self, uid: str) -> Observation | None:
        """The engine's reading, if fresh."""
        return next((o for o in self.fresh if o.target.uid == uid), None)

    def warm(self, observation: Observation) -> bool:
        """Whether the engine has served for long enough to judge demand by it."""
        pod = self.fleet.pod(observation.target.uid)
        if self.inputs.fleet is None:
            return True
        ready_at = pod.ready_at if pod else None
        return ready_at is not None and self.now - ready_at >= self.policy.scale_up.warm_up_seconds

    def budget_left(self, action: RemedyAction) -> bool:
        """Whether one more such action may start this hour (would-be ones under Observe count too)."""
        since = self.now - HOUR_S
        spent = [r for r in self.records if r.spec.action != "release" and _began(r) > since]
        own = self.policy.of(action).max_per_hour
        if own is not None and sum(r.spec.action == action for r in spent) >= own:
            return False
        return len(spent) < self.policy.max_actions_per_hour

    def open_proposal(self, actions: Iterable[RemedyAction]) -> Remediation | None:
        """A proposal of such an action that waits for approval, or was approved and has not begun."""
        wanted = tuple(actions)
        found = (r for r in self.open_records if r.status.phase in ("Proposed", "Approved"))
        return next((r for r in found if r.spec.action in wanted), None)

    def last_ended(self, actions: tuple[RemedyAction, ...], uid: str | None = None) -> Remediation | None:
        """The last such action that ended, on the engine or on any."""
        ended = [r for r in self.records if r.final and r.spec.action in actions]
        ended = [r for r in ended if uid in (None, r.spec.pod_uid)]
        return max(ended, key=lambda r: -self.since_end(r), default=None)

    def since_end(self, record: Remediation) -> float:
        """Seconds since it ended."""
        ended = record.status.finished_at or record.status.proposed_at
        return self.now - ended.timestamp()

    def cooling(self, action: RemedyAction, uid: str | None = None) -> bool:
        """Whether such an action ended a moment ago, on the engine or on any."""
        last = self.last_ended((action,), uid)
        return last is not None and self.since_end(last) < self.policy.of(action).cooldown_seconds

    def _may_release(self, observation: Observation) -> bool:
        if not (throttled(observation) and capable(observation, "release")) or _drains(observation):
            return False
        if self.cooling("release", observation.target.uid) or self.alert(observation) is not None:
            return False
        ours = [r for r in self.records if r.spec.pod_uid == observation.target.uid and r.status.started_at]
        ours = [r for r in ours if r.spec.action == "throttle" or _lifted(r)]
        if not ours or ours[-1].spec.action != "throttle":
            return False
        return observation.score <= self.policy.release_threshold or (
            observation.score < self.policy.risk_threshold and self._grew_since(ours[-1])
        )

    def _grew_since(self, throttle: Remediation) -> bool:
        """Whether the engine that the throttle was to bridge the time for is there."""
        began = throttle.status.proposed_at
        return any(
            r.spec.action == "scaleUp"
            and r.status.phase == "Succeeded"
            and r.status.finished_at is not None
            and r.status.finished_at > began
            for r in self.records
        )


def capable(observation: Observation, action: RemedyAction) -> bool:
    """Whether the engine offers an action."""
    return observation.report is not None and action in observation.report.capabilities


def throttled(observation: Observation) -> bool:
    """Whether long prompts are refused now, by whomever."""
    snapshot = observation.report.snapshot if observation.report else None
    return snapshot is not None and snapshot.admission_max_prompt_tokens is not None


def _drains(observation: Observation) -> bool:
    """Whether somebody closed the engine, which lifting a limit would open."""
    snapshot = observation.report.snapshot if observation.report else None
    return snapshot is not None and snapshot.draining is True


def _began(record: Remediation) -> float:
    if record.status.started_at is not None:
        return record.status.started_at.timestamp()
    return record.status.proposed_at.timestamp() if record.spec.mode == "Observe" else float("-inf")


def _lifted(record: Remediation) -> bool:
    return record.spec.action == "release" and record.status.phase == "Succeeded"
