"""Every metric of the agent, defined in one place and computed from the board when Prometheus asks.

A series whose value the engine cannot say is absent, never zero. All `llm_` series disappear once the last good
sample is older than `stale_after_s`: an old value looks like a healthy flat line on a dashboard. What stays is
`ullage_agent_source_up` and the sample's age.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ullage_agent.board import Board
from ullage_agent.wire import RiskReport, Snapshot

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
        "admitted work can no longer be served. The highest one is why the score is what it is.",
        ("term",),
        lambda report: [((name,), points) for name, points in report.terms.items()],
    ),
    Gauge(
        "llm_kv_exhaustion_seconds",
        "Seconds until live sequences have used up free and reclaimable KV cache, at the present growth. "
        "quantile 0.1 is the early end of the band. Absent: not in sight.",
        ("quantile",),
        _exhaustion,
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


class AgentCollector(Collector):
    """Renders the board. Used from the event loop only; never waits."""

    def __init__(self, board: Board, outcomes: Mapping[tuple[str, str], int], *, stale_after_s: float) -> None:
        self._board = board
        self._outcomes = outcomes
        self._stale_after_s = stale_after_s
        self._version = version("ullage")

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not compute a report."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._about_agent()
        age = self._board.sample_age_s()
        report = self._board.report()
        if report is None or age is None or age > self._stale_after_s:
            return
        yield _engine_info(report)
        for gauge in GAUGES:
            yield from _gauge(gauge.name, gauge.help, gauge.labels, gauge.points(report))
        if report.snapshot is not None:
            yield from _counters(report.snapshot)
        yield from _gauge(
            "ullage_agent_contract_violations",
            "1 for each promise of the engine's metrics that its last answer broke. The value concerned is "
            "unknown and counts for nothing; an upgrade of the engine that renames metrics shows here first.",
            ("metric", "problem"),
            _violations(report),
        )

    def _about_agent(self) -> Iterator[Metric]:
        board = self._board
        yield InfoMetricFamily("ullage_agent", "Version of the agent.", {"version": self._version})
        yield from _gauge(
            "ullage_agent_source_up",
            "1 if the last reading of this source succeeded, else 0. At 0 the agent holds its last sample; "
            "see its log or the error of /v1/risk for the reason.",
            ("source",),
            [(("engine",), float(board.polls_ok > 0 and board.error is None))],
        )
        yield from _gauge(
            "ullage_agent_source_duration_seconds",
            "Seconds that the last reading of this source took, successful or not.",
            ("source",),
            [(("engine",), board.last_duration_s)],
        )
        yield from _gauge(
            "ullage_agent_sample_age_seconds",
            "Age of the last good sample. Older than a few polls: decisions on it are suspended. Absent before "
            "the first.",
            (),
            [((), board.sample_age_s())],
        )
        yield _counter(
            "ullage_agent_polls",
            "Readings of the engine by outcome.",
            ("outcome",),
            {("ok",): board.polls_ok, ("failed",): board.polls_failed},
        )
        yield _counter(
            "ullage_agent_actions",
            "Actions by outcome. Ineffective: done, but nothing was gained; Error: the engine did not answer.",
            ("action", "outcome"),
            {(action, outcome): count for (action, outcome), count in self._outcomes.items()},
        )


def make_registry(board: Board, outcomes: Mapping[tuple[str, str], int], *, stale_after_s: float) -> CollectorRegistry:
    """A registry of its own, so that several agents can live in one process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(board, outcomes, stale_after_s=stale_after_s))
    return registry


def _gauge(name: str, help_text: str, labels: Labels, points: Points) -> Iterator[Metric]:
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for values, number in points:
        if number is not None:
            family.add_metric(values, number)
    if family.samples:
        yield family


def _counter(name: str, help_text: str, labels: Labels, counts: Mapping[Labels, int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for values, number in sorted(counts.items()):
        family.add_metric(values, number)
    return family


def _counters(snapshot: Snapshot) -> Iterator[Metric]:
    for counter in COUNTERS:
        number = getattr(snapshot, counter.attribute)
        if number is not None:
            yield _counter(counter.name, counter.help, (), {(): number})


def _engine_info(report: RiskReport) -> Metric:
    engine = report.engine
    labels = {"type": engine.type, "instance_id": engine.instance, "version": engine.version, "model": engine.model}
    return InfoMetricFamily(
        "llm_engine",
        "Which engine process the llm_ series are about. instance_id changes when it is replaced.",
        {name: text for name, text in labels.items() if text is not None},
    )
