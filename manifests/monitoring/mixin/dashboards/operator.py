"""The operator: whether it leads, what it decides, whether that helps, and what it costs."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build

from mixin.dashboards.panels import (
    NONE_WANTED,
    ONE_WANTED,
    choice,
    frame,
    heat,
    lines,
    note,
    number,
    row,
)

SCOPE = 'namespace=~"$namespace"'
RATE = "$__rate_interval"


def _in(name: str, *more: str) -> str:
    return f"ullage_operator_{name}{{{','.join((SCOPE, *more))}}}"


def _quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share:g}, sum by (le) (rate({_in(f'{histogram}_seconds_bucket')}[{RATE}])))"


def _pace(counter: str, by: str) -> str:
    return f"sum by ({by}) (rate({_in(f'{counter}_total')}[{RATE}]))"


def operator_board() -> build.Dashboard:
    """The dashboard."""
    board = frame("ullage-operator", "Ullage / Operator", "What the operator decides, whether it helps, what it costs.")
    board.with_variable(
        choice("namespace", "Namespace", "label_values(ullage_operator_leader, namespace)", everything=True)
    )
    ended = f"sum by (action, outcome) (increase({_in('actions_total')}[{RATE}])) > 0"
    board.annotation(note("Remediations", ended, "blue"))
    _now(board)
    _decisions(board)
    _cost(board)
    return board


def _now(board: build.Dashboard) -> None:
    board.with_row(row("Now")).with_panel(
        number("Leads", "Operators that decide: one.", "short", (f"sum ({_in('leader')})", "leaders"), steps=ONE_WANTED)
    ).with_panel(
        number("Services", "Kept by the leader.", "short", (f"sum ({_in('services')})", "services"))
    ).with_panel(
        number("Engines", "Whose agents are swept.", "short", (f"sum ({_in('engines')})", "engines"))
    ).with_panel(
        number(
            "Unread engines",
            "Of which nothing fresh is known.",
            "short",
            (f"sum ({_in('stale_engines')})", "engines"),
            steps=NONE_WANTED,
        )
    ).with_panel(
        number(
            "Actions in flight",
            "Disruptive ones over all services, of at most --max-disruptions.",
            "short",
            (f"sum ({_in('actions_in_flight')})", "actions"),
        )
    ).with_panel(
        number(
            "Freed in a day",
            "KV cache memory freed by evictions.",
            "bytes",
            (f"sum (increase({_in('freed_bytes_total')}[1d]))", "freed"),
        )
    )


def _decisions(board: build.Dashboard) -> None:
    board.with_row(row("Decisions")).with_panel(
        lines(
            "Decisions by reason",
            "Each sweep of a service ends in one.",
            "ops",
            (_pace("decisions", "verdict, reason"), "{{verdict}} {{reason}}"),
            stacked=True,
        )
    ).with_panel(
        lines(
            "Remediations by outcome",
            "Ended within five minutes. Ineffective: carried out, and a later reading shows no effect.",
            "short",
            (f"sum by (action, outcome) (increase({_in('actions_total')}[5m]))", "{{action}} {{outcome}}"),
            stacked=True,
        )
    ).with_panel(
        lines(
            "Memory freed",
            "KV cache memory freed by evictions, per second.",
            "Bps",
            (f"sum (rate({_in('freed_bytes_total')}[{RATE}]))", "freed"),
        )
    ).with_panel(
        lines(
            "Reaction",
            "From the reading that showed the risk to the action's answer.",
            "s",
            (_quantile(0.5, "reaction"), "P50"),
            (_quantile(0.99, "reaction"), "P99"),
        )
    ).with_panel(
        lines(
            "Alerts told of",
            "By Alertmanager, per second. Ignored: about no service that is kept.",
            "ops",
            (_pace("alerts", "kind"), "{{kind}}"),
        )
    ).with_panel(
        lines(
            "Leaders and services",
            "A gap in the leaders is a time without decisions.",
            "short",
            (f"sum ({_in('leader')})", "leaders"),
            (f"sum ({_in('services')})", "services"),
            (f"sum ({_in('engines')})", "engines"),
        )
    )


def _cost(board: build.Dashboard) -> None:
    board.with_row(row("Cost")).with_panel(
        heat(
            "Time of a sweep",
            "One service's agents read, decided on and acted on.",
            "s",
            f"sum by (le) (rate({_in('sweep_seconds_bucket')}[{RATE}]))",
        )
    ).with_panel(
        lines(
            "Sweeps and reconciles",
            "P99 of each.",
            "s",
            (_quantile(0.99, "sweep"), "sweep"),
            (_quantile(0.99, "reconcile"), "reconcile"),
        )
    ).with_panel(
        lines(
            "Calls to the API server",
            "By method and status; 0: no answer.",
            "reqps",
            (_pace("api_calls", "method, status"), "{{method}} {{status}}"),
            stacked=True,
        )
    ).with_panel(
        lines(
            "Failed rounds",
            "invalid: an object's own fault, told in its status; cluster: the API server; unexpected: a defect.",
            "ops",
            (f"{_pace('errors', 'kind')} or vector(0)", "{{kind}}"),
        )
    )
