"""Command lines of engine and agent for a service: the same in a cluster and in local mode."""

from __future__ import annotations

from dataclasses import dataclass

from ullage_operator.model import InferenceService


def engine_arguments(
    service: InferenceService, *, host: str, port: int, admin: str, cache_dir: str | None = None
) -> list[str]:
    """Arguments of `ullage-engine`. `admin` is `unix:PATH` or `HOST:PORT`; `port` 0 means any free one."""
    model, engine = service.spec.model, service.spec.engine
    cache = engine.kv_cache
    flags: dict[str, object] = {
        "--model": model.source,
        "--served-name": service.served_name,
        "--host": host,
        "--port": port,
        "--admin": admin,
        "--kv-memory": cache.memory_bytes,
        "--kv-type": cache.type,
        "--block-size": cache.block_size,
        "--max-model-len": model.max_length,
        "--max-batch-tokens": engine.max_batch_tokens,
        "--max-sequences": engine.max_sequences,
        "--dtype": engine.dtype,
        "--threads": engine.threads,
        "--eviction-policy": cache.eviction.policy,
        "--protected-tokens": cache.eviction.protected_tokens,
        "--recent-tokens": cache.eviction.recent_tokens,
        "--cache-dir": cache_dir,
    }
    switches = [] if cache.prefix_reuse else ["--no-prefix-reuse"]
    return [*_flatten(flags), *switches, *engine.extra_args]


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
        }
    )


def _flatten(flags: dict[str, object]) -> list[str]:
    # One word for flag and value: a value that begins with - is not taken for another flag.
    return [f"{flag}={value}" for flag, value in flags.items() if value is not None]
