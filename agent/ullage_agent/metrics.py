"""Every metric of the agent, defined in one place: name, labels, help, and where its value comes from.

A series whose value the engine cannot say is absent, never zero. The texts are for someone paged at night: what
the number means and what it points to. `collector.py` renders them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ullage_agent.wire import RiskReport

Labels = tuple[str, ...]
Points = Iterable[tuple[Labels, float | None]]
"""Label values and value of each series; None leaves the series out."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """One gauge family computed from a report."""

    name: str
    help: str
    labels: Labels
    points: Callable[[RiskReport], Points]


@dataclass(frozen=True, slots=True)
class Family:
    """One family whose values come from the agent itself."""

    name: str
    help: str
    labels: Labels = ()


@dataclass(frozen=True, slots=True)
class EngineCounter:
    """One of the engine's own counters, passed on. It restarts when the engine does, as `rate()` expects."""

    name: str
    help: str
    attribute: str


def _memory(report: RiskReport) -> Points:
    state = report.snapshot
    if state is None or state.block_bytes is None:
        return
    counts = {
        "total": state.total_blocks,
        "hot": state.hot_blocks,
        "reclaimable": state.reclaimable_blocks,
        "free": state.free_blocks,
    }
    for name, count in counts.items():
        yield (name,), None if count is None else float(count * state.block_bytes)


def _usage(report: RiskReport) -> Points:
    state = report.snapshot
    if state is None or not state.total_blocks:
        return
    for name, count in (("hot", state.hot_blocks), ("reclaimable", state.reclaimable_blocks)):
        yield (name,), None if count is None else count / state.total_blocks


def _fragmentation(report: RiskReport) -> Points:
    figures = report.fragmentation
    if figures is not None:
        yield ("external",), figures.external
        yield ("internal",), figures.internal
        yield ("allocator",), figures.allocator


def _exhaustion(report: RiskReport) -> Points:
    outlook = report.forecast
    if outlook is not None:
        yield ("0.1",), outlook.exhaustion_p10_s
        yield ("0.5",), outlook.exhaustion_p50_s
        yield ("0.9",), outlook.exhaustion_p90_s


def _from_forecast(attribute: str) -> Callable[[RiskReport], Points]:
    return lambda report: [((), getattr(report.forecast, attribute, None))]


def _from_snapshot(attribute: str) -> Callable[[RiskReport], Points]:
    return lambda report: [((), getattr(report.snapshot, attribute, None))]


def _hit_ratio(report: RiskReport) -> Points:
    state = report.snapshot
    if state is not None and state.prefix_query_tokens_total and state.prefix_hit_tokens_total is not None:
        yield (), state.prefix_hit_tokens_total / state.prefix_query_tokens_total


def _host(report: RiskReport) -> Points:
    state = report.snapshot
    if state is not None:
        yield ("total",), state.host_total_bytes
        yield ("used",), state.host_used_bytes


def _from_service(attribute: str) -> Callable[[RiskReport], Points]:
    return lambda report: [((), getattr(report.service, attribute, None))]


def _quantiles(prefix: str) -> Callable[[RiskReport], Points]:
    def points(report: RiskReport) -> Points:
        for label, name in (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99")):
            yield (label,), getattr(report.service, f"{prefix}_{name}_s", None)

    return points


def _tokens(report: RiskReport) -> Points:
    state = report.snapshot
    if state is None or state.block_tokens is None:
        return
    counts = {
        "total": state.total_blocks,
        "hot": state.hot_blocks,
        "reclaimable": state.reclaimable_blocks,
        "free": state.free_blocks,
    }
    for name, count in counts.items():
        yield (name,), None if count is None else float(count * state.block_tokens)


def _ranks(report: RiskReport) -> Points:
    for rank in report.snapshot.ranks if report.snapshot is not None else ():
        if rank.total_blocks and rank.hot_blocks is not None:
            yield (rank.name,), rank.hot_blocks / rank.total_blocks


def _liveness(report: RiskReport) -> Points:
    if report.liveness is not None:
        yield (report.liveness.state,), 1.0


def _quiet(report: RiskReport) -> Points:
    yield (), None if report.liveness is None else report.liveness.quiet_s


def _device_memory(report: RiskReport) -> Points:
    for device in report.devices:
        yield (str(device.index), "total"), device.total_bytes
        yield (str(device.index), "used"), device.used_bytes
        yield (str(device.index), "engine"), device.engine_bytes
        yield (str(device.index), "other"), device.other_bytes


def _from_devices(attribute: str) -> Callable[[RiskReport], Points]:
    return lambda report: [((str(device.index),), getattr(device, attribute)) for device in report.devices]


def _host_memory(report: RiskReport) -> Points:
    if report.host is not None:
        yield ("limit",), report.host.limit_bytes
        yield ("used",), report.host.used_bytes


def _host_stalls(report: RiskReport) -> Points:
    if report.host is not None:
        yield ("some",), report.host.psi_some_avg10
        yield ("full",), report.host.psi_full_avg10


def _features(report: RiskReport) -> Points:
    return [((name,), 1.0) for name in sorted({*report.capabilities, *report.features})]


def _violations(report: RiskReport) -> Points:
    pairs = {(violation.metric, violation.problem) for violation in report.violations}
    return [(pair, 1.0) for pair in sorted(pairs)]


GAUGES: tuple[Gauge, ...] = (
    Gauge(
        "llm_oom_risk_score",
        "Risk of running out of KV cache, 0 (none) to 100 (now): the greatest of llm_oom_risk_term_score. "
        "Above 85 cold blocks are evicted by default. Absent when the engine says too little to judge.",
        (),
        lambda report: [((), report.score)],
    ),
    Gauge(
        "llm_oom_risk_term_score",
        "Points of each risk term, 0 to 100. classic: pressure and external fragmentation; forecast: how soon "
        "admitted work can no longer be served; thrash: work lost to preemption; device: accelerator memory; host: "
        "control group memory. The highest one is why the score is what it is.",
        ("term",),
        lambda report: [((name,), points) for name, points in report.terms.items()],
    ),
    Gauge(
        "llm_kv_exhaustion_seconds",
        "Seconds until live sequences have used up free and reclaimable KV cache: by learned lengths, or at the "
        "present growth until twenty requests have finished. quantile 0.1 is the early end of the band. Absent: not "
        "in sight.",
        ("quantile",),
        _exhaustion,
    ),
    Gauge(
        "llm_kv_exhaustion_chance",
        "Chance, 0 to 1, that live sequences use up free and reclaimable KV cache within half a minute, by learned "
        "lengths. From 0.72 on the risk score is 85. Absent until twenty requests have finished.",
        (),
        _from_forecast("exhaustion_chance"),
    ),
    Gauge(
        "llm_kv_growth_blocks_per_second",
        "Growth of hot KV blocks over the last half minute; negative while sequences finish faster than they grow.",
        (),
        _from_forecast("growth_blocks_per_s"),
    ),
    Gauge(
        "llm_kv_demand_blocks",
        "KV blocks that admitted and waiting requests may still ask for. At most llm_kv_supply_blocks means "
        "that all of them fit.",
        (),
        _from_forecast("demand_blocks"),
    ),
    Gauge(
        "llm_kv_supply_blocks",
        "KV blocks that can be handed out without preempting anyone: free and reclaimable.",
        (),
        _from_forecast("supply_blocks"),
    ),
    Gauge(
        "llm_kv_cache_memory_bytes",
        "KV cache memory by state. hot: held by live sequences, the real pressure; reclaimable: prefix cache "
        "that gives way at once; free: unused. A pool with little free and much reclaimable is healthy.",
        ("state",),
        _memory,
    ),
    Gauge(
        "llm_kv_cache_usage_ratio",
        "Share of KV blocks, 0 to 1: hot (held by live sequences) and reclaimable (prefix cache).",
        ("state",),
        _usage,
    ),
    Gauge(
        "llm_kv_cache_fragmentation_ratio",
        "Fragmentation, 0 (none) to 1. external: free blocks not in the largest free run (1 when none is "
        "free); internal: allocated token slots without a token; allocator: reserved device memory not in use.",
        ("kind",),
        _fragmentation,
    ),
    Gauge(
        "llm_host_cache_memory_bytes",
        "Memory of the lower KV cache tier in host memory, total and used. Absent without such a tier.",
        ("state",),
        _host,
    ),
    Gauge(
        "llm_requests_running",
        "Requests being computed. Falling while llm_requests_waiting rises and nothing finishes means preemption.",
        (),
        _from_snapshot("running"),
    ),
    Gauge(
        "llm_requests_waiting",
        "Requests waiting for room or for their turn.",
        (),
        _from_snapshot("waiting"),
    ),
    Gauge(
        "llm_prefix_cache_hit_ratio",
        "Share of prompt tokens found in the prefix cache since the engine started. Absent before the first prompt.",
        (),
        _hit_ratio,
    ),
    Gauge(
        "llm_admission_max_prompt_tokens",
        "Longest prompt admitted while throttled. Absent: any length is admitted.",
        (),
        _from_snapshot("admission_max_prompt_tokens"),
    ),
    Gauge(
        "llm_engine_step_age_seconds",
        "Seconds since the engine's step loop last passed. Growing: the engine hangs, whatever its health check says.",
        (),
        _from_snapshot("step_age_s"),
    ),
    Gauge(
        "llm_kv_cache_tokens",
        "KV cache in token slots by state, as llm_kv_cache_memory_bytes; for engines that do not tell a block's bytes.",
        ("state",),
        _tokens,
    ),
    Gauge(
        "llm_kv_cache_rank_usage_ratio",
        "Hot share of each data-parallel rank's own pool. One full rank preempts whatever the others have left.",
        ("rank",),
        _ranks,
    ),
    Gauge(
        "llm_kv_projected_peak_blocks",
        "Most hot blocks that present work and arrivals will hold within two minutes, by learned lengths. Above the "
        "pool's size: preemption is coming. Absent until twenty requests have finished.",
        (),
        _from_forecast("projected_peak_blocks"),
    ),
    Gauge(
        "llm_engine_liveness",
        "1 for what the engine's counters show: working, idle, stalled (work in flight, nothing moves), dead (a canary "
        "got no answer), unknown. Trust this over the engine's health route.",
        ("state",),
        _liveness,
    ),
    Gauge(
        "llm_engine_quiet_seconds",
        "Seconds since a counter of the engine last moved. Normal while idle; with requests running, a hang.",
        (),
        _quiet,
    ),
    Gauge(
        "llm_request_arrivals_per_second",
        "Requests that came in, over the last minute.",
        (),
        _from_service("arrivals_per_s"),
    ),
    Gauge(
        "llm_request_admissions_per_second",
        "Requests that began to run, over the last minute. Zero while requests wait: admission is blocked.",
        (),
        _from_service("admissions_per_s"),
    ),
    Gauge(
        "llm_request_finishes_per_second",
        "Requests that ended, over the last minute.",
        (),
        _from_service("finishes_per_s"),
    ),
    Gauge(
        "llm_preemptions_inferred_per_second",
        "Requests that stopped running unfinished while the queue grew, over the last minute: preemptions before the "
        "engine counts them.",
        (),
        _from_service("inferred_preemptions_per_s"),
    ),
    Gauge(
        "llm_prefix_cache_recent_hit_ratio",
        "Share of prompt tokens found in the prefix cache over the last minute. Absent without a prompt.",
        (),
        _from_service("prefix_hit_ratio"),
    ),
    Gauge(
        "llm_time_to_first_token_seconds",
        "Time to the first token over the last minute, by quantile, from the engine's histogram.",
        ("quantile",),
        _quantiles("ttft"),
    ),
    Gauge(
        "llm_inter_token_seconds",
        "Time between tokens over the last minute, by quantile, from the engine's histogram.",
        ("quantile",),
        _quantiles("inter_token"),
    ),
    Gauge(
        "llm_request_seconds",
        "Whole time of requests that ended in the last minute, by quantile, from the engine's histogram.",
        ("quantile",),
        _quantiles("end_to_end"),
    ),
    Gauge(
        "llm_device_memory_bytes",
        "Accelerator memory. engine and other: by process, where the driver tells; other is a neighbour on a shared "
        "device.",
        ("device", "state"),
        _device_memory,
    ),
    Gauge(
        "llm_device_uncorrected_ecc_errors",
        "Memory errors that could not be corrected since the driver was loaded. Any rise: replace the device.",
        ("device",),
        _from_devices("uncorrected_ecc_errors"),
    ),
    Gauge(
        "llm_device_last_xid",
        "Number of the last fault (XID) that the driver reported while the agent ran.",
        ("device",),
        _from_devices("last_xid"),
    ),
    Gauge(
        "llm_host_memory_bytes",
        "Host memory of the engine's control group: limit, and used without file pages that can be dropped.",
        ("state",),
        _host_memory,
    ),
    Gauge(
        "llm_host_memory_stall_ratio",
        "Share of the last ten seconds in which some or all (full) tasks of the group waited for memory.",
        ("kind",),
        _host_stalls,
    ),
    Gauge(
        "llm_engine_capability",
        "1 for each thing that the engine was found to offer.",
        ("capability",),
        _features,
    ),
    Gauge(
        "ullage_agent_contract_violations",
        "1 for each promise of the engine's metrics that its last answer broke. The value concerned is unknown "
        "and counts for nothing; an upgrade of the engine that renames metrics shows here first.",
        ("metric", "problem"),
        _violations,
    ),
)
"""What a fresh report says."""

COUNTERS: tuple[EngineCounter, ...] = (
    EngineCounter("llm_requests_admitted", "Requests admitted.", "admitted_total"),
    EngineCounter("llm_requests_finished", "Requests that ended with an answer.", "finished_total"),
    EngineCounter(
        "llm_preemptions",
        "Sequences that lost their KV cache to others and start over. Any rise means that the pool was full.",
        "preemptions_total",
    ),
    EngineCounter("llm_recomputed_tokens", "Tokens computed again after a preemption.", "recomputed_tokens_total"),
    EngineCounter("llm_prompt_tokens", "Prompt tokens processed.", "prompt_tokens_total"),
    EngineCounter("llm_generated_tokens", "Tokens generated.", "generated_tokens_total"),
    EngineCounter(
        "llm_prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens_total"
    ),
    EngineCounter("llm_prefix_hit_tokens", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens_total"),
)
"""Counters of the engine; `_total` is added to the names."""

ENGINE_INFO = Family(
    "llm_engine",
    "Which engine process the llm_ series are about. instance_id changes when it is replaced.",
    ("type", "instance_id", "version", "model"),
)
AGENT_INFO = Family("ullage_agent", "Version of the agent.", ("version",))
SOURCE_UP = Family(
    "ullage_agent_source_up",
    "1 if the last reading of this source succeeded, else 0. At 0 the agent holds its last sample; its log and "
    "the error of /v1/risk say why.",
    ("source",),
)
SOURCE_DURATION = Family(
    "ullage_agent_source_duration_seconds",
    "Seconds that the last reading of this source took, successful or not.",
    ("source",),
)
SAMPLE_AGE = Family(
    "ullage_agent_sample_age_seconds",
    "Age of the last good sample. Older than a few polls: the llm_ series are history, and soon absent. Absent "
    "itself before the first.",
)
CERTIFICATE_VALID = Family(
    "ullage_agent_certificate_valid",
    "0 while clients refuse the certificate of the action port, as when it has expired: nobody can act then. Absent "
    "where the port is not opened.",
)
POLLS = Family("ullage_agent_polls", "Readings of the engine by outcome.", ("outcome",))
ACTIONS = Family(
    "ullage_agent_actions",
    "Actions by outcome. Ineffective: done, but nothing was gained; Error: the engine did not answer.",
    ("action", "outcome"),
)
