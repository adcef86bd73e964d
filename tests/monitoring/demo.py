"""Expositions of agent, engine and operator with every family in them, rendered by the programs' own definitions.

Counters rise with each scrape. It is demo data: what no machine of ours has, such as several ranks on an accelerator
with a host tier, has to be seen by dashboards, too.
"""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, generate_latest

from ullage_agent import wire
from ullage_agent.adapters.base import Reading
from ullage_agent.around import SourceState
from ullage_agent.board import Assessment, Board
from ullage_agent.clock import SystemClock
from ullage_agent.collector import make_registry
from ullage_agent.risk import Risk
from ullage_engine.metrics import HttpMetrics, StepMetrics
from ullage_engine.steps import StepStats
from ullage_operator.metrics import Metrics

BLOCKS = {"total_blocks": 1000, "hot_blocks": 880, "reclaimable_blocks": 90, "free_blocks": 30}


class DemoAgent:
    """An agent whose engine says everything that an engine can say."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._board = Board(self._clock)
        self._outcomes: dict[tuple[str, str], int] = {("evict", "Succeeded"): 0, ("throttle", "Ineffective"): 0}
        sources = {name: SourceState(ok=True, duration_s=0.01) for name in ("device", "host")}
        self._registry = make_registry(self._board, self._outcomes, stale_after_s=30.0, sources=sources)
        self._turn = 0

    def scrape(self) -> bytes:
        """The next exposition."""
        self._turn += 1
        for key in self._outcomes:
            self._outcomes[key] += 1
        self._board.publish(self._assessment(self._turn), 0.01)
        return generate_latest(self._registry)

    def _assessment(self, turn: int) -> Assessment:
        ranks = tuple(wire.Rank(name=name, total_blocks=500, hot_blocks=440) for name in ("0", "1"))
        snapshot = wire.Snapshot(
            sampled_at=self._clock.wall(),
            step_age_s=0.02,
            block_tokens=16,
            block_bytes=2_097_152,
            **BLOCKS,
            largest_free_run_blocks=12,
            allocated_slots=14_080,
            filled_slots=12_000,
            allocator_reserved_bytes=3_000_000_000,
            allocator_allocated_bytes=2_400_000_000,
            running=30,
            waiting=4,
            outstanding_blocks=200,
            admitted_total=40 + 2 * turn,
            finished_total=10 + 2 * turn,
            preemptions_total=turn,
            recomputed_tokens_total=500 * turn,
            prompt_tokens_total=4000 * turn,
            generated_tokens_total=900 * turn,
            prefix_query_tokens_total=4000 * turn,
            prefix_hit_tokens_total=2600 * turn,
            host_total_bytes=10**10,
            host_used_bytes=4 * 10**9,
            admission_max_prompt_tokens=512,
            ranks=ranks,
        )
        violations = (wire.Violation(metric="vllm:kv_cache_usage_perc", problem="renamed", detail="demo"),)
        identity = wire.EngineIdentity(type="vllm", instance="demo", version="0.32", model="demo-8b")
        return Assessment(
            reading=Reading(snapshot=snapshot, identity=identity, violations=violations),
            fragmentation=wire.Fragmentation(external=0.6, internal=0.15, allocator=0.2),
            forecast=_forecast(),
            risk=Risk(score=91.0, winner="forecast", terms={"classic": 77.0, "forecast": 91.0, "thrash": 20.0}),
            capabilities=("evict", "throttle"),
            service=_service(),
            liveness=wire.Liveness(state="working", quiet_s=0.1),
            devices=(wire.Device(index=0, total_bytes=80 * 10**9, used_bytes=74 * 10**9, uncorrected_ecc_errors=0),),
            host=wire.Host(limit_bytes=48 * 10**9, used_bytes=20 * 10**9, psi_some_avg10=0.1, psi_full_avg10=0.0),
            features=("canary",),
            began_at=self._clock.monotonic(),
        )


def _forecast() -> wire.Forecast:
    return wire.Forecast(
        exhaustion_p10_s=20.0,
        exhaustion_p50_s=45.0,
        exhaustion_p90_s=90.0,
        growth_blocks_per_s=3.0,
        demand_blocks=200,
        supply_blocks=120,
        projected_peak_blocks=1040,
        exhaustion_chance=0.6,
    )


def _service() -> wire.Service:
    quantiles = {"ttft": 0.3, "inter_token": 0.02, "end_to_end": 4.0}
    times = {f"{name}_{p}_s": s * f for name, s in quantiles.items() for p, f in (("p50", 1), ("p90", 2), ("p99", 5))}
    return wire.Service(
        window_s=60.0,
        admissions_per_s=2.0,
        arrivals_per_s=2.5,
        finishes_per_s=2.0,
        preemptions_per_s=0.2,
        inferred_preemptions_per_s=0.3,
        prefix_hit_ratio=0.65,
        **times,
    )


class DemoEngine:
    """The engine's own histograms."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._http = HttpMetrics(self._registry)
        self._steps = StepMetrics(self._registry)

    def scrape(self) -> bytes:
        """The next exposition."""
        for seconds in (0.4, 0.9, 3.0, 7.0):
            self._http.end_to_end.observe(seconds)
            self._http.first_token.observe(seconds / 10)
            self._http.inter_token.observe(seconds / 100)
        self._steps.observe(StepStats(tokens=40, sequences=12, duration_s=0.02, queued_s=(0.1,)))
        return generate_latest(self._registry)


class DemoOperator:
    """The operator's metrics while it works."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics = Metrics(self._registry)

    def scrape(self) -> bytes:
        """The next exposition."""
        metrics = self._metrics
        metrics.leader.set(1)
        for gauge, amount in ((metrics.services, 2), (metrics.engines, 3), (metrics.stale, 0), (metrics.in_flight, 1)):
            gauge.set(amount)
        metrics.decisions.labels(verdict="Act", reason="EvictColdBlocks").inc()
        metrics.actions.labels(action="evict", outcome="Succeeded").inc()
        metrics.bytes_freed.inc(5e6)
        metrics.errors.labels(kind="cluster").inc()
        metrics.api_calls.labels(method="PATCH", status="200").inc(3)
        metrics.alerts.labels(kind="firing").inc()
        for histogram in (metrics.sweep_seconds, metrics.reconcile_seconds, metrics.reaction_seconds):
            histogram.observe(0.1)
        return generate_latest(self._registry)


class DemoServer:
    """Serves each exposition under a path of its own: /agent, /engine, /operator."""

    def __init__(self) -> None:
        self._sources: dict[str, Callable[[], bytes]] = {
            "/agent": DemoAgent().scrape,
            "/engine": DemoEngine().scrape,
            "/operator": DemoOperator().scrape,
        }
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._sources))
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(sources: dict[str, Callable[[], bytes]]) -> type[BaseHTTPRequestHandler]:
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                body = sources[self.path]()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Be silent."""

    return Handler
