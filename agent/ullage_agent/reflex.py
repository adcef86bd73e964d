"""Local reflex, by option: where the score stays critical and nobody acts within a deadline, the agent takes the first
step itself and says so. It exists for the minutes in which the operator is away; it is no second policy.

`decide` is pure. Never on a stale sample, never twice within the cooldown, never something the engine does not offer.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from ullage_agent.actions import ActionRunner
from ullage_agent.clock import Clock
from ullage_agent.errors import AgentError
from ullage_agent.wire import Action, ActionRequest, RiskReport

log = logging.getLogger(__name__)

CRITICAL = 85.0
EVICT_RATIO = 0.2
"""As the operator's first step."""
THROTTLE_TOKENS = 512
THROTTLE_TTL_S = 60.0
COOLDOWN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to do."""

    action: Action
    request: ActionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the decision looks at. Seconds."""

    critical_for_s: float
    since_action_s: float | None
    """Since anyone's last action ended; None: never."""
    sample_age_s: float
    capabilities: tuple[Action, ...]
    deadline_s: float
    fresh_s: float


def decide(situation: Situation) -> Step | None:
    """The first step, when its time has come."""
    if situation.sample_age_s > situation.fresh_s or situation.critical_for_s < situation.deadline_s:
        return None
    quiet = max(situation.deadline_s, COOLDOWN_S)
    if situation.since_action_s is not None and situation.since_action_s < quiet:
        return None
    reason = f"local reflex: the score has been critical for {situation.critical_for_s:.0f} s and nobody acted"
    if "evict" in situation.capabilities:
        return Step(action="evict", request=ActionRequest(ratio=EVICT_RATIO, reason=reason))
    if "throttle" in situation.capabilities:
        request = ActionRequest(max_prompt_tokens=THROTTLE_TOKENS, ttl_s=THROTTLE_TTL_S, reason=reason)
        return Step(action="throttle", request=request)
    return None


class Reflex:
    """Watches reports and acts through the same runner as everyone."""

    def __init__(self, runner: ActionRunner, clock: Clock, *, deadline_s: float, fresh_s: float) -> None:
        self._runner = runner
        self._clock = clock
        self._deadline_s = deadline_s
        self._fresh_s = fresh_s
        self._critical_since: float | None = None

    async def look(self, report: RiskReport) -> None:
        """Take in a report; act where `decide` says so. Raises nothing."""
        now = self._clock.monotonic()
        if report.score is None or report.score < CRITICAL:
            self._critical_since = None
            return
        if self._critical_since is None:
            self._critical_since = now
        ended = self._runner.last_ended_at
        step = decide(
            Situation(
                critical_for_s=now - self._critical_since,
                since_action_s=None if ended is None else now - ended,
                sample_age_s=report.sample_age_s or 0.0,
                capabilities=report.capabilities,
                deadline_s=self._deadline_s,
                fresh_s=self._fresh_s,
            )
        )
        if step is None:
            return
        log.warning("%s: %s", step.action, step.request.reason)
        try:
            await self._runner.run(step.action, step.request, f"reflex-{uuid.uuid4().hex}", origin="reflex")
        except AgentError as error:
            log.warning("the reflex did not act: %s", error)
