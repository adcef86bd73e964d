"""An agent's Prometheus metrics, read back: what `top` and `doctor` show of an engine. Pure.

These names are a contract (`docs/contracts.md`, `docs/metrics.md`); whatever is absent is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMetrics:
    """One agent's word on its engine."""

    engine: str = ""
    engine_version: str = ""
    model: str = ""
    agent_version: str = ""
    risk: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes by state: total, hot, reclaimable, free."""
    tokens: dict[str, float] = field(default_factory=dict)
    """The same in token slots."""
    fragmentation: dict[str, float] = field(default_factory=dict)
    exhaustion_s: float | None = None
    """Median; None: not in sight."""
    running: float | None = None
    waiting: float | None = None
    limit_tokens: float | None = None
    """Longest prompt admitted while throttled."""
    preemptions: float | None = None
    hit_ratio: float | None = None
    liveness: str = ""
    sample_age_s: float | None = None
    certificate_valid: bool | None = None
    sources: dict[str, bool] = field(default_factory=dict)
    violations: tuple[tuple[str, str], ...] = ()
    """Metric and what is wrong with it."""

    @property
    def winner(self) -> str:
        """The term that makes the score."""
        return max(self.terms, key=lambda name: self.terms[name]) if self.terms else ""

    def share(self, state: str) -> float | None:
        """Share of the pool in a state, 0..1."""
        pool = self.memory if self.memory.get("total") else self.tokens
        total, part = pool.get("total"), pool.get(state)
        return None if not total or part is None else part / total


def read_agent(text: str) -> AgentMetrics:
    """Read a whole answer.

    Raises:
        ValueError: not the text format, or not an agent's metrics.
    """
    series: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, []).append((sample.labels, sample.value))
    if "ullage_agent_info" not in series:
        raise ValueError("these are not an agent's metrics: ullage_agent_info is missing")
    one = _One(series)
    engine = one.labels("llm_engine_info")
    return AgentMetrics(
        engine=engine.get("type", ""),
        engine_version=engine.get("version", ""),
        model=engine.get("model", ""),
        agent_version=one.labels("ullage_agent_info").get("version", ""),
        risk=one.value("llm_oom_risk_score"),
        terms=one.by("llm_oom_risk_term_score", "term"),
        memory=one.by("llm_kv_cache_memory_bytes", "state"),
        tokens=one.by("llm_kv_cache_tokens", "state"),
        fragmentation=one.by("llm_kv_cache_fragmentation_ratio", "kind"),
        exhaustion_s=one.by("llm_kv_exhaustion_seconds", "quantile").get("0.5"),
        running=one.value("llm_requests_running"),
        waiting=one.value("llm_requests_waiting"),
        limit_tokens=one.value("llm_admission_max_prompt_tokens"),
        preemptions=one.value("llm_preemptions_total"),
        hit_ratio=one.value("llm_prefix_cache_hit_ratio"),
        liveness=next(iter(one.by("llm_engine_liveness", "state")), ""),
        sample_age_s=one.value("ullage_agent_sample_age_seconds"),
        certificate_valid=None if (ok := one.value("ullage_agent_certificate_valid")) is None else ok == 1.0,
        sources={name: value == 1.0 for name, value in one.by("ullage_agent_source_up", "source").items()},
        violations=tuple(
            (labels.get("metric", ""), labels.get("problem", ""))
            for labels, value in series.get("ullage_agent_contract_violations", ())
            if value
        ),
    )


@dataclass(frozen=True, slots=True)
class _One:
    series: Mapping[str, list[tuple[Labels, float]]]

    def value(self, name: str) -> float | None:
        found = self.series.get(name)
        return found[0][1] if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        return {labels.get(label, ""): value for labels, value in self.series.get(name, ())}

    def labels(self, name: str) -> Labels:
        found = self.series.get(name)
        return found[0][0] if found else {}
