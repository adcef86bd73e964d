"""Adapter of vLLM: its Prometheus exposition becomes a `Snapshot`, its admin routes and the gate become actions.

What vLLM cannot say stays None: it counts referenced blocks only, so free and cached are one number (total less
hot), and it tells neither block bytes nor what admitted requests may still ask for. One block of its pool is a
placeholder that is never handed out, so the total is one less than `num_gpu_blocks`. Its preemption counter moves
when a preempted request runs again, up to a minute late; its gauges move once per engine step, which during long
prefills is every few seconds.

Data-parallel ranks are summed, and shown apart in `Snapshot.ranks`.

`/reset_prefix_cache`, `/pause` and `/resume` exist in development mode only (`VLLM_SERVER_DEV_MODE=1`). A reset
answers 200 with `{"success": false}` while anything runs, and frees nothing that did not count as free before: it is
offered to whoever asks, but the operator is not told to plan with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ullage_agent.adapters.base import AdapterConfig, Reading
from ullage_agent.adapters.contract import Field, Ledger, Scalar, build_snapshot
from ullage_agent.adapters.exposition import (
    Exposition,
    ExpositionContract,
    by_rank,
    digits,
    find,
    first_label,
    parse_exposition,
    read_histograms,
    total,
)
from ullage_agent.adapters.foreign import MAX_ANSWER_BYTES, METRICS_PATH, Call, Dialect, ForeignAdapter, Reset
from ullage_agent.adapters.gatefile import GateFile
from ullage_agent.adapters.transport import Answer, EngineHttp, parse_endpoint
from ullage_agent.wire import EngineIdentity, Rank

USAGE = Field(
    attribute="usage",
    source="vllm:kv_cache_usage_perc",
    kind="float",
    high=1.0,  # a ratio, whatever its name says
    aliases=("vllm:gpu_cache_usage_perc",),
)
CONFIG_INFO = "vllm:cache_config_info"
NUM_BLOCKS = Field(attribute="num_gpu_blocks", source=f"{CONFIG_INFO}.num_gpu_blocks", low=2)
BLOCK_SIZE = Field(attribute="block_size", source=f"{CONFIG_INFO}.block_size", low=1)
START_TIME = Field(attribute="start", source="process_start_time_seconds", kind="float", nullable=True)
RUNNING = Field(attribute="running", source="vllm:num_requests_running")
WAITING = Field(attribute="waiting", source="vllm:num_requests_waiting")

COUNTERS: tuple[Field, ...] = (
    Field(attribute="preemptions_total", source="vllm:num_preemptions_total"),
    Field(attribute="prompt_tokens_total", source="vllm:prompt_tokens_total"),
    Field(attribute="generated_tokens_total", source="vllm:generation_tokens_total"),
    Field(attribute="finished_total", source="vllm:request_success_total"),
    Field(
        attribute="prefix_query_tokens_total",
        source="vllm:prefix_cache_queries_total",
        aliases=("vllm:gpu_prefix_cache_queries_total",),
    ),
    Field(
        attribute="prefix_hit_tokens_total",
        source="vllm:prefix_cache_hits_total",
        aliases=("vllm:gpu_prefix_cache_hits_total",),
    ),
)

CONTRACT = ExpositionContract(
    prefix="vllm:",
    fields=(USAGE, START_TIME, RUNNING, WAITING, *COUNTERS),
    infos=(CONFIG_INFO,),
    histograms=(
        ("ttft", ("vllm:time_to_first_token_seconds",)),
        ("inter_token", ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")),
        ("end_to_end", ("vllm:e2e_request_latency_seconds",)),
        ("answer_tokens", ("vllm:request_generation_tokens",)),
        ("prompt_tokens", ("vllm:request_prompt_tokens",)),
    ),
    rank_label="engine",
)
"""The metric contract: one name over the versions of a metric, its range, and where a rank is told."""


def parse_metrics(body: bytes, sampled_at: float) -> Reading:
    """Judge an exposition against the metric contract. Pure.

    Raises:
        EngineProtocolError: it is no Prometheus exposition.
    """
    exposition = parse_exposition(body, CONTRACT, METRICS_PATH)
    ledger = Ledger()
    running = by_rank(exposition, RUNNING, CONTRACT, ledger)
    waiting = by_rank(exposition, WAITING, CONTRACT, ledger)
    values: dict[str, Scalar | None] = {"running": total(running), "waiting": total(waiting)}
    for promised in COUNTERS:
        values[promised.attribute] = total(by_rank(exposition, promised, CONTRACT, ledger))
    pools, values["block_tokens"] = _pools(exposition, ledger)
    hot = _hot(exposition, pools, ledger)
    values |= {"total_blocks": sum(pools.values()) if pools else None, "hot_blocks": total(hot)}
    ranks = _ranks(pools, hot, running, waiting)
    snapshot = build_snapshot(values, sampled_at=sampled_at, in_flight=None, ledger=ledger, ranks=ranks)
    histograms = read_histograms(exposition, CONTRACT, ledger)
    identity = _identity(exposition, ledger)
    return Reading(snapshot=snapshot, identity=identity, violations=ledger.violations, histograms=histograms)


def judge_reset(answer: Answer) -> Reset:
    """What a reset's answer says, whatever its status pretends."""
    if answer.status != 200:
        return Reset(done=False, message=f"the reset was refused with status {answer.status}")
    try:
        success = json.loads(answer.body or b"{}").get("success", True)
    except (ValueError, AttributeError):
        success = True  # versions before 0.11 answer 200 with an empty body
    if success is not True:
        return Reset(done=False, message="vLLM reset nothing: requests hold the cache (success: false)")
    return Reset(done=True, message="the prefix cache was reset")


def _hot(exposition: Exposition, pools: Mapping[str, int], ledger: Ledger) -> dict[str, Scalar | None]:
    """Referenced blocks of each rank: usage is a share of the rank's own pool."""
    hot: dict[str, Scalar | None] = {}
    for labels, raw in find(exposition, USAGE, ledger):
        usage = ledger.accept(USAGE, float(raw))
        rank = labels.get(CONTRACT.rank_label, "")
        size = pools.get(rank)
        hot[rank] = round(usage * size) if isinstance(usage, float) and size is not None else None
    return hot


def _pools(exposition: Exposition, ledger: Ledger) -> tuple[dict[str, int], Scalar | None]:
    """Usable blocks by rank, and tokens a block."""
    usable: dict[str, int] = {}
    block_tokens: Scalar | None = None
    infos = exposition.samples.get(CONFIG_INFO, [])
    if not infos:
        ledger.absent(NUM_BLOCKS, exposition.other_names)
    for labels, _ in infos:
        blocks = ledger.accept(NUM_BLOCKS, digits(labels.get("num_gpu_blocks")))
        block_tokens = ledger.accept(BLOCK_SIZE, digits(labels.get("block_size")))
        if isinstance(blocks, int):
            usable[labels.get(CONTRACT.rank_label, "")] = blocks - 1
    return usable, block_tokens


def _ranks(
    pools: Mapping[str, int],
    hot: Mapping[str, Scalar | None],
    running: Mapping[str, Scalar | None],
    waiting: Mapping[str, Scalar | None],
) -> tuple[Rank, ...]:
    if len(pools) < 2:
        return ()
    return tuple(
        Rank(
            name=name,
            total_blocks=size,
            hot_blocks=_count(hot.get(name)),
            running=_count(running.get(name)),
            waiting=_count(waiting.get(name)),
        )
        for name, size in sorted(pools.items())
    )


def _count(value: Scalar | None) -> int | None:
    return value if isinstance(value, int) else None


def _identity(exposition: Exposition, ledger: Ledger) -> EngineIdentity:
    starts = find(exposition, START_TIME, ledger)
    start = ledger.accept(START_TIME, float(starts[0][1])) if starts else None
    return EngineIdentity(
        type="vllm",
        instance="unknown" if start is None else f"started-{start:.3f}",
        model=first_label(exposition.samples.get(RUNNING.source, []), "model_name"),
    )


def _canary(model: str | None) -> Call:
    body = {"prompt": "1", "max_tokens": 1, "temperature": 0}
    return Call(path="/v1/completions", body=body if model is None else {"model": model, **body})


DIALECT = Dialect(
    name="vllm",
    title="vLLM",
    parse=parse_metrics,
    reset=Call(path="/reset_prefix_cache"),
    judge_reset=judge_reset,
    pause=Call(path="/pause?mode=wait"),
    resume=Call(path="/resume"),
    pause_drains=True,
    counts_cached=False,
    canary=_canary,
)


def make_adapter(config: AdapterConfig) -> ForeignAdapter:
    """Factory of `--engine vllm`."""
    http = EngineHttp(parse_endpoint(config.url), max_bytes=MAX_ANSWER_BYTES)
    gate = None if config.gate_file is None else GateFile(config.gate_file, config.clock)
    return ForeignAdapter(DIALECT, http, config.clock, read_timeout_s=config.read_timeout_s, gate=gate)
