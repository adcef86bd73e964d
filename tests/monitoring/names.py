"""Metric and label names: which exist by their definitions, and which an expression uses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from ullage_agent import metrics as agent
from ullage_agent.adapters import sglang, vllm
from ullage_agent.metrics import EngineCounter, Family, Gauge
from ullage_engine import metrics as engine
from ullage_operator import metrics as operator

TARGET_LABELS = frozenset({"namespace", "pod", "instance", "job", "ullage_service", "container", "le", "quantile"})
"""Labels that scraping sets or that histograms have."""
OWN = re.compile(r"\b(?:llm|ullage|vllm|sglang|engine|service)[_:][a-zA-Z0-9_:]*")
_HISTOGRAM = ("_bucket", "_sum", "_count")
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^]]*\]|\b(?:by|on|ignoring|without|group_left)\s*\([^)]*\)')
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")


def defined() -> dict[str, frozenset[str]]:
    """Every series name that the three programs export, with its labels."""
    found: dict[str, frozenset[str]] = {}
    for family in (*agent.GAUGES, *_families()):
        found[family.name] = frozenset(family.labels)
    for name, labels in _counters():
        found[f"{name}_total"] = labels
    for info in (agent.ENGINE_INFO, agent.AGENT_INFO):
        found[f"{info.name}_info"] = frozenset(info.labels)
    found["ALERTS"] = frozenset({"alertname", "alertstate", "severity"})
    found |= _engine() | _registered(_operator())
    return found


def borrowed() -> frozenset[str]:
    """Histograms of other engines that their adapters read."""
    names = [
        name for contract in (vllm.CONTRACT, sglang.CONTRACT) for _, names in contract.histograms for name in names
    ]
    return frozenset(name + suffix for name in names for suffix in _HISTOGRAM)


def used(expr: str) -> set[str]:
    """Series of ours, or of the engines, that an expression names."""
    return set(OWN.findall(_PARTS.sub(" ", re.sub(r"\{[^}]*\}", " ", expr)))) - TARGET_LABELS


def matched(expr: str) -> Iterable[tuple[str, str]]:
    """Each series with a label that it is selected by."""
    for name, inside in _SELECTOR.findall(expr):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"(?:[^"\\]|\\.)*"', '""', inside)):
            yield name, label


def _families() -> list[Family | Gauge]:
    values = [value for value in vars(agent).values() if isinstance(value, Family)]
    counters = {agent.POLLS.name, agent.ACTIONS.name, agent.ENGINE_INFO.name, agent.AGENT_INFO.name}
    return [value for value in values if value.name not in counters]


def _counters() -> list[tuple[str, frozenset[str]]]:
    own: list[Family | EngineCounter] = [agent.POLLS, agent.ACTIONS, *agent.COUNTERS]
    return [(counter.name, frozenset(getattr(counter, "labels", ()))) for counter in own]


def _operator() -> CollectorRegistry:
    registry = CollectorRegistry()
    operator.Metrics(registry)
    return registry


def _engine() -> dict[str, frozenset[str]]:
    registry = CollectorRegistry()
    engine.StepMetrics(registry)
    engine.HttpMetrics(registry)
    plain = {engine.PREFIX + metric.name: frozenset[str]() for metric in engine.PLAIN}
    counters = {f"{engine.PREFIX}{name}_total": frozenset[str]() for name, _ in engine.COUNTERS.values()}
    labelled = {engine.PREFIX + metric.name: frozenset({metric.label}) for metric in engine.LABELLED}
    return plain | counters | labelled | _registered(registry)


def _registered(registry: CollectorRegistry) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for collector in list(registry._collector_to_names):  # the public way shows no family without a sample
        for metric in collector.describe():
            labels = frozenset(getattr(collector, "_labelnames", ()))
            suffixes = {"histogram": _HISTOGRAM, "counter": ("_total",)}.get(metric.type, ("",))
            found |= {metric.name + suffix: labels for suffix in suffixes}
    return found
