"""Renders the board for Prometheus whenever it asks. The definitions are in `metrics.py`.

All `llm_` series disappear once the last good sample is older than `stale_after_s`: an old value looks like a
healthy flat line on a dashboard. What stays is `ullage_agent_source_up` and the sample's age.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ullage_agent import metrics
from ullage_agent.around import SourceState
from ullage_agent.board import Board
from ullage_agent.credentials import Credentials
from ullage_agent.metrics import Family, Gauge, Labels, Points
from ullage_agent.wire import EngineIdentity, RiskReport

Sources = Mapping[str, SourceState]
"""How the last reading of each source beside the engine went."""

Outcomes = Mapping[tuple[str, str], int]
"""Actions done so far, by action and outcome."""


class AgentCollector(Collector):
    """Renders one board. Used from the event loop only; never waits."""

    def __init__(
        self,
        board: Board,
        outcomes: Outcomes,
        *,
        stale_after_s: float,
        sources: Sources,
        credentials: Credentials | None,
    ) -> None:
        self._board = board
        self._outcomes = outcomes
        self._stale_after_s = stale_after_s
        self._sources = sources
        self._credentials = credentials
        self._version = version("ullage")

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not compute a report."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._about_agent()
        age = self._board.sample_age_s()
        report = self._board.report()
        if report is not None and age is not None and age <= self._stale_after_s:
            yield from _about_engine(report)

    def _about_agent(self) -> Iterator[Metric]:
        board = self._board
        up = float(board.polls_ok > 0 and board.error is None)
        yield InfoMetricFamily(metrics.AGENT_INFO.name, metrics.AGENT_INFO.help, {"version": self._version})
        others = sorted(self._sources.items())
        ups = [(("engine",), up), *(((name,), float(state.ok)) for name, state in others)]
        yield from _gauge(metrics.SOURCE_UP, ups)
        durations = [(("engine",), board.last_duration_s), *(((name,), state.duration_s) for name, state in others)]
        yield from _gauge(metrics.SOURCE_DURATION, durations)
        yield from _gauge(metrics.SAMPLE_AGE, [((), board.sample_age_s())])
        if self._credentials is not None:
            yield from _gauge(metrics.CERTIFICATE_VALID, [((), float(self._credentials.problem is None))])
        yield _counter(metrics.POLLS, {("ok",): board.polls_ok, ("failed",): board.polls_failed})
        yield _counter(metrics.ACTIONS, {(*labels,): count for labels, count in self._outcomes.items()})


def make_registry(
    board: Board,
    outcomes: Outcomes,
    *,
    stale_after_s: float,
    sources: Sources | None = None,
    credentials: Credentials | None = None,
) -> CollectorRegistry:
    """A registry of its own, so that several agents can live in one process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        AgentCollector(
            board,
            outcomes,
            stale_after_s=stale_after_s,
            sources={} if sources is None else sources,
            credentials=credentials,
        )
    )
    return registry


def _about_engine(report: RiskReport) -> Iterator[Metric]:
    yield _info(report.engine)
    for gauge in metrics.GAUGES:
        yield from _gauge(gauge, gauge.points(report))
    for counter in metrics.COUNTERS:
        number = getattr(report.snapshot, counter.attribute, None)
        if number is not None:
            yield _counter(Family(counter.name, counter.help), {(): number})


def _gauge(definition: Family | Gauge, points: Points) -> Iterator[Metric]:
    family = GaugeMetricFamily(definition.name, definition.help, labels=definition.labels)
    for values, number in points:
        if number is not None:
            family.add_metric(values, number)
    if family.samples:
        yield family


def _counter(definition: Family, counts: Mapping[Labels, int]) -> Metric:
    family = CounterMetricFamily(definition.name, definition.help, labels=definition.labels)
    for values, number in sorted(counts.items()):
        family.add_metric(values, number)
    return family


def _info(engine: EngineIdentity) -> Metric:
    values = (engine.type, engine.instance, engine.version, engine.model)
    labels = {name: text for name, text in zip(metrics.ENGINE_INFO.labels, values, strict=True) if text is not None}
    return InfoMetricFamily(metrics.ENGINE_INFO.name, metrics.ENGINE_INFO.help, labels)
