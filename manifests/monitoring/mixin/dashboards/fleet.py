"""All services: which one needs a person, and what runs where."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build

from mixin.dashboards.panels import (
    CALM,
    MANY,
    NONE_WANTED,
    RISK,
    choice,
    frame,
    heat,
    lines,
    number,
    ranking,
    row,
    rows,
)
from mixin.engines import HISTOGRAMS, HOT, PREEMPTIONS

SCOPE = 'namespace=~"$namespace"'
SERVICE = "namespace, ullage_service"
NAME = "{{namespace}}/{{ullage_service}}"
RATE = "$__rate_interval"


def _in(metric: str, *more: str) -> str:
    return f"{metric}{{{','.join((SCOPE, *more))}}}"


def _by_service(function: str, expr: str) -> str:
    return f"{function} by ({SERVICE}) ({expr})"


def fleet_board() -> build.Dashboard:
    """The dashboard."""
    board = frame("ullage-fleet", "Ullage / Fleet", "All inference services with an Ullage agent beside their engines.")
    board.with_variable(choice("namespace", "Namespace", "label_values(ullage_agent_info, namespace)", everything=True))
    _now(board)
    _services(board)
    _load(board)
    _versions(board)
    return board


def _now(board: build.Dashboard) -> None:
    alive = _in("llm_engine_liveness", 'state=~"working|idle"')
    lost = _in("llm_engine_liveness", 'state=~"stalled|dead"')
    firing = 'ALERTS{alertname=~"Ullage.+",alertstate="firing"}'
    board.with_row(row("Now")).with_panel(
        number("Engines", "Engines with an agent.", "short", (f"count ({_in('ullage_agent_info')})", "engines"))
    ).with_panel(
        number("Working or idle", "By their counters.", "short", (f"sum ({alive}) or vector(0)", "engines"))
    ).with_panel(
        number(
            "Stalled or dead",
            "Work in flight and nothing moves, or no answer to a canary.",
            "short",
            (f"sum ({lost}) or vector(0)", "engines"),
            steps=NONE_WANTED,
        )
    ).with_panel(
        number(
            "At risk",
            "Engines with a risk above 85.",
            "short",
            (f"count ({_in('llm_oom_risk_score')} > 85) or vector(0)", "engines"),
            steps=NONE_WANTED,
        )
    ).with_panel(
        number(
            "Tokens per second",
            "Generated, over all services.",
            "short",
            (f"sum (rate({_in('llm_generated_tokens_total')}[{RATE}]))", "tokens"),
            steps=CALM,
        )
    ).with_panel(
        number(
            "Alerts",
            "Ullage's alerts that fire.",
            "short",
            (f"count ({firing}) or vector(0)", "alerts"),
            steps=NONE_WANTED,
        )
    )


def _services(board: build.Dashboard) -> None:
    board.with_row(row("Services")).with_panel(
        rows(
            "Services",
            "Engines, greatest risk, greatest hot share, waiting requests and tokens per second of each service.",
            (_by_service("count", _in("ullage_agent_info")), "engines"),
            (_by_service("max", _in("llm_oom_risk_score")), "risk"),
            (_by_service("max", _in(HOT)), "hot share"),
            (_by_service("sum", _in("llm_requests_waiting")), "waiting"),
            (_by_service("sum", f"rate({_in('llm_generated_tokens_total')}[{RATE}])"), "tokens per second"),
        )
    ).with_panel(
        ranking(
            "Greatest risk",
            "Engines nearest to running out of KV cache.",
            "short",
            (f"topk({MANY}, max by (namespace, pod) ({_in('llm_oom_risk_score')}))", "{{namespace}}/{{pod}}"),
            steps=RISK,
            top=100,
        )
    ).with_panel(
        lines(
            "Risk by service",
            "The greatest of each service's engines.",
            "short",
            (_by_service("max", _in("llm_oom_risk_score")), NAME),
            top=100,
            steps=RISK,
        )
    )


def _load(board: build.Dashboard) -> None:
    buckets = " or ".join(f"rate({_in(f'{name}_bucket')}[{RATE}])" for name in HISTOGRAMS)
    board.with_row(row("Load")).with_panel(
        lines(
            "Hot KV cache by service",
            "Share of blocks that live sequences hold, on the fullest engine of each service.",
            "percentunit",
            (_by_service("max", _in(HOT)), NAME),
            top=1,
        )
    ).with_panel(
        lines(
            "KV cache memory",
            "Over all engines that tell the bytes of a block.",
            "bytes",
            (f"sum by (state) ({_memory()})", "{{state}}"),
            stacked=True,
        )
    ).with_panel(
        lines(
            "Tokens per second by service",
            "Generated tokens.",
            "short",
            (_by_service("sum", f"rate({_in('llm_generated_tokens_total')}[{RATE}])"), NAME),
            stacked=True,
        )
    ).with_panel(
        lines(
            "Waiting requests by service",
            "Requests waiting for room or for their turn.",
            "short",
            (_by_service("sum", _in("llm_requests_waiting")), NAME),
            stacked=True,
        )
    ).with_panel(
        lines(
            "Preemptions by service",
            "Requests per second that lose their KV cache and start over, counted or inferred.",
            "short",
            (_by_service("sum", _in(PREEMPTIONS)), NAME),
            stacked=True,
        )
    ).with_panel(
        heat(
            "Whole time of requests",
            "How many requests ended per second, by how long they took.",
            "s",
            f"sum by (le) ({buckets})",
        )
    )


def _memory() -> str:
    return _in("llm_kv_cache_memory_bytes", 'state!="total"')


def _versions(board: build.Dashboard) -> None:
    board.with_row(row("What runs")).with_panel(
        rows(
            "Engines by type and version",
            "As the engines say.",
            (f"count by (type, version, model) ({_in('llm_engine_info')})", "engines"),
            width=12,
        )
    ).with_panel(
        rows(
            "Agents by version",
            "More than one during an upgrade only.",
            (f"count by (version) ({_in('ullage_agent_info')})", "agents"),
            width=12,
        )
    ).with_panel(
        lines(
            "Contract violations by service",
            "Metrics of engines that are missing, renamed or out of range.",
            "short",
            (f"{_by_service('count', _in('ullage_agent_contract_violations'))} or vector(0)", NAME),
        )
    ).with_panel(
        lines(
            "Oldest knowledge by service",
            "Seconds since an agent's last good reading of its engine.",
            "s",
            (_by_service("max", _in("ullage_agent_sample_age_seconds")), NAME),
        )
    )
