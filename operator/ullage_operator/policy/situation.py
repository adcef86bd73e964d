"""Inputs seen from the checks' side: who is fresh, who is at risk, what was done lately, which rung is next.

Everything is derived from readings and records: a restarted operator knows all that the old one knew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ullage_operator.model import Remediation, RemediationPolicy, RemedyAction
from ullage_operator.observation import Observation
from ullage_operator.policy.types import Inputs
from ullage_operator.remediation import HOUR_S, age_order

LADDER_WINDOW_S = 60.0
"""Seconds for which an eviction that did not help makes throttling the next step; later, eviction is again."""

Rung = Literal["evict", "throttle", "cooling", "none"]


@dataclass(frozen=True)
class Situation:
    """`inputs` at the time `now` (Unix seconds)."""

    inputs: Inputs
    now: float

    @property
    def policy(self) -> RemediationPolicy:
        """The service's remediation policy."""
        return self.inputs.service.spec.remediation

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
        """Fresh readings at the risk threshold or above, the greatest first."""
        return [o for o in self.fresh if o.score >= self.policy.risk_threshold]

    @cached_property
    def actionable(self) -> tuple[Observation, Rung] | None:
        """The engine at the greatest risk for which a step is possible now, and that step."""
        steps = ((o, self.rung(o)) for o in self.at_risk)
        return next(((o, rung) for o, rung in steps if rung in ("evict", "throttle")), None)

    @cached_property
    def releasable(self) -> Observation | None:
        """An engine that we throttled and that needs it no longer."""
        if self.policy.mode == "Observe":
            return None
        return next((o for o in self.fresh if self._may_release(o)), None)

    def exists(self, uid: str) -> bool:
        """Whether the engine still exists."""
        return any(o.target.uid == uid for o in self.inputs.observations)

    def fresh_of(self, uid: str) -> Observation | None:
        """The engine's reading, if fresh."""
        return next((o for o in self.fresh if o.target.uid == uid), None)

    def budget_left(self) -> int:
        """Evictions and throttles that may still start this hour (would-be ones under Observe count too)."""
        since = self.now - HOUR_S
        spent = [r for r in self.records if r.spec.action != "release" and _began(r) > since]
        return self.policy.max_actions_per_hour - len(spent)

    def rung(self, observation: Observation) -> Rung:
        """Which step of the ladder is next for an engine at risk."""
        if self._can_throttle(observation) and (
            self._eviction_let_down(observation) or not self._can_evict(observation)
        ):
            return "cooling" if self._cooling(observation, "throttle") else "throttle"
        if self._can_evict(observation):
            return "cooling" if self._cooling(observation, "evict") else "evict"
        return "none"

    def _can_evict(self, observation: Observation) -> bool:
        return self.policy.evict.enabled and _capable(observation, "evict") and _occupied(observation)

    def _can_throttle(self, observation: Observation) -> bool:
        return self.policy.throttle.enabled and _capable(observation, "throttle") and not _throttled(observation)

    def _eviction_let_down(self, observation: Observation) -> bool:
        last = self._last_ended(observation.target.uid, ("evict", "throttle"))
        return (
            last is not None
            and last.spec.action == "evict"
            and last.status.phase in ("Ineffective", "Failed")
            and self._seconds_since_end(last) < LADDER_WINDOW_S
        )

    def _cooling(self, observation: Observation, action: RemedyAction) -> bool:
        last = self._last_ended(observation.target.uid, (action,))
        return last is not None and self._seconds_since_end(last) < self.policy.evict.cooldown_seconds

    def _may_release(self, observation: Observation) -> bool:
        if not (_throttled(observation) and _capable(observation, "release")):
            return False
        if observation.score > self.policy.release_threshold or self._cooling(observation, "release"):
            return False
        ours = [r for r in self.records if r.spec.pod_uid == observation.target.uid and r.status.started_at]
        ours = [r for r in ours if r.spec.action == "throttle" or _lifted(r)]
        return bool(ours) and ours[-1].spec.action == "throttle"

    def _last_ended(self, uid: str, actions: tuple[RemedyAction, ...]) -> Remediation | None:
        ended = [r for r in self.records if r.final and r.spec.pod_uid == uid and r.spec.action in actions]
        return ended[-1] if ended else None

    def _seconds_since_end(self, record: Remediation) -> float:
        ended = record.status.finished_at or record.status.proposed_at
        return self.now - ended.timestamp()


def _began(record: Remediation) -> float:
    if record.status.started_at is not None:
        return record.status.started_at.timestamp()
    return record.status.proposed_at.timestamp() if record.spec.mode == "Observe" else float("-inf")


def _lifted(record: Remediation) -> bool:
    return record.spec.action == "release" and record.status.phase == "Succeeded"


def _capable(observation: Observation, action: RemedyAction) -> bool:
    return observation.report is not None and action in observation.report.capabilities


def _throttled(observation: Observation) -> bool:
    snapshot = observation.report.snapshot if observation.report else None
    return snapshot is not None and snapshot.admission_max_prompt_tokens is not None


def _occupied(observation: Observation) -> bool:
    """Whether anything could be evicted; an engine that cannot say is taken to hold something."""
    snapshot = observation.report.snapshot if observation.report else None
    if snapshot is None:
        return False
    if snapshot.total_blocks is not None and snapshot.free_blocks is not None:
        return snapshot.total_blocks > snapshot.free_blocks
    return (snapshot.hot_blocks, snapshot.reclaimable_blocks) != (0, 0)
