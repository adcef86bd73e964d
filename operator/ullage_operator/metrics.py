"""The operator's own Prometheus metrics: the one place where they are defined."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ullage_operator.sweep import SweepResult

SWEEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Instruments in the registry given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.services = Gauge("ullage_operator_services", "InferenceServices that are kept.", registry=registry)
        self.sweep_seconds = Histogram(
            "ullage_operator_sweep_seconds",
            "Time of one sweep over a service's agents, acting included.",
            buckets=SWEEP_BUCKETS,
            registry=registry,
        )
        self.decisions = Counter(
            "ullage_operator_decisions_total",
            "Decisions by verdict and reason.",
            ["verdict", "reason"],
            registry=registry,
        )
        self.actions = Counter(
            "ullage_operator_actions_total",
            "Remediations that ended, by action and final phase.",
            ["action", "outcome"],
            registry=registry,
        )
        self.bytes_freed = Counter(
            "ullage_operator_freed_bytes_total", "KV cache memory freed by evictions.", registry=registry
        )
        self.errors = Counter(
            "ullage_operator_errors_total",
            "Rounds that failed, by kind: invalid, cluster or unexpected.",
            ["kind"],
            registry=registry,
        )

    def count(self, result: SweepResult) -> None:
        """Take in what one sweep decided and ended."""
        decision = result.decision
        self.decisions.labels(verdict=decision.verdict, reason=decision.reason.value).inc()
        for record in result.changed_records:
            if record.final:
                self.actions.labels(action=record.spec.action, outcome=record.status.phase).inc()
                self.bytes_freed.inc(record.status.bytes_freed or 0)
