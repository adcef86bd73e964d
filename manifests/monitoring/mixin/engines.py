"""Rules about engines, from what their agents and the engines themselves export. Any engine type, operator or not.

Pressure is hot use: blocks that live sequences hold. Reclaimable prefix cache fills the rest of a healthy pool.
"""

from __future__ import annotations

from mixin.parts import ENGINE, SERVICE, WHO, Alert, Group, Record, RuleFile, risen

HISTOGRAMS = (
    "ullage_engine_request_seconds",
    "vllm:e2e_request_latency_seconds",
    "sglang:e2e_request_latency_seconds",
)
"""Whole time of requests, as each engine names it."""
FIRST_TOKEN = (
    "ullage_engine_time_to_first_token_seconds",
    "vllm:time_to_first_token_seconds",
    "sglang:time_to_first_token_seconds",
)
BETWEEN_TOKENS = (
    "ullage_engine_inter_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds",
)

HOT = "engine:llm_kv_cache_hot:ratio"
PREEMPTIONS = "engine:llm_preemptions:rate2m"
THROUGHPUT = "service:llm_generated_tokens_loaded:rate5m"
HIT_RATIO = "service:llm_prefix_hit:ratio_rate15m"
P99 = "service:llm_request_seconds:p99_5m"
MEAN = "service:llm_request_seconds:mean1h"
REQUESTS = "service:llm_requests:rate5m"


def _each(suffix: str, window: str) -> str:
    return " or ".join(f"rate({name}_{suffix}[{window}])" for name in HISTOGRAMS)


def _of_engine(expr: str) -> str:
    return f"max by ({ENGINE}) ({expr})"


_COUNTED = _of_engine("rate(llm_preemptions_total[2m])")
_INFERRED = _of_engine("llm_preemptions_inferred_per_second")
_LOST = _of_engine('llm_engine_liveness{state=~"stalled|dead"}')
_READ = _of_engine('ullage_agent_source_up{source="engine"}')
_FAILED = risen('ullage_agent_actions_total{outcome=~"Failed|Error|Unsupported"}', "15m")

RECORDS = Group(
    name="ullage-engines.records",
    rules=(
        Record(name=HOT, expr=_of_engine('llm_kv_cache_usage_ratio{state="hot"} or llm_kv_cache_rank_usage_ratio')),
        Record(name=PREEMPTIONS, expr=f"({_COUNTED} >= {_INFERRED}) or {_INFERRED} or {_COUNTED}"),
        Record(
            name=THROUGHPUT,
            expr=f"avg by ({SERVICE}) (rate(llm_generated_tokens_total[5m])"
            f" and on ({ENGINE}) (min_over_time(llm_requests_waiting[5m]) > 0))",
        ),
        Record(name=f"{THROUGHPUT}_avg1d", expr=f"avg_over_time({THROUGHPUT}[1d])"),
        Record(
            name=HIT_RATIO,
            expr=f"sum by ({SERVICE}) (rate(llm_prefix_hit_tokens_total[15m]))"
            f" / (sum by ({SERVICE}) (rate(llm_prefix_query_tokens_total[15m])) > 0)",
        ),
        Record(name=f"{HIT_RATIO}_avg1d", expr=f"avg_over_time({HIT_RATIO}[1d])"),
        Record(name=REQUESTS, expr=f"sum by ({SERVICE}) ({_each('count', '5m')})"),
        Record(
            name=P99,
            expr=f"histogram_quantile(0.99, sum by ({SERVICE}, le) ({_each('bucket', '5m')}))",
        ),
        Record(
            name=MEAN,
            expr=f"sum by ({SERVICE}) ({_each('sum', '1h')}) / (sum by ({SERVICE}) ({_each('count', '1h')}) > 0)",
        ),
    ),
)

PRESSURE = Group(
    name="ullage-engines.pressure",
    rules=(
        Alert(
            name="UllageKVCacheUsageHigh",
            expr=f"{HOT} > 0.90",
            hold="5m",
            severity="warning",
            summary=f"Live sequences hold more than 90 % of the KV cache of {WHO}.",
            description="{{ $value | humanizePercentage }} of the blocks are hot; prefix cache that can give way is "
            "not counted. New and growing requests soon have to wait, or others are preempted.",
        ),
        Alert(
            name="UllageKVCacheUsageCritical",
            expr=f"{HOT} > 0.95",
            hold="1m",
            severity="critical",
            summary=f"Live sequences hold more than 95 % of the KV cache of {WHO}.",
            description="{{ $value | humanizePercentage }} of the blocks are hot. Requests queue, and the next growth "
            "preempts a running one.",
        ),
        Alert(
            name="UllageOOMRiskHigh",
            expr=f"{_of_engine('llm_oom_risk_score')} > 85",
            hold="1m",
            severity="critical",
            summary=f"The risk of running out of KV cache is above 85 on {WHO}.",
            description="The score is {{ $value | humanize }} of 100 and remedies have not lowered it for a minute. "
            "llm_oom_risk_term_score tells which term makes it.",
        ),
        Alert(
            name="UllageKVExhaustionNear",
            expr=f'min by ({ENGINE}) (llm_kv_exhaustion_seconds{{quantile="0.5"}}) < 120',
            hold="30s",
            severity="warning",
            summary=f"The KV cache of {WHO} will be used up in less than two minutes.",
            description="At the present growth, live sequences have taken all free and reclaimable blocks in "
            "{{ $value | humanizeDuration }}.",
        ),
        Alert(
            name="UllagePreemptionStorm",
            expr=f"{PREEMPTIONS} > 5 / 60 unless on ({ENGINE}) ({PREEMPTIONS}"
            f" <= 0.2 * {_of_engine('llm_request_finishes_per_second')})",
            hold="2m",
            severity="critical",
            summary=f"{WHO} preempts requests over and over.",
            description="{{ $value | humanize }} requests per second lose their KV cache and start again: more than "
            "one for every five that finish. Work is thrown away, and latency grows without bound.",
        ),
        Alert(
            name="UllageKVCacheFragmented",
            expr=f"max by ({ENGINE}, kind) ("
            'llm_kv_cache_fragmentation_ratio{kind=~"internal|allocator"} > 0.3 '
            f'or (llm_kv_cache_fragmentation_ratio{{kind="external"}} > 0.3 and on ({ENGINE}) '
            '(llm_kv_cache_memory_bytes{state="free"} / ignoring (state) '
            'llm_kv_cache_memory_bytes{state="total"} > 0.1)))',
            hold="15m",
            severity="warning",
            summary=f"KV cache of {WHO} is lost to {{{{ $labels.kind }}}} fragmentation.",
            description="{{ $value | humanizePercentage }}, above 30 %. External fragmentation counts only while a "
            "tenth of the pool is free: a pool full of prefix cache has none left to be scattered.",
        ),
    ),
)

SERVING = Group(
    name="ullage-engines.serving",
    rules=(
        Alert(
            name="UllagePrefixHitRatioLow",
            expr=f"{HIT_RATIO} < 0.99 * {HIT_RATIO}_avg1d",
            hold="30m",
            severity="info",
            summary="Fewer prompt tokens of {{ $labels.ullage_service }} come from the prefix cache than usual.",
            description="{{ $value | humanizePercentage }} over 15 minutes, below 99 % of the day's mean. Prefill "
            "costs more; eviction or a change of the prompts is the usual cause.",
        ),
        Alert(
            name="UllageLatencyTailHigh",
            expr=f"{P99} > 2 * {MEAN} and {REQUESTS} > 0.05",
            hold="10m",
            severity="info",
            summary="The slowest requests of {{ $labels.ullage_service }} take more than twice the mean.",
            description="P99 over five minutes is {{ $value | humanizeDuration }}, against the mean of the last hour.",
        ),
        Alert(
            name="UllageThroughputLow",
            expr=f"{THROUGHPUT} < 0.8 * {THROUGHPUT}_avg1d",
            hold="10m",
            severity="warning",
            summary="Engines of {{ $labels.ullage_service }} generate under 80 % of their usual tokens while requests "
            "wait.",
            description="{{ $value | humanize }} tokens per second and engine. Only engines with a queue count, here "
            "and in the day's mean, so that little demand is no loss of throughput.",
        ),
        Alert(
            name="UllageEngineStuck",
            expr=f"{_LOST} == 1 or"
            f" ({_of_engine('llm_engine_step_age_seconds')} > 30 and {_of_engine('llm_requests_running')} > 0)",
            hold="1m",
            severity="critical",
            summary=f"The engine of {WHO} makes no progress.",
            description="Work is in flight and nothing moves, or a canary request got no answer, whatever the health "
            "route says.",
        ),
        Alert(
            name="UllageDeviceErrors",
            expr=f"max by ({ENGINE}, device) (llm_device_uncorrected_ecc_errors) > 0",
            hold="0s",
            severity="critical",
            summary=f"Accelerator {{{{ $labels.device }}}} of {WHO} has memory errors that could not be corrected.",
            description="{{ $value }} since the driver was loaded. Answers may be wrong.",
        ),
    ),
)

WATCHING = Group(
    name="ullage-engines.watching",
    rules=(
        Alert(
            name="UllageTargetDown",
            expr=f'max by ({ENGINE}) (up{{ullage_service!=""}}) == 0',
            hold="3m",
            severity="warning",
            summary=f"Prometheus cannot scrape {{{{ $labels.instance }}}} of {WHO}.",
            description="The agent or the engine does not answer, or a NetworkPolicy is in the way. Alerts about this "
            "engine are blind.",
        ),
        Alert(
            name="UllageAgentStale",
            expr=f"{_of_engine('ullage_agent_sample_age_seconds')} > 30 or {_READ} == 0",
            hold="1m",
            severity="warning",
            summary=f"The agent of {WHO} cannot read its engine.",
            description="What is known about the engine is old, and the operator takes no disruptive action on it.",
        ),
        Alert(
            name="UllageMetricContractViolated",
            expr=f"count by ({SERVICE}, metric, problem) (ullage_agent_contract_violations == 1)",
            hold="5m",
            severity="warning",
            summary="Metric {{ $labels.metric }} of {{ $labels.ullage_service }} is not what the agent expects "
            "({{ $labels.problem }}).",
            description="Engines concerned: {{ $value }}. The value counts as unknown. An upgrade of the "
            "engine that renames metrics shows like this.",
        ),
        Alert(
            name="UllageRemediationFailing",
            expr=f"sum by ({ENGINE}, action, outcome) ({_FAILED}) > 0",
            hold="0s",
            severity="warning",
            summary=f"The remedy {{{{ $labels.action }}}} on {WHO} failed.",
            description="{{ $value | humanize }} times within 15 minutes with outcome {{ $labels.outcome }}: the "
            "engine refused, or did not answer.",
        ),
        Alert(
            name="UllageAgentCertificateInvalid",
            expr=f"min by ({ENGINE}) (ullage_agent_certificate_valid) == 0",
            hold="5m",
            severity="critical",
            summary=f"Clients refuse the certificate of the agent of {WHO}.",
            description="The operator can neither read this engine nor act on it.",
        ),
    ),
)

ENGINES = RuleFile(
    name="ullage-engines",
    about="Engines and their agents: recording rules and alerts. For every installation.",
    groups=(RECORDS, PRESSURE, SERVING, WATCHING),
)
