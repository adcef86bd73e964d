"""Adapter of SGLang 0.5: exposition, admin routes and gate, as for vLLM. From its source, not from a running one.

Names and labels are those of `python/sglang/srt/observability/metrics_collector.py` as of 2026: counters of tokens and
requests move when a request ends and are split by `is_streaming`; `realtime_tokens_total` moves with every batch; with
priority scheduling the queue's numbers come once whole (`priority=""`) and once more in parts. Gauges are pushed with
each prefill and every few dozen decode steps, and stand still while the engine idles.

Blocks here are tokens: SGLang counts its pool in tokens and pages it by one unless told otherwise. Used, evictable
and available tokens make the pool, so hot, reclaimable and free are all known; older versions say `token_usage`
alone, and then free and reclaimable stay unknown. Every tensor-parallel worker may report the same numbers: the
greatest counts once. Data-parallel ranks are summed, and shown apart.

`/flush_cache` drops the whole prefix cache and answers 400 while requests run. `/pause_generation` has no mode that
lets requests end, so draining needs the gate.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage_agent.adapters.base import AdapterConfig, Reading
from ullage_agent.adapters.contract import Field, Ledger, Scalar, build_snapshot
from ullage_agent.adapters.exposition import (
    Exposition,
    ExpositionContract,
    by_rank,
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

CAPACITY = Field(attribute="total_blocks", source="sglang:max_total_num_tokens", low=1)
USED = Field(attribute="hot_blocks", source="sglang:kv_used_tokens", aliases=("sglang:num_used_tokens",), nullable=True)
EVICTABLE = Field(attribute="reclaimable_blocks", source="sglang:kv_evictable_tokens", nullable=True)
AVAILABLE = Field(attribute="free_blocks", source="sglang:kv_available_tokens", nullable=True)
USAGE = Field(
    attribute="usage",
    source="sglang:full_token_usage",
    kind="float",
    high=1.0,
    aliases=("sglang:token_usage",),  # of the fullest pool, which in hybrid models need not be this one
)
RUNNING = Field(attribute="running", source="sglang:num_running_reqs")
WAITING = Field(attribute="waiting", source="sglang:num_queue_reqs")
REALTIME = Field(attribute="decoded_tokens", source="sglang:realtime_tokens_total", nullable=True)
START_TIME = Field(attribute="start", source="process_start_time_seconds", kind="float", nullable=True)

COUNTERS: tuple[Field, ...] = (
    Field(
        attribute="preemptions_total",
        source="sglang:num_retracted_requests_total",
        aliases=("sglang:num_retracted_reqs_total",),
    ),
    Field(attribute="prompt_tokens_total", source="sglang:prompt_tokens_total"),
    Field(attribute="generated_tokens_total", source="sglang:generation_tokens_total"),
    Field(attribute="finished_total", source="sglang:num_requests_total"),
    Field(attribute="prefix_hit_tokens_total", source="sglang:cached_tokens_total", nullable=True),
)

CONTRACT = ExpositionContract(
    prefix="sglang:",
    fields=(CAPACITY, USED, EVICTABLE, AVAILABLE, USAGE, RUNNING, WAITING, REALTIME, START_TIME, *COUNTERS),
    histograms=(
        ("ttft", ("sglang:time_to_first_token_seconds",)),
        ("inter_token", ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds")),
        ("end_to_end", ("sglang:e2e_request_latency_seconds",)),
        ("answer_tokens", ("sglang:generation_tokens_histogram",)),
        ("prompt_tokens", ("sglang:prompt_tokens_histogram",)),
    ),
    rank_label="dp_rank",
    replica_labels=("tp_rank", "pp_rank", "moe_ep_rank"),
    part_labels=("priority",),
)

USAGE_TOLERANCE = 0.02
"""How far `token_usage`, which SGLang rounds, may be from used / capacity."""

Ranked = Mapping[str, Scalar | None]


def parse_metrics(body: bytes, sampled_at: float) -> Reading:
    """Judge an exposition against the metric contract. Pure.

    Raises:
        EngineProtocolError: it is no Prometheus exposition.
    """
    exposition = parse_exposition(body, CONTRACT, METRICS_PATH)
    ledger = Ledger()
    found = {promised.attribute: by_rank(exposition, promised, CONTRACT, ledger) for promised in CONTRACT.fields}
    hot = _hot(found, ledger)
    complete = bool(found["free_blocks"]) and bool(found["reclaimable_blocks"])
    values: dict[str, Scalar | None] = {
        "block_tokens": 1,
        "hot_blocks": total(hot),
        **{name: total(found[name]) for name in ("total_blocks", "running", "waiting")},
        **{name: total(found[name]) if complete else None for name in ("free_blocks", "reclaimable_blocks")},
        **{promised.attribute: total(found[promised.attribute]) for promised in COUNTERS},
    }
    decoded = total(by_rank(exposition, REALTIME, CONTRACT, ledger, where=("mode", "decode")))
    if decoded is not None:
        values["generated_tokens_total"] = decoded
    if values["prefix_hit_tokens_total"] is not None:
        values["prefix_query_tokens_total"] = values["prompt_tokens_total"]
    snapshot = build_snapshot(values, sampled_at=sampled_at, in_flight=None, ledger=ledger, ranks=_ranks(found, hot))
    histograms = read_histograms(exposition, CONTRACT, ledger)
    identity = _identity(exposition, ledger)
    return Reading(snapshot=snapshot, identity=identity, violations=ledger.violations, histograms=histograms)


def judge_reset(answer: Answer) -> Reset:
    """400 means that requests run; the cache is then as it was."""
    if answer.status == 200:
        return Reset(done=True, message="the prefix cache was flushed")
    return Reset(done=False, message=f"SGLang flushed nothing: requests run (status {answer.status})")


def _hot(found: Mapping[str, Ranked], ledger: Ledger) -> dict[str, Scalar | None]:
    """Tokens held by requests, by rank, and whether the engine agrees with itself about them."""
    capacity, usage = found["total_blocks"], found["usage"]
    hot: dict[str, Scalar | None] = {}
    for rank, size in capacity.items():
        used, share = found["hot_blocks"].get(rank), usage.get(rank)
        if not isinstance(size, int):
            hot[rank] = None
        elif not isinstance(used, int):
            hot[rank] = round(share * size) if isinstance(share, float) else None
        elif isinstance(share, float) and abs(used / size - share) > USAGE_TOLERANCE:
            ledger.report(USED.source, "out_of_range", f"{used} of {size} tokens, but token_usage says {share:g}")
            hot[rank] = None
        else:
            hot[rank] = used
    return hot


def _ranks(found: Mapping[str, Ranked], hot: Ranked) -> tuple[Rank, ...]:
    sizes = found["total_blocks"]
    if len(sizes) < 2:
        return ()

    def count(attribute: str, rank: str) -> int | None:
        value = found[attribute].get(rank)
        return value if isinstance(value, int) else None

    return tuple(
        Rank(
            name=rank,
            total_blocks=count("total_blocks", rank),
            hot_blocks=held if isinstance(held := hot.get(rank), int) else None,
            reclaimable_blocks=count("reclaimable_blocks", rank),
            running=count("running", rank),
            waiting=count("waiting", rank),
        )
        for rank in sorted(sizes)
    )


def _identity(exposition: Exposition, ledger: Ledger) -> EngineIdentity:
    starts = find(exposition, START_TIME, ledger)
    start = ledger.accept(START_TIME, float(starts[0][1])) if starts else None
    return EngineIdentity(
        type="sglang",
        instance="unknown" if start is None else f"started-{start:.3f}",
        model=first_label(exposition.samples.get(RUNNING.source, []), "model_name"),
    )


DIALECT = Dialect(
    name="sglang",
    title="SGLang",
    parse=parse_metrics,
    reset=Call(path="/flush_cache"),
    judge_reset=judge_reset,
    pause=Call(path="/pause_generation", body={"mode": "in_place"}),
    resume=Call(path="/continue_generation"),
    pause_drains=False,
    counts_cached=True,
    canary=lambda _: Call(path="/health_generate", method="GET"),
)


def make_adapter(config: AdapterConfig) -> ForeignAdapter:
    """Factory of `--engine sglang`."""
    http = EngineHttp(parse_endpoint(config.url), max_bytes=MAX_ANSWER_BYTES)
    gate = None if config.gate_file is None else GateFile(config.gate_file, config.clock)
    return ForeignAdapter(DIALECT, http, config.clock, read_timeout_s=config.read_timeout_s, gate=gate)
