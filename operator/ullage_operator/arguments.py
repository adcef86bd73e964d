"""Command lines of engine and agent for a service: the same in a cluster and in local mode.

Each type of engine has a table from the one vocabulary of the spec to its own flags. What a type cannot do never
comes here: the model refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from ullage_operator.model import InferenceService

GIB = 1024**3
GATE = "ullage_agent.gate.AdmissionGate"
"""Middleware by which vLLM refuses requests while throttled; mounted beside it."""


def engine_command(service: InferenceService) -> list[str]:
    """Program of the engine, without arguments."""
    return {
        "ullage": ["ullage-engine"],
        "vllm": ["vllm", "serve"],
        "sglang": ["python3", "-m", "sglang.launch_server"],
    }[service.spec.engine.type]


def engine_arguments(
    service: InferenceService, *, host: str, port: int, admin: str, cache_dir: str | None = None
) -> list[str]:
    """Arguments of the engine. `admin` is `unix:PATH` or `HOST:PORT` (type ullage); `port` 0 means any free one."""
    if service.spec.engine.type == "ullage":
        flags = _ullage(service) | {"--host": host, "--port": port, "--admin": admin, "--cache-dir": cache_dir}
        order = ("--model", "--served-name", "--host", "--port", "--admin")
        first = {flag: flags[flag] for flag in order}
        return [*_flatten(first | flags), *service.spec.engine.extra_args]
    table = {"vllm": _vllm, "sglang": _sglang}[service.spec.engine.type]
    flags = table(service) | {"--host": host, "--port": port}
    model = [service.spec.model.source] if service.spec.engine.type == "vllm" else []
    return [*model, *_flatten(flags), *service.spec.engine.extra_args]


def _ullage(service: InferenceService) -> dict[str, object]:
    model, engine = service.spec.model, service.spec.engine
    cache, draft = engine.kv_cache, engine.speculation
    return {
        "--model": model.source,
        "--served-name": service.served_name,
        "--kv-memory": cache.memory_bytes,
        "--host-memory": cache.host_memory_bytes,
        "--kv-type": cache.type,
        "--block-size": cache.block_size,
        "--max-model-len": model.max_length,
        "--max-batch-tokens": engine.max_batch_tokens,
        "--max-sequences": engine.max_sequences,
        "--dtype": engine.dtype,
        "--numerics": engine.numerics,
        "--threads": engine.threads,
        "--kv-budget": cache.eviction.budget,
        "--eviction-policy": cache.eviction.policy,
        "--evict-interval": cache.eviction.interval,
        "--protected-tokens": cache.eviction.protected_tokens,
        "--recent-tokens": cache.eviction.recent_tokens,
        "--no-prefix-reuse": not cache.prefix_reuse,
        "--speculation": draft and draft.method,
        "--draft-model": draft and draft.draft_model,
        "--speculation-tokens": draft and draft.tokens,
    }


def worker_arguments(service: InferenceService) -> list[str]:
    """What the engine's other pods are told besides: they serve no API of their own."""
    return ["--headless"] if service.spec.engine.type == "vllm" else []


def _vllm(service: InferenceService) -> dict[str, object]:
    model, engine = service.spec.model, service.spec.engine
    cache, draft = engine.kv_cache, engine.speculation
    speculative = draft and {
        "method": draft.method,
        "num_speculative_tokens": draft.tokens,
        "prompt_lookup_max": draft.tokens,
    }
    return {
        "--served-model-name": service.served_name,
        "--kv-cache-memory-bytes": cache.memory_bytes,
        "--gpu-memory-utilization": cache.memory_share,
        "--kv-cache-dtype": {"fp8": "fp8", "bf16": "bfloat16"}[cache.type],
        "--block-size": cache.block_size,
        "--max-model-len": model.max_length,
        "--max-num-batched-tokens": engine.max_batch_tokens,
        "--max-num-seqs": engine.max_sequences,
        "--dtype": engine.dtype,
        "--tensor-parallel-size": engine.tensor_parallel,
        "--enable-prefix-caching": cache.prefix_reuse,
        "--no-enable-prefix-caching": not cache.prefix_reuse,
        # The sum over all ranks, those on other pods included.
        "--kv-offloading-size": cache.host_memory_bytes and f"{cache.host_memory_bytes * engine.nodes / GIB:g}",
        "--kv-offloading-backend": "native" if cache.host_memory_bytes else None,
        "--speculative-config": speculative and json.dumps(speculative, separators=(",", ":")),
        "--middleware": GATE,
        **_many_nodes(service, {"--nnodes": "size", "--node-rank": "rank", "--master-addr": "leader"}),
    }


def _sglang(service: InferenceService) -> dict[str, object]:
    model, engine = service.spec.model, service.spec.engine
    cache, draft = engine.kv_cache, engine.speculation
    ranks = max(1, engine.tensor_parallel // engine.nodes)
    return {
        "--model-path": model.source,
        "--served-model-name": service.served_name,
        "--mem-fraction-static": cache.memory_share,
        "--kv-cache-dtype": {"fp8": "fp8_e4m3", "bf16": "bfloat16"}[cache.type],
        "--page-size": cache.block_size,
        "--context-length": model.max_length,
        "--chunked-prefill-size": engine.max_batch_tokens,
        "--max-running-requests": engine.max_sequences,
        "--dtype": engine.dtype,
        "--tp-size": engine.tensor_parallel,
        "--disable-radix-cache": not cache.prefix_reuse,
        "--enable-hierarchical-cache": cache.host_memory_bytes is not None,
        # Of each rank, in whole 10**9 bytes.
        "--hicache-size": cache.host_memory_bytes and max(1, cache.host_memory_bytes // ranks // 10**9),
        "--speculative-algorithm": draft and draft.method.upper(),
        "--speculative-num-draft-tokens": draft and draft.tokens,
        "--enable-metrics": True,
        **_many_nodes(service, {"--nnodes": "size", "--node-rank": "rank", "--dist-init-addr": "leader:20000"}),
    }


def _many_nodes(service: InferenceService, flags: dict[str, str]) -> dict[str, object]:
    """Flags of an engine on several pods; a LeaderWorkerSet sets the variables, the kubelet puts them in."""
    if service.spec.engine.nodes == 1:
        return {}
    variables = {"size": "$(LWS_GROUP_SIZE)", "rank": "$(LWS_WORKER_INDEX)", "leader": "$(LWS_LEADER_ADDRESS)"}
    fill: Callable[[str], str] = lambda text: ":".join(variables.get(part, part) for part in text.split(":"))  # noqa: E731
    return {flag: fill(text) for flag, text in flags.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFiles:
    """Paths of the files that an agent serves its actions with."""

    certificate: str
    key: str
    token: str


def agent_arguments(
    service: InferenceService,
    *,
    engine_url: str,
    host: str,
    metrics_port: int,
    action_port: int,
    files: AgentFiles,
    gate_file: str | None = None,
) -> list[str]:
    """Arguments of `ullage-agent`. `engine_url`: the engine's admin, `unix:PATH` or `http://HOST:PORT`."""
    return _flatten(
        {
            "--engine": service.spec.engine.type,
            "--engine-url": engine_url,
            "--metrics-host": host,
            "--metrics-port": metrics_port,
            "--action-host": host,
            "--action-port": action_port,
            "--tls-cert": files.certificate,
            "--tls-key": files.key,
            "--token-file": files.token,
            "--poll-seconds": service.spec.agent.poll_seconds,
            "--gate-file": gate_file,
        }
    )


def _flatten(flags: dict[str, object]) -> list[str]:
    # One word for flag and value: a value that begins with - is not taken for another flag.
    present = {flag: value for flag, value in flags.items() if value is not None and value is not False}
    return [flag if value is True else f"{flag}={value}" for flag, value in present.items()]
