"""The operator's own Prometheus metrics: the one place where they are defined."""

from __future__ import annotations

from collections.abc import Hashable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ullage_operator.sweep import SweepResult

SWEEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REACTION_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)


class Metrics:
    """Instruments in the registry given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._engines: dict[Hashable, tuple[int, int]] = {}
        self._gauges(registry)
        self._counters(registry)
        self._histograms(registry)

    def _gauges(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"ullage_operator_{name}", text, registry=registry)

        self.services = gauge("services", "InferenceServices that are kept.")
        self.engines = gauge("engines", "Engines whose agents are swept.")
        self.stale = gauge("stale_engines", "Engines of which nothing fresh is known.")
        self.in_flight = gauge("actions_in_flight", "Disruptive actions in flight over all services.")
        self.leader = gauge("leader", "1 while this operator decides, 0 while another does.")

    def _counters(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ullage_operator_{name}_total", text, labels, registry=registry)

        self.decisions = counter("decisions", "Decisions by verdict and reason.", "verdict", "reason")
        self.actions = counter("actions", "Remediations that ended, by action and final phase.", "action", "outcome")
        self.bytes_freed = counter("freed_bytes", "KV cache memory freed by evictions.")
        self.errors = counter("errors", "Rounds that failed, by kind: invalid, cluster, watch or unexpected.", "kind")
        self.api_calls = counter(
            "api_calls", "Calls to the API server by method and status (0: no answer).", "method", "status"
        )
        self.alerts = counter("alerts", "Alerts told of: firing, resolved, or ignored as of no service kept.", "kind")

    def _histograms(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"ullage_operator_{name}_seconds", text, buckets=buckets, registry=registry)

        self.sweep_seconds = histogram(
            "sweep", "Time of one sweep over a service's agents, acting included.", SWEEP_BUCKETS
        )
        self.reconcile_seconds = histogram("reconcile", "Time of one pass over a service's children.", SWEEP_BUCKETS)
        self.reaction_seconds = histogram(
            "reaction", "From the reading that showed the risk to the action's answer.", REACTION_BUCKETS
        )

    def count(self, service: Hashable, result: SweepResult, *, stale: int) -> None:
        """Take in what one sweep saw, decided and ended."""
        decision = result.decision
        self._count_engines(service, (len(result.observations), stale))
        self.decisions.labels(verdict=decision.verdict, reason=decision.reason.value).inc()
        for record in result.changed_records:
            status = record.status
            if decision.verdict == "Act" and status.answered_at is not None:
                self.reaction_seconds.observe((status.answered_at - record.spec.inputs.sampled_at).total_seconds())
            if record.final:
                self.actions.labels(action=record.spec.action, outcome=status.phase).inc()
                self.bytes_freed.inc(status.bytes_freed or 0)

    def forget(self, service: Hashable) -> None:
        """A service is gone."""
        self._count_engines(service, (0, 0))
        self._engines.pop(service, None)

    def called(self, method: str, status: int | None) -> None:
        """A call to the API server ended."""
        self.api_calls.labels(method=method, status=str(status or 0)).inc()

    def _count_engines(self, service: Hashable, now: tuple[int, int]) -> None:
        before = self._engines.get(service, (0, 0))
        if now != before:
            self._engines[service] = now
            self.engines.inc(now[0] - before[0])
            self.stale.inc(now[1] - before[1])
