"""What Prometheus' `/api/v1/query_range` answers, as readings: an agent's `llm_` metrics, or vLLM's or SGLang's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ullage_agent.adapters import sglang, vllm
from ullage_agent.adapters.base import Reading
from ullage_agent.errors import EngineProtocolError
from ullage_agent.wire import EngineIdentity, Snapshot

from ..errors import InputError
from .data import Moment, Recording

DIALECTS: tuple[tuple[str, Callable[[bytes, float], Reading]], ...] = (
    ("vllm:", vllm.parse_metrics),
    ("sglang:", sglang.parse_metrics),
)
GRAIN = 1000
"""Blocks that a pool is cut into where Prometheus knows its bytes alone."""
BLOCK_TOKENS = 16
BASE = "llm_kv_cache_memory_bytes"
STATES = ("total", "hot", "reclaimable", "free")

Series = tuple[Mapping[str, str], Mapping[float, float]]
"""Labels of a series, and its values by Unix seconds."""


def from_prometheus(path: Path, pod: str | None = None) -> Recording:
    """A range query's answer.

    Raises:
        InputError: it is not one, or which engine is meant cannot be told.
    """
    series = choose(read_matrix(path), path, pod)
    times = sorted({at for _, values in series for at in values})
    if not times:
        raise InputError(f"FILE: {path} holds no values")
    names = {labels["__name__"] for labels, _ in series}
    if any(name == BASE or name == "llm_kv_cache_tokens" for name in names):
        read: Callable[[float], Reading] = _AgentSeries(series).reading
    else:
        found = next((parse for prefix, parse in DIALECTS if any(name.startswith(prefix) for name in names)), None)
        if found is None:
            raise InputError(
                f"FILE: {path} holds neither {BASE} nor metrics of vLLM or SGLang; query "
                '{__name__=~"llm_.*|ullage_agent_.*",pod="POD"}'
            )
        read = _rebuilt(series, found)
    moments = []
    for at in times:
        try:
            moments.append(Moment(at=at - times[0], wall=at, reading=read(at)))
        except EngineProtocolError as error:
            moments.append(Moment(at=at - times[0], wall=at, reading=None, error=str(error)))
    return Recording(source=f"Prometheus {path.name}", moments=tuple(moments))


def read_matrix(path: Path) -> list[Series]:
    """All series of an answer."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        result = document["data"]["result"] if isinstance(document, dict) else document
        series: list[Series] = [
            (
                {str(name): str(value) for name, value in entry["metric"].items()},
                {float(at): float(value) for at, value in entry["values"] if math.isfinite(float(value))},
            )
            for entry in result
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"FILE: {path} is neither a recording of ullage-agent nor an answer of Prometheus' query_range ({error!r})"
        ) from error
    unnamed = [labels for labels, _ in series if "__name__" not in labels]
    if unnamed:
        raise InputError(f"FILE: {path}: a series has no name; query by name, without functions around it")
    return series


def choose(series: list[Series], path: Path, pod: str | None) -> list[Series]:
    """The series of one engine."""
    keys = [labels.get("pod") or labels.get("instance") or "" for labels, _ in series]
    known = sorted(set(keys))
    if pod is None and len(known) > 1:
        raise InputError(f"--pod: {path} holds several engines ({', '.join(known[:6])}); name one")
    if pod is not None and pod not in known:
        raise InputError(f"--pod: {path} has no {pod!r}; it has {', '.join(known[:6])}")
    return [one for one, key in zip(series, keys, strict=True) if pod is None or key == pod]


class _AgentSeries:
    """Snapshots out of an agent's metrics. Blocks are counted in tokens' places where those are told."""

    def __init__(self, series: Iterable[Series]) -> None:
        self._series: dict[tuple[str, str], Mapping[float, float]] = {}
        self._instances: list[tuple[str, str, Mapping[float, float]]] = []
        for labels, values in series:
            if labels["__name__"] == "llm_engine_info":
                self._instances.append((labels.get("instance_id", ""), labels.get("type", ""), values))
            self._series[labels["__name__"], labels.get("state", labels.get("kind", ""))] = values

    def reading(self, at: float) -> Reading:
        """What the agent knew then, as far as its metrics tell."""
        tokens = {state: self._value("llm_kv_cache_tokens", at, state) for state in STATES}
        memory = {state: self._value(BASE, at, state) for state in STATES}
        unit = self._unit(tokens, memory)
        pool = tokens if tokens["total"] else memory
        blocks = {state: None if value is None or not unit else round(value / unit) for state, value in pool.items()}
        external = self._value("llm_kv_cache_fragmentation_ratio", at, "external")
        free = blocks["free"]
        run = None if external is None or free is None else round(free * (1 - external))
        identity = next(
            ((name, kind) for name, kind, values in self._instances if at in values), ("prometheus", "ullage")
        )
        return Reading(
            snapshot=Snapshot(
                sampled_at=at,
                block_tokens=BLOCK_TOKENS if tokens["total"] else None,
                block_bytes=_bytes(memory["total"], blocks["total"]),
                total_blocks=blocks["total"],
                hot_blocks=blocks["hot"],
                reclaimable_blocks=blocks["reclaimable"],
                free_blocks=free,
                largest_free_run_blocks=run,
                largest_allocation_blocks=_available(free, blocks["reclaimable"]) if run is not None else None,
                running=self._count("llm_requests_running", at),
                waiting=self._count("llm_requests_waiting", at),
                outstanding_blocks=self._count("llm_kv_demand_blocks", at),
                admitted_total=self._count("llm_requests_admitted_total", at),
                finished_total=self._count("llm_requests_finished_total", at),
                preemptions_total=self._count("llm_preemptions_total", at),
                recomputed_tokens_total=self._count("llm_recomputed_tokens_total", at),
                prompt_tokens_total=self._count("llm_prompt_tokens_total", at),
                generated_tokens_total=self._count("llm_generated_tokens_total", at),
                prefix_query_tokens_total=self._count("llm_prefix_query_tokens_total", at),
                prefix_hit_tokens_total=self._count("llm_prefix_hit_tokens_total", at),
                admission_max_prompt_tokens=self._count("llm_admission_max_prompt_tokens", at),
            ),
            identity=EngineIdentity(type=identity[1] or "ullage", instance=identity[0] or "prometheus"),
        )

    def _value(self, name: str, at: float, state: str = "") -> float | None:
        return self._series.get((name, state), {}).get(at)

    def _count(self, name: str, at: float) -> int | None:
        value = self._value(name, at)
        return None if value is None else round(value)

    @staticmethod
    def _unit(tokens: Mapping[str, float | None], memory: Mapping[str, float | None]) -> float:
        if tokens["total"]:
            return float(BLOCK_TOKENS)
        return (memory["total"] or 0.0) / GRAIN


def _bytes(memory: float | None, blocks: int | None) -> int | None:
    return None if not memory or not blocks else round(memory / blocks)


def _rebuilt(series: list[Series], parse: Callable[[bytes, float], Reading]) -> Callable[[float], Reading]:
    """Scrapes as they were, for the adapter of the engine to read."""
    dropped = ("__name__", "job", "instance", "pod", "namespace", "container", "endpoint", "node", "prometheus")

    def line(labels: Mapping[str, str], value: float) -> str:
        kept = ",".join(f"{name}={json.dumps(text)}" for name, text in labels.items() if name not in dropped)
        return f"{labels['__name__']}{{{kept}}} {value!r}"

    def reading(at: float) -> Reading:
        text = "\n".join(line(labels, values[at]) for labels, values in series if at in values)
        return parse(f"{text}\n".encode(), at)

    return reading


def _available(free: int | None, reclaimable: int | None) -> int | None:
    """What an engine that tells runs can have in one allocation: through block tables, all that is available."""
    return None if free is None or reclaimable is None else free + reclaimable
