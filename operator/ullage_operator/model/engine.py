"""The engine that a user wants: which model, how its KV cache is laid out, what it runs on.

One vocabulary for every type of engine. What a type cannot do is refused with the reason (`abilities`), never
dropped. Non-goal: command lines (`arguments`).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from ullage_operator.fields import Budget, CacheMemory, Part, Quantity, cel, fault, parse_bytes

EngineType = Literal["ullage", "vllm", "sglang"]


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
    """What may be dropped from sequences that are still running, and when; engine type ullage only."""

    budget: Budget | None = None
    """What a sequence may keep of its context, as tokens ("2048") or a share ("30%"); absent: all, until risk calls."""
    policy: Literal["reconstruct", "window", "expected", "entropy", "streaming", "recency"] | None = None
    """What chooses the tokens that a sequence with a budget keeps; absent: the engine's choice, reconstruct."""
    interval: int = Field(default=256, ge=1)
    """Tokens by which an answer may outgrow the budget before its sequence is cut again."""
    protected_tokens: int = Field(default=256, ge=0)
    """Tokens at the beginning of a sequence that are never dropped; of a budget a sixteenth at most."""
    recent_tokens: int = Field(default=256, ge=0)
    """Most recent tokens of a sequence that are never dropped; of a budget an eighth at most."""


class KVCache(Part):
    """Memory and layout of the paged KV cache."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("!has(self.memory) || self.memory.matches('[kMGTP]i?$')", "memory needs a unit, such as 48Mi"),
            ("has(self.memory) != has(self.memoryShare)", "set exactly one of memory and memoryShare"),
        )
    )

    memory: CacheMemory | None = None
    """Memory of the block pool as a quantity with a unit, such as "48Mi"; at least 1Mi (types ullage and vllm)."""
    memory_share: float | None = Field(default=None, gt=0, le=1)
    """In place of memory: share of the device for weights and cache together, 0..1 (types vllm and sglang)."""
    type: Literal["fp8", "int8", "bf16", "fp32"] = "fp8"
    """Storage type of keys and values."""
    block_size: Literal[8, 16, 32] = 16
    """Tokens in a block."""
    prefix_reuse: bool = True
    """Keep blocks of finished requests for later ones with the same prefix."""
    host_memory: CacheMemory | None = None
    """Main memory of one pod for the offload tier, to which blocks go before they are dropped; absent: no such tier."""
    eviction: Eviction = Field(default_factory=Eviction)
    """Budget and limits of eviction from running sequences."""

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes."""
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def host_memory_bytes(self) -> int | None:
        """`host_memory` in bytes."""
        return None if self.host_memory is None else parse_bytes(self.host_memory)

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.memory is None and self.memory_share is None:
            raise fault('is missing; set it to a quantity like "48Mi", or set memoryShare', field="memory")
        if self.memory is not None and self.memory_share is not None:
            raise fault(
                f"{self.memory_share:g} is set beside memory {self.memory}; set one of them", field="memoryShare"
            )
        return self


class Speculation(Part):
    """Drafting several tokens to check them in one step."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("(self.method == 'draft') == has(self.draftModel)", "set draftModel with method draft, and only with it")
        )
    )

    method: Literal["ngram", "draft"] = "ngram"
    """Where drafts come from: ngram looks for the last tokens in what was read before; draft asks draftModel (type
    ullage)."""
    draft_model: str | None = Field(default=None, min_length=1)
    """Smaller model with the same tokens, as a source like that of the model; for method draft, and needed for it."""
    tokens: int = Field(default=4, ge=1, le=16)
    """Most tokens drafted for a sequence in one step."""

    @model_validator(mode="after")
    def _model_for_drafts(self) -> Self:
        if self.method == "draft" and self.draft_model is None:
            raise fault("is missing; name a smaller model with the same tokens", field="draftModel")
        if self.method != "draft" and self.draft_model is not None:
            raise fault(
                f"{self.draft_model!r} is set beside method {self.method}; set method draft", field="draftModel"
            )
        return self


class Engine(Part):
    """The inference engine and its settings."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "self.maxBatchTokens >= self.maxSequences",
                "maxBatchTokens is below maxSequences; raise it or lower maxSequences",
            ),
            ("self.type == 'ullage' || has(self.image)", "image is missing; name the image of that engine"),
            (
                "self.type != 'ullage' ||"
                " (!has(self.kvCache.memoryShare) && self.tensorParallel == 1 && self.nodes == 1)",
                "engine type ullage has no kvCache.memoryShare, tensorParallel or nodes above 1; leave them out, or use"
                " vllm or sglang",
            ),
            (
                "self.type == 'ullage' || !has(self.threads)",
                "threads is for engine type ullage; set CPU limits in resources",
            ),
            (
                "self.type == 'ullage' || !has(self.speculation) || self.speculation.method != 'draft'",
                "speculation.method draft is for engine type ullage; set ngram",
            ),
            (
                "self.type == 'ullage' || self.numerics == 'fast'",
                "numerics is for engine type ullage; leave it out",
            ),
            (
                "self.type == 'ullage' || self.kvCache.type in ['fp8', 'bf16']",
                "kvCache.type of vllm and sglang is fp8 or bf16",
            ),
            (
                "self.type != 'sglang' || has(self.kvCache.memoryShare)",
                "sglang sizes its pool by share; set kvCache.memoryShare in place of memory",
            ),
            (
                "self.type == 'ullage' || (!has(self.kvCache.eviction.budget) &&"
                " !has(self.kvCache.eviction.policy) && self.kvCache.eviction.interval == 256 &&"
                " self.kvCache.eviction.protectedTokens == 256 && self.kvCache.eviction.recentTokens == 256)",
                "kvCache.eviction is for engine type ullage: others cannot evict from running sequences",
            ),
        )
    )

    type: EngineType = "ullage"
    """Engine to run: ullage, vllm or sglang."""
    image: str | None = Field(default=None, min_length=1)
    """Container image; for type ullage the operator's default where it is absent."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the OpenAI interface."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and activations."""
    numerics: Literal["fast", "invariant"] = "fast"
    """Whether answers may depend on what else is in the batch: invariant never does, and is slower (type ullage)."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the model's arithmetic (type ullage); without it the engine decides."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Greatest number of tokens in one step."""
    max_sequences: int = Field(default=64, ge=1)
    """Greatest number of sequences that run at once."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Accelerators over which each layer is split."""
    nodes: int = Field(default=1, ge=1)
    """Pods that make up one engine; above 1 needs the LeaderWorkerSet API in the cluster."""
    speculation: Speculation | None = None
    """Drafting of several tokens; absent: none."""
    gpu_sharing: Literal["Exclusive", "Shared"] = "Exclusive"
    """Whether other processes use the same accelerators (time slices, MPS): then their memory counts as risk."""
    resources: Resources = Field(default_factory=Resources)
    """Requests and limits of the engine's container."""
    extra_args: list[str] = Field(default_factory=list)
    """Further command-line arguments of the engine, appended as they are."""
    kv_cache: KVCache = Field(alias="kvCache")
    """Memory and layout of the KV cache."""

    @model_validator(mode="after")
    def _one_token_each(self) -> Self:
        if self.max_batch_tokens < self.max_sequences:
            raise fault(
                f"{self.max_batch_tokens} is below maxSequences {self.max_sequences}, and a step decodes a token "
                "of each; raise it or lower maxSequences",
                field="maxBatchTokens",
            )
        return self

    @model_validator(mode="after")
    def _able(self) -> Self:
        from ullage_operator.model.abilities import inability  # it looks at this class

        if problem := inability(self):
            raise fault(problem.message, field=problem.field)
        return self
