"""The kind `InferenceService` and its status."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from ullage_operator.fields import Part, Timestamp, cel, fault
from ullage_operator.model.common import ObjectMeta, Phase, RemedyAction
from ullage_operator.model.spec import ServiceSpec

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_LIMIT = 40
"""Characters in a service's name: it goes into names of children, of remediations and of the certificate."""


class Condition(Part):
    """One aspect of the state, as in `metav1.Condition`."""

    type: str
    """Name of the aspect."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str
    """Constant that says why."""
    message: str = ""
    """The same for people."""
    observed_generation: int | None = None
    """Generation of the spec that this was seen under."""
    last_transition_time: Timestamp
    """When status last changed."""


class RiskSummary(Part):
    """The greatest risk among the service's engines."""

    score: float = Field(ge=0, le=100)
    """Risk 0..100."""
    pod: str
    """Engine at risk."""
    term: str = ""
    """Term of the score that won."""
    exhaustion_seconds: float | None = None
    """Forecast time until admitted work no longer fits (median); absent when not in sight."""


class LastAction(Part):
    """The most recent remediation."""

    name: str
    """Name of its record."""
    action: RemedyAction
    """What was done."""
    pod: str
    """To which engine."""
    phase: Phase
    """How it stands."""
    message: str = ""
    """The same for people."""


class ServiceStatus(Part):
    """What was observed."""

    observed_generation: int | None = None
    """Generation of the spec that was last acted on."""
    phase: Literal["Pending", "Ready", "Degraded", "Suspended", "Invalid"] | None = None
    """The conditions in one word."""
    replicas: int | None = None
    """Engines that exist."""
    ready_replicas: int | None = None
    """Engines that are ready."""
    selector: str | None = None
    """Label selector of the engines' pods."""
    throttled: bool | None = None
    """Whether long prompts are refused now."""
    risk: RiskSummary | None = None
    """Greatest risk, rounded; absent while nothing fresh is known."""
    last_action: LastAction | None = None
    """Most recent remediation."""
    conditions: list[Condition] = Field(default_factory=list)
    """Ready, Progressing, EngineReachable, MetricsContract, RiskHigh, Throttled, RemediationEffective, Degraded."""


def _service_name(metadata: ObjectMeta) -> ObjectMeta:
    name = metadata.name
    if len(name) > NAME_LIMIT:
        raise fault(f"{name!r} has {len(name)} characters; use at most {NAME_LIMIT}", field="name")
    if not (name[:1].isalpha() and name.replace("-", "a").isalnum() and name == name.lower() and name.isascii()):
        raise fault(f"{name!r} is not a DNS label; use lower-case letters, digits and -, a letter first", field="name")
    if name.endswith("-"):
        raise fault(f"{name!r} ends with -; end it with a letter or digit", field="name")
    return metadata


class InferenceService(Part):
    """An LLM served by engines whose KV cache is watched and kept from filling up."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                f"size(self.metadata.name) <= {NAME_LIMIT} && self.metadata.name.matches('{NAME_PATTERN}')",
                f"metadata.name must be a DNS label of at most {NAME_LIMIT} characters that begins with a letter",
            ),
        )
    )

    api_version: Literal["ullage.dev/v1alpha1"] = "ullage.dev/v1alpha1"
    kind: Literal["InferenceService"] = "InferenceService"
    metadata: Annotated[ObjectMeta, AfterValidator(_service_name)]
    spec: ServiceSpec
    status: ServiceStatus | None = None

    @property
    def served_name(self) -> str:
        """Name under which clients ask for the model."""
        return self.spec.model.served_name or self.metadata.name

    @property
    def stale_after_s(self) -> float:
        """Age in seconds from which a reading decides nothing."""
        return self.spec.agent.poll_seconds * self.spec.remediation.stale_after_polls
