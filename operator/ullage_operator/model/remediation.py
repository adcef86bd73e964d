"""The kind `Remediation`: one durable record for each decision to act."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from ullage_operator.fields import Part, Timestamp, cel
from ullage_operator.model.common import FINAL_PHASES, Mode, ObjectMeta, Phase, RemedyAction, Stage


class Parameters(Part):
    """Parameters of an action; which ones apply depends on it."""

    ratio: float | None = Field(default=None, gt=0, le=1)
    """evict: share of the occupied blocks."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """throttle: longest prompt still admitted."""
    ttl_seconds: float | None = Field(default=None, gt=0)
    """throttle: seconds until the limit lifts by itself."""
    budget_ms: int | None = Field(default=None, ge=1)
    """compact: milliseconds that it may take."""
    from_replicas: int | None = Field(default=None, ge=1)
    """scaleUp, scaleDown: number of engines before."""
    to_replicas: int | None = Field(default=None, ge=1)
    """scaleUp, scaleDown: number of engines after."""


class Evidence(Part):
    """What was observed about one engine at one time. Absent: the engine cannot say."""

    sampled_at: Timestamp
    """When the engine was read, by the operator's clock."""
    score: float = Field(ge=0, le=100)
    """Risk 0..100."""
    winner: str = ""
    """Term of the score that won."""
    terms: dict[str, float] = Field(default_factory=dict)
    """All terms of the score."""
    sequence: int | None = None
    """The engine's own number of the reading."""
    total_blocks: int | None = None
    """Blocks in the pool."""
    hot_blocks: int | None = None
    """Blocks held by running sequences."""
    reclaimable_blocks: int | None = None
    """Blocks kept for prefix reuse only."""
    free_blocks: int | None = None
    """Blocks free."""
    largest_free_run_blocks: int | None = None
    """Longest run of free blocks."""
    compactable_blocks: int | None = None
    """Hot blocks that compaction would free, where the engine says so."""
    running: int | None = None
    """Sequences running."""
    waiting: int | None = None
    """Requests waiting."""
    exhaustion_seconds: float | None = None
    """Forecast time until admitted work no longer fits (median)."""
    max_prompt_tokens: int | None = None
    """Admission limit in force."""


class RemediationSpec(Part):
    """What was decided, and on which evidence. Only approved and approvedBy are ever changed."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                " && ".join(
                    f"self.{name} == oldSelf.{name}"
                    for name in ("service", "pod", "podUID", "action", "reason", "mode")
                ),
                "only approved and approvedBy may be changed",
            ),
            (
                "has(self.parameters) == has(oldSelf.parameters)"
                " && (!has(self.parameters) || self.parameters == oldSelf.parameters)",
                "parameters of a decision cannot be changed",
            ),
        )
    )

    service: str = Field(max_length=63)
    """Name of the InferenceService, in the same namespace."""
    pod: str = Field(max_length=253)
    """Name of the engine's pod (or process): the one acted on; for scaleUp the one that was at risk."""
    pod_uid: str = Field(alias="podUID", max_length=128)
    """UID of that pod: a successor under the same name is never meant."""
    action: RemedyAction
    """What to do."""
    parameters: Parameters = Field(default_factory=Parameters)
    """With which parameters."""
    reason: str = Field(max_length=64)
    """Rule that fired."""
    inputs: Evidence
    """What the rule saw."""
    mode: Mode
    """Mode in force when this was decided."""
    approved: bool = False
    """Set to true to approve a proposal."""
    approved_by: str | None = None
    """Who approved, as that person says."""


class RemediationStatus(Part):
    """How it went."""

    phase: Phase
    """Where it stands; Succeeded, Ineffective, Failed and Expired are final."""
    stage: Stage | None = None
    """Step within a running scaleUp or scaleDown."""
    stage_at: Timestamp | None = None
    """When that step began."""
    closed: bool | None = None
    """Whether the engine that is to leave was told to admit no more requests."""
    proposed_at: Timestamp
    """When it was decided."""
    started_at: Timestamp | None = None
    """When the action was first sent."""
    answered_at: Timestamp | None = None
    """When the agent's result arrived; absent while running means that none has."""
    finished_at: Timestamp | None = None
    """When a final phase was reached."""
    attempts: int = Field(default=0, ge=0)
    """Times that the action was sent, always under the same idempotency key."""
    before: Evidence | None = None
    """Last reading before the action."""
    after: Evidence | None = None
    """First reading that judged the effect."""
    bytes_freed: int | None = Field(default=None, ge=0)
    """Bytes really freed."""
    blocks_freed: int | None = Field(default=None, ge=0)
    """Blocks really freed."""
    message: str = ""
    """The same for people."""


class Remediation(Part):
    """One decision about one engine: what was seen, what was done, whether it helped. Its name is its key."""

    api_version: Literal["ullage.dev/v1alpha1"] = "ullage.dev/v1alpha1"
    kind: Literal["Remediation"] = "Remediation"
    metadata: ObjectMeta
    spec: RemediationSpec
    status: RemediationStatus

    @property
    def final(self) -> bool:
        """Whether it has ended."""
        return self.status.phase in FINAL_PHASES
