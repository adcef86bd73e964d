"""What each type of engine cannot do, and what does not fit together: an ordered table of named reasons. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage_operator.fields import parse_bytes
from ullage_operator.model.engine import Engine, Eviction

GPU_SUFFIX = "/gpu"
"""End of the names of resources that are accelerators, as in nvidia.com/gpu."""


@dataclass(frozen=True, slots=True)
class Inability:
    """One thing that cannot be; completes the sentence `<field>: …`."""

    field: str
    message: str


VLLM_BLOCK = 16
"""Its attention kernels take multiples of it."""

Rule = Callable[[Engine], Inability | None]


def inability(engine: Engine) -> Inability | None:
    """The first thing asked for that this type of engine cannot do."""
    return next((problem for rule in RULES if (problem := rule(engine))), None)


def _image(engine: Engine) -> Inability | None:
    if engine.type == "ullage" or engine.image is not None:
        return None
    return Inability("image", f"is missing; name an image of {engine.type}, for which there is no default")


def _ullage_alone(engine: Engine) -> Inability | None:
    """Whole cache features that our engine does not have."""
    if engine.type != "ullage":
        return None
    cache = engine.kv_cache
    asked = {
        "kvCache.memoryShare": (cache.memory_share, "sizes its pool in bytes; set kvCache.memory"),
        "tensorParallel": (engine.tensor_parallel if engine.tensor_parallel > 1 else None, "runs on one device; set 1"),
        "nodes": (engine.nodes if engine.nodes > 1 else None, "runs on one node; set 1"),
    }
    return next(
        (Inability(f, f"{v!r} is asked for, but engine type ullage {why}") for f, (v, why) in asked.items() if v), None
    )


def _others(engine: Engine) -> Inability | None:
    """Settings that only our engine has."""
    if engine.type == "ullage":
        return None
    name, cache = engine.type, engine.kv_cache
    if engine.threads is not None:
        return Inability("threads", f"{engine.threads} is set, but {name} has no such setting; limit cpu in resources")
    if cache.type not in ("fp8", "bf16"):
        return Inability("kvCache.type", f"{cache.type!r} is not offered by {name}; set fp8 or bf16")
    if engine.numerics != "fast":
        return Inability("numerics", f"{engine.numerics!r} is set, but {name} has no such setting; leave it out")
    if engine.speculation is not None and engine.speculation.method == "draft":
        return Inability("speculation.method", f"'draft' is for engine type ullage, not {name}; set ngram")
    if cache.eviction.budget is not None:
        return Inability(
            "kvCache.eviction.budget",
            f"{cache.eviction.budget!r} is set, but {name} cannot evict from running sequences; leave it out",
        )
    if cache.eviction != Eviction():
        return Inability("kvCache.eviction", f"is set, but {name} cannot evict from running sequences; leave it out")
    if name == "vllm" and cache.block_size % VLLM_BLOCK:
        return Inability("kvCache.blockSize", f"{cache.block_size} is not offered by vllm; set 16 or 32")
    if name == "sglang" and cache.memory is not None:
        return Inability(
            "kvCache.memory", f"{cache.memory!r} is set, but sglang sizes its pool by share; set kvCache.memoryShare"
        )
    return None


def _memory_limit(engine: Engine) -> Inability | None:
    """Everything that lies in main memory must fit under the container's limit."""
    limit = engine.resources.limits.get("memory")
    if limit is None:
        return None
    cache, room = engine.kv_cache, parse_bytes(limit)
    host = cache.host_memory_bytes or 0
    if host >= room:
        return Inability(
            "kvCache.hostMemory",
            f"{cache.host_memory!r} does not fit under resources.limits.memory {limit}; lower it or raise the limit",
        )
    on_cpu = not any(name.endswith(GPU_SUFFIX) for name in engine.resources.limits)
    if engine.type == "ullage" and on_cpu and (cache.memory_bytes or 0) + host >= room:
        beside = f" beside hostMemory {cache.host_memory}" if host else ""
        return Inability(
            "kvCache.memory",
            f"{cache.memory!r}{beside} does not fit under resources.limits.memory {limit}; lower it or raise the limit",
        )
    return None


def _accelerators(engine: Engine) -> Inability | None:
    """A split over more accelerators than a pod has."""
    counts = [int(v) for k, v in engine.resources.limits.items() if k.endswith(GPU_SUFFIX) and v.isdecimal()]
    if not counts or engine.tensor_parallel <= sum(counts) * engine.nodes:
        return None
    return Inability(
        "tensorParallel",
        f"{engine.tensor_parallel} is above the {sum(counts) * engine.nodes} accelerators of an engine; "
        "lower it, or raise resources.limits or nodes",
    )


RULES: tuple[Rule, ...] = (_image, _ullage_alone, _others, _memory_limit, _accelerators)
