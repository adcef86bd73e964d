"""What a user allows the operator to do about memory risk: thresholds, limits, and each action's own settings."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, Field, model_validator

from ullage_operator.fields import Part, cel, fault
from ullage_operator.model.common import Mode, RemedyAction


class ActionPolicy(Part):
    """What every action has."""

    enabled: bool = True
    """Whether this action may be used."""
    mode: Mode | None = None
    """Mode of this action; without it that of the whole policy."""
    max_per_hour: int | None = Field(default=None, ge=1)
    """Greatest number of these actions in any hour; without it only the policy's limit counts."""
    cooldown_seconds: float = Field(default=15, ge=0)
    """Seconds between the end of one such action and the start of the next on the same engine (scaling: service)."""


class EvictPolicy(ActionPolicy):
    """First rung of the ladder: drop cold blocks."""

    ratio: float = Field(default=0.2, gt=0, le=1)
    """Share of the blocks to drop, above 0 up to 1: of the occupied ones; where admitted work outgrows the cache, of
    the hot ones, after all cached ones."""


class CompactPolicy(ActionPolicy):
    """Second rung: close holes, where the engine says that this frees blocks, or that free blocks lie scattered."""

    fragmentation: float = Field(default=0.5, gt=0, le=1)
    """External fragmentation (1 - longest free run / free blocks) from which it is worth the time, where the engine
    does not say how many blocks compaction would free."""
    budget_ms: int = Field(default=200, ge=1, le=10_000)
    """Milliseconds that one compaction may take."""


class ThrottlePolicy(ActionPolicy):
    """Third rung: refuse long prompts for a while."""

    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt that is still admitted, in tokens."""
    ttl_seconds: float = Field(default=120, gt=0)
    """Seconds after which the engine lifts the limit by itself."""


class ScaleUpPolicy(ActionPolicy):
    """Last rung: one more engine, where engine-level steps do not help or demand stays."""

    cooldown_seconds: float = Field(default=60, ge=0)
    """Seconds between the end of one change of size and the next step up."""
    persist_seconds: float = Field(default=60, ge=0)
    """Seconds for which risk must stay at the threshold before demand counts as lasting."""
    warm_up_seconds: float = Field(default=60, ge=0)
    """Seconds after an engine became ready in which its readings are no reason to scale."""
    pending_seconds: float = Field(default=600, gt=0)
    """Seconds for a new engine to become ready; then the step is taken back."""
    retry_seconds: float = Field(default=900, ge=0)
    """Seconds after a step that was taken back before the next is tried."""


class ScaleDownPolicy(ActionPolicy):
    """One engine less, where the others can carry its load."""

    cooldown_seconds: float = Field(default=0, ge=0)
    """Seconds between the end of one change of size and the next step down, besides the window."""
    window_seconds: float = Field(default=300, gt=0)
    """Seconds for which the load must have fitted on one engine less, counted from the last change of size."""
    load_limit: float = Field(default=60, gt=0, le=100)
    """Greatest share of hot blocks, in percent, that the engines left may hold."""
    drain_seconds: float = Field(default=900, gt=0)
    """Seconds for the leaving engine to finish its requests; then the step is taken back."""


class RemediationPolicy(Part):
    """When and how the operator acts on memory risk."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("self.releaseThreshold < self.riskThreshold", "releaseThreshold is not below riskThreshold; lower it"),
        )
    )

    mode: Mode = "Enforce"
    """Observe records what would be done, Propose waits for approval, Enforce acts; each action may differ."""
    risk_threshold: float = Field(default=85, gt=0, le=100)
    """Risk score (0..100) from which the operator acts."""
    release_threshold: float = Field(default=60, ge=0, lt=100)
    """Risk score down to which it must fall before a throttle is lifted; below riskThreshold."""
    emergency_threshold: float = Field(default=95, gt=0, le=100)
    """Score of the device or host term (memory outside the cache) from which prompts are limited at once."""
    max_actions_per_hour: int = Field(default=60, ge=1)
    """Greatest number of actions per service in any hour; lifting a throttle is not counted."""
    settle_seconds: float = Field(default=5, ge=0)
    """Seconds after an action before its effect is judged."""
    approval_seconds: float = Field(default=900, gt=0)
    """Seconds for which a proposal may be approved."""
    stale_after_polls: float = Field(default=5, ge=1)
    """Age of a reading, in polling intervals of the agent, from which nothing is decided on it."""
    history_limit: int = Field(default=50, ge=1)
    """Finished remediations kept per service; those of the last hour are kept in any case."""
    history_days: float = Field(default=30, gt=0)
    """Days after which a finished remediation is removed."""
    evict: EvictPolicy = Field(default_factory=EvictPolicy)
    """Eviction of cold blocks."""
    compact: CompactPolicy = Field(default_factory=CompactPolicy)
    """Compaction of the pool."""
    throttle: ThrottlePolicy = Field(default_factory=ThrottlePolicy)
    """Refusal of long prompts; its mode is that of lifting it as well."""
    scale_up: ScaleUpPolicy = Field(default_factory=ScaleUpPolicy)
    """More engines."""
    scale_down: ScaleDownPolicy = Field(default_factory=ScaleDownPolicy)
    """Fewer engines."""

    @model_validator(mode="after")
    def _hysteresis(self) -> Self:
        if self.release_threshold >= self.risk_threshold:
            raise fault(
                f"{self.release_threshold:g} is not below riskThreshold {self.risk_threshold:g}; lower it",
                field="releaseThreshold",
            )
        return self

    def of(self, action: RemedyAction) -> ActionPolicy:
        """Settings of an action; lifting a throttle goes by those of throttling."""
        settings: dict[RemedyAction, ActionPolicy] = {
            "evict": self.evict,
            "compact": self.compact,
            "throttle": self.throttle,
            "release": self.throttle,
            "scaleUp": self.scale_up,
            "scaleDown": self.scale_down,
        }
        return settings[action]

    def mode_of(self, action: RemedyAction) -> Mode:
        """Mode in force for an action."""
        return self.of(action).mode or self.mode
