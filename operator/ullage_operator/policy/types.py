"""What goes into a decision and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ullage_operator.alerts import Alert
from ullage_operator.fleet import Fleet
from ullage_operator.model import InferenceService, Parameters, Remediation, RemedyAction
from ullage_operator.observation import Observation

Verdict = Literal["Hold", "Conclude", "Observe", "Propose", "Act"]
"""Hold: do nothing. Conclude: a record ends. Observe: record what would be done. Propose: ask. Act: send it."""


class Reason(StrEnum):
    """Which check decided. These words appear in status, Events, metrics and records."""

    PAUSED = "Paused"
    """The service is suspended."""
    OVERDUE = "Overdue"
    """A record's time is over, or its engine is gone: it ends without another act."""
    STALE_DATA = "StaleData"
    """Readings are missing, failed or too old: authority decays with age, so nothing is done."""
    EMERGENCY = "Emergency"
    """Memory outside the cache (device or host) is nearly gone, which no eviction lowers: prompts are limited."""
    AWAITING_APPROVAL = "AwaitingApproval"
    """A proposal waits for a person."""
    RISK_PASSED = "RiskPassed"
    """A proposal is no longer needed."""
    APPROVED = "Approved"
    """A person approved a proposal, and it still applies."""
    UNANSWERED = "Unanswered"
    """An action was sent and its answer lost: it is sent again under the same key."""
    SETTLING = "Settling"
    """An action was carried out and its effect is not measurable yet."""
    EFFECTIVE = "Effective"
    """A reading taken after the action shows its effect."""
    INEFFECTIVE = "Ineffective"
    """A reading taken after the action shows no effect."""
    RATE_LIMITED = "RateLimited"
    """Risk is high, and the budget of actions per hour is spent."""
    GLOBAL_BUDGET = "GlobalBudget"
    """As many disruptive actions are in flight, over all services, as the operator may have."""
    COOLING_DOWN = "CoolingDown"
    """Risk is high, and every engine at risk was acted on a moment ago."""
    EVICT = "EvictColdBlocks"
    """Risk is at the threshold or above: drop the coldest blocks."""
    COMPACT = "CompactPool"
    """Eviction does not help enough, and closing holes frees blocks or joins scattered free ones."""
    THROTTLE = "ThrottleLongPrompts"
    """Risk stays high though eviction failed, brought nothing or is not to be had: refuse long prompts."""
    RELEASE = "ReleaseThrottle"
    """Risk fell to the release threshold: admit long prompts again."""
    BRIDGE = "BridgeUntilReady"
    """The throttle is about to lapse while a new engine is not ready yet: it is renewed."""
    SCALE_UP = "ScaleUp"
    """Engine-level steps do not help, or demand stays: one engine more."""
    SCALING = "Scaling"
    """The number of engines is being changed through the API."""
    PENDING_CANCELLED = "PendingCancelled"
    """A new engine did not become ready in time: the step is taken back."""
    SCALE_DOWN = "ScaleDown"
    """The load fitted on one engine less for the whole window: one engine takes no more requests."""
    DRAINING = "Draining"
    """An engine that is to leave finishes its requests."""
    DRAINED = "Drained"
    """An engine that is to leave has nothing in flight: it is removed."""
    SCALE_DOWN_CANCELLED = "ScaleDownCancelled"
    """Risk rose, the drain took too long or another engine went: the one that was to leave takes requests again."""
    EXHAUSTED = "LadderExhausted"
    """Risk is high, and no step is left that the engine can take."""
    HEALTHY = "Healthy"
    """Nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What has been so without a break, and since when (Unix seconds; None: it is not so). `policy.watch` keeps it."""

    seen_at: float | None = None
    """When it was last looked at: a longer break ends everything that was so."""
    replicas: int | None = None
    """Number of engines then."""
    high_since: float | None = None
    """An engine that has warmed up is at risk."""
    calm_since: float | None = None
    """The load would fit on one engine less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All that a decision may depend on, besides the time."""

    service: InferenceService
    observations: tuple[Observation, ...]
    """One for each engine that exists now, in any order."""
    records: tuple[Remediation, ...]
    """Remediations of this service, in any order."""
    fleet: Fleet | None = None
    """The service's pods; None where the number of engines cannot be changed, as in local mode."""
    watch: Watch = Watch()
    """What has been so for a while."""
    alerts: tuple[Alert, ...] = ()
    """Alerts that fire about the service."""
    slots_left: int | None = None
    """Disruptive actions that may still be begun over all services; None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision, complete: whoever applies it needs nothing else."""

    verdict: Verdict
    reason: Reason
    message: str
    pod: str | None = None
    action: RemedyAction | None = None
    parameters: Parameters | None = None
    updates: tuple[Remediation, ...] = ()
    """Records to write, new or changed, before anything is sent."""
    execute: Remediation | None = None
    """The running record to send now, as it is after `updates`; its action and stage say what."""
