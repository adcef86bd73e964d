"""One InferenceService: how full, how fast, how risky, and what was done about it."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build

from mixin.dashboards.panels import (
    NEAR,
    RISK,
    USAGE,
    WASTE,
    choice,
    dial,
    frame,
    heat,
    lines,
    note,
    number,
    row,
)
from mixin.engines import BETWEEN_TOKENS, FIRST_TOKEN, HISTOGRAMS, HIT_RATIO, HOT, MEAN, P99

SERVICE = 'namespace=~"$namespace",ullage_service=~"$service"'
ENGINE = f'{SERVICE},pod=~"$pod"'
NAME = "{{pod}}"
RATE = "$__rate_interval"
MEDIAN = 'quantile="0.5"'


def _engine(metric: str, *more: str) -> str:
    return f"{metric}{{{','.join((ENGINE, *more))}}}"


def _worst(metric: str, *more: str) -> str:
    return f"max by (pod) ({_engine(metric, *more)})"


def _total(metric: str, *more: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({_engine(metric, *more)})"


def _rate(counter: str, *more: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({_engine(counter, *more)}[{RATE}]))"


def _share(metric: str, whole: str, *, by: str) -> str:
    used, limit = _engine(metric, 'state="used"'), _engine(metric, f'state="{whole}"')
    return f"max by ({by}) ({used} / ignoring (state) {limit})"


def _buckets(histograms: tuple[str, ...]) -> str:
    return " or ".join(f"rate({_engine(f'{name}_bucket')}[{RATE}])" for name in histograms)


def _quantiles(histograms: tuple[str, ...], told: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for share, name in (("0.5", "P50"), ("0.9", "P90"), ("0.99", "P99")):
        by_agent = _engine(told, f'quantile="{share}"')
        expr = f"histogram_quantile({share}, sum by (le) ({_buckets(histograms)})) or max ({by_agent})"
        found.append((expr, name))
    return found


def service_board() -> build.Dashboard:
    """The dashboard."""
    board = frame("ullage-service", "Ullage / Service", "KV cache, risk, latency and remedies of one service.")
    board.with_variable(
        choice("namespace", "Namespace", "label_values(ullage_agent_info, namespace)", everything=True)
    ).with_variable(
        choice(
            "service",
            "Service",
            'label_values(ullage_agent_info{namespace=~"$namespace"}, ullage_service)',
            everything=True,
        )
    ).with_variable(choice("pod", "Engine", f"label_values(ullage_agent_info{{{SERVICE}}}, pod)", everything=True))
    done = f"sum by (action, outcome) (increase({_engine('ullage_agent_actions_total')}[{RATE}])) > 0"
    board.annotation(note("Remedies", done, "blue"))
    _now(board)
    _cache(board)
    _risk(board)
    _latency(board)
    _requests(board)
    _remedies(board)
    return board


def _now(board: build.Dashboard) -> None:
    board.with_row(row("Now")).with_panel(
        number(
            "Risk",
            "Greatest risk of any engine, 0 to 100. Above 85 cold blocks are evicted by default.",
            "short",
            (f"max ({_engine('llm_oom_risk_score')})", "risk"),
            steps=RISK,
        )
    ).with_panel(
        dial(
            "Hot KV cache",
            "Share of blocks that live sequences hold, on the fullest engine. Prefix cache is not counted.",
            (f"max ({_engine(HOT)})", "hot"),
            steps=USAGE,
        )
    ).with_panel(
        dial(
            "Fragmentation",
            "By kind, on the worst engine. External: free blocks outside the largest free run, 1 when none is free; "
            "internal: allocated slots without a token; allocator: reserved device memory that is not in use.",
            (f"max by (kind) ({_engine('llm_kv_cache_fragmentation_ratio')})", "{{kind}}"),
            steps=WASTE,
            width=8,
        )
    ).with_panel(
        number(
            "Time to exhaustion",
            "Until live sequences have used up free and reclaimable blocks, at the present growth (median).",
            "s",
            (f"min ({_engine('llm_kv_exhaustion_seconds', MEDIAN)})", "left"),
            steps=NEAR,
            absent="not in sight",
        )
    ).with_panel(
        number(
            "Requests",
            "Being computed, and waiting.",
            "short",
            (_total("llm_requests_running"), "running"),
            (_total("llm_requests_waiting"), "waiting"),
        )
    )


def _cache(board: build.Dashboard) -> None:
    board.with_row(row("KV cache")).with_panel(
        lines(
            "Usage against throughput",
            "Hot share by engine, and tokens per second on the right axis. Throughput that falls while usage stays "
            "high is thrown-away work: look at preemptions.",
            "percentunit",
            (_worst(HOT), f"hot {NAME}"),
            (_rate("llm_generated_tokens_total"), "tokens per second"),
            top=1,
            right=("tokens.*", "short"),
        )
    ).with_panel(
        lines(
            "Memory by state",
            "Hot is held by live sequences; reclaimable is prefix cache, which gives way at once; free is unused.",
            "bytes",
            (_total("llm_kv_cache_memory_bytes", 'state!="total"', by="state"), "{{state}}"),
            stacked=True,
        )
    ).with_panel(
        lines(
            "Fragmentation",
            "The worst engine, by kind.",
            "percentunit",
            (f"max by (kind) ({_engine('llm_kv_cache_fragmentation_ratio')})", "{{kind}}"),
            top=1,
            steps=WASTE,
        )
    ).with_panel(
        lines(
            "Demand against supply",
            "Blocks that admitted and waiting requests may still ask for, and blocks that can be handed out without "
            "preempting anyone. Demand above supply is what risk is about.",
            "short",
            (_total("llm_kv_demand_blocks"), "demand"),
            (_total("llm_kv_supply_blocks"), "supply"),
        )
    )


def _risk(board: build.Dashboard) -> None:
    board.with_row(row("Risk")).with_panel(
        lines(
            "Risk by engine",
            "The greatest of the terms beside.",
            "short",
            (_worst("llm_oom_risk_score"), NAME),
            top=100,
            steps=RISK,
        )
    ).with_panel(
        lines(
            "Terms of the risk",
            "The worst engine's points by term; the highest term is the score, and the reason.",
            "short",
            (f"max by (term) ({_engine('llm_oom_risk_term_score')})", "{{term}}"),
            top=100,
        )
    )


def _latency(board: build.Dashboard) -> None:
    board.with_row(row("Latency")).with_panel(
        heat(
            "Whole time of requests",
            "How many requests ended per second, by how long they took. From the engines' own histograms.",
            "s",
            f"sum by (le) ({_buckets(HISTOGRAMS)})",
        )
    ).with_panel(
        lines(
            "P99 against the mean",
            "P99 of five minutes, and the mean of the last hour. Above twice the mean: requests are held up.",
            "s",
            (f"max ({P99}{{{SERVICE}}})", "P99"),
            (f"max ({MEAN}{{{SERVICE}}})", "mean of an hour"),
        )
    ).with_panel(
        lines(
            "Time to first token",
            "From the engines' own histograms over all chosen engines, else the agent's figure for the slowest.",
            "s",
            *_quantiles(FIRST_TOKEN, "llm_time_to_first_token_seconds"),
        )
    ).with_panel(
        lines(
            "Time between tokens",
            "From the engines' own histograms over all chosen engines, else the agent's figure for the slowest.",
            "s",
            *_quantiles(BETWEEN_TOKENS, "llm_inter_token_seconds"),
        )
    )


def _requests(board: build.Dashboard) -> None:
    board.with_row(row("Requests")).with_panel(
        lines(
            "Requests in the engines",
            "Running that falls while waiting rises and nothing finishes is preemption.",
            "short",
            (_total("llm_requests_running"), "running"),
            (_total("llm_requests_waiting"), "waiting"),
        )
    ).with_panel(
        lines(
            "Arrivals, admissions, finishes",
            "Per second. No admissions while requests wait: admission is blocked.",
            "reqps",
            (_total("llm_request_arrivals_per_second"), "arrivals"),
            (_total("llm_request_admissions_per_second"), "admissions"),
            (_total("llm_request_finishes_per_second"), "finishes"),
        )
    ).with_panel(
        lines(
            "Preemptions",
            "Sequences per second that lost their KV cache and start over, and the tokens computed again.",
            "short",
            (_rate("llm_preemptions_total"), "preemptions per second"),
            (_rate("llm_recomputed_tokens_total"), "tokens recomputed per second"),
            right=("tokens.*", "short"),
        )
    ).with_panel(
        lines(
            "Prefix cache hit ratio",
            "Share of prompt tokens found in the prefix cache, and the day's mean.",
            "percentunit",
            (f"max ({HIT_RATIO}{{{SERVICE}}})", "15 minutes"),
            (f"max ({HIT_RATIO}_avg1d{{{SERVICE}}})", "mean of a day"),
            top=1,
        )
    )


def _remedies(board: build.Dashboard) -> None:
    board.with_row(row("Remedies and health")).with_panel(
        lines(
            "Remedies",
            "Actions that the agents carried out within five minutes, by outcome.",
            "short",
            (
                f"sum by (action, outcome) (increase({_engine('ullage_agent_actions_total')}[5m]))",
                "{{action}} {{outcome}}",
            ),
            stacked=True,
        )
    ).with_panel(
        lines(
            "Engines by what they do",
            "By their counters, whatever their health routes say. Stalled and dead engines need help.",
            "short",
            (_total("llm_engine_liveness", by="state"), "{{state}}"),
            stacked=True,
        )
    ).with_panel(
        lines(
            "Memory outside the KV cache",
            "Share of accelerator memory and of the control group's limit in use. No eviction lowers it.",
            "percentunit",
            (_share("llm_device_memory_bytes", "total", by="pod, device"), "device {{device}} {{pod}}"),
            (_share("llm_host_memory_bytes", "limit", by="pod"), "host {{pod}}"),
            top=1,
        )
    ).with_panel(
        lines(
            "Age of what is known",
            "Seconds since the agent's last good reading of its engine, and metrics of engines that broke their "
            "contract.",
            "s",
            (_worst("ullage_agent_sample_age_seconds"), NAME),
            (f"count ({_engine('ullage_agent_contract_violations')}) or vector(0)", "contract violations"),
            right=("contract.*", "short"),
        )
    )
