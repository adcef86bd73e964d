"""The reference of all metrics, from the definitions of agent, engine and operator."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from ullage_agent import metrics as agent
from ullage_engine import metrics as engine
from ullage_engine.fake_core import FakeCore
from ullage_operator.metrics import Metrics as OperatorMetrics

HEAD = """\
# Reference: metrics

Generated from the definitions by `python docs/generate`. Base units; a value that nobody can say is absent, never zero.
`llm_kv_cache_memory_bytes{state}`, `llm_kv_cache_fragmentation_ratio{kind}` and `llm_oom_risk_score` are fixed names.
Alert rules and dashboards are in `manifests/monitoring`, runbooks in [runbooks](runbooks/README.md).
"""
Row = tuple[str, str, str, str]
"""Name, kind, labels, help."""


def page() -> str:
    """The page."""
    sections = (
        ("Agent, about the engine (`:9400/metrics`)", list(_about_engine())),
        ("Agent, about itself", list(_about_agent())),
        ("Engine (`:8000/metrics`, type ullage)", list(_engine())),
        ("Operator (`:8080/metrics`)", list(_operator())),
    )
    return "\n".join([HEAD, *(f"## {title}\n\n{_table(rows)}\n" for title, rows in sections)])


def _about_engine() -> Iterable[Row]:
    for gauge in agent.GAUGES:
        if not gauge.name.startswith("ullage_"):
            yield gauge.name, "gauge", _labels(gauge.labels), gauge.help
    for counter in agent.COUNTERS:
        yield f"{counter.name}_total", "counter", "", counter.help
    info = agent.ENGINE_INFO
    yield f"{info.name}_info", "info", _labels(info.labels), info.help


def _about_agent() -> Iterable[Row]:
    for gauge in agent.GAUGES:
        if gauge.name.startswith("ullage_"):
            yield gauge.name, "gauge", _labels(gauge.labels), gauge.help
    info = agent.AGENT_INFO
    yield f"{info.name}_info", "info", _labels(info.labels), info.help
    for family in (agent.SOURCE_UP, agent.SOURCE_DURATION, agent.SAMPLE_AGE, agent.CERTIFICATE_VALID):
        yield family.name, "gauge", _labels(family.labels), family.help
    for family in (agent.POLLS, agent.ACTIONS):
        yield f"{family.name}_total", "counter", _labels(family.labels), family.help


def _engine() -> Iterable[Row]:
    core = FakeCore()
    registry, _ = engine.make_registry(core)
    yield from _collected(
        registry.collect(), {"kv_blocks": "state", "kv_slots": "state", "http_responses": "route, status"}
    )


def _operator() -> Iterable[Row]:
    registry = CollectorRegistry()
    OperatorMetrics(registry)
    labels = {"decisions": "verdict, reason", "actions": "action, outcome", "errors": "kind", "alerts": "kind",
              "api_calls": "method, status"}  # fmt: skip
    yield from _collected(registry.collect(), labels)


def _collected(families: Iterable[Metric], known: dict[str, str]) -> Iterable[Row]:
    """Families as they are exported; labels of a family without samples are not told, so they are named here."""
    for family in sorted(families, key=lambda one: one.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        name = f"{name}_info" if family.type == "info" else name
        short = family.name.removeprefix("ullage_engine_").removeprefix("ullage_operator_")
        labels = {key for sample in family.samples for key in sample.labels if key != "le"}
        told = _labels(tuple(sorted(labels))) if labels else _labels(tuple(known.get(short, "").split(", ")))
        yield name, family.type, told, family.documentation


def _labels(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels if label)


def _table(rows: Iterable[Row]) -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {labels} | {' '.join(text.split())} |" for name, kind, labels, text in rows]
    return "\n".join(lines)
