"""What a user wants of an `InferenceService`: model, engine, agent, replicas, remediation policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from ullage_operator.fields import Part, cel, fault
from ullage_operator.model.engine import Engine, Model, Resources
from ullage_operator.model.policy import RemediationPolicy


class Agent(Part):
    """The agent beside each engine."""

    image: str | None = Field(default=None, min_length=1)
    """Container image; without it the operator's default."""
    poll_seconds: float = Field(default=1.0, ge=0.05, le=60)
    """Seconds between two readings of the engine."""
    metrics_port: int = Field(default=9400, ge=1, le=65535)
    """Port of the Prometheus metrics."""
    action_port: int = Field(default=9401, ge=1, le=65535)
    """Port of risk reports and actions (TLS and token)."""
    resources: Resources = Field(default_factory=Resources)
    """Requests and limits of the agent's container."""


class Replicas(Part):
    """How many engines run."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("self.min <= self.max", "min is above max; lower min or raise max"),
            (
                "!has(self.desired) || (self.min <= self.desired && self.desired <= self.max)",
                "desired is outside min..max",
            ),
        )
    )

    min: int = Field(default=1, ge=1)
    """Least number of engines."""
    max: int = Field(default=1, ge=1)
    """Greatest number of engines."""
    desired: int | None = Field(default=None, ge=1)
    """Number wanted now, within min..max; written through the scale subresource. Without it, min."""
    managed_by: Literal["Ullage", "External"] = "Ullage"
    """Who changes desired: Ullage's own policy, or External, an autoscaler such as HPA or KEDA on /scale."""

    @property
    def effective(self) -> int:
        """Number of engines to run."""
        return self.min if self.desired is None else self.desired

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise fault(f"{self.min} is above max {self.max}; lower min or raise max", field="min")
        if self.desired is not None and not self.min <= self.desired <= self.max:
            raise fault(f"{self.desired} is outside min..max {self.min}..{self.max}; widen the range", field="desired")
        return self


class Monitoring(Part):
    """What is made for Prometheus, where its operator's kinds exist in the cluster."""

    enabled: bool = True
    """Whether a PodMonitor and a PrometheusRule are made."""
    interval_seconds: int = Field(default=15, ge=1)
    """Seconds between two scrapes."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of both, by which a Prometheus selects them."""


class Network(Part):
    """Who may reach the pods."""

    policy: bool = True
    """Whether a NetworkPolicy is made: the OpenAI and metrics ports for everybody, actions for the operator alone."""
    metrics_from: dict[str, str] = Field(default_factory=dict)
    """Labels of namespaces that may read metrics; none: all."""


def _pod_template(value: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(value) - {"metadata", "spec"})
    if unknown:
        raise fault(f"{unknown[0]!r} is no part of a pod template; set metadata or spec", field=unknown[0])
    for name in ("metadata", "spec"):
        if not isinstance(value.get(name, {}), dict):
            raise fault(f"{value[name]!r} is not an object; write it as in a Deployment's template", field=name)
    return value


PodTemplate = Annotated[
    dict[str, Any],
    AfterValidator(_pod_template),
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]


class ServiceSpec(Part):
    """What is wanted."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "self.engine.port != self.agent.metricsPort && self.engine.port != self.agent.actionPort"
                " && self.agent.metricsPort != self.agent.actionPort",
                "engine.port, agent.metricsPort and agent.actionPort must differ",
            ),
        )
    )

    model: Model
    """The model that is served."""
    engine: Engine
    """The inference engine."""
    agent: Agent = Field(default_factory=Agent)
    """The agent beside each engine."""
    replicas: Replicas = Field(default_factory=Replicas)
    """How many engines run."""
    remediation: RemediationPolicy = Field(default_factory=RemediationPolicy)
    """When and how the operator acts."""
    monitoring: Monitoring = Field(default_factory=Monitoring)
    """What is made for Prometheus."""
    network: Network = Field(default_factory=Network)
    """Who may reach the pods."""
    pod_template: PodTemplate | None = None
    """Merged over the pods that the operator makes, as a strategic merge patch: metadata and spec of a pod."""
    suspend: bool = False
    """Leave everything as it is: no repair of children, no remediation."""

    @model_validator(mode="after")
    def _distinct_ports(self) -> Self:
        ports = {self.engine.port: "engine.port"}
        for port, field in (
            (self.agent.metrics_port, "agent.metricsPort"),
            (self.agent.action_port, "agent.actionPort"),
        ):
            if port in ports:
                raise fault(f"{port} is also {ports[port]}; choose another port", field=field)
            ports[port] = field
        return self
