"""What a user wants of an `InferenceService`: model, engine, agent, replicas, remediation policy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from ullage_operator.fields import CacheMemory, Part, Quantity, cel, fault, parse_bytes
from ullage_operator.model.policy import RemediationPolicy


class Resources(Part):
    """Requests and limits of a container, as quantity strings such as `cpu: "2"` and `memory: 1Gi`."""

    requests: dict[str, Quantity] = Field(default_factory=dict)
    """Least amount that the scheduler reserves, by resource."""
    limits: dict[str, Quantity] = Field(default_factory=dict)
    """Greatest amount that the container may use, by resource."""


class Model(Part):
    """Which model is served, and under which name."""

    source: str = Field(min_length=1)
    """A Hugging Face folder, a .gguf file, or package://MODULE/FILE inside an installed Python package."""
    served_name: str | None = Field(default=None, min_length=1)
    """Name that clients use; without it the name of the service."""
    max_length: int | None = Field(default=None, ge=1)
    """Greatest number of tokens in prompt and answer together; without it the model's own limit."""


class Eviction(Part):
    """What an eviction may drop from sequences that are still running."""

    policy: Literal["recency"] = "recency"
    """How blocks are ranked: recency keeps the beginning and the most recent tokens."""
    protected_tokens: int = Field(default=256, ge=0)
    """Tokens at the beginning of a sequence that are never dropped."""
    recent_tokens: int = Field(default=256, ge=0)
    """Most recent tokens of a sequence that are never dropped."""


class KVCache(Part):
    """Memory and layout of the paged KV cache."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("self.memory.matches('[kMGTP]i?$')", "memory needs a unit, such as 48Mi"),
        )
    )

    memory: CacheMemory
    """Memory of the block pool as a quantity with a unit, such as "48Mi"; at least 1Mi."""
    type: Literal["fp8", "int8", "bf16", "fp32"] = "fp8"
    """Storage type of keys and values."""
    block_size: Literal[8, 16, 32] = 16
    """Tokens in a block."""
    prefix_reuse: bool = True
    """Keep blocks of finished requests for later ones with the same prefix."""
    eviction: Eviction = Field(default_factory=Eviction)
    """Limits of eviction from running sequences."""

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        return parse_bytes(self.memory)


class Engine(Part):
    """The inference engine and its settings."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("self.type == 'ullage'", "only engine type ullage is served by this version"),
            (
                "self.maxBatchTokens >= self.maxSequences",
                "maxBatchTokens is below maxSequences; raise it or lower maxSequences",
            ),
        )
    )

    type: Literal["ullage", "vllm", "sglang"] = "ullage"
    """Engine to run. Only ullage is served by this version."""
    image: str | None = Field(default=None, min_length=1)
    """Container image; without it the operator's default."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the OpenAI interface."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and activations."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the model's arithmetic; without it the engine decides."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Greatest number of tokens in one step."""
    max_sequences: int = Field(default=64, ge=1)
    """Greatest number of sequences that run at once."""
    resources: Resources = Field(default_factory=Resources)
    """Requests and limits of the engine's container."""
    extra_args: list[str] = Field(default_factory=list)
    """Further command-line arguments of the engine, appended as they are."""
    kv_cache: KVCache = Field(alias="kvCache")
    """Memory and layout of the KV cache."""

    @field_validator("type")
    @classmethod
    def _only_what_is_served(cls, value: str) -> str:
        if value != "ullage":
            raise fault(
                f"{value!r} cannot be started by this version; set ullage, or point an agent at your own {value} server"
            )
        return value

    @model_validator(mode="after")
    def _one_token_each(self) -> Self:
        if self.max_batch_tokens < self.max_sequences:
            raise fault(
                f"{self.max_batch_tokens} is below maxSequences {self.max_sequences}, and a step decodes a token "
                "of each; raise it or lower maxSequences",
                field="maxBatchTokens",
            )
        return self


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
